"""Running a function over the leaves: at once, in place, through ties and transforms."""

import operator

import pytest
import torch
from leafwise import assert_leaves, compiled, flat, make, tied
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict
from tdnn.errors import LockedError

# -- one call for all the leaves ---------------------------------------------------------------


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.complex64]
AS_ONE = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a / b,
    lambda a, b: a**b,
    lambda a, b: abs(a),
    lambda a, b: a + 2,
    lambda a, b: a * 0.5,
    lambda a, b: a / 2,
    lambda a, b: a**2,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("act", AS_ONE)
def test_many_leaves_at_once_give_what_one_leaf_alone_gives(act, dtype, other):
    def leaf(dtype):
        return torch.tensor([1, 0, 1]).to(dtype)

    one = TensorDict({"a": leaf(dtype), "b": leaf(torch.float32)})
    two = TensorDict({"a": leaf(other), "b": leaf(torch.float64)})
    try:
        expected = {k: act(v, two[k]) for k, v in flat(one).items()}
    except (RuntimeError, NotImplementedError) as err:
        with pytest.raises(type(err)):
            act(one, two)
    else:
        assert_leaves(act(one, two), expected)


def test_a_subclass_of_tensor_is_not_passed_to_functions_that_may_not_know_it():
    class Tagged(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            assert "foreach" not in func.__name__
            return super().__torch_function__(func, types, args, kwargs)

    tree = TensorDict({"a": torch.ones(2).as_subclass(Tagged), "b": torch.ones(2)})
    result = tree + tree
    assert type(result["a"]) is Tagged
    assert type(result["b"]) is Tensor
    assert_leaves(tree.add_(1), {"a": torch.full((2,), 2.0), "b": torch.full((2,), 2.0)})


def test_parameters_give_gradients():
    params = TensorDict.from_module(nn.Linear(2, 2))
    loss = sum(leaf.sum() for leaf in flat(params * 3 + params).values())
    loss.backward()
    assert_leaves(
        TensorDict({key: leaf.grad for key, leaf in flat(params).items()}),
        {"weight": torch.full((2, 2), 4.0), "bias": torch.full((2,), 4.0)},
    )
    assert type((params * 3)["weight"]) is Tensor


# -- ties -----------------------------------------------------------------------------------------


def test_an_in_place_operation_changes_a_tied_leaf_once():
    for other in (2, torch.full((2,), 2.0), tied().mul_(2), TensorDict(tied().mul_(2).to_dict())):
        tree = tied()
        tree += other
        assert (tree == 3).all()
        assert tree["a"] is tree["b", "c"]


def test_a_tie_may_meet_two_tensors_that_are_equal_but_not_two_that_differ():
    other = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2)}, "d": torch.ones(2)}, [2])
    assert (tied().add_(other) == 2).all()
    other["b", "c"] = torch.zeros(2)
    tree = tied()
    with pytest.raises(ValueError, match=r"two different values for one tensor: 'a' and \('b',"):
        tree.add_(other)
    assert (tree == 1).all()


def test_a_tie_stays_a_tie_in_a_new_tree():
    for result in (tied() + 1, tied() + tied(), -tied(), tied() * torch.ones(1, 2)):
        assert result["a"] is result["b", "c"]
        assert result["a"] is not result["d"]


def test_a_tie_that_meets_different_values_comes_apart_in_a_new_tree():
    other = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}, "d": torch.ones(2)}, [2])
    result = tied() + other
    assert_leaves(
        result, {"a": torch.full((2,), 2.0), ("b", "c"): torch.ones(2), "d": torch.full((2,), 2.0)}
    )


def test_a_leaf_that_is_read_under_another_name_is_read_as_it_was():
    x, y = torch.ones(2), torch.full((2,), 10.0)
    tree = TensorDict({"a": x, "b": y})
    tree += TensorDict({"a": y, "b": x})
    assert_leaves(tree, {"a": torch.full((2,), 11.0), "b": torch.full((2,), 11.0)})


def test_a_tree_can_be_added_to_itself():
    tree = make()
    expected = {key: leaf * 2 for key, leaf in flat(tree).items()}
    tree += tree
    assert_leaves(tree, expected)


