"""Reductions: each leaf gives what plain torch gives for it, and the batch size says so."""

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from leafwise import assert_declared, compiled, flat

from tdnn import TensorDict

FLOATS = [torch.float32, torch.float64]


def make():
    """Return a tree of batch size (2, 3), with a branch that has one more batch dim."""
    branch = TensorDict({"z": torch.rand(2, 3, 4, 5), "n": torch.rand(2, 3, 4)}, [2, 3, 4])
    source = {"x": torch.rand(2, 3), "y": torch.rand(2, 3, 6), "b": branch, "none": {}}
    return TensorDict(source, [2, 3], names=["time", "env"])


def assert_leaves(tree, expected):
    assert flat(tree).keys() == expected.keys()
    for key, value in expected.items():
        assert tree[key].dtype == value.dtype
        torch.testing.assert_close(tree[key], value)


# -- all and any -------------------------------------------------------------------------------


def test_all_and_any_look_at_every_element_of_every_leaf():
    tree = make() < 2
    assert tree.all() is True
    assert tree.any() is True
    tree["b", "z"][1, 2, 3, 4] = False
    assert tree.all() is False
    assert (~tree).any() is True
    assert (tree & False).any() is False


def test_all_of_nothing_is_true_and_any_of_nothing_is_false():
    assert TensorDict({"a": {}}).all() is True
    assert TensorDict({"a": {}}).any() is False


@pytest.mark.parametrize("name", ["all", "any"])
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_all_and_any_take_a_batch_dim(name, dim):
    tree = make() > 0.5
    result = getattr(tree, name)(dim=dim)
    expected = {key: getattr(leaf, name)(dim % 2) for key, leaf in flat(tree).items()}
    assert_leaves(result, expected)
    assert_declared(result)
    assert result.names == [["env"], ["time"]][dim % 2]
    assert result["b"].batch_size == ((3, 4), (2, 4))[dim % 2]
    assert "none" in result


