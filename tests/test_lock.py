"""What a lock forbids, whom it holds, and what a block on a tree restores."""

import gc
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict
from tdnn.errors import LockedError


def make(**kwargs):
    return TensorDict({"a": 1.0, "b": {"c": {"d": 2.0}}, "e": {}}, **kwargs)


def nodes(td):
    return [td, *[value for value in td.values(True) if isinstance(value, TensorDict)]]


def locks(td):
    return [node.is_locked for node in nodes(td)]


CHANGES = {
    "set": lambda td: td.set("new", 1),
    "set nested": lambda td: td.set(("b", "c", "new"), 1),
    "replace": lambda td: td.set("a", 1),
    "item": lambda td: td.__setitem__("a", 1),
    "delete": lambda td: td.del_(("b", "c")),
    "pop": lambda td: td.pop("a"),
    "setdefault": lambda td: td.setdefault("new", 1),
    "update": lambda td: td.update({"b": {"c": {"d": 3}}}),
    "rename": lambda td: td.rename_key_("a", "z"),
    "rename into": lambda td: td.rename_key_("a", ("b", "z")),
    "select": lambda td: td.select("a", inplace=True),
    "exclude": lambda td: td.exclude("a", inplace=True),
    "split": lambda td: td.split_keys(["a"], inplace=True),
    "batch size": lambda td: setattr(td, "batch_size", [1]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_locked_tree_refuses(change):
    td = make(lock=True)
    before = list(td.items(True))
    with pytest.raises(LockedError, match=r"cannot .*: the tree is locked; use unlock_\(\) first"):
        change(td)
    after = list(td.items(True))
    assert [key for key, _ in after] == [key for key, _ in before]
    assert all(now is then for (_, now), (_, then) in zip(after, before, strict=True))


def test_a_branch_of_a_locked_tree_refuses():
    td = make(lock=True)
    with pytest.raises(LockedError, match="cannot set 'x'"):
        td["b", "c"]["x"] = 1


def test_a_locked_tree_can_be_written_into():
    td = make(lock=True)
    leaf = td["b", "c", "d"]
    td.set_("a", 5).update_({"b": {"c": {"d": 6}}})
    td.set("a", 7, inplace=True).update({"b": {"c": {"d": 8}}}, inplace=True)
    td += 1
    assert td["a"] == 8
    assert leaf == 9


def test_what_is_made_from_a_locked_tree_is_unlocked():
    td = make(lock=True)
    for made in (td.clone(), td.copy(), td.select("a"), td.exclude("a"), td + 1, td.empty()):
        assert not any(locks(made))


def test_the_attribute_locks_and_unlocks():
    td = make()
    td.is_locked = True
    assert all(locks(td))
    td.is_locked = False
    assert not any(locks(td))


def test_unlock_reaches_branches_that_were_locked_alone():
    td = make()
    td["b", "c"].lock_()
    td.unlock_()
    assert not any(locks(td))


@pytest.mark.parametrize("key", ["b", ("b", "c")])
def test_a_branch_of_a_locked_tree_cannot_be_unlocked_alone(key):
    td = make(lock=True)
    with pytest.raises(LockedError, match="is part of another locked tree; unlock that one first"):
        td[key].unlock_()
    assert all(locks(td))


def test_a_tree_cannot_be_unlocked_while_another_locked_one_holds_a_branch_of_it():
    td = make()
    other = TensorDict({"shared": td["b", "c"]}).lock_()
    td.lock_()
    with pytest.raises(LockedError, match="is part of another locked tree"):
        td.unlock_()
    assert all(locks(td))
    del other
    assert not any(locks(td.unlock_()))


def test_a_branch_is_free_when_the_tree_that_held_it_is_gone():
    branch = make(lock=True)["b"]
    gc.collect()
    assert branch.is_locked
    assert not branch.unlock_().is_locked


def test_a_branch_at_two_places_of_one_tree_is_locked_and_unlocked_with_it():
    shared = TensorDict({"x": 1})
    td = TensorDict({"a": {"s": shared}, "b": {"s": shared}, "s": shared})
    td.lock_()
    assert shared.is_locked
    td.unlock_()
    assert not shared.is_locked


def test_pickle_keeps_the_lock_and_who_holds_it():
    td = pickle.loads(pickle.dumps(make(lock=True)))
    assert all(locks(td))
    with pytest.raises(LockedError, match="is part of another locked tree"):
        td["b"].unlock_()
    assert not any(locks(td.unlock_()))


# -- blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("action", ["lock_", "unlock_"])
@pytest.mark.parametrize("start", ["unlocked", "locked", "branch locked"])
def test_a_block_restores_every_lock(start, action, fails):
    td = make()
    if start == "locked":
        td.lock_()
    elif start == "branch locked":
        td["b", "c"].lock_()
    before = locks(td)

    def block():
        with getattr(td, action)() as entered:
            assert entered is td
            assert locks(td) == [action == "lock_"] * 4
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            block()
    else:
        block()
    assert locks(td) == before


def test_a_block_locks_what_was_added_in_it():
    td = make(lock=True)
    with td.unlock_():
        td["new", "branch"] = TensorDict({"x": 1})
    assert all(locks(td))
    with pytest.raises(LockedError, match="cannot set 'y'"):
        td["new", "branch"]["y"] = 1


def test_blocks_nest():
    td = make()
    with td.lock_():
        with td.unlock_():
            td["x"] = 1
            with td.lock_():
                assert all(locks(td))
            assert not any(locks(td))
        assert all(locks(td))
    assert not any(locks(td))


def test_a_call_without_a_block_inside_one_does_not_end_it():
    td = make(lock=True)
    with td.unlock_():
        td["x"] = 1
        td.lock_()
        td.unlock_()
        td["y"] = 2
    assert all(locks(td))
    with td.unlock_() as view, view.flatten_keys(inplace=True):
        td["p.q"] = 1
        td.lock_()
    assert ("p", "q") in td
    assert all(locks(td))


def test_a_block_needs_something_to_undo():
    td = make()
    message = (
        r"`with` needs a change that it can undo, made just before: to_module\(net\), lock_\(\)"
    )
    with pytest.raises(RuntimeError, match=message), td:
        pass
    view = td.lock_()
    with view:
        pass
    with pytest.raises(RuntimeError, match="each call serves one block"), view:
        pass


def test_a_lock_traces():
    def run(td):
        with td.unlock_():
            td["sum"] = td["a"] + td["b", "c", "d"]
        return td.is_locked, td["sum"]

    expected = run(make(lock=True))
    assert expected == (True, torch.tensor(3.0))
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert compiled(make(lock=True)) == expected


def test_a_compiled_function_unlocks_any_tree_without_compiling_again():
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def add(tree):
        with tree.unlock_():
            tree["b", "d"] = tree["a"] + 1
        return tree["b", "d"]

    for n in range(4):
        tree = TensorDict({"a": torch.full((2,), float(n)), "b": {"c": 1}}, lock=True)
        assert add(tree).tolist() == [n + 1.0] * 2
        assert tree.is_locked
    assert counter.frame_count == 1


def test_a_lock_on_a_branch_that_another_tree_holds_ends_with_its_block():
    shared = TensorDict({"x": 1})
    other = TensorDict({"s": shared}).lock_()
    tree = TensorDict({"s": shared, "b": {"c": 2}})
    with pytest.raises(KeyError, match="mine"), tree.lock_():
        raise KeyError("mine")
    assert not tree.is_locked
    assert not tree["b"].is_locked
    assert shared.is_locked
    other.unlock_()
    assert not shared.is_locked


def test_what_a_tree_locked_in_the_block_holds_stays_locked():
    tree = TensorDict({"b": {"c": 2}, "d": {"e": 3}})
    with tree.lock_():
        other = TensorDict({"held": tree["b"]}, lock=True)
    assert (tree.is_locked, tree["b"].is_locked, tree["d"].is_locked) == (False, True, False)
    other.unlock_()
    assert not tree["b"].is_locked
