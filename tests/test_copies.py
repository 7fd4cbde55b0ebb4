"""The same tree over other tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import branches, flat, trees
from torch import nn
from torch._dynamo.testing import CompileCounter

from tdnn import LazyStackedTensorDict, TensorDict, TensorDictParams


def make():
    return TensorDict({"w": torch.ones(2), "b": {"step": torch.tensor(3), "v": torch.zeros(2)}})


def same_form(one, two):
    """Say whether two trees have the same keys and declare the same."""
    pairs = [(one, two), *zip(one.values(True), two.values(True), strict=True)]
    return list(one.keys(True)) == list(two.keys(True)) and all(
        (x.batch_size, x.names) == (y.batch_size, y.names)
        for x, y in pairs
        if isinstance(x, TensorDict)
    )


def ties(td):
    leaves = flat(td)
    return [[at for at in leaves if leaves[at] is leaf] for leaf in leaves.values()]


PER_LEAF = {
    "clone": (TensorDict.clone, torch.clone),
    "to_tensordict": (TensorDict.to_tensordict, torch.clone),
    "detach": (TensorDict.detach, torch.detach),
    "data": (lambda td: td.data, lambda x: x.data),
    "double": (TensorDict.double, lambda x: x.double()),
    "float": (TensorDict.float, lambda x: x.float()),
    "half": (TensorDict.half, lambda x: x.half()),
    "bfloat16": (TensorDict.bfloat16, lambda x: x.bfloat16()),
    "int": (TensorDict.int, lambda x: x.int()),
    "to dtype": (lambda td: td.to(torch.int16), lambda x: x.to(torch.int16)),
    "to meta": (lambda td: td.to("meta"), lambda x: x.to("meta")),
    "to tensor": (lambda td: td.to(torch.zeros(1, dtype=torch.half)), lambda x: x.half()),
}


@pytest.mark.parametrize(("ours", "theirs"), PER_LEAF.values(), ids=PER_LEAF)
@given(td=trees(names=True, dtypes=(torch.float32, torch.int64, torch.bool)), locked=st.booleans())
def test_each_leaf_gets_what_plain_torch_gives(ours, theirs, td, locked):
    if locked:
        td.lock_()
    result = ours(td)
    assert result is not td
    assert same_form(result, td)
    assert not result.is_locked
    assert ties(result) == ties(td)
    made = flat(result)
    for path, leaf in flat(td).items():
        expected = theirs(leaf)
        assert (made[path].dtype, made[path].device) == (expected.dtype, expected.device)
        if expected.device.type != "meta":
            assert torch.equal(made[path], expected)
            assert (made[path].data_ptr() == leaf.data_ptr()) == (
                expected.data_ptr() == leaf.data_ptr()
            )


@given(trees(names=True))
def test_a_shallow_copy_has_the_same_leaves_in_new_nodes(td):
    for other in (td.copy(), td.clone(recurse=False)):
        assert same_form(other, td)
        assert all(one is two for one, two in zip(flat(other).values(), flat(td).values()))  # noqa: B905  # same_form has counted them
        other["new key", "x"] = torch.zeros(td.batch_size)
        assert "new key" not in td


def test_a_clone_carries_gradients_and_detach_does_not():
    td = make()
    td["w"].requires_grad_()
    (td.clone()["w"] * 3).sum().backward()
    assert td["w"].grad.tolist() == [3, 3]
    detached = td.detach()
    assert not detached["w"].requires_grad
    detached["w"].fill_(5)
    assert td["w"].tolist() == [5, 5]


# -- to --------------------------------------------------------------------------------------------


def test_to_a_device_declares_it_everywhere_and_copies_nothing_that_is_there():
    td = make()
    moved = td.to("cpu")
    assert moved.device == moved["b"].device == torch.device("cpu")
    assert moved["w"] is td["w"]
    assert moved.to("cpu") is moved
    assert moved.cpu() is moved
    assert td.device is None


@pytest.mark.parametrize(
    "args",
    [
        ("cpu", torch.float64),
        (torch.float64, "cpu"),
        (torch.zeros((), dtype=torch.float64),),
        (TensorDict({}, device="cpu"), torch.float64),
    ],
    ids=str,
)
def test_to_takes_its_arguments_in_any_order(args):
    moved = make().to(*args)
    assert moved.device == torch.device("cpu")
    assert {leaf.dtype for leaf in flat(moved).values()} == {torch.float64}


def test_to_by_keyword():
    moved = make().to(device="meta", dtype=torch.half, non_blocking=True)
    assert (moved.device, moved["b", "v"].dtype) == (torch.device("meta"), torch.half)
    assert make().to(TensorDict({})).device is None


@pytest.mark.parametrize("arg", [None, 1.5, True, [3], {}])
def test_to_refuses_other_arguments(arg):
    with pytest.raises(TypeError, match=r"to\(\) takes a device, a dtype, a tensor or a tree, not"):
        make().to(arg)


# -- gradients -------------------------------------------------------------------------------------


def test_requires_grad_is_set_on_every_leaf_that_can_have_a_gradient():
    td = make().lock_()
    assert not td.requires_grad
    assert td.requires_grad_() is td
    assert td.requires_grad
    assert [leaf.requires_grad for leaf in flat(td).values()] == [True, False, True]
    td.requires_grad_(False)
    assert not td.requires_grad


def test_grad_is_a_tree_of_the_gradients_that_there_are():
    td = make().requires_grad_()
    assert td.grad is None
    td["w"].sum().backward()
    assert list(flat(td.grad)) == [("w",)]
    assert td.grad["w"] is td["w"].grad
    td["b", "v"].sum().backward()
    assert list(flat(td.grad)) == [("w",), ("b", "v")]


def test_zero_grad_drops_gradients_or_fills_them():
    td = make().requires_grad_()
    (td["w"] * 2).sum().backward()
    grad = td["w"].grad
    assert td.zero_grad(set_to_none=False) is td
    assert td["w"].grad is grad
    assert grad.tolist() == [0, 0]
    td.zero_grad()
    assert td["w"].grad is None


def test_zero_fills_every_leaf_in_place():
    td = make().lock_()
    leaves = flat(td)
    assert td.zero_() is td
    assert all(not leaf.any() for leaf in leaves.values())
    assert all(td[path] is leaf for path, leaf in leaves.items())


def test_data_is_outside_autograd():
    weight = nn.Parameter(torch.ones(2))
    td = TensorDict({"w": weight, "again": weight})
    data = td.data
    assert data["w"] is data["again"]
    assert not data["w"].requires_grad
    data.zero_()
    assert weight.tolist() == [0, 0]


def test_copies_trace_without_a_second_compilation():
    def run(td):
        return td.clone().double().to(torch.float32).detach().copy()

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for scale in (1, 2, 3):
        td = make() * scale
        result, expected = compiled(td), run(td)
        assert same_form(result, expected)
        assert all(map(torch.equal, flat(result).values(), flat(expected).values()))
    assert counter.frame_count == 1


class Own(TensorDict):
    __slots__ = ()


def test_to_tensordict_makes_plain_trees_of_every_kind():
    net = nn.Linear(2, 2)
    w = torch.ones(2, 3)
    rows = [TensorDict({"a": {"b": torch.ones(3)}}, [3]) for _ in range(2)]
    for tree in (
        Own({"a": {"b": w}, "c": w}, [2], "cpu", ["t"], lock=True),
        TensorDictParams(TensorDict.from_module(net)),
        LazyStackedTensorDict(*rows),
        TensorDict({"a": Own({"b": w}, [2, 3])}, [2]),
    ):
        made = tree.to_tensordict(retain_none=False)
        assert all(type(x) is TensorDict for x in (made, *branches(made)))
        assert not made.is_locked
        assert (made.batch_size, made.names, made.device) == (
            tree.batch_size,
            tree.names,
            tree.device,
        )
        assert list(made.keys(True)) == list(tree.keys(True))
        assert all(torch.equal(leaf, tree[path]) for path, leaf in flat(made).items())
        assert ties(made) == ties(tree)
        assert all(leaf is not tree[path] for path, leaf in flat(made).items())
    assert type(TensorDict({"a": Own({}, [2])}, [2]).clone()["a"]) is Own


def test_pinning_asks_each_tensor_once(monkeypatch):
    asked = []

    def pin(leaf):
        asked.append(leaf)
        return leaf.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    x = torch.ones(2)
    td = TensorDict({"a": x, "b": {"c": x}, "d": torch.zeros(2)}, [2], names=["t"], lock=True)
    found = td.pin_memory(num_threads=2)
    assert [id(leaf) for leaf in asked] == [id(x), id(td["d"])]
    assert same_form(found, td)
    assert not found.is_locked
    assert found["a"] is found["b", "c"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinning needs an accelerator")
def test_pinned_leaves_hold_the_same_values():
    td = TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3, 2)}}, [3])
    found = td.pin_memory()
    assert all(leaf.is_pinned() and torch.equal(leaf, td[at]) for at, leaf in flat(found).items())
    assert torch.equal(found.to("cuda", non_blocking=True)["a"].cpu(), td["a"])


def test_making_and_emptying_a_plain_tree_traces():
    def act(td):
        made = td.to_tensordict()
        key, last = made.popitem()
        return made.clear().set(key, last["v"] + 1)

    found = torch.compile(act, backend="eager", fullgraph=True)(make())
    assert found.to_dict().keys() == {"b"}
    assert found["b"].tolist() == [1, 1]


def test_copies_keep_the_names_of_dims_that_only_a_branch_has():
    branch = TensorDict({"b": torch.zeros(2, 3)}, [2, 3], names=[None, "time"])
    td = TensorDict({"n": branch}, [2])
    for made in (td.clone(), td.detach(), td.data, td.double(), torch.zeros_like(td)):
        assert made["n"].names == [None, "time"]


def test_switching_off_the_gradient_of_computed_leaves_changes_nothing_and_lists_them():
    leaf = torch.ones(2, requires_grad=True)
    td = TensorDict({"p": leaf, "q": leaf * 2, "b": {"r": leaf + 1}})
    with pytest.raises(RuntimeError, match=r"gradient of \['q', \('b', 'r'\)\].*use detach"):
        td.requires_grad_(False)
    assert leaf.requires_grad


def test_gradients_that_cannot_be_written_are_listed_before_one_is_filled():
    one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    one.grad, two.grad = torch.ones(2), torch.ones(1).expand(2)
    with pytest.raises(RuntimeError, match="'two'"):
        TensorDict({"one": one, "two": two}).zero_grad(set_to_none=False)
    assert one.grad.tolist() == [1, 1]


def test_filling_gradients_takes_them_out_of_the_graph_that_made_them():
    weight = torch.ones(2, requires_grad=True)
    weight.grad = weight**3
    TensorDict({"w": weight}).zero_grad(set_to_none=False)
    assert (weight.grad.tolist(), weight.grad.requires_grad) == ([0, 0], False)


def test_a_cast_keeps_the_device_of_a_branch():
    td = TensorDict({"a": TensorDict({"x": torch.ones(2)}, device="cpu"), "b": torch.ones(2)})
    for cast in (td.double(), td.to(torch.float64)):
        assert (cast.device, cast["a"].device) == (None, torch.device("cpu"))
    assert td.to("cpu")["a"].device == torch.device("cpu")
