"""Reading and writing by position: ``td[index]``, ``td[index] = value``, ``gather`` and ``where``.

An index is over the batch dims. It is brought into one form first (an ellipsis becomes the slices
that it stands for, a list becomes a tensor, a mask becomes the positions where it is true), the
batch size of the result is worked out from that, and then every leaf is indexed with the same
object: the work for the index is done once, whatever the number of leaves.
"""

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdnn._core import Names, TensorDictBase
from tdnn._dims import (
    Tree,
    basic_outline,
    batch_dim,
    deliver,
    index_parts,
    is_mask,
    outline,
    row_positions,
    sliced,
    with_rows,
)
from tdnn._keys import NestedKey, Path, as_key, as_path
from tdnn._marks import ABSENT
from tdnn._node import extended
from tdnn._writes import as_before, first_rows, put_at, refuse_meta

__all__ = ["Indexing", "where"]


class Indexing(TensorDictBase):
    """``td[index]``, ``get_at``, ``set_at_``, ``gather`` and ``where``."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        """Return the entry at a key, or the tree indexed over its batch dims.

        Args:
            index: a ``str`` or a tuple of ``str`` is a key. Anything that indexes a tensor of
                shape ``batch_size`` is an index: int, slice, range, list, tensor, array, mask,
                ``...``, None, and tuples of these. An ellipsis stands for batch dims only.

        Returns:
            The entry itself for a key; else a new tree. Its leaves are views where torch gives
            views (int, slice, ``...``, None), else copies. Named dims keep their names.

        Raises:
            MissingKeyError: the key is not there.
            IndexError: too many indices for the batch size, or one out of range.

        Example:
            >>> td = TensorDict({"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3)}}, [3])
            >>> td["b", "c"], td[1]["a"], td[[0, 2]].batch_size
            (tensor([1., 1., 1.]), tensor([2, 3]), torch.Size([2]))
        """
        kind = type(index)
        if kind is str:
            try:
                return self._data[index]
            except KeyError:
                raise self._missing(index, (index,)) from None
        if kind is tuple and index and type(index[0]) is str:
            # Hot (test_nested_getitem): the walk itself, and care only where it fails.
            node: Any = self
            try:
                for step in index:
                    node = node._data[step]
            except (KeyError, TypeError, AttributeError):
                return self._entry(as_path(index))
            return node
        # An int, a slice and tuples of them are spelled out for speed: benchmark test_getitem.
        size, names = self._batch_size, self._names
        if kind is int:
            if size and -size[0] <= index < size[0]:
                names = (names[1:] or None) if names else None
                return self._take(index, size[1:], names)
        elif kind is slice:
            if size:
                size = with_rows(size, sliced(index, size[0]))
                return self._take(index, size, names)
        elif kind is tuple and names is None:
            basic = basic_outline(index, size)
            if basic is not None:
                return self._take(index, basic, None)
        elif kind is list or kind is range:
            rows = row_positions(index, size, self._device)
            if rows is not None:
                size = with_rows(size, len(index))
                return self._rebuild(partial(_pick_rows, rows, rows.device), size, names)
        if _is_key(index):
            return self._entry(as_path(index))
        return self._take(*outline(index_parts(index, self), size, names))

    def _take(self, place: Any, size: torch.Size, names: Names) -> Self:
        """Return the tree of ``leaf[place]``, which has the batch size ``size``."""
        if not is_compiling():
            # Hot (test_getitem): to see afterwards that there are no ties is cheaper than to
            # look for each leaf whether it was there before.
            seen: list[int] = []
            found = _picked(self, place, size, names, seen)
            if len(set(seen)) == len(seen):
                return found
        return self._rebuild(operator.itemgetter(place), size, names)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set the entry at a key, or write into the leaves at an index over the batch dims.

        Args:
            index: as for reading.
            value: for a key, what :meth:`set` takes. For an index: a tree or a mapping with the
                same keys, which is broadcast (its batch dims to the indexed batch dims, its
                further dims to the further dims), or a number or a tensor that is written to
                every leaf, with the broadcasting of ``leaf[index] = value``.

        Raises:
            MissingKeyError: keys of the value are missing or not in the tree; all are listed.
            RuntimeError: shapes do not broadcast; all keys are listed.
            ValueError: a tensor under two names would get two values; all keys are listed.
            IndexError: too many indices for the batch size, or one out of range.

        After an error nothing was written. An index may be written on a locked tree, because
        the tensors stay.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3)}}, [3])
            >>> td[0] = 7
            >>> td[1:] = {"a": torch.ones(2), "b": {"c": 2.0}}
            >>> td["a"], td["b", "c"]
            (tensor([7., 1., 1.]), tensor([7., 2., 2.]))
        """
        kind = type(index)
        if kind is str and type(value) is Tensor and self._lock is None and self._device is None:
            # Hot (test_setitem): what `set` does for a tensor that fits, without the call.
            size = self._batch_size
            if not size or value.shape[: len(size)] == size:
                self._data[index] = value
                return
        if kind is str or (kind is not int and kind is not slice and _is_key(index)):
            self.set(index, value)
            return
        if isinstance(value, TensorDictBase):
            self._write_tree(index, value)
        elif isinstance(value, Mapping):
            source = self._like({}, torch.Size(()))._convert(value, "the value")
            self._write_tree(index, cast(TensorDictBase, source))
        else:
            self._write_value(index, _as_value(value))

    def _write_value(self, index: Any, value: Any) -> None:
        """Write a number or a tensor to every leaf."""
        leaves = self._writable()
        place, size = self._place(index)
        if isinstance(value, Tensor):
            if value.ndim and size is not None:
                self._fit_all(size, leaves, [value] * len(leaves), 0)
        else:
            kinds = {leaf.dtype for leaf in leaves}
            if len(kinds) > 1:  # one that cannot hold the number must speak before the first write
                for dtype in kinds:
                    torch.empty((), dtype=dtype).fill_(value)
        for leaf in leaves:
            put_at(leaf, place, value)

    def _write_tree(self, index: Any, source: TensorDictBase) -> None:
        """Write each leaf of ``source`` to the leaf of the same name."""
        leaves: list[Tensor] = []
        values: list[Tensor] = []
        if not _pair(self, source, leaves, values):
            names = ("the tree", "the value")
            raise self._unpaired(source, names, "cannot write at the index, nothing was written")
        # Hot (test_setitem_dim): most leaves are such that nothing can be wrong with them.
        eager = not is_compiling()
        for leaf in leaves:
            if leaf.requires_grad or not leaf.is_contiguous() or (eager and leaf.is_inference()):
                self._writable()
                break
        if any([value.is_meta for value in values]):
            keys = [as_key(path) for path, _ in self._leaves()]
            refuse_meta(zip(leaves, values, keys, strict=True))
        values = as_before(leaves, values)
        above = len(source._batch_size)
        place, size = self._place(index)
        fitted = values if size is None else self._fit_all(size, leaves, values, above)
        if len(set(leaves)) < len(leaves):
            leaves, fitted = self._once_each(leaves, values, fitted)
        for leaf, value in zip(leaves, fitted, strict=True):
            put_at(leaf, place, value)

    def _place(self, index: Any) -> tuple[Any, torch.Size | None]:
        """Return what to write leaves at, and the batch size that it has, None if unknown.

        Raises:
            IndexError: a position is out of range.
        """
        size = self._batch_size
        basic = basic_outline(index if type(index) is tuple else (index,), size)
        if basic is not None:
            return index, basic
        if type(index) is list or type(index) is range:
            rows = row_positions(index, size, self._device)
            if rows is not None:
                return (rows,), with_rows(size, len(index))
        parts = index_parts(index, self)
        if is_compiling():
            if any([is_mask(part) for part in parts]):
                return tuple(parts), None  # a shape error that torch raises finds nothing written
        else:
            # Torch finds a position that is out of range when it has written others; on CUDA even
            # later, so that a look costs a wait for all that runs there.
            places = [part for part in parts if isinstance(part, Tensor) and not is_mask(part)]
            if places and all([part.is_cpu for part in places]):
                torch.empty(()).expand(size)[tuple(parts)]
        return outline(parts, size, None)[:2]

    def _once_each(
        self, leaves: list[Tensor], values: list[Tensor], fitted: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return each tensor among the leaves once, and what to write to it.

        ``fitted`` are the values as they are written; two of them may stand for one value.
        """
        seen: dict[tuple[Tensor, Tensor], Tensor] = {}
        rows = zip(leaves, values, fitted, strict=True)
        fitted = [seen.setdefault((leaf, value), fit) for leaf, value, fit in rows]
        first = first_rows(leaves, [fitted], lambda at: as_key(self._leaves()[at][0]))
        return [leaves[at] for at in first], [fitted[at] for at in first]

    def _fit_all(
        self, size: torch.Size, leaves: Sequence[Tensor], values: list[Tensor], above: int
    ) -> list[Tensor]:
        """Return the values such that torch broadcasts them to the leaves, with ``size`` in place
        of the batch size, or say which do not.

        ``above`` is the number of the values' batch dims.
        """
        depth = len(self._batch_size)
        # Hot (test_setitem_dim): most values fit as they are, and as the ones before did.
        before = None
        fits: tuple[int, ...] = size
        for leaf, value in zip(leaves, values, strict=True):
            if leaf.shape != before:
                before = leaf.shape
                fits = size if len(before) == depth else size + before[depth:]
            if value.shape != fits:
                break
        else:
            return values
        shapes = [(*size, *leaf.shape[depth:]) for leaf in leaves]
        fitted: list[Tensor] = []
        faults = []
        for at, (shape, leaf, value) in enumerate(zip(shapes, leaves, values, strict=True)):
            if value.shape == shape:
                fitted.append(value)
                continue
            fit = _fit(value, shape, leaf.ndim - depth, above)
            if fit is None:
                key = as_key(self._leaves()[at][0])
                faults.append(f"{key!r}: {tuple(value.shape)} into {tuple(shape)}")
            else:
                fitted.append(fit)
        if faults:
            raise RuntimeError(
                f"cannot write at the index, shapes do not broadcast: {'; '.join(faults)}; "
                "nothing was written"
            )
        return fitted

    def get_at(self, key: NestedKey, index: Any, default: Any = None) -> Any:
        """Return the entry at ``key``, indexed.

        Args:
            key: a ``str``, or a tuple for a nested entry.
            index: what the entry itself takes; for a leaf also beyond the batch dims.
            default: returned for a missing key.

        Returns:
            ``td[key][index]``: a view where torch gives a view, else a copy.

        Example:
            >>> td = TensorDict({"a": torch.arange(3)}, [3])
            >>> td.get_at("a", 1), td.get_at("zzz", 1)
            (tensor(1), None)
        """
        entry = self.get(key, ABSENT)
        return default if entry is ABSENT else entry[index]

    def set_at_(
        self, key: NestedKey, value: Any, index: Any, *, non_blocking: bool = False
    ) -> Self:
        """Write into the entry at ``key`` at an index, in place, and return the tree.

        Args:
            key: a ``str``, or a tuple for a nested entry.
            value: what ``td[key][index] = value`` takes, or an array.
            index: what the entry itself takes; for a leaf also beyond the batch dims.
            non_blocking: for a copy between devices.

        Raises:
            MissingKeyError: the key is not there.
            RuntimeError: the value does not broadcast to the indexed entry.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3], lock=True)
            >>> td.set_at_("a", 1, slice(1, None))["a"]
            tensor([0., 1., 1.])
        """
        entry: Any = self._target(as_path(key))
        if not isinstance(entry, TensorDictBase):
            value = _as_value(value)
            if isinstance(value, Tensor):
                value = value.to(entry, non_blocking=non_blocking)
        entry[index] = value
        return self

    def gather(self, dim: int, index: Tensor, out: TensorDictBase | None = None) -> Self:
        """Pick elements along a batch dim, as :func:`torch.gather`.

        Args:
            dim: a batch dim.
            index: int64, with as many dims as the batch; in the other dims not larger than it.
            out: a tree whose tensors take the result.

        Returns:
            Batch ``index.shape``, further dims as before; copies. ``out``, if it was given.

        Raises:
            IndexError: ``dim`` is not a batch dim.
            RuntimeError: the shape of ``index`` does not fit the batch size.

        Example:
            >>> td = TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3])
            >>> td.gather(1, torch.tensor([[2], [0]]))["a"]
            tensor([[2],
                    [3]])
        """
        size = self._batch_size
        dim = batch_dim(dim, size)
        fits = index.ndim == len(size) and all(
            n <= size[at] for at, n in enumerate(index.shape) if at != dim
        )
        if not fits:
            raise RuntimeError(
                f"cannot gather along dim {dim} of batch size {tuple(size)} with an index of "
                f"shape {tuple(index.shape)}: it needs {len(size)} dims, none larger but dim {dim}"
            )

        def pick(leaf: Tensor) -> Tensor:
            further = leaf.shape[len(size) :]
            wide = index.reshape(*index.shape, *[1] * len(further))
            return leaf.gather(dim, wide.expand(*index.shape, *further))

        return deliver(self._rebuild(pick, index.shape, self._names), out)

    def where(
        self,
        condition: Tensor | TensorDictBase,
        other: Any,
        *,
        out: TensorDictBase | None = None,
    ) -> Self:
        """Return this tree where ``condition`` is true and ``other`` elsewhere.

        Args:
            condition: bool; a tensor aligned with the *first* batch dims, as a mask is (and
                unlike the broadcasting of :func:`torch.where`), or a tree with the same keys.
            other: a tree with the same keys, a number, or a tensor that is broadcast to each leaf.
            out: a tree whose tensors take the result.

        Returns:
            A new tree; copies. ``out``, if it was given.

        Raises:
            MissingKeyError: the trees' keys differ.
            RuntimeError: the condition does not fit the batch size.

        Example:
            >>> td = TensorDict({"a": torch.ones(2, 3)}, [2])
            >>> td.where(torch.tensor([True, False]), 0)["a"]
            tensor([[1., 1., 1.],
                    [0., 0., 0.]])
        """
        return deliver(_where(self, condition, self, other), out)


def _picked(node: Tree, place: Any, size: torch.Size, names: Names, seen: list[int]) -> Tree:
    """Return a new tree of ``leaf[place]``, and the leaves' ids in ``seen``."""
    data: dict[str, Any] = {}
    for key, value in node._data.items():
        if type(value) is Tensor or not isinstance(value, TensorDictBase):
            seen.append(id(value))
            data[key] = value[place]
        elif len(value._batch_size) == len(node._batch_size):
            data[key] = _picked(value, place, size, names, seen)
        else:
            depth = len(node._batch_size)
            further = torch.Size((*size, *value._batch_size[depth:]))
            called = extended(names, len(size), value, depth)
            data[key] = _picked(value, place, further, called, seen)
    return node._like(data, size, names)


