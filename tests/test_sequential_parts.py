"""The steps of a chain: indexing, editing, and parts that can run on their own."""

import pytest
import torch
from chains import ONE, POOL, STEPS, build, chain, filled, keys, step, total, tree
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdnn.errors import MissingKeyError
from tdnn.nn import TensorDictModule, TensorDictSequential, WrapModule

# -- steps as a sequence -------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["numbered", "named"])
def seq(request):
    steps = {"a": step("x", "y"), "b": step("y", "z"), "c": step("z", "w")}
    return TensorDictSequential(steps if request.param else list(steps.values()))


def test_indexing_is_that_of_a_list(seq):
    steps = list(seq)
    assert [seq[at] for at in (0, 1, 2, -1, -3)] == [steps[at] for at in (0, 1, 2, -1, -3)]
    for part in (slice(1), slice(1, None), slice(None, None, 2), slice(5, 9), slice(-2, -1)):
        assert list(seq[part]) == steps[part]
        assert type(seq[part]) is TensorDictSequential
    for at in (3, -4):
        with pytest.raises(IndexError, match=f"has no step {at}; it has 3 steps"):
            seq[at]


def test_steps_have_names_or_not():
    one, two = step("x", "y"), step("y", "z")
    seq = TensorDictSequential({"body": one, "head": two})
    assert seq["head"] is two
    assert list(seq[1:].module) == ["head"]
    with pytest.raises(
        KeyError, match=r"no step 'haed'; it has \['body', 'head'\] \(did you mean 'h"
    ):
        seq["haed"]
    with pytest.raises(KeyError, match="no step 'head'; it has steps without names"):
        TensorDictSequential(one, two)["head"]


def test_a_part_keeps_class_options_and_what_the_class_added():
    class Chain(TensorDictSequential):
        def __init__(self, label, *modules, **kwargs):
            super().__init__(*modules, **kwargs)
            self.label = label
            self.scale = nn.Parameter(ONE)

    seq = Chain(
        "mine", step("x", "y"), step("y", "z"), partial_tolerant=True, inplace="empty"
    ).eval()
    seq.select_out_keys("y")
    for part in (seq[1:], seq.select_subsequence(out_keys=["z"])):
        assert type(part) is Chain
        assert (part.label, part.partial_tolerant, part.inplace) == ("mine", True, "empty")
        assert part.scale is seq.scale
        assert part.out_keys[-1] == "z"
        assert not part.training
    part.label = "other"
    part[:] = []
    assert (seq.label, len(seq), seq.out_keys) == ("mine", 2, ["y"])


def test_steps_may_be_assigned(seq):
    new = step("x", "v")
    seq[1] = new
    assert seq[1] is new
    assert seq.out_keys == ["y", "v", "w"]
    seq[-1] = lambda td: td.set("u", td["v"])
    assert isinstance(seq[2], WrapModule)
    assert keys(seq(tree())) == ["x", "y", "v", "u"]
    seq[0:2] = [step("x", "p"), step("p", "q")]
    assert seq.out_keys == ["p", "q"]
    with pytest.raises(IndexError, match="has no step 3"):
        seq[3] = new


def test_steps_may_be_deleted(seq):
    first, _, last = seq
    del seq[1]
    assert list(seq) == [first, last]
    assert (seq.in_keys, seq.out_keys) == (["x", "z"], ["y", "w"])
    del seq[:1]
    assert list(seq) == [last]
    assert len(seq.state_dict()) == 0
    assert torch.equal(seq(ONE), 2 * ONE)


