"""Random trees for hypothesis, and how to take them apart again; shared by all tests.

Every element of a tree is another number (as far as the dtype can count), so that a value in the
wrong place shows.
"""

import itertools
import string
from collections.abc import Sequence
from math import prod

import torch
from hypothesis import strategies as st

from tdnn import TensorDict, TensorDictBase

# Long enough to tell elements apart, with every way in which torch treats a dtype.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.complex64,
)

# A key may hold the separator, and anything else that a str can hold.
KEYS = st.text(string.ascii_lowercase + "._ é", min_size=1, max_size=4)


def sizes(min_dims=0, max_dims=3, max_size=4):
    """Batch sizes as tuples; a size may be 0 or 1."""
    return st.lists(st.integers(0, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def leaves(draw, batch_size=(), dtypes=DTYPES, start=0, max_further=2):
    """A tensor ``(*batch_size, ...)`` that counts from ``start``, sometimes not contiguous."""
    further = draw(st.lists(st.integers(1, 3), max_size=max_further))
    shape = (*batch_size, *further)
    dtype = draw(st.sampled_from(dtypes))
    values = torch.arange(start, start + prod(shape))
    if dtype is torch.bool:
        values = values * 7 % 5 < 2
    values = values.to(dtype)
    if len(shape) > 1 and draw(st.booleans()):
        return values.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
    return values.reshape(shape)


@st.composite
def trees(
    draw,
    batch_size=None,
    max_depth=3,
    keys=KEYS,
    max_entries=4,
    dtypes=DTYPES,
    names=False,
    ties=True,
):
    """A ``TensorDict`` with nested and empty branches, some of which have further batch dims.

    Args:
        draw: given by hypothesis.
        batch_size: a tuple, or a strategy for one; by default any.
        max_depth: how many branches may be on the way to a leaf; 0 for a flat tree.
        keys: a strategy for the keys.
        max_entries: the most entries of one branch.
        dtypes: what the leaves may be.
        names: name the batch dims ("d0", "d1", ...).
        ties: let one tensor stand under several names.
    """
    if batch_size is None:
        batch_size = sizes()
    if isinstance(batch_size, st.SearchStrategy):
        batch_size = draw(batch_size)
    build = _Builder(draw, keys, max_entries, dtypes, ties)
    td = build.branch(tuple(batch_size), max_depth)
    if names and batch_size:
        td.names = [f"d{i}" for i in range(len(batch_size))]
    return td


class _Builder:
    """Draws one tree; counts through all its leaves."""

    def __init__(self, draw, keys, max_entries, dtypes, ties):
        self.draw = draw
        self.keys = keys
        self.max_entries = max_entries
        self.dtypes = dtypes
        self.ties = ties
        self.start = itertools.count(0, 100)
        self.made = []

    def branch(self, batch_size: Sequence[int], depth: int) -> TensorDict:
        names = self.draw(st.lists(self.keys, unique=True, max_size=self.max_entries))
        return TensorDict({name: self.entry(batch_size, depth) for name in names}, batch_size)

    def entry(self, batch_size, depth):
        if depth and self.draw(st.integers(0, 2)) == 0:
            further = self.draw(st.lists(st.integers(0, 3), max_size=1))
            return self.branch((*batch_size, *further), depth - 1)
        fitting = [x for x in self.made if x.shape[: len(batch_size)] == tuple(batch_size)]
        if self.ties and fitting and self.draw(st.integers(0, 4)) == 0:
            return self.draw(st.sampled_from(fitting))
        self.made.append(self.draw(leaves(batch_size, self.dtypes, next(self.start))))
        return self.made[-1]


def flat(td):
    """Return the leaves of a tree by path, read through nothing but its keys."""
    found = {}
    for key in td.keys():  # noqa: SIM118  # iterating a tree goes over its rows
        value = td[key]
        if isinstance(value, TensorDictBase):
            found.update({(key, *path): leaf for path, leaf in flat(value).items()})
        else:
            found[key,] = value
    return found


def branches(td):
    """Yield the branches of a tree, depth first."""
    for value in td.values():
        if isinstance(value, TensorDictBase):
            yield value
            yield from branches(value)


def planes(leaf, depth):
    """Return a leaf as tensors that have its batch dims only, one for each further element."""
    return list(leaf.reshape(*leaf.shape[:depth], leaf.shape[depth:].numel()).unbind(-1))


def storage(tensor):
    """Return what tensors that share memory have in common."""
    return tensor.untyped_storage().data_ptr()
