"""What ``TensorDictModule`` refuses, and what it says of an exception in the wrapped module."""

import functools

import pytest
import torch
from chains import ONE, TWO, fork, keys, notes, plus_one, tree
from torch import nn

from tdnn import TensorDict
from tdnn.errors import LockedError, MissingKeyError
from tdnn.nn import TensorDictModule

# -- what is refused on construction -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (
            {"in_keys": [1]},
            r"TensorDictModule\(plus_one\): in_keys \[1\] has \[1\]; a key is a str",
        ),
        ({"in_keys": ["x", 1, ()]}, r"in_keys \['x', 1, \(\)\] has \[1, \(\)\]"),
        ({"in_keys": 1}, "in_keys is a key or a list of keys, not 1"),
        ({"in_keys": {"x"}}, "in_keys is a key or a list of keys, not {'x'}"),
        ({"in_keys": {("n", "x"): "a"}}, r"argument names, which are str, .* \[\('n', 'x'\)\]"),
        ({"in_keys": {"a": 1}}, r"in_keys \[1\] has \[1\]"),
        ({"out_keys": ["y", None]}, r"out_keys \['y', None\] has \[None\]"),
        ({"out_keys": {"y": "z"}}, "out_keys is a key or a list of keys, not {'y': 'z'}"),
        ({"module": 3}, "TensorDictModule wraps a callable, not 3"),
        (
            {"module": nn.Linear},
            r"wraps a module, not the class Linear; write Linear\(\.\.\.\)",
        ),
        (
            {"module": nn.Linear(1, 1), "method": "forwad"},
            r"Linear has no 'forwad' \(did you mean 'f",
        ),
        ({"out_to_in_map": True}, "out_to_in_map is for a dict of in_keys"),
    ],
)
def test_a_wrong_kind_is_refused_on_construction(kwargs, match):
    with pytest.raises(TypeError, match=match):
        TensorDictModule(**{"module": plus_one, "in_keys": ["x"], "out_keys": ["y"], **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"out_keys": ["y", "z", "y"]}, r"two outputs cannot have one key, .* has \['y'\] more"),
        ({"out_keys": [("n", "y"), ("n", ("y",))]}, r"has \[\('n', 'y'\)\] more than once"),
        ({"out_keys": ["n", ("n", "y")]}, r"cannot stand inside another, .* has \[\('n', 'y'\)\]"),
        ({"inplace": "emty"}, r"inplace is one of \[True, False, 'empty'\], not 'emty'"),
        ({"inplace": None}, r"inplace is one of \[True, False, 'empty'\], not None"),
        ({"in_keys": {"x": "a", "y": "a"}, "out_to_in_map": False}, "one argument several values"),
    ],
)
def test_a_wrong_value_is_refused_on_construction(kwargs, match):
    with pytest.raises(ValueError, match=match):
        TensorDictModule(**{"module": plus_one, "in_keys": ["x"], "out_keys": ["y"], **kwargs})


def test_underscores_may_stand_twice_among_the_outputs():
    assert TensorDictModule(fork, ["x"], ["_", "_"])(ONE) == ()


# -- what is refused in a call -------------------------------------------------------------------


def test_missing_inputs_are_all_named_with_the_nearest():
    module = TensorDictModule(torch.addcmul, ["obs", "hiden", ("n", "x")], ["y"])
    match = (
        r"TensorDictModule\(addcmul\) reads \['obs', 'hiden', \('n', 'x'\)\]; missing is "
        r"'hiden' \(did you mean 'hidden'\?\), \('n', 'x'\) \(did you mean \('n', 'xs'\)\?\); "
        r"the input has \['obs', 'hidden', \('n', 'xs'\)\]$"
    )
    with pytest.raises(MissingKeyError, match=match):
        module(tree(obs=ONE, hidden=ONE, n={"xs": ONE}))


def test_a_key_that_stands_deeper_is_suggested():
    with pytest.raises(KeyError, match=r"missing is 'obs' \(did you mean \('agent', 'obs'\)\?\)"):
        TensorDictModule(plus_one, ["obs"], ["y"])(tree(agent={"obs": ONE}))


def test_a_tuple_that_was_meant_as_a_list_is_explained():
    match = r"missing is \('x', 'y'\) \(one nested key; for several write \['x', 'y'\]\)"
    with pytest.raises(KeyError, match=match):
        TensorDictModule(torch.add, ("x", "y"), ["z"])(tree(x=ONE, y=ONE))


def test_a_dict_that_was_meant_the_other_way_round_is_explained():
    match = (
        r"missing is 'a', \('n', 'b'\).*; a dict of in_keys goes from arguments to keys, unless "
        "out_to_in_map=False$"
    )
    turned = {"x": "a", "y": ("n", "b")}
    with pytest.raises(KeyError, match=match):
        TensorDictModule(torch.add, turned, ["z"])(tree(x=ONE, y=ONE))
    with pytest.raises(KeyError) as info:
        TensorDictModule(torch.add, turned, ["z"])(tree(x=ONE))
    assert "out_to_in_map" not in str(info.value)


