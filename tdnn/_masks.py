"""A mask over the batch: filling and selecting where it is true."""

from typing import Any, Self, cast

from torch import Tensor

from tdnn._combine import combine, combine_
from tdnn._core import TensorDictBase, locked
from tdnn._dims import is_mask

__all__ = ["Masks"]


class Masks(TensorDictBase):
    """masked_fill, masked_fill_ and masked_select."""

    __slots__ = ()

    def masked_fill(self, mask: Tensor, value: float | bool | Tensor) -> Self:
        """Return a tree with ``value`` where ``mask`` is true, and this one's values elsewhere.

        Args:
            mask: bool; its dims are the first batch dims.
            value: a number, or a tensor without dims.

        Returns:
            A new unlocked tree of copies.

        Raises:
            IndexError: the mask does not fit the batch size.
            RuntimeError: a leaf cannot hold the value.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2, 3)}, [2])
            >>> td.masked_fill(torch.tensor([True, False]), 1)["a"]
            tensor([[1., 1., 1.],
                    [0., 0., 0.]])
        """
        return combine(self, Tensor.masked_fill, _over_batch(mask, self), value)

    def masked_fill_(self, mask: Tensor, value: float | bool | Tensor) -> Self:
        """Write ``value`` where ``mask`` is true, in place, and return the tree.

        The arguments are those of :meth:`masked_fill`.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2, 3)}, [2], lock=True)
            >>> td.masked_fill_(torch.tensor([True, False]), 1)["a"][0]
            tensor([1., 1., 1.])
        """
        return combine_(self, Tensor.masked_fill_, _over_batch(mask, self), value)

    def masked_select(self, mask: Tensor, *, inplace: bool = False) -> Self:
        """Return the elements of the batch where ``mask`` is true: ``td[mask]``.

        Args:
            mask: bool; its dims are the first batch dims.
            inplace: hold the selected elements in this tree instead, and return it.

        Returns:
            Batch ``(n, ...)`` with ``n`` true values in the mask, and the batch dims behind those
            of the mask; copies.

        Raises:
            IndexError: the mask does not fit the batch size.
            LockedError: the tree is locked and ``inplace`` is true.

        Example:
            >>> td = TensorDict({"a": torch.arange(3)}, [3])
            >>> td.masked_select(torch.tensor([True, False, True]))["a"]
            tensor([0, 2])
        """
        _over_batch(mask, self)
        found = cast(Self, cast(Any, self)[mask])
        if not inplace:
            return found
        if self._lock is not None or self._locked_branches():
            raise locked("select in place")
        _become(self, found)
        return self


def _over_batch(mask: Tensor, tree: TensorDictBase) -> Tensor:
    """Return a mask with the batch size of a tree, as a view."""
    if not is_mask(mask):
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"a mask is a bool tensor, not {given}")
    size = tree._batch_size
    if mask.shape != size[: mask.ndim]:
        raise IndexError(
            f"a mask of shape {tuple(mask.shape)} does not fit batch size {tuple(size)}"
        )
    return mask.bool().reshape((*mask.shape, *[1] * (len(size) - mask.ndim))).expand(size)


def _become(node: TensorDictBase, other: TensorDictBase) -> None:
    """Let a node and its branches hold what those of another tree of the same keys hold."""
    for key, value in other._data.items():
        if isinstance(value, TensorDictBase):
            _become(cast(TensorDictBase, node._data[key]), value)
        else:
            node._put(key, value)
    node._batch_size = other._batch_size
    node._names = other._names
