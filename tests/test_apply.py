"""A user's function over the leaves."""

import pytest
import torch
from hypothesis import given
from pictures import state
from strategies import flat, trees
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict
from tdnn.errors import LockedError, MissingKeyError


def make():
    return TensorDict({"a": 1.0, "b": {"c": 2.0, "d": {"e": 3.0}}, "f": {}})


@given(trees(names=True))
def test_apply_calls_the_function_once_for_each_leaf_and_keeps_ties(td):
    calls = []

    def fn(leaf):
        calls.append(leaf)
        return leaf.clone()

    result = td.apply(fn, filter_empty=False)
    leaves, made = flat(td), flat(result)
    assert len(calls) == len({id(leaf) for leaf in leaves.values()})
    assert list(result.keys(True)) == list(td.keys(True))
    for path, leaf in leaves.items():
        assert torch.equal(made[path], leaf)
        assert made[path] is not leaf
        assert [at for at in leaves if leaves[at] is leaf] == [
            at for at in made if made[at] is made[path]
        ]
    for key, value in [((), td), *td.items(True)]:
        if isinstance(value, TensorDict):
            twin = result.get(key) if key else result
            assert (twin.batch_size, twin.names) == (value.batch_size, value.names)


@given(trees())
def test_named_apply_gives_the_last_part_or_the_whole_key(td):
    short, whole = [], []
    td.named_apply(lambda key, leaf: short.append((key, leaf)))
    td.named_apply(lambda key, leaf: whole.append((key, leaf)), nested_keys=True)
    leaves = flat(td)
    assert [key for key, _ in short] == [path[-1] for path in leaves]
    assert [key for key, _ in whole] == [p[0] if len(p) == 1 else p for p in leaves]
    for pairs in (short, whole):
        assert all(one is two for (_, one), two in zip(pairs, leaves.values(), strict=True))


def test_other_trees_are_paired_by_key():
    one = make()
    two = TensorDict({"f": {}, "b": {"d": {"e": 30.0}, "c": 20.0}, "a": 10.0})
    assert one.apply(lambda x, y, z: x + y + z, two, two).to_dict() == {
        "a": 21,
        "b": {"c": 42, "d": {"e": 63}},
        "f": {},
    }
    named = one.named_apply(lambda key, x, y: x if key == "c" else y, two)
    assert named["b"].to_dict() == {"c": 2, "d": {"e": 30}}


@pytest.mark.parametrize("inplace", [False, True])
def test_trees_with_other_keys_are_refused_before_the_function_is_called(inplace):
    td, called = make(), []
    before = state(td)
    other = make().exclude("a", ("b", "d")).update({"x": 1.0, "b": {"c": {}}})
    with pytest.raises(
        MissingKeyError,
        match=r"only the first has \['a', \('b', 'd'\)\]; only the second has \['x'\]; "
        r"a leaf in one and a branch in the other: \[\('b', 'c'\)\]",
    ) as caught:
        td.apply(lambda *leaves: called.append(leaves), make(), other, inplace=inplace)
    assert caught.value.__notes__[0].startswith("the second is others[1]; pass default=")
    assert (called, state(td)) == ([], before)


def test_a_leaf_that_another_tree_lacks_may_be_the_default():
    td, other = make(), TensorDict({"a": 1.0, "more": 2.0})
    filled = td.apply(lambda x, y: x if y is None else x + y, other, default=None)
    assert filled.to_dict() == {"a": 2, "b": {"c": 2, "d": {"e": 3}}, "f": {}}
    with pytest.raises(TypeError, match="apply pairs this tree with other trees, not dict"):
        td.apply(torch.add, {"a": 1})


def test_none_leaves_an_entry_out():
    td = make()
    assert td.named_apply(lambda k, x: None if k == "c" else x)["b"].to_dict() == {"d": {"e": 3}}
    assert td.named_apply(lambda k, x: None if k == "e" else x)["b"].to_dict() == {"c": 2}
    assert td.select("a").apply(lambda x: None) is None


