"""The operators of Python on trees; each does what it does on a tensor, for every leaf."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdnn._combine import combine, operate, operate_
from tdnn._core import TensorDictBase

__all__ = ["Operators", "tensor_first"]


def _rdiv(leaf: Tensor, other: Any) -> Tensor:
    return other / leaf  # type: ignore[no-any-return]  # other is a number or a tensor


def _rfloordiv(leaf: Tensor, other: Any) -> Tensor:
    return other // leaf  # type: ignore[no-any-return]  # other is a number or a tensor


def _rmod(leaf: Tensor, other: Any) -> Tensor:
    return torch.remainder(other, leaf)


def _rpow(leaf: Tensor, other: Any) -> Tensor:
    return torch.pow(other, leaf)


class Operators(TensorDictBase):
    """Arithmetic, comparison and bit operators.

    The other operand is a number, a tree, a mapping or a tensor; :class:`tdnn._pointwise.Pointwise`
    says how they are paired. ``td + 1`` is a new tree, ``td += 1`` writes into the leaves.
    ``td == other`` is a tree of bool; with something that is no operand at all, such as None, it
    is False, as for any two objects of Python that do not know each other.

    Under ``torch.compile`` (torch 2.14), ``td += tensor`` makes a new tree, because dynamo reads it
    as ``td = td + tensor``; ``td.add_(tensor)`` writes in place there too, as does ``td += other``
    for a number or a tree.
    """

    __slots__ = ()

    __array_ufunc__ = None  # numpy leaves `array + tree` to the tree

    def __hash__(self) -> int:  # by identity, like a tensor: __eq__ does not give a bool
        return id(self)

    def __neg__(self) -> Self:
        return combine(self, torch.neg)

    def __pos__(self) -> Self:
        return combine(self, torch.positive)

    def __abs__(self) -> Self:
        return combine(self, torch.abs)

    def __invert__(self) -> Self:
        return combine(self, torch.bitwise_not)

    # -- arithmetic ------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Self:
        return operate(self, torch.add, other)

    def __radd__(self, other: Any) -> Self:
        return operate(self, torch.add, other)

    def __iadd__(self, other: Any) -> Self:
        return operate_(self, Tensor.add_, other)

    def __sub__(self, other: Any) -> Self:
        return operate(self, torch.sub, other)

    def __rsub__(self, other: Any) -> Self:
        return operate(self, torch.rsub, other)

    def __isub__(self, other: Any) -> Self:
        return operate_(self, Tensor.sub_, other)

    def __mul__(self, other: Any) -> Self:
        return operate(self, torch.mul, other)

    def __rmul__(self, other: Any) -> Self:
        return operate(self, torch.mul, other)

    def __imul__(self, other: Any) -> Self:
        return operate_(self, Tensor.mul_, other)

    def __truediv__(self, other: Any) -> Self:
        return operate(self, torch.div, other)

    def __rtruediv__(self, other: Any) -> Self:
        return operate(self, _rdiv, other)

    def __itruediv__(self, other: Any) -> Self:
        return operate_(self, Tensor.div_, other)

    def __floordiv__(self, other: Any) -> Self:
        return operate(self, torch.floor_divide, other)

    def __rfloordiv__(self, other: Any) -> Self:
        return operate(self, _rfloordiv, other)

    def __ifloordiv__(self, other: Any) -> Self:
        return operate_(self, Tensor.floor_divide_, other)

    def __mod__(self, other: Any) -> Self:
        return operate(self, torch.remainder, other)

    def __rmod__(self, other: Any) -> Self:
        return operate(self, _rmod, other)

    def __imod__(self, other: Any) -> Self:
        return operate_(self, Tensor.remainder_, other)

    def __pow__(self, other: Any) -> Self:
        return operate(self, torch.pow, other)

    def __rpow__(self, other: Any) -> Self:
        return operate(self, _rpow, other)

    def __ipow__(self, other: Any) -> Self:
        return operate_(self, Tensor.pow_, other)

    # -- bits ------------------------------------------------------------------------------------

    def __and__(self, other: Any) -> Self:
        return operate(self, torch.bitwise_and, other)

    def __rand__(self, other: Any) -> Self:
        return operate(self, torch.bitwise_and, other)

    def __iand__(self, other: Any) -> Self:
        return operate_(self, Tensor.bitwise_and_, other)

    def __or__(self, other: Any) -> Self:
        return operate(self, torch.bitwise_or, other)

    def __ror__(self, other: Any) -> Self:
        return operate(self, torch.bitwise_or, other)

    def __ior__(self, other: Any) -> Self:
        return operate_(self, Tensor.bitwise_or_, other)

    def __xor__(self, other: Any) -> Self:
        return operate(self, torch.bitwise_xor, other)

    def __rxor__(self, other: Any) -> Self:
        return operate(self, torch.bitwise_xor, other)

    def __ixor__(self, other: Any) -> Self:
        return operate_(self, Tensor.bitwise_xor_, other)

    # -- comparison ------------------------------------------------------------------------------

    def __eq__(self, other: Any) -> Self:  # type: ignore[override]  # a tree of bool, not a bool
        return operate(self, torch.eq, other)

    def __ne__(self, other: Any) -> Self:  # type: ignore[override]  # a tree of bool, not a bool
        return operate(self, torch.ne, other)

    def __lt__(self, other: Any) -> Self:
        return operate(self, torch.lt, other)

    def __le__(self, other: Any) -> Self:
        return operate(self, torch.le, other)

    def __gt__(self, other: Any) -> Self:
        return operate(self, torch.gt, other)

    def __ge__(self, other: Any) -> Self:
        return operate(self, torch.ge, other)


# -- a tensor before the tree ------------------------------------------------------------------

# The names of the functions that torch calls for `tensor + tree`, and what they ask of the tree.
# Dynamo calls them for `tree + tensor` too, with the tensor first: hence those with an r, which
# eager mode does not need. (So dynamo of torch 2.14 traces `tree += tensor` as a new tree.)
_ASKED = {
    "add": "__add__",
    "sub": "__rsub__",
    "__rsub__": "__sub__",
    "mul": "__mul__",
    "div": "__rtruediv__",
    "__rdiv__": "__truediv__",
    "__floordiv__": "__rfloordiv__",
    "__rfloordiv__": "__floordiv__",
    "remainder": "__rmod__",
    "__rmod__": "__mod__",
    "pow": "__rpow__",
    "__rpow__": "__pow__",
    "__and__": "__and__",
    "bitwise_and": "__and__",
    "__or__": "__or__",
    "bitwise_or": "__or__",
    "__xor__": "__xor__",
    "bitwise_xor": "__xor__",
    "eq": "__eq__",
    "__eq__": "__eq__",
    "ne": "__ne__",
    "lt": "__gt__",
    "le": "__ge__",
    "gt": "__lt__",
    "ge": "__le__",
}


def tensor_first(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Return the result of torch's ``func(tensor, tree)``, or ``NotImplemented``.

    The function is looked up by name: dynamo of torch 2.14 does not find one that is written in
    Python, such as ``Tensor.__rsub__``, as the key of a dict.
    """
    asked = _ASKED.get(getattr(func, "__name__", ""))
    if asked is None or kwargs or len(args) != 2 or not isinstance(args[0], Tensor):
        return NotImplemented
    return getattr(args[1], asked)(args[0])
