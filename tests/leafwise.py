"""Trees for the tests of pointwise operations, and checks of each leaf against plain torch."""

import torch

from tdnn import TensorDict


def make(seed=0, dtype=torch.float64):
    """Return a tree of batch size (3,) with positive values, nested twice."""
    draw = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.rand(shape, generator=draw, dtype=torch.float64).add(1).mul(4).to(dtype)

    source = {"x": leaf(3), "deep": {"y": leaf(3, 4), "deeper": {"z": leaf(3, 2, 5)}}}
    return TensorDict(source, [3])


def turned(tree):
    """Return the tree with its keys in the opposite order at every level."""
    data = {
        key: turned(value) if isinstance(value, TensorDict) else value
        for key, value in reversed(list(tree.items()))
    }
    return TensorDict(data, tree.batch_size)


def flat(tree):
    return dict(tree.items(include_nested=True, leaves_only=True))


def assert_leaves(tree, expected):
    """Check keys, dtypes and values of the leaves against a dict, exactly."""
    found = flat(tree)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)


def assert_declared(tree):
    """Check that every leaf begins with the batch size of the node that holds it."""
    for value in tree.values():
        assert value.shape[: tree.ndim] == tree.batch_size
        if isinstance(value, TensorDict):
            assert_declared(value)


def over(value, leaf):
    """Return a tensor ``(3,)`` with dims behind it so that it broadcasts to the leaf."""
    return value.reshape(3, *[1] * (leaf.ndim - 1))


def tied(size=2):
    shared = torch.ones(size)
    return TensorDict({"a": shared, "b": {"c": shared}, "d": torch.ones(size)}, [size])


def compiled(act):
    torch.compiler.reset()
    return torch.compile(act, fullgraph=True, backend="eager")
