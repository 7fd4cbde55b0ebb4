"""``td[index]`` and its kin, against the same index on plain tensors of the batch's shape."""

import pytest
import torch
from hypothesis import given
from indices import MASK, make, trees_and_indices
from strategies import branches, flat, planes, storage
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from tdnn import LazyStackedTensorDict, TensorDict
from tdnn.errors import MissingKeyError

# -- a model ---------------------------------------------------------------------------------


def read(leaf, depth, index):
    """Index the batch dims of a leaf without telling torch about its further dims."""
    further = leaf.shape[depth:]
    parts = [plane[index] for plane in planes(leaf, depth)]
    if not parts:
        return leaf.new_empty((*torch.zeros(leaf.shape[:depth])[index].shape, *further))
    return torch.stack(parts, -1).reshape((*parts[0].shape, *further))


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


@given(trees_and_indices())
def test_an_index_does_to_every_leaf_what_torch_does_to_a_tensor_of_the_batch_shape(case):
    assert_indexed(*case)


# -- reading by key --------------------------------------------------------------------------


@pytest.fixture
def td():
    return make()


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


# -- kinds of indices ------------------------------------------------------------------------


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


# -- get_at ----------------------------------------------------------------------------------


def test_get_at_indexes_the_entry(td):
    assert td.get_at("a", (0, 1, 1)) == td["a"][0, 1, 1]
    assert td.get_at(("b", "c"), slice(2)).shape == (2, 4)
    assert td.get_at("b", 0).batch_size == (4,)
    assert td.get_at("zzz", 0) is None
    assert td.get_at("zzz", 0, default=5) == 5


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
    other = TensorDict({"a": td["a"], "b": {"c": torch.zeros(3, 4, 7)}}, [3, 4])
    deep = td.clone()
    deep["b", "c"] = torch.zeros(3, 4, 5)
    with pytest.raises(RuntimeError) as caught:
        deep.where(MASK, other)
    assert caught.value.__notes__ == ["key ('b', 'c')"]


# -- compiled --------------------------------------------------------------------------------


def test_indexing_does_not_recompile_for_other_values(td):
    counter = CompileCounter()
    compiled = torch.compile(lambda td: td[0].reshape(2, 2), fullgraph=True, backend=counter)
    for _ in range(3):
        compiled(td.clone())
    assert counter.frame_count == 1


def test_indexing_under_vmap(td):
    found = torch.vmap(lambda row: row[1])(td)
    assert torch.equal(found, td[:, 1])