def test_named_steps_may_be_assigned_and_deleted_by_name():
    seq = TensorDictSequential({"a": step("x", "y"), "b": step("y", "z")})
    seq["c"] = step("z", "w")
    seq["a"] = step("x", "y v")
    assert list(seq.module) == ["a", "b", "c"]
    assert seq.out_keys == ["y", "v", "z", "w"]
    del seq["b"]
    assert list(seq.module) == ["a", "c"]
    seq[1:] = {"d": step("x", "u"), "e": step("u", "t")}
    assert list(seq.module) == ["a", "d", "e"]
    with pytest.raises(ValueError, match=r"1 steps for the names \['d', 'e'\]; give a dict"):
        seq[1:] = [step("x", "y")]
    with pytest.raises(ValueError, match="two steps have one name"):
        seq[1:] = {"a": step("x", "y")}
    with pytest.raises(KeyError, match="has no step 'q'"):
        del seq["q"]
    assert list(seq.module) == ["a", "d", "e"]


def test_numbered_steps_may_be_appended_and_inserted():
    seq = chain("x>y")
    assert seq.append(step("y", "z")) is seq
    seq.extend([step("z", "w"), lambda td: td])
    seq.insert(0, step("q", "x"))
    assert seq.in_keys == ["q"]
    assert seq.out_keys == ["x", "y", "z", "w"]
    assert list(seq.module._modules) == ["0", "1", "2", "3", "4"]


def test_a_change_that_takes_a_selected_output_away_is_refused(seq):
    seq.select_out_keys("y", "w")
    match = r"no step would write \['w'\], which is selected; call reset_out_keys\(\)"
    for edit in (lambda: seq.__delitem__(2), lambda: seq.__setitem__(2, step("z", "v"))):
        with pytest.raises(ValueError, match=match):
            edit()
    assert len(seq(ONE)) == 2


def test_a_name_that_torch_refuses_leaves_the_chain_as_it_was():
    seq = TensorDictSequential({"a": step("x", "y")})
    with pytest.raises(KeyError, match=r"module name can.*t contain"):
        seq["a.b"] = step("y", "z")
    assert list(seq.module) == ["a"]
    assert keys(seq(tree())) == ["x", "y"]


# -- parts of a chain ----------------------------------------------------------------------------


def test_a_part_keeps_the_very_steps():
    seq = TensorDictSequential({"a": step("x", "y"), "b": step("x", "z"), "c": step("y", "w")})
    part = seq.select_subsequence(out_keys=["w"])
    assert list(part.module) == ["a", "c"]
    assert part["c"] is seq["c"]
    assert (part.in_keys, part.out_keys) == (["x"], ["y", "w"])
    assert list(seq.select_subsequence().module) == ["a", "b", "c"]


def test_a_part_that_starts_later():
    part = chain("a>b", "b>c", "c>d", "a>e").select_subsequence(in_keys=["c"])
    assert (part.in_keys, part.out_keys) == (["c"], ["d"])


def test_parts_are_cut_at_every_depth():
    class Chain(TensorDictSequential):
        pass

    deep = chain("x>h", "h>o", "x>z")
    seq = Chain(TensorDictSequential(deep, step("z", "last")), chain("o>p", "z>q"), chain("z>r"))
    part = seq.select_subsequence(out_keys=["p"])
    assert type(part) is Chain
    assert (part.in_keys, part.out_keys) == (["x"], ["h", "o", "p"])
    assert [len(part), len(part[0]), len(part[0][0]), len(part[1])] == [2, 1, 2, 1]
    assert part[0][0][1] is deep[1]
    assert len(deep) == 3
    part = seq.select_subsequence(in_keys=["z"])
    assert (part.in_keys, part.out_keys) == (["z"], ["last", "q", "r"])
    assert part[2] is seq[2]


def test_an_inner_chain_keeps_hiding_what_it_does_not_select():
    inner = chain("x>y", "y>z", "y>w", selected_out_keys=["z", "w"])
    seq = TensorDictSequential(step("x", "y"), inner, step("y z", "v"))
    part = seq.select_subsequence(out_keys=["v"])
    assert [len(part), len(part[1])] == [3, 2]
    assert part[1].out_keys == ["z"]
    assert torch.equal(part(ONE)[-1], seq(ONE)[-1])