def _pick_rows(rows: Tensor, device: torch.device, leaf: Any) -> Any:
    """Return the rows of a leaf at positions that are not negative."""
    # Faster than an index (test_getitem[list]), but not for positions on another device.
    return leaf.index_select(0, rows) if leaf.device == device else leaf[rows]


# -- keys and values -------------------------------------------------------------------------


def _is_key(index: Any) -> bool:
    """Return whether an index is meant as a key: its first part, however deep, is a ``str``."""
    while isinstance(index, tuple) and index:
        index = index[0]
    return isinstance(index, str)


def _as_value(value: Any) -> Any:
    """Return what is to be written to leaves as a number or a tensor."""
    if isinstance(value, bool | int | float | complex | Tensor):
        return value
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        return torch.as_tensor(value)
    raise TypeError(
        f"cannot write {type(value).__name__} at an index; write a number, a tensor, "
        "or a tree or mapping with the same keys"
    )


def _pair(
    mine: TensorDictBase, theirs: TensorDictBase, leaves: list[Tensor], values: list[Tensor]
) -> bool:
    """Collect the leaves and the values for them; return whether all keys have a partner."""
    mine._refuse_lost_write()
    given = theirs._data
    if len(given) != len(mine._data):
        return False
    for key, leaf in mine._data.items():
        value = given.get(key)
        # Hot (test_setitem_dim): the exact types before the isinstance calls.
        if type(leaf) is not Tensor or type(value) is not Tensor:
            if isinstance(leaf, TensorDictBase):
                if not isinstance(value, TensorDictBase) or not _pair(leaf, value, leaves, values):
                    return False
                continue
            if value is None or isinstance(value, TensorDictBase):
                return False
        leaves.append(leaf)
        values.append(value)
    return True