# -- nothing is written before everything is known to fit -----------------------------------------


def assert_untouched(tree, act, error, match):
    before = {key: leaf.detach().clone() for key, leaf in flat(tree).items()}
    with pytest.raises(error, match=match) as caught:
        act()
    assert_leaves(tree.detach(), before)
    return caught.value


def test_a_shape_that_would_change_is_refused_before_the_first_write():
    tree = TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.ones(2)}, "d": torch.ones(2)}, [2])
    other = tree.clone()
    other["b", "c"], other["d"] = torch.ones(2, 3), torch.ones(2, 1)
    message = (
        r"the shape would change: \('b', 'c'\) of shape \(2,\) with \(2, 3\); "
        r"'d' of shape \(2,\) with \(2, 1\)"
    )
    assert_untouched(tree, lambda: tree.add_(other), ValueError, message)
    wide = torch.ones(4, 2)
    assert_untouched(tree, lambda: tree.mul_(wide), ValueError, "the shape would change: 'a'")
    assert_untouched(tree, lambda: tree.lerp_(tree, wide), ValueError, "the shape would change")


def test_an_in_place_operand_may_broadcast_to_the_leaves():
    tree = TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2)}, [2])
    tree.add_(TensorDict({"a": torch.ones(1, 3), "b": torch.ones(1)}, [1]))
    tree.add_(torch.ones(1))
    tree.add_(torch.tensor(1))
    assert (tree == 4).all()


def test_a_dtype_that_cannot_hold_the_result_is_refused_before_the_first_write():
    tree = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)})
    err = assert_untouched(tree, lambda: tree.div_(2), RuntimeError, "can't be cast")
    assert err.__notes__ == [
        "at the leaf 'b', which has dtype int64 (td.apply() can treat leaves apart); "
        "nothing has been written"
    ]
    assert_untouched(tree, lambda: tree.sqrt_(), RuntimeError, "can't be cast")
    assert_untouched(tree, lambda: tree.add_(tree * 1j), RuntimeError, "can't be cast")
    ones = TensorDict({"a": torch.ones(2), "b": torch.ones(2)})
    err = assert_untouched(ones, lambda: ones.add_(1j), RuntimeError, "cast|convert")
    assert err.__notes__ == ["at the leaf 'a'; nothing has been written"]
    whole = TensorDict({"a": torch.ones(2).int(), "b": torch.ones(2).int()})
    err = assert_untouched(whole, lambda: whole.div_(2), RuntimeError, "can't be cast")
    assert err.__notes__ == ["at the leaf 'a'; nothing has been written"]
    assert_untouched(ones, lambda: ones.lerp_(ones.double(), 0.5), RuntimeError, "dtype")
    tree.add_(2)
    assert (tree == 3).all()


def test_a_leaf_on_another_device_is_refused_before_the_first_write():
    tree = TensorDict({"a": torch.ones(2), "b": torch.ones(2)})
    other = TensorDict({"a": torch.ones(2), "b": torch.ones(2, device="meta")})
    assert_untouched(tree, lambda: tree.lerp_(other, 0.5), RuntimeError, "device")
    assert_untouched(tree, lambda: tree.clamp_(other * 2, other * 3), RuntimeError, "device")


def test_a_leaf_that_requires_grad_is_refused_before_the_first_write():
    net = nn.BatchNorm1d(2)
    params = TensorDict.from_module(net)
    message = r"in place into \['weight', 'bias'\]: requires_grad is set; use torch.no_grad"
    assert_untouched(params, lambda: params.mul_(2), RuntimeError, message)
    with torch.no_grad():
        params.add_(2)
    assert (net.weight == 3).all()
    assert net.num_batches_tracked == 2


