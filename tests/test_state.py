"""A tree as a state dict: what nn.Module would make of it, and back."""

import io
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import picture, state
from strategies import flat, trees
from torch import nn

from tdnn import KeyConflictError, LockedError, TensorDict, TensorDictParams

NO_DOTS = st.text("abc_", min_size=1, max_size=3)


def make():
    return TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2, 3)}}, [2])


def test_the_state_dict_of_a_tree_of_parameters_is_that_of_the_module():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    td = TensorDict.from_module(net)
    mine, theirs = td.state_dict(prefix="p."), net.state_dict(prefix="p.")
    assert type(mine) is OrderedDict
    assert set(mine) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(mine[name], value)
        assert mine[name].data_ptr() == value.data_ptr()
        assert not mine[name].requires_grad
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    other.load_state_dict(td.state_dict())
    assert all(torch.equal(x, theirs[f"p.{name}"]) for name, x in other.state_dict().items())
    with torch.no_grad():
        other[0].weight.zero_()
    assert td.load_state_dict(other.state_dict()) is td
    assert net[0].weight.abs().sum() == 0
    assert td["0", "weight"] is net[0].weight


@given(trees(keys=NO_DOTS), st.booleans(), st.booleans())
def test_a_state_dict_brings_values_back(td, flatten, assign):
    stored = io.BytesIO()
    torch.save(td.state_dict(flatten=flatten), stored)
    stored.seek(0)
    other = td.clone()
    other.zero_()
    leaves = flat(other)
    other.load_state_dict(torch.load(stored), assign=assign)
    assert picture(other) == picture(td)
    assert all((other[path] is leaf) is not assign for path, leaf in leaves.items())


def test_the_tensors_themselves_are_kept_on_request():
    w = torch.zeros(2, requires_grad=True)
    td = TensorDict({"a": w, "b": {"c": w}})
    assert td.state_dict(keep_vars=True)["b.c"] is w
    nested = td.state_dict(flatten=False)
    assert not nested["a"].requires_grad
    assert nested["a"] is nested["b"]["c"]  # a tie stays one tensor


def test_metadata_says_what_the_nodes_declare():
    td = TensorDict({"b": TensorDict({"c": torch.zeros(2, 3)}, [2, 3])}, [2], device="cpu")
    root = {"batch_size": torch.Size([2]), "device": torch.device("cpu")}
    branch = {"batch_size": torch.Size([2, 3]), "device": td["b"].device}
    assert td.state_dict()._metadata == {"": root, "b": branch}
    assert td.state_dict(prefix="x.")._metadata == {"x": root, "x.b": branch}
    nested = td.state_dict(flatten=False)
    assert (nested._metadata, nested["b"]._metadata) == ({"": root}, {"": branch})


def test_entries_join_those_of_a_destination():
    there = nn.Linear(2, 2).state_dict(prefix="net.")
    found = make().state_dict(there, "td.")
    assert found is there
    assert list(found) == ["net.weight", "net.bias", "td.a", "td.b.c"]
    assert {"net", "td", "td.b"} <= set(found._metadata)
    before = dict(there)
    with pytest.raises(KeyConflictError, match=r"one name in the state dict: \['td.a', 'td.b.c'\]"):
        make().state_dict(there, "td.")
    assert dict(there) == before


def test_names_that_would_collide_are_all_listed():
    td = TensorDict({"a.b": 1, "a": {"b": 2, "c.d": 3, "c": {"d": 4}}})
    with pytest.raises(KeyConflictError, match=r"\['a.b', 'a.c.d'\]; rename one of each, or use"):
        td.state_dict()
    with pytest.raises(KeyConflictError, match=r"two leaves of the tree .*: \['a.b', 'a.c.d'\]"):
        td.load_state_dict({})
    other = TensorDict(td.to_dict()).zero_()
    other.load_state_dict(td.state_dict(flatten=False))
    assert picture(other) == picture(td)
    levels = TensorDict({"a.b": {"x": 1}, "a": {"b": {"y": 2}}})
    with pytest.raises(KeyConflictError, match=r"\['a.b'\]"):
        levels.state_dict()


def test_a_key_with_a_dot_is_found_by_its_name():
    td = TensorDict({"a.b": {"c": 0}})
    td.load_state_dict({"a.b.c": torch.tensor(3)})
    assert td["a.b", "c"] == 3


