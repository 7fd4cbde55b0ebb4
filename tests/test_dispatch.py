"""``dispatch``: a function on a tree, called with tensors."""

import inspect
from itertools import product

import pytest
import torch
from torch import nn

from tdnn import TensorDict
from tdnn.errors import MissingKeyError
from tdnn.nn import TensorDictModule, dispatch

ONE, TWO, THREE = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)


class Weighted(nn.Module):
    """Reads three keys, one of them nested, and writes a sum that tells them apart."""

    in_keys = ("a", ("b", "c"), "d")
    out_keys = ("sum",)

    @dispatch
    def forward(self, tensordict, factor=1):
        a, c, d = tensordict.get("a"), tensordict.get(("b", "c")), tensordict.get("d")
        return tensordict.set("sum", factor * (a + 10 * c + 100 * d))


WANTED = ONE + 10 * TWO + 100 * THREE
NAMES = ("a", "b_c", "d")
VALUES = (ONE, TWO, THREE)


# -- how the arguments are given ---------------------------------------------------------------


@pytest.mark.parametrize("positional", range(4))
def test_any_number_of_leading_inputs_may_be_positional(positional):
    args = VALUES[:positional]
    kwargs = dict(zip(NAMES[positional:], VALUES[positional:], strict=True))
    for named in (kwargs, dict(reversed(kwargs.items()))):
        assert torch.equal(Weighted()(*args, **named), WANTED)


def test_a_tree_goes_to_the_function_as_it_is():
    tree = TensorDict({"a": ONE, "b": {"c": TWO}, "d": THREE})
    for call in (lambda: Weighted()(tree), lambda: Weighted()(tensordict=tree)):
        assert call() is tree
        assert torch.equal(tree["sum"], WANTED)
        del tree["sum"]


def test_further_arguments_reach_the_function():
    tree = TensorDict({"a": ONE, "b": {"c": TWO}, "d": THREE})
    assert torch.equal(Weighted()(*VALUES, factor=2), 2 * WANTED)
    assert torch.equal(Weighted()(tree, factor=2)["sum"], 2 * WANTED)
    assert torch.equal(Weighted()(tree, 2)["sum"], 2 * WANTED)
    assert torch.equal(Weighted()(tensordict=tree, factor=2)["sum"], 2 * WANTED)


def test_the_tensors_are_not_copied():
    class Keep(nn.Module):
        in_keys, out_keys = ["x", ("n", "y")], ["x", ("n", "y")]

        @dispatch
        def forward(self, tensordict):
            return tensordict

    x, y = Keep()(ONE, n_y=TWO)
    assert x is ONE
    assert y is TWO


def test_numbers_and_trees_may_be_inputs():
    class Add(nn.Module):
        in_keys, out_keys = ["number", "tree"], ["sum"]

        @dispatch
        def forward(self, tensordict):
            return tensordict.set("sum", tensordict["number"] + tensordict["tree", "x"])

    assert torch.equal(Add()(1.0, TensorDict({"x": TWO})), THREE)
    assert torch.equal(Add()(1.0, {"x": TWO}), THREE)


def test_an_input_may_have_the_name_of_the_tree():
    class Echo(nn.Module):
        in_keys, out_keys = ["x", "tensordict"], ["y"]

        @dispatch
        def forward(self, tensordict):
            return tensordict.set("y", tensordict["tensordict"] - tensordict["x"])

    assert torch.equal(Echo()(tensordict=THREE, x=ONE), TWO)
    assert torch.equal(Echo()(ONE, THREE), TWO)


def test_an_input_that_is_read_twice_is_given_once():
    module = TensorDictModule(lambda x, y: x + y, in_keys=["x", "x"], out_keys=["z"])
    assert torch.equal(module(ONE), TWO)
    assert torch.equal(module(x=ONE), TWO)
    with pytest.raises(TypeError, match="1 positional argument too many"):
        module(ONE, TWO)


def test_a_single_key_need_not_stand_in_a_list():
    class Echo(nn.Module):
        in_keys, out_keys = "word", "echo"

        @dispatch
        def forward(self, tensordict):
            return tensordict.set("echo", tensordict["word"])

    assert Echo()(ONE) is ONE
    assert Echo()(word=ONE) is ONE


