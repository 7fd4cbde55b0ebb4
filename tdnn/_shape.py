"""Other batch dims over the same values: the shape methods of ``Tensor``, for a whole tree.

Each works out the new batch size once and then calls ``Tensor``'s own method on every leaf, so
that the result is a view exactly where torch gives one. Dims are batch dims: negative ones count
from the last batch dim, and the further dims of the leaves are never touched.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from tdnn._core import TensorDictBase
from tdnn._dims import batch_dim
from tdnn._keys import as_key, listing

__all__ = ["Shape"]


class Shape(TensorDictBase):
    """``reshape`` and ``view``, ``expand``, ``permute``, ``repeat``, and their kin."""

    __slots__ = ()

    # -- a new shape -------------------------------------------------------------------------

    def reshape(self, *args: int | Sequence[int], shape: Sequence[int] | None = None) -> Self:
        """Give the batch another shape.

        Args:
            *args: the new batch size, as ints or as one sequence; one of them may be -1.
            shape: the same, by keyword.

        Returns:
            Leaves ``(*shape, F)``: a view where the memory layout allows it, else a copy. Names
            are dropped.

        Raises:
            RuntimeError: ``shape`` does not have as many elements as the batch.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3]).reshape(-1)["a"].shape
            torch.Size([6, 5])
        """
        size = _solved(_ints(args, shape, "reshape"), self._batch_size, "reshape")
        depth = len(self._batch_size)
        if size:
            # Stars: an argument tuple is much cheaper for torch to parse than a torch.Size.
            return self._rebuild(lambda x: x.reshape(*size, *x.shape[depth:]), size, None)
        return self._rebuild(lambda x: x.reshape(x.shape[depth:]), size, None)

    def view(
        self, *shape: int | Sequence[int] | torch.dtype, size: Sequence[int] | None = None
    ) -> Self:
        """Give the batch another shape without copying, or view the leaves as another dtype.

        Args:
            *shape: the new batch size, as ints or as one sequence; one of them may be -1. Or a
                dtype.
            size: the new batch size, by keyword.

        Returns:
            Leaves ``(*shape, F)``, always views. Names are dropped with a new shape.

        Raises:
            RuntimeError: ``shape`` does not have as many elements as the batch, or the memory
                layout of a leaf does not allow a view (a note names the key): use ``reshape``.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3])
            >>> td.view(3, 2)["a"].shape, td.view(torch.int32)["a"].dtype
            (torch.Size([3, 2, 5]), torch.int32)
        """
        depth = len(self._batch_size)
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self._view_as(shape[0])
        new = _solved(_ints(shape, size, "view"), self._batch_size, "view")

        def look(leaf: Tensor) -> Tensor:
            return leaf.view(*new, *leaf.shape[depth:]) if new else leaf.view(leaf.shape[depth:])

        try:
            return self._rebuild(look, new, None)
        except RuntimeError as err:
            self._note_culprit(look, err)
            raise

    def _view_as(self, dtype: torch.dtype) -> Self:
        """Return views of another dtype; the batch dims must not change with the element size."""
        depth = len(self._batch_size)
        wide = dtype.itemsize
        bare = [
            as_key(path)
            for path, leaf in self._leaves()
            if leaf.ndim == depth and leaf.dtype.itemsize != wide
        ]
        if bare:
            raise RuntimeError(
                f"cannot view as {dtype}, whose elements have another size: {listing(bare)} has "
                "no dims behind the batch dims that could change"
            )
        return self._rebuild(lambda x: x.view(dtype), self._batch_size, self._names)

    def _note_culprit(self, fn: Callable[[Any], Any], err: Exception) -> None:
        """Add the key of the first leaf for which ``fn`` fails to an error."""
        for path, leaf in self._leaves():
            try:
                fn(leaf)
            except RuntimeError:
                err.add_note(f"at key {as_key(path)!r} of shape {tuple(leaf.shape)}")
                return

    def flatten(self, start_dim: int | None = None, end_dim: int | None = None) -> Self:
        """Merge neighbouring batch dims into one.

        Args:
            start_dim: the first of them; by default the first batch dim.
            end_dim: the last of them; by default the last batch dim.

        Returns:
            A view where the memory layout allows it, else a copy; batch ``(1,)`` for a tree
            without batch dims. The merged dim has no name.

        Raises:
            IndexError: a dim is not a batch dim.
            RuntimeError: ``start_dim`` comes after ``end_dim``.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3]).flatten()["a"].shape
            torch.Size([6, 5])
        """
        size, names = self._batch_size, self._names
        reach = size or torch.Size((1,))  # torch also lets a tensor without dims have one here
        start = batch_dim(0 if start_dim is None else start_dim, reach)
        end = batch_dim(-1 if end_dim is None else end_dim, reach)
        if start > end:
            raise RuntimeError(
                f"cannot flatten batch size {tuple(size)}: start_dim {start} is after end_dim {end}"
            )
        if not size:
            return self.unsqueeze(0)
        new = torch.Size((*size[:start], size[start : end + 1].numel(), *size[end + 1 :]))
        names = names and (*names[:start], None, *names[end + 1 :])
        return self._rebuild(lambda x: x.flatten(start, end), new, names)

    def unflatten(self, dim: int, unflattened_size: Sequence[int]) -> Self:
        """Split one batch dim into several.

        Args:
            dim: a batch dim.
            unflattened_size: what it is split into; one of them may be -1.

        Returns:
            Views. The last new dim keeps the name.

        Raises:
            IndexError: ``dim`` is not a batch dim.
            RuntimeError: the sizes do not multiply to that of ``dim``.

        Example:
            >>> TensorDict({"a": torch.zeros(6, 5)}, [6]).unflatten(0, (2, -1))["a"].shape
            torch.Size([2, 3, 5])
        """
        size, names = self._batch_size, self._names
        dim = batch_dim(dim, size)
        parts = _solved(tuple(unflattened_size) or (-2,), size[dim : dim + 1], "unflatten")
        new = torch.Size((*size[:dim], *parts, *size[dim + 1 :]))
        if names:
            names = (*names[:dim], *[None] * (len(parts) - 1), *names[dim:])
        return self._rebuild(lambda x: x.unflatten(dim, parts), new, names)

    def expand(self, *args: int | Sequence[int], size: Sequence[int] | None = None) -> Self:
        """Expand batch dims of size 1, and add dims in front, without copying.

        Args:
            *args: the new batch size, as ints or as one sequence; -1 keeps a size.
            size: the same, by keyword.

        Returns:
            Views: one element in memory may be many of the result, so clone before writing.
            New dims have no name.

        Raises:
            RuntimeError: fewer dims than the batch has, or another size for a dim that is not 1.

        Example:
            >>> TensorDict({"a": torch.zeros(1, 5)}, [1]).expand(4, 3)["a"].shape
            torch.Size([4, 3, 5])
        """
        old, names = self._batch_size, self._names
        depth = len(old)
        shape = _ints(args, size, "expand")
        more = len(shape) - depth
        new = torch.Size(
            [old[at - more] if n == -1 and at >= more else n for at, n in enumerate(shape)]
        )
        fits = more >= 0 and all(
            n >= 0 if at < more else old[at - more] in (1, n) for at, n in enumerate(new)
        )
        if not fits:
            raise RuntimeError(f"cannot expand batch size {tuple(old)} to {tuple(shape)}")
        names = names and (*[None] * more, *names)
        if not new:
            return self._rebuild(lambda x: x.expand(x.shape), new, names)
        return self._rebuild(lambda x: x.expand(*new, *x.shape[depth:]), new, names)

    def expand_as(self, other: TensorDictBase | Tensor) -> Self:
        """Expand to the shape of a tensor, or each leaf to its partner in a tree.

        Args:
            other: a tensor, whose shape is the new batch size; or a tree with the same keys.

        Returns:
            Views, with the batch size of ``other``.

        Raises:
            RuntimeError: the shapes do not fit.
            MissingKeyError: the trees' keys differ.

        Example:
            >>> TensorDict({"a": torch.zeros(3)}, [3]).expand_as(torch.zeros(2, 3)).batch_size
            torch.Size([2, 3])
        """
        if isinstance(other, Tensor):
            return self.expand(other.shape)
        pairs = self._zip(lambda mine, theirs: mine.expand_as(theirs), other)
        _take_batch(pairs, other)
        return pairs

    # -- dims of size 1, and the order of dims ------------------------------------------------

    def unsqueeze(self, dim: int) -> Self:
        """Insert a batch dim of size 1.

        Args:
            dim: where it goes, from 0 to the number of batch dims; negative from the end.

        Returns:
            Views. The new dim has no name.

        Raises:
            IndexError: ``dim`` is out of range.

        Example:
            >>> TensorDict({"a": torch.zeros(3, 5)}, [3]).unsqueeze(-1)["a"].shape
            torch.Size([3, 1, 5])
        """
        size, names = self._batch_size, self._names
        depth = len(size)
        if not -depth - 1 <= dim <= depth:
            raise IndexError(f"dim {dim} is out of range to unsqueeze batch size {tuple(size)}")
        at = dim % (depth + 1)
        new = torch.Size((*size[:at], 1, *size[at:]))
        names = names and (*names[:at], None, *names[at:])
        return self._rebuild(lambda x: x.unsqueeze(at), new, names)

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Self:
        """Remove batch dims of size 1.

        Args:
            dim: the dim or dims to remove; those of another size stay. By default all.

        Returns:
            Views.

        Raises:
            IndexError: ``dim`` is not a batch dim.

        Example:
            >>> TensorDict({"a": torch.zeros(1, 3, 1)}, [1, 3]).squeeze()["a"].shape
            torch.Size([3, 1])
        """
        size, names = self._batch_size, self._names
        asked = range(len(size)) if dim is None else [batch_dim(d, size) for d in _listed(dim)]
        gone = tuple([d for d in asked if size[d] == 1])
        new = torch.Size([n for d, n in enumerate(size) if d not in gone])
        kept = [name for d, name in enumerate(names or ()) if d not in gone]
        names = tuple(kept) or None
        return self._rebuild(lambda x: x.squeeze(gone), new, names)

    def permute(self, *args: int | Sequence[int], dims: Sequence[int] | None = None) -> Self:
        """Put the batch dims in another order.

        Args:
            *args: every batch dim once, as ints or as one sequence.
            dims: the same, by keyword.

        Returns:
            Views.

        Raises:
            IndexError: a dim is not a batch dim.
            ValueError: a dim is there twice, or not at all.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3]).permute(1, 0)["a"].shape
            torch.Size([3, 2, 5])
        """
        size, names = self._batch_size, self._names
        depth = len(size)
        order = [batch_dim(d, size) for d in _ints(args, dims, "permute")]
        if sorted(order) != list(range(depth)):
            raise ValueError(
                f"cannot permute batch size {tuple(size)} to dims {order}: each of its {depth} "
                "dims is needed once"
            )
        new = torch.Size([size[d] for d in order])
        names = names and tuple([names[d] for d in order])
        if not order:
            return self._rebuild(lambda x: x.permute(tuple(range(x.ndim))), new, names)
        return self._rebuild(lambda x: x.permute(*order, *range(depth, x.ndim)), new, names)

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Swap two batch dims.

        Args:
            dim0: a batch dim, counted from the last one if negative.
            dim1: another one.

        Returns:
            Views.

        Raises:
            IndexError: a dim is not a batch dim.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3]).transpose(0, -1)["a"].shape
            torch.Size([3, 2, 5])
        """
        a, b = batch_dim(dim0, self._batch_size), batch_dim(dim1, self._batch_size)
        size, names = list(self._batch_size), list(self._names or ())
        size[a], size[b] = size[b], size[a]
        if names:
            names[a], names[b] = names[b], names[a]
        return self._rebuild(lambda x: x.transpose(a, b), torch.Size(size), tuple(names) or None)

    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Self:
        """Move batch dims to other places; the rest keep their order.

        Args:
            source: the dim or dims to move.
            destination: where each of them goes.

        Returns:
            Views.

        Raises:
            IndexError: a dim is not a batch dim.
            ValueError: a dim is there twice, or the numbers of dims differ.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3, 4]).movedim(0, -1).batch_size
            torch.Size([3, 4, 2])
        """
        size = self._batch_size
        came = [batch_dim(d, size) for d in _listed(source)]
        goes = [batch_dim(d, size) for d in _listed(destination)]
        if len(came) != len(goes) or len(set(came)) < len(came) or len(set(goes)) < len(goes):
            raise ValueError(
                f"cannot move dims {came} to {goes}: as many of each, and none of them twice"
            )
        stay = iter([d for d in range(len(size)) if d not in came])
        back = dict(zip(goes, came, strict=True))
        return self.permute([back[d] if d in back else next(stay) for d in range(len(size))])

    # -- copies ------------------------------------------------------------------------------

    def repeat(
        self, *args: int | Sequence[int] | Tensor, repeats: Sequence[int] | None = None
    ) -> Self:
        """Repeat the whole batch along its dims, as :func:`numpy.tile`.

        Args:
            *args: how often for each batch dim, as ints or as one sequence; more of them than
                batch dims add dims in front.
            repeats: the same, by keyword.

        Returns:
            Copies.

        Raises:
            ValueError: fewer numbers than batch dims, or a negative one.

        Example:
            >>> TensorDict({"a": torch.arange(2)}, [2]).repeat(2)["a"]
            tensor([0, 1, 0, 1])
        """
        size, names = self._batch_size, self._names
        if len(args) == 1 and isinstance(args[0], Tensor):
            args = (args[0].tolist(),)
        times = _ints(args, repeats, "repeat")
        more = len(times) - len(size)
        if more < 0 or any(n < 0 for n in times):
            raise ValueError(
                f"cannot repeat batch size {tuple(size)} {tuple(times)} times: one number, at "
                "least 0, for each batch dim"
            )
        depth = len(size)
        new = torch.Size([n * m for n, m in zip(times, (*[1] * more, *size), strict=True)])
        names = names and (*[None] * more, *names)
        return self._rebuild(lambda x: x.repeat((*times, *[1] * (x.ndim - depth))), new, names)

    def repeat_interleave(
        self, repeats: int | Tensor, dim: int | None = None, *, output_size: int | None = None
    ) -> Self:
        """Repeat each element next to itself, as :func:`numpy.repeat`.

        Args:
            repeats: how often; a tensor gives a number for each position along ``dim``.
            dim: a batch dim; by default the batch is flattened first.
            output_size: the sum of ``repeats``, if known: saves a wait for the device.

        Returns:
            Copies.

        Raises:
            IndexError: ``dim`` is not a batch dim.

        Example:
            >>> TensorDict({"a": torch.arange(2)}, [2]).repeat_interleave(2, 0)["a"]
            tensor([0, 0, 1, 1])
        """
        if dim is None:
            return self.flatten().repeat_interleave(repeats, 0, output_size=output_size)
        size = self._batch_size
        at = batch_dim(dim, size)
        if output_size is not None:
            total = output_size
        elif isinstance(repeats, Tensor) and repeats.numel() != 1:
            total = int(repeats.sum())
        else:
            total = size[at] * int(repeats)
        new = torch.Size((*size[:at], total, *size[at + 1 :]))
        return self._rebuild(
            lambda x: x.repeat_interleave(repeats, at, output_size=total), new, self._names
        )

    def flip(self, *args: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Self:
        """Reverse the order along batch dims.

        Args:
            *args: the dims, as ints or as one sequence.
            dims: the same, by keyword.

        Returns:
            Copies.

        Raises:
            IndexError: a dim is not a batch dim.

        Example:
            >>> TensorDict({"a": torch.arange(3)}, [3]).flip(0)["a"]
            tensor([2, 1, 0])
        """
        asked = _ints(args, None if dims is None else _listed(dims), "flip")
        at = [batch_dim(d, self._batch_size) for d in asked]
        return self._rebuild(lambda x: x.flip(at), self._batch_size, self._names)

    def roll(self, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Self:
        """Shift along batch dims; what leaves at the end comes back at the beginning.

        Args:
            shifts: by how many places, for each of ``dims``.
            dims: the batch dims; by default the flattened batch is shifted.

        Returns:
            Copies.

        Raises:
            IndexError: a dim is not a batch dim.
            ValueError: as many shifts as dims are needed.

        Example:
            >>> TensorDict({"a": torch.arange(3)}, [3]).roll(1, 0)["a"]
            tensor([2, 0, 1])
        """
        size = self._batch_size
        if dims is None:
            last = len(size) - 1
            if last < 0:
                return self._rebuild(lambda x: x.clone(), size, None)
            return self._rebuild(
                lambda x: x.flatten(0, last).roll(shifts, 0).reshape(x.shape), size, self._names
            )
        by, at = list(_listed(shifts)), [batch_dim(d, size) for d in _listed(dims)]
        if len(by) != len(at):
            raise ValueError(f"cannot roll dims {at} by {by}: one shift for each dim is needed")
        return self._rebuild(lambda x: x.roll(by, at), size, self._names)

    def is_contiguous(self) -> bool:
        """Return whether every leaf is contiguous.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3).T}, [3]).is_contiguous()
            False
        """
        return all(leaf.is_contiguous() for _, leaf in self._leaves())

    def contiguous(self) -> Self:
        """Return contiguous leaves.

        Returns:
            A new tree of the same tensors; those that are not contiguous are copied.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3).T}, [3]).contiguous().is_contiguous()
            True
        """
        return self._rebuild(lambda x: x.contiguous(), self._batch_size, self._names)


# -- arguments -------------------------------------------------------------------------------


def _ints(args: Any, keyword: Any, action: str) -> tuple[int, ...]:
    """Return the ints of ``f(2, 3)``, ``f((2, 3))`` or ``f(shape=(2, 3))``."""
    if keyword is not None:
        if args:
            raise TypeError(f"{action}() got its ints by position and by keyword; give one")
        args = keyword
    elif not args:
        raise TypeError(f"{action}() needs ints, or one sequence of ints")
    elif len(args) == 1 and isinstance(args[0], list | tuple | range):
        args = args[0]
    return tuple(args)


def _listed(dims: int | Sequence[int]) -> Sequence[int]:
    return dims if isinstance(dims, Sequence) else (dims,)


def _take_batch(node: TensorDictBase, other: TensorDictBase) -> None:
    """Give a new tree the batch sizes and names of another with the same branches."""
    node._batch_size, node._names = other._batch_size, other._names
    for key, value in node._data.items():
        if isinstance(value, TensorDictBase):
            _take_batch(value, other._data[key])


def _solved(shape: tuple[int, ...], old: Sequence[int], action: str) -> torch.Size:
    """Return a wanted batch size with -1 worked out, after checking its number of elements."""
    total = prod(old)
    if -1 in shape:
        known = prod([n for n in shape if n != -1])
        if shape.count(-1) == 1 and known > 0 and total % known == 0:
            return torch.Size([total // known if n == -1 else n for n in shape])
    elif prod(shape) == total and min(shape, default=0) >= 0:
        return torch.Size(shape)
    raise RuntimeError(
        f"cannot {action} batch size {tuple(old)} of {total} elements to {tuple(shape)}"
    )