def test_missing_and_unknown_names_are_all_listed():
    td = make()
    before = state(td)
    found = {"a": torch.ones(2), "b.x": torch.ones(2), "y": torch.ones(2)}
    message = r"only the tree has \[\('b', 'c'\)\], only the state dict \[\('b', 'x'\), 'y'\]"
    with pytest.raises(RuntimeError, match=message):
        td.load_state_dict(found)
    with pytest.raises(RuntimeError, match=message):
        td.load_state_dict({"a": torch.ones(2), "b": {"x": 1}, "y": 1})
    assert state(td) == before
    td.load_state_dict(found, strict=False)
    assert list(td.keys(True, True)) == ["a", ("b", "c"), ("b", "x"), "y"]
    assert (td["a"].tolist(), td["b", "c"].sum()) == ([1, 1], 6)


def test_the_form_can_be_told():
    td = TensorDict({"a.b": 0, "n": {"c": 0}})
    td.load_state_dict({"a.b": 1, "n.c": 2}, from_flatten=True)
    assert (td["a.b"], td["n", "c"]) == (1, 2)
    with pytest.raises(RuntimeError, match=r"only the state dict \['n.c'\]"):
        td.load_state_dict({"a.b": 1, "n.c": 2}, from_flatten=False)


def test_values_that_do_not_fit_change_nothing():
    td = make()
    before = state(td)
    found = {"a": torch.ones(2), "b.c": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=r"\('b', 'c'\): cannot write shape \(2, 4\) into shape"):
        td.load_state_dict(found)
    assert state(td) == before
    assert td.load_state_dict(found, assign=True)["b", "c"].shape == (2, 4)


@pytest.mark.parametrize("assign", [False, True])
def test_batch_sizes_come_from_the_state_dict(assign):
    td = make()
    td.names = ["t"]
    source = make()
    source.batch_size = ()
    source["b"].batch_size = (2, 3)
    td.load_state_dict(source.state_dict(), assign=assign)
    assert (td.batch_size, td["b"].batch_size) == ((), (2, 3))
    assert (td.names, td["b"].names) == ([], ["t", None])


def test_leaves_of_another_batch_size_can_be_assigned():
    other = TensorDict({"a": torch.zeros(5), "b": {"c": torch.ones(5, 3)}}, [5])
    td = make().load_state_dict(other.state_dict(), assign=True)
    assert picture(td) == picture(other)
    td = make()
    before = state(td)
    found = other.state_dict()
    del found["b.c"]
    with pytest.raises(ValueError, match=r"\('b', 'c'\) of shape \(2, 3\) does not begin with \(5"):
        td.load_state_dict(found, assign=True, strict=False)
    found = other.state_dict()
    with pytest.raises(ValueError, match="the state dict has a batch size that does not fit"):
        td.load_state_dict(found)
    assert state(td) == before
    found["a"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"key 'a': shape \(4,\) does not begin with"):
        td.load_state_dict(found, assign=True)
    assert state(td) == before


def test_a_locked_tree_takes_values_but_no_other_tensors():
    td = make().lock_()
    before = state(td)
    with pytest.raises(LockedError, match="cannot set 'a'"):
        td.load_state_dict(make().state_dict(), assign=True)
    with pytest.raises(LockedError, match="cannot set 'z'"):
        td.load_state_dict({"z": torch.ones(2)}, strict=False)
    with pytest.raises(LockedError, match="cannot change the batch size of the tree"):
        td.load_state_dict(TensorDict(make(), []).state_dict())
    assert state(td) == before
    td.load_state_dict({"a": torch.ones(2), "b.c": torch.zeros(2, 3)})
    assert td["a"].tolist() == [1, 1]


def test_a_tree_that_is_a_module_keeps_the_methods_of_modules():
    params = TensorDictParams(TensorDict.from_module(nn.Linear(2, 2)))
    assert "version" in params.state_dict()._metadata[""]
    assert not params.load_state_dict(params.state_dict()).missing_keys
    outer = nn.ModuleDict({"p": TensorDictParams({"a": {"b": torch.zeros(2)}})})
    assert list(outer.state_dict()) == ["p.a.b"]
    outer.load_state_dict({"p.a.b": torch.ones(2)})
    assert outer["p"]["a", "b"].tolist() == [1, 1]


def test_loading_traces():
    def load(td, a, c):
        return td.load_state_dict({"a": a, "b.c": c})

    td = make()
    torch.compile(load, backend="eager", fullgraph=True)(td, torch.ones(2), torch.zeros(2, 3))
    assert td["a"].tolist() == [1, 1]
    assert td["b", "c"].sum() == 0
