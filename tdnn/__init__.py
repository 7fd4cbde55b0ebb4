"""A tree of tensors that behaves like one tensor, and what makes modules composable with it.

- :class:`TensorDict`: the tree; ``from_module`` / ``to_module`` run a module on other weights,
  ``flatten_keys`` renames, ``save`` / ``load`` keep it on disk, ``torch.vmap`` maps over it.
- :class:`TensorDictParams`: a tree that is an ``nn.Module``, for optimizers and ``state_dict``.
- :mod:`tdnn.nn`: ``TensorDictModule``, ``TensorDictSequential``, ``dispatch``, ``EnsembleModule``.
- :mod:`tdnn.errors`: the exceptions.
"""

# nn is not in __all__: a star import would hide torch.nn.

from tdnn import nn as nn
from tdnn._core import TensorDictBase, is_tensor_collection
from tdnn._keys import NestedKey, unravel_key, unravel_key_list
from tdnn._pieces import cat, stack
from tdnn._update import merge_tensordicts
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

__version__ = "0.1.0"

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
    "is_tensor_collection",
    "merge_tensordicts",
    "stack",
    "unravel_key",
    "unravel_key_list",
]
