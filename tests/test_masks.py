"""Filling and selecting where a mask over the batch is true."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import state
from strategies import flat, sizes, trees

from tdnn import LockedError, TensorDict


@st.composite
def masked(draw, dtypes=(torch.float32, torch.int64, torch.bool)):
    """Return a tree and a mask over its first batch dims."""
    td = draw(trees(sizes(max_dims=2), names=True, dtypes=dtypes))
    shape = td.batch_size[: draw(st.integers(0, td.ndim))]
    bits = draw(st.lists(st.booleans(), min_size=shape.numel(), max_size=shape.numel()))
    return td, torch.tensor(bits, dtype=torch.bool).reshape(shape)


def filled(leaf, mask, value):
    """Return what a loop over the elements of the mask gives."""
    out = leaf.clone()
    out[mask] = value
    return out


@given(masked())
def test_masked_fill_writes_the_value_where_the_mask_is_true(case):
    td, mask = case
    before = {path: leaf.clone() for path, leaf in flat(td).items()}
    found = td.masked_fill(mask, 1)
    assert not found.is_locked
    assert (found.batch_size, found.names) == (td.batch_size, td.names)
    assert all(torch.equal(leaf, before[path]) for path, leaf in flat(td).items())
    assert td.lock_().masked_fill_(mask, 1) is td
    for tree in (found, td):
        assert flat(tree).keys() == before.keys()
        for path, leaf in flat(tree).items():
            assert torch.equal(leaf, filled(before[path], mask, 1))


@given(masked())
def test_masked_select_is_an_index(case):
    td, mask = case
    expected = td[mask]
    leaves, found = flat(td), td.masked_select(mask)
    assert td.masked_select(mask, inplace=True) is td
    for tree in (found, td):
        assert (tree.batch_size, tree.names) == (expected.batch_size, expected.names)
        assert list(tree.keys(True)) == list(expected.keys(True))
        assert all(torch.equal(x, leaves[path][mask]) for path, x in flat(tree).items())


def test_selecting_in_place_keeps_nodes_and_ties():
    x = torch.arange(3)
    td = TensorDict({"a": x, "b": TensorDict({"c": x}, [3])}, [3])
    branch = td["b"]
    assert td.masked_select(torch.tensor([True, False, True]), inplace=True) is td
    assert td["b"] is branch
    assert branch.batch_size == (2,)
    assert td["a"] is branch["c"]
    assert x.tolist() == [0, 1, 2]


def test_a_tie_is_filled_once_and_stays_a_tie():
    x = torch.arange(3)
    td = TensorDict({"a": x, "b": {"c": x}}, [3])
    found = td.masked_fill(torch.tensor([True, False, False]), 9)
    assert found["a"] is found["b", "c"]
    td.masked_fill_(torch.tensor([True, False, False]), 9)
    assert x.tolist() == [9, 1, 2]


CALLS = {
    "masked_fill": lambda td, mask: td.masked_fill(mask, 1),
    "masked_fill_": lambda td, mask: td.masked_fill_(mask, 1),
    "masked_select": lambda td, mask: td.masked_select(mask),
    "masked_select in place": lambda td, mask: td.masked_select(mask, inplace=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(3), TypeError, "a mask is a bool tensor, not torch.float32"),
        (torch.tensor([0, 1]), TypeError, "a mask is a bool tensor, not torch.int64"),
        ([True, False], TypeError, "a mask is a bool tensor, not list"),
        (torch.ones(3).bool(), IndexError, r"shape \(3,\) does not fit batch size \(2, 4\)"),
        (torch.ones(4).bool(), IndexError, r"shape \(4,\) does not fit batch size \(2, 4\)"),
        (torch.ones(1, 4).bool(), IndexError, r"shape \(1, 4\) does not fit batch size"),
        (torch.ones(2, 4, 5).bool(), IndexError, r"shape \(2, 4, 5\) does not fit batch size"),
    ],
    ids=str,
)
def test_masks_that_do_not_fit_the_batch_are_refused(call, mask, error, message):
    td = TensorDict({"a": torch.zeros(2, 4, 5)}, [2, 4])
    before = state(td)
    with pytest.raises(error, match=message):
        call(td, mask)
    assert state(td) == before


def test_a_value_that_a_leaf_cannot_hold_is_refused_before_anything_is_written():
    td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64)}, [2])
    before = state(td)
    for fill in (td.masked_fill, td.masked_fill_):
        with pytest.raises(RuntimeError, match="cannot be converted"):
            fill(torch.tensor([True, False]), 1j)
    assert state(td) == before


def test_selecting_in_place_needs_unlocked_trees():
    mask = torch.tensor([True, False])
    whole = TensorDict({"a": torch.zeros(2)}, [2], lock=True)
    part = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}}, [2])
    part["b"].lock_()
    for td in (whole, part):
        before = state(td)
        with pytest.raises(LockedError, match="cannot select in place"):
            td.masked_select(mask, inplace=True)
        assert state(td) == before
        assert td.masked_select(mask).batch_size == (1,)


def test_filling_traces():
    def fill(td, mask):
        td.masked_fill_(~mask, 2)
        return td.masked_fill(mask, 1)

    td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3, 2)}}, [3])
    mask = torch.tensor([True, False, True])
    found = torch.compile(fill, backend="eager", fullgraph=True)(td, mask)
    assert found["a"].tolist() == [1, 2, 1]
    assert td["b", "c"].tolist() == [[0, 0], [2, 2], [0, 0]]
