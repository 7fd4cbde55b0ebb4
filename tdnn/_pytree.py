"""The tree as a pytree node, so that torch's transforms map over it.

A transform takes leaves out (``flatten``), changes their shapes, and puts them back
(``unflatten``): ``vmap`` takes a dim off on the way in and puts one on at the way out,
``jacrev`` puts dims in front. The node that comes back must declare batch dims that its leaves
have, so its batch size is worked out from how their shapes changed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tdnn._core import Names, TensorDictBase

__all__ = ["register"]


class Layout:
    """What a node is besides its children; equal when the keys are, whatever the shapes."""

    __slots__ = ("batch_size", "device", "keys", "kind", "names", "shapes")

    def __init__(
        self,
        kind: type[TensorDictBase],
        keys: tuple[str, ...],
        batch_size: torch.Size,
        device: torch.device | None,
        names: Names,
        shapes: tuple[torch.Size | None, ...],
    ) -> None:
        self.kind = kind
        self.keys = keys
        self.batch_size = batch_size
        self.device = device
        self.names = names
        self.shapes = shapes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)

    def __repr__(self) -> str:
        return f"{self.kind.__name__}{list(self.keys)}"


def register(cls: type[TensorDictBase]) -> None:
    """Make ``cls`` a pytree node whose children are its entries."""
    pytree.register_pytree_node(
        cls,
        _flatten,
        _unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=_dump,
        from_dumpable_context=_undump,
        flatten_with_keys_fn=_flatten_with_keys,
    )


def _flatten(node: TensorDictBase) -> tuple[list[Any], Layout]:
    data = node._data
    values = list(data.values())
    # The children may be anything: transforms also pass trees of ints (in_dims) through here.
    shapes = tuple([getattr(value, "shape", None) for value in values])
    keys = tuple(data)
    return values, Layout(node._kind, keys, node._batch_size, node._device, node._names, shapes)


def _flatten_with_keys(node: TensorDictBase) -> tuple[list[tuple[Any, Any]], Layout]:
    values, layout = _flatten(node)
    return [(pytree.MappingKey(k), v) for k, v in zip(layout.keys, values, strict=True)], layout


def _unflatten(children: Iterable[Any], layout: Layout) -> TensorDictBase:
    values = list(children)
    node = object.__new__(layout.kind)
    node._data = dict(zip(layout.keys, values, strict=True))
    node._device = layout.device
    node._lock = None
    node._scope = None
    size, names = layout.batch_size, layout.names
    shapes = [getattr(value, "shape", None) for value in values]
    if shapes != list(layout.shapes):
        silent = [isinstance(value, TensorDictBase) and value.is_empty() for value in values]
        shapes = [None if quiet else shape for quiet, shape in zip(silent, shapes, strict=True)]
        size, names = _follow(layout, shapes)
        for value, quiet in zip(values, silent, strict=True):
            if quiet:
                value._adopt(size, names)
    node._batch_size = size
    node._names = names
    return node


def _follow(layout: Layout, shapes: list[Any]) -> tuple[torch.Size, Names]:
    """Return the batch size, and its names, for leaves whose shapes changed.

    All leaves are taken to have changed in one way: a dim taken off at one place, or dims put in
    at one place. The first place that explains every leaf counts. If none does, the batch size
    is the longest beginning that the old one and all the leaves share.
    """
    pairs = [
        (tuple(old), tuple(new))
        for old, new in zip(layout.shapes, shapes, strict=True)
        if old is not None and new is not None
    ]
    size, names = tuple(layout.batch_size), layout.names
    changes = {len(new) - len(old) for old, new in pairs}
    change = changes.pop() if len(changes) == 1 else 0
    if change:
        wide = max(len(old) for old, _ in pairs) + 1
        for at in range(wide):
            if all(_explains(old, new, at, change) for old, new in pairs):
                return _moved(size, names, at, change, pairs[0][1])
    return _shared(size, names, [new for _, new in pairs])


def _explains(old: tuple[int, ...], new: tuple[int, ...], at: int, change: int) -> bool:
    """Return whether ``new`` is ``old`` with ``change`` dims put in (or taken off) at ``at``."""
    if change > 0:
        return len(old) >= at and new[:at] + new[at + change :] == old
    return len(old) >= at - change and old[:at] + old[at - change :] == new


def _moved(
    size: tuple[int, ...], names: Names, at: int, change: int, new: tuple[int, ...]
) -> tuple[torch.Size, Names]:
    """Return the batch size after the change at ``at``, if that is among the batch dims."""
    if change > 0 and at <= len(size):
        size = size[:at] + new[at : at + change] + size[at:]
        names = names and (*names[:at], *[None] * change, *names[at:])
    elif change < 0 and at < len(size):
        size = size[:at] + size[at - change :]
        names = names and (names[:at] + names[at - change :] or None)
    return torch.Size(size), names


def _shared(
    size: tuple[int, ...], names: Names, shapes: list[tuple[int, ...]]
) -> tuple[torch.Size, Names]:
    depth = len(size) if shapes else 0
    while any(shape[:depth] != size[:depth] for shape in shapes):
        depth -= 1
    return torch.Size(size[:depth]), names and (names[:depth] or None)


def _dump(layout: Layout) -> dict[str, Any]:
    return {
        "kind": f"{layout.kind.__module__}.{layout.kind.__qualname__}",
        "keys": list(layout.keys),
        "batch_size": list(layout.batch_size),
        "device": None if layout.device is None else str(layout.device),
        "names": None if layout.names is None else list(layout.names),
        "shapes": [None if shape is None else list(shape) for shape in layout.shapes],
    }


def _undump(dumped: dict[str, Any]) -> Layout:
    kinds = {f"{k.__module__}.{k.__qualname__}": k for k in _kinds(TensorDictBase)}
    return Layout(
        kinds[dumped["kind"]],
        tuple(dumped["keys"]),
        torch.Size(dumped["batch_size"]),
        None if dumped["device"] is None else torch.device(dumped["device"]),
        None if dumped["names"] is None else tuple(dumped["names"]),
        tuple([None if shape is None else torch.Size(shape) for shape in dumped["shapes"]]),
    )


def _kinds(base: type[TensorDictBase]) -> Iterable[type[TensorDictBase]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
