"""Operators and pointwise methods: each leaf gets what plain torch gives for it."""

import math
import operator

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict
from tdnn.errors import LockedError, MissingKeyError

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]
BITS = [operator.and_, operator.or_, operator.xor]
IN_PLACE = [
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
]
IN_PLACE_BITS = [operator.iand, operator.ior, operator.ixor]
UNARY = ["neg", "abs", "sqrt", "exp", "log", "reciprocal"]
METHODS = ["add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max"]


def make(seed=0, dtype=torch.float64):
    """Return a tree of batch size (3,) with positive values, nested twice."""
    draw = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.rand(shape, generator=draw, dtype=torch.float64).add(1).mul(4).to(dtype)

    source = {"x": leaf(3), "deep": {"y": leaf(3, 4), "deeper": {"z": leaf(3, 2, 5)}}}
    return TensorDict(source, [3])


def turned(tree):
    """Return the tree with its keys in the opposite order at every level."""
    data = {
        key: turned(value) if isinstance(value, TensorDict) else value
        for key, value in reversed(list(tree.items()))
    }
    return TensorDict(data, tree.batch_size)


def flat(tree):
    return dict(tree.items(include_nested=True, leaves_only=True))


def assert_leaves(tree, expected):
    """Check keys, dtypes and values of the leaves against a dict, exactly."""
    found = flat(tree)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)


def assert_declared(tree):
    """Check that every leaf begins with the batch size of the node that holds it."""
    for value in tree.values():
        assert value.shape[: tree.ndim] == tree.batch_size
        if isinstance(value, TensorDict):
            assert_declared(value)


def over(value, leaf):
    """Return a tensor ``(3,)`` with dims behind it so that it broadcasts to the leaf."""
    return value.reshape(3, *[1] * (leaf.ndim - 1))


# -- operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BINARY)
def test_an_operator_pairs_two_trees_by_name_in_any_order(op):
    one, two = make(0), make(1)
    assert_leaves(op(one, turned(two)), {k: op(v, two[k]) for k, v in flat(one).items()})


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("number", [2, 0.5])
def test_an_operator_takes_a_number_on_either_side(op, number):
    tree = make()
    assert_leaves(op(tree, number), {k: op(v, number) for k, v in flat(tree).items()})
    assert_leaves(op(number, tree), {k: op(number, v) for k, v in flat(tree).items()})


@pytest.mark.parametrize("op", BINARY)
def test_an_operator_aligns_a_tensor_with_the_batch_dims_on_either_side(op):
    tree, value = make(), torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64)
    assert_leaves(op(tree, value), {k: op(v, over(value, v)) for k, v in flat(tree).items()})
    assert_leaves(op(value, tree), {k: op(over(value, v), v) for k, v in flat(tree).items()})


@pytest.mark.parametrize("op", BITS)
def test_a_bit_operator_does_what_it_does_on_tensors(op):
    one, two = make(0) > 5, make(1) > 6
    mask = torch.tensor([True, False, True])
    assert_leaves(op(one, two), {k: op(v, two[k]) for k, v in flat(one).items()})
    assert_leaves(op(True, one), {k: op(True, v) for k, v in flat(one).items()})
    assert_leaves(op(one, mask), {k: op(v, over(mask, v)) for k, v in flat(one).items()})


@pytest.mark.parametrize("op", [operator.neg, operator.pos, operator.abs])
def test_a_sign_operator_does_what_it_does_on_tensors(op):
    tree = make() - 6
    assert_leaves(op(tree), {k: op(v) for k, v in flat(tree).items()})


def test_invert_turns_every_bool_around():
    tree = make() > 6
    assert_leaves(~tree, {k: ~v for k, v in flat(tree).items()})


@pytest.mark.parametrize("op", IN_PLACE + IN_PLACE_BITS)
@pytest.mark.parametrize("other", ["tree", "number", "tensor"])
def test_an_in_place_operator_writes_into_the_same_tensors(op, other):
    dtype = torch.int64 if op in IN_PLACE_BITS else torch.float64
    tree, match = make(0, dtype).lock_(), make(1, dtype)
    held = flat(tree)
    given = {"tree": turned(match), "number": 3, "tensor": torch.tensor([1, 2, 3])}[other]
    theirs = {
        key: {"tree": match[key], "number": 3, "tensor": over(torch.tensor([1, 2, 3]), leaf)}[other]
        for key, leaf in held.items()
    }
    expected = {key: op(leaf.clone(), theirs[key]) for key, leaf in held.items()}
    assert op(tree, given) is tree
    assert all(flat(tree)[key] is leaf for key, leaf in held.items())
    assert_leaves(tree, expected)


