"""Pointwise methods: each leaf gets what plain torch gives for it."""

import pytest
import torch
from leafwise import assert_leaves, compiled, flat, make, over, turned
from torch import Tensor

from tdnn import MissingKeyError, TensorDict

UNARY = ["neg", "abs", "sqrt", "exp", "log", "reciprocal"]
METHODS = ["add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max"]


@pytest.mark.parametrize("name", UNARY)
def test_a_method_without_operand_does_what_it_does_on_tensors(name):
    tree = make()
    expected = {key: getattr(torch, name)(leaf) for key, leaf in flat(tree).items()}
    assert_leaves(getattr(tree, name)(), expected)
    assert getattr(tree.lock_(), f"{name}_")() is tree
    assert_leaves(tree, expected)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_with_an_operand_does_what_it_does_on_tensors(name):
    tree, other = make(0), make(1)
    expected = {k: getattr(torch, name)(v, other[k]) for k, v in flat(tree).items()}
    assert_leaves(getattr(tree, name)(turned(other)), expected)
    assert getattr(tree.lock_(), f"{name}_")(turned(other)) is tree
    assert_leaves(tree, expected)


@pytest.mark.parametrize("name", ["add", "sub"])
def test_alpha_scales_the_other_operand(name):
    plain = getattr(torch, name)
    tree, other, value = make(0), make(1), torch.rand(3, dtype=torch.float64)
    method = getattr(tree, name)
    leaves = flat(tree).items()
    assert_leaves(method(other, alpha=3), {k: plain(v, other[k], alpha=3) for k, v in leaves})
    assert_leaves(method(2, alpha=3), {k: plain(v, 6) for k, v in leaves})
    assert_leaves(method(value, alpha=3), {k: plain(v, over(value, v), alpha=3) for k, v in leaves})
    expected = {k: plain(v, 6) for k, v in leaves}
    assert_leaves(getattr(tree, f"{name}_")(2, alpha=3), expected)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
@pytest.mark.parametrize("number", [6, 6.5])
def test_maximum_and_minimum_also_take_numbers(name, number):
    tree, other = make(0), make(1)
    plain = getattr(torch, name)
    method = getattr(tree, name)
    assert_leaves(method(other), {k: plain(v, other[k]) for k, v in flat(tree).items()})
    bound = torch.tensor(number, dtype=torch.float64)
    assert_leaves(method(number), {k: plain(v, bound) for k, v in flat(tree).items()})


def test_clamp_takes_one_bound_or_two_of_any_kind():
    tree = make()
    low, high = make(1), torch.full((3,), 7.0, dtype=torch.float64)
    for lower, upper in [(5, 6), (None, 6), (5, None), (low, low + 1), (low, 7.0), (5.0, high)]:
        expected = {}
        for key, leaf in flat(tree).items():
            lo = lower[key] if isinstance(lower, TensorDict) else lower
            hi = upper[key] if isinstance(upper, TensorDict) else upper
            hi = over(hi, leaf) if isinstance(hi, Tensor) and hi.ndim == 1 else hi
            leaf = leaf if lo is None else torch.clamp_min(leaf, lo)
            expected[key] = leaf if hi is None else torch.clamp_max(leaf, hi)
        assert_leaves(tree.clamp(lower, upper), expected)
        assert_leaves(tree.clone().clamp_(min=lower, max=upper), expected)
    for method in (tree.clamp, tree.clamp_):
        with pytest.raises(ValueError, match="a lower or an upper bound"):
            method()


@pytest.mark.parametrize("kind", ["number", "tree", "tensor"])
def test_lerp_takes_a_weight_of_any_kind(kind):
    tree, end, weights = make(0), make(1), make(2) / 8
    value = torch.rand(3, dtype=torch.float64)
    weight = {"number": 0.25, "tree": weights, "tensor": value}[kind]
    expected = {}
    for key, leaf in flat(tree).items():
        by = {"number": 0.25, "tree": weights[key], "tensor": over(value, leaf)}[kind]
        expected[key] = torch.lerp(leaf, end[key], by)
    assert_leaves(tree.lerp(end, weight), expected)
    assert tree.lerp_(turned(end), weight) is tree
    assert_leaves(tree, expected)


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_addcmul_and_addcdiv_take_trees_and_tensors(name):
    tree, one, two = make(0), make(1), torch.rand(3, dtype=torch.float64) + 1
    expected = {
        k: getattr(torch, name)(v, one[k], over(two, v), value=3) for k, v in flat(tree).items()
    }
    assert_leaves(getattr(tree, name)(turned(one), two, value=3), expected)
    assert getattr(tree, f"{name}_")(turned(one), two, value=3) is tree
    assert_leaves(tree, expected)


@pytest.mark.parametrize("value", [2, 0.5, True, torch.tensor(3.0)], ids=str)
def test_fill_writes_one_leaf_or_all_of_a_branch(value):
    tree = make().lock_()
    before = {key: leaf.clone() for key, leaf in flat(tree).items()}
    leaves = flat(tree)
    assert tree.fill_("x", value) is tree
    assert_leaves(tree, {**before, "x": before["x"].fill_(value)})
    tree.fill_("deep", value)
    assert_leaves(tree, {key: leaf.fill_(value) for key, leaf in before.items()})
    tree.fill_(("deep", ("deeper", "z")), 0)
    assert (tree["deep", "deeper", "z"] == 0).all()
    assert all(tree[key] is leaf for key, leaf in leaves.items())


def test_fill_refuses_before_it_writes():
    tree = TensorDict({"a": {"x": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)}})
    with pytest.raises(MissingKeyError, match=r"\('a', 'y'\) is not in the TensorDict"):
        tree.fill_(("a", "y"), 1)
    with pytest.raises(RuntimeError, match="value cannot be converted") as caught:
        tree.fill_("a", 1j)
    assert "('a', 'x')" in str(caught.value.__notes__)
    tree["a", "w"] = torch.zeros(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"\[\('a', 'w'\)\]: requires_grad is set"):
        tree.fill_("a", 1)
    assert (tree.detach() == 0).all()


def test_filling_traces():
    tree = make()
    compiled(lambda td: td.fill_("deep", 2).fill_("x", 1))(tree)
    assert (tree["x"] == 1).all()
    assert (tree["deep"] == 2).all()


def test_fill_refuses_what_an_integer_cannot_hold():
    td = TensorDict({"a": {"i": torch.zeros(2, dtype=torch.long), "x": torch.zeros(2)}})
    with pytest.raises(RuntimeError, match=r"cannot fill \[\('a', 'i'\)\] with 1\.5"):
        td.fill_("a", 1.5)
    assert not td["a", "x"].any()
    assert td.fill_("a", 2)["a", "i"].tolist() == [2, 2]
