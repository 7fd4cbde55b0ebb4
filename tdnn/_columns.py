"""What stands on the other side of a pointwise operation, and how it meets the leaves.

An operation works on *columns*: the leaves of the tree in one list, and beside it one list for
each operand, or a number for all. A tree is paired by name, at every level, whatever its order. A
tensor stands for a tree whose leaves are all that tensor, without feature dims. Batch dims
broadcast with batch dims, and feature dims with feature dims, as if one ``vmap`` for every batch
dim ran over the plain operation.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from tdnn._core import TensorDictBase
from tdnn._dims import Tree

__all__ = [
    "PLAIN",
    "Column",
    "Tree",
    "broadcast",
    "columns_of",
    "completed",
    "is_number",
    "operand",
]

Column = Any  # a list of tensors, one for each leaf, or a number for all of them

PLAIN = frozenset({Tensor, Parameter})
_NUMBERS = (int, float, complex, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_OPERANDS = (TensorDictBase, Tensor, *_NUMBERS)


# -- operands --------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a Python number, or a symbol for one."""
    return isinstance(value, _NUMBERS)


def operand(tree: TensorDictBase, value: Any) -> Any:
    """Return ``value`` as a tree, a tensor or a number, or ``NotImplemented`` for other things.

    A mapping stands for a tree with the batch sizes of ``tree``, an array for a tensor.
    """
    if isinstance(value, _OPERANDS):
        return value
    if isinstance(value, Mapping):
        return _as_tree(tree, value)
    return torch.as_tensor(value) if hasattr(value, "__array__") else NotImplemented


def _require_operand(tree: TensorDictBase, value: Any) -> Any:
    given = operand(tree, value)
    if given is NotImplemented:
        raise TypeError(
            "the other operand is a tree, a mapping, a tensor or a number, "
            f"not {type(value).__name__}"
        )
    return given


def _as_tree(node: TensorDictBase, given: Mapping[Any, Any]) -> TensorDictBase:
    data: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            mine = node._data.get(key)
            data[key] = _as_tree(mine if isinstance(mine, TensorDictBase) else node, value)
        else:
            data[key] = value if isinstance(value, TensorDictBase) else torch.as_tensor(value)
    return node._like(data, node._batch_size)


def completed(first: Tree, second: Any, default: Any) -> tuple[Tree, Any]:
    """Return both operands with the same keys, as ``default`` says.

    Args:
        first: a tree.
        second: a tree; an operand of another kind is returned as it is.
        default: ``"intersection"`` drops the keys that only one has; a tensor or a number stands
            for what is missing on either side.

    Raises:
        ValueError: ``default`` is another ``str``.
    """
    if isinstance(default, str) and default != "intersection":
        raise ValueError(f"default is 'intersection', a tensor or a number, not {default!r}")
    second = _require_operand(first, second)
    if not isinstance(second, TensorDictBase):
        return first, second
    here: dict[str, Any] = {}
    there: dict[str, Any] = {}
    for key in {**first._data, **second._data}:
        mine, theirs = first._data.get(key), second._data.get(key)
        if mine is None or theirs is None:
            if isinstance(default, str):
                continue
            mine = _filler(theirs, default) if mine is None else mine
            theirs = _filler(mine, default) if theirs is None else theirs
        elif isinstance(mine, TensorDictBase):
            mine, theirs = completed(mine, theirs, default)
        here[key], there[key] = mine, theirs
    names = first._names
    return first._like(here, first._batch_size, names), second._like(there, second._batch_size)


def _filler(value: Any, default: Any) -> Any:
    """Return ``default``, in the place of every leaf if ``value`` is a branch."""
    filler = torch.as_tensor(default)
    if isinstance(value, TensorDictBase):
        return value._rebuild(lambda _: filler, value._batch_size, value._names)
    return filler


# -- columns ---------------------------------------------------------------------------------


def columns_of(
    tree: TensorDictBase, others: tuple[Any, ...], must_match: Callable[[Any], Any]
) -> tuple[list[Column], list[torch.Size] | None]:
    """Return the columns, and the batch size of each node unless all stay as they are.

    Args:
        tree: its leaves are the first column.
        others: the operands as the user gave them.
        must_match: takes a leaf; columns for which it gives different values are aligned.

    Raises:
        MissingKeyError: a tree among ``others`` has different keys.
        TypeError: one of ``others`` is no operand.
        ValueError: the batch sizes do not broadcast.
    """
    leaves = tree._values()
    columns: list[Column] = [leaves]
    mine: list[Any] | None = None
    as_is = True
    others = tuple([_require_operand(tree, other) for other in others])
    for other in others:
        if isinstance(other, TensorDictBase):
            found: list[Any] = []
            as_is = _gather(tree, tree, other, other, found) and as_is
            if mine is None:
                mine = [must_match(x) for x in leaves]
            as_is = as_is and [must_match(x) for x in found] == mine
            columns.append(found)
        elif isinstance(other, Tensor):
            as_is = as_is and (not other.ndim or other.shape == tree._batch_size)
            columns.append(_spread(other, leaves) if as_is else [other] * len(leaves))
        else:
            columns.append(other)
    return (columns, None) if as_is else _aligned(tree, others)