# -- what comes back ---------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [[], ["p"], ["p", "q"], ["q", "p"], ["_", "q"], ["_"]])
def test_results_come_in_the_order_of_the_keys_without_dropped_ones(keys):
    @dispatch(source=["x"], dest=keys)
    def fork(tensordict):
        return tensordict.set("p", tensordict["x"] + 1).set("q", tensordict["x"] + 2)

    wanted = tuple({"p": TWO, "q": THREE}[key] for key in keys if key != "_")
    found = fork(ONE)
    if len(wanted) == 1:
        assert torch.equal(found, wanted[0])
    else:
        assert type(found) is tuple
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))


def test_an_output_named_underscore_may_be_there_all_the_same():
    @dispatch(source=["x"], dest=["_", "y"])
    def drop(tensordict):
        return tensordict.set("y", tensordict["x"])

    assert drop(ONE) is ONE


# -- where it stands and how it is decorated -----------------------------------------------------


def test_a_plain_function_takes_lists_of_keys():
    @dispatch(source=["x", ("n", "y")], dest=["z"])
    def minus(tensordict, factor=1):
        return tensordict.set("z", factor * (tensordict["x"] - tensordict["n", "y"]))

    tree = TensorDict({"x": THREE, "n": {"y": ONE}})
    assert torch.equal(minus(THREE, ONE), TWO)
    assert torch.equal(minus(n_y=ONE, x=THREE, factor=2), 2 * TWO)
    assert minus(tree) is tree
    assert minus(tensordict=tree) is tree


def test_keys_may_come_from_other_attributes():
    class Shift(nn.Module):
        reads, writes = ["x"], ["y"]

        @dispatch(source="reads", dest="writes")
        def forward(self, tensordict):
            return tensordict.set("y", tensordict["x"] + 1)

    assert torch.equal(Shift()(x=ONE), TWO)


def test_the_separator_may_be_chosen():
    class Echo(nn.Module):
        in_keys, out_keys = [("a", "b")], ["y"]

        @dispatch("__")
        def forward(self, tensordict):
            return tensordict.set("y", tensordict["a", "b"])

    assert Echo()(a__b=ONE) is ONE
    with pytest.raises(TypeError, match="no argument for 'a__b'"):
        Echo()(a_b=ONE)


def test_any_method_may_be_decorated_and_keeps_its_name_and_signature():
    class Plain:
        in_keys, out_keys = ["x"], ["y"]

        @dispatch
        def shift(self, tensordict, by=1):
            """Move it."""
            return tensordict.set("y", tensordict["x"] + by)

    assert torch.equal(Plain().shift(ONE, by=2), THREE)
    assert Plain.shift.__name__ == "shift"
    assert Plain.shift.__doc__ == "Move it."
    assert list(inspect.signature(Plain.shift).parameters) == ["self", "tensordict", "by"]


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ([(3, 4), (3, 5)], (3,)),
        ([(3, 4), (3, 4)], (3, 4)),
        ([(3, 4), ()], ()),
        ([(3,), (4,)], ()),
        ([(3, 4, 5), (3, 4)], (3, 4)),
    ],
)
def test_the_batch_size_is_the_beginning_that_all_shapes_share(shapes, size):
    seen = []
    for automatic in (True, False):

        @dispatch(source=["x", "y"], dest=["x"], auto_batch_size=automatic)
        def look(tensordict):
            seen.append(tuple(tensordict.batch_size))
            return tensordict

        look(*map(torch.zeros, shapes))
    assert seen == [size, ()]


