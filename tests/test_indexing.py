"""``td[index]`` and its kin, against the same index on plain tensors of the batch's shape."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import branches, flat, planes, sizes, storage, trees
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from tdnn import LazyStackedTensorDict, TensorDict
from tdnn.errors import LockedError, MissingKeyError

# -- a model ---------------------------------------------------------------------------------


def read(leaf, depth, index):
    """Index the batch dims of a leaf without telling torch about its further dims."""
    further = leaf.shape[depth:]
    parts = [plane[index] for plane in planes(leaf, depth)]
    if not parts:
        return leaf.new_empty((*torch.zeros(leaf.shape[:depth])[index].shape, *further))
    return torch.stack(parts, -1).reshape((*parts[0].shape, *further))


def write(leaf, depth, index, value):
    """Return a copy of a leaf with ``value``, which has the further dims, written at the index."""
    parts = [plane.clone() for plane in planes(leaf, depth)]
    n = value.ndim - (leaf.ndim - depth)
    for part, new in zip(parts, planes(value, n), strict=True):
        part[index] = new
    if not parts:
        return leaf
    return torch.stack(parts, -1).reshape(leaf.shape)


def assert_indexed(td, index):
    model = torch.zeros(td.batch_size)
    want = model[index]
    found = td[index]
    assert type(found) is TensorDict
    assert found.batch_size == want.shape
    assert len(found.names) == want.ndim
    depth = td.batch_dims
    before, after = flat(td), flat(found)
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        torch.testing.assert_close(after[path], read(leaf, depth, index), rtol=0, atol=0)
        if after[path].numel():
            is_view = storage(want) == storage(model)
            assert (storage(after[path]) == storage(leaf)) is is_view
    for branch, whole in zip(branches(found), branches(td), strict=True):
        assert branch.batch_size == (*want.shape, *whole.batch_size[depth:])


# -- random indices --------------------------------------------------------------------------

CHUNK = st.none() | st.integers(-5, 5)


@st.composite
def indices(draw, size):
    """An index that fits a batch size; tensors in it broadcast."""
    length = draw(st.integers(1, 3))
    masked = False
    parts, dim = [], 0
    while dim < len(size):
        n = size[dim]
        kinds = ["slice", "slice", "none", "stop"]
        kinds += ["int", "positions", "list", "range", "zero_dim"] if n else []
        kinds += [] if masked else ["mask", "wide_mask"]
        kind = draw(st.sampled_from(kinds))
        at = st.integers(-n, n - 1)
        if kind == "stop":
            break
        if kind == "none":
            parts.append(None)
            if len(parts) > 5:
                break
            continue
        if kind == "slice":
            parts.append(slice(draw(CHUNK), draw(CHUNK), draw(st.none() | st.integers(1, 3))))
        elif kind == "int":
            parts.append(draw(at))
        elif kind == "zero_dim":
            parts.append(torch.tensor(draw(at)))
        elif kind in ("list", "range", "positions"):
            count = 1 if masked else draw(st.sampled_from([1, length]))
            parts.append(draw(some_positions(kind, at, count, n)))
        else:
            wide = 2 if kind == "wide_mask" and dim + 1 < len(size) else 1
            shape = size[dim : dim + wide]
            bits = draw(
                st.lists(st.booleans(), min_size=shape_size(shape), max_size=shape_size(shape))
            )
            parts.append(torch.tensor(bits, dtype=torch.bool).reshape(shape))
            # Whatever the number of true places, a single position broadcasts with it.
            masked, length = True, 1
            parts = [one_position(part, size) for part in parts]
            dim += wide - 1
        dim += 1
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(parts)))
        used = sum(consumed(part) for part in parts[cut:])
        if used == 0 or dim == len(size):
            parts.insert(cut, ...)
    if len(parts) == 1 and draw(st.booleans()):
        return parts[0]
    return tuple(parts)


@st.composite
def some_positions(draw, kind, at, count, n):
    if kind == "range":
        return range(min(count, n)) if min(count, n) == count else [0] * count
    found = draw(st.lists(at, min_size=count, max_size=count))
    if kind == "list":
        return found
    tensor = torch.tensor(found, dtype=draw(st.sampled_from([torch.int64, torch.int32])))
    return tensor.unsqueeze(0) if draw(st.booleans()) else tensor


def one_position(part, size):
    if isinstance(part, list | range):
        return list(part)[:1]
    if isinstance(part, torch.Tensor) and part.dtype is not torch.bool and part.ndim:
        return part[..., :1]
    return part


def consumed(part):
    if part is None or part is ...:
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1


def shape_size(shape):
    return torch.Size(shape).numel()


@st.composite
def trees_and_indices(draw, **kwargs):
    size = draw(sizes())
    td = draw(trees(batch_size=size, names=draw(st.booleans()), **kwargs))
    return td, draw(indices(size))


@given(trees_and_indices())
def test_an_index_does_to_every_leaf_what_torch_does_to_a_tensor_of_the_batch_shape(case):
    assert_indexed(*case)


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


# -- reading by key --------------------------------------------------------------------------


@pytest.fixture
def td():
    return TensorDict(
        {"a": torch.arange(24.0).reshape(3, 4, 2), "b": {"c": torch.arange(12).reshape(3, 4)}},
        [3, 4],
    )


def test_a_str_or_a_tuple_of_str_is_a_key(td):
    assert td["a"] is td._data["a"]
    assert td["b", "c"] is td["b"]["c"]
    assert td[("b", ("c",))] is td["b"]["c"]
    assert td[(("b",), "c")] is td["b"]["c"]


def test_a_subclass_of_str_is_a_key(td):
    class Name(str):
        __slots__ = ()

    assert td[Name("a")] is td["a"]


def test_a_missing_key_names_the_nearest(td):
    with pytest.raises(MissingKeyError, match=r"no 'aa' among \['a', 'b'\] \(did you mean 'a'\?\)"):
        td["aa"]
    with pytest.raises(MissingKeyError, match=r"\('b', 'd'\) is not in the TensorDict: no 'd'"):
        td["b", "d"]
    with pytest.raises(MissingKeyError, match=r"goes through 'a', which is a leaf"):
        td["a", "d"]


def test_a_key_that_holds_something_else_than_str_says_what_a_key_is(td):
    with pytest.raises(TypeError, match="a key is a str or a non-empty tuple of str, not 0"):
        td["a", 0]


def test_a_value_for_a_key_is_set(td):
    td["b", "d"] = torch.zeros(3, 4)
    td["e"] = {"f": torch.ones(3, 4)}
    assert td["b", "d"].sum() == 0
    assert td["e", "f"].sum() == 12
    with pytest.raises(LockedError, match="cannot set 'x': the tree is locked"):
        td.lock_()["x"] = torch.zeros(3, 4)


# -- kinds of indices ------------------------------------------------------------------------

MASK = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, None),
        slice(None, None, 2),
        ...,
        None,
        (),
        (..., None),
        (None, ..., 0, None),
        (0, 1),
        (slice(None), 2),
        [0, 2],
        [],
        range(2),
        range(2, -1, -1),
        range(0),
        (range(2), [1, 3]),
        ([0, 1], slice(None)),
        ((0, 1),),
        torch.tensor(1),
        (slice(None), torch.tensor(1)),
        torch.tensor([[0, 1], [2, 2]]),
        torch.tensor([0, 2], dtype=torch.int32),
        (torch.tensor([[0], [1]]), torch.tensor([1, 2, 3])),
        ([0, 1], None, [0, 1]),
        (None, [0, 1], slice(1, 3)),
        True,
        False,
        (True, [0, 1]),
        torch.tensor(True),
        torch.tensor([True, False, True]),
        [True, False, True],
        (slice(None), torch.tensor([True, True, False, True])),
        MASK,
        (None, MASK),
        ([0], torch.tensor([True, True, False, False])),
        (slice(torch.tensor(0), torch.tensor(2)),),
    ],
    ids=str,
)
def test_an_index_means_what_it_means_to_torch(td, index):
    assert_indexed(td, index)


def test_a_nested_list_is_a_tensor_of_positions(td):
    assert_indexed(td, torch.tensor([[0, 1], [1, 0]]))
    torch.testing.assert_close(td[[[0, 1], [1, 0]]]["a"], td["a"][torch.tensor([[0, 1], [1, 0]])])


def test_arrays_and_their_numbers_are_indices(td):
    np = pytest.importorskip("numpy")
    for index in (
        np.array([0, 2]),
        np.array([0, 2], dtype=np.int8),
        np.array(1),
        np.int64(1),
        np.array([True, False, True]),
        MASK.numpy(),
    ):
        tensor = torch.tensor(index if index.dtype == bool else index.tolist())
        torch.testing.assert_close(td[index]["a"], td["a"][tensor])
        assert td[index].batch_size == td["b", "c"][tensor].shape


def test_anything_with_an_index_is_an_int(td):
    class Second:
        def __index__(self):
            return 1

    torch.testing.assert_close(td[Second()]["a"], td["a"][1])


def test_an_ellipsis_ends_where_the_batch_ends(td):
    assert td[..., None].batch_size == (3, 4, 1)
    assert td[..., None]["a"].shape == (3, 4, 1, 2)
    assert td[..., 0]["a"].shape == (3, 2)


def test_a_branch_keeps_its_further_batch_dims():
    td = TensorDict({"b": TensorDict({"x": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
    assert td[0]["b"].batch_size == (4,)
    assert td[[0, 1], None]["b"].batch_size == (2, 1, 4)
    assert td[torch.tensor([True, False, True])]["b"].batch_size == (2, 4)


def test_indexing_a_tie_gives_a_tie():
    leaf = torch.zeros(3)
    td = TensorDict({"a": leaf, "b": {"c": leaf}}, [3])
    for index in (0, slice(1), [0, 1], (None, 0)):
        part = td[index]
        assert part["a"] is part["b", "c"]


@pytest.mark.parametrize(
    "index",
    [0, slice(1), [0, 2], range(2), torch.tensor([0, 1]), torch.tensor([True, False, True])],
)
def test_an_index_serves_leaves_on_several_devices(index):
    td = TensorDict({"a": torch.zeros(3, 2), "m": torch.zeros(3, 2, device="meta")}, [3])
    found = td[index]
    assert found["m"].device.type == "meta"
    assert found["m"].shape == found["a"].shape == td["a"][index].shape
    td[index] = found
    td[index] = 1
    assert td["a"][index].sum() == found["a"].numel()


def test_leaves_that_are_made_when_they_are_read_are_told_apart():
    rows = [
        TensorDict({f"k{i}": {"x": torch.full((2,), 10 * i + row)} for i in range(6)})
        for row in range(2)
    ]
    lazy = LazyStackedTensorDict(*rows)  # frees each leaf before it makes the next
    for found in (lazy[:], lazy[[0, 1]], lazy.clone(), lazy.reshape(2)):
        for i in range(6):
            assert found[f"k{i}", "x"].tolist() == [[10 * i] * 2, [10 * i + 1] * 2]


@pytest.mark.parametrize("index", [[0, -1], range(2)])
def test_positions_are_made_in_the_mode_of_the_leaves(index):
    with FakeTensorMode():
        found = TensorDict({"a": torch.ones(3, 2)}, [3])[index]
    assert found["a"].shape == (2, 2)


def test_an_index_of_a_locked_tree_gives_an_unlocked_one(td):
    assert not td.lock_()[0].is_locked


def test_a_tree_without_leaves_can_be_indexed():
    td = TensorDict({"a": {}}, [3, 4])
    assert td[0].batch_size == td[0]["a"].batch_size == (4,)
    assert td[MASK].batch_size == (6,)


def test_gradients_flow_through_an_index(td):
    x = torch.ones(3, 2, requires_grad=True)
    TensorDict({"x": x}, [3])[[0, 0, 2]]["x"].sum().backward()
    assert x.grad.tolist() == [[2, 2], [0, 0], [1, 1]]


# -- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "names"),
    [
        (0, ["b"]),
        (slice(2), ["a", "b"]),
        ((slice(None), 0), ["a"]),
        ((0, 0), []),
        (None, [None, "a", "b"]),
        ((..., None), ["a", "b", None]),
        ([0, 1], ["a", "b"]),
        ((slice(None), [0, 1]), ["a", "b"]),
        (([0, 1], [0, 1]), [None]),
        (torch.zeros(2, 2, dtype=torch.int64), [None, None, "b"]),
        (torch.tensor([True, False, True]), ["a", "b"]),
        (MASK, [None]),
        (torch.tensor(0), ["b"]),
    ],
    ids=str,
)
def test_names_stay_with_their_dims(td, index, names):
    td.names = ["a", "b"]
    assert td[index].names == names
    assert td[index]["b"].names == names


# -- faults ----------------------------------------------------------------------------------


def test_too_many_indices_says_how_many_and_the_batch_size(td):
    for index in ((0, 0, 0), (MASK, 0), ([0], [0], [0]), (slice(None),) * 3):
        with pytest.raises(IndexError, match=r"too many indices: 3 for batch size \(3, 4\)"):
            td[index]
    with pytest.raises(IndexError, match=r"too many indices: 1 for batch size \(\)"):
        TensorDict({"a": torch.zeros(3)})[0]


def test_an_int_out_of_range_says_so_even_without_leaves():
    for td in (TensorDict({"a": torch.zeros(3, 4)}, [3, 4]), TensorDict({}, [3, 4])):
        for index in (3, [0, 3], range(2, 4), (3, 0)):
            with pytest.raises(IndexError, match=r"index 3 is out of range for dim 0 of batch"):
                td[index]
        with pytest.raises(IndexError, match=r"index -4 is out of range for dim 0 of batch"):
            td[[0, -4]]
        with pytest.raises(IndexError, match=r"index -5 is out of range for dim 1 of batch size"):
            td[0, -5]


def test_a_mask_that_does_not_fit_says_where(td):
    with pytest.raises(IndexError, match=r"a mask of shape \(3,\) at dim 1 does not fit batch"):
        td[:, torch.tensor([True, False, True])]


def test_index_tensors_that_do_not_broadcast_are_refused(td):
    with pytest.raises(IndexError, match=r"index tensors of shapes \[\(2,\), \(3,\)\] do not"):
        td[[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("index", [1.0, {0}, {"a": 0}, object()], ids=repr)
def test_what_is_no_index_is_refused(td, index):
    with pytest.raises(IndexError, match="a tree is indexed with ints, slices, tensors"):
        td[index]


def test_positions_must_be_whole_numbers(td):
    for index in ([0.5], torch.tensor([1.0]), torch.tensor(1.0)):
        with pytest.raises(IndexError, match="an index tensor is int64, int32 or bool, not"):
            td[index]


def test_a_list_of_something_else_is_refused(td):
    with pytest.raises(IndexError, match=r"cannot make index positions of \['a', 'b'\]"):
        td[["a", "b"]]


def test_two_ellipses_are_refused(td):
    with pytest.raises(IndexError, match="one ellipsis"):
        td[..., 0, ...]


def test_a_negative_step_is_refused(td):
    with pytest.raises(
        ValueError, match=r"a slice needs a step of at least 1, not -1; use td\.flip"
    ):
        td[::-1]


# -- writing ---------------------------------------------------------------------------------


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
        match=r"value lacks \[\('b', 'c'\)\]; the tree lacks \['e', \('b', 'd'\)\]; nothing was",
    ):
        td[0] = value
    assert torch.equal(before, td)


def test_a_leaf_for_a_branch_is_refused(td):
    with pytest.raises(MissingKeyError, match=r"on one side and a leaf on the other: \['a', 'b'\]"):
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


# -- get_at and set_at_ ----------------------------------------------------------------------


def test_get_at_indexes_the_entry(td):
    assert td.get_at("a", (0, 1, 1)) == td["a"][0, 1, 1]
    assert td.get_at(("b", "c"), slice(2)).shape == (2, 4)
    assert td.get_at("b", 0).batch_size == (4,)
    assert td.get_at("zzz", 0) is None
    assert td.get_at("zzz", 0, default=5) == 5


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


# -- gather and where ------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_picks_as_torch_does(td, dim):
    index = torch.randint(3, (2, 3))
    td.names = ["a", "b"]
    found = td.gather(dim, index)
    assert found.batch_size == (2, 3)
    assert found.names == ["a", "b"]
    torch.testing.assert_close(found["b", "c"], td["b", "c"].gather(dim, index))
    for i in range(2):
        torch.testing.assert_close(found["a"][..., i], td["a"][..., i].gather(dim, index))


def test_gather_writes_into_out(td):
    index = torch.zeros(3, 1, dtype=torch.int64)
    out = td[:, :1].clone()
    leaf = out["a"]
    assert td.gather(1, index + 3, out=out) is out
    torch.testing.assert_close(leaf, td["a"][:, 3:])
    with pytest.raises(RuntimeError, match=r"out has batch size \(3, 4\), the result \(3, 1\)"):
        td.gather(1, index, td.clone())


def test_gather_refuses_an_index_that_does_not_fit(td):
    for shape in ((3,), (4, 4), (3, 4, 1)):
        with pytest.raises(RuntimeError, match=r"cannot gather along dim 1 of batch size \(3, 4\)"):
            td.gather(1, torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(IndexError, match=r"dim 2 is out of range for batch size \(3, 4\)"):
        td.gather(2, torch.zeros(3, 4, dtype=torch.int64))


def test_where_chooses_rows_elements_and_by_tree(td):
    other = td * 0 - 1
    rows = torch.tensor([True, False, True])
    torch.testing.assert_close(
        td.where(rows, other)["a"], torch.where(rows[:, None, None], td["a"], other["a"])
    )
    torch.testing.assert_close(td.where(MASK, 0)["b", "c"], torch.where(MASK, td["b", "c"], 0))
    torch.testing.assert_close(
        td.where(td > 5, other)["a"], torch.where(td["a"] > 5, td["a"], other["a"])
    )
    assert td.where(MASK[:, :1], 0)["a"].sum() == td["a"][MASK[:, 0]].sum()


def test_where_writes_into_out(td):
    out = td.clone()
    leaf = out["a"]
    assert td.where(MASK, 0, out=out) is out
    assert leaf.sum() == td["a"][MASK].sum()


def test_where_refuses_what_does_not_fit(td):
    with pytest.raises(TypeError, match="a condition is a bool tensor or a tree, not bool"):
        td.where(True, 0)
    with pytest.raises(RuntimeError, match=r"a condition of shape \(4,\) does not fit the first"):
        td.where(torch.ones(4, dtype=torch.bool), 0)
    with pytest.raises(MissingKeyError, match="the trees differ: only the first has"):
        td.where(MASK, TensorDict({"a": td["a"]}, [3, 4]))
    with pytest.raises(MissingKeyError, match=r"a leaf in one and a branch in the other: \['b'\]"):
        td.where(MASK, TensorDict({"a": td["a"], "b": td["a"]}, [3, 4]))
    with pytest.raises(RuntimeError, match=r"shape \(5, 3, 4, 2\) does not begin with the batch"):
        td.where(MASK, torch.zeros(5, 3, 4, 2))


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


def test_indexing_does_not_recompile_for_other_values(td):
    counter = CompileCounter()
    compiled = torch.compile(lambda td: td[0].reshape(2, 2), fullgraph=True, backend=counter)
    for _ in range(3):
        compiled(td.clone())
    assert counter.frame_count == 1


def test_indexing_under_vmap(td):
    found = torch.vmap(lambda row: row[1])(td)
    assert torch.equal(found, td[:, 1])
