"""A tree as its users meet it: made from what they have, read and written by key."""

import collections
import copy
import pickle
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import state
from strategies import flat, trees
from torch import nn
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict, TensorDictParams, is_tensor_collection
from tdnn.errors import KeyConflictError, LockedError, MissingKeyError


def make():
    return TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3, 2), "d": {"e": 2}}}, [])


# -- making one ------------------------------------------------------------------------------------


@given(trees())
def test_the_ways_to_spell_a_tree_give_the_same_tree(td):
    leaves = flat(td)
    size = td.batch_size
    for source in (
        leaves,
        {(path[:1], path[1:]) if path[1:] else path: x for path, x in leaves.items()},
    ):
        made = TensorDict(source, size)
        assert flat(made).keys() == leaves.keys()
        assert all(made[path] is leaf for path, leaf in leaves.items())
    nested = TensorDict(td.to_dict(), size)
    assert list(nested.keys(True)) == list(td.keys(True))
    assert all(nested[path] is leaf for path, leaf in leaves.items())
    again = TensorDict(td)
    assert again is not td
    assert list(again.keys(True)) == list(td.keys(True))


def test_keyword_arguments_are_entries():
    td = TensorDict({"a": 1}, b=2, c={"d": 3})
    assert td.to_dict() == {"a": 1, "b": 2, "c": {"d": 3}}
    assert TensorDict(x=torch.zeros(3), batch_size=[3]).batch_size == (3,)


@pytest.mark.parametrize("kind", [collections.OrderedDict, types.MappingProxyType])
def test_any_mapping_is_a_source_and_a_branch(kind):
    td = TensorDict(kind({"a": kind({"b": 1})}))
    assert isinstance(td["a"], TensorDict)
    assert td["a", "b"] == 1


@pytest.mark.parametrize("source", [[("a", 1)], "a", 5, torch.zeros(2), {"a"}])
def test_other_sources_are_refused(source):
    with pytest.raises(TypeError, match="TensorDict is made from a mapping or a tree, not"):
        TensorDict(source)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, torch.tensor(1)),
        (True, torch.tensor(True)),
        (1.5, torch.tensor(1.5)),
        (1j, torch.tensor(1j)),
        ([1, 2], torch.tensor([1, 2])),
        ((1.0,), torch.tensor([1.0])),
        ([], torch.tensor([])),
        (np.float64(2), torch.tensor(2.0, dtype=torch.float64)),
        (np.array([1, 2], np.int16), torch.tensor([1, 2], dtype=torch.int16)),
        ([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor([1.0, 2.0])),
    ],
    ids=repr,
)
def test_numbers_and_arrays_become_tensors(value, expected):
    for td in (TensorDict({"a": value}), TensorDict({}).set("a", value)):
        assert td["a"].dtype == expected.dtype
        assert torch.equal(td["a"], expected)


@pytest.mark.parametrize("value", [None, "text", b"text", object(), {1, 2}, len])
def test_other_values_are_refused(value):
    message = "'a': a tree holds tensors, numbers, arrays, mappings and trees, not "
    for source in ({"a": value}, {"b": {"a": value}}):
        with pytest.raises(TypeError, match=message + type(value).__name__):
            TensorDict(source)
    td = make()
    before = state(td)
    with pytest.raises(TypeError, match=message):
        td.set("a", value)
    assert state(td) == before


@pytest.mark.parametrize("value", [["text"], [[1], [1, 2]], np.array(["text"])], ids=str)
def test_what_torch_cannot_make_a_tensor_of_says_which_key(value):
    with pytest.raises((TypeError, ValueError)) as error:
        TensorDict({"a": value})
    assert error.value.__notes__ == ["while making a tensor of the value for key 'a'"]


