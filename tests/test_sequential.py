"""``TensorDictSequential``: chains of modules and their keys."""

import copy
import pickle

import pytest
import torch
from chains import ONE, STEPS, Own, build, chain, filled, keys, notes, step, tree
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdnn import TensorDict
from tdnn.errors import MissingKeyError
from tdnn.nn import TensorDictModule, TensorDictSequential, WrapModule

# -- running -------------------------------------------------------------------------------------


def test_each_step_sees_what_earlier_ones_wrote():
    seq, td = chain("x>y", "x y>z"), tree()
    assert seq(td) is td
    assert torch.equal(td["y"], 2 * ONE)
    assert torch.equal(td["z"], 4 * ONE)
    assert [out.tolist() for out in seq(ONE)] == [[2, 2], [4, 4]]
    assert [out.tolist() for out in seq(x=ONE)] == [[2, 2], [4, 4]]


def test_steps_may_be_given_one_by_one_as_a_list_or_by_name():
    one, two = step("x", "y"), step("y", "z")
    for seq in (
        TensorDictSequential(one, two),
        TensorDictSequential([one, two]),
        TensorDictSequential((one, two)),
        TensorDictSequential(nn.ModuleList([one, two])),
        TensorDictSequential({"a": one, "b": two}),
        TensorDictSequential(nn.ModuleDict({"a": one, "b": two})),
    ):
        assert list(seq) == [one, two]
        assert len(seq) == 2
        assert keys(seq(tree())) == ["x", "y", "z"]


def test_a_chain_without_steps_hands_the_tree_on():
    for seq in (TensorDictSequential(), TensorDictSequential([]), TensorDictSequential({})):
        td = tree()
        assert seq(td) is td
        assert (seq.in_keys, seq.out_keys, len(seq)) == ([], [], 0)


def test_a_function_of_a_tree_may_be_a_step():
    seq = TensorDictSequential(step("x", "y"), lambda td: td.reshape(-1))
    td = seq(TensorDict({"x": torch.ones(2, 2)}, [2, 2]))
    assert td.batch_size == (4,)
    assert isinstance(seq[1], WrapModule)
    assert (seq.in_keys, seq.out_keys) == (["x"], ["y"])


def test_a_function_that_says_its_keys_may_be_a_step():
    def shift(td):
        return td.set("y", td["x"] + 1)

    shift.in_keys, shift.out_keys = ["x"], ["y"]
    seq = TensorDictSequential(shift)
    assert (seq.in_keys, seq.out_keys) == (["x"], ["y"])
    assert torch.equal(seq(ONE), 2 * ONE)


def test_a_module_under_two_names_runs_twice():
    again = TensorDictModule(nn.Linear(2, 2), ["x"], ["x"])
    seq = TensorDictSequential({"first": again, "second": again})
    wanted = again.module(again.module(ONE))
    assert torch.equal(seq(tree())["x"], wanted)
    assert len(list(seq.parameters())) == 2
    assert len(seq.state_dict()) == 4


def test_names_stand_in_the_state_dict():
    seq = TensorDictSequential({"head": TensorDictModule(nn.Linear(2, 1), "x", "y")})
    assert list(seq.state_dict()) == ["module.head.module.weight", "module.head.module.bias"]
    seq = TensorDictSequential(seq["head"])
    assert list(seq.state_dict()) == ["module.0.module.weight", "module.0.module.bias"]


def test_hooks_of_every_step_run():
    seq, seen = chain("x>y", "y>z"), []
    for at, module in enumerate([*seq, seq]):
        module.register_forward_hook(lambda mod, args, out, at=at: seen.append(at))
    seq(tree())
    assert seen == [0, 1, 2]


