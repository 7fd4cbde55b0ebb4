"""Values copied, replaced and merged, all of them or none."""

import pytest
import torch
from hypothesis import given
from pictures import state
from strategies import flat, trees

from tdnn import (
    KeyConflictError,
    LockedError,
    MissingKeyError,
    TensorDict,
    TensorDictParams,
    merge_tensordicts,
)


def make():
    return TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}}, [2])


# -- copy_ and replace -----------------------------------------------------------------------------


def test_copy_underscore_writes_into_what_is_there():
    td = make().lock_()
    leaves = flat(td)
    assert td.copy_({"b": {"c": torch.tensor([3.0, 4.0])}}) is td
    assert td.copy_(TensorDict({"a": torch.tensor([1.0, 2.0])}, [2]), non_blocking=True) is td
    assert (td["a"].tolist(), td["b", "c"].tolist()) == ([1, 2], [3, 4])
    assert all(td[path] is leaf for path, leaf in leaves.items())
    with pytest.raises(MissingKeyError, match="'z' is not in the TensorDict"):
        td.copy_({"z": 1})


@given(trees(names=True))
def test_replace_gives_another_tree_and_leaves_this_one(td):
    before = state(td.lock_())
    new = torch.zeros(*td.batch_size, 7)
    made = td.replace({"new": new}, other=new)
    assert state(td) == before
    assert not made.is_locked
    assert (made.batch_size, made.names) == (td.batch_size, td.names)
    assert flat(made).keys() == flat(td).keys() | {("new",), ("other",)}
    assert all(made[path] is leaf for path, leaf in flat(td).items())
    assert made["new"] is made["other"] is new


def test_replace_merges_branches_and_takes_keywords_last():
    td = make()
    given_tree = TensorDict({"b": {"d": torch.ones(2)}, "clone": torch.ones(2)}, [2])
    made = td.replace(given_tree, b={"e": torch.ones(2)}, clone=torch.zeros(2), inplace=[1, 2])
    assert list(made["b"].keys()) == ["c", "d", "e"]
    assert made["clone"].tolist() == [0, 0]
    assert made["inplace"].tolist() == [1, 2]
    assert list(td["b"].keys()) == ["c"]
    assert list(given_tree["b"].keys()) == ["d"]


def test_replace_without_entries_gives_the_tree_itself():
    td = make()
    assert td.replace() is td.replace({}) is td.replace(None) is td.replace(TensorDict({})) is td


def test_replace_refuses_what_update_refuses():
    with pytest.raises(ValueError, match=r"key 'a': shape \(3,\) does not begin with"):
        make().replace(a=torch.zeros(3))
    with pytest.raises(TypeError, match="update takes a mapping or a tree, not int"):
        make().replace(3)
    params = TensorDictParams({"w": torch.zeros(2)})
    made = params.replace(w=torch.ones(2))
    assert type(made) is TensorDict
    assert params["w"].tolist() == [0, 0]


def test_copying_and_replacing_trace():
    def act(td, x):
        td.copy_({"a": x})
        return td.replace(b={"c": x * 2})

    td = make()
    made = torch.compile(act, backend="eager", fullgraph=True)(td, torch.tensor([1.0, 2.0]))
    assert made["b", "c"].tolist() == [2, 4]
    assert (td["a"].tolist(), td["b", "c"].tolist()) == ([1, 2], [1, 1])


# -- merge_tensordicts -----------------------------------------------------------------------------


@given(trees(batch_size=(2,)), trees(batch_size=(2,)))
def test_a_merged_tree_has_the_leaves_of_all_and_the_first_ones_count(one, two):
    mine, theirs = flat(one), flat(two)
    before = state(one), state(two)
    mixed = [
        path
        for here, there in ((one, two), (two, one))
        for path in flat(here)
        for end in range(1, len(path) + 1)
        if isinstance(there.get(path[:end]), torch.Tensor if end < len(path) else TensorDict)
    ]
    if mixed:
        with pytest.raises(KeyConflictError, match="is a leaf in one tree and a branch in another"):
            merge_tensordicts(one, two)
    else:
        made = merge_tensordicts(one, two)
        expected = {**theirs, **mine}
        assert flat(made).keys() == expected.keys()
        assert all(leaf is expected[path] for path, leaf in flat(made).items())
        assert made.batch_size == (2,)
    assert (state(one), state(two)) == before