@pytest.mark.parametrize("key", [1, None, (), ("a", 1), 1.5])
def test_keys_of_other_kinds_are_refused(key):
    message = "a key is a str or a non-empty tuple of str, not"
    td = make()
    before = state(td)
    for call in (
        lambda: TensorDict({key: 1}),
        lambda: TensorDict({"a": {key: 1}}),
        lambda: td.get(key),
        lambda: td.set(key, 1),
        lambda: td.set_(key, 1),
        lambda: td.del_(key),
        lambda: key in td,
        lambda: td.pop(key),
        lambda: td.setdefault(key, 1),
        lambda: td.update({"a": 1, key: 1}),
        lambda: td.update_({"a": 1, key: 1}),
        lambda: td.rename_key_("a", key),
        lambda: td.select("a", key),
        lambda: td.exclude("a", key, inplace=True),
        lambda: td.split_keys(["a", key], inplace=True),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    assert state(td) == before


def test_two_leaves_at_one_key_are_refused():
    for source in ({"a": {"b": 1}, ("a", "b"): 2}, {("a",): 1, "a": 2}, {"a": 1, ("a", "b"): 2}):
        with pytest.raises(KeyConflictError, match=r"two entries for the key '[ab]'"):
            TensorDict(source)
    with pytest.raises(KeyConflictError, match="two entries for the key 'a'"):
        TensorDict({"a": 1}, a=2)


def test_a_tree_that_more_entries_join_is_not_changed_itself():
    mine = TensorDict({"x": 1, "deep": TensorDict({"y": 2})}, lock=True)
    td = TensorDict({"a": mine, ("a", "z"): 3, ("a", "deep", "w"): 4})
    assert list(flat(td)) == [("a", "x"), ("a", "deep", "y"), ("a", "deep", "w"), ("a", "z")]
    assert list(flat(mine)) == [("x",), ("deep", "y")]


def test_a_tree_is_held_as_it_is():
    branch = TensorDict({"x": torch.zeros(3)}, [3])
    assert TensorDict({"b": branch}, [3])["b"] is branch
    assert TensorDict({}, [3]).set("b", branch)["b"] is branch


def test_a_tree_of_fewer_dims_is_held_as_new_nodes_that_declare_more():
    branch = TensorDict({"x": torch.zeros(3), "y": {"z": torch.zeros(3, 2)}})
    td = TensorDict({"b": branch}, [3])
    assert td["b"].batch_size == td["b", "y"].batch_size == (3,)
    assert branch.batch_size == branch["y"].batch_size == ()
    assert td["b", "x"] is branch["x"]


@given(trees(batch_size=(3,)), st.sampled_from([(), (2,), (4, 3)]))
def test_a_leaf_without_the_batch_size_is_refused(td, shape):
    before = state(td)
    for change in (
        lambda: td.set("new", torch.zeros(shape)),
        lambda: td.set("new", {"deep": torch.zeros(shape)}),
        lambda: td.update({"fine": torch.zeros(3), "new": torch.zeros(shape)}),
        lambda: TensorDict({"new": torch.zeros(shape)}, [3]),
    ):
        with pytest.raises(ValueError, match=r"does not begin with the batch size \(3,\)"):
            change()
    assert state(td) == before
    branch = TensorDict({"x": torch.zeros(shape)})
    with pytest.raises(ValueError, match=r"cannot set branch 'b': .*\(3,\) does not fit 'x'"):
        td.set("b", branch)
    assert state(td) == before


def test_leaves_of_every_kind_keep_their_type_and_identity():
    class Sub(torch.Tensor):
        pass

    leaves = {
        "parameter": nn.Parameter(torch.zeros(2)),
        "buffer": nn.Buffer(torch.zeros(2)),
        "subclass": torch.zeros(2).as_subclass(Sub),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.zeros(2, device="meta"),
        "grad": torch.zeros(2, requires_grad=True) * 2,
    }
    td = TensorDict({"b": leaves}, [2])
    assert all(td["b", key] is leaf for key, leaf in leaves.items())


def test_any_text_is_a_key():
    keys = ["", " ", ".", "a b", "é", "字", "a\nb", "\0", "items", "_data", "batch_size"]
    td = TensorDict({key: {key: i} for i, key in enumerate(keys)})
    assert [td[key, key] for key in keys] == list(range(len(keys)))
    assert list(td.keys()) == keys


# -- reading ---------------------------------------------------------------------------------------


@given(trees(), st.lists(st.sampled_from(["a", "b", ".", "zzz"]), min_size=1, max_size=4))
def test_get_reads_what_is_there_and_otherwise_gives_the_default(td, path):
    default = object()
    found = td
    for key in path:
        found = dict(found.items()).get(key, default) if isinstance(found, TensorDict) else default
    for key in (tuple(path), (path[0], tuple(path[1:])) if path[1:] else path[0]):
        assert td.get(key, default) is found
        assert (key in td) == (found is not default)
        if found is default:
            assert td.get(key) is None
            with pytest.raises(MissingKeyError, match=r"is not in the TensorDict|which is a leaf"):
                td[key]
        else:
            assert td[key] is found


def test_a_missing_key_is_reported_with_the_nearest_one():
    td = TensorDict({"encoder": {"weight": 1, "bias": 2}})
    message = r"\('encoder', 'weigth'\) is not in the TensorDict: no 'weigth' among "
    with pytest.raises(MissingKeyError, match=message + r".*\(did you mean 'weight'\?\)"):
        td["encoder", "weigth"]
    with pytest.raises(KeyError, match=r"\('encoder', 'bias', 'x'\) goes through \('encoder', 'b"):
        td["encoder", "bias", "x"]


# -- writing ---------------------------------------------------------------------------------------


def test_set_makes_the_branches_on_the_way():
    td = TensorDict({}, [3], device="cpu", names=["t"])
    assert td.set(("a", ("b", "c")), torch.zeros(3)) is td
    for branch in (td["a"], td["a", "b"]):
        assert (branch.batch_size, branch.device, branch.names) == ((3,), td.device, ["t"])


def test_set_finds_branches_behind_inner_tuples():
    td = TensorDict({"a": {"b": {"x": 1}}})
    td.set((("a", "b"), "c"), torch.tensor(2)).set(("a", ("b", "d"), "e"), torch.tensor(3))
    assert list(td.keys(True, True)) == [("a", "b", "x"), ("a", "b", "c"), ("a", "b", "d", "e")]


def test_set_replaces_a_branch_by_a_leaf_but_goes_through_none():
    td = make()
    td["b"] = torch.zeros(())
    before = state(td)
    with pytest.raises(MissingKeyError, match=r"cannot set \('b', 'x'\): 'b' is a leaf; delete"):
        td["b", "x"] = 1
    with pytest.raises(MissingKeyError, match=r"cannot set \('b', 'x', 'y'\): 'b' is a leaf"):
        td["b", "x", "y"] = 1
    assert state(td) == before


def test_a_failed_set_leaves_no_branches_behind():
    td = make()
    before = state(td)
    with pytest.raises(TypeError):
        td["new", "deep", "er"] = None
    assert state(td) == before


def test_a_tree_cannot_hold_itself():
    td = make()
    before = state(td)
    for key, value in [
        ("x", td),
        (("b", "x"), td),
        (("b", "x"), td["b"]),
        (("b", "d", "x"), td["b"]),
        ("x", TensorDict({"deep": {"er": 1}}).set(("deep", "td"), td)),
        ("x", {"y": td}),
    ]:
        with pytest.raises(ValueError, match="a tree cannot hold itself"):
            td.set(key, value)
        with pytest.raises(ValueError, match="a tree cannot hold itself"):
            td.update({key: value}, is_leaf=lambda kind: True)
    assert state(td) == before
    td["b", "x"] = td["b", "d"]
    with pytest.raises(ValueError, match="a tree cannot hold itself"):
        td.rename_key_(("b", "d"), ("b", "x", "y"))


def test_set_in_place_copies_into_what_is_there_and_adds_what_is_not():
    td = make()
    leaf, branch = td["a"], td["b"]
    td.set("a", torch.ones(3), inplace=True).set("b", {"d": {"e": 7}}, inplace=True)
    td.set("new", 1, inplace=True)
    assert td["a"] is leaf
    assert torch.equal(leaf, torch.ones(3))
    assert td["b"] is branch
    assert td["b", "d", "e"] == 7
    assert td["new"] == 1


def test_set_underscore_fills_with_numbers_and_copies_trees():
    td = make()
    leaf = td["b", "c"]
    td.set_(("b", "c"), 5)
    assert torch.equal(leaf, torch.full((3, 2), 5.0))
    td.set_("b", TensorDict({"c": torch.zeros(3, 2)}))
    assert torch.equal(leaf, torch.zeros(3, 2))
    assert td["b", "c"] is leaf


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("zzz", 1, MissingKeyError, "'zzz' is not in the TensorDict"),
        ("a", torch.zeros(2), ValueError, r"'a': cannot write shape \(2,\) into shape \(3,\)"),
        ("b", {"c": torch.zeros(2)}, ValueError, r"\('b', 'c'\): cannot write shape \(2,\)"),
        ("b", {"zzz": 1}, MissingKeyError, "'zzz' is not in the TensorDict"),
        ("b", 1, TypeError, "'b' is a branch; write a tree or a mapping into it"),
        ("a", {"c": 1}, TypeError, "'a' is a leaf; write a tensor or a number into it"),
        ("a", None, TypeError, "'a': a tree holds tensors"),
    ],
)
def test_set_underscore_refuses_what_does_not_fit(key, value, error, message):
    td = make()
    before = state(td)
    with pytest.raises(error, match=message):
        td.set_(key, value)
    with pytest.raises(error, match=message):
        td.update_({"b": {"d": {"e": 1}}, key: value})
    if key != "zzz":
        with pytest.raises(error, match=message):
            td.update_({"b": {"d": {"e": 1}}, key: value})
    assert state(td) == before