def test_the_batch_size_of_no_inputs_is_empty():
    @dispatch(source=[], dest=["x"])
    def make(tensordict):
        return tensordict.set("x", torch.tensor(tensordict.batch_dims))

    assert make() == 0


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        (
            (ONE,),
            {"d": THREE},
            r"Weighted takes a tree, or \['a', 'b_c', 'd'\]: no argument for 'b_",
        ),
        (
            (ONE, TWO),
            {"dd": THREE},
            r"\['a', 'b_c', 'd'\]: no argument for 'd'; 'dd' is no input \(did you mean 'd'\?\)$",
        ),
        (
            (ONE,),
            {"b_": TWO, "D": THREE, "dd": THREE},
            r"no argument for 'b_c', 'd'; 'b_' is no input \(did you mean 'b_c'\?\), "
            r"'dd' is no input \(did you mean 'd'\?\)$",
        ),
        ((ONE, TWO), {"factor": 3}, "no argument for 'd'$"),
        ((), {}, "no argument for 'a', 'b_c', 'd'"),
        (VALUES, {"a": ONE}, r"by position and by name: \['a'\]"),
        ((ONE, TWO), {"a": ONE, "d": ONE}, r"by position and by name: \['a'\]"),
        ((*VALUES, ONE), {}, "1 positional argument too many"),
        ((*VALUES, ONE, ONE), {}, "2 positional arguments too many"),
        ((ONE,), {"a": TWO}, r"no argument for 'b_c', 'd'; by position and by name: \['a'\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args, kwargs, match):
    with pytest.raises(TypeError, match=match):
        Weighted()(*args, **kwargs)


def test_no_wrong_set_of_arguments_gets_through():
    """Every way to give or withhold each of three inputs by position and by name."""
    for count, *named in product(range(5), *[(False, True)] * 3):
        kwargs = {k: v for k, v, is_in in zip(NAMES, VALUES, named, strict=True) if is_in}
        args = (*VALUES, ONE)[:count]
        fits = count <= 3 and list(named) == [at >= count for at in range(3)]
        if fits:
            assert torch.equal(Weighted()(*args, **kwargs), WANTED)
        else:
            with pytest.raises(TypeError, match="Weighted takes a tree"):
                Weighted()(*args, **kwargs)


def test_unknown_keywords_are_left_to_the_function():
    with pytest.raises(TypeError, match="unexpected keyword argument 'extra'"):
        Weighted()(*VALUES, extra=ONE)


def test_inputs_with_one_name_are_refused_unless_they_are_in_a_tree():
    @dispatch(source=[("a", "b"), "a_b"], dest=["z"])
    def minus(tensordict):
        return tensordict.set("z", tensordict["a", "b"] - tensordict["a_b"])

    assert torch.equal(minus(TensorDict({"a": {"b": THREE}, "a_b": ONE}))["z"], TWO)
    with pytest.raises(TypeError, match=r"several inputs have one name, \[\('a', 'b'\), 'a_b'\]"):
        minus(a_b=ONE)


def test_a_missing_output_is_named():
    @dispatch(source=["x"], dest=["loc", "scale"])
    def half(tensordict):
        return tensordict.set("locc", tensordict["x"])

    match = (
        r"half did not write 'loc' \(did you mean 'locc'\?\), 'scale'; "
        r"it returned \['x', 'locc'\]"
    )
    with pytest.raises(MissingKeyError, match=match):
        half(ONE)


def test_a_function_that_returns_no_tree_is_named():
    @dispatch(source=["x"], dest=["y"])
    def forgetful(tensordict):
        tensordict["y"] = tensordict["x"]

    with pytest.raises(TypeError, match="forgetful must return a tree, but it returned NoneType"):
        forgetful(ONE)


def test_the_first_argument_must_be_named_tensordict():
    with pytest.raises(TypeError, match=r"must be named 'tensordict', found \['self', 'data'\]"):

        @dispatch
        def forward(self, data):
            return data


def test_a_plain_function_needs_lists():
    with pytest.raises(TypeError, match="is no method, so it has no attributes to read keys from"):

        @dispatch(source=["x"])
        def function(tensordict):
            return tensordict


def test_wrong_keys_and_separators_are_refused_on_decoration():
    with pytest.raises(TypeError, match="a key is a str"):
        dispatch(source=[1], dest=["x"])
    with pytest.raises(TypeError, match="the separator is a str, not 1"):
        dispatch(1)


def test_a_dict_in_place_of_a_tree_is_told_to_become_one():
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    with pytest.raises(TypeError, match=r"takes a tree, or tensors, not a dict; give TensorDict\("):
        module({"x": torch.ones(3)})
    deep = TensorDictModule(torch.add, in_keys=[("s", "x"), ("s", "y")], out_keys=["z"])
    with pytest.raises(TypeError, match=r"takes a tree, or tensors, not a dict; give TensorDict\("):
        deep({"s": {"x": torch.ones(3), "y": torch.ones(3)}})
    nested = TensorDictModule(lambda tree: tree["x"], in_keys=["inner"], out_keys=["y"])
    assert nested({"x": torch.ones(3)}).shape == (3,)