def test_a_branch_and_what_is_below_it_lead_to_each_other():
    seq = TensorDictSequential(step("x", [("n", "y")]), step("x", "u"), step(["n"], "z"))
    assert len(seq.select_subsequence(out_keys=["z"])) == 2
    assert len(seq.select_subsequence(out_keys=["n"])) == 1
    assert len(seq.select_subsequence(in_keys=[("n", "y")])) == 1
    assert len(seq.select_subsequence(in_keys="x")) == 3


def test_an_input_may_be_asked_for_too():
    assert len(chain("x>y", "x>z").select_subsequence(out_keys=["x", "z"])) == 1


def test_a_selection_is_what_a_part_is_cut_to():
    seq = chain("x>y", "y>z", "x>w", selected_out_keys=["z"])
    part = seq.select_subsequence()
    assert part.out_keys == ["y", "z"]
    assert seq.out_keys == ["z"]


def test_a_part_that_cannot_be_made_is_refused():
    seq = chain("a>b", "b>c")
    match = r"no step that runs from \['a'\] writes 'd'; all out_keys are \['b', 'c'\]"
    with pytest.raises(ValueError, match=match):
        seq.select_subsequence(out_keys=["c", "d"])
    with pytest.raises(
        ValueError, match=r"runs from \['q'\] writes 'bb' \(did you mean 'b'\?\), 'c'"
    ):
        seq.select_subsequence(in_keys=["q"], out_keys=["bb", "c"])
    with pytest.raises(
        ValueError, match=r"no step is left that runs from \['q'\] and leads to \['b'"
    ):
        seq.select_subsequence(in_keys=["q"])
    with pytest.raises(TypeError, match=r"out_keys \[1\] has \[1\]"):
        seq.select_subsequence(out_keys=[1])


def test_a_step_of_unknown_keys_cannot_be_judged():
    seq = TensorDictSequential(step("x", "y"), chain("y>z").append(lambda td: td))
    with pytest.raises(
        ValueError, match=r"step '1', WrapModule\(<lambda>\), does not say what it re"
    ):
        seq.select_subsequence(out_keys=["z"])
    seq[1][1] = WrapModule(lambda td: td, in_keys=[], out_keys=[])
    assert len(seq.select_subsequence(out_keys=["z"])[1]) == 1


@given(STEPS, st.data())
def test_a_part_for_some_outputs_gives_what_the_whole_gives(pairs, data):
    seq = build(pairs, data)
    if not seq.out_keys:
        return
    wanted = data.draw(st.lists(st.sampled_from(seq.out_keys), min_size=1, unique=True))
    part = seq.select_subsequence(out_keys=wanted)
    whole, small = seq(filled(POOL)), part(filled(POOL))
    for key in wanted:
        assert torch.equal(small[key], whole[key])
    assert set(part.out_keys) <= set(seq.out_keys)


def test_a_step_stays_of_which_an_inner_chain_reads_the_branch():
    one, two, both = step("x", [("n", "a")]), step("x", [("n", "b")]), step("n", "o")
    seq = TensorDictSequential(one, TensorDictSequential(two, both))
    assert seq.in_keys == ["x"]
    assert list(seq.select_subsequence(out_keys=["o"])) == list(seq)


@given(STEPS, st.data())
def test_a_part_for_some_inputs_needs_no_others(pairs, data):
    seq = build(pairs, data)
    if not seq.in_keys:
        return
    have = data.draw(st.lists(st.sampled_from(seq.in_keys), unique=True))
    try:
        part = seq.select_subsequence(in_keys=have)
    except ValueError:  # then no step runs on these inputs alone
        for alone in (TensorDictModule(total, reads, ["z"]) for reads, _ in pairs):
            with pytest.raises(MissingKeyError):
                alone(filled(have))
    else:
        assert all(key in part(filled(have)) for key in part.out_keys)