def test_a_parameter_is_not_written_into_while_gradients_are_recorded():
    td = TensorDict({"a": torch.zeros(2), "w": nn.Parameter(torch.zeros(2))})
    before = state(td)
    for write in (td.update_, lambda new: td.update(new, inplace=True)):
        with pytest.raises(
            RuntimeError, match=r"cannot write in place into \['w'\]: requires_grad is set"
        ):
            write({"a": torch.ones(2), "w": torch.ones(2)})
    assert state(td) == before
    with torch.no_grad():
        td.update_({"a": torch.ones(2), "w": torch.ones(2)})
    td.data.update_({"a": torch.ones(2), "w": 2})
    assert td["w"].tolist() == [2, 2]


def test_delete_removes_one_entry():
    td = make()
    del td["b", "d"]
    assert td.del_("a") is td
    assert list(td.keys(True)) == [("b", "c"), "b"]
    for key in ("zzz", ("b", "zzz"), ("b", "c", "zzz")):
        with pytest.raises(MissingKeyError):
            del td[key]
    assert list(td.keys(True)) == [("b", "c"), "b"]


# -- copies by protocol ----------------------------------------------------------------------------


def through_pickle(td):
    return pickle.loads(pickle.dumps(td))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
@given(td=trees(names=True), locked=st.booleans())
def test_deep_copies_are_equal_and_share_nothing(copied, td, locked):
    if locked:
        td.lock_()
    other = copied(td)
    assert type(other) is type(td)
    assert list(other.keys(True)) == list(td.keys(True))
    assert (other.batch_size, other.names, other.device) == (td.batch_size, td.names, td.device)
    assert other.is_locked == locked
    mine, theirs = flat(td), flat(other)
    for path, leaf in mine.items():
        assert torch.equal(theirs[path], leaf)
        assert theirs[path] is not leaf
        ties = [at for at in mine if mine[at] is leaf]
        assert ties == [at for at in theirs if theirs[at] is theirs[path]]
    for key, value in td.items(True):
        if isinstance(value, TensorDict):
            assert other[key].batch_size == value.batch_size


