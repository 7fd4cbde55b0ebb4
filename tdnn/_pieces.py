"""Many trees into one (``stack``, ``cat``) and one into many (``unbind``, ``split``, ``chunk``)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdnn._core import Names, TensorDictBase
from tdnn._declared import common_start
from tdnn._dims import Tree, batch_dim, deliver
from tdnn._keys import NestedKey, Path, as_key, listing
from tdnn._node import extended
from tdnn.errors import MissingKeyError

__all__ = ["Pieces", "cat", "stack"]


def stack(input: Sequence[Tree], dim: int = 0, *, out: Tree | None = None) -> Tree:
    """Stack trees with the same keys and shapes along a new batch dim.

    Args:
        input: ``n`` trees, at least one, each of batch size ``(*B,)``.
        dim: where the new dim goes among the batch dims; negative from the end.
        out: a tree whose tensors take the result.

    Returns:
        A tree of copies with ``n`` in its batch size at ``dim``. Keys whose tensors are the same
        in every one of the trees share a tensor in the result too. ``out``, if it was given.

    Raises:
        ValueError: ``input`` is empty.
        MissingKeyError: the keys differ; all differences are listed.
        RuntimeError: batch sizes or the shapes of leaves differ; all keys are listed.
        IndexError: ``dim`` is out of range.

    Example:
        >>> tds = [TensorDict({"a": torch.full((3,), i)}, [3]) for i in range(2)]
        >>> TensorDict.stack(tds, 1)["a"]
        tensor([[0, 1],
                [0, 1],
                [0, 1]])
    """
    nodes = _checked(input, "stack")
    size = nodes[0]._batch_size
    if any(node._batch_size != size for node in nodes):
        raise _uneven(nodes, "stack trees of different batch sizes")
    depth = len(size)
    if not -depth - 1 <= dim <= depth:
        raise IndexError(f"dim {dim} is out of range to stack trees of batch size {tuple(size)}")
    dim = dim % (depth + 1)
    names = _agreed(nodes)
    names = (*names[:dim], None, *names[dim:]) if names else None
    result = _joined(
        nodes,
        lambda column: torch.stack(column, dim),
        torch.Size((*size[:dim], len(nodes), *size[dim:])),
        names,
        "stack",
    )
    return deliver(result, out)


def cat(input: Sequence[Tree], dim: int = 0, *, out: Tree | None = None) -> Tree:
    """Concatenate trees with the same keys along a batch dim that they have.

    Args:
        input: trees, at least one, whose batch sizes and leaves are equal except along ``dim``.
        dim: a batch dim; negative from the end.
        out: a tree whose tensors take the result.

    Returns:
        A tree of copies. Keys whose tensors are the same in every one of the trees share a tensor
        in the result too. ``out``, if it was given.

    Raises:
        ValueError: ``input`` is empty.
        MissingKeyError: the keys differ; all differences are listed.
        RuntimeError: batch sizes or the shapes of leaves do not fit; all keys are listed.
        IndexError: ``dim`` is not a batch dim.

    Example:
        >>> tds = [TensorDict({"a": torch.full((n,), n)}, [n]) for n in (1, 2)]
        >>> TensorDict.cat(tds)["a"]
        tensor([1, 2, 2])
    """
    nodes = _checked(input, "cat")
    size = nodes[0]._batch_size
    dim = batch_dim(dim, size)
    ends = size[:dim], size[dim + 1 :]
    if any((n._batch_size[:dim], n._batch_size[dim + 1 :]) != ends for n in nodes):
        raise _uneven(nodes, f"cat along dim {dim} trees of batch sizes")
    total = sum(node._batch_size[dim] for node in nodes)
    result = _joined(
        nodes,
        lambda column: torch.cat(column, dim),
        torch.Size((*ends[0], total, *ends[1])),
        _agreed(nodes),
        "cat",
    )
    return deliver(result, out)


def _checked(input: Sequence[Tree], action: str) -> list[Tree]:
    nodes = list(input)
    if not nodes:
        raise ValueError(f"cannot {action} an empty list of trees")
    for node in nodes:
        if not isinstance(node, TensorDictBase):
            raise TypeError(f"cannot {action} {type(node).__name__} with trees; all must be trees")
    return nodes


def _uneven(nodes: Sequence[TensorDictBase], what: str) -> RuntimeError:
    sizes = [tuple(node._batch_size) for node in nodes]
    return RuntimeError(f"cannot {what}: {listing([str(size) for size in sizes])}")


def _agreed(nodes: Sequence[TensorDictBase]) -> Names:
    """Return the names that all nodes give their dims, None for a dim where they differ."""
    names = nodes[0]._names
    if names is None or all(node._names == names for node in nodes):
        return names
    columns = zip(*[node._names or (None,) * len(names) for node in nodes], strict=True)
    return tuple([column[0] if len(set(column)) == 1 else None for column in columns])


# -- the walk --------------------------------------------------------------------------------


def _joined(
    nodes: list[Tree],
    join: Callable[[list[Tensor]], Tensor],
    size: torch.Size,
    names: Names,
    action: str,
) -> Tree:
    """Return the tree of joined leaves; what went wrong is looked for only when something did."""
    try:
        joined: Tree = _walk(nodes, join, size, names, {})
    except (KeyError, AttributeError, TypeError, RuntimeError):
        _explain(nodes, action)
        raise
    return joined


def _walk(
    nodes: list[Any],
    join: Callable[[list[Tensor]], Tensor],
    size: torch.Size,
    names: Names,
    memo: dict[Tensor, list[tuple[list[Tensor], Tensor]]],
) -> Any:
    first = nodes[0]
    depth = len(first._batch_size)
    width = len(first._data)
    for node in nodes:
        if len(node._data) != width:
            raise KeyError("the numbers of keys differ")
    data: dict[str, Any] = {}
    for key, value in first._data.items():
        column = [node._data[key] for node in nodes]
        if isinstance(value, TensorDictBase):
            further, called = _beyond(column, depth)
            inner = (*(names or (None,) * len(size)), *called) if names or any(called) else None
            data[key] = _walk(column, join, torch.Size((*size, *further)), inner, memo)
        else:
            data[key] = _once(join, column, memo)
    return first._like(data, size, names)


def _once(
    join: Callable[[list[Tensor]], Tensor],
    column: list[Tensor],
    memo: dict[Tensor, list[tuple[list[Tensor], Tensor]]],
) -> Tensor:
    """Join a column of leaves, or return what came out when the same leaves came before."""
    # By the tensors themselves, not their ids, which would recompile a compiled caller each time.
    ties = memo.setdefault(column[0], [])
    for others, done in ties:
        if all(a is b for a, b in zip(column, others, strict=True)):
            return done
    done = join(column)
    ties.append((column, done))
    return done


def _beyond(column: list[TensorDictBase], depth: int) -> tuple[Sequence[int], tuple[Any, ...]]:
    """Return the batch dims after ``depth`` that all branches have, and their names."""
    further = common_start([branch._batch_size[depth:] for branch in column])
    names = column[0]._names
    end = depth + len(further)
    return further, (None,) * len(further) if names is None else names[depth:end]


# -- what went wrong -------------------------------------------------------------------------


def _explain(nodes: Sequence[TensorDictBase], action: str) -> None:
    """Raise the error that lists the differences between the trees, if there are any."""
    tables = [_table(node, ()) for node in nodes]
    first = tables[0]
    faults = []
    for at, table in enumerate(tables):
        lacks = [as_key(path) for path in first if path not in table]
        adds = [as_key(path) for path in table if path not in first]
        found = [f"lacks {listing(lacks)}"] * bool(lacks) + [f"adds {listing(adds)}"] * bool(adds)
        if found:
            faults.append(f"tree {at} {' and '.join(found)}")
    if faults:
        raise MissingKeyError(
            f"cannot {action}, the keys differ from those of tree 0: {'; '.join(faults)}"
        )
    kinds: list[NestedKey] = []
    shapes = []
    for path in first:
        column = [table[path] for table in tables]
        branches = [shape is None for shape in column]
        if any(branches) and not all(branches):
            kinds.append(as_key(path))
        elif len(set(column)) > 1:
            found = [str(tuple(shape)) for shape in column if shape is not None]
            shapes.append(f"{as_key(path)!r}: {listing(found)}")
    if kinds:
        raise MissingKeyError(
            f"cannot {action}: {listing(kinds)} is a branch in some trees and a leaf in others"
        )
    if shapes:
        raise RuntimeError(f"cannot {action}, the shapes do not fit: {'; '.join(shapes)}")


def _table(node: TensorDictBase, prefix: Path) -> dict[Path, torch.Size | None]:
    """Return the shape at every path, None for a branch."""
    found: dict[Path, torch.Size | None] = {}
    for key, value in node._data.items():
        path = (*prefix, key)
        if isinstance(value, TensorDictBase):
            found[path] = None
            found.update(_table(value, path))
        else:
            found[path] = value.shape
    return found


# -- the methods -----------------------------------------------------------------------------


class Pieces(TensorDictBase):
    """``stack`` and ``cat``; ``unbind``, ``split``, ``chunk``, and iteration over the rows."""

    __slots__ = ()

    stack = staticmethod(stack)
    cat = staticmethod(cat)

    def __iter__(self) -> Iterator[Self]:
        if not self._batch_size:
            raise TypeError(
                "a tree without batch dims has no rows; go over its td.keys(), or over all leaves "
                "by td.values(True, True)"
            )
        return iter(self.unbind(0))

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return a tree for each position along a batch dim, which is removed.

        Args:
            dim: the batch dim, counted from the last one if negative.

        Returns:
            Trees of views.

        Raises:
            IndexError: ``dim`` is not a batch dim.

        Example:
            >>> [row["a"].item() for row in TensorDict({"a": torch.arange(3)}, [3]).unbind(0)]
            [0, 1, 2]
        """
        size, names = self._batch_size, self._names
        dim = batch_dim(dim, size)
        left = torch.Size((*size[:dim], *size[dim + 1 :]))
        names = names and ((*names[:dim], *names[dim + 1 :]) or None)
        return tuple(self._fan(lambda x: x.unbind(dim), [left] * size[dim], names, {}))

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Cut a batch dim into pieces.

        Args:
            split_size: the length of each piece (the last may be shorter), or a list of lengths
                that add up to the size of ``dim``.
            dim: a batch dim.

        Returns:
            Trees of views.

        Raises:
            IndexError: ``dim`` is not a batch dim.
            RuntimeError: a length is negative or 0, or the lengths do not add up.

        Example:
            >>> [piece["a"] for piece in TensorDict({"a": torch.arange(3)}, [3]).split(2)]
            [tensor([0, 1]), tensor([2])]
        """
        size = self._batch_size
        dim = batch_dim(dim, size)
        n = size[dim]
        if isinstance(split_size, int):
            if split_size < 0 or (split_size == 0 and n):
                raise RuntimeError(
                    f"cannot split dim {dim} of batch size {tuple(size)} in steps of {split_size}"
                )
            step = split_size or 1
            full = max(-(-n // step) - 1, 0)
            lengths = [step] * full + [n - step * full]
        else:
            lengths = [int(length) for length in split_size]
            if sum(lengths) != n or any(length < 0 for length in lengths):
                raise RuntimeError(
                    f"cannot split dim {dim} of batch size {tuple(size)} into {lengths}: "
                    f"they must add up to {n}"
                )
        sizes = [torch.Size((*size[:dim], length, *size[dim + 1 :])) for length in lengths]
        return tuple(self._fan(lambda x: x.split_with_sizes(lengths, dim), sizes, self._names, {}))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """Cut a batch dim into at most ``chunks`` pieces of one length (the last may be shorter).

        Args:
            chunks: at least 1.
            dim: the batch dim, counted from the last one if negative.

        Returns:
            Trees of views.

        Raises:
            IndexError: ``dim`` is not a batch dim.
            RuntimeError: ``chunks`` is less than 1.

        Example:
            >>> [piece["a"] for piece in TensorDict({"a": torch.arange(3)}, [3]).chunk(2)]
            [tensor([0, 1]), tensor([2])]
        """
        n = self._batch_size[batch_dim(dim, self._batch_size)]
        if chunks < 1:
            raise RuntimeError(f"cannot cut a batch dim into {chunks} chunks")
        return self.split(-(-n // chunks) if n else [0] * chunks, dim)

    def _fan(
        self,
        fn: Callable[[Any], Sequence[Any]],
        sizes: list[torch.Size],
        names: Names,
        memo: dict[Any, Any],
    ) -> list[Self]:
        """Return a tree for each of ``sizes``, of the pieces that ``fn`` cuts a leaf into."""
        depth = len(self._batch_size)
        # Hot (test_unbind_speed): filling the dicts key by key is quicker than row by row.
        rows: list[dict[str, Any]] = [{} for _ in sizes]
        pieces: Sequence[Any]
        for key, value in self._data.items():
            if isinstance(value, Pieces):
                further = value._batch_size[depth:]
                inner = [torch.Size((*size, *further)) for size in sizes] if further else sizes
                called = extended(names, len(sizes[0]) if sizes else 0, value, depth)
                pieces = value._fan(fn, inner, called, memo)
            elif value in memo:
                pieces = memo[value]
            else:
                pieces = memo[value] = fn(value)
            for row, piece in zip(rows, pieces, strict=True):
                row[key] = piece
        return [self._like(row, size, names) for row, size in zip(rows, sizes, strict=True)]
