"""The pointwise methods of ``torch.Tensor`` on trees: each acts on every leaf alike."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from tdnn._columns import completed, is_number
from tdnn._combine import combine, combine_
from tdnn._declared import NO_BATCH
from tdnn._keys import NestedKey, as_key, as_path, listing
from tdnn._operators import Operators

__all__ = ["Pointwise"]


class Pointwise(Operators):
    """Functions of ``torch`` on every leaf.

    The other operand is a number, a tree, a mapping or a tensor.

    - A tree or a mapping is paired by name, at every level and in any order. Keys that only one
      of the two has are a :class:`~tdnn.errors.MissingKeyError` that lists them all, or are
      dealt with as ``default`` says.
    - A tensor ``(*B,)`` is aligned with the batch dims, one element for each element of the
      batch, whatever dims the leaves have behind.
    - Batch sizes that differ broadcast, as the shapes of tensors do. Batch dims meet batch dims
      and feature dims meet feature dims.

    ``td.add(other)`` returns a new unlocked tree with this one's device and names.
    ``td.add_(other)`` writes into the leaves and returns the tree, which may be locked. It
    changes a leaf that stands under two names once, and it checks the keys, shapes and dtypes of
    everything before it writes anything.
    """

    __slots__ = ()

    def _combine(self, fn: Callable[..., Tensor], other: Any, default: Any, **kwargs: Any) -> Self:
        first, second = (self, other) if default is None else completed(self, other, default)
        return combine(first, fn, second, **kwargs)

    # -- one operand ---------------------------------------------------------------------------

    def neg(self) -> Self:
        """Return the negative of every leaf.

        Example:
            >>> TensorDict({"x": 2.0}).neg()["x"]
            tensor(-2.)
        """
        return combine(self, torch.neg)

    def neg_(self) -> Self:
        """Negate every leaf, in place.

        Example:
            >>> TensorDict({"x": 2.0}).neg_()["x"]
            tensor(-2.)
        """
        return combine_(self, Tensor.neg_)

    def abs(self) -> Self:
        """Return the absolute value of every leaf.

        Example:
            >>> TensorDict({"x": -2.0}).abs()["x"]
            tensor(2.)
        """
        return combine(self, torch.abs)

    def abs_(self) -> Self:
        """Replace every leaf by its absolute value, in place.

        Example:
            >>> TensorDict({"x": -2.0}).abs_()["x"]
            tensor(2.)
        """
        return combine_(self, Tensor.abs_)

    def sqrt(self) -> Self:
        """Return the square root of every leaf.

        Example:
            >>> TensorDict({"x": 4.0}).sqrt()["x"]
            tensor(2.)
        """
        return combine(self, torch.sqrt)

    def sqrt_(self) -> Self:
        """Replace every leaf by its square root, in place.

        Example:
            >>> TensorDict({"x": 4.0}).sqrt_()["x"]
            tensor(2.)
        """
        return combine_(self, Tensor.sqrt_)

    def exp(self) -> Self:
        """Return ``e`` to the power of every leaf.

        Example:
            >>> TensorDict({"x": 0.0}).exp()["x"]
            tensor(1.)
        """
        return combine(self, torch.exp)

    def exp_(self) -> Self:
        """Replace every leaf by ``e`` to its power, in place.

        Example:
            >>> TensorDict({"x": 0.0}).exp_()["x"]
            tensor(1.)
        """
        return combine_(self, Tensor.exp_)

    def log(self) -> Self:
        """Return the natural logarithm of every leaf.

        Example:
            >>> TensorDict({"x": 1.0}).log()["x"]
            tensor(0.)
        """
        return combine(self, torch.log)

    def log_(self) -> Self:
        """Replace every leaf by its natural logarithm, in place.

        Example:
            >>> TensorDict({"x": 1.0}).log_()["x"]
            tensor(0.)
        """
        return combine_(self, Tensor.log_)

    def reciprocal(self) -> Self:
        """Return one over every leaf.

        Example:
            >>> TensorDict({"x": 4.0}).reciprocal()["x"]
            tensor(0.2500)
        """
        return combine(self, torch.reciprocal)

    def reciprocal_(self) -> Self:
        """Replace every leaf by one over it, in place.

        Example:
            >>> TensorDict({"x": 4.0}).reciprocal_()["x"]
            tensor(0.2500)
        """
        return combine_(self, Tensor.reciprocal_)

    def fill_(self, key: NestedKey, value: float | bool | Tensor) -> Self:
        """Fill one leaf, or all leaves of a branch, in place and return the tree.

        Args:
            key: a leaf or a branch.
            value: a number, or a tensor without dims.

        Raises:
            MissingKeyError: the key is not there.
            RuntimeError: a leaf requires grad, or cannot hold the value.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}}, lock=True)
            >>> td.fill_("b", 2)["b", "c"]
            tensor([2., 2.])
        """
        path = as_path(key)
        found = self._target(path)
        # A tree of what is to be filled alone, in which it has its own name.
        part = self._like({path[0]: self._wrapped(path, found)}, NO_BATCH)
        if isinstance(value, float) and not value.is_integer():  # torch would cut it off
            lost = [as_key(at) for at, leaf in part._leaves() if not _holds_fractions(leaf)]
            if lost:
                raise RuntimeError(f"cannot fill {listing(lost)} with {value}: integers or bools")
        combine_(part, Tensor.fill_, value)
        return self

    # -- two operands ----------------------------------------------------------------------------

    def add(self, other: Any, *, alpha: float | None = None, default: Any = None) -> Self:
        """Return every leaf plus ``alpha * other``.

        Args:
            other: a number, a tree, a mapping, or a tensor aligned with the batch dims.
            alpha: a factor for ``other``.
            default: what to do with a key that only one of two trees has: None raises,
                ``"intersection"`` drops it, a tensor or a number stands for the missing leaf.

        Raises:
            MissingKeyError: the trees have different keys and there is no ``default``.
            ValueError: the batch sizes do not broadcast.

        Example:
            >>> td = TensorDict({"x": torch.zeros(2, 3), "y": torch.ones(2)}, [2])
            >>> td.add(1, alpha=2)["y"], td.add(torch.tensor([1.0, 2.0]))["x"][:, 0]
            (tensor([3., 3.]), tensor([1., 2.]))
        """
        return self._combine(torch.add, other, default, **_scale(alpha))

    def add_(self, other: Any, *, alpha: float | None = None) -> Self:
        """Add ``alpha * other`` to every leaf in place and return the tree.

        Args:
            other: as for :meth:`add`; its shapes broadcast to those of the leaves.
            alpha: a factor for ``other``.

        Raises:
            MissingKeyError: the trees have different keys.
            ValueError: a leaf would change its shape, or stands under two names for which the
                other tree has different values.
            RuntimeError: a leaf requires grad, or a result does not fit its dtype.

        Example:
            >>> td = TensorDict({"x": torch.zeros(2)}, lock=True)
            >>> td.add_(TensorDict({"x": torch.ones(2)}), alpha=3)["x"]
            tensor([3., 3.])
        """
        return combine_(self, Tensor.add_, other, **_scale(alpha))

    def sub(self, other: Any, *, alpha: float | None = None, default: Any = None) -> Self:
        """Return every leaf minus ``alpha * other``.

        The arguments are those of :meth:`add`.

        Example:
            >>> TensorDict({"x": torch.zeros(2)}, [2]).sub(torch.tensor([1.0, 2.0]))["x"]
            tensor([-1., -2.])
        """
        return self._combine(torch.sub, other, default, **_scale(alpha))

    def sub_(self, other: Any, alpha: float | None = None) -> Self:
        """Subtract ``alpha * other`` from every leaf in place and return the tree.

        The arguments are those of :meth:`add_`.

        Example:
            >>> TensorDict({"x": torch.zeros(2)}).sub_(1)["x"]
            tensor([-1., -1.])
        """
        return combine_(self, Tensor.sub_, other, **_scale(alpha))

    def mul(self, other: Any, *, default: Any = None) -> Self:
        """Return every leaf times ``other``; the arguments are those of :meth:`add`.

        Example:
            >>> TensorDict({"x": 3.0}).mul(2)["x"]
            tensor(6.)
        """
        return self._combine(torch.mul, other, default)

    def mul_(self, other: Any) -> Self:
        """Multiply every leaf by ``other`` in place and return the tree.

        Example:
            >>> TensorDict({"x": 3.0}).mul_(2)["x"]
            tensor(6.)
        """
        return combine_(self, Tensor.mul_, other)

    def div(self, other: Any, *, default: Any = None) -> Self:
        """Return every leaf over ``other``; the arguments are those of :meth:`add`.

        Example:
            >>> TensorDict({"x": 3.0}).div(2)["x"]
            tensor(1.5000)
        """
        return self._combine(torch.div, other, default)

    def div_(self, other: Any) -> Self:
        """Divide every leaf by ``other`` in place and return the tree.

        Example:
            >>> TensorDict({"x": 3.0}).div_(2)["x"]
            tensor(1.5000)
        """
        return combine_(self, Tensor.div_, other)

    def pow(self, other: Any, *, default: Any = None) -> Self:
        """Return every leaf to the power of ``other``; the arguments are those of :meth:`add`.

        Example:
            >>> TensorDict({"x": 3.0}).pow(2)["x"]
            tensor(9.)
        """
        return self._combine(torch.pow, other, default)

    def pow_(self, other: Any) -> Self:
        """Raise every leaf to the power of ``other`` in place and return the tree.

        Example:
            >>> TensorDict({"x": 3.0}).pow_(2)["x"]
            tensor(9.)
        """
        return combine_(self, Tensor.pow_, other)

    def clamp_min(self, other: Any, *, default: Any = None) -> Self:
        """Return every leaf, or ``other`` where that is greater.

        The arguments are those of :meth:`add`.

        Example:
            >>> TensorDict({"x": 3.0}).clamp_min(4)["x"]
            tensor(4.)
        """
        return self._combine(torch.clamp_min, other, default)

    def clamp_min_(self, other: Any) -> Self:
        """Raise every leaf to at least ``other`` in place and return the tree.

        Example:
            >>> TensorDict({"x": 3.0}).clamp_min_(4)["x"]
            tensor(4.)
        """
        return combine_(self, Tensor.clamp_min_, other)

    def clamp_max(self, other: Any, *, default: Any = None) -> Self:
        """Return every leaf, or ``other`` where that is less.

        The arguments are those of :meth:`add`.

        Example:
            >>> TensorDict({"x": 3.0}).clamp_max(2)["x"]
            tensor(2.)
        """
        return self._combine(torch.clamp_max, other, default)

    def clamp_max_(self, other: Any) -> Self:
        """Lower every leaf to at most ``other`` in place and return the tree.

        Example:
            >>> TensorDict({"x": 3.0}).clamp_max_(2)["x"]
            tensor(2.)
        """
        return combine_(self, Tensor.clamp_max_, other)

    def maximum(self, other: Any, *, default: Any = None) -> Self:
        """Return the greater of every leaf and ``other``; the arguments are those of :meth:`add`.

        Example:
            >>> TensorDict({"x": 3.0}).maximum(TensorDict({"x": 4.0}))["x"]
            tensor(4.)
        """
        fn = torch.clamp_min if is_number(other) else torch.maximum
        return self._combine(fn, other, default)

    def minimum(self, other: Any, *, default: Any = None) -> Self:
        """Return the lesser of every leaf and ``other``; the arguments are those of :meth:`add`.

        Example:
            >>> TensorDict({"x": 3.0}).minimum(TensorDict({"x": 4.0}))["x"]
            tensor(3.)
        """
        fn = torch.clamp_max if is_number(other) else torch.minimum
        return self._combine(fn, other, default)

    # -- three operands --------------------------------------------------------------------------

    def clamp(self, min: Any = None, max: Any = None) -> Self:
        """Return every leaf, within ``[min, max]``.

        Args:
            min: the lower bound, a number, a tree, or a tensor aligned with the batch dims.
            max: the upper bound, likewise; it counts where it is less than ``min``.

        Raises:
            ValueError: there is neither ``min`` nor ``max``.

        Example:
            >>> TensorDict({"x": torch.tensor([-2.0, 0.5, 3.0])}).clamp(0, 1)["x"]
            tensor([0.0000, 0.5000, 1.0000])
        """
        _require_bound(min, max)
        if min is None or max is None:
            return self.clamp_max(max) if min is None else self.clamp_min(min)
        return combine(self, _clamp, min, max)

    def clamp_(self, min: Any = None, max: Any = None) -> Self:
        """Bring every leaf within ``[min, max]`` in place.

        The arguments are those of :meth:`clamp`.

        Example:
            >>> TensorDict({"x": torch.tensor([-2.0, 0.5, 3.0])}).clamp_(0, 1)["x"]
            tensor([0.0000, 0.5000, 1.0000])
        """
        _require_bound(min, max)
        if min is None or max is None:
            return self.clamp_max_(max) if min is None else self.clamp_min_(min)
        return combine_(self, _clamp_, min, max)

    def lerp(self, end: Any, weight: Any) -> Self:
        """Return ``leaf + weight * (end - leaf)``.

        Args:
            end: a tree, or a tensor aligned with the batch dims.
            weight: a number, a tree, or a tensor aligned with the batch dims.

        Example:
            >>> TensorDict({"x": 0.0}).lerp(TensorDict({"x": 10.0}), 0.25)["x"]
            tensor(2.5000)
        """
        return combine(self, torch.lerp, end, weight)

    def lerp_(self, end: Any, weight: Any) -> Self:
        """Move every leaf towards ``end`` in place, as for an average of weights.

        The arguments are those of :meth:`lerp`. Leaves of integers, as BatchNorm's counters are,
        cannot be averaged; :meth:`apply_` can treat them apart.

        Example:
            >>> TensorDict({"x": 0.0}).lerp_(TensorDict({"x": 10.0}), 0.25)["x"]
            tensor(2.5000)
        """
        return combine_(self, Tensor.lerp_, end, weight)

    def addcmul(self, other1: Any, other2: Any, *, value: float = 1) -> Self:
        """Return ``leaf + value * other1 * other2``.

        Args:
            other1: a tree, or a tensor aligned with the batch dims.
            other2: likewise.
            value: a number.

        Example:
            >>> one, two = TensorDict({"x": 2.0}), TensorDict({"x": 3.0})
            >>> TensorDict({"x": 1.0}).addcmul(one, two, value=2)["x"]
            tensor(13.)
        """
        return combine(self, torch.addcmul, other1, other2, value=value)

    def addcmul_(self, other1: Any, other2: Any, *, value: float = 1) -> Self:
        """Add ``value * other1 * other2`` in place; the arguments are those of :meth:`addcmul`.

        Example:
            >>> one, two = TensorDict({"x": 2.0}), TensorDict({"x": 3.0})
            >>> TensorDict({"x": 1.0}).addcmul_(one, two, value=2)["x"]
            tensor(13.)
        """
        return combine_(self, Tensor.addcmul_, other1, other2, value=value)

    def addcdiv(self, other1: Any, other2: Any, value: float = 1) -> Self:
        """Return ``leaf + value * other1 / other2``.

        Args:
            other1: a tree, or a tensor aligned with the batch dims.
            other2: likewise.
            value: a number.

        Example:
            >>> one, two = TensorDict({"x": 6.0}), TensorDict({"x": 3.0})
            >>> TensorDict({"x": 1.0}).addcdiv(one, two, value=2)["x"]
            tensor(5.)
        """
        return combine(self, torch.addcdiv, other1, other2, value=value)

    def addcdiv_(self, other1: Any, other2: Any, *, value: float = 1) -> Self:
        """Add ``value * other1 / other2`` in place; the arguments are those of :meth:`addcdiv`.

        Example:
            >>> one, two = TensorDict({"x": 6.0}), TensorDict({"x": 3.0})
            >>> TensorDict({"x": 1.0}).addcdiv_(one, two, value=2)["x"]
            tensor(5.)
        """
        return combine_(self, Tensor.addcdiv_, other1, other2, value=value)


def _scale(alpha: float | None) -> dict[str, float]:
    return {} if alpha is None else {"alpha": alpha}


def _require_bound(low: Any, high: Any) -> None:
    if low is None and high is None:
        raise ValueError("clamp needs a lower or an upper bound: min=, max=, or both")


def _clamp(leaf: Tensor, low: Any, high: Any) -> Tensor:
    if isinstance(low, Tensor) is isinstance(high, Tensor):
        return torch.clamp(leaf, low, high)
    return torch.clamp_max(torch.clamp_min(leaf, low), high)


def _clamp_(leaf: Tensor, low: Any, high: Any) -> Tensor:
    if isinstance(low, Tensor) is isinstance(high, Tensor):
        return leaf.clamp_(low, high)
    return leaf.clamp_min_(low).clamp_max_(high)


def _holds_fractions(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()