def test_merged_branches_keep_the_batch_dims_that_they_share():
    one = TensorDict({"b": TensorDict({}, [2, 0])}, [2])
    two = TensorDict({"b": {"x": torch.zeros(2)}}, [2])
    for trees_ in ((one, two), (two, one)):
        made = merge_tensordicts(*trees_)
        assert (made.batch_size, made["b"].batch_size) == ((2,), (2,))
        assert made["b", "x"] is two["b", "x"]


def three():
    return [TensorDict({"n": {"own": i, "all": i}, "all": i, f"k{i}": i}) for i in range(3)]


def test_a_callback_combines_the_leaves_that_all_have():
    trees = three()
    trees[0]["most"] = trees[1]["most"] = torch.tensor(7)
    made = merge_tensordicts(*trees, callback_exist=lambda *values: torch.stack(values))
    assert made["all"].tolist() == made["n", "all"].tolist() == [0, 1, 2]
    assert made["most"] == 7
    assert [made[f"k{i}"] for i in range(3)] == [0, 1, 2]


def test_callbacks_can_be_given_by_key():
    made = merge_tensordicts(*three(), callback_exist={("n", "all"): lambda *values: max(values)})
    assert (made["n", "all"], made["n", "own"], made["all"]) == (2, 0, 0)
    with pytest.raises(
        MissingKeyError, match=r"callback_exist has \['k1', 'zzz'\], which not all trees have"
    ):
        merge_tensordicts(*three(), callback_exist={"k1": max, "all": max, "zzz": max})


def test_a_merged_tree_is_like_the_first_one():
    one = TensorDict({"b": {"x": torch.zeros(3, 2)}}, [3], names=["t"], device="cpu", lock=True)
    two = TensorDict({"b": TensorDict({"y": torch.zeros(3, 2)}, [3, 2]), "c": {"z": 1}})
    with pytest.raises(ValueError, match=r"'c': batch size \(3,\) does not fit 'z' of shape"):
        merge_tensordicts(one, two)
    two["c"] = {"z": torch.ones(3)}
    made = merge_tensordicts(one, two)
    assert (made.batch_size, made.names, made.device) == (one.batch_size, ["t"], one.device)
    assert (made["b"].batch_size, made["c"].batch_size, made["c"].names) == ((3,), (3,), ["t"])
    assert not made.is_locked
    assert made["b"] is not one["b"]
    with pytest.raises(LockedError):
        one["b", "y"] = torch.zeros(3)


def test_merging_takes_two_or_more_trees():
    with pytest.raises(ValueError, match="merge_tensordicts takes two or more trees, not 1"):
        merge_tensordicts(make())
    with pytest.raises(TypeError, match="merge_tensordicts takes trees, not dict"):
        merge_tensordicts(make(), {"a": 1})


def test_merging_traces():
    def merge(one, two):
        return merge_tensordicts(one, two, callback_exist=torch.add)

    made = torch.compile(merge, backend="eager", fullgraph=True)(make(), make().replace(z=[1, 2]))
    assert made["b", "c"].tolist() == [2, 2]
    assert made["z"].tolist() == [1, 2]


def test_copies_of_a_tie_are_a_tie():
    tied = torch.zeros(2)
    td = TensorDict().update({"a": tied, "b": {"c": tied}, "d": torch.ones(2)}, clone=True)
    assert td["a"] is td["b", "c"]
    assert td["a"] is not tied


def test_all_leaves_that_cannot_be_written_are_listed_and_none_is():
    td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.nn.Parameter(torch.zeros(2))}})
    td["d"] = torch.nn.Parameter(torch.zeros(2))
    new = {"a": torch.ones(2), "b": {"c": torch.ones(2)}, "d": torch.ones(2)}
    for write in (td.update_, lambda new: td.update(new, inplace=True)):
        with pytest.raises(RuntimeError, match=r"into \[\('b', 'c'\), 'd'\]: requires_grad is set"):
            write(new)
    assert td["a"].tolist() == [0, 0]