def test_none_is_an_input_only_if_that_was_asked_for():
    module = TensorDictModule(lambda x, mask: x if mask is None else mask, ["x", "mask"], ["y"])
    match = r"None for 'mask', which a tree cannot hold \(strict=False lets an input be None\)$"
    for call in (lambda: module(ONE, None), lambda: module(x=ONE, mask=None)):
        with pytest.raises(TypeError, match=match):
            call()


def test_none_is_no_output_but_may_be_dropped():
    def forget(x):
        return x, None

    for module in (TensorDictModule(forget, "x", ["y", "z"]), TensorDictModule(print, "x", "z")):
        td = tree()
        with pytest.raises(TypeError, match="key 'z': a tree holds tensors") as info:
            module(td)
        assert notes(info).endswith("'z' None to TensorDict (2,); the key '_' drops an output")
        assert keys(td) == ["x"]
    with pytest.raises(ValueError, match="batch size") as info:
        TensorDictModule(lambda x: (x[:1], None), "x", ["y", "_"])(tree())
    assert notes(info).endswith("'y' float32 (1,) to TensorDict (2,)")


def test_a_key_through_a_leaf_is_missing():
    with pytest.raises(MissingKeyError, match=r"missing is \('x', 'y'\); the input has \['x'\]"):
        TensorDictModule(plus_one, [("x", "y")], ["z"])(tree())


def test_a_missing_input_is_none_only_if_that_was_asked_for():
    def maybe(x, mask=None):
        return x if mask is None else x * mask

    with pytest.raises(MissingKeyError, match="missing is 'mask'"):
        TensorDictModule(maybe, ["x", "mask"], ["y"])(tree())
    for wanted in (["x", "mask"], {"x": "x", "mask": "mask"}):
        module = TensorDictModule(maybe, wanted, ["y"], strict=False)
        assert module(tree())["y"] is not None
        assert torch.equal(module(tree(x=ONE, mask=TWO))["y"], TWO)
        assert torch.equal(module(ONE), ONE)
        assert torch.equal(module(ONE, None), ONE)
        assert torch.equal(module(ONE, mask=TWO), TWO)


def test_the_note_tells_that_a_tolerated_input_was_missing():
    module = TensorDictModule(plus_one, ["x"], ["y"], strict=False)
    with pytest.raises(TypeError) as info:
        module(TensorDict({"q": ONE}))
    assert notes(info) == "TensorDictModule(plus_one) read 'x' None"


@pytest.mark.parametrize(
    ("outputs", "names", "match"),
    [
        (
            lambda x: x,
            ["p", "q"],
            r"returned float32 \(2,\) for 2 out_keys \['p', 'q'\]; return a tup",
        ),
        (
            lambda x: (x,),
            ["p", "q"],
            r"returned 1 output for 2 out_keys \['p', 'q'\]; return a tuple",
        ),
        (
            lambda x: (x, x),
            ["p"],
            r"returned 2 outputs for 1 out_key \['p'\]; give each a key, '_' if",
        ),
        (
            lambda x: [],
            ["p"],
            r"returned 0 outputs for 1 out_key \['p'\]; return a tuple of 1, or dr",
        ),
        (lambda x: x, [], r"returned float32 \(2,\) for 0 out_keys \[\]; give each a key"),
        (lambda x: None, ["p", "q"], r"returned None for 2 out_keys"),
        (
            lambda x: {"p": x, "qq": x},
            ["p", "q"],
            r"returned a dict of \['p', 'qq'\] for 2 out_keys \['p', 'q'\]; not in it is 'q' \(did",
        ),
        (lambda x: tree(p=x), ["p", "q", ("n", "r")], r"a TensorDict of .*is 'q', \('n', 'r'\)"),
    ],
)
def test_the_number_of_outputs_must_match_and_nothing_is_written(outputs, names, match):
    td = tree()
    with pytest.raises(ValueError, match=match):
        TensorDictModule(outputs, ["x"], names)(td)
    assert keys(td) == ["x"]


def test_a_tuple_of_tensors_is_not_one_output():
    td = TensorDict({"x": torch.ones(1, 1, 1)})
    match = (
        r"TensorDictModule\(LSTM\) returned a tuple of 2 for 'state', and a key holds one tensor"
    )
    with pytest.raises(TypeError, match=match):
        TensorDictModule(nn.LSTM(1, 1), ["x"], ["y", "state"])(td)
    assert keys(td) == ["x"]
    assert keys(TensorDictModule(nn.LSTM(1, 1), ["x"], ["y", "_"])(td)) == ["x", "y"]
    numbers = TensorDictModule(lambda x: (x, [1, 2]), ["x"], ["y", "z"])(td)["z"]
    assert numbers.tolist() == [1, 2]