def _fit(value: Tensor, shape: tuple[int, ...], further: int, above: int) -> Tensor | None:
    """Return a value such that torch broadcasts it to ``shape``, or None if that cannot be.

    ``further`` is the number of dims of ``shape`` that are not batch dims, ``above`` the number
    of batch dims of the value.
    """
    gap = further - (value.ndim - above)
    if above and gap > 0:
        # Else the last batch dim of the value would meet a further dim of the leaf.
        value = value.reshape(*value.shape[:above], *[1] * gap, *value.shape[above:])
    more = max(value.ndim - len(shape), 0)
    if any(n != 1 for n in value.shape[:more]):
        return None
    last = value.shape[more:]
    target = shape[len(shape) - len(last) :]
    if any(n not in (1, m) for n, m in zip(last, target, strict=True)):
        return None
    return value.reshape(last) if more else value


# -- choosing --------------------------------------------------------------------------------


def where(condition: Any, input: Any, other: Any) -> TensorDictBase:
    """Choose between two values by a condition, where at least one of the three is a tree.

    Args:
        condition: bool; a tensor aligned with the first batch dims, or a tree.
        input: what to take where it is true: a tree, a number or a tensor.
        other: what to take elsewhere: a tree, a number or a tensor.

    Returns:
        A tree of copies, with the batch size of the first tree among ``input``, ``other`` and
        ``condition``.

    Raises:
        MissingKeyError: the trees' keys differ.
        RuntimeError: the condition does not fit the batch size.

    Example:
        >>> td = TensorDict({"a": torch.arange(4)}, [4])
        >>> torch.where(torch.tensor([True, False, True, False]), -1, td)["a"]
        tensor([-1,  1, -1,  3])
    """
    base = next(v for v in (input, other, condition) if isinstance(v, TensorDictBase))
    return _where(base, condition, input, other)


