"""How operands meet the leaves: batch dims above batch dims, and names beside names."""

import math

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from leafwise import assert_declared, assert_leaves, flat, make, turned

from tdnn import TensorDict
from tdnn.errors import MissingKeyError

# -- batch dims meet batch dims -------------------------------------------------------------------


def test_feature_dims_meet_feature_dims_as_under_vmap():
    one = TensorDict({"a": torch.rand(3), "b": torch.rand(3, 3)}, [3])
    two = TensorDict({"a": torch.rand(3, 3), "b": torch.rand(3)}, [3])
    result = one - two
    for key in ("a", "b"):
        expected = torch.vmap(torch.sub)(one[key], two[key])
        torch.testing.assert_close(result[key], expected, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [((3,), (1,)), ((1,), (3,)), ((2, 3), (3,)), ((), (2, 3))])
def test_batch_sizes_broadcast_and_the_result_says_so(sizes):
    one = TensorDict({"a": torch.rand(*sizes[0], 4), "b": {"c": torch.rand(sizes[0])}}, sizes[0])
    two = TensorDict({"a": torch.rand(*sizes[1], 4), "b": {"c": torch.rand(sizes[1])}}, sizes[1])
    size = torch.broadcast_shapes(*sizes)
    result = one + two
    assert result.batch_size == result["b"].batch_size == size
    assert_leaves(result, {"a": one["a"] + two["a"], ("b", "c"): one["b", "c"] + two["b", "c"]})


def test_a_tensor_with_more_dims_than_the_batch_size_adds_batch_dims():
    tree = TensorDict({"a": torch.rand(3, 4), "b": {"c": torch.rand(3)}}, [3], names=["time"])
    value = torch.rand(2, 3)
    result = tree * value
    assert result.batch_size == result["b"].batch_size == (2, 3)
    assert result.names == result["b"].names == [None, "time"]
    assert_leaves(result, {"a": tree["a"] * value[..., None], ("b", "c"): tree["b", "c"] * value})


def with_branch(further, named=False):
    """Return a tree of batch size (3,) whose branch has batch size ``(3, *further)``."""
    branch = TensorDict({"c": torch.rand(3, *further, *[5] * (2 - len(further)))}, [3, *further])
    return TensorDict({"b": branch}, [3], names=["time"] if named else None)


@pytest.mark.parametrize("mine", [(), (5,), (1,), (5, 5)])
@pytest.mark.parametrize("theirs", [(), (5,), (1,), (5, 5)])
def test_branches_with_batch_dims_of_their_own_keep_those_that_both_declare(mine, theirs):
    one, two = with_branch(mine, named=True), with_branch(theirs)
    result = one + two
    expected = (3, *mine) if mine == theirs else (3,)
    assert result["b"].batch_size == expected
    assert result["b"].names == ["time", *[None] * (len(expected) - 1)]
    torch.testing.assert_close(result["b", "c"], one["b", "c"] + two["b", "c"], rtol=0, atol=0)
    assert_declared(result)


def test_a_tensor_leaves_the_batch_dims_of_branches_as_they_are():
    tree, value = with_branch((4,)), torch.rand(3)
    assert (tree + value)["b"].batch_size == (3, 4)
    assert (tree + value.reshape(1, 3))["b"].batch_size == (1, 3, 4)
    expected = tree["b", "c"] + value.reshape(3, 1, 1)
    torch.testing.assert_close((tree + value)["b", "c"], expected, rtol=0, atol=0)


def test_a_tensor_without_dims_promotes_like_one_in_plain_torch():
    tree = TensorDict({"a": torch.ones(2, dtype=torch.float32), "b": torch.ones(2).int()}, [2])
    for value in (torch.tensor(2.0, dtype=torch.float64), torch.tensor(2)):
        assert_leaves(tree + value, {k: v + value for k, v in flat(tree).items()})
        assert_leaves(tree * value, {k: v * value for k, v in flat(tree).items()})
    low, high = torch.tensor(2.0, dtype=torch.float64), torch.full((1,), 3.0)
    wide = TensorDict({"a": torch.ones(2, 3)}, [2])
    assert wide.clamp(low, high)["a"].dtype == wide["a"].clamp(low, high).dtype == torch.float32


