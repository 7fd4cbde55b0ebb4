"""One tensor under two names is written once, with one value."""

import pytest
import torch

from tdnn import TensorDict, TensorDictParams

NAN = float("nan")


def tied():
    """Return an unbatched and a batched place for one tensor: a tree of 3 with it under 2 names."""
    x = torch.zeros(3)
    return TensorDict({"a": x, "b": {"c": x}, "z": torch.zeros(3)}, [3])


def values(one, two):
    return {"a": one, "b": {"c": two}, "z": torch.ones(3)}


WAYS = {
    "update_": lambda td, new: td.update_(new),
    "update_ with a tree": lambda td, new: td.update_(TensorDict(new)),
    "update in place": lambda td, new: td.update(new, inplace=True),
    "set_": lambda td, new: TensorDict({"t": td}).set_("t", new),
    "set in place": lambda td, new: TensorDict({"t": td}).set("t", new, inplace=True),
    "set_at_": lambda td, new: TensorDict({"t": td}).set_at_("t", new, slice(None)),
    "a slice": lambda td, new: td.__setitem__(slice(None), new),
    "a list": lambda td, new: td.__setitem__([0, 1, 2], new),
    "a mask": lambda td, new: td.__setitem__(torch.ones(3, dtype=torch.bool), new),
    "an ellipsis": lambda td, new: td.__setitem__(..., new),
    "apply_": lambda td, new: td.apply_(lambda _, x: torch.as_tensor(x), TensorDict(new)),
    "out": lambda td, new: TensorDict(new, [3]).where(torch.tensor(True), 0, out=td),
    "add_": lambda td, new: td.add_(new),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_values_for_one_tensor_are_refused_before_anything_is_written(way):
    td = tied()
    message = r"two different values for one tensor: 'a' and \('b', 'c'\)"
    new = values(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]))
    if way == "out":
        message = r"one tensor: \('out', 'a'\) and \('out', 'b', 'c'\); nothing was written"
    if way in ("set_", "set in place"):
        message = r"two different values for one tensor: \('t', 'a'\) and \('t', 'b', 'c'\)"
    with pytest.raises(ValueError, match=message):
        WAYS[way](td, new)
    assert all(bool((leaf == 0).all()) for leaf in td.values(True, True))


@pytest.mark.parametrize("way", WAYS)
def test_one_value_for_one_tensor_is_written_whether_or_not_it_is_one_object(way):
    one = torch.tensor([1.0, 2.0, 3.0])
    for two in (one, one.clone(), one.double()):
        td = tied()
        WAYS[way](td, values(one, two))
        assert td["a"] is td["b", "c"]
        assert td["a"].tolist() == [1.0, 2.0, 3.0]
        assert td["z"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("way", ["update_", "a slice", "set_"])
@pytest.mark.parametrize(
    ("one", "two", "agree"),
    [
        (2, 2.0, True),
        (2, torch.full((3,), 2.0), True),
        (torch.full((3,), 2), 2, True),
        (torch.tensor([NAN, 1.0, 2.0]), torch.tensor([NAN, 1.0, 2.0]), True),
        (torch.tensor([NAN, 1.0, 2.0]), torch.tensor([NAN, 1.0, 3.0]), False),
        (torch.tensor([NAN, 1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]), False),
        (2, 3, False),
        (2, torch.tensor([2, 2, 3]), False),
    ],
    ids=str,
)
def test_values_are_one_if_they_would_leave_the_same_in_the_tensor(way, one, two, agree):
    td = tied()
    if agree:
        WAYS[way](td, values(one, two))
        expected = torch.zeros(3).copy_(torch.as_tensor(one))
        torch.testing.assert_close(td["a"], expected, equal_nan=True)
    else:
        with pytest.raises(ValueError, match="two different values"):
            WAYS[way](td, values(one, two))
        assert td["a"].tolist() == [0, 0, 0]


def test_all_ties_with_two_values_are_listed():
    x, y = torch.zeros(()), torch.zeros(())
    td = TensorDict({"a": x, "b": x, "c": y, "d": y, "e": y})
    message = "one tensor: 'a' and 'b', 'c' and 'e'; nothing was written"
    with pytest.raises(ValueError, match=message):
        td.update_({"a": 1, "b": 2, "c": 3, "d": 3, "e": 4})


def test_a_tie_may_be_written_under_one_of_its_names():
    td = tied().update_({"b": {"c": 5}})
    assert td["a"].tolist() == [5, 5, 5]


def test_values_that_are_themselves_written_are_read_as_they_were_before():
    td = TensorDict({"a": torch.tensor(1), "b": torch.tensor(2)})
    td.update_({"a": td["b"], "b": td["a"]})
    assert (td["a"], td["b"]) == (2, 1)
    td.update({"a": td["b"], "b": td["a"]}, inplace=True)
    assert (td["a"], td["b"]) == (1, 2)


def test_tied_parameters_take_the_values_of_a_tied_tree():
    weight = torch.nn.Parameter(torch.zeros(2))
    params = TensorDictParams({"in": weight, "out": weight})
    with torch.no_grad():
        params.update_(params.data + 1)
        with pytest.raises(ValueError, match="one tensor: 'in' and 'out'"):
            params.update_({"in": torch.ones(2), "out": torch.zeros(2)})
    assert weight.tolist() == [1, 1]


def test_writing_ties_traces_if_each_gets_one_value():
    def write(td, x):
        td.update_({"a": x, "b": {"c": x}})
        td[1:] = TensorDict({"a": x, "b": {"c": x}, "z": x}, [3])[1:] * 2
        return td["a"] + 0

    td = tied()
    found = torch.compile(write, backend="eager", fullgraph=True)(td, torch.ones(3))
    assert found.tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    "write",
    [
        lambda td, new: td.update_(new),
        lambda td, new: td.update(new, inplace=True),
        lambda td, new: td.load_state_dict(new),
        lambda td, new: td.__setitem__(slice(None), new),
        lambda td, new: td.__setitem__(..., TensorDict(new, [3])),
        lambda td, new: td.add_(new),
    ],
)
def test_leaves_may_trade_values_in_one_write(write):
    def make():
        return TensorDict({"a": torch.zeros(3), "b": torch.ones(3)}, [3])

    td, wanted = make(), make()
    write(td, {"a": td["b"], "b": td["a"]})
    write(wanted, {"a": torch.ones(3), "b": torch.zeros(3)})
    assert bool((td == wanted).all())


