"""A tree of tensors that behaves like one tensor, and what makes modules composable with it."""

# nn is not in __all__: a star import would hide torch.nn.

from tdnn import nn as nn
from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, unravel_key, unravel_key_list
from tdnn._pieces import cat, stack
from tdnn.errors import (
    FileFormatError,
    KeyConflictError,
    LockedError,
    MissingKeyError,
    SwapError,
)
from tdnn.lazystack import LazyStackedTensorDict
from tdnn.nn.params import TensorDictParams
from tdnn.tensordict import TensorDict

__all__ = [
    "FileFormatError",
    "KeyConflictError",
    "LazyStackedTensorDict",
    "LockedError",
    "MissingKeyError",
    "NestedKey",
    "SwapError",
    "TensorDict",
    "TensorDictBase",
    "TensorDictParams",
    "cat",
    "stack",
    "unravel_key",
    "unravel_key_list",
]