def _spread(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return ``value``, which has the batch size or no dims, as it meets each of the leaves."""
    depth = value.ndim
    if not depth:
        return [value] * len(leaves)
    widths = [leaf.ndim - depth for leaf in leaves]
    made = {width: value.reshape((*value.shape, *[1] * width)) for width in set(widths)}
    return [made[width] for width in widths]


def _gather(
    node: TensorDictBase,
    tree: TensorDictBase,
    match: TensorDictBase,
    other: TensorDictBase,
    found: list[Any],
) -> bool:
    """Add the leaves of ``match`` in the order of ``node``; return whether batch sizes agree.

    ``tree`` and ``other`` are the roots, for the error.
    """
    theirs = match._data
    if node._data.keys() != theirs.keys():
        raise tree._unpaired(other)
    as_is = node._batch_size == match._batch_size
    for key, value in node._data.items():
        twin = theirs[key]
        inner = type(value) not in PLAIN and isinstance(value, TensorDictBase)
        if inner is not (type(twin) not in PLAIN and isinstance(twin, TensorDictBase)):
            raise tree._unpaired(other)
        if inner:
            as_is = _gather(value, tree, twin, other, found) and as_is
        else:
            found.append(twin)
    return as_is


def broadcast(*shapes: tuple[int, ...]) -> torch.Size:
    """Return the shape that tensors of these shapes broadcast to."""
    return cast(torch.Size, torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # torch


# -- alignment: only where batch sizes or numbers of dims differ -----------------------------


def _aligned(
    tree: TensorDictBase, others: tuple[Any, ...]
) -> tuple[list[Column], list[torch.Size]]:
    """Return columns whose batch dims stand above each other, and the batch sizes of the nodes."""
    sources = [tree, *others]
    sizes = [tuple(s.shape) for s in sources if isinstance(s, Tensor | TensorDictBase)]
    try:
        size = broadcast(*sizes)
    except RuntimeError:
        raise ValueError(
            f"batch sizes do not broadcast: {', '.join(map(str, sizes))}; "
            "a tensor is aligned with the batch dims of the tree, not with the dims of its leaves"
        ) from None
    depths = [len(s.shape) if isinstance(s, Tensor | TensorDictBase) else 0 for s in sources]
    aligned = _Aligned(depths)
    aligned.descend(sources, depths, size)
    columns = zip(*aligned.rows, strict=True) if aligned.rows else [()] * len(sources)
    kept = [
        list(column) if isinstance(source, Tensor | TensorDictBase) else source
        for source, column in zip(sources, columns, strict=True)
    ]
    return kept, aligned.sizes


class _Aligned:
    """The rows of an operation, each operand with its feature dims moved to the right place."""

    def __init__(self, depths: list[int]) -> None:
        self.depths = depths  # the number of batch dims of each operand's root
        self.rows: list[list[Any]] = []
        self.sizes: list[torch.Size] = []
        self._padded: dict[Tensor, dict[tuple[int, int], Tensor]] = {}

    def descend(self, sources: list[Any], starts: list[int], size: torch.Size) -> None:
        """Add the rows below a node; ``starts`` says where each operand's features begin."""
        self.sizes.append(size)
        for key, value in sources[0]._data.items():
            row = [s._data[key] if isinstance(s, TensorDictBase) else s for s in sources]
            if not isinstance(value, TensorDictBase):
                self.rows.append(self._row(row, starts))
                continue
            trees = [isinstance(source, TensorDictBase) for source in row]
            further = {
                tuple(source._batch_size[start:])
                for source, start, inner in zip(row, starts, trees, strict=True)
                if inner
            }
            # Batch dims that only some of the trees declare are feature dims of the result.
            more = further.pop() if len(further) == 1 else ()
            below = [start + len(more) * inner for start, inner in zip(starts, trees, strict=True)]
            self.descend(row, below, torch.Size((*size, *more)))

    def _row(self, row: list[Any], starts: list[int]) -> list[Any]:
        widths = [
            x.ndim - depth if isinstance(x, Tensor) else 0
            for x, depth in zip(row, self.depths, strict=True)
        ]
        widest = max(widths)
        return [
            self._pad(x, start, widest - width) if isinstance(x, Tensor) and x.ndim else x
            for x, start, width in zip(row, starts, widths, strict=True)
        ]

    def _pad(self, x: Tensor, at: int, by: int) -> Tensor:
        """Return ``x`` with ``by`` dims of size 1 put in at ``at``; the same object each time."""
        if not by:
            return x
        known = self._padded.setdefault(x, {})
        if (at, by) not in known:
            known[at, by] = x.reshape((*x.shape[:at], *[1] * by, *x.shape[at:]))
        return known[at, by]