VIEWS = {
    "view": lambda w: w[:2],
    "split": lambda w: w.mul(1).split(2)[0],
    "unbind": lambda w: w.mul(1).view(2, 2).unbind()[0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.update_({"a": torch.ones(2), "v": torch.ones(2)}),
        lambda td: td.__setitem__(0, 5.0),
        lambda td: td.__setitem__(slice(None), {"a": torch.ones(2), "v": torch.ones(2)}),
        lambda td: td.apply_(lambda leaf: leaf.detach() + 1),
        lambda td: td.masked_fill_(torch.tensor([True, False]), 1),
        lambda td: td.clamp_(1, 2),
        lambda td: td.add_(1),
    ],
)
def test_a_view_that_autograd_guards_is_refused_before_the_first_write(write, view):
    td = TensorDict({"a": torch.zeros(2), "v": view(torch.zeros(4, requires_grad=True))}, [2])
    with pytest.raises(RuntimeError, match=r"in place into \['v'\]: requires_grad is set"):
        write(td)
    assert td["a"].tolist() == [0, 0]
    with torch.inference_mode():
        td["v"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"in place into \['v'\]: it was made in inference mode"):
        write(td)
    assert td["a"].tolist() == [0, 0]
    with torch.inference_mode():
        write(td)


def test_a_new_entry_is_held_as_it_was_given_though_its_tensor_is_overwritten():
    old = torch.zeros(3)
    td = TensorDict({"x": old}, [3])
    td.update({"x": torch.ones(3), "n": old}, inplace=True)
    assert (td["x"].tolist(), td["n"].tolist()) == ([1] * 3, [0] * 3)


def test_a_tree_made_on_another_device_keeps_its_ties():
    tied = torch.zeros(2)
    source = {"a": tied, "b": {"c": tied}, ("d", "e"): tied, "n": 1.0}
    trees = [
        TensorDict(source, device="meta"),
        TensorDict(TensorDict(source), device="meta"),
        TensorDict({"b": TensorDict({"c": tied})}, device="meta", a=tied),
    ]
    for tree in trees:
        assert tree["a"] is tree["b", "c"]
        assert {leaf.device.type for leaf in tree.values(True, True)} == {"meta"}
        assert tree["b"].device == torch.device("meta")


@pytest.mark.parametrize(
    "move",
    [
        lambda td, new: td.update(new),
        lambda td, new: td.update(TensorDict(new)),
        lambda td, new: td.set("deep", new).get("deep"),
        lambda td, new: td.set(("deep", "er"), TensorDict(new)).get(("deep", "er")),
    ],
)
def test_entries_that_move_to_the_device_of_the_tree_keep_their_ties(move):
    x = torch.zeros(3)
    td = move(TensorDict({}, device="meta"), {"a": {"b": x}, "c": x, "d": torch.zeros(3)})
    assert td["a", "b"].device.type == "meta"
    assert td["a", "b"] is td["c"] is not td["d"]


def test_a_compiled_copy_by_update_keeps_a_tie():
    def run(w):
        return TensorDict().update({"a": w, "b": {"c": w}}, clone=True)

    found = torch.compile(run, fullgraph=True, backend="eager")(torch.zeros(2))
    assert found["a"] is found["b", "c"]