def _where(base: Tree, condition: Any, input: Any, other: Any) -> Tree:
    size = base._batch_size
    if not isinstance(condition, Tensor | TensorDictBase):
        raise TypeError(f"a condition is a bool tensor or a tree, not {type(condition).__name__}")
    if isinstance(condition, Tensor) and not _begins(condition.shape, size):
        raise RuntimeError(
            f"a condition of shape {tuple(condition.shape)} does not fit the first dims of batch "
            f"size {tuple(size)}"
        )
    return _choose(base, (), (condition, input, other))


def _begins(shape: torch.Size, size: torch.Size) -> bool:
    return len(shape) <= len(size) and all(n in (1, m) for n, m in zip(shape, size, strict=False))


def _choose(base: Tree, above: Path, values: Sequence[Any]) -> Tree:
    """Return :func:`where` of ``values``: trees are read by key, the rest serves every leaf."""
    data: dict[str, Any] = {}
    trees = [value for value in values if isinstance(value, TensorDictBase)]
    for tree in trees:
        if tree._data.keys() != base._data.keys():
            raise base._unpaired(tree)
    for key, model in base._data.items():
        deeper = isinstance(model, TensorDictBase)
        for tree in trees:
            if isinstance(tree._data[key], TensorDictBase) is not deeper:
                raise base._unpaired(tree)
        below = [v._data[key] if isinstance(v, TensorDictBase) else v for v in values]
        if deeper:
            data[key] = _choose(model, (*above, key), below)
            continue
        condition, input, other = below
        if condition is values[0]:
            condition = condition.reshape(*condition.shape, *[1] * (model.ndim - condition.ndim))
        try:
            data[key] = chosen = torch.where(condition, input, other)
        except RuntimeError as err:
            err.add_note(f"key {as_key((*above, key))!r}")
            raise
        if chosen.shape[: len(base._batch_size)] != base._batch_size:
            raise RuntimeError(
                f"key {as_key((*above, key))!r}: shape {tuple(chosen.shape)} does not begin with "
                f"the batch size {tuple(base._batch_size)}"
            )
    return base._like(data, base._batch_size, base._names)