@pytest.mark.parametrize(
    ("filter_empty", "expected"),
    [
        (None, {"a": 1, "b": {"c": 2}, "f": {}}),
        (True, {"a": 1, "b": {"c": 2}}),
        (False, {"a": 1, "b": {"c": 2, "d": {}}, "f": {}}),
    ],
)
def test_filter_empty_says_which_branches_stay(filter_empty, expected):
    result = make().named_apply(lambda k, x: None if k == "e" else x, filter_empty=filter_empty)
    assert result.to_dict() == expected
    assert TensorDict({"a": 1}).apply(lambda x: None, filter_empty=False).to_dict() == {}


def test_the_result_may_have_another_batch_size_device_and_names():
    td = TensorDict({"a": torch.ones(3, 2), "b": {"c": torch.ones(3)}}, [3], names=["t"])
    summed = td.apply(torch.sum, batch_size=[])
    assert summed.batch_size == summed["b"].batch_size == ()
    assert summed["a"] == 6
    doubled = td.apply(lambda x: torch.cat([x, x]), batch_size=[6], names=["u"], device="meta")
    assert (doubled.batch_size, doubled.names) == ((6,), ["u"])
    assert doubled.device == doubled["b"].device == doubled["b", "c"].device
    assert doubled["a"].device.type == "meta"
    before = state(td)
    with pytest.raises(
        ValueError, match=r"'a': shape \(\) does not begin with the batch size"
    ) as told:
        td.apply(torch.sum)
    assert told.value.__notes__ == ["if fn changes the batch dims, give apply(batch_size=...)"]
    assert state(td) == before


def test_the_lock_is_handed_on_only_when_asked_for():
    td = make().lock_()
    assert not td.apply(torch.neg).is_locked
    locked = td.apply(torch.neg, propagate_lock=True)
    assert locked.is_locked
    with pytest.raises(LockedError):
        locked["b", "x"] = 1
    assert not make().apply(torch.neg, propagate_lock=True).is_locked


def test_in_place_the_leaves_keep_identity_also_in_a_locked_tree():
    td = make().lock_()
    leaf = td["b", "d", "e"]
    assert td.apply(lambda x: x + 1, inplace=True) is td
    assert td.apply_(lambda x: x * 2) is td
    assert td["b", "d", "e"] is leaf
    assert td.to_dict() == {"a": 4, "b": {"c": 6, "d": {"e": 8}}, "f": {}}
    td.apply_(lambda x, y: y, make())
    assert leaf == 3
    td.named_apply(lambda key, x: None if key == "a" else x + 1, inplace=True)
    assert td.to_dict() == {"a": 1, "b": {"c": 3, "d": {"e": 4}}, "f": {}}


def test_in_place_all_results_are_known_and_fit_before_the_first_is_written():
    td = make()
    before = state(td)

    def fail(leaf):
        if leaf == 3:
            raise ZeroDivisionError
        return leaf + 1

    with pytest.raises(ZeroDivisionError):
        td.apply_(fail)
    with pytest.raises(ValueError, match=r"'e'\): cannot write shape \(2,\) into shape \(\)"):
        td.apply_(lambda leaf: torch.zeros(2) if leaf == 3 else leaf + 1)
    assert state(td) == before


def test_an_exception_of_the_function_comes_through():
    with pytest.raises(RuntimeError, match="mine"):
        make().apply(lambda leaf: (_ for _ in ()).throw(RuntimeError("mine")))


def test_the_function_may_be_called_on_branches():
    class Whole(TensorDict):
        __slots__ = ()

    td = make()
    keys = td.apply(lambda x: x.flatten_keys() if hasattr(x, "keys") else x, call_on_nested=True)
    assert keys.to_dict() == {"a": 1, "b": {"c": 2, "d.e": 3}, "f": {}}
    td["b", "d"] = Whole(td["b", "d"])
    kinds = []
    td.apply(lambda x: kinds.append(type(x)), is_leaf=lambda kind: kind is Whole)
    assert kinds == [torch.Tensor, torch.Tensor, Whole]


def test_apply_traces_without_a_second_compilation():
    def run(td):
        one = td.apply(lambda x: x * 2).named_apply(lambda k, x, y: x + y if k != "c" else None, td)
        return one.apply_(torch.neg)

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for _ in range(3):
        assert compiled(make()).to_dict() == {"a": -3, "b": {"d": {"e": -9}}, "f": {}}
    assert counter.frame_count == 1