def test_a_result_keeps_batch_size_device_and_names_and_is_unlocked():
    tree = TensorDict({"a": {"b": torch.ones(3, 4)}}, [3], device="cpu", names=["time"]).lock_()
    for result in (tree + 1, tree + tree, tree == tree, -tree, 2 / tree, tree * torch.ones(3)):
        assert result.batch_size == (3,)
        assert result["a"].batch_size == (3,)
        assert result.device == torch.device("cpu")
        assert result.names == ["time"]
        assert result["a"].names == ["time"]
        assert not result.is_locked
    assert tree.is_locked


def test_operators_keep_empty_branches():
    tree = TensorDict({"a": {}, "b": torch.ones(2)}, [2])
    assert list((tree + tree).keys(True)) == ["a", "b"]
    assert list((tree + 1).keys(True)) == ["a", "b"]
    assert (TensorDict({}, [2]) + 1).batch_size == (2,)
    assert (TensorDict({}, [2]) + torch.ones(2)).batch_size == (2,)


@pytest.mark.parametrize("value", [None, "text", object()])
def test_a_strange_operand_is_unequal_and_otherwise_refused(value):
    tree = make()
    assert (tree == value) is False
    assert (tree != value) is True
    for op in (operator.add, operator.lt, operator.iadd, operator.and_):
        with pytest.raises(TypeError, match="TensorDict"):
            op(tree, value)
        with pytest.raises(TypeError, match="TensorDict"):
            op(value, tree)
    with pytest.raises(TypeError, match="a tree, a mapping, a tensor or a number, not"):
        tree.add(value)
    with pytest.raises(TypeError, match="a tree, a mapping, a tensor or a number, not"):
        tree.mul_(value)


def test_trees_are_hashed_by_identity():
    one, two = make(), make()
    assert {one: 1, two: 2}[one] == 1
    assert hash(one) != hash(two)
    assert one in [one]


def test_a_mapping_is_an_operand_paired_by_name():
    tree = make()
    factors = {"deep": {"deeper": {"z": 3}, "y": torch.full((3, 4), 2.0)}, "x": 1.0}
    expected = {
        "x": tree["x"] * 1.0,
        ("deep", "y"): tree["deep", "y"] * 2,
        ("deep", "deeper", "z"): tree["deep", "deeper", "z"] * 3,
    }
    assert_leaves(tree * factors, expected)
    assert (tree == tree.to_dict()).all()
    with pytest.raises(MissingKeyError, match=r"only the first has \['deep'\]"):
        tree == {"x": 1}  # noqa: B015  # the comparison is what is tested


def test_numpy_arrays_and_scalars_leave_the_operation_to_the_tree():
    tree, array = make(), np.array([1.0, 2.0, 3.0])
    value = torch.as_tensor(array)
    assert_leaves(array + tree, {k: over(value, v) + v for k, v in flat(tree).items()})
    assert_leaves(tree - array, {k: v - over(value, v) for k, v in flat(tree).items()})
    assert_leaves(np.float64(2) * tree, {k: 2 * v for k, v in flat(tree).items()})


# -- batch dims meet batch dims ----------------------------------------------------------------


def test_feature_dims_meet_feature_dims_as_under_vmap():
    one = TensorDict({"a": torch.rand(3), "b": torch.rand(3, 3)}, [3])
    two = TensorDict({"a": torch.rand(3, 3), "b": torch.rand(3)}, [3])
    result = one - two
    for key in ("a", "b"):
        expected = torch.vmap(torch.sub)(one[key], two[key])
        torch.testing.assert_close(result[key], expected, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [((3,), (1,)), ((1,), (3,)), ((2, 3), (3,)), ((), (2, 3))])
def test_batch_sizes_broadcast_and_the_result_says_so(sizes):
    one = TensorDict({"a": torch.rand(*sizes[0], 4), "b": {"c": torch.rand(sizes[0])}}, sizes[0])
    two = TensorDict({"a": torch.rand(*sizes[1], 4), "b": {"c": torch.rand(sizes[1])}}, sizes[1])
    size = torch.broadcast_shapes(*sizes)
    result = one + two
    assert result.batch_size == result["b"].batch_size == size
    assert_leaves(result, {"a": one["a"] + two["a"], ("b", "c"): one["b", "c"] + two["b", "c"]})