def test_an_error_while_writing_says_where():
    three = torch.ones(3)
    other = TensorDict({"a": torch.ones(2), "b": three[1:]})  # shares a part of what is written
    notes = {
        operator.imul: "some leaves may have been written",
        operator.ifloordiv: "at the leaf 'b'; leaves before it may have been written",
    }
    for op, note in notes.items():
        tree = TensorDict({"a": torch.ones(2), "b": three[:2]})
        with pytest.raises(RuntimeError, match="single memory location") as caught:
            op(tree, other)
        assert caught.value.__notes__ == [note]


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.add_(1),
        lambda td: td.zero_(),
        lambda td: td.__setitem__(0, 0),
        lambda td: td.__setitem__([0], torch.zeros(1, 2)),
        lambda td: td.__setitem__(0, td[1] * 0),
        lambda td: td.__setitem__([0], td[[1]] * 0),
        lambda td: td.__setitem__(torch.tensor([True, False]), {"a": 0.0, "b": 0.0}),
        lambda td: td.update_({"a": 0.0, "b": 0.0}),
        lambda td: td.update({"a": 0.0, "b": 0.0}, inplace=True),
        lambda td: td.apply_(torch.zeros_like),
    ],
)
@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        (torch.ones(2, 2, requires_grad=True), "require"),
        (torch.ones(2, 1).expand(2, 2), "'b'.*: elements share memory"),
        (torch.ones(2).expand(2, 2), "'b'.*: elements share memory"),
    ],
)
def test_a_leaf_that_cannot_be_written_is_told_before_another_one_is_written(write, leaf, why):
    tree = TensorDict({"a": torch.ones(2, 2), "b": leaf}, [2])
    with pytest.raises(RuntimeError, match=why):
        write(tree)
    assert (tree == 1).all()


def test_a_locked_tree_can_be_written_in_place_but_not_changed():
    tree = make().lock_()
    held = flat(tree)
    tree += 1
    assert all(flat(tree)[key] is leaf for key, leaf in held.items())
    with pytest.raises(LockedError):
        tree["new"] = torch.ones(3)


# -- transforms -----------------------------------------------------------------------------------


def test_vmap_runs_over_operators_and_methods():
    def act(one, two, value):
        one = (one + two) * 2 - value
        return (2 / one.lerp(two, 0.5)).clamp(0, 1), one == two

    one, two, value = make(0), make(1), torch.rand(3, dtype=torch.float64)
    result, same = torch.vmap(act)(one, two, value)
    for at in range(3):
        single, alike = act(one[at], two[at], value[at])
        assert_leaves(result[at], flat(single))
        assert_leaves(same[at], flat(alike))
    assert result.batch_size == (3,)


def test_vmap_writes_in_place():
    one, two = make(0), make(1)
    expected = {key: leaf + two[key] for key, leaf in flat(one).items()}
    assert_leaves(torch.vmap(lambda a, b: a.add_(b))(one, two), expected)


def test_grad_goes_through_operators():
    tree = make()

    def loss(tree):
        return sum(leaf.sum() for leaf in flat(tree * tree + 3 * tree).values())

    for result in (torch.func.grad(loss)(tree), torch.vmap(torch.func.grad(loss))(tree)):
        for key, leaf in flat(tree).items():
            torch.testing.assert_close(result[key], 2 * leaf + 3)


def test_other_values_of_the_same_shapes_do_not_trace_again():
    def act(one, two, value):
        return (one.clone().add_(two) * 2 - value).lerp(two, 0.5), one == two

    counter = CompileCounter()
    torch.compiler.reset()
    run = torch.compile(act, fullgraph=True, backend=counter)
    for _ in range(3):
        run(tied(), tied(), torch.rand(2))
    assert counter.frame_count == 1


def test_mixed_dtypes_and_ties_trace_in_place():
    @compiled
    def step(tree):
        return tree.add_(1)

    shared = torch.zeros(2)
    tree = TensorDict({"a": shared, "n": torch.tensor(0), "b": shared})
    step(tree)
    assert (tree == 1).all()


def test_values_on_the_meta_device_are_refused_in_place():
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2)})
    other = {"a": torch.ones(2), "b": torch.ones(2, device="meta")}
    for write in (td.add_, td.mul_, td.div_):
        with pytest.raises(ValueError, match=r"values for \['b'\]: they are on the meta device"):
            write(other)
    assert td["a"].tolist() == [1, 1]
