"""(being written)"""

from tdnn._core import TensorDictBase

__all__ = ["Pointwise"]


class Pointwise(TensorDictBase):
    __slots__ = ()
