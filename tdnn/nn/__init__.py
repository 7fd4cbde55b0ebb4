"""Modules that read from a tree and write to it, alone, in a chain and many at once."""

from tdnn.nn.base import TensorDictModuleBase, WrapModule
from tdnn.nn.dispatch import dispatch
from tdnn.nn.module import TensorDictModule
from tdnn.nn.sequential import TensorDictSequential

__all__ = [
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictSequential",
    "WrapModule",
    "dispatch",
]
