"""``TensorDict``: the core and its themes in one class."""

from typing import Any

from tdnn import _pytree
from tdnn._apply import Apply
from tdnn._copies import Copies
from tdnn._indexing import Indexing
from tdnn._lens import Lenses
from tdnn._mapping import Entries
from tdnn._pointwise import Pointwise
from tdnn._repr import Pictures
from tdnn._shape import Shape
from tdnn.io.safetensors import Disk

__all__ = ["TensorDict"]


class TensorDict(Indexing, Entries, Apply, Copies, Lenses, Shape, Pointwise, Pictures, Disk):
    """A tree of tensors that behaves like one tensor."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _pytree.register(cls)


TensorDict._kind = TensorDict
_pytree.register(TensorDict)