def test_a_shallow_copy_has_new_nodes_over_the_same_leaves():
    td = make()
    other = copy.copy(td)
    assert other["b"] is not td["b"]
    assert other["b", "c"] is td["b", "c"]


# -- subclasses and size ---------------------------------------------------------------------------


class Named(TensorDict):
    """A kind of tree of the user's own."""


def test_a_subclass_keeps_its_kind():
    td = Named({"a": torch.zeros(3), "b": {"c": torch.ones(3)}}, [3])
    for made in (td, td.clone(), td + 1, td[0], td.select("b"), td.flatten_keys(), td.empty(True)):
        assert type(made) is Named
    assert type(td["b"]) is Named
    assert type(copy.deepcopy(td)) is type(through_pickle(td)) is Named


def test_many_leaves_and_deep_nesting_are_fine():
    wide = TensorDict({("a", str(i)): i for i in range(10_000)})
    assert len(wide.keys(True, True)) == 10_000
    assert list(wide.flatten_keys().unflatten_keys()["a"].keys()) == list(wide["a"].keys())
    deep, key = TensorDict({"x": 1}), ("k",) * 500
    for _ in range(500):
        deep = TensorDict({"k": deep})
    assert deep[(*key, "x")] == 1
    assert list((deep.clone() + 1).flatten_keys().keys()) == [".".join((*key, "x"))]
    assert deep.lock_()[key].is_locked
    deep.unlock_().set((*key, "y"), 2).update({(*key, "z"): 3}).del_((*key, "x"))
    assert list(deep[key].keys()) == ["y", "z"]


