"""``td[index] = value`` and its kin, against the same write to plain tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from indices import make, trees_and_indices
from strategies import flat, planes

from tdnn import TensorDict
from tdnn.errors import LockedError, MissingKeyError


@pytest.fixture
def td():
    return make()


# -- anything at any index -------------------------------------------------------------------


def write(leaf, depth, index, value):
    """Return a copy of a leaf with ``value``, which has the further dims, written at the index."""
    parts = [plane.clone() for plane in planes(leaf, depth)]
    n = value.ndim - (leaf.ndim - depth)
    for part, new in zip(parts, planes(value, n), strict=True):
        part[index] = new
    if not parts:
        return leaf
    return torch.stack(parts, -1).reshape(leaf.shape)


@given(trees_and_indices(ties=False), st.booleans())
def test_a_tree_written_at_an_index_lands_where_torch_puts_it(case, as_mapping):
    td, index = case
    value = td[index].apply(lambda x: ~x if x.dtype is torch.bool else x + 1)
    want = {path: write(leaf, td.batch_dims, index, value[path]) for path, leaf in flat(td).items()}
    before = flat(td)
    td[index] = value.to_dict() if as_mapping else value
    for path, leaf in flat(td).items():
        assert leaf is before[path]
        torch.testing.assert_close(leaf, want[path], rtol=0, atol=0)


@given(trees_and_indices(ties=False))
def test_a_number_written_at_an_index_reaches_every_leaf(case):
    td, index = case
    want = {
        path: write(leaf, td.batch_dims, index, torch.ones(leaf.shape[td.batch_dims :]).to(leaf))
        for path, leaf in flat(td).items()
    }
    td[index] = 1
    for path, leaf in flat(td).items():
        torch.testing.assert_close(leaf, want[path], rtol=0, atol=0)


# -- values ----------------------------------------------------------------------------------


def test_a_value_for_a_key_is_set(td):
    td["b", "d"] = torch.zeros(3, 4)
    td["e"] = {"f": torch.ones(3, 4)}
    assert td["b", "d"].sum() == 0
    assert td["e", "f"].sum() == 12
    with pytest.raises(LockedError, match="cannot set 'x': the tree is locked"):
        td.lock_()["x"] = torch.zeros(3, 4)


def test_a_locked_tree_can_be_written_at_an_index(td):
    td.lock_()
    td[0] = 5
    td[1:] = td[1:] * 0
    assert td["a"].sum() == 5 * 8
    assert td["b", "c"].sum() == 5 * 4


def test_a_mapping_with_numbers_lists_and_key_tuples_is_written(td):
    td[0, 0] = {"a": [1.0, 2.0], ("b", "c"): 3}
    assert td["a"][0, 0].tolist() == [1, 2]
    assert td["b", "c"][0, 0] == 3


def test_a_list_or_an_array_goes_to_every_leaf(td):
    np = pytest.importorskip("numpy")
    flat_td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.int64)}, [3])
    flat_td[1:] = [1, 2]
    assert flat_td["a"].tolist() == flat_td["b"].tolist() == [0, 1, 2]
    flat_td[[0, 1]] = np.array([5.0, 6.0])
    assert flat_td["a"].tolist() == flat_td["b"].tolist() == [5, 6, 2]


def test_a_tensor_goes_to_every_leaf_with_the_broadcasting_of_torch():
    for index in (1, slice(1, None), [1, 2], torch.tensor([False, True, True])):
        td = TensorDict({"x": torch.zeros(3, 4, 2), "y": torch.zeros(3, 2)}, [3])
        x, y = td["x"].clone(), td["y"].clone()
        for value in (torch.tensor([1.0, 2.0]), torch.tensor([[3.0]]), torch.tensor(4)):
            td[index] = value
            x[index] = y[index] = value.float()
            assert torch.equal(td["x"], x)
            assert torch.equal(td["y"], y)


def test_keys_that_do_not_match_are_all_listed_and_nothing_is_written(td):
    before = td.clone()
    value = {"a": torch.ones(4, 2), "b": {"d": torch.ones(4)}, "e": 1}
    with pytest.raises(
        MissingKeyError,
        match=r"only the tree has \[\('b', 'c'\)\]; only the value has \['e', \('b', 'd'\)\]",
    ):
        td[0] = value
    assert torch.equal(before, td)


def test_a_leaf_for_a_branch_is_refused(td):
    with pytest.raises(MissingKeyError, match=r"in one and a branch in the other: \['a', 'b'\]"):
        td[0] = {"a": {}, "b": torch.ones(4)}


def test_shapes_that_do_not_broadcast_are_all_listed_and_nothing_is_written(td):
    before = td.clone()
    for index in (0, [0], torch.tensor([True, False, False])):
        value = {"a": torch.ones(3, 2), "b": {"c": torch.ones(7)}}
        with pytest.raises(
            RuntimeError, match=r"'a': \(3, 2\) into .*; \('b', 'c'\): \(7,\) into .*nothing was"
        ):
            td[index] = value
        assert torch.equal(before, td)
        with pytest.raises(RuntimeError, match=r"'a': \(5,\) into .*\('b', 'c'\): \(5,\) into"):
            td[index] = torch.ones(5)
        assert torch.equal(before, td)


def test_a_number_that_one_leaf_cannot_hold_is_written_to_none():
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.uint8)}, [3])
    with pytest.raises(RuntimeError, match="without overflow"):
        td[0] = 300
    assert td["a"].sum() == 0


def test_what_is_no_value_is_refused(td):
    with pytest.raises(TypeError, match="cannot write str at an index"):
        td[0] = "text"
    with pytest.raises(TypeError, match="cannot write NoneType at an index"):
        td[0] = None


def test_other_dtypes_are_cast_at_any_kind_of_index(td):
    for index in (0, [0], torch.tensor([True, False, False])):
        td[index] = {"a": torch.tensor(3), "b": {"c": torch.tensor([4.0])}}
        assert (td["a"][0] == 3).all()
        assert (td["b", "c"][0] == 4).all()
        td[index] = torch.tensor(7)
        assert (td["a"][0] == 7).all()


def test_the_batch_dims_of_a_tree_never_meet_further_dims():
    td = TensorDict({"x": torch.zeros(3, 3)}, [3])
    td[:] = TensorDict({"x": torch.arange(3.0)}, [3])
    assert td["x"].tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    td[[0, 1, 2]] = TensorDict({"x": torch.arange(3.0)}, [])  # these are further dims
    assert td["x"].tolist() == [[0, 1, 2]] * 3


def test_leading_dims_of_size_one_do_not_count():
    td = TensorDict({"x": torch.zeros(3, 2)}, [3])
    for index in (0, [0]):
        td[index] = TensorDict({"x": torch.ones(1, 1, 2)}, [1, 1])
        assert td["x"].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_writing_a_whole_tree_without_batch_dims():
    td = TensorDict({"x": torch.zeros(3)})
    td[...] = {"x": torch.ones(3)}
    assert td["x"].tolist() == [1, 1, 1]
    td[()] = 2
    assert td["x"].tolist() == [2, 2, 2]


def test_gradients_flow_through_a_write():
    for index in (0, [0]):
        value = torch.ones(2, requires_grad=True)
        td = TensorDict({"x": torch.zeros(3, 2)}, [3])
        td[index] = TensorDict({"x": value})
        (td["x"] * 3).sum().backward()
        assert value.grad.tolist() == [3, 3]


def test_set_at_writes_into_the_entry(td):
    leaf = td.lock_()["a"]
    assert td.set_at_("a", torch.ones(2), (0, 0)) is td
    assert td["a"] is leaf
    assert leaf[0, 0].tolist() == [1, 1]
    td.set_at_("b", {"c": 5}, 0)
    td.set_at_(("b", "c"), [6, 6, 6, 6], index=1, non_blocking=True)
    assert td["b", "c"][:2].tolist() == [[5] * 4, [6] * 4]
    with pytest.raises(MissingKeyError, match="no 'zzz'"):
        td.set_at_("zzz", 1, 0)
    with pytest.raises(TypeError, match="cannot write str"):
        td.set_at_("a", "text", 0)


# -- compiled --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", [0, slice(1, 3), (slice(None), 1), [0, 2], (..., None), torch.tensor([0, 1]), None]
)
def test_reading_and_writing_trace(td, index):
    def read_and_write(td, value):
        part = td[index]
        td[index] = part * 2
        td[0] = value
        return part + 1

    eager, traced = td.clone(), td.clone()
    compiled = torch.compile(read_and_write, fullgraph=True, backend="eager")
    want, found = read_and_write(eager, 5), compiled(traced, 5)
    assert torch.equal(want, found)
    assert torch.equal(eager, traced)


def test_writing_at_a_mask_traces(td):
    def fill(td, mask, row):
        td[mask] = 0
        td[mask] = row
        return td

    mask = torch.tensor([True, False, True])
    want = fill(td.clone(), mask, td[1])
    compiled = torch.compile(fill, fullgraph=True, backend="eager")
    assert torch.equal(compiled(td.clone(), mask, td[1]), want)


def pairs():
    return TensorDict({"a": torch.zeros(3), "b": torch.arange(3.0)}, [3])


def test_a_value_that_shares_memory_with_its_leaf_is_read_as_it_was():
    td = pairs()
    td[1:] = {"a": torch.ones(2), "b": td["b"][:-1]}
    assert td["a"].tolist() == [0, 1, 1]
    assert td["b"].tolist() == [0, 0, 1]
    base = torch.arange(4.0)
    td = TensorDict({"a": torch.zeros(3), "b": base[:3]}, [3])
    td.update_({"a": torch.ones(3), "b": base[1:]})
    assert td["b"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("index", [torch.tensor([0, 7]), [0, 7], range(2, 4), ([0, -4], None)])
@pytest.mark.parametrize("value", [7, torch.tensor(7.0), {"a": 7, "b": torch.tensor(7.0)}])
def test_an_index_out_of_range_is_refused_before_the_first_write(index, value):
    td = pairs()
    with pytest.raises(IndexError, match="out of"):
        td[index] = value
    assert not td["a"].any()
    assert td["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [slice(1, None), [1, 2], torch.tensor([1, 2]), range(1, 3)])
def test_what_is_written_is_cast_to_the_dtype_of_its_leaf(index):
    td = TensorDict({"a": torch.zeros(3, dtype=torch.int32), "b": torch.zeros(3)}, [3])
    td[index] = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3, 4])}
    assert (td["a"].tolist(), td["b"].tolist()) == ([0, 1, 2], [0, 3, 4])
    td[index] = torch.tensor([5.0, 6.0])
    assert (td["a"].tolist(), td["b"].tolist()) == ([0, 5, 6], [0, 5, 6])
    assert (td["a"].dtype, td["b"].dtype) == (torch.int32, torch.float32)


@pytest.mark.parametrize(
    "write",
    [
        lambda td, value: td.__setitem__(slice(None), value),
        lambda td, value: td.update_(value),
        lambda td, value: td.update(value, inplace=True),
    ],
)
def test_values_on_the_meta_device_are_refused_before_the_first_write(write):
    td = pairs()
    with pytest.raises(ValueError, match=r"values for \['b'\]: they are on the meta device, which"):
        write(td, {"a": torch.ones(3), "b": torch.ones(3, device="meta")})
    assert not td["a"].any()
