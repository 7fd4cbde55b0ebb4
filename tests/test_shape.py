"""The shape methods, ``stack`` and ``cat``, against ``Tensor``'s own on the batch dims alone."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import branches, flat, planes, sizes, storage, trees
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict
from tdnn._pieces import cat, stack
from tdnn.errors import MissingKeyError

# -- a model ---------------------------------------------------------------------------------


def listed(found):
    return list(found) if isinstance(found, tuple | list) else [found]


def assert_works_as_on_tensors(op, *tds, views=None):
    """Compare ``op`` on trees with ``op`` on tensors of the batch's shape, leaf by leaf.

    ``views`` says whether the results must share memory with the leaves, or must not.
    """
    depth = tds[0].batch_dims
    wants = listed(op(*[torch.zeros(td.batch_size) for td in tds]))
    founds = listed(op(*tds))
    assert [found.batch_size for found in founds] == [want.shape for want in wants]
    assert [len(found.names) for found in founds] == [want.ndim for want in wants]
    leaves = [flat(td) for td in tds]
    for at, (found, want) in enumerate(zip(founds, wants, strict=True)):
        after = flat(found)
        assert after.keys() == leaves[0].keys()
        for path, leaf in after.items():
            sources = [table[path] for table in leaves]
            further = sources[0].shape[depth:]
            columns = zip(*[planes(source, depth) for source in sources], strict=True)
            parts = [listed(op(*column))[at] for column in columns]
            assert leaf.shape == (*want.shape, *further)
            if parts:
                model = torch.stack(parts, -1).reshape(leaf.shape)
                torch.testing.assert_close(leaf, model, rtol=0, atol=0)
            if views is not None and leaf.numel():
                assert (storage(leaf) == storage(sources[0])) is views, path
        for new, old in zip(branches(found), branches(tds[0]), strict=True):
            assert new.batch_size == (*want.shape, *old.batch_size[depth:])


# -- random shapes ---------------------------------------------------------------------------


@st.composite
def shapes_of(draw, n):
    """A shape of ``n`` elements; sometimes with a -1."""
    if n == 0:
        return tuple(draw(st.permutations([0, draw(st.integers(0, 3))])))
    shape = []
    while n > 1 and len(shape) < 3:
        factor = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
        shape.append(factor)
        n //= factor
    shape.append(n)
    if draw(st.booleans()):
        shape[draw(st.integers(0, len(shape) - 1))] = -1
    return tuple(shape)


@st.composite
def operations(draw, size):
    """A shape operation that fits a batch size, as a function; and whether it gives views."""
    depth = len(size)
    model = torch.zeros(size)
    dim = draw(st.integers(-depth, depth - 1)) if depth else None
    other = draw(st.integers(-depth, depth - 1)) if depth else None
    new = draw(st.integers(-depth - 1, depth))
    shape = draw(shapes_of(model.numel()))
    front = draw(sizes(max_dims=2, max_size=2))
    wide = tuple(
        draw(st.integers(1, 2)) if n == 1 else draw(st.sampled_from([n, -1])) for n in size
    )
    times = draw(st.lists(st.integers(0, 2), min_size=depth, max_size=depth))
    found = [
        (lambda x: x.reshape(shape), None),
        (lambda x: x.reshape(*shape), None),
        (lambda x: x.unsqueeze(new), True),
        (lambda x: x.squeeze(), True),
        (lambda x: x.flatten(), None),
        (lambda x: x.expand(*front, *wide) if front or wide else x.expand(()), True),
        (lambda x: x.expand((*front, *wide)), True),
        (lambda x: x.repeat((*front, *times)), None),
        (lambda x: x.contiguous(), None),
    ]
    if depth:
        order = draw(st.permutations(range(depth)))
        first, last = sorted((dim % depth, other % depth))
        cuts = draw(st.lists(st.integers(0, size[dim]), max_size=2))
        edges = [0, *sorted(cuts), size[dim]]
        lengths = [b - a for a, b in pairwise(edges)]
        step, shift = draw(st.integers(1, 4)), draw(st.integers(-3, 3))
        counts = torch.tensor(
            draw(st.lists(st.integers(0, 2), min_size=size[dim], max_size=size[dim]))
        )
        inner = draw(shapes_of(size[dim]).filter(lambda s: s.count(0) < 2))
        found += [
            (lambda x: x.squeeze(dim), True),
            (lambda x: x.squeeze((dim,)), True),
            (lambda x: x.flatten(first, last), None),
            (lambda x: x.unflatten(dim, inner), None),
            (lambda x: x.permute(order), True),
            (lambda x: x.permute(*order), True),
            (lambda x: x.transpose(dim, other), True),
            (lambda x: x.movedim(dim, other), True),
            (lambda x: x.movedim(tuple(order), tuple(range(depth))), True),
            (lambda x: x.unbind(dim), True),
            (lambda x: x.split(step, dim), True),
            (lambda x: x.split(lengths, dim), True),
            (lambda x: x.chunk(step, dim), True),
            (lambda x: x.repeat_interleave(step, dim), False),
            (lambda x: x.repeat_interleave(counts.long(), dim), False),
            (lambda x: x.repeat_interleave(2), False),
            (lambda x: x.flip(dim), False),
            (lambda x: x.flip(tuple(order)), False),
            (lambda x: x.roll(shift, dim), False),
            (lambda x: x.roll((shift, 1), (dim, other)), False),
            (lambda x: x.roll(shift), False),
        ]
    return draw(st.sampled_from(found))


@st.composite
def trees_and_operations(draw):
    size = draw(sizes())
    return draw(trees(batch_size=size, names=draw(st.booleans()))), draw(operations(size))


@given(trees_and_operations())
def test_a_shape_method_does_to_every_leaf_what_it_does_to_a_tensor(case):
    td, (op, views) = case
    assert_works_as_on_tensors(op, td, views=views)


@given(trees(ties=False), st.integers(1, 3), st.data())
def test_stack_and_cat_do_to_every_leaf_what_they_do_to_tensors(td, n, data):
    dim = data.draw(st.integers(-td.batch_dims - 1, td.batch_dims))
    others = [td.apply(lambda x, i=i: ~x if x.dtype is torch.bool else x + i) for i in range(1, n)]

    def stack_(*xs):
        return torch.stack(xs, dim)

    assert_works_as_on_tensors(stack_, td, *others, views=False)
    if td.batch_dims:
        along = data.draw(st.integers(-td.batch_dims, td.batch_dims - 1))
        others = [other.repeat_interleave(i, along) for i, other in enumerate(others)]
        assert_works_as_on_tensors(lambda *xs: torch.cat(xs, along), td, *others)


# -- forms of arguments ----------------------------------------------------------------------


@pytest.fixture
def td():
    return TensorDict(
        {"a": torch.arange(24.0).reshape(3, 4, 2), "b": {"c": torch.arange(12).reshape(3, 4)}},
        [3, 4],
    )


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.reshape(2, 6),
        lambda x: x.reshape([2, 6]),
        lambda x: x.reshape(torch.Size([2, -1])),
        lambda x: x.reshape(shape=(2, 6)),
        lambda x: x.view(-1),
        lambda x: x.view((6, 2)),
        lambda x: x.view(size=(6, 2)),
        lambda x: x.expand(2, 3, 4),
        lambda x: x.expand([2, -1, 4]),
        lambda x: x.expand(size=(2, 3, -1)),
        lambda x: x.permute(1, 0),
        lambda x: x.permute([1, 0]),
        lambda x: x.permute(dims=(-1, 0)),
        lambda x: x.flip(0, 1),
        lambda x: x.flip([0]),
        lambda x: x.flip(dims=(1,)),
        lambda x: x.repeat(2, 1),
        lambda x: x.repeat([2, 1]),
        lambda x: x.repeat(repeats=(2, 1, 1)),
        lambda x: x.flatten(start_dim=0, end_dim=1),
        lambda x: x.flatten(1),
        lambda x: x.unflatten(1, (2, 2)),
        lambda x: x.unflatten(-1, [-1]),
        lambda x: x.unsqueeze(dim=0),
        lambda x: x.transpose(dim0=0, dim1=1),
        lambda x: x.movedim(source=0, destination=1),
        lambda x: x.unbind(),
        lambda x: x.unbind(dim=1),
        lambda x: x.split(split_size=2, dim=1),
        lambda x: x.chunk(chunks=2),
        lambda x: x.repeat_interleave(repeats=2, dim=0, output_size=6),
        lambda x: x.repeat_interleave(torch.tensor([2]), 0),
        lambda x: x.roll(shifts=1, dims=0),
        lambda x: x.expand_as(torch.zeros(2, 3, 4)),
    ],
)
def test_arguments_take_the_forms_that_tensors_take(td, op):
    assert_works_as_on_tensors(op, td)


def test_repeat_takes_a_tensor(td):
    assert td.repeat(torch.tensor([2, 1])).batch_size == (6, 4)


def test_ints_by_position_and_by_keyword_are_refused(td):
    with pytest.raises(TypeError, match="got its ints by position and by keyword; give one"):
        td.reshape(12, shape=(12,))
    with pytest.raises(TypeError, match=r"permute\(\) needs ints, or one sequence of ints"):
        td.permute()


def test_a_tree_without_batch_dims_has_shapes_too():
    td = TensorDict({"a": torch.arange(3), "b": torch.tensor(1)})
    for op in (
        lambda x: x.reshape(1, 1),
        lambda x: x.reshape(()),
        lambda x: x.view(()),
        lambda x: x.unsqueeze(0),
        lambda x: x.squeeze(),
        lambda x: x.flatten(),
        lambda x: x.flatten(0, -1),
        lambda x: x.permute(()),
        lambda x: x.expand(2, 3),
        lambda x: x.expand(()),
        lambda x: x.repeat(2),
        lambda x: x.repeat_interleave(2),
        lambda x: x.roll(1),
    ):
        assert_works_as_on_tensors(op, td)
    one = td.unsqueeze(0)
    assert_works_as_on_tensors(lambda x: x.reshape(()), one)
    assert_works_as_on_tensors(lambda x: x.view(()), one)


# -- views, ties, branches, names ------------------------------------------------------------


def test_view_never_copies_and_says_which_leaf_cannot_be_viewed(td):
    assert storage(td.view(12)["a"]) == storage(td["a"])
    td["b", "t"] = torch.zeros(4, 3).T
    with pytest.raises(RuntimeError, match="view size is not compatible") as caught:
        td.view(12)
    assert caught.value.__notes__ == ["at key ('b', 't') of shape (3, 4)"]
    assert td.reshape(12)["b", "t"].shape == (12,)


def test_view_with_a_dtype_reinterprets_the_leaves():
    td = TensorDict({"a": torch.zeros(3, 4)}, [3], names=["n"])
    assert td.view(torch.int32)["a"].dtype is torch.int32
    assert td.view(torch.float64)["a"].shape == (3, 2)
    assert td.view(torch.float64).names == ["n"]
    td["c"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"another size: \['c'\] has no dims behind the batch"):
        td.view(torch.float64)


def test_a_result_is_new_and_unlocked_even_if_nothing_changes(td):
    td.lock_()
    for same in (td.reshape(3, 4), td.view(3, 4), td.squeeze(), td.expand(3, 4), td.contiguous()):
        assert same is not td
        assert not same.is_locked
        assert same.batch_size == td.batch_size


def test_ties_stay_ties():
    leaf = torch.arange(4)
    td = TensorDict({"a": leaf, "b": {"c": leaf}}, [4])
    other = td.clone()
    results = [
        td.reshape(2, 2),
        td.flip(0),
        td.repeat(2),
        *td.unbind(0),
        *td.split(2),
        torch.stack([td, other]),
        torch.cat([td, other]),
    ]
    for result in results:
        assert result["a"] is result["b", "c"]
    other["a"] = torch.arange(4)
    for result in (torch.stack([td, other]), torch.stack([other, td])):
        assert result["a"] is not result["b", "c"]


def test_further_batch_dims_of_a_branch_stay_behind():
    td = TensorDict({"b": TensorDict({"x": torch.zeros(4, 3)}, [4, 3], names=["r", "s"])}, [4])
    td.names = ["r"]
    assert td.reshape(2, 2)["b"].batch_size == (2, 2, 3)
    assert td.unsqueeze(0)["b"].names == [None, "r", "s"]
    assert [part["b"].batch_size for part in td.split(3)] == [(3, 3), (1, 3)]
    assert td.unbind(0)[0]["b"].batch_size == (3,)
    assert td.split(3)[0]["b"].names == ["r", "s"]
    stacked = torch.stack([td, td], 1)
    assert stacked["b"].batch_size == (4, 2, 3)
    assert stacked["b"].names == ["r", None, "s"]


def test_stacked_branches_declare_the_dims_that_all_of_them_declare():
    one = TensorDict({"b": TensorDict({"x": torch.zeros(4, 3)}, [4, 3])}, [4])
    two = TensorDict({"b": TensorDict({"x": torch.zeros(4, 3)}, [4])}, [4])
    for pair in ([one, two], [two, one]):
        assert torch.stack(pair)["b"].batch_size == (2, 4)
        assert torch.cat(pair)["b"].batch_size == (8,)


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (lambda td: td.reshape(12), [None]),
        (lambda td: td.view(4, 3), [None, None]),
        (lambda td: td.flatten(), [None]),
        (lambda td: td.unsqueeze(1).flatten(0, 1), [None, "b"]),
        (lambda td: td.unflatten(1, (2, 2)), ["a", None, "b"]),
        (lambda td: td.expand(5, 3, 4), [None, "a", "b"]),
        (lambda td: td.unsqueeze(0), [None, "a", "b"]),
        (lambda td: td.unsqueeze(-1), ["a", "b", None]),
        (lambda td: td.unsqueeze(1).squeeze(1), ["a", "b"]),
        (lambda td: td[:1].squeeze(), ["b"]),
        (lambda td: td.squeeze(0), ["a", "b"]),
        (lambda td: td.permute(1, 0), ["b", "a"]),
        (lambda td: td.transpose(0, 1), ["b", "a"]),
        (lambda td: td.movedim(0, 1), ["b", "a"]),
        (lambda td: td.unbind(0)[1], ["b"]),
        (lambda td: td.unbind(0)[1].unbind(0)[0], []),
        (lambda td: td.split(2, 1)[1], ["a", "b"]),
        (lambda td: td.repeat(2, 1), ["a", "b"]),
        (lambda td: td.repeat(2, 1, 1), [None, "a", "b"]),
        (lambda td: td.repeat_interleave(2, 0), ["a", "b"]),
        (lambda td: td.flip(0), ["a", "b"]),
        (lambda td: td.roll(1, 0), ["a", "b"]),
        (lambda td: td.roll(1), ["a", "b"]),
        (lambda td: td.contiguous(), ["a", "b"]),
        (lambda td: torch.stack([td, td], 1), ["a", None, "b"]),
        (lambda td: torch.cat([td, td], 1), ["a", "b"]),
        (lambda td: td.expand_as(td.unsqueeze(0)), [None, "a", "b"]),
    ],
)
def test_names_stay_with_their_dims(td, op, names):
    td.names = ["a", "b"]
    assert op(td).names == names
    assert op(td)["b"].names == names


def test_a_name_on_which_trees_do_not_agree_is_dropped(td):
    td.names = ["a", "b"]
    other = td.clone()
    other.names = ["a", "z"]
    assert torch.cat([td, other]).names == ["a", None]
    other.names = None
    assert torch.stack([td, other]).names == [None, None, None]


def test_expand_as_pairs_the_leaves_of_trees(td):
    small = TensorDict({"a": torch.ones(4, 1), "b": {"c": torch.ones(4)}}, [4])
    found = small.expand_as(td)
    assert found.batch_size == (3, 4)
    assert found["b"].batch_size == (3, 4)
    assert found["a"].shape == (3, 4, 2)
    with pytest.raises(MissingKeyError, match="only the second"):
        TensorDict({"a": torch.ones(4, 1)}, [4]).expand_as(td)


def test_contiguous_keeps_what_is_and_copies_what_is_not(td):
    td["t"] = torch.arange(12).reshape(4, 3).T
    assert not td.is_contiguous()
    found = td.contiguous()
    assert found.is_contiguous()
    assert found["a"] is td["a"]
    assert torch.equal(found["t"], td["t"])


def test_iterating_goes_over_the_rows(td):
    rows = list(td)
    assert len(rows) == 3
    assert torch.equal(rows[1], td[1])
    with pytest.raises(TypeError, match="a tree without batch dims has no rows"):
        iter(TensorDict({"a": torch.zeros(3)}))


# -- faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        lambda td: td.flatten(0, 2),
        lambda td: td.flatten(-3),
        lambda td: td.unflatten(2, (2, 2)),
        lambda td: td.unsqueeze(3),
        lambda td: td.unsqueeze(-4),
        lambda td: td.squeeze(2),
        lambda td: td.permute(0, 2),
        lambda td: td.transpose(0, -3),
        lambda td: td.movedim(0, 2),
        lambda td: td.unbind(2),
        lambda td: td.split(1, 2),
        lambda td: td.chunk(1, 2),
        lambda td: td.repeat_interleave(2, 2),
        lambda td: td.flip(2),
        lambda td: td.roll(1, 2),
        lambda td: torch.stack([td, td], 3),
        lambda td: torch.cat([td, td], 2),
    ],
)
def test_a_dim_beyond_the_batch_is_refused_with_the_batch_size(td, op):
    with pytest.raises(IndexError, match=r"dim -?\d is out of range .*batch size \(3, 4\)"):
        op(td)


@pytest.mark.parametrize(
    ("op", "kind", "message"),
    [
        (
            lambda td: td.reshape(5),
            RuntimeError,
            r"cannot reshape batch size \(3, 4\) of 12 elements to \(5,\)",
        ),
        (lambda td: td.reshape(5, -1), RuntimeError, r"cannot reshape .* to \(5, -1\)"),
        (lambda td: td.reshape(-1, -1), RuntimeError, r"cannot reshape .* to \(-1, -1\)"),
        (lambda td: td.reshape(-3, -4), RuntimeError, r"cannot reshape .* to \(-3, -4\)"),
        (lambda td: td[:0].reshape(0, -1), RuntimeError, r"cannot reshape .* 0 elements to"),
        (lambda td: td.view(5), RuntimeError, r"cannot view batch size \(3, 4\)"),
        (lambda td: td.unflatten(0, (2, 2)), RuntimeError, r"cannot unflatten batch size \(3,\)"),
        (lambda td: td.unflatten(0, ()), RuntimeError, r"cannot unflatten batch size \(3,\)"),
        (lambda td: td.flatten(1, 0), RuntimeError, "start_dim 1 is after end_dim 0"),
        (lambda td: td.expand(4), RuntimeError, r"cannot expand batch size \(3, 4\) to \(4,\)"),
        (lambda td: td.expand(2, 4), RuntimeError, r"cannot expand .* to \(2, 4\)"),
        (lambda td: td.expand(-1, 3, 4), RuntimeError, r"cannot expand .* to \(-1, 3, 4\)"),
        (lambda td: td.permute(0), ValueError, r"cannot permute .* to dims \[0\]: each of its 2"),
        (lambda td: td.permute(0, 0), ValueError, r"to dims \[0, 0\]: each of its 2 dims is"),
        (lambda td: td.movedim((0, 0), (0, 1)), ValueError, r"cannot move dims \[0, 0\] to"),
        (lambda td: td.movedim((0, 1), 0), ValueError, r"cannot move dims \[0, 1\] to \[0\]"),
        (lambda td: td.split(0), RuntimeError, r"cannot split dim 0 of .* in steps of 0"),
        (lambda td: td.split([1, 1]), RuntimeError, r"into \[1, 1\]: they must add up to 3"),
        (lambda td: td.split([4, -1]), RuntimeError, r"into \[4, -1\]: they must add up to 3"),
        (lambda td: td.chunk(0), RuntimeError, "cannot cut a batch dim into 0 chunks"),
        (lambda td: td.repeat(2), ValueError, r"cannot repeat batch size \(3, 4\) \(2,\) times"),
        (lambda td: td.repeat(2, -1), ValueError, r"cannot repeat .* \(2, -1\) times"),
        (lambda td: td.roll((1, 2), 0), ValueError, r"cannot roll dims \[0\] by \[1, 2\]"),
        (lambda td: torch.stack([td, td[0]]), RuntimeError, r"\['\(3, 4\)', '\(4,\)'\]"),
        (lambda td: torch.cat([td, td[:, :2]]), RuntimeError, r"\['\(3, 4\)', '\(3, 2\)'\]"),
        (lambda td: stack([]), ValueError, "cannot stack an empty list of trees"),
        (lambda td: cat(()), ValueError, "cannot cat an empty list of trees"),
        (
            lambda td: torch.stack([td, torch.zeros(3, 4)]),
            TypeError,
            "cannot stack Tensor with trees; all must be trees",
        ),
    ],
)
def test_what_does_not_fit_is_refused(td, op, kind, message):
    for tree in (td, td.empty()):  # the tree itself says so, not a leaf of it
        with pytest.raises(kind, match=message):
            op(tree)


def test_stack_lists_every_key_that_trees_do_not_share(td):
    other = TensorDict({"a": td["a"], "b": {"d": td["a"]}, "e": td["a"]}, [3, 4])
    for join in (TensorDict.stack, TensorDict.cat):
        with pytest.raises(
            MissingKeyError,
            match=r"tree 1 lacks \[\('b', 'c'\)\] and adds \[\('b', 'd'\), 'e'\]$",
        ):
            join([td, other, td])
    with pytest.raises(MissingKeyError, match=r"tree 1 lacks .*; tree 2 lacks \['a', 'b', "):
        TensorDict.stack([td, other, td.empty()])


def test_stack_says_what_is_a_branch_and_what_is_a_leaf(td):
    other = TensorDict({"a": td["a"], "b": td["a"]}, [3, 4])
    for pair in ([td, other], [other, td]):
        with pytest.raises(MissingKeyError):
            TensorDict.stack(pair)
    empty = TensorDict({"a": {}}, [3, 4])
    for pair in ([empty, other.select("a")], [other.select("a"), empty]):
        with pytest.raises(MissingKeyError, match=r"\['a'\] is a branch in some trees and a leaf"):
            TensorDict.stack(pair)


def test_stack_lists_every_leaf_whose_shape_differs(td):
    other = TensorDict({"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3, 4, 1)}}, [3, 4])
    with pytest.raises(
        RuntimeError,
        match=r"'a': \['\(3, 4, 2\)', '\(3, 4\)'\]; \('b', 'c'\): \['\(3, 4\)', '\(3, 4, 1\)'\]",
    ):
        TensorDict.stack([td, other])
    with pytest.raises(RuntimeError, match="cannot cat, the shapes do not fit: 'a': "):
        TensorDict.cat([td, other], 1)
    with pytest.raises(RuntimeError, match=r"'a': \['\(\)', '\(2,\)'\]"):
        TensorDict.stack([TensorDict({"a": 1}), TensorDict({"a": torch.zeros(2)})])


# -- out -------------------------------------------------------------------------------------


def test_stack_and_cat_write_into_out(td):
    out = TensorDict.stack([td, td]) * 0
    leaf = out["a"]
    assert TensorDict.stack([td, td], out=out) is out
    assert torch.equal(leaf, torch.stack([td["a"], td["a"]]))
    out = TensorDict.cat([td, td], 1) * 0
    assert TensorDict.cat([td, td], 1, out=out) is out
    assert torch.equal(out["b", "c"], torch.cat([td["b", "c"]] * 2, 1))
    with pytest.raises(RuntimeError, match=r"out has batch size \(3, 8\), the result \(6, 4\)"):
        TensorDict.cat([td, td], out=out)


# -- compiled --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        lambda td: td.reshape(-1, 2),
        lambda td: td.view(12),
        lambda td: td.permute(1, 0).flatten(),
        lambda td: td.unsqueeze(0).expand(2, 3, 4).squeeze(),
        lambda td: td.movedim(0, 1).transpose(0, 1),
        lambda td: td.unbind(1)[0],
        lambda td: td.split(2, 1)[1],
        lambda td: td.chunk(2)[0],
        lambda td: td.flip(0).roll(1, 1),
        lambda td: td.roll(1),
        lambda td: td.repeat(2, 1).repeat_interleave(2, 1),
        lambda td: td.gather(0, torch.zeros(2, 4, dtype=torch.int64)),
        lambda td: torch.stack([td, td + 1], -1),
        lambda td: torch.cat([td, td + 1], -1),
        lambda td: TensorDict.stack([td, td + 1]),
        lambda td: TensorDict.stack(list(td)),
    ],
)
def test_shape_methods_trace(td, op):
    counter = CompileCounter()
    compiled = torch.compile(op, fullgraph=True, backend=counter)
    want = op(td)
    for _ in range(3):
        found = compiled(td.clone())
        assert found.batch_size == want.batch_size
        assert torch.equal(found, want)
    assert counter.frame_count == 1


def test_vmap_over_a_shape_method(td):
    found = torch.vmap(lambda row: row.reshape(2, 2))(td)
    assert torch.equal(found, td.reshape(3, 2, 2))
