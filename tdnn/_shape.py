"""(being written)"""

from tdnn._core import TensorDictBase

__all__ = ["Shape"]


class Shape(TensorDictBase):
    __slots__ = ()
