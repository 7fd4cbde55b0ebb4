"""The group ``pytree`` of the list: one op on every leaf, through torch's pytree and as a tree."""

import operator
from functools import partial

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from benchmarks.cases import case, twin
from benchmarks.samples import SIZE, small


def apart(cut, tree):
    """Cut each leaf and return the trees of the pieces."""
    leaves, spec = tree_flatten(tree)
    rows = zip(*map(cut, leaves), strict=True)
    return [tree_unflatten(row, spec) for row in rows]


@twin
def test_reshape_pytree():
    return partial(tree_map, lambda value: value.reshape(24, 2), small())


@case(plain=test_reshape_pytree.build)
def test_reshape_td(lib):
    return partial(lib.TensorDict(small(), SIZE).reshape, 24)


@twin
def test_view_pytree():
    return partial(tree_map, lambda value: value.view(24, 2), small())


@case(plain=test_view_pytree.build)
def test_view_td(lib):
    return partial(lib.TensorDict(small(), SIZE).view, 24)


@twin
def test_unbind_pytree():
    return partial(apart, torch.unbind, small())


@case(plain=test_unbind_pytree.build)
def test_unbind_td(lib):
    return partial(lib.TensorDict(small(), SIZE).unbind, 0)


@twin
def test_split_pytree():
    return partial(apart, lambda value: value.split(2), small())


@case(plain=test_split_pytree.build)
def test_split_td(lib):
    return partial(lib.TensorDict(small(), SIZE).split, 2)


@twin
def test_add_pytree():
    return partial(tree_map, lambda value: value + 1, small())


@case(plain=test_add_pytree.build)
def test_add_td(lib):
    return partial(operator.add, lib.TensorDict(small(), SIZE), 1)