# -- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "in_keys", "out_keys"),
    [
        (["x>y", "y>z"], ["x"], ["y", "z"]),
        (["x>y", "x w>z"], ["x", "w"], ["y", "z"]),
        (["x y>y"], ["x", "y"], ["y"]),
        (["x>y", "x>z", "z>y"], ["x"], ["z", "y"]),
        (["x>y _", "y>_"], ["x"], ["y"]),
        ([">x", "x>y"], [], ["x", "y"]),
    ],
)
def test_keys_are_worked_out_from_the_steps(pairs, in_keys, out_keys):
    seq = chain(*pairs)
    assert (seq.in_keys, seq.out_keys) == (in_keys, out_keys)
    outer = TensorDictSequential(TensorDictSequential(seq))
    assert (outer.in_keys, outer.out_keys) == (in_keys, out_keys)


def test_an_entry_below_or_above_a_written_one_counts_as_written():
    assert TensorDictSequential(step("x", ["n"]), step([("n", "y")], "z")).in_keys == ["x"]
    assert TensorDictSequential(step("x", [("n", "y")]), step(["n"], "z")).in_keys == ["x"]
    siblings = TensorDictSequential(step("x", [("n", "y")]), step([("n", "z")], "w"))
    assert siblings.in_keys == ["x", ("n", "z")]


def test_an_entry_below_a_read_one_is_not_read_besides():
    for reads in ([("n", "y"), "n"], ["n", ("n", "y")]):
        seq = TensorDictSequential(*[step([key], f"z{at}") for at, key in enumerate(reads)])
        assert seq.in_keys == ["n"]
        assert len(seq(n=TensorDict({"y": ONE}))) == 2


def test_keys_follow_a_step_that_is_changed():
    seq = TensorDictSequential(chain("x>y"), Own("y", "z"), step("z", "w"))
    assert (seq.in_keys, seq.out_keys) == (["x"], ["y", "z", "w"])
    seq[0][0].out_keys = ["v"]
    assert (seq.in_keys, seq.out_keys) == (["x", "y"], ["v", "z", "w"])
    seq[1].in_keys[0] = "v"  # a step of another class keeps a list of its own
    assert seq.in_keys == ["x"]
    seq[2].in_keys = ["z", "u"]
    assert seq.in_keys == ["x", "u"]
    assert len(seq(x=ONE, u=ONE)) == 3
    seq[2].select_out_keys()
    assert seq.out_keys == ["v", "z"]
    seq.module.append(step("w", "t"))
    assert seq.in_keys == ["x", "u", "w"]


def test_keys_of_a_step_may_be_written_in_any_way():
    class Loose(Own):
        def __init__(self):
            super().__init__()
            self.in_keys, self.out_keys = "x", (("n", ("y",)), ("z",))

        def forward(self, tensordict):
            return tensordict.set(("n", "y"), tensordict["x"]).set("z", tensordict["x"])

    seq = TensorDictSequential(Loose(), step([("n", "y"), "z"], "w"), partial_tolerant=True)
    assert (seq.in_keys, seq.out_keys) == (["x"], [("n", "y"), "z", "w"])
    assert torch.equal(seq(ONE)[-1], 3 * ONE)
    assert len(seq.select_subsequence(out_keys=["w"])) == 2


def test_keys_of_a_chain_cannot_be_assigned():
    seq = chain("x>y")
    with pytest.raises(AttributeError, match="works its in_keys out from its steps; change those"):
        seq.in_keys = ["y"]
    with pytest.raises(AttributeError, match=r"out_keys out from its steps; use select_out_keys"):
        seq.out_keys = ["y"]


@given(STEPS, st.data())
def test_a_chain_runs_on_its_in_keys_and_on_nothing_less(pairs, data):
    seq = build(pairs, data)
    out = seq(filled(seq.in_keys))
    assert all(key in out for key in seq.out_keys)
    for key in seq.in_keys:
        lesser = filled(seq.in_keys)
        del lesser[key]
        with pytest.raises(MissingKeyError):
            seq(lesser)


@given(STEPS, st.data())
def test_the_keys_of_a_chain_do_not_depend_on_how_its_steps_are_grouped(pairs, data):
    seq, flat = build(pairs, data), TensorDictSequential(*[step(*pair) for pair in pairs])
    assert (seq.in_keys, seq.out_keys) == (flat.in_keys, flat.out_keys)