def test_a_tensor_with_more_dims_than_the_batch_size_adds_batch_dims():
    tree = TensorDict({"a": torch.rand(3, 4), "b": {"c": torch.rand(3)}}, [3], names=["time"])
    value = torch.rand(2, 3)
    result = tree * value
    assert result.batch_size == result["b"].batch_size == (2, 3)
    assert result.names == result["b"].names == [None, "time"]
    assert_leaves(result, {"a": tree["a"] * value[..., None], ("b", "c"): tree["b", "c"] * value})


def with_branch(further, named=False):
    """Return a tree of batch size (3,) whose branch has batch size ``(3, *further)``."""
    branch = TensorDict({"c": torch.rand(3, *further, *[5] * (2 - len(further)))}, [3, *further])
    return TensorDict({"b": branch}, [3], names=["time"] if named else None)


@pytest.mark.parametrize("mine", [(), (5,), (1,), (5, 5)])
@pytest.mark.parametrize("theirs", [(), (5,), (1,), (5, 5)])
def test_branches_with_batch_dims_of_their_own_keep_those_that_both_declare(mine, theirs):
    one, two = with_branch(mine, named=True), with_branch(theirs)
    result = one + two
    expected = (3, *mine) if mine == theirs else (3,)
    assert result["b"].batch_size == expected
    assert result["b"].names == ["time", *[None] * (len(expected) - 1)]
    torch.testing.assert_close(result["b", "c"], one["b", "c"] + two["b", "c"], rtol=0, atol=0)
    assert_declared(result)


def test_a_tensor_leaves_the_batch_dims_of_branches_as_they_are():
    tree, value = with_branch((4,)), torch.rand(3)
    assert (tree + value)["b"].batch_size == (3, 4)
    assert (tree + value.reshape(1, 3))["b"].batch_size == (1, 3, 4)
    expected = tree["b", "c"] + value.reshape(3, 1, 1)
    torch.testing.assert_close((tree + value)["b", "c"], expected, rtol=0, atol=0)


def test_a_tensor_without_dims_promotes_like_one_in_plain_torch():
    tree = TensorDict({"a": torch.ones(2, dtype=torch.float32), "b": torch.ones(2).int()}, [2])
    for value in (torch.tensor(2.0, dtype=torch.float64), torch.tensor(2)):
        assert_leaves(tree + value, {k: v + value for k, v in flat(tree).items()})
        assert_leaves(tree * value, {k: v * value for k, v in flat(tree).items()})
    low, high = torch.tensor(2.0, dtype=torch.float64), torch.full((1,), 3.0)
    wide = TensorDict({"a": torch.ones(2, 3)}, [2])
    assert wide.clamp(low, high)["a"].dtype == wide["a"].clamp(low, high).dtype == torch.float32


def test_batch_sizes_that_do_not_broadcast_are_named():
    with pytest.raises(ValueError, match=r"batch sizes do not broadcast: \(3,\), \(4,\)"):
        make() + torch.ones(4)
    with pytest.raises(ValueError, match=r"batch sizes do not broadcast: \(3,\), \(2,\)"):
        make() + TensorDict(dict.fromkeys(flat(make()), 1)).expand(2)


def test_an_error_of_torch_names_the_leaf():
    tree = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2, 3)}}, [2])
    other = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2, 4)}}, [2])
    with pytest.raises(RuntimeError) as caught:
        tree + other
    assert caught.value.__notes__ == ["at the leaf ('b', 'c')"]


# -- keys that differ --------------------------------------------------------------------------


def test_keys_that_differ_are_all_listed_at_every_level():
    one = TensorDict({"a": 1, "b": {"c": 1, "d": 1}, "e": {"f": 1}, "g": 1})
    two = TensorDict({"z": 1, "b": {"c": 1, "y": 1}, "e": 1, "g": {"h": 1}})
    message = (
        r"the trees differ: only the first has \['a', \('b', 'd'\)\], "
        r"only the second \['z', \('b', 'y'\)\]; "
        r"a leaf in one and a branch in the other: \['e', 'g'\]"
    )
    for act in (
        lambda: one + two,
        lambda: one == two,
        lambda: one.add_(two),
        lambda: one.lerp(one, two),
    ):
        with pytest.raises(MissingKeyError, match=message):
            act()
    assert (one == 1).all()