def test_names_of_arguments_are_keys_in_a_mapping():
    names = ["source", "batch_size", "device", "names", "lock", "self", "inplace", "key"]
    td = TensorDict({name: i for i, name in enumerate(names)})
    assert [td[name] for name in names] == list(range(len(names)))
    assert TensorDict({}).update(dict.fromkeys(names, 1)).keys() == set(names)


# -- compiled --------------------------------------------------------------------------------------


def journey(td, x):
    made = TensorDict({"in": td, ("in", "x"): x, "k": {"d": 1.0}}, td.batch_size and [3])
    made["out", "y"] = made["in", "a"] * x
    del made["k"]
    made.set_(("out", "y"), made["out", "y"] + 1)
    return made if ("out", "y") in made else None


def test_reading_and_writing_trace_without_a_second_compilation():
    counter = CompileCounter()
    compiled = torch.compile(journey, fullgraph=True, backend=counter)
    for scale in (1.0, 2.0, 3.0):
        td, x = make().set("a", torch.ones(3) * scale), torch.rand(3)
        result, expected = compiled(td, x), journey(td, x)
        assert list(result.keys(True)) == list(expected.keys(True))
        assert torch.equal(result["out", "y"], expected["out", "y"])
        assert result["in", "b", "c"] is td["b", "c"]
    assert counter.frame_count == 1


def test_errors_know_their_bases():
    assert issubclass(MissingKeyError, KeyError)
    assert issubclass(KeyConflictError, KeyError)
    assert issubclass(LockedError, RuntimeError)
    assert str(MissingKeyError("as it is")) == str(KeyConflictError("as it is")) == "as it is"
    assert str(MissingKeyError()) == str(KeyConflictError()) == ""


def test_a_tensor_collection_is_a_tree_or_a_class_of_trees():
    for tree in (TensorDict, TensorDictParams, TensorDict({}), TensorDictParams({}), Named({})):
        assert is_tensor_collection(tree)
    for other in (torch.ones(2), {}, dict, torch.Tensor, None, nn.Linear(1, 1)):
        assert not is_tensor_collection(other)


def test_an_error_in_a_nested_source_says_in_which_branch():
    for source, kind in (
        ({"x": {"y": {"z": object()}}}, TypeError),
        ({"x": {"y": {"z": torch.ones(2)}}}, ValueError),
        ({"x": {"y": {3: torch.ones(3)}}}, TypeError),
    ):
        with pytest.raises(kind) as caught:
            TensorDict(source, [3])
        assert caught.value.__notes__ == ["in the branch 'y'", "in the branch 'x'"]


def test_a_joined_name_is_told_to_be_a_nested_key_and_the_other_way_round():
    td = TensorDict({"stem": {"weight": torch.ones(2)}})
    with pytest.raises(MissingKeyError, match=r"\(did you mean \('stem', 'weight'\)\?\)"):
        td["stem.weight"]
    with pytest.raises(MissingKeyError, match=r"\(did you mean 'stem\.weight'\?\)"):
        td.flatten_keys(".")["stem", "weight"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_leaf_can_be_written_in_place(layout):
    td = TensorDict({"s": torch.eye(3).to_sparse(layout=layout)})
    td.zero_()
    assert not td["s"].to_dense().any()