# -- sum and mean ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "mean"])
@pytest.mark.parametrize("dim", [0, -1, (0, 1), (-1,)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_sum_and_mean_reduce_batch_dims(name, dim, keepdim):
    tree = make()
    result = getattr(tree, name)(dim, keepdim)
    dims = tuple(at % 2 for at in ((dim,) if isinstance(dim, int) else dim))
    fn = getattr(torch, name)
    assert_leaves(result, {k: fn(v, dims, keepdim=keepdim) for k, v in flat(tree).items()})
    assert_declared(result)
    size = fn(torch.ones(2, 3), dims, keepdim=keepdim).shape
    assert result.batch_size == size
    assert result["b"].batch_size == (*size, 4)
    kept = ["time", "env"] if keepdim else [n for at, n in enumerate(tree.names) if at not in dims]
    assert result.names == kept


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_sum_and_mean_without_a_dim_reduce_each_leaf_to_one_element(name):
    tree, fn = make(), getattr(torch, name)
    result = getattr(tree, name)()
    assert_leaves(result, {key: fn(leaf) for key, leaf in flat(tree).items()})
    assert result.batch_size == result["b"].batch_size == ()
    kept = getattr(tree, name)(keepdim=True)
    assert_leaves(kept, {k: fn(v).reshape([1] * v.ndim) for k, v in flat(tree).items()})
    assert kept.batch_size == (1, 1)
    assert_declared(kept)


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_feature_reduces_the_dims_behind_the_batch_dims_of_each_branch(name):
    tree, fn = make(), getattr(torch, name)
    result = getattr(tree, name)(dim="feature")
    expected = {
        "x": tree["x"],
        "y": fn(tree["y"], -1),
        ("b", "z"): fn(tree["b", "z"], -1),
        ("b", "n"): tree["b", "n"],
    }
    assert_leaves(result, expected)
    assert result.batch_size == (2, 3)
    assert result["b"].batch_size == (2, 3, 4)
    assert result.names == ["time", "env"]


def test_reduce_adds_up_all_leaves():
    tree = make()
    everything = torch.cat([leaf.flatten() for leaf in flat(tree).values()])
    torch.testing.assert_close(tree.sum(reduce=True), everything.sum())
    torch.testing.assert_close(tree.mean(reduce=True), everything.mean())
    rows = torch.cat([leaf.reshape(2, 3, -1) for leaf in flat(tree).values()], -1)
    torch.testing.assert_close(tree.sum(dim="feature", reduce=True), rows.sum(-1))
    torch.testing.assert_close(tree.mean(dim="feature", reduce=True), rows.mean(-1))
    alike = TensorDict({"a": torch.rand(2, 3), "b": torch.rand(2, 3)}, [2])
    both = torch.cat([alike["a"], alike["b"]])
    torch.testing.assert_close(alike.sum(dim=0, reduce=True), both.sum(0))
    torch.testing.assert_close(alike.mean(dim=0, reduce=True), both.mean(0))


def test_integers_and_bools_are_summed_as_torch_does_and_dtype_changes_it():
    tree = TensorDict({"a": torch.tensor([True, True]), "b": torch.tensor([1, 2])}, [2])
    for dim in (None, 0):
        assert_leaves(tree.sum(dim), {"a": torch.tensor(2), "b": torch.tensor(3)})
    assert_leaves(tree.sum(dim="feature"), {"a": torch.tensor([1, 1]), "b": torch.tensor([1, 2])})
    means = {"a": torch.tensor(1.0), "b": torch.tensor(1.5)}
    assert_leaves(tree.mean(dtype=torch.float32), means)
    assert_leaves(tree.mean(0, dtype=torch.float32), means)
    assert tree.sum(reduce=True, dtype=torch.float64).dtype == torch.float64


def test_norm_is_the_2_norm_of_each_leaf():
    tree = make()
    result = tree.norm()
    assert_leaves(result, {k: leaf.pow(2).sum().sqrt() for k, leaf in flat(tree).items()})
    assert result.batch_size == result["b"].batch_size == ()
    whole = TensorDict({"a": torch.tensor([3, 4])}).norm(dtype=torch.float64)
    assert_leaves(whole, {"a": torch.tensor(5.0, dtype=torch.float64)})


# -- what cannot be reduced --------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, -3, (0, 2)])
def test_a_dim_that_is_not_a_batch_dim_is_refused(dim):
    tree = make()
    with pytest.raises(IndexError, match=r"is out of range for batch size \(2, 3\)"):
        tree.sum(dim)
    if isinstance(dim, int):
        with pytest.raises(IndexError, match=f"dim {dim} is out of range"):
            tree.all(dim)


def test_a_dim_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"\(0, -2\) names a batch dim twice"):
        make().sum((0, -2))


def test_keepdim_goes_with_batch_dims_only():
    for wrong in ({"dim": "feature"}, {"reduce": True}):
        with pytest.raises(ValueError, match="keepdim keeps batch dims"):
            make().mean(keepdim=True, **wrong)


def test_a_dim_of_another_name_is_refused():
    with pytest.raises(ValueError, match="'feature', or None, not 'features'"):
        make().sum("features")


def test_reduce_needs_a_leaf():
    with pytest.raises(ValueError, match="sum with reduce=True needs a leaf"):
        TensorDict({"a": {}}).sum(reduce=True)


# -- random trees and transforms ---------------------------------------------------------------


@given(strategies.trees(batch_size=strategies.sizes(min_dims=1), dtypes=FLOATS), st.data())
def test_a_random_tree_is_summed_over_a_random_dim(tree, data):
    dim = data.draw(st.integers(-tree.ndim, tree.ndim - 1))
    result = tree.sum(dim)
    assert_leaves(result, {key: leaf.sum(dim % tree.ndim) for key, leaf in flat(tree).items()})
    assert_declared(result)
    assert_declared(tree.sum())
    assert_declared(tree.sum(keepdim=True))
    assert_declared(tree.sum("feature"))


def test_reductions_run_under_vmap_and_trace():
    def act(tree):
        return tree.sum(0), tree.mean("feature"), tree.norm(), tree.sum(reduce=True)

    tree = make()
    found = compiled(act)(tree)
    batched = torch.vmap(act)(tree)
    results = zip(found, batched, act(tree), act(tree[0]), act(tree[1]), strict=True)
    for got, rows, expected, *each in results:
        if isinstance(expected, TensorDict):
            assert_leaves(got, flat(expected))
            assert got.batch_size == expected.batch_size
            for at in range(2):
                assert_leaves(rows[at], flat(each[at]))
        else:
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(rows, torch.stack(each))


def test_a_norm_of_integers_names_them_and_needs_a_dtype():
    td = TensorDict({"a": torch.ones(4), "b": {"count": torch.tensor([3, 4])}})
    with pytest.raises(RuntimeError, match=r"\[\('b', 'count'\)\] holds others.*dtype="):
        td.norm()
    norms = td.norm(dtype=torch.float32)
    assert (norms["a"], norms["b", "count"]) == (2, 5)
