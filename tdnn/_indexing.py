"""Reading and writing by position: ``td[index]``, ``td[index] = value``, ``gather`` and ``where``.

An index is over the batch dims. It is brought into one form first (an ellipsis becomes the slices
that it stands for, a list becomes a tensor, a mask becomes the positions where it is true), the
batch size of the result is worked out from that, and then every leaf is indexed with the same
object: the work for the index is done once, whatever the number of leaves.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdnn._core import TensorDictBase
from tdnn._dims import Part, Tree, batch_dim, deliver, index_parts, is_mask, outline, sliced
from tdnn._keys import NestedKey, Path, as_key, as_path, listing
from tdnn.errors import MissingKeyError

__all__ = ["Indexing", "where"]

_ABSENT: Any = object()


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
        # An int and a slice are spelled out for speed: benchmark test_getitem.
        size, names = self._batch_size, self._names
        if kind is int:
            if size and -size[0] <= index < size[0]:
                names = (names[1:] or None) if names else None
                return self._rebuild(operator.itemgetter(index), size[1:], names)
        elif kind is slice:
            if size:
                size = torch.Size((sliced(index, size[0]), *size[1:]))
                return self._rebuild(operator.itemgetter(index), size, names)
        elif _is_key(index):
            return self._entry(as_path(index))
        place, size, names = outline(index_parts(index, self), size, names)
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
        if type(index) is str or _is_key(index):
            self.set(index, value)
            return
        parts = index_parts(index, self)
        if isinstance(value, Mapping):
            source = self._like({}, torch.Size(()))
            source._fill(value, False)
            self._write_tree(parts, source)
        elif isinstance(value, TensorDictBase):
            self._write_tree(parts, value)
        else:
            self._write_value(parts, _as_value(value))

    def _write_value(self, parts: list[Part], value: Any) -> None:
        """Write a number or a tensor to every leaf."""
        leaves = [leaf for _, leaf in self._leaves()]
        place = tuple(parts)
        if isinstance(value, Tensor):
            if value.ndim:
                _check_all(self, parts, [(path, leaf, value) for path, leaf in self._leaves()])
        else:
            kinds = {leaf.dtype for leaf in leaves}
            if len(kinds) > 1:  # one that cannot hold the number must speak before the first write
                for dtype in kinds:
                    torch.empty((), dtype=dtype).fill_(value)
        for leaf in leaves:
            leaf[place] = value

    def _write_tree(self, parts: list[Part], source: TensorDictBase) -> None:
        """Write each leaf of ``source`` to the leaf of the same name."""
        pairs: list[tuple[Path, Tensor, Tensor]] = []
        wrong: tuple[list[NestedKey], ...] = ([], [], [])
        _pair(self, source, (), pairs, wrong)
        if any(wrong):
            lacks, extra, mixed = [listing(keys) for keys in wrong]
            raise MissingKeyError(
                f"cannot write at the index: the value lacks {lacks}, the tree lacks {extra}, "
                f"and {mixed} is a branch on one side only; nothing was written"
            )
        depth, above = len(self._batch_size), len(source._batch_size)
        ready = []
        for path, leaf, value in pairs:
            gap = (leaf.ndim - depth) - (value.ndim - above)
            if above and gap > 0:
                # Else the last batch dim of the value would meet a further dim of the leaf.
                value = value.reshape(*value.shape[:above], *[1] * gap, *value.shape[above:])
            if value.dtype is not leaf.dtype or value.device != leaf.device:
                value = value.to(leaf)
            ready.append((path, leaf, value))
        place = _check_all(self, parts, ready)
        for _, leaf, value in ready:
            leaf[place] = value

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
        entry = self.get(key, _ABSENT)
        return default if entry is _ABSENT else entry[index]

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
        entry: Any = self._entry(as_path(key))
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
    mine: TensorDictBase,
    theirs: TensorDictBase,
    prefix: Path,
    pairs: list[tuple[Path, Tensor, Tensor]],
    wrong: tuple[list[NestedKey], ...],
) -> None:
    """Collect the pairs of leaves, and the keys that one side lacks or that differ in kind."""
    lacks, extra, mixed = wrong
    given = theirs._data
    for key, leaf in mine._data.items():
        path = (*prefix, key)
        if key not in given:
            lacks.append(as_key(path))
            continue
        value = given[key]
        if isinstance(leaf, TensorDictBase) is not isinstance(value, TensorDictBase):
            mixed.append(as_key(path))
        elif isinstance(leaf, TensorDictBase):
            _pair(leaf, value, path, pairs, wrong)
        else:
            pairs.append((path, leaf, value))
    extra += [as_key((*prefix, key)) for key in given if key not in mine._data]


def _check_all(
    node: TensorDictBase, parts: list[Part], triples: Sequence[tuple[Path, Tensor, Tensor]]
) -> tuple[Part, ...]:
    """Return what to index the leaves with, after checking that every value can be written."""
    if torch.compiler.is_compiling() and any(is_mask(part) for part in parts):
        # How many positions a mask has is not known while tracing. Nothing runs then, so that
        # a shape error which torch raises finds nothing written.
        return tuple(parts)
    place, size, _ = outline(parts, node._batch_size, None)
    depth = len(node._batch_size)
    faults = []
    for path, leaf, value in triples:
        target = (*size, *leaf.shape[depth:])
        if value.shape != target and not _broadcasts(value.shape, target):
            faults.append(f"{as_key(path)!r}: {tuple(value.shape)} into {target}")
    if faults:
        raise RuntimeError(
            f"cannot write at the index, shapes do not broadcast: {'; '.join(faults)}; "
            "nothing was written"
        )
    return place


def _broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    """Return whether a value can be written into ``target``; leading 1s do not count."""
    more = len(shape) - len(target)
    if more > 0 and any(n != 1 for n in shape[:more]):
        return False
    last = shape[max(more, 0) :]
    return all(n in (1, m) for n, m in zip(last, target[len(target) - len(last) :], strict=True))


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
    if isinstance(condition, Tensor) and not _begins(condition.shape, size):
        raise RuntimeError(
            f"a condition of shape {tuple(condition.shape)} does not fit the first dims of batch "
            f"size {tuple(size)}"
        )
    return _choose(base, condition, input, other)


def _begins(shape: torch.Size, size: torch.Size) -> bool:
    return len(shape) <= len(size) and all(n in (1, m) for n, m in zip(shape, size, strict=False))


def _choose(base: Tree, *values: Any) -> Tree:
    """Return :func:`where` of ``values``: trees are read by key, the rest serves every leaf."""
    data: dict[str, Any] = {}
    trees = [value for value in values if isinstance(value, TensorDictBase)]
    for tree in trees:
        if tree._data.keys() != base._data.keys():
            raise base._unpaired(tree)
    for key, model in base._data.items():
        deeper = isinstance(model, TensorDictBase)
        if any(isinstance(tree._data[key], TensorDictBase) is not deeper for tree in trees):
            raise MissingKeyError(f"{key!r} is a branch in one tree and a leaf in another")
        below = [v._data[key] if isinstance(v, TensorDictBase) else v for v in values]
        if deeper:
            data[key] = _choose(model, *below)
            continue
        condition, input, other = below
        if condition is values[0]:
            condition = condition.reshape(*condition.shape, *[1] * (model.ndim - condition.ndim))
        data[key] = chosen = torch.where(condition, input, other)
        if chosen.shape[: len(base._batch_size)] != base._batch_size:
            raise RuntimeError(
                f"key {key!r}: shape {tuple(chosen.shape)} does not begin with the batch size "
                f"{tuple(base._batch_size)}"
            )
    return base._like(data, base._batch_size, base._names)