def test_the_keys_of_a_chain_follow_a_step_of_a_chain_inside():
    inner = chain("n>p", "q>r")
    seq = TensorDictSequential(step("x", [("n", "a")]), inner)
    assert seq.in_keys == ["x", "q"]
    inner[1].in_keys = [("n", "b")]
    assert (inner.in_keys, seq.in_keys) == (["n"], ["x", ("n", "b")])


# -- where the outputs go ------------------------------------------------------------------------


def test_inplace_says_where_the_outputs_go():
    td = TensorDict({"x": ONE}, [2], device="cpu")
    out = chain("x>y", "y>z", inplace=False)(td)
    assert (keys(out), out.batch_size, out.device) == (["y", "z"], (), None)
    out = chain("x>y", "y>z", inplace="empty")(td)
    assert (keys(out), out.batch_size, out.device) == (["y", "z"], (2,), torch.device("cpu"))
    assert keys(td) == ["x"]
    assert chain("x>y", inplace=True)(td) is td
    assert keys(td) == ["x", "y"]


def test_steps_that_pass_on_only_their_outputs_may_end_in_the_input():
    def steps():
        first = TensorDictModule(lambda x: x + 1, ["x"], [("h", "y")], inplace=False)
        return first, TensorDictModule(lambda y: y + 1, [("h", "y")], ["z"], inplace=False)

    td = tree()
    assert keys(TensorDictSequential(*steps())(td)) == ["z"]
    assert keys(td) == ["x"]
    assert TensorDictSequential(*steps(), inplace=True)(td) is td
    assert keys(td) == ["x", "z"]


@pytest.mark.parametrize("inplace", [None, True, False, "empty"])
def test_tensordict_out_is_written_and_the_input_stays(inplace):
    seq = chain("x>y", "y>z", inplace=inplace)
    for call in (lambda td, out: seq(td, out), lambda td, out: seq(td, tensordict_out=out)):
        td, out = tree(), TensorDict({"old": ONE})
        assert call(td, out) is out
        assert keys(td) == ["x"]
        assert keys(out) == ["old", "y", "z"]


def test_only_selected_outputs_reach_the_input():
    for seq in (chain("x>y", "y>z", selected_out_keys=["z"]), chain("x>y", "y>z")):
        seq.select_out_keys("z")
        assert (seq.out_keys, seq.out_keys_source) == (["z"], ["y", "z"])
        td = tree(x=ONE, y=7 * ONE)
        assert seq(td) is td
        assert keys(td) == ["x", "y", "z"]
        assert torch.equal(td["y"], 7 * ONE)
        assert torch.equal(td["z"], 3 * ONE)
        assert torch.equal(seq(ONE), 3 * ONE)
        outer = TensorDictSequential(seq)
        assert outer.out_keys == ["z"]
        assert seq.reset_out_keys() is seq
        assert outer.out_keys == seq.out_keys == ["y", "z"]
        assert keys(seq(tree())) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("inplace", "found"), [(False, ["z"]), ("empty", ["z"]), (True, ["x", "z"])]
)
def test_a_selection_holds_wherever_the_outputs_go(inplace, found):
    seq = chain("x>y", "y>z", selected_out_keys=["z"], inplace=inplace)
    assert keys(seq(tree())) == found


def test_a_selection_from_steps_that_pass_on_only_their_outputs():
    both = TensorDictModule(lambda x: (x, x + 1), ["x"], ["y", "z"], inplace=False)
    td = tree()
    assert keys(TensorDictSequential(both, selected_out_keys=["z"])(td)) == ["z"]
    assert keys(td) == ["x"]


def test_a_selected_output_that_got_lost_is_named():
    seq = TensorDictSequential(
        TensorDictModule(lambda x: x, ["x"], ["y"]),
        TensorDictModule(lambda x: x, ["x"], ["z"], inplace=False),
        selected_out_keys=["y"],
        inplace=True,
    )
    match = r"TensorDictSequential did not write 'y'; it returned \['z'\]"
    with pytest.raises(MissingKeyError, match=match):
        seq(tree())


