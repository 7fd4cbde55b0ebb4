"""A tree as a pytree node: what comes back has the batch size that its leaves have."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import flat, trees
from torch.utils import _pytree as pytree

from tdnn import TensorDict
from tdnn.nn import TensorDictParams


def honest(td, above=()):
    """Say whether each leaf and each branch begins with the batch size above it."""
    size = td.batch_size
    return (
        size[: len(above)] == tuple(above)
        and (td.names == [None] * len(size) or len(td.names) == len(size))
        and all(
            honest(value, size)
            if isinstance(value, TensorDict)
            else value.shape[: len(size)] == size
            for value in td.values()
        )
    )


def declared(td):
    nodes = [td, *[value for value in td.values(True) if isinstance(value, TensorDict)]]
    return [(node.batch_size, node.names, node.device) for node in nodes]


@given(trees(names=True))
def test_a_tree_taken_apart_and_put_together_is_the_same(td):
    leaves, spec = pytree.tree_flatten(td)
    assert len(leaves) == len(flat(td))
    assert all(one is two for one, two in zip(leaves, flat(td).values(), strict=True))
    again = pytree.tree_unflatten(leaves, spec)
    assert again is not td
    assert list(again.keys(True)) == list(td.keys(True))
    assert declared(again) == declared(td)
    assert all(again[path] is leaf for path, leaf in flat(td).items())


@given(trees(names=True), st.data())
def test_any_change_of_shapes_leaves_a_batch_size_that_all_leaves_have(td, data):
    change = data.draw(
        st.sampled_from(
            [
                lambda x: x[None],
                lambda x: x.unsqueeze(-1),
                lambda x: x.sum(0) if x.ndim else x,
                lambda x: x.sum(-1) if x.ndim else x,
                lambda x: x[:1] if x.ndim else x,
                lambda x: x.flatten(),
                lambda x: x.mT if x.ndim > 1 else x,
                lambda x: x.expand(int(x.ndim) + 1, *x.shape),
                lambda x: torch.zeros(data.draw(st.lists(st.integers(0, 3), max_size=4))),
                lambda x: x if data.draw(st.booleans()) else x[None],
            ]
        )
    )
    result = pytree.tree_map(change, td)
    assert list(result.keys(True)) == list(td.keys(True))
    assert honest(result)


@given(trees(names=True), st.lists(st.integers(0, 3), min_size=1, max_size=2))
def test_dims_put_in_front_of_every_leaf_are_put_in_front_of_every_batch_size(td, dims):
    result = pytree.tree_map(lambda x: x.expand(*dims, *x.shape), td)
    if not flat(td):
        return
    for (size, names, _), (was, called, _) in zip(declared(result), declared(td), strict=True):
        assert size == (*dims, *was)
        expected = [None] * len(dims) + called  # where sizes are equal, a name in doubt is dropped
        assert all(one in (two, None) for one, two in zip(names, expected, strict=True))
        if not set(dims) & set(was):
            assert names == expected


@given(trees(names=True), st.integers(0, 2))
def test_a_dim_taken_off_every_leaf_is_taken_off_every_batch_size(td, dim):
    if len(td.batch_size) <= dim or not flat(td):
        return
    result = pytree.tree_map(lambda x: x.select(dim, 0) if x.shape[dim] else x.sum(dim), td)
    for (size, names, _), (was, called, _) in zip(declared(result), declared(td), strict=True):
        assert size == was[:dim] + was[dim + 1 :]
        expected = [*called[:dim], *called[dim + 1 :]]
        assert all(one in (two, None) for one, two in zip(names, expected, strict=True))
        if len(set(was)) == len(was):
            assert names == expected


def test_a_name_stays_where_equal_sizes_leave_no_doubt():
    td = TensorDict({"x": torch.zeros(3, 3, 4)}, [3, 3, 4], names=["a", "b", "c"])
    for dim in (0, 1):
        result = pytree.tree_map(lambda x: x.select(dim, 0), td)  # noqa: B023  # called at once
        assert (result.batch_size, result.names) == ((3, 4), [None, "c"])
    result = pytree.tree_map(lambda x: x[..., 0], td)
    assert (result.batch_size, result.names) == ((3, 3), ["a", "b"])


def test_one_leaf_tells_for_the_others_which_dim_changed():
    td = TensorDict(
        {"x": torch.zeros(3, 5), "b": {"y": torch.zeros(3, 3), "e": {}}, "f": {}}, [3], names=["t"]
    )
    result = pytree.tree_map(lambda x: x.sum(1), td)
    assert [size for size, *_ in declared(result)] == [(3,)] * 4
    assert result["b", "e"].names == ["t"]


def test_leaves_that_changed_in_different_ways_keep_what_they_share():
    td = TensorDict({"x": torch.zeros(3, 2), "b": {"y": torch.zeros(3, 2)}}, [3, 2])
    result = pytree.tree_map_with_path(lambda path, x: x[0] if "x" in str(path) else x, td)
    assert (result.batch_size, result["b"].batch_size) == ((), (3, 2))
    result = pytree.tree_map_with_path(
        lambda path, x: x.expand(5 if "x" in str(path) else 7, 3, 2), td
    )
    assert honest(result)
    assert result.batch_size == ()


def test_paths_name_the_leaves():
    td = TensorDict({"a": 1, "b": {"c": 2}})
    paths = [path for path, _ in pytree.tree_flatten_with_path(td)[0]]
    assert [[entry.key for entry in path] for path in paths] == [["a"], [("b", "c")]]


def test_two_trees_pair_when_their_keys_are_equal():
    one, two = TensorDict({"a": 1, "b": {"c": 2}}), TensorDict({"a": 10, "b": {"c": 20}})
    assert pytree.tree_map(torch.add, one, two).to_dict() == {"a": 11, "b": {"c": 22}}
    for other in ({"a": 10, "b": {"d": 20}}, {"a": 10}, {"a": 10, "b": 20}):
        with pytest.raises(ValueError, match=r"Node context mismatch|Node arity|Node type"):
            pytree.tree_map(torch.add, one, TensorDict(other))


def test_leaves_need_not_be_tensors_on_the_way():
    td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3)}}, [3])
    dims = pytree.tree_map(lambda leaf: leaf.ndim, td)
    assert pytree.tree_leaves(dims) == [1, 1]
    assert pytree.tree_map(lambda leaf, dim: leaf + dim, td, dims)["b", "c"].tolist() == [2, 2, 2]


def test_what_comes_back_is_unlocked_and_of_the_same_kind():
    class Mine(TensorDict):
        __slots__ = ()

    td = Mine({"a": 1}, lock=True, device="cpu")
    again = pytree.tree_map(torch.neg, td)
    assert type(again) is Mine
    assert again.device == torch.device("cpu")
    assert not again.is_locked
    params = TensorDictParams({"w": torch.zeros(2)})
    assert type(pytree.tree_map(torch.neg, params)) is TensorDict


@given(trees(names=True))
def test_a_spec_can_be_written_down(td):
    leaves, spec = pytree.tree_flatten(td)
    again = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert again == spec
    assert declared(pytree.tree_unflatten(leaves, again)) == declared(td)


def test_an_exported_module_takes_and_gives_trees():
    class Net(torch.nn.Module):
        def forward(self, td):
            return TensorDict({"y": td["a"] * 2, "z": td["b"]}, td.batch_size)

    td = TensorDict({"a": torch.rand(3), "b": {"c": torch.rand(3, 2)}}, [3])
    result = torch.export.export(Net(), (td,)).module()(td)
    assert result.batch_size == result["z"].batch_size == (3,)
    assert torch.equal(result["y"], td["a"] * 2)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5])
def test_chunks_that_are_put_together_have_the_batch_size_of_the_whole(chunk_size):
    td = TensorDict({"a": torch.rand(5, 2, 3), "b": {"c": torch.rand(5, 2)}, "d": {}}, [5, 2])
    result = torch.vmap(lambda t: t * 2, chunk_size=chunk_size)(td)
    assert torch.equal(result["a"], td["a"] * 2)
    assert declared(result) == declared(td)


def test_sizes_that_all_leaves_share_are_followed_and_their_names_dropped():
    td = TensorDict(
        {"a": torch.rand(5, 2, 3), "b": {"c": torch.rand(5, 2)}}, [5, 2], names=["x", "y"]
    )
    half = pytree.tree_map(lambda leaf: leaf[:3], td)
    assert (half.batch_size, half["b"].batch_size) == ((3, 2), (3, 2))
    assert half.names == [None, "y"]
    mixed = pytree.tree_map(lambda leaf: leaf[:, : leaf.ndim - 1], td)
    assert (mixed.batch_size, mixed["b"].batch_size) == ((5,), (5, 1))
    assert mixed.names == ["x"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own forward mode calls it
@pytest.mark.parametrize("derivative", ["hessian", "jacfwd", "jacrev"])
def test_the_batch_sizes_of_a_derivative_by_a_tree_do_not_lie(derivative):
    params = TensorDict({"w": torch.randn(3, 2), "b": {"c": torch.randn(3)}}, [3])

    def fn(p):
        squares = p * p
        return squares.sum(reduce=True) if derivative == "hessian" else squares

    found = getattr(torch.func, derivative)(fn)(params)

    def check(tree):
        for value in tree.values():
            assert value.shape[: tree.ndim] == tree.batch_size
            if isinstance(value, TensorDict):
                check(value)

    check(found)
    assert found["w", "w"].shape == (3, 2, 3, 2)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("in_dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("named", [False, True])
def test_vmap_takes_off_the_dim_that_it_says_whatever_the_sizes(size, in_dim, named):
    x = torch.arange(9.0 * size).view(3, 3, size)
    names = ["row", "column"] if named else None
    td = TensorDict({"x": x, "b": {"y": x + 1}}, [3, 3], names=names)
    seen = []

    def run(td):
        seen.append((tuple(td.batch_size), td.names))
        return td.sum(-1)["b", "y"]

    kept = [n for n in range(2) if n != in_dim % 3]
    found = torch.vmap(run, in_dim)(td)
    shape = tuple(x.select(in_dim, 0).shape)
    assert seen == [(shape[: len(kept)], [names[n] if named else None for n in kept])]
    want = torch.vmap(lambda x: (x + 1).sum(len(kept) - 1), in_dim)(x)
    assert torch.equal(found, want)


def test_the_declared_device_follows_the_leaves():
    td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}, "e": {}}, device="cpu")
    there = pytree.tree_map(lambda leaf: leaf.to("meta"), td)
    assert there.device == there["b"].device == torch.device("meta")
    apart = pytree.tree_map_with_path(
        lambda path, leaf: leaf.to("meta") if "c" in str(path) else leaf, td
    )
    assert (apart.device, apart["b"].device) == (None, torch.device("meta"))
    assert pytree.tree_map(torch.neg, td).device == torch.device("cpu")
