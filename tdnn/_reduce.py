"""Reductions: over all elements, over batch dims, or over the dims behind them."""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor

from tdnn._core import TensorDictBase
from tdnn._dims import batch_dim
from tdnn._keys import as_key, listing

__all__ = ["Reduce"]

Dim = int | tuple[int, ...] | Literal["feature"] | None


class Reduce(TensorDictBase):
    """all, any, sum, mean and norm."""

    __slots__ = ()

    def all(self, dim: int | None = None) -> Any:
        """Return whether every element of every leaf is true, as a ``bool``.

        Args:
            dim: a batch dim to reduce instead, counted within the batch dims if negative.

        Returns:
            A ``bool``, or with ``dim`` a new tree of bool without that dim.

        Raises:
            IndexError: ``dim`` is not a batch dim.

        Example:
            >>> td = TensorDict({"x": torch.tensor([[True, False], [True, True]])}, [2, 2])
            >>> td.all(), td.all(dim=1)["x"]
            (False, tensor([False,  True]))
        """
        if dim is None:
            flags = [leaf.all() for leaf in self._values()]
            return _truth(flags, torch.all) if flags else True
        (at,) = self._batch_axes(dim)
        return self._over((at,), lambda leaf: leaf.all(at))

    def any(self, dim: int | None = None) -> Any:
        """Return whether any element of any leaf is true, as a ``bool``.

        Args:
            dim: a batch dim to reduce instead, counted within the batch dims if negative.

        Returns:
            A ``bool``, or with ``dim`` a new tree of bool without that dim.

        Raises:
            IndexError: ``dim`` is not a batch dim.

        Example:
            >>> td = TensorDict({"x": torch.tensor([[False, False], [True, False]])}, [2, 2])
            >>> td.any(), td.any(dim=1)["x"]
            (True, tensor([False,  True]))
        """
        if dim is None:
            flags = [leaf.any() for leaf in self._values()]
            return _truth(flags, torch.any) if flags else False
        (at,) = self._batch_axes(dim)
        return self._over((at,), lambda leaf: leaf.any(at))

    def sum(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool = False,
    ) -> Any:
        """Return the sum of every leaf.

        Args:
            dim: the batch dims to sum over, counted within the batch dims if negative;
                ``"feature"`` for all the dims behind them; None for every element.
            keepdim: keep the summed dims with size 1.
            dtype: cast the leaves to it first.
            reduce: add the sums of all leaves up as well, and return the one tensor: ``()``,
                ``(*B,)`` with ``"feature"``, or what the leaves have left without the batch dims
                ``dim``, which must then be of one shape.

        Returns:
            A new tree without the summed dims (without batch dims if ``dim`` is None), or a
            tensor with ``reduce``.

        Raises:
            IndexError: ``dim`` is not a batch dim.
            ValueError: ``reduce`` of a tree without leaves; ``keepdim`` with ``"feature"`` or
                ``reduce``.

        Example:
            >>> td = TensorDict({"x": torch.ones(2, 3), "y": torch.ones(2)}, [2])
            >>> td.sum()["x"], td.sum(dim=0)["x"], td.sum(reduce=True)
            (tensor(6.), tensor([2., 2., 2.]), tensor(8.))
        """
        return self._reduced(torch.sum, dim, keepdim, dtype, reduce)

    def mean(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool = False,
    ) -> Any:
        """Return the mean of every leaf; the arguments are those of :meth:`sum`.

        With ``reduce`` it is the mean over the elements of all leaves, so that large leaves count
        for more.

        Example:
            >>> td = TensorDict({"x": torch.ones(2, 3), "y": torch.zeros(2)}, [2])
            >>> td.mean()["x"], td.mean(dim="feature")["x"], td.mean(reduce=True)
            (tensor(1.), tensor([1., 1.]), tensor(0.7500))
        """
        return self._reduced(torch.mean, dim, keepdim, dtype, reduce)

    def norm(self, *, dtype: torch.dtype | None = None) -> Self:
        """Return the 2-norm of every leaf over all its elements, in a tree without batch dims.

        Args:
            dtype: cast the leaves to it first; needed for integers.

        Raises:
            RuntimeError: leaves hold integers and there is no ``dtype``; all are listed.

        Example:
            >>> TensorDict({"x": torch.tensor([3.0, 4.0])}).norm()["x"]
            tensor(5.)
        """
        if dtype is None:
            whole = [p for p, x in self._leaves() if not (x.is_floating_point() or x.is_complex())]
            if whole:
                raise RuntimeError(
                    f"a norm is of floating point numbers, and {listing(map(as_key, whole))} holds "
                    "others; give norm(dtype=torch.float32)"
                )
            return self._whole(torch.linalg.vector_norm)
        return self._whole(lambda leaf: torch.linalg.vector_norm(leaf.to(dtype)))

    # -- helpers -------------------------------------------------------------------------------

    def _reduced(
        self,
        fn: Callable[..., Tensor],
        dim: Dim,
        keepdim: bool,
        dtype: torch.dtype | None,
        reduce: bool,
    ) -> Any:
        if keepdim and (reduce or dim == "feature"):
            raise ValueError("keepdim keeps batch dims; it does not go with 'feature' or reduce")
        if reduce:
            return self._of_all(fn, dim, dtype)
        if dim == "feature":
            return self._featured(lambda flat: fn(flat, -1, dtype=dtype))
        if dim is None or dim == ():
            if not keepdim:
                return self._whole(lambda leaf: fn(leaf, dtype=dtype))
            kept = (1,) * len(self._batch_size)
            return self._whole(
                lambda leaf: fn(leaf, tuple(range(leaf.ndim)), keepdim=True, dtype=dtype), kept
            )
        dims = self._batch_axes(dim)
        return self._over(dims, lambda leaf: fn(leaf, dims, keepdim=keepdim, dtype=dtype), keepdim)

    def _over(
        self, dims: tuple[int, ...], fn: Callable[[Tensor], Tensor], keepdim: bool = False
    ) -> Self:
        """Return the tree of ``fn(leaf)``, which takes the batch dims ``dims`` away."""
        size, names = list(self._batch_size), self._names
        if keepdim:
            for dim in dims:
                size[dim] = 1
            return self._rebuild(fn, torch.Size(size), names)
        kept = [at for at in range(len(size)) if at not in dims]
        names = names and (tuple([names[at] for at in kept]) or None)
        return self._rebuild(fn, torch.Size([size[at] for at in kept]), names)

    def _whole(self, fn: Callable[[Tensor], Tensor], size: tuple[int, ...] = ()) -> Self:
        """Return the tree of ``fn(leaf)``, which takes every dim away, in branches too."""
        tree = self._rebuild(fn, torch.Size(size), None)
        tree._declare_everywhere(torch.Size(size), self._names if size else None)
        return tree

    def _featured(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return the tree of ``fn`` on each leaf ``(*B, F)``, its feature dims made one."""
        depth = len(self._batch_size)
        data = {
            key: value._featured(fn) if isinstance(value, Reduce) else fn(_flat(value, depth))
            for key, value in self._data.items()
        }
        return self._like(data, self._batch_size, self._names)

    def _of_all(self, fn: Callable[..., Tensor], dim: Dim, dtype: torch.dtype | None) -> Tensor:
        """Return the sum or mean over the elements of all leaves together."""
        leaves = self._values()
        if not leaves:
            raise ValueError(f"{fn.__name__} with reduce=True needs a leaf; the tree has none")
        if dim is None or dim == "feature":
            start = 0 if dim is None else len(self._batch_size)
            parts = [_flat(leaf, start).sum(-1, dtype=dtype) for leaf in leaves]
        else:
            axes = self._batch_axes(dim)
            parts = [leaf.sum(axes, dtype=dtype) for leaf in leaves]
        total: Tensor = torch.stack(parts).sum(0)
        if fn is torch.sum:
            return total
        count: int = sum([leaf.numel() for leaf in leaves])
        return total / (count / max(total.numel(), 1))

    def _batch_axes(self, dim: int | tuple[int, ...]) -> tuple[int, ...]:
        """Return ``dim`` as a tuple of non-negative batch dims."""
        if isinstance(dim, str):
            raise ValueError(f"dim is a batch dim, several, 'feature', or None, not {dim!r}")
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        axes = tuple([batch_dim(at, self._batch_size) for at in dims])
        if len(set(axes)) < len(axes):
            raise ValueError(f"{dims} names a batch dim twice")
        return axes


def _flat(leaf: Tensor, depth: int) -> Tensor:
    """Return ``leaf`` with the dims from ``depth`` on as one."""
    return leaf.flatten(depth) if leaf.ndim > depth else leaf.unsqueeze(-1)


def _truth(flags: list[Tensor], fn: Callable[[Tensor], Tensor]) -> bool:
    """Return ``fn`` over flags that may stand on several devices, with one wait for the device."""
    return bool(fn(torch.stack([flag.to(flags[0].device) for flag in flags])))
