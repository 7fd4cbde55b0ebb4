"""What a tree declares of its leaves: batch size, names, device."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import branches, flat, trees
from torch._dynamo.testing import CompileCounter

from tdnn import LazyStackedTensorDict, LockedError, TensorDict


@given(trees())
def test_every_prefix_that_all_leaves_share_can_be_declared(td):
    shapes = [leaf.shape for leaf in flat(td).values()]
    for depth in range(4):
        for size in {shape[:depth] for shape in shapes}:
            dims = len(size)
            td = td.clone(recurse=False)
            if all(shape[:dims] == size for shape in shapes):
                td.batch_size = size
                assert td.batch_size == td.shape == size
                assert td.ndim == td.batch_dims == td.dim() == td.ndimension() == dims
                assert td.numel() == size.numel()
                assert [td.size(i) for i in range(dims)] == list(td.size()) == list(size)
                assert len(td) == (size[0] if dims else 0)
            else:
                before = td.batch_size, [value.shape for value in td.values(True)]
                with pytest.raises(ValueError, match="does not fit"):
                    td.batch_size = size
                assert before == (td.batch_size, [value.shape for value in td.values(True)])


def test_a_batch_size_that_does_not_fit_names_every_leaf():
    td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(2, 3)}, "d": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"\(2,\) does not fit 'a' of shape \(3,\)") as error:
        td.batch_size = 2
    assert "'d'" not in str(error.value)
    with pytest.raises(ValueError, match=r"\('b', 'c'\) of shape \(2, 3\), 'd' of shape \(2,\)"):
        td.batch_size = [3]


def test_branches_follow_when_the_batch_size_grows_and_keep_theirs_when_it_shrinks():
    td = TensorDict({"a": {"b": torch.zeros(3, 2)}, "e": {}}, [3])
    td.batch_size = [3, 2]
    assert td["a"].batch_size == td["e"].batch_size == (3, 2)
    td.batch_size = []
    assert td["a"].batch_size == (3, 2)


@pytest.mark.parametrize(
    "size",
    [
        3,
        [3],
        (3,),
        torch.Size([3]),
        np.int64(3),
        np.array([3]),
        torch.tensor(3),
        torch.tensor([3]),
        [np.int32(3)],
        range(3, 4),
        (n for n in [3]),
    ],
    ids=str,
)
def test_a_batch_size_may_be_any_kind_of_int_or_several(size):
    td = TensorDict({}, size)
    assert type(td.batch_size) is torch.Size
    assert td.batch_size == (3,)


@pytest.mark.parametrize("size", ["ab", 3.0, [3.0], ["a"], object(), [[3]]], ids=str)
def test_anything_else_is_not_a_batch_size(size):
    with pytest.raises(TypeError, match="a batch size is an int or a sequence of ints, not"):
        TensorDict({}, size)


@pytest.mark.parametrize("kind", [list, tuple, torch.Size])
@pytest.mark.parametrize("size", [[-1], [3, -1]], ids=str)
def test_a_batch_size_is_not_negative(kind, size):
    td = TensorDict({})
    for make in (
        lambda: TensorDict({}, kind(size)),
        lambda: TensorDict({"a": {}}, kind(size)),
        lambda: td.empty(batch_size=kind(size)),
        lambda: setattr(td, "batch_size", kind(size)),
    ):
        with pytest.raises(ValueError, match=r"a batch size has no negative entries: \(.*-"):
            make()
    assert td.batch_size == ()
    with pytest.raises(ValueError, match=r"negative entries: \(-1,\)"):
        TensorDict({}, -1)


def test_sizes_that_compile_does_not_know_can_be_batch_sizes():
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def declared(x):
        return TensorDict({"x": x}, (x.shape[0], x.shape[1]))

    for rows, columns in ((2, 3), (5, 4), (4, 7)):
        assert declared(torch.zeros(rows, columns)).batch_size == (rows, columns)
    assert counter.frame_count == 1


def test_without_a_batch_size_a_tree_takes_that_of_its_source():
    source = TensorDict({"a": torch.zeros(3, 2)}, [3], device="cpu", names=["t"])
    td = TensorDict(source)
    assert (td.batch_size, td.device, td.names) == ((3,), torch.device("cpu"), ["t"])
    other = TensorDict(source, [3, 2])
    assert (other.batch_size, other.device, other.names) == ((3, 2), None, [None, None])


# -- the batch size that the entries share ---------------------------------------------------------


def shared(shapes):
    """Return the longest tuple that begins all shapes."""
    dims = itertools.takewhile(lambda ns: len(set(ns)) == 1, zip(*shapes, strict=False))
    return tuple(ns[0] for ns in dims)


@given(trees(names=True), st.none() | st.integers(0, 3))
def test_every_node_takes_the_dims_that_its_leaves_share(td, most):
    nodes = [td, *branches(td)]
    before = [node.batch_size for node in nodes]
    assert td.auto_batch_size_(most) is td
    for node, size in zip(nodes, before, strict=True):
        leaves = flat(node).values()
        expected = shared([leaf.shape for leaf in leaves])[:most] if leaves else None
        if expected is not None:
            assert node.batch_size == expected
        elif node is td:
            assert node.batch_size == size
    assert all(node.batch_size[: td.ndim] == td.batch_size for node in branches(td))
    assert td.names == [f"d{i}" if i < len(before[0]) else None for i in range(td.ndim)]


def test_branches_that_declare_enough_are_kept():
    def make():
        inner = TensorDict({"c": torch.zeros(3, 4, 5)}, [3, 4])
        return TensorDict({"a": torch.zeros(3, 4, 5), "b": inner, "e": {}}, [3])

    td = make().auto_batch_size_(1, keep_compliant_size=True)
    assert (td.batch_size, td["b"].batch_size) == ((3,), (3, 4))
    td = make().auto_batch_size_(3, keep_compliant_size=True)
    assert (td.batch_size, td["b"].batch_size) == ((3, 4, 5), (3, 4, 5))
    td = make().auto_batch_size_(1)
    assert (td.batch_size, td["b"].batch_size) == ((3,), (3,))
    td = make().auto_batch_size_(2, keep_compliant_size=True)
    assert (td.batch_size, td["b"].batch_size, td["e"].batch_size) == ((3, 4), (3, 4), (3, 4))
    td = make()
    td.auto_batch_size_(keep_compliant_size=True)
    assert (td.batch_size, td["b"].batch_size) == ((3, 4, 5), (3, 4, 5))


def test_a_locked_tree_keeps_its_batch_size():
    td = TensorDict({"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3, 4)}}, [3], lock=True)
    with pytest.raises(LockedError, match="cannot change the batch size of the tree"):
        td.auto_batch_size_()
    assert (td.batch_size, td["b"].batch_size) == ((3,), (3,))
    assert td.auto_batch_size_(1) is td
    with pytest.raises(ValueError, match="batch_dims is how many dims to declare, not -1"):
        td.auto_batch_size_(-1)


def test_a_locked_branch_keeps_its_batch_size():
    td = TensorDict({"a": {"b": torch.ones(2, 3)}, "c": {"d": {"e": torch.ones(2, 3)}}}, [2])
    td["c", "d"].lock_()
    with pytest.raises(LockedError, match="cannot change the batch size of a branch"):
        td.batch_size = [2, 3]
    assert {td.batch_size, td["a"].batch_size, td["c", "d"].batch_size} == {(2,)}
    td.batch_size = []
    assert (td.batch_size, td["c", "d"].batch_size) == ((), (2,))
    td["c", "d"].unlock_()
    td.batch_size = [2, 3]
    assert td["c", "d"].batch_size == (2, 3)


def test_a_lazy_stack_in_a_tree_keeps_its_batch_size():
    rows = [TensorDict({"x": torch.zeros(3, 4)}, [3]) for _ in range(2)]
    lazy = LazyStackedTensorDict(*rows)
    td = TensorDict({"a": torch.zeros(2, 3, 4), "lazy": lazy})
    assert td.auto_batch_size_().batch_size == (2, 3)
    assert td["lazy"] is lazy
    assert lazy.batch_size == (2, 3)
    with pytest.raises(LockedError, match="a lazy stack has no memory of its own"):
        lazy.auto_batch_size_()


def test_finding_the_batch_size_traces():
    def declare(x):
        return TensorDict({"a": x, "b": {"c": x + 1}}).auto_batch_size_()

    made = torch.compile(declare, backend="eager", fullgraph=True)(torch.zeros(2, 3))
    assert (made.batch_size, made["b"].batch_size) == ((2, 3), (2, 3))


# -- names -----------------------------------------------------------------------------------------


def test_names_reach_branches_and_leave_their_further_dims():
    td = TensorDict({"b": TensorDict({"c": torch.zeros(3, 2)}, [3, 2], names=["x", "y"])}, [3])
    assert td.names == [None]
    td.names = ["t"]
    assert (td.names, td["b"].names) == (["t"], ["t", "y"])
    td.names = None
    assert (td.names, td["b"].names) == ([None], [None, "y"])


def test_names_may_be_anything_iterable():
    assert TensorDict({}, [3, 2], names=(name for name in "ab")).names == ["a", "b"]
    assert TensorDict({}, [3, 2], names=[None, None]).names == [None, None]


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["a", "a"], []])
def test_names_are_one_for_each_dim_and_all_different(names):
    with pytest.raises(ValueError, match="cannot name 2 batch dims: one name each, no name twice"):
        TensorDict({}, [3, 2], names=names)


def test_a_name_is_a_str():
    with pytest.raises(TypeError, match=r"the name of a dim is a str or None, not as in \[3\]"):
        TensorDict({}, [3], names=[3])


def test_names_that_a_branch_cannot_take_change_nothing():
    td = TensorDict(
        {
            "a": TensorDict({"x": torch.zeros(3)}, [3]),
            "b": TensorDict({"x": torch.zeros(3, 2)}, [3, 2], names=["p", "y"]),
        },
        [3],
        names=None,
    )
    with pytest.raises(ValueError, match=r"\['y', 'y'\] cannot name 2 batch dims"):
        td.names = ["y"]
    assert (td.names, td["a"].names, td["b"].names) == ([None], [None], ["p", "y"])


def test_a_branch_that_declares_fewer_dims_takes_the_names_of_those():
    td = TensorDict({"b": {"c": torch.zeros(3, 2)}}, [3, 2])
    td["b"].batch_size = [3]
    td.names = ["x", "y"]
    assert td["b"].names == ["x"]


def named_pair(parent, branch):
    """Return a tree of two dims and a branch of three that is to be set there."""
    td = TensorDict({}, [3, 2], names=parent)
    return td, TensorDict({"x": torch.zeros(3, 2, 4)}, [3, 2, 4], names=branch)


WAYS_TO_SET = {
    "set": lambda td, branch: td.set("b", branch)["b"],
    "nested": lambda td, branch: td.set(("new", "b"), branch)["new", "b"],
    "update": lambda td, branch: td.update({"b": branch})["b"],
    "init": lambda td, branch: TensorDict({"b": branch}, td.batch_size, names=td.names)["b"],
    "keyword": lambda td, branch: TensorDict(b=branch, batch_size=[3, 2], names=td.names)["b"],
}


@pytest.mark.parametrize("way", WAYS_TO_SET)
@pytest.mark.parametrize(
    ("parent", "branch", "expected"),
    [
        (["a", "b"], None, ["a", "b", None]),
        (["a", "b"], [None, None, "w"], ["a", "b", "w"]),
        (["a", "b"], ["a", None, "w"], ["a", "b", "w"]),
        (["a", None], ["a", "v", "w"], ["a", "v", "w"]),
        ([None, "b"], [None, "b", None], [None, "b", None]),
        (None, ["u", "v", "w"], ["u", "v", "w"]),
        (None, None, [None, None, None]),
    ],
    ids=str,
)
def test_a_branch_that_is_set_takes_the_names_of_the_tree(way, parent, branch, expected):
    td, value = named_pair(parent, branch)
    before = value.names
    held = WAYS_TO_SET[way](td, value)
    assert held.names == expected
    assert held["x"] is value["x"]
    assert value.names == before


def test_a_branch_that_has_the_names_of_the_tree_is_held_as_it_is():
    td, value = named_pair(["a", "b"], ["a", "b", "w"])
    assert td.set("b", value)["b"] is value


def test_names_reach_the_branches_of_a_branch_that_is_set():
    td, value = named_pair(["a", "b"], None)
    value["deeper"] = TensorDict({"y": torch.zeros(3, 2, 4, 5)}, [3, 2, 4, 5])
    td["b"] = value
    assert td["b", "deeper"].names == ["a", "b", None, None]
    assert value["deeper"].names == [None] * 4
    td["e"] = TensorDict({"x": torch.zeros(3, 2)}, [3])
    assert td["e"].names == ["a", "b"]


@pytest.mark.parametrize("way", WAYS_TO_SET)
@pytest.mark.parametrize(
    ("parent", "branch"),
    [
        (["a", "b"], ["u", "b", None]),
        (["a", "b"], ["b", "a", None]),
        (["a", "b"], [None, None, "a"]),
        (["w", None], [None, None, "w"]),
    ],
    ids=str,
)
def test_a_branch_with_other_names_is_refused(way, parent, branch):
    td, value = named_pair(parent, branch)
    with pytest.raises(
        ValueError, match=r"'b'\)?: its dims are named .*, the tree's .*; set its \.n"
    ):
        WAYS_TO_SET[way](td, value)
    assert td.is_empty()
    assert value.names == branch


def test_all_branches_with_other_names_are_listed():
    td, value = named_pair(["a", "b"], None)
    for key, names in (("p", ["u", None]), ("q", ["a", "b"]), ("r", ["b", None])):
        value.set(key, TensorDict({}, [3, 2, 4], names=[*names, None]))
    with pytest.raises(
        ValueError, match=r"cannot set \('b', 'p'\): .*; \('b', 'r'\): .*"
    ) as caught:
        td["b"] = value
    assert "'q'" not in str(caught.value)


def test_names_given_for_a_tree_replace_those_it_has():
    td = TensorDict({}, [3], names=["t"])
    td["b"] = TensorDict({"x": torch.zeros(3, 2)}, [3, 2], names=["t", "y"])
    made = TensorDict(td, names=["s"])
    assert (made.names, made["b"].names) == (["s"], ["s", "y"])
    assert (td.names, td["b"].names) == (["t"], ["t", "y"])


def test_setting_a_branch_in_a_tree_with_names_traces():
    def fill(x):
        td = TensorDict({}, [3], names=["t"])
        td["b"] = TensorDict({"x": x}, [3, 2])
        return td["b"]

    made = torch.compile(fill, backend="eager", fullgraph=True)(torch.ones(3, 2))
    assert made.names == ["t", None]


def test_names_follow_the_batch_size():
    td = TensorDict({"a": torch.zeros(3, 2, 4)}, [3, 2], names=["x", "y"])
    td.batch_size = [3, 2, 4]
    assert td.names == ["x", "y", None]
    td.batch_size = [3]
    assert td.names == ["x"]


# -- device ----------------------------------------------------------------------------------------


def test_entries_are_moved_to_the_device_of_the_tree():
    td = TensorDict({"a": torch.zeros(3), "b": {"c": 1}}, device="meta")
    td["d", "e"] = TensorDict({"x": torch.zeros(2)})
    td.update({"f": np.zeros(2)})
    assert td.device == torch.device("meta")
    assert {leaf.device.type for leaf in flat(td).values()} == {"meta"}
    assert td["d", "e"].device == torch.device("meta")


def test_without_a_device_entries_stay_where_they_are():
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3, device="meta")})
    assert td.device is None
    assert [leaf.device.type for leaf in td.values()] == ["cpu", "meta"]


# -- emptiness and truth ---------------------------------------------------------------------------


@given(trees())
def test_a_tree_is_empty_without_a_leaf(td):
    assert td.is_empty() == (not flat(td))
    assert td.empty(recurse=True).is_empty()


def test_a_tree_has_no_truth_value():
    with pytest.raises(RuntimeError, match=r"no truth value; use td.is_empty\(\)"):
        bool(TensorDict({}))


@pytest.mark.parametrize("size", [(-2,), [-2], torch.Size([3, -1]), (3, -7)])
def test_a_batch_size_has_no_negative_entries_however_it_is_given(size):
    with pytest.raises(ValueError, match="no negative entries"):
        TensorDict({}, size)