def test_default_intersection_drops_what_only_one_has():
    one = TensorDict({"a": 1.0, "b": {"c": 2.0, "d": 3.0}})
    two = TensorDict({"b": {"c": 10.0, "e": 3.0}, "f": 1.0})
    assert_leaves(one.add(two, default="intersection"), {("b", "c"): torch.tensor(12.0)})


@pytest.mark.parametrize("default", [5.0, torch.tensor(5.0)])
def test_a_default_value_stands_for_what_is_missing(default):
    one = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2, 3)}}, [2])
    two = TensorDict({"a": torch.ones(2), "d": torch.ones(2)}, [2])
    expected = {
        "a": torch.zeros(2),
        ("b", "c"): torch.full((2, 3), -4.0),
        "d": torch.full((2,), 4.0),
    }
    result = one.sub(two, default=default)
    assert_leaves(result, expected)
    assert result.batch_size == (2,)


def test_another_default_is_refused():
    with pytest.raises(ValueError, match="'intersection', a tensor or a number, not 'union'"):
        make().add(make(), default="union")


# -- methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNARY)
def test_a_method_without_operand_does_what_it_does_on_tensors(name):
    tree = make()
    expected = {key: getattr(torch, name)(leaf) for key, leaf in flat(tree).items()}
    assert_leaves(getattr(tree, name)(), expected)
    assert getattr(tree.lock_(), f"{name}_")() is tree
    assert_leaves(tree, expected)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_with_an_operand_does_what_it_does_on_tensors(name):
    tree, other = make(0), make(1)
    expected = {k: getattr(torch, name)(v, other[k]) for k, v in flat(tree).items()}
    assert_leaves(getattr(tree, name)(turned(other)), expected)
    assert getattr(tree.lock_(), f"{name}_")(turned(other)) is tree
    assert_leaves(tree, expected)


@pytest.mark.parametrize("name", ["add", "sub"])
def test_alpha_scales_the_other_operand(name):
    plain = getattr(torch, name)
    tree, other, value = make(0), make(1), torch.rand(3, dtype=torch.float64)
    method = getattr(tree, name)
    leaves = flat(tree).items()
    assert_leaves(method(other, alpha=3), {k: plain(v, other[k], alpha=3) for k, v in leaves})
    assert_leaves(method(2, alpha=3), {k: plain(v, 6) for k, v in leaves})
    assert_leaves(method(value, alpha=3), {k: plain(v, over(value, v), alpha=3) for k, v in leaves})
    expected = {k: plain(v, 6) for k, v in leaves}
    assert_leaves(getattr(tree, f"{name}_")(2, alpha=3), expected)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
@pytest.mark.parametrize("number", [6, 6.5])
def test_maximum_and_minimum_also_take_numbers(name, number):
    tree, other = make(0), make(1)
    plain = getattr(torch, name)
    method = getattr(tree, name)
    assert_leaves(method(other), {k: plain(v, other[k]) for k, v in flat(tree).items()})
    bound = torch.tensor(number, dtype=torch.float64)
    assert_leaves(method(number), {k: plain(v, bound) for k, v in flat(tree).items()})


def test_clamp_takes_one_bound_or_two_of_any_kind():
    tree = make()
    low, high = make(1), torch.full((3,), 7.0, dtype=torch.float64)
    for lower, upper in [(5, 6), (None, 6), (5, None), (low, low + 1), (low, 7.0), (5.0, high)]:
        expected = {}
        for key, leaf in flat(tree).items():
            lo = lower[key] if isinstance(lower, TensorDict) else lower
            hi = upper[key] if isinstance(upper, TensorDict) else upper
            hi = over(hi, leaf) if isinstance(hi, Tensor) and hi.ndim == 1 else hi
            leaf = leaf if lo is None else torch.clamp_min(leaf, lo)
            expected[key] = leaf if hi is None else torch.clamp_max(leaf, hi)
        assert_leaves(tree.clamp(lower, upper), expected)
        assert_leaves(tree.clone().clamp_(min=lower, max=upper), expected)
    for method in (tree.clamp, tree.clamp_):
        with pytest.raises(ValueError, match="a lower or an upper bound"):
            method()


