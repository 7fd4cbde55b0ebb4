"""A stack of trees that is made anew whenever it is read."""

from typing import Any

import torch

from tdnn._core import TensorDictBase
from tdnn._keys import listing
from tdnn.errors import LockedError
from tdnn.tensordict import TensorDict

__all__ = ["LazyStackedTensorDict"]


class LazyStackedTensorDict(TensorDict):
    """Trees with the same keys and shapes, seen as one tree with a new dim.

    A leaf is ``torch.stack`` of the members' leaves each time it is read: it shows their present
    values, and gradients reach them. So far it can be read, but not written: change the members.

    Args:
        *tensordicts: one or more trees of one batch size ``(*B,)`` with the same keys.
        stack_dim: where the new dim goes, 0 so far.

    Raises:
        ValueError: there are no trees, or their batch sizes differ.
        LockedError: (on writing) an entry would be set or deleted, or a leaf written in place.

    Example:
        >>> rows = [TensorDict({"x": torch.zeros(3)}) for _ in range(2)]
        >>> stack = LazyStackedTensorDict(*rows)
        >>> _ = rows[1]["x"].fill_(1)
        >>> stack["x"].sum(1)
        tensor([0., 3.])
    """

    __slots__ = ("tensordicts",)

    _kind = TensorDict

    tensordicts: tuple[TensorDictBase, ...]

    def __init__(self, *tensordicts: TensorDictBase, stack_dim: int = 0) -> None:
        for tree in tensordicts:
            if not isinstance(tree, TensorDictBase):
                raise TypeError(f"a lazy stack is made of trees, not of {type(tree).__name__}")
        sizes = {tree._batch_size for tree in tensordicts}
        if len(sizes) != 1:
            raise ValueError(f"a stack needs trees of one batch size, not of {sorted(sizes)}")
        if stack_dim != 0:
            raise ValueError(f"a lazy stack is along dim 0 so far, not {stack_dim}")
        self.tensordicts = tensordicts
        self._batch_size = torch.Size((len(tensordicts), *sizes.pop()))
        self._device = tensordicts[0]._device
        self._names = None
        self._lock = []  # always locked: there is no store of its own to write to
        self._scope = None

    @property
    def _data(self) -> dict[str, Any]:  # type: ignore[override]  # stacked when it is read
        first, *others = self.tensordicts
        for other in others:
            if other._data.keys() != first._data.keys():
                raise first._unpaired(other)
        return {key: self._stacked(key) for key in first._data}

    def _stacked(self, key: str) -> Any:
        entries = [tree._data[key] for tree in self.tensordicts]
        if isinstance(entries[0], TensorDictBase):
            return LazyStackedTensorDict(*entries)
        shapes = {tuple(entry.shape) for entry in entries}
        if len(shapes) > 1:
            raise ValueError(f"cannot stack {key!r}: the members have shapes {listing(shapes)}")
        return torch.stack(entries)

    @classmethod
    def load(cls, *args: Any, **kwargs: Any) -> TensorDict:  # type: ignore[override]  # no members
        """Return :meth:`TensorDict.load`: a file keeps what the stack showed, not its members.

        Example:
            >>> lazy = LazyStackedTensorDict(*[TensorDict({"x": torch.zeros(3)})] * 2)
            >>> type(lazy.save("stack.safetensors").load("stack.safetensors")).__name__
            'TensorDict'
        """
        return TensorDict.load(*args, **kwargs)

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> TensorDict:  # type: ignore[override]  # no members
        """Return :meth:`TensorDict.from_dict`, since a dict has no members.

        Example:
            >>> type(LazyStackedTensorDict.from_dict({"x": torch.zeros(2)})).__name__
            'TensorDict'
        """
        return TensorDict.from_dict(*args, **kwargs)

    def _refuse_lost_write(self) -> None:
        raise LockedError(
            "a lazy stack has no memory of its own to write to; change its members "
            "(.tensordicts), or clone() it first"
        )

    def _plan_sizes(self, *args: Any, **kwargs: Any) -> torch.Size:
        """Return the batch size that it has: it declares none for what is not its own."""
        return self._batch_size

    def _hold(self, holder: Any) -> None:
        """Nothing: it is always locked."""

    def _release(self) -> None:
        """Nothing: it is always locked."""

    def unlock_(self) -> Any:
        """Raise: a lazy stack has no entries of its own.

        Raises:
            LockedError: always.
        """
        raise LockedError("a lazy stack has no entries of its own to unlock; change its members")

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.tensordicts,)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state[0])  # type: ignore[misc]  # all that it is comes from its members


TensorDict._lazy_kind = LazyStackedTensorDict
