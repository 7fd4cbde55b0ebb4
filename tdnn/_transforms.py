"""Whether a functorch transform (``vmap``, ``grad``, …) is running.

Torch 2.14 has no public names for this.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

__all__ = ["dim_taken_off", "in_transform", "is_transformed"]


def in_transform() -> bool:
    """Return whether a transform is running."""
    return torch._C._functorch.maybe_current_level() is not None


def is_transformed(tensor: Any) -> bool:
    """Return whether a tensor belongs to a transform that is running.

    Under ``torch.compile``, which would have to see the tensor itself, the answer is no.
    """
    return not is_compiling() and bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def dim_taken_off(value: Any, before: Any) -> int | None:
    """Return the dim that ``vmap`` has just taken off a tensor, which had the shape ``before``.

    None if that is not known, as under ``torch.compile``.
    """
    functorch: Any = torch._C._functorch
    if is_compiling() or not isinstance(value, Tensor) or not functorch.is_batchedtensor(value):
        return None
    if functorch.get_unwrapped(value).shape != before:
        return None
    taken: int = functorch.maybe_get_bdim(value)
    return taken