@pytest.mark.parametrize("names", [["a", "b"], [("n", "a"), "b"], ["a", ("n", "b")]])
def test_an_output_that_does_not_fit_leaves_the_tree_as_it_was(names):
    td = tree()
    with pytest.raises(ValueError, match="does not begin with the batch size") as info:
        TensorDictModule(lambda x: (x, x[:1]), ["x"], names)(td)
    assert list(td.keys(True)) == ["x"]
    wrote = f"wrote {names[0]!r} float32 (2,), {names[1]!r} float32 (1,) to TensorDict (2,)"
    assert wrote in notes(info)


@pytest.mark.parametrize("names", [["y"], ["y", "z"], [("n", "y"), "z"]])
def test_a_locked_tree_refuses_outputs(names):
    module = TensorDictModule(lambda x: (x,) * len(names), ["x"], names)
    td = tree(x=ONE, n={"q": ONE}).lock_()
    with pytest.raises(LockedError, match="cannot set"):
        module(td)
    assert keys(td) == ["x", ("n", "q")]
    assert len(keys(module(td, tensordict_out=TensorDict()))) == len(names)


def test_a_tree_cannot_be_written_into_itself():
    td = tree()
    with pytest.raises(ValueError, match="a tree cannot hold itself"):
        TensorDictModule(lambda x: td, ["x"], ["y"])(td)
    with pytest.raises(ValueError, match="a tree cannot hold itself"):
        TensorDictModule(lambda x: (td, x), ["x"], ["y", "z"])(td)


def test_an_exception_of_the_module_keeps_its_type_and_tells_what_was_read():
    module = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    td = TensorDict({"x": torch.ones(5, 2), "other": ONE[:1]})
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as info:
        module(td)
    assert notes(info) == "TensorDictModule(Linear) read 'x' float32 (5, 2)"
    assert keys(td) == ["x", "other"]


class OddError(Exception):
    """An exception that is hard to make a second time."""

    def __init__(self, one, two):
        super().__init__(one)
        self.two = two


def test_any_exception_gets_through_as_the_same_object():
    error = OddError("one", two=2)

    def fail(x, branch):
        raise error

    with pytest.raises(OddError) as info:
        TensorDictModule(fail, ["x", "n"], ["y"])(tree(x=ONE.long(), n={"y": ONE}))
    assert info.value is error
    assert notes(info) == "TensorDictModule(fail) read 'x' int64 (2,), 'n' TensorDict (2,)"


def test_a_keyboard_interrupt_gets_no_note():
    def interrupt(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as info:
        TensorDictModule(interrupt, ["x"], ["y"])(tree())
    assert notes(info) == ""


def test_an_error_inside_a_module_of_modules_tells_both():
    inner = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    outer = TensorDictModule(lambda x: inner(x), ["p"], ["q"])
    with pytest.raises(RuntimeError) as info:
        outer(tree(p=ONE))
    assert notes(info).splitlines() == [
        "TensorDictModule(Linear) read 'x' float32 (2,)",
        "TensorDictModule(<lambda>) read 'p' float32 (2,)",
    ]


def test_a_tree_is_the_only_positional_argument():
    module = TensorDictModule(plus_one, ["x"], ["y"])
    match = (
        r"takes the tree alone by position, not float32 \(2,\), list too; inputs go into the tree"
    )
    with pytest.raises(TypeError, match=match):
        module(tree(), ONE, [])


def test_titles_name_what_is_wrapped():
    class Net(nn.Module):
        def run(self, x):
            raise ValueError("no")

    class Own(TensorDictModule):
        pass

    for module, title in (
        (TensorDictModule(Net(), "x", "y", method="run"), "TensorDictModule(Net.run)"),
        (Own(Net().run, "x", "y"), "Own(run)"),
        (Own(functools.partial(Net().run), "x", "y"), "Own(partial(run))"),
    ):
        with pytest.raises(ValueError, match="no") as info:
            module(tree())
        assert notes(info) == f"{title} read 'x' float32 (2,)"


def test_one_value_for_a_whole_batch_is_told_to_go_without_batch_dims():
    module = TensorDictModule(lambda x: x.mean(), ["x"], ["loss"])
    with pytest.raises(ValueError, match="does not begin with the batch size") as info:
        module(TensorDict({"x": torch.ones(3)}, [3]))
    assert notes(info).endswith(
        "wrote 'loss' float32 () to TensorDict (3,); for one value of the whole batch, give a tree "
        "without batch dims"
    )
    assert module(TensorDict({"x": torch.ones(3)}))["loss"] == 1