@pytest.mark.parametrize("kind", ["number", "tree", "tensor"])
def test_lerp_takes_a_weight_of_any_kind(kind):
    tree, end, weights = make(0), make(1), make(2) / 8
    value = torch.rand(3, dtype=torch.float64)
    weight = {"number": 0.25, "tree": weights, "tensor": value}[kind]
    expected = {}
    for key, leaf in flat(tree).items():
        by = {"number": 0.25, "tree": weights[key], "tensor": over(value, leaf)}[kind]
        expected[key] = torch.lerp(leaf, end[key], by)
    assert_leaves(tree.lerp(end, weight), expected)
    assert tree.lerp_(turned(end), weight) is tree
    assert_leaves(tree, expected)


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_addcmul_and_addcdiv_take_trees_and_tensors(name):
    tree, one, two = make(0), make(1), torch.rand(3, dtype=torch.float64) + 1
    expected = {
        k: getattr(torch, name)(v, one[k], over(two, v), value=3) for k, v in flat(tree).items()
    }
    assert_leaves(getattr(tree, name)(turned(one), two, value=3), expected)
    assert getattr(tree, f"{name}_")(turned(one), two, value=3) is tree
    assert_leaves(tree, expected)


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


# -- ties --------------------------------------------------------------------------------------


def tied(size=2):
    shared = torch.ones(size)
    return TensorDict({"a": shared, "b": {"c": shared}, "d": torch.ones(size)}, [size])


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
    with pytest.raises(ValueError, match=r"two different values for it: 'a' and \('b', 'c'\)"):
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


# -- nothing is written before everything is known to fit ---------------------------------------


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
    assert err.__notes__ == ["at the leaf 'b'; nothing has been written"]
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
    message = r"\['weight', 'bias'\], which require grad; do it under torch.no_grad\(\)"
    assert_untouched(params, lambda: params.mul_(2), RuntimeError, message)
    with torch.no_grad():
        params.add_(2)
    assert (net.weight == 3).all()
    assert net.num_batches_tracked == 2


def test_an_error_while_writing_says_where():
    row = torch.ones(1, 2).expand(3, 2)
    notes = {
        operator.imul: "some leaves may have been written",
        operator.ifloordiv: "at the leaf 'b'; leaves before it may have been written",
    }
    for op, note in notes.items():
        tree = TensorDict({"a": torch.ones(2), "b": row})
        with pytest.raises(RuntimeError, match="single memory location") as caught:
            op(tree, 2)
        assert caught.value.__notes__ == [note]


def test_a_locked_tree_can_be_written_in_place_but_not_changed():
    tree = make().lock_()
    held = flat(tree)
    tree += 1
    assert all(flat(tree)[key] is leaf for key, leaf in held.items())
    with pytest.raises(LockedError):
        tree["new"] = torch.ones(3)


def compiled(act):
    torch.compiler.reset()
    return torch.compile(act, fullgraph=True, backend="eager")


# -- random trees ------------------------------------------------------------------------------


@given(strategies.trees(), st.data())
def test_a_random_tree_meets_another_by_name(tree, data):
    other = turned(tree.clone())
    result = tree * other + tree
    assert_leaves(result, {key: leaf * leaf + leaf for key, leaf in flat(tree).items()})
    assert_declared(result)
    assert (tree == other).all()
    names = list(flat(tree))
    one, two = (data.draw(st.sampled_from(names)) for _ in "ab") if names else (None, None)
    if one is not None and tree[one] is tree[two]:
        assert result[one] is result[two]


@given(strategies.trees(batch_size=strategies.sizes(max_dims=2)), st.data())
def test_a_random_tree_meets_a_tensor_that_broadcasts_to_its_batch_size(tree, data):
    shape = [data.draw(st.sampled_from([1, size])) for size in tree.batch_size]
    shape = [2] * data.draw(st.integers(0, 1)) + shape
    value = torch.arange(1, 1 + math.prod(shape)).reshape(shape)
    result = tree + value
    for key, leaf in flat(tree).items():
        wide = value.reshape(*shape, *[1] * (leaf.ndim - tree.ndim)) if shape else value
        torch.testing.assert_close(result[key], leaf + wide, rtol=0, atol=0)
    assert result.batch_size == torch.broadcast_shapes(tree.batch_size, shape)
    assert_declared(result)


