"""Modules that read from a tree and write to it, alone, in a chain and many at once."""

from tdnn.nn.base import TensorDictModuleBase, WrapModule
from tdnn.nn.dispatch import dispatch
from tdnn.nn.ensemble import EnsembleModule
from tdnn.nn.module import TensorDictModule
from tdnn.nn.params import TensorDictParams
from tdnn.nn.sequential import TensorDictSequential

__all__ = [
    "EnsembleModule",
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictParams",
    "TensorDictSequential",
    "WrapModule",
    "dispatch",
]