def test_batch_sizes_that_do_not_broadcast_are_named():
    with pytest.raises(ValueError, match=r"batch sizes do not broadcast: \(3,\), \(4,\)"):
        make() + torch.ones(4)
    with pytest.raises(ValueError, match=r"batch sizes do not broadcast: \(3,\), \(2,\)"):
        make() + TensorDict(dict.fromkeys(flat(make()), 1)).expand(2)


def test_an_error_of_torch_names_the_leaf():
    tree = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2, 3)}}, [2])
    other = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2, 4)}}, [2])
    with pytest.raises(RuntimeError) as caught:
        tree + other
    assert caught.value.__notes__ == ["at the leaf ('b', 'c')"]


# -- keys that differ -----------------------------------------------------------------------------


def test_keys_that_differ_are_all_listed_at_every_level():
    one = TensorDict({"a": 1, "b": {"c": 1, "d": 1}, "e": {"f": 1}, "g": 1})
    two = TensorDict({"z": 1, "b": {"c": 1, "y": 1}, "e": 1, "g": {"h": 1}})
    message = (
        r"the trees differ: only the first has \['a', \('b', 'd'\)\]; "
        r"only the second has \['z', \('b', 'y'\)\]; "
        r"a leaf in one and a branch in the other: \['e', 'g'\]"
    )
    for act in (
        lambda: one + two,
        lambda: one == two,
        lambda: one.add_(two),
        lambda: one.lerp(one, two),
    ):
        with pytest.raises(MissingKeyError, match=message):
            act()
    assert (one == 1).all()


def test_default_intersection_drops_what_only_one_has():
    one = TensorDict({"a": 1.0, "b": {"c": 2.0, "d": 3.0}})
    two = TensorDict({"b": {"c": 10.0, "e": 3.0}, "f": 1.0})
    assert_leaves(one.add(two, default="intersection"), {("b", "c"): torch.tensor(12.0)})


@pytest.mark.parametrize("default", [5.0, torch.tensor(5.0)])
def test_a_default_value_stands_for_what_is_missing(default):
    one = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2, 3)}}, [2])
    two = TensorDict({"a": torch.ones(2), "d": torch.ones(2)}, [2])
    expected = {
        "a": torch.zeros(2),
        ("b", "c"): torch.full((2, 3), -4.0),
        "d": torch.full((2,), 4.0),
    }
    result = one.sub(two, default=default)
    assert_leaves(result, expected)
    assert result.batch_size == (2,)


def test_another_default_is_refused():
    with pytest.raises(ValueError, match="'intersection', a tensor or a number, not 'union'"):
        make().add(make(), default="union")


# -- random trees ---------------------------------------------------------------------------------


@given(strategies.trees(), st.data())
def test_a_random_tree_meets_another_by_name(tree, data):
    other = turned(tree.clone())
    result = tree * other + tree
    assert_leaves(result, {key: leaf * leaf + leaf for key, leaf in flat(tree).items()})
    assert_declared(result)
    assert (tree == other).all()
    names = list(flat(tree))
    one, two = (data.draw(st.sampled_from(names)) for _ in "ab") if names else (None, None)
    if one is not None and tree[one] is tree[two]:
        assert result[one] is result[two]


@given(strategies.trees(batch_size=strategies.sizes(max_dims=2)), st.data())
def test_a_random_tree_meets_a_tensor_that_broadcasts_to_its_batch_size(tree, data):
    shape = [data.draw(st.sampled_from([1, size])) for size in tree.batch_size]
    shape = [2] * data.draw(st.integers(0, 1)) + shape
    value = torch.arange(1, 1 + math.prod(shape)).reshape(shape)
    result = tree + value
    for key, leaf in flat(tree).items():
        wide = value.reshape(*shape, *[1] * (leaf.ndim - tree.ndim)) if shape else value
        torch.testing.assert_close(result[key], leaf + wide, rtol=0, atol=0)
    assert result.batch_size == torch.broadcast_shapes(tree.batch_size, shape)
    assert_declared(result)


@given(strategies.trees(dtypes=[torch.float32, torch.float64], ties=True))
def test_a_random_tree_is_written_in_place_once_per_tensor(tree):
    before = {key: leaf.clone() for key, leaf in flat(tree).items()}
    assert tree.add_(turned(tree.clone())) is tree
    assert_leaves(tree, {key: leaf * 2 for key, leaf in before.items()})
