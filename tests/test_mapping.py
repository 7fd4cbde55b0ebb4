"""A tree as a mapping: views of its keys, and entries that move in, out and about."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import state
from strategies import flat, trees
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict, TensorDictParams
from tdnn.errors import KeyConflictError, LockedError, MissingKeyError


def make():
    return TensorDict({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {}})


def walk(td, above=()):
    """Return ``(path, entry)`` of every entry; those of a branch come before it."""
    found = []
    for key, value in td.items():
        if isinstance(value, TensorDict):
            found += walk(value, (*above, key))
        found.append(((*above, key), value))
    return found


def key_of(path):
    return path[0] if len(path) == 1 else path


def below(path, paths):
    return any(path[: len(other)] == other for other in paths)


# -- keys, items, values ---------------------------------------------------------------------------


@given(trees(), st.booleans(), st.booleans(), st.booleans())
def test_keys_items_and_values_go_over_the_same_entries(td, nested, leaves_only, sort):
    found = [(path, value) for path, value in walk(td) if nested or len(path) == 1]
    if leaves_only:
        found = [(path, value) for path, value in found if not isinstance(value, TensorDict)]
    if sort:
        found.sort(key=lambda pair: pair[0])
    keys = td.keys(nested, leaves_only, sort=sort)
    items = list(td.items(nested, leaves_only, sort=sort))
    values = list(td.values(nested, leaves_only, sort=sort))
    assert list(keys) == [key for key, _ in items] == [key_of(path) for path, _ in found]
    assert len(keys) == len(found)
    for (_, value), other, (_, expected) in zip(items, values, found, strict=True):
        assert value is other is expected
    for path, value in walk(td):
        shown = (nested or len(path) == 1) and not (leaves_only and isinstance(value, TensorDict))
        assert (key_of(path) in keys) == shown
    assert "no such key" not in keys


def test_keys_follow_the_tree_and_compare_like_sets():
    td = make()
    keys = td.keys(True, True)
    td["new", "x"] = 1
    assert ("new", "x") in keys
    assert keys == {"a", ("b", "c"), ("b", "d", "e"), ("new", "x")}
    assert keys & {"a", "z"} == {"a"}
    assert keys - td.keys() == {("b", "c"), ("b", "d", "e"), ("new", "x")}
    assert repr(td.select("a").keys(True)) == "NestedKeys(['a'])"


def test_is_leaf_says_which_branches_are_not_entered():
    class Whole(TensorDict):
        __slots__ = ()

    td = TensorDict({"a": Whole({"x": 1}), "b": {"y": Whole({"z": 2}), "w": 3}})
    whole = {"is_leaf": lambda kind: kind is Whole}
    assert list(td.keys(True, True, **whole)) == ["a", ("b", "y"), ("b", "w")]
    assert next(iter(td.values(True, True, **whole))) is td["a"]
    assert [key for key, _ in td.items(leaves_only=True, **whole)] == ["a"]
    assert "a" in td.keys(True, True, **whole)
    assert ("a", "x") not in td.keys(True, True, **whole)


# -- pop, setdefault -------------------------------------------------------------------------------


def test_pop_takes_an_entry_out():
    td = make()
    branch = td["b"]
    assert td.pop(("b", "c")) == 2
    assert td.pop("b") is branch
    assert list(td.keys()) == ["a", "f"]
    default = object()
    for key in ("zzz", ("zzz", "x"), ("a", "x")):
        assert td.pop(key, default) is default
        assert td.pop(key, None) is None
        with pytest.raises(MissingKeyError):
            td.pop(key)
    assert list(td.keys()) == ["a", "f"]


def test_setdefault_sets_only_what_is_missing():
    td = make()
    assert td.setdefault("a", 5) is td["a"]
    assert td["a"] == 1
    assert td.setdefault(("f", "x"), {"y": 5}) is td["f", "x"]
    assert td["f", "x", "y"] == 5


# -- update ----------------------------------------------------------------------------------------


@given(trees(batch_size=(2,)), trees(batch_size=(2,)), st.booleans(), st.booleans())
def test_update_merges_branches_and_replaces_leaves(td, other, as_mapping, clone):
    def merged(one, two):
        result = dict(one)
        for key, value in two.items():
            both = isinstance(value, dict) and isinstance(one.get(key), dict)
            result[key] = merged(one[key], value) if both else value
        return result

    def same(one, two):
        if isinstance(one, dict):
            return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
        return torch.equal(one, two) if clone else one is two

    if any(x.shape[2:3] != y.shape[2:3] for x in flat(td).values() for y in flat(other).values()):
        td = TensorDict(td.to_dict(), [2])  # a branch may have further dims that a leaf lacks
    expected = merged(td.to_dict(), other.to_dict())
    branches = {path: value for path, value in walk(td) if isinstance(value, TensorDict)}
    source_before = state(other)
    result = td.update(other.to_dict() if as_mapping else other, clone=clone)
    assert result is td
    assert same(td.to_dict(), expected)
    assert state(other) == source_before
    for path, branch in branches.items():
        if isinstance(td.get(path), TensorDict):
            assert td[path] is branch
    assert not any(td.get(path) is value for path, value in walk(other) if value in [*branches])


def test_update_takes_tuples_and_keyword_arguments():
    td = make()
    td.update({("b", "c"): 5, ("n", "x"): 6, ("n", "y"): 7}, f={"g": 8}, n={"z": 9})
    assert td.to_dict() == {
        "a": 1,
        "b": {"c": 5, "d": {"e": 3}},
        "f": {"g": 8},
        "n": {"x": 6, "y": 7, "z": 9},
    }


def test_update_holds_new_nodes_for_the_branches_of_its_source():
    td, other = TensorDict({}), TensorDict({"n": {"x": 1}})
    td.update(other)
    td["n", "y"] = 2
    assert list(other["n"].keys()) == ["x"]


def test_update_with_is_leaf_replaces_whole_branches():
    td = make().update({"b": TensorDict({"z": 1})}, is_leaf=lambda kind: kind is TensorDict)
    assert td["b"].to_dict() == {"z": 1}
    td = make().update({"b": {"z": torch.ones(())}}, is_leaf=lambda kind: kind is dict)
    assert list(td["b"].keys()) == ["z"]


def test_update_with_no_keys_chosen_changes_nothing():
    td = make()
    before = state(td)
    td.update({"a": torch.ones(())}, keys_to_update=[])
    assert state(td) == before


def test_update_in_place_copies_into_what_is_there_and_adds_the_rest():
    td = make()
    leaf = td["b", "c"]
    td.update({"b": {"c": 7, "new": 8}}, inplace=True)
    assert td["b", "c"] is leaf
    assert leaf == 7
    assert td["b", "new"] == 8


@pytest.mark.parametrize("kind", [dict, TensorDict])
@pytest.mark.parametrize("method", ["update", "update_"])
def test_keys_to_update_says_which(method, kind):
    td = make()
    source = kind({"a": 7, "b": {"c": 8, "d": {"e": 9}}})
    getattr(td, method)(source, keys_to_update=["a", ("b", "d", "e")])
    assert td.to_dict() == {"a": 7, "b": {"c": 2, "d": {"e": 9}}, "f": {}}
    before = state(td)
    with pytest.raises(MissingKeyError, match="zzz"):
        getattr(td, method)(source, keys_to_update=["a", "zzz"])
    with pytest.raises(MissingKeyError, match="zzz"):
        getattr(td, method)(source, keys_to_update=["a", ("b", "zzz")])
    with pytest.raises(TypeError, match=r"keys_to_update is a list of keys; write \['a'\]"):
        getattr(td, method)(source, keys_to_update="a")
    assert state(td) == before


@pytest.mark.parametrize("source", [5, [("a", 1)], torch.zeros(2), "ab"])
def test_update_takes_a_mapping_or_a_tree(source):
    with pytest.raises(TypeError, match="update takes a mapping or a tree, not"):
        make().update(source)
    with pytest.raises(TypeError, match="update takes a mapping or a tree, not"):
        make().update_(source)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"z": None}, TypeError),
        ({"b": {"d": {"e": object()}}}, TypeError),
        ({("a", "x"): 1}, MissingKeyError),
        ({("n", "x"): 1, ("n", "x", "y"): 2}, MissingKeyError),
        ({"n": 1, ("n", "x"): 2}, KeyConflictError),
        ({"n": [["text"]]}, ValueError),
    ],
    ids=str,
)
@pytest.mark.parametrize("inplace", [False, True])
def test_an_update_that_fails_changes_nothing(wrong, error, inplace):
    td = make()
    before = state(td)
    with pytest.raises(error):
        td.update({"a": 5, "new": {"x": 1}, "b": {"c": 6}, **wrong}, inplace=inplace)
    with pytest.raises(error):
        td.update(wrong, inplace=inplace, a=5, b={"c": 6})
    with pytest.raises(TypeError):
        td.update({"a": 5}, inplace=inplace, b={"c": 6}, z=None)
    assert state(td) == before


def test_a_leaf_and_a_branch_cannot_both_be_set_at_one_key():
    with pytest.raises(KeyConflictError, match=r"both \('b', 'n'\), a leaf, and \('b', 'n', 'x'\)"):
        make().update({"b": {"n": 1, ("n", "x"): 2}})


def test_an_update_of_a_locked_branch_changes_nothing():
    td = make()
    td["b", "d"].lock_()
    before = state(td)
    with pytest.raises(LockedError, match=r"cannot set \('b', 'd', 'e'\)"):
        td.update({"a": 5, "b": {"c": 6, "d": {"e": 7}}})
    assert state(td) == before


# -- rename ----------------------------------------------------------------------------------------


@given(trees(batch_size=()), st.data())
def test_rename_moves_one_entry(td, data):
    td = TensorDict(td.to_dict())
    paths = [path for path, _ in walk(td)]
    if not paths:
        return
    old = data.draw(st.sampled_from(paths))
    new = data.draw(
        st.sampled_from([*paths, ("new",), (*old, "x"), ("new", "y"), (*paths[0], "z")])
    )
    before, leaves, value = state(td), flat(td), td[old]
    through = [new[:end] for end in range(1, len(new)) if new[:end] in leaves]
    inside = new[: len(old)] == old
    if not inside and (new in paths or [path for path in through if path != old]):
        with pytest.raises((KeyConflictError, MissingKeyError)):
            td.rename_key_(old, new)
        assert state(td) == before
        return
    assert td.rename_key_(old, new) is td
    assert td[new] is value
    if not inside:
        assert old not in td
    expected = {
        (new + path[len(old) :] if path[: len(old)] == old else path): leaf
        for path, leaf in leaves.items()
    }
    after = flat(td)
    assert after.keys() == expected.keys()
    assert all(after[path] is leaf for path, leaf in expected.items())


def test_rename_over_an_entry_needs_to_be_asked_for():
    td = make()
    before = state(td)
    for safe in (None, True):
        with pytest.raises(KeyConflictError, match="cannot rename 'a' to 'f', which is taken"):
            td.rename_key_("a", "f", safe)
    assert state(td) == before
    assert td.rename_key_("a", "f", safe=False).to_dict() == {"b": {"c": 2, "d": {"e": 3}}, "f": 1}


def test_rename_into_a_branch_that_it_does_not_fit_changes_nothing():
    td = TensorDict({"a": torch.zeros(3), "b": TensorDict({}, [3, 2])}, [3])
    before = state(td)
    with pytest.raises(ValueError, match=r"\('b', 'a'\): shape \(3,\) does not begin with"):
        td.rename_key_("a", ("b", "a"))
    with pytest.raises(MissingKeyError, match=r"'zzz' is not in the TensorDict"):
        td.rename_key_("zzz", "y")
    assert state(td) == before


# -- parts -----------------------------------------------------------------------------------------


def chosen(data, td):
    paths = [path for path, _ in walk(td)]
    return data.draw(st.lists(st.sampled_from(paths), max_size=3)) if paths else []


@given(trees(), st.data(), st.booleans())
def test_select_keeps_what_is_named_and_all_below_it(td, data, inplace):
    wanted = chosen(data, td)
    leaves, nodes = flat(td), dict(walk(td))
    part = td.select(*wanted, inplace=inplace)
    assert (part is td) == inplace
    assert [path for path, _ in walk(part)] == [
        path
        for path in nodes
        if below(path, wanted) or any(below(other, [path]) for other in wanted)
    ]
    for path, value in walk(part):
        if path in leaves:
            assert value is leaves[path]
        else:
            assert value.batch_size == nodes[path].batch_size
            assert (value is nodes[path]) == inplace


@given(trees(), st.data(), st.booleans())
def test_exclude_removes_what_is_named_and_all_below_it(td, data, inplace):
    unwanted = chosen(data, td)
    leaves, nodes = flat(td), dict(walk(td))
    part = td.exclude(*unwanted, "no such key", ("no", "such"), inplace=inplace)
    assert (part is td) == inplace
    assert [path for path, _ in walk(part)] == [path for path in nodes if not below(path, unwanted)]
    for path, value in walk(part):
        if path in leaves:
            assert value is leaves[path]
        else:
            assert value.batch_size == nodes[path].batch_size
            assert (value is nodes[path]) == inplace


def test_select_lists_all_keys_that_are_missing():
    td = make()
    before = state(td)
    for inplace in (False, True):
        with pytest.raises(MissingKeyError, match="'zzz' is not in the TensorDict: no 'zzz'"):
            td.select("a", "zzz", inplace=inplace)
        with pytest.raises(MissingKeyError, match=r"not in the TensorDict: \['y', \('b', 'z'\)\]"):
            td.select("a", "y", ("b", "z"), inplace=inplace)
        with pytest.raises(MissingKeyError, match="goes through 'a', which is a leaf"):
            td.select(("a", "x"), inplace=inplace)
    assert state(td) == before


@pytest.mark.parametrize("inplace", [False, True])
def test_select_without_strict_passes_over_what_is_missing(inplace):
    part = make().select("zzz", ("a", "x"), ("b", "z"), "f", strict=False, inplace=inplace)
    assert part.to_dict() == {"b": {}, "f": {}}


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.select(("b", "c"), ("b", "d", "zzz"), inplace=True, strict=False),
        lambda td: td.exclude("a", ("b", "d", "e"), inplace=True),
        lambda td: td.split_keys(["a", ("b", "d", "e")], inplace=True),
    ],
    ids=["select", "exclude", "split"],
)
def test_a_locked_branch_keeps_all_of_a_change_in_place_from_happening(change):
    td = make()
    td["b", "d"].lock_()
    before = state(td)
    with pytest.raises(LockedError, match="in place"):
        change(td)
    assert state(td) == before


# -- split_keys ------------------------------------------------------------------------------------


@given(trees(), st.data(), st.booleans(), st.booleans())
def test_split_keys_loses_nothing(td, data, inplace, reproduce_struct):
    leaves = flat(td)
    sets = [[], [], []]
    for path in leaves:
        sets[data.draw(st.integers(0, 2))].append(path)
    parts = td.split_keys(
        *[[key_of(path) for path in keys] for keys in sets[:2]],
        inplace=inplace,
        reproduce_struct=reproduce_struct,
    )
    assert len(parts) == 3
    assert (parts[-1] is td) == inplace
    for part, keys in zip(parts, sets, strict=True):
        assert flat(part).keys() == set(keys)
        assert all(part[path] is leaves[path] for path in keys)
        assert part.batch_size == td.batch_size


def test_split_keys_by_names_by_a_dict_and_by_a_function():
    td = make()
    one, two, three, rest = td.split_keys(
        ["a"], {("b", "c"): ("x", "y")}, lambda path, leaf: path[-1] == "e" and leaf == 3
    )
    assert one.to_dict() == {"a": 1}
    assert two.to_dict() == {"x": {"y": 2}}
    assert three.to_dict() == {"b": {"d": {"e": 3}}}
    assert rest.to_dict() == {"f": {}}


def test_split_keys_can_keep_the_structure_in_every_part():
    one, rest = make().split_keys([("b", "d", "e")], reproduce_struct=True)
    assert one.to_dict() == {"b": {"d": {"e": 3}}, "f": {}}
    assert rest.to_dict() == {"a": 1, "b": {"c": 2, "d": {}}, "f": {}}


@pytest.mark.parametrize("reproduce_struct", [False, True])
def test_split_keys_takes_a_branch_after_a_part_of_it(reproduce_struct):
    one, rest = make().split_keys([("b", "d", "e"), "b"], reproduce_struct=reproduce_struct)
    assert one["b"].to_dict() == {"d": {"e": 3}, "c": 2}
    assert "b" not in rest


def test_split_keys_keeps_the_further_dims_of_branches():
    td = TensorDict({"a": TensorDict({"x": torch.zeros(3, 2), "y": torch.zeros(3, 2)}, [3, 2])}, 3)
    one, rest = td.split_keys([("a", "x")])
    assert one["a"].batch_size == rest["a"].batch_size == (3, 2)


def test_split_keys_reports_all_keys_that_are_missing():
    td = make()
    before = state(td)
    for inplace in (False, True):
        with pytest.raises(MissingKeyError, match=r"cannot split off \['zzz', \('b', 'z'\)\]: not"):
            td.split_keys(["a", "zzz"], [("b", "z")], inplace=inplace)
        with pytest.raises(MissingKeyError, match=r"\['a'\]: not there, or taken by a set before"):
            td.split_keys(["a"], ["a"], inplace=inplace)
    with pytest.raises(TypeError, match=r"a set of keys is .* write \['ab'\]"):
        td.split_keys("ab")
    assert state(td) == before


def test_split_keys_without_strict_passes_over_or_fills_in():
    one, _ = make().split_keys(["a", "zzz"], strict=False)
    assert one.to_dict() == {"a": 1}
    one, _ = make().split_keys(["a", "zzz"], strict=False, default=torch.tensor(9))
    assert one.to_dict() == {"a": 1, "zzz": 9}


def test_split_keys_refuses_to_rename_two_entries_to_one():
    td = TensorDict({"a": 1, "b": 2})
    for names in ({"a": "x", "b": "x"}, {"a": ("x", "y"), "b": "x"}):
        with pytest.raises(KeyConflictError, match="cannot split off 'b' as 'x', taken twice"):
            td.split_keys(names, inplace=True)
    assert td.to_dict() == {"a": 1, "b": 2}


# -- empty, to_dict, from_dict ---------------------------------------------------------------------


@given(trees(names=True))
def test_empty_keeps_what_is_not_a_leaf(td):
    bare, full = td.empty(), td.empty(recurse=True)
    assert list(bare.keys()) == []
    branches = [(path, value) for path, value in walk(td) if isinstance(value, TensorDict)]
    assert [path for path, _ in walk(full)] == [path for path, _ in branches]
    for made, source in [(bare, td), (full, td), *[(full[path], node) for path, node in branches]]:
        assert made is not source
        assert (made.batch_size, made.names) == (source.batch_size, source.names)


def test_empty_with_another_batch_size_device_or_names():
    td = TensorDict({"b": {"c": torch.zeros(3)}}, [3], device="cpu", names=["t"])
    made = td.empty(recurse=True, batch_size=[4, 5], device=None)
    assert made.batch_size == made["b"].batch_size == (4, 5)
    assert made.device is made["b"].device is None
    assert made.names == [None, None]
    assert td.empty(names=["u"]).names == ["u"]
    assert td.empty(device="meta").device == torch.device("meta")


@given(trees(names=True))
def test_a_tree_comes_back_from_its_dict(td):
    again = TensorDict.from_dict(td.to_dict(), batch_size=td.batch_size, names=td.names)
    assert [path for path, _ in walk(again)] == [path for path, _ in walk(td)]
    assert all(again[path] is leaf for path, leaf in flat(td).items())
    assert again.names == td.names


# -- compiled --------------------------------------------------------------------------------------


def journey(td):
    td = td.update({"n": {"x": td["a"] + 1}}, b={"c": td["a"]}).rename_key_("a", ("n", "a"))
    one, rest = td.select("b", "n").split_keys([("b", "c")])
    one.update_({"b": {"c": torch.zeros(())}})
    return one.update(rest.exclude(("n", "x"))), sorted(map(str, rest.keys(True, True)))


def test_moving_entries_traces_without_a_second_compilation():
    counter = CompileCounter()
    compiled = torch.compile(journey, fullgraph=True, backend=counter)
    for scale in (1.0, 2.0, 3.0):
        result, keys = compiled(make().apply(lambda x: x * scale))  # noqa: B023  # called at once
        expected, expected_keys = journey(make().apply(lambda x: x * scale))  # noqa: B023
        assert result.to_dict() == expected.to_dict()
        assert keys == expected_keys
    assert counter.frame_count == 1


# -- all entries at once ---------------------------------------------------------------------------


@given(trees(names=True))
def test_popitem_takes_the_entries_from_the_last_to_the_first(td):
    entries = list(td.items())
    size = td.batch_size
    found = [td.popitem() for _ in entries]
    assert [key for key, _ in found] == [key for key, _ in reversed(entries)]
    assert all(one is two for (_, one), (_, two) in zip(found, reversed(entries), strict=True))
    assert (list(td.keys()), td.batch_size) == ([], size)
    with pytest.raises(MissingKeyError, match="cannot pop an entry: the tree has none"):
        td.popitem()


@given(trees(names=True))
def test_clear_removes_all_entries_and_nothing_else(td):
    declared = td.batch_size, td.names, td.device
    kept = list(td.values())
    inside = [list(value.keys()) for value in kept if isinstance(value, TensorDict)]
    assert td.clear() is td
    assert list(td.keys()) == []
    assert (td.batch_size, td.names, td.device) == declared
    assert [list(value.keys()) for value in kept if isinstance(value, TensorDict)] == inside


def test_a_locked_tree_keeps_its_entries():
    td = make().lock_()
    before = state(td)
    with pytest.raises(LockedError, match="cannot clear the tree"):
        td.clear()
    with pytest.raises(LockedError, match="cannot delete 'f'"):
        td.popitem()
    assert state(td) == before


def test_a_tree_of_a_module_loses_its_parameters_too():
    params = TensorDictParams({"w": torch.zeros(2), "b": {"v": torch.zeros(2)}})
    assert params.popitem()[0] == "b"
    assert [name for name, _ in params.named_parameters()] == ["w"]
    assert not list(params.clear().parameters())


@given(trees(dtypes=(torch.float32, torch.int64, torch.bool, torch.complex64)))
def test_numpy_gives_arrays_over_the_same_memory(td):
    def compare(arrays, node):
        assert list(arrays) == list(node.keys())
        for key, found in arrays.items():
            if isinstance(node[key], TensorDict):
                compare(found, node[key])
            else:
                expected = node[key].numpy()
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert found.ctypes.data == node[key].data_ptr() or not found.size

    assert type(td.numpy()) is dict
    compare(td.numpy(), td)


def test_what_is_no_array_is_said_with_its_key():
    td = TensorDict({"a": {"w": torch.zeros(2, requires_grad=True)}})
    with pytest.raises(RuntimeError, match="requires grad") as caught:
        td.numpy()
    assert caught.value.__notes__ == ["at the leaf ('a', 'w')"]
    with pytest.raises(TypeError) as caught:
        TensorDict({"h": torch.zeros(2, dtype=torch.bfloat16)}).numpy()
    assert caught.value.__notes__ == ["at the leaf 'h'"]