@given(strategies.trees(dtypes=[torch.float32, torch.float64], ties=True))
def test_a_random_tree_is_written_in_place_once_per_tensor(tree):
    before = {key: leaf.clone() for key, leaf in flat(tree).items()}
    assert tree.add_(turned(tree.clone())) is tree
    assert_leaves(tree, {key: leaf * 2 for key, leaf in before.items()})


# -- transforms --------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "act",
    [
        lambda a, b, t: a + b * 2 - 1,
        lambda a, b, t: 2 - a / t,
        lambda a, b, t: (a == b, a > 5, ~(a < b) & (b != 4)),
        lambda a, b, t: a.add(b, alpha=2).clamp(1, b).maximum(6).sqrt(),
        lambda a, b, t: a.lerp(b, t).addcmul(b, t, value=2),
        lambda a, b, t: a * t.reshape(1, 3),
        lambda a, b, t: a.sub(b, default="intersection") + {"x": 1, "deep": 2 * b["deep"]},
        lambda a, b, t: (a.clone().add_(b).mul_(t).div_(2), -a),
    ],
)
def test_operators_trace_without_a_graph_break(act):
    one, two, value = make(0), make(1), torch.rand(3, dtype=torch.float64) + 1
    found = compiled(act)(one, two, value)
    expected = act(one, two, value)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for got, want in pairs:
        assert got.batch_size == want.batch_size
        assert_leaves(got, flat(want))


def test_an_in_place_operator_traces_and_writes_into_the_argument():
    @compiled
    def step(weights, target):
        weights.lerp_(target, 0.5)
        weights *= 2
        return weights

    tree, target = tied(), tied().mul_(3)
    assert step(tree, target)["a"] is tree["a"]
    assert (tree == 4).all()


def test_other_values_of_the_same_shapes_do_not_trace_again():
    def act(one, two, value):
        return (one.clone().add_(two) * 2 - value).lerp(two, 0.5), one == two

    counter = CompileCounter()
    torch.compiler.reset()
    run = torch.compile(act, fullgraph=True, backend=counter)
    for _ in range(3):
        run(tied(), tied(), torch.rand(2))
    assert counter.frame_count == 1


def test_torch_functions_call_the_methods():
    tree, other = make(0), make(1)
    value = torch.rand(3, dtype=torch.float64)
    assert_leaves(torch.add(tree, other, alpha=2), flat(tree.add(other, alpha=2)))
    assert_leaves(torch.mul(value, tree), flat(tree * value))
    assert_leaves(torch.sub(value, tree), flat(value - tree))
    assert_leaves(torch.sqrt(tree), flat(tree.sqrt()))
    assert_leaves(torch.lerp(tree, other, 0.5), flat(tree.lerp(other, 0.5)))


@pytest.mark.parametrize(("operators", "dtype"), [(BINARY, torch.float64), (BITS, torch.int64)])
def test_operators_between_a_tree_and_a_tensor_trace_on_either_side(operators, dtype):
    tree, value = make(dtype=dtype), torch.tensor([2, 3, 4]).to(dtype)

    def act(tree, value):
        return [op(tree, value) for op in operators] + [op(value, tree) for op in operators]

    for found, expected in zip(compiled(act)(tree, value), act(tree, value), strict=True):
        assert_leaves(found, flat(expected))


@pytest.mark.xfail(strict=True, reason="dynamo of torch 2.14 traces it as tree = tree + tensor")
def test_an_in_place_operator_with_a_tensor_traces_in_place():
    def act(tree, value):
        tree += value
        return tree

    tree = make()
    held = tree["x"]
    expected = held + 1
    compiled(act)(tree, torch.ones(3))
    torch.testing.assert_close(held, expected)


def test_an_in_place_method_with_a_tensor_traces_in_place():
    tree = make()
    held = tree["x"]
    expected = held + 1
    compiled(lambda a, b: a.add_(b))(tree, torch.ones(3))
    torch.testing.assert_close(held, expected)


def test_mixed_dtypes_and_ties_trace_in_place():
    @compiled
    def step(tree):
        return tree.add_(1)

    shared = torch.zeros(2)
    tree = TensorDict({"a": shared, "n": torch.tensor(0), "b": shared})
    step(tree)
    assert (tree == 1).all()
