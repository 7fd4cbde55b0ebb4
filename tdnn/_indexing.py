"""(being written)"""

from tdnn._core import TensorDictBase

__all__ = ["Indexing"]


class Indexing(TensorDictBase):
    __slots__ = ()