def test_only_outputs_can_be_selected():
    with pytest.raises(ValueError, match=r"cannot select \['zz'\]: its out_keys are \['y', 'z'\]"):
        chain("x>y", "y>z", selected_out_keys=["zz"])


def test_an_output_that_does_not_fit_leaves_the_input_as_it_was():
    def cut(td):
        return TensorDict({"y": td["x"], "z": td["x"][:1]})

    seq = TensorDictSequential(WrapModule(cut, in_keys="x", out_keys=["y", "z"]), inplace=True)
    td = tree()
    with pytest.raises(ValueError, match="does not begin with the batch size") as info:
        seq(td)
    assert keys(td) == ["x"]
    wrote = "TensorDictSequential wrote 'y' float32 (2,), 'z' float32 (1,) to TensorDict (2,)"
    assert wrote in notes(info)


# -- partial runs --------------------------------------------------------------------------------


def test_a_tolerant_chain_leaves_out_what_cannot_run():
    seq = chain("x>y", "q>r", "r>s", "y>z", partial_tolerant=True)
    assert keys(seq(tree())) == ["x", "y", "z"]
    assert keys(seq(tree(q=ONE))) == ["q", "r", "s"]
    assert keys(seq(TensorDict())) == []


def test_a_tolerant_chain_is_called_with_what_there_is():
    seq = chain("x>y", "q>r", partial_tolerant=True).select_out_keys("y")
    assert torch.equal(seq(x=ONE), 2 * ONE)
    assert torch.equal(seq(ONE), 2 * ONE)
    with pytest.raises(MissingKeyError, match="TensorDictSequential did not write 'r'"):
        seq.reset_out_keys()(x=ONE)


def test_a_step_that_does_without_an_input_is_called_without_it():
    def maybe(x, mask):
        return x if mask is None else x * mask

    seq = TensorDictSequential(TensorDictModule(maybe, ["x", "mask"], ["y"], strict=False))
    assert torch.equal(seq(ONE), ONE)
    assert torch.equal(TensorDictSequential(seq)(x=ONE), ONE)


# -- a module like any other ---------------------------------------------------------------------


def test_copies_are_independent_and_alike():
    seq = TensorDictSequential(
        {
            "a": TensorDictModule(nn.Linear(2, 2), "x", "y"),
            "b": TensorDictModule(nn.ReLU(), "y", "z"),
        },
        selected_out_keys=["z"],
        inplace="empty",
    )
    for twin in (copy.deepcopy(seq), pickle.loads(pickle.dumps(seq))):
        assert (twin.in_keys, twin.out_keys, twin.inplace) == (["x"], ["z"], "empty")
        assert torch.equal(twin(ONE), seq(ONE))
        twin["a"].out_keys = ["w"]
        assert twin.in_keys == ["x", "y"]
        assert repr(twin).count("Linear") == 1
    assert seq.in_keys == ["x"]
    assert not hasattr(seq, "no_such_thing")


def test_the_picture_shows_steps_and_keys():
    seq = TensorDictSequential(
        {"act": TensorDictModule(nn.ReLU(), "x", "y"), "flat": WrapModule(torch.flatten)},
        partial_tolerant=True,
        inplace=False,
    )
    assert repr(seq) == (
        "TensorDictSequential(\n"
        "  act: TensorDictModule(module=ReLU(), in_keys=['x'], out_keys=['y']),\n"
        "  flat: WrapModule(flatten),\n"
        "  in_keys=['x'],\n"
        "  out_keys=['y'],\n"
        "  partial_tolerant=True,\n"
        "  inplace=False\n"
        ")"
    )
    outer = repr(TensorDictSequential(seq))
    assert "  0: TensorDictSequential(\n    act: TensorDictModule(" in outer
