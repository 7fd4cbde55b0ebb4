"""Whether a functorch transform (``vmap``, ``grad``, …) is running.

Torch 2.14 has no public names for this.
"""

from typing import Any

import torch
from torch.compiler import is_compiling

__all__ = ["in_transform", "is_transformed"]


def in_transform() -> bool:
    """Return whether a transform is running."""
    return torch._C._functorch.maybe_current_level() is not None


def is_transformed(tensor: Any) -> bool:
    """Return whether a tensor belongs to a transform that is running.

    Under ``torch.compile``, which would have to see the tensor itself, the answer is no.
    """
    return not is_compiling() and bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
