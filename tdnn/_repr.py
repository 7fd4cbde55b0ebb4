"""(being written)"""

from tdnn._core import TensorDictBase

__all__ = ["Pictures"]


class Pictures(TensorDictBase):
    __slots__ = ()
