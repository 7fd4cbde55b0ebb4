"""``TensorDict``, the core and its themes in one class, and ``Swap``, a tree that a module held."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tdnn import _functions, _pytree
from tdnn._apply import Apply
from tdnn._copies import Copies
from tdnn._core import TensorDictBase
from tdnn._declared import NO_BATCH
from tdnn._exchange import Exchange
from tdnn._indexing import Indexing
from tdnn._lens import Lenses
from tdnn._mapping import Entries
from tdnn._masks import Masks
from tdnn._pieces import Pieces
from tdnn._pointwise import Pointwise
from tdnn._reduce import Reduce
from tdnn._repr import Pictures
from tdnn._shape import Shape
from tdnn._state import States
from tdnn._swap import Swaps
from tdnn._update import Updates
from tdnn._views import Views
from tdnn.io.safetensors import Disk

__all__ = ["Swap", "TensorDict"]


class TensorDict(
    Indexing,
    Masks,
    Views,
    Entries,
    Updates,
    Apply,
    Copies,
    Lenses,
    Swaps,
    States,
    Shape,
    Pieces,
    Pointwise,
    Reduce,
    Pictures,
    Disk,
):
    """A tree of tensors that behaves like one tensor.

    Every leaf is a tensor ``(*B, ...)`` whose shape begins with the batch size ``B``; indexing and
    shape methods act on ``B`` in all leaves at once. Nested mappings become branches, and a tuple
    of ``str`` is a key that leads into them.

    Args:
        source: a mapping or another tree; tensors are held, not copied. Numbers and arrays become
            tensors.
        batch_size: the dims that all leaves begin with; by default none, or those of ``source``
            if that is a tree.
        device: where entries are moved to when they are set; None leaves them where they are.
        names: a name, or None, for each batch dim.
        non_blocking: for copies between devices.
        lock: lock the tree: its tensors can be written to, but no entry added, removed or replaced.
        **kwargs: more entries.

    Raises:
        ValueError: a leaf does not begin with the batch size.
        TypeError: a key or a value is of a kind that a tree does not hold.
        KeyConflictError: two entries for one key.

    Example:
        >>> td = TensorDict({"obs": {"image": torch.zeros(3, 8, 8)}, "step": torch.arange(3)}, [3])
        >>> td["obs", "image"].shape, td[0]["step"], td.reshape(3, 1)["step"].shape
        (torch.Size([3, 8, 8]), tensor(0), torch.Size([3, 1]))
    """

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _pytree.register(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _functions.call(func, args, kwargs)


TensorDict._kind = TensorDict._plain_kind = TensorDict
_pytree.register(TensorDict)


class Swap(TensorDict):
    """What a module held before ``to_module``; as a context manager, the way back to it.

    It may be entered any number of times, also while it is entered; the block that began last
    then ends first.
    """

    __slots__ = ("_exchange", "_found")

    _kind = TensorDict

    _exchange: Exchange
    _found: TensorDictBase | None  # what the module held, once it was asked for

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._found = None
        self._batch_size = NO_BATCH
        self._device = None
        self._names = None
        self._lock = None
        self._scope = None

    @property
    def _data(self) -> dict[str, Any]:  # type: ignore[override]  # made when it is first read
        if self._found is None:
            self._found = self._exchange.found_tree()
        return self._found._data

    def __enter__(self) -> "Swap":
        self._exchange.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._exchange.leave(self, kind is not None)

    def _own_leaves(self) -> Sequence[Any]:
        return self._exchange.found()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_it_is, (TensorDict(self),)


def _as_it_is(tree: TensorDict) -> TensorDict:
    return tree


TensorDict._swap_kind = Swap
