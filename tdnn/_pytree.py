"""The tree as a pytree node, so that torch's transforms map over it.

A transform takes leaves out, changes their shapes, and puts them back: ``vmap`` takes a dim off on
the way in and puts one on at the way out, ``jacrev`` puts dims in front. The tree that comes back
must declare batch dims that its leaves have, so each node's batch size is worked out from how the
shapes below it changed. A branch without a leaf cannot tell, and takes that of the node above it.

The whole tree is one pytree node, branches included: torch then spends on it what it spends on a
flat dict (test_vmap_mlp_speed).
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tdnn._core import Names, TensorDictBase
from tdnn._keys import as_key

__all__ = ["register"]

Shape: TypeAlias = tuple[int, ...]
Pairs: TypeAlias = list[tuple[Shape, Shape]]  # of what stands in a node: its shape before and now


class Layout:
    """What a node is besides its leaves; equal where the keys are, whatever the shapes."""

    __slots__ = ("batch_size", "branches", "device", "keys", "kind", "names", "shapes")

    def __init__(self, node: TensorDictBase, branches: "dict[str, Layout]") -> None:
        self.kind: Any = node._kind
        self.batch_size = node._batch_size
        self.device = node._device
        self.names = node._names
        self.keys = tuple(node._data)
        self.branches = branches
        # Of a whole tree, the shapes of all its leaves; None for a leaf without one, as
        # transforms also pass trees of ints (in_dims).
        self.shapes: list[Shape | None] = []

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Layout)
            and self.keys == other.keys
            and self.branches == other.branches
        )

    def __hash__(self) -> int:
        return hash(self.keys)

    def __repr__(self) -> str:
        return f"{self.kind.__name__}{list(self.keys)}"


def register(cls: type[TensorDictBase]) -> None:
    """Make ``cls`` a pytree node whose children are its leaves, depth first."""
    pytree.register_pytree_node(
        cls,
        _flatten,
        _unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=_dump,
        from_dumpable_context=_undump,
        flatten_with_keys_fn=_flatten_with_keys,
    )


# -- out -------------------------------------------------------------------------------------------


def _flatten(node: TensorDictBase) -> tuple[list[Any], Layout]:
    leaves: list[Any] = []
    shapes: list[Shape | None] = []
    layout = _taken_apart(node, leaves, shapes)
    layout.shapes = shapes
    return leaves, layout


def _taken_apart(node: TensorDictBase, leaves: list[Any], shapes: list[Shape | None]) -> Layout:
    branches: dict[str, Layout] = {}
    for key, value in node._data.items():
        if type(value) is not Tensor and isinstance(value, TensorDictBase):
            branches[key] = _taken_apart(value, leaves, shapes)
        else:
            leaves.append(value)
            shapes.append(value.shape if isinstance(value, Tensor) else None)
    return Layout(node, branches)


def _flatten_with_keys(node: TensorDictBase) -> tuple[list[tuple[Any, Any]], Layout]:
    leaves, layout = _flatten(node)
    paths = [path for path, _ in node._leaves()]
    keys: list[Any] = [pytree.MappingKey(as_key(path)) for path in paths]
    return list(zip(keys, leaves, strict=True)), layout


# -- in --------------------------------------------------------------------------------------------


def _unflatten(leaves: Iterable[Any], layout: Layout) -> TensorDictBase:
    values = list(leaves)
    # Hot (test_vmap_mlp_speed): the two usual cases are told by comparing lists.
    now = [value.shape if isinstance(value, Tensor) else None for value in values]
    before = layout.shapes
    if now == before or now.count(None) == len(now):
        return _built(layout, iter(values), None)
    first = before[0][:1] if before[0] else ()
    if first and before == [None if shape is None else (*first, *shape) for shape in now]:
        return _built(layout, iter(values), {})
    return _put_together(layout, iter(values), iter(before))[0]


def _node(layout: Layout, data: dict[str, Any], size: torch.Size, names: Names) -> TensorDictBase:
    node = object.__new__(layout.kind)
    node._data = data
    node._batch_size = size
    node._device = layout.device
    node._names = names
    node._lock = None
    node._scope = None
    return node  # type: ignore[no-any-return]  # the kind is a class of trees


def _built(
    layout: Layout, leaves: Iterator[Any], shorter: dict[torch.Size, torch.Size] | None
) -> TensorDictBase:
    """Return a node whose leaves have the shapes they had, or (``shorter``) lost their first dim.

    ``shorter`` remembers the batch sizes that were cut, as most nodes have the same.
    """
    branches = layout.branches
    if branches:
        data = {
            key: _built(branches[key], leaves, shorter) if key in branches else next(leaves)
            for key in layout.keys
        }
    else:
        data = dict(zip(layout.keys, leaves, strict=False))  # the leaves go on elsewhere
    size, names = layout.batch_size, layout.names
    if shorter is not None:
        if size not in shorter:
            shorter[size] = size[1:]
        size, names = shorter[size], names and (names[1:] or None)
    return _node(layout, data, size, names)


def _put_together(
    layout: Layout, leaves: Iterator[Any], shapes: Iterator[Shape | None]
) -> tuple[TensorDictBase, bool]:
    """Return a node, and whether anything below it has a shape to tell its batch size by."""
    data: dict[str, Any] = {}
    pairs: Pairs = []
    silent = []
    for key in layout.keys:
        if key in layout.branches:
            data[key], tells = _put_together(layout.branches[key], leaves, shapes)
            if tells:
                pairs.append((layout.branches[key].batch_size, data[key]._batch_size))
            else:
                silent.append(data[key])
        else:
            data[key], old = next(leaves), next(shapes)
            if old is not None and isinstance(data[key], Tensor):
                pairs.append((old, data[key].shape))
    pairs = [(tuple(old), tuple(new)) for old, new in pairs]
    changed = any([old != new for old, new in pairs])
    size, names = layout.batch_size, layout.names
    if changed:
        size, names = _follow(size, names, pairs)
        for value in silent:
            value._adopt(size, names)
    return _node(layout, data, size, names), bool(pairs)


def _follow(size: torch.Size, names: Names, pairs: Pairs) -> tuple[torch.Size, Names]:
    """Return the batch size, and its names, for leaves whose shapes changed.

    All leaves are taken to have changed in one way: a dim taken off at one place, or dims put in
    at one place. The first place that explains every leaf counts. If none does, the batch size
    is the longest beginning that the old one and all the leaves share.
    """
    changes = {len(new) - len(old) for old, new in pairs}
    change = changes.pop() if len(changes) == 1 else 0
    if change:
        for at in range(max([len(old) for old, _ in pairs]) + 1):
            if all([_explains(old, new, at, change) for old, new in pairs]):
                return _moved(size, names, at, change, pairs[0][1])
    return _shared(size, names, [new for _, new in pairs])


def _explains(old: Shape, new: Shape, at: int, change: int) -> bool:
    """Return whether ``new`` is ``old`` with ``change`` dims put in (or taken off) at ``at``."""
    if change > 0:
        return len(old) >= at and new[:at] + new[at + change :] == old
    return len(old) >= at - change and old[:at] + old[at - change :] == new


def _moved(
    size: torch.Size, names: Names, at: int, change: int, new: Shape
) -> tuple[torch.Size, Names]:
    """Return the batch size after the change at ``at``, if that is among the batch dims."""
    dims = tuple(size)
    if change > 0 and at <= len(dims):
        dims = dims[:at] + new[at : at + change] + dims[at:]
        names = names and (*names[:at], *[None] * change, *names[at:])
    elif change < 0 and at < len(dims):
        dims = dims[:at] + dims[at - change :]
        names = names and (names[:at] + names[at - change :] or None)
    return torch.Size(dims), names


def _shared(size: torch.Size, names: Names, shapes: list[Shape]) -> tuple[torch.Size, Names]:
    depth = len(size)
    while any([shape[:depth] != tuple(size[:depth]) for shape in shapes]):
        depth -= 1
    return size[:depth], names and (names[:depth] or None)


# -- torch.export writes layouts to disk -----------------------------------------------------------


def _dump(layout: Layout) -> dict[str, Any]:
    return {
        "kind": f"{layout.kind.__module__}.{layout.kind.__qualname__}",
        "keys": list(layout.keys),
        "branches": {key: _dump(branch) for key, branch in layout.branches.items()},
        "batch_size": list(layout.batch_size),
        "device": None if layout.device is None else str(layout.device),
        "names": None if layout.names is None else list(layout.names),
        "shapes": layout.shapes,
    }


def _undump(dumped: dict[str, Any]) -> Layout:
    kinds = {f"{k.__module__}.{k.__qualname__}": k for k in _kinds(TensorDictBase)}
    node = kinds[dumped["kind"]](None, dumped["batch_size"], dumped["device"], dumped["names"])
    branches = {key: _undump(branch) for key, branch in dumped["branches"].items()}
    layout = Layout(node, branches)
    layout.keys = tuple(dumped["keys"])
    layout.shapes = [None if shape is None else tuple(shape) for shape in dumped["shapes"]]
    return layout


def _kinds(base: type[TensorDictBase]) -> Iterable[type[TensorDictBase]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
