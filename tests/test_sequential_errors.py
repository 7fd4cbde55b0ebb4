"""What ``TensorDictSequential`` refuses, and where it says that a step failed."""

import pytest
from chains import ONE, Own, chain, keys, notes, step, tree
from torch import nn

from tdnn.errors import MissingKeyError
from tdnn.nn import TensorDictModule, TensorDictSequential, WrapModule

# -- what is refused -----------------------------------------------------------------------------


def test_steps_must_be_callable():
    with pytest.raises(TypeError, match=r"step 1 is a module or a function of a tree, not 3; give"):
        TensorDictSequential(step("x", "y"), 3)
    with pytest.raises(TypeError, match=r"step 0 is a module or a function of a tree, not \{"):
        TensorDictSequential({"a": step("x", "y")}, {"b": step("y", "z")})
    with pytest.raises(TypeError, match=r"step 'a' is a module or a function of a tree, not 'b'"):
        TensorDictSequential({"a": "b"})


def test_a_net_without_keys_among_the_steps_is_explained():
    seq = TensorDictSequential(step("x", "y"), nn.Linear(2, 2))
    with pytest.raises(TypeError) as info:
        seq(tree())
    assert notes(info) == (
        "step 1 of TensorDictSequential: WrapModule(Linear) took the whole tree, TensorDict (2,); "
        "for tensors use TensorDictModule(Linear, in_keys, out_keys)"
    )


def test_a_chain_cannot_hold_itself():
    inner = chain("x>y")
    outer = TensorDictSequential(inner, step("y", "z"))
    for held, edit in (
        (inner, lambda: inner.append(inner)),
        (inner, lambda: inner.append(outer)),
        (inner, lambda: inner.__setitem__(0, nn.Sequential(outer))),
    ):
        with pytest.raises(ValueError, match="TensorDictSequential cannot be a step of itself"):
            edit()
        assert len(held) == 1
    assert keys(outer(tree())) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (["x", 1], r"Own: in_keys \['x', 1\]: a key is a str or a non-empty tuple"),
        (3, "Own: in_keys 3: 'int' object is not iterable"),
    ],
)
def test_a_step_with_a_wrong_key_is_named(keys, match):
    broken = Own()
    broken.in_keys = keys
    with pytest.raises(TypeError, match=match):
        TensorDictSequential(broken)


def test_inplace_has_four_values():
    with pytest.raises(ValueError, match=r"one of \[None, True, False, 'empty'\], not 'no'"):
        chain("x>y", inplace="no")


def test_a_chain_takes_no_further_arguments():
    match = r"TensorDictSequential takes a tree, or \['x'\], and no \['q'\]"
    with pytest.raises(TypeError, match=match):
        chain("x>y")(tree(), q=ONE)
    with pytest.raises(TypeError, match=match):
        chain("x>y")(x=ONE, q=ONE)


def test_a_missing_input_names_the_step():
    match = (
        r"^step 1 of TensorDictSequential: TensorDictModule\(several\) reads \['yy'\]; missing is "
        r"'yy' \(did you mean 'y'\?\); the input has \['x', 'y'\]$"
    )
    with pytest.raises(MissingKeyError) as info:
        chain("x>y", "yy>z")(tree())
    with pytest.raises(MissingKeyError, match=match):
        raise MissingKeyError(str(info.value))
    assert notes(info) == ""


def test_a_missing_input_names_the_whole_path():
    inner = TensorDictSequential({"stem": step("x", "y"), "head": step("q", "z")})
    seq = TensorDictSequential(step("x", "w"), TensorDictSequential({"body": inner}))
    match = (
        r"step 1 of TensorDictSequential: step 0 \('body'\) of TensorDictSequential: "
        r"step 1 \('head'\) of TensorDictSequential: TensorDictModule\(several\) reads \['q'\]"
    )
    with pytest.raises(MissingKeyError, match=match):
        seq(tree())


def test_a_wrong_number_of_outputs_names_the_step():
    fork = TensorDictModule(lambda x: (x, x), ["x"], ["y"])
    match = (
        r"step 0 \('fork'\) of TensorDictSequential: TensorDictModule\(<lambda>\) returned 2 outp"
    )
    with pytest.raises(ValueError, match=match):
        TensorDictSequential({"fork": fork})(tree())


def test_an_output_that_does_not_fit_names_the_step():
    cut = TensorDictModule(lambda x: x[:1], ["x"], ["y"])
    with pytest.raises(ValueError, match="does not begin with the batch size") as info:
        TensorDictSequential(cut)(tree())
    assert notes(info) == (
        "step 0 of TensorDictSequential: TensorDictModule(<lambda>) wrote 'y' float32 (1,) "
        "to TensorDict (2,)"
    )


def test_an_exception_in_a_step_keeps_its_type_and_tells_the_path():
    linear = TensorDictModule(nn.Linear(3, 1), ["h"], ["y"])
    seq = TensorDictSequential({"body": TensorDictSequential(step("x", "h"), linear)})
    with pytest.raises(RuntimeError, match="cannot be multiplied") as info:
        seq(tree())
    assert notes(info) == (
        "step 0 ('body') of TensorDictSequential: step 1 of TensorDictSequential: "
        "TensorDictModule(Linear) read 'h' float32 (2,)"
    )
    with pytest.raises(RuntimeError) as info:
        seq(x=ONE)
    assert "step 0 ('body') of TensorDictSequential: step 1" in notes(info)


def test_an_exception_in_a_step_of_another_class_tells_the_same():
    def fail(td):
        raise LookupError("mine")

    for failing, read in (
        (fail, "WrapModule(fail) read 'x' float32 (2,)"),
        (
            WrapModule(fail, in_keys=["x", "q"], out_keys=[]),
            "WrapModule(fail) read 'x' float32 (2,), 'q' N",
        ),
        (WrapModule(nn.Linear(1, 1)), "WrapModule(Linear) took the whole tree"),
        (Own("x", ("x", "y")), "Own read 'x' float32 (2,)"),
    ):
        with pytest.raises((LookupError, TypeError)) as info:
            TensorDictSequential(failing)(tree())
        assert f"step 0 of TensorDictSequential: {read}" in notes(info)


def test_an_exception_between_chains_tells_both_paths():
    inner = TensorDictSequential(step("q", "y"))
    outer = TensorDictSequential(TensorDictModule(lambda x: inner(tree(p=x)), ["x"], ["z"]))
    with pytest.raises(
        MissingKeyError, match=r"^step 0 of .*: TensorDictModule\(several\)"
    ) as info:
        outer(tree())
    assert notes(info) == (
        "step 0 of TensorDictSequential: TensorDictModule(<lambda>) read 'x' float32 (2,)"
    )


def test_a_step_must_return_a_tree():
    match = (
        r"step 0 of TensorDictSequential: WrapModule\(<lambda>\) must return a tree, not NoneType"
    )
    with pytest.raises(TypeError, match=match):
        TensorDictSequential(lambda td: None)(tree())


def test_a_forgotten_argument_is_named():
    with pytest.raises(TypeError, match=r"takes a tree, or \['x', 'w'\]: no argument for 'w'"):
        chain("x>y", "y w>z")(ONE)
