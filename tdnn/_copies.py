"""The same tree over other tensors: clone, detach, cast, move, and gradient flags."""

from typing import Any, Self, cast

import torch
from torch import Tensor

from tdnn._core import TensorDictBase
from tdnn._declared import as_device
from tdnn._keys import as_key, listing

__all__ = ["Copies"]


class Copies(TensorDictBase):
    """clone, copy, to_tensordict, detach, data, grad, to, casts, requires_grad_, zero_."""

    __slots__ = ()

    def clone(self, recurse: bool = True) -> Self:
        """Return an unlocked copy.

        Args:
            recurse: copy the tensors too (differentiably, as ``Tensor.clone``); otherwise only
                the nodes are new. A tensor under two names is copied once and stays tied.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.clone()["a"] is td["a"], td.clone(False)["a"] is td["a"]
            (False, True)
        """
        if not recurse:
            return self._shallow_copy()
        return self._rebuild(Tensor.clone, self._batch_size, self._names)

    def to_tensordict(self, *, retain_none: bool | None = None) -> Self:
        """Return an unlocked :class:`TensorDict` of copies, whatever class of tree this is.

        Args:
            retain_none: accepted for compatibility; a tree holds no None.

        Returns:
            Copies of the tensors (differentiable, as ``Tensor.clone``), with the same batch size,
            device and names. A tensor under two names is copied once and stays tied.

        Example:
            >>> params = TensorDictParams(TensorDict.from_module(nn.Linear(3, 4)))
            >>> type(params.to_tensordict()).__name__
            'TensorDict'
        """
        copied = self._rebuild(Tensor.clone, self._batch_size, self._names)
        return cast(Self, _as_plain(copied, self._plain_kind))

    def copy(self) -> Self:
        """Return new nodes over the same tensors; the same as ``clone(False)``.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.copy()["a"] is td["a"]
            True
        """
        return self.clone(False)

    __copy__ = copy

    def detach(self) -> Self:
        """Return a tree of views that do not carry gradients.

        Example:
            >>> TensorDict({"a": torch.ones(3, requires_grad=True)}).detach()["a"].requires_grad
            False
        """
        return self._rebuild(Tensor.detach, self._batch_size, self._names)

    @property
    def data(self) -> Self:
        """A tree of the tensors' ``.data``: views outside autograd; a tie stays one tensor."""
        return self._rebuild(_data_of, self._batch_size, self._names)

    @property
    def grad(self) -> Self | None:
        """A tree of the tensors' ``.grad``, without the leaves that have none; None if none has."""
        if all([leaf.grad is None for _, leaf in self._leaves()]):
            return None
        found = cast(Any, self._shallow_copy())
        for path, leaf in self._leaves():
            if leaf.grad is None:
                del found[path]
            else:
                found.set(path, leaf.grad)
        return cast(Self, found)

    @property
    def requires_grad(self) -> bool:
        """Whether any leaf requires a gradient."""
        return any(leaf.requires_grad for _, leaf in self._leaves())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set the flag on every leaf that can have a gradient (float and complex), in place.

        Raises:
            RuntimeError: the gradient of a computed leaf was to be switched off; all are listed.

        Example:
            >>> td = TensorDict({"w": torch.ones(2), "step": 0}).requires_grad_()
            >>> td["w"].requires_grad, td["step"].requires_grad
            (True, False)
        """
        self._refuse_lost_writes()
        computed = [] if requires_grad else [p for p, leaf in self._leaves() if not leaf.is_leaf]
        if computed:
            raise RuntimeError(
                f"cannot switch off the gradient of {listing(map(as_key, computed))}, which were "
                "computed from others; use detach()"
            )
        for leaf in self._values():
            if leaf.is_floating_point() or leaf.is_complex():
                leaf.requires_grad_(requires_grad)
        return self

    def zero_(self) -> Self:
        """Fill every leaf with zeros in place and return the tree.

        Raises:
            RuntimeError: a leaf cannot be written, such as one that requires grad; all are listed.

        Example:
            >>> TensorDict({"a": torch.ones(2)}).zero_()["a"]
            tensor([0., 0.])
        """
        for leaf in self._writable():
            leaf.zero_()
        return self

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Clear the gradient of every leaf.

        Args:
            set_to_none: drop the gradient tensors; otherwise fill them with zeros.

        Example:
            >>> td = TensorDict({"w": torch.ones(2, requires_grad=True)})
            >>> td["w"].sum().backward()
            >>> td.zero_grad()["w"].grad is None
            True
        """
        self._refuse_lost_writes()
        grads = None if set_to_none else self.grad
        if grads is not None:
            grads.detach().zero_()
        for leaf in self._values():
            if set_to_none:
                leaf.grad = None
            elif leaf.grad is not None and leaf.grad.requires_grad:
                leaf.grad = leaf.grad.detach()
        return self

    def to(
        self,
        *args: Any,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Return the tree on another device, with another dtype, or both.

        Args:
            *args: in any order a device, a dtype, or a tensor or tree to take them from.
            device: the device, which also becomes the one of the tree.
            dtype: cast every leaf to it.
            non_blocking: let copies from pinned memory run behind.

        Returns:
            A new unlocked tree; the tree itself if it is there already. Leaves that need no
            change are not copied.

        Raises:
            TypeError: an argument is of another kind.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).to("cpu", torch.float64)
            >>> td.device, td["a"].dtype
            (device(type='cpu'), torch.float64)
        """
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, str | int | torch.device) and not isinstance(arg, bool):
                device = arg
            elif isinstance(arg, Tensor):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, TensorDictBase):
                device = arg.device
            else:
                raise TypeError(f"to() takes a device, a dtype, a tensor or a tree, not {arg!r}")
        place = self._device if device is None else as_device(device)
        if dtype is None and place == self._device:
            return self
        moved = self._rebuild(
            lambda leaf: leaf.to(place, dtype, non_blocking), self._batch_size, self._names
        )
        if device is not None:
            moved._declare_device(place)
        return moved

    def cpu(self) -> Self:
        """Return the tree in CPU memory.

        Example:
            >>> TensorDict({"a": 1}).cpu().device
            device(type='cpu')
        """
        return self.to("cpu")

    def pin_memory(self, num_threads: int | None = None) -> Self:
        """Return the tree in page-locked memory, from where copies to a GPU can run behind.

        Args:
            num_threads: accepted for compatibility; the calling thread does it.

        Returns:
            A new unlocked tree; a leaf that is pinned already is not copied.

        Raises:
            RuntimeError: there is no accelerator, or a leaf is not on the CPU.
        """
        return self._rebuild(lambda leaf: leaf.pin_memory(), self._batch_size, self._names)

    def cuda(self, device: int | None = None) -> Self:
        """Return the tree on a CUDA device, by default the current one."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def float(self) -> Self:
        """Return the tree with every leaf as float32.

        Example:
            >>> TensorDict({"a": 1}).float()["a"]
            tensor(1.)
        """
        return self.to(torch.float32)

    def double(self) -> Self:
        """Return the tree with every leaf as float64.

        Example:
            >>> TensorDict({"a": 1}).double()["a"].dtype
            torch.float64
        """
        return self.to(torch.float64)

    def half(self) -> Self:
        """Return the tree with every leaf as float16.

        Example:
            >>> TensorDict({"a": 1}).half()["a"].dtype
            torch.float16
        """
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """Return the tree with every leaf as bfloat16.

        Example:
            >>> TensorDict({"a": 1}).bfloat16()["a"].dtype
            torch.bfloat16
        """
        return self.to(torch.bfloat16)

    def int(self) -> Self:
        """Return the tree with every leaf as int32.

        Example:
            >>> TensorDict({"a": 1.5}).int()["a"]
            tensor(1, dtype=torch.int32)
        """
        return self.to(torch.int32)


def _as_plain(node: TensorDictBase, kind: Any) -> Any:
    """Return a tree of ``kind`` over the same leaves."""
    made = kind({}, node._batch_size, node._device, node._names)
    for key, value in node._data.items():
        made._data[key] = _as_plain(value, kind) if isinstance(value, TensorDictBase) else value
    return made


def _data_of(leaf: Tensor) -> Tensor:
    return leaf.data
