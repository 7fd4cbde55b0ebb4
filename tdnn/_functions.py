"""torch's functions on trees: ``torch.stack``, ``torch.zeros_like``, and their kin.

``TensorDict.__torch_function__`` looks the function up in one table. Most lead to the method of
the same name. What is not in the table is refused: a function that is right for every leaf may be
wrong for the tree, so the user says ``td.apply(fn)``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tdnn._core import TensorDictBase
from tdnn._declared import as_device
from tdnn._dims import Tree
from tdnn._indexing import where
from tdnn._operators import tensor_first
from tdnn._pieces import cat, stack

__all__ = ["call"]


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Call torch's ``func`` with a tree among its arguments.

    Raises:
        TypeError: ``func`` is not one that knows trees.

    Example:
        >>> torch.flip(TensorDict({"a": torch.arange(3)}, [3]), (0,))["a"]
        tensor([2, 1, 0])
        >>> torch.relu(TensorDict({"a": torch.arange(3)}, [3]))
        Traceback (most recent call last):
        ...
        TypeError: torch.relu does not take a tree; use td.apply(torch.relu) to call it ...
    """
    known = TABLE.get(func)
    if known is not None:
        return known(*args, **(kwargs or {}))
    answer = tensor_first(func, args, kwargs)
    if answer is NotImplemented:
        # For an operator (tensor + tree) this makes Python ask the tree's __radd__ next.
        name = _name(func)
        raise TypeError(
            f"{name} does not take a tree; use td.apply({name}) to call it on every leaf, td[key] "
            "for one, list(td.values(True, True)) for all; wrap a module in a TensorDictModule"
        )
    return answer


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", None) or repr(func)
    owner = getattr(func, "__objclass__", None)
    if owner is not None:  # a method or an operator of Tensor
        return f"torch.Tensor.{name}"
    return f"torch.{name}" if getattr(torch, name, None) is func else name


# -- functions that build like trees ---------------------------------------------------------


def _like(func: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return ``func``, which makes a tensor like a tensor, for trees."""

    def build(input: Tree, *args: Any, device: Any = None, **kwargs: Any) -> Tree:
        if device is not None:
            kwargs["device"] = device
        made = input._rebuild(
            lambda leaf: func(leaf, *args, **kwargs), input._batch_size, input._names
        )
        if device is not None:
            made._declare_device(as_device(device))
        return made

    return build


# -- comparisons -----------------------------------------------------------------------------


def _equal(input: Any, other: Any) -> bool:
    """Return whether two trees have the same keys, batch size and values."""
    if not isinstance(input, TensorDictBase) or not isinstance(other, TensorDictBase):
        return False
    if input._batch_size != other._batch_size or input._data.keys() != other._data.keys():
        return False
    for key, mine in input._data.items():
        theirs = other._data[key]
        if isinstance(mine, TensorDictBase) or isinstance(theirs, TensorDictBase):
            if not _equal(mine, theirs):
                return False
        elif not torch.equal(mine, theirs):
            return False
    return True


def _allclose(input: TensorDictBase, other: TensorDictBase, *args: Any, **kwargs: Any) -> bool:
    """Return whether all leaves are close; trees with other keys are an error, as shapes are."""
    close = input._zip(lambda mine, theirs: torch.allclose(mine, theirs, *args, **kwargs), other)
    return all(close._values())


# -- methods ---------------------------------------------------------------------------------


def _method(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of its first argument, which torch calls ``input``."""

    def call_method(input: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(input, name)(*args, **kwargs)

    return call_method


def _unflatten(input: Any, dim: int, sizes: Sequence[int]) -> Any:
    return input.unflatten(dim, sizes)


def _gather(
    input: Any, dim: int, index: Tensor, *, sparse_grad: bool = False, out: Any = None
) -> Any:
    return input.gather(dim, index, out)


def _cat(tensors: Any, dim: int = 0, *, out: Any = None) -> Any:
    return cat(tensors, dim, out=out)


def _stack(tensors: Any, dim: int = 0, *, out: Any = None) -> Any:
    return stack(tensors, dim, out=out)


_METHODS = (
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "all",
    "any",
    "chunk",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clone",
    "div",
    "exp",
    "flatten",
    "flip",
    "lerp",
    "log",
    "maximum",
    "mean",
    "minimum",
    "movedim",
    "mul",
    "neg",
    "permute",
    "pow",
    "reciprocal",
    "repeat_interleave",
    "reshape",
    "roll",
    "split",
    "sqrt",
    "squeeze",
    "sub",
    "sum",
    "transpose",
    "unbind",
    "unsqueeze",
)
_LIKES = ("empty", "full", "ones", "rand", "randn", "zeros")

TABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    torch.where: where,
    torch.gather: _gather,
    torch.unflatten: _unflatten,
    torch.equal: _equal,
    torch.allclose: _allclose,
    **{getattr(torch, name): _method(name) for name in _METHODS},
    **{getattr(torch, f"{name}_like"): _like(getattr(torch, f"{name}_like")) for name in _LIKES},
}
