"""The tree as a pytree node, so that torch's transforms map over it.

A transform takes leaves out, changes their shapes, and puts them back: ``vmap`` takes a dim off on
the way in and puts one on at the way out, ``jacrev`` puts dims in front. The tree that comes back
must declare batch dims that its leaves have, so each node's batch size is worked out from how the
shapes below it changed. A branch without a leaf cannot tell, and takes that of the node above it.

The whole tree is one pytree node, branches included: torch then spends on it what it spends on a
flat dict (test_vmap_mlp_speed).
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_exporting
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from tdnn._columns import PLAIN
from tdnn._core import Names, TensorDictBase
from tdnn._declared import common_start
from tdnn._keys import as_key
from tdnn._transforms import dim_taken_off

__all__ = ["register"]

Shape: TypeAlias = tuple[int, ...]
Move: TypeAlias = tuple[int, int, Shape]  # where, how many dims came or went, and which came
Pairs: TypeAlias = list[tuple[Shape, Shape]]  # of what stands in a node: its shape before and now


class Layout(NamedTuple):
    """What a node is besides its leaves, and its branches."""

    kind: Any
    keys: tuple[str, ...]
    batch_size: torch.Size
    device: torch.device | None
    names: Names
    branches: "dict[str, Layout] | None"


# Hot (test_vmap_mlp_speed): a third of the time of calling the class.
_layout = partial(tuple.__new__, Layout)


class Structure(NamedTuple):
    """What a tree is besides its leaves; equal where the keys are, whatever the shapes.

    A tuple, because that can be a constant in what ``torch.export`` traces.
    """

    root: Layout
    shapes: list[
        Shape | None
    ]  # of all leaves; None for what has none, as ints in a tree of in_dims
    is_named: bool  # whether any dim has a name
    is_traced: bool  # whether sizes may stand for others, as in what torch.export traces

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and _same_keys(self.root, other.root)

    def __ne__(self, other: object) -> bool:
        return not self == other  # a tuple has its own

    def __hash__(self) -> int:
        return hash(self.root.keys)

    def __repr__(self) -> str:
        return f"{self.root.kind.__name__}{list(self.root.keys)}"


def _same_keys(one: Layout, other: Layout) -> bool:
    mine, theirs = one.branches or {}, other.branches or {}
    return (
        one.keys == other.keys
        and mine.keys() == theirs.keys()
        and all([_same_keys(branch, theirs[key]) for key, branch in mine.items()])
    )


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


def _flatten(node: TensorDictBase) -> tuple[list[Any], Structure]:
    leaves: list[Any] = []
    names: list[Names] = []
    root = _taken_apart(node, leaves, names)
    return leaves, Structure(root, _shapes(leaves), bool(names), is_exporting())


def _taken_apart(node: TensorDictBase, leaves: list[Any], names: list[Names]) -> Layout:
    """Add the leaves and the names of dims of a node to the lists; return the rest of it."""
    data = node._data
    branches: dict[str, Layout] | None = None
    # Hot (test_vmap_mlp_speed), as is all on the way out and in.
    for key, value in data.items():
        kind = type(value)
        if kind is Tensor or kind is Parameter or not isinstance(value, TensorDictBase):
            leaves.append(value)
        else:
            if branches is None:
                branches = {}
            branches[key] = _taken_apart(value, leaves, names)
    if node._names is not None:
        names.append(node._names)
    return _layout((node._kind, tuple(data), node._batch_size, node._device, node._names, branches))


def _shapes(leaves: list[Any]) -> list[Shape | None]:
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]


def _is_symbolic(leaves: list[Any], shapes: list[Shape | None]) -> bool:
    """Return whether sizes may stand for any, so that to compare them would fix them."""
    if is_exporting():
        return True
    if PLAIN.issuperset(map(type, leaves)):  # hot (test_vmap_mlp_speed): no need to look further
        return False
    return any([isinstance(n, torch.SymInt) for shape in shapes if shape for n in shape])


def _depths(shapes: list[Shape | None]) -> list[int | None]:
    return [None if shape is None else len(shape) for shape in shapes]


def _flatten_with_keys(node: TensorDictBase) -> tuple[list[tuple[Any, Any]], Structure]:
    leaves, layout = _flatten(node)
    paths = [path for path, _ in node._leaves()]
    keys: list[Any] = [pytree.MappingKey(as_key(path)) for path in paths]
    return list(zip(keys, leaves, strict=True)), layout


# -- in --------------------------------------------------------------------------------------------


def _unflatten(leaves: Iterable[Any], structure: Structure) -> TensorDictBase:
    values = list(leaves)
    now, before = _shapes(values), structure.shapes
    symbolic = _is_symbolic(values, now)
    same_depths = symbolic and _depths(now) == _depths(before)
    if same_depths or (structure.is_traced and not is_exporting()):
        return _resized(structure.root, iter(values))
    # The usual cases are told by comparing lists.
    if any([isinstance(value, TensorDictBase) for value in values]):
        return _of_trees(structure.root, iter(values))
    if (not symbolic and now == before) or now.count(None) == len(now):
        return _built(structure.root, iter(values), None)
    size = structure.root.batch_size
    if (
        size
        and not structure.is_named
        and before == [None if shape is None else (size[0], *shape) for shape in now]
        and not dim_taken_off(values[0], before[0])  # the first, or unknown
    ):
        return _built(structure.root, iter(values), [size, size[1:]])
    pairs: Pairs = [
        (tuple(old), tuple(new))
        for old, new in zip(before, now, strict=True)
        if old is not None and new is not None
    ]
    moves = _moves(pairs, most=1 if symbolic else None)
    if len(moves) > 1:  # equal sizes leave open which dim it was
        taken = {dim_taken_off(*pair) for pair in zip(values, before, strict=True)}
        moves = [move for move in moves if {move[0]} == taken] or moves
    if moves:
        return _moved_all(structure.root, iter(values), moves)
    return _put_together(structure.root, iter(values), iter(before))[0]


def _built(
    layout: Layout, leaves: Iterator[Any], shorter: list[torch.Size] | None
) -> TensorDictBase:
    """Return a node whose leaves have the shapes they had, or (``shorter``) lost their first dim
    (which had no name).

    ``shorter`` is the batch size that was last cut and what is left of it, as most nodes have the
    same. (A dict of them would hash sizes, which torch.compile can do for fixed ones only.)
    """
    _, keys, size, _, names, branches = layout
    if branches is None:
        data = dict(zip(keys, leaves, strict=False))  # the leaves go on elsewhere
    else:
        data = {
            key: _built(branches[key], leaves, shorter) if key in branches else next(leaves)
            for key in keys
        }
    if shorter is not None:
        if size != shorter[0]:
            shorter[:] = size, size[1:]
        size = shorter[1]
    return _node(layout, data, size, names)


def _resized(layout: Layout, leaves: Iterator[Any]) -> TensorDictBase:
    """Return a node whose leaves have as many dims as they had, but may have other sizes.

    Such go into a program that ``torch.export`` traces for any size, and come out of it.
    """
    branches = layout.branches or {}
    data = {
        key: _resized(branches[key], leaves) if key in branches else next(leaves)
        for key in layout.keys
    }
    silent = {key for key, branch in branches.items() if not _has_leaf(branch)}
    depth = len(layout.batch_size)
    tells = [data[key] for key in layout.keys if key not in silent]
    told = [value.shape[:depth] for value in tells if isinstance(value, Tensor | TensorDictBase)]
    size = common_start(told) if told else layout.batch_size
    names = layout.names and (layout.names[: len(size)] or None)
    for key in silent:
        data[key]._declare_everywhere(size, names)
    return _node(layout, data, size, names)


def _has_leaf(layout: Layout) -> bool:
    branches = layout.branches or {}
    return len(layout.keys) > len(branches) or any(map(_has_leaf, branches.values()))


def _of_trees(layout: Layout, leaves: Iterator[Any]) -> TensorDictBase:
    """Return a node with trees in the place of leaves, as a derivative of a tree by a tree has.

    Its batch size is what remains true of the one that was noted.
    """
    branches = layout.branches or {}
    data = {
        key: _of_trees(branches[key], leaves) if key in branches else next(leaves)
        for key in layout.keys
    }
    shapes = [value.shape for value in data.values() if isinstance(value, Tensor | TensorDictBase)]
    size = common_start([layout.batch_size, *shapes])
    return _node(layout, data, size, layout.names and (layout.names[: len(size)] or None))


def _put_together(
    layout: Layout, leaves: Iterator[Any], shapes: Iterator[Shape | None]
) -> tuple[TensorDictBase, bool]:
    """Return a node, each by what is below it, as not all leaves changed in the same way.

    Returns also whether anything below has a shape to tell the batch size by.
    """
    data: dict[str, Any] = {}
    pairs: Pairs = []
    silent = []
    branches = layout.branches or {}
    for key in layout.keys:
        if key in branches:
            data[key], tells = _put_together(branches[key], leaves, shapes)
            if tells:
                pairs.append((branches[key].batch_size, data[key]._batch_size))
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
        moves = _moves(pairs)
        if moves:
            size, names = _follow(size, names, moves)
        else:
            size, names = _shared(size, names, pairs)
        for value in silent:
            value._declare_everywhere(size, names)
    return _node(layout, data, size, names), bool(pairs)


def _moved_all(layout: Layout, leaves: Iterator[Any], moves: list[Move]) -> TensorDictBase:
    """Return a node all of whose leaves changed in the same way."""
    branches = layout.branches or {}
    data = {
        key: _moved_all(branches[key], leaves, moves) if key in branches else next(leaves)
        for key in layout.keys
    }
    return _node(layout, data, *_follow(layout.batch_size, layout.names, moves))


def _node(layout: Layout, data: dict[str, Any], size: torch.Size, names: Names) -> TensorDictBase:
    node: TensorDictBase = object.__new__(layout.kind)
    node._data, node._batch_size, node._names = data, size, names
    node._device, node._lock, node._scope = layout.device, None, None
    if layout.device is not None:
        _follow_device(node)
    return node


def _follow_device(node: TensorDictBase) -> None:
    """Declare the device that the entries have, if they have been moved to another one.

    A branch without an entry cannot tell, and takes that of the node above it.
    """
    held: list[torch.device | None] = []
    silent: list[TensorDictBase] = []
    for value in node._data.values():
        if isinstance(value, TensorDictBase) and not value._data:
            silent.append(value)
        elif isinstance(value, Tensor | TensorDictBase):
            held.append(value.device)
    if held and held.count(node._device) < len(held):
        node._device = held[0] if held.count(held[0]) == len(held) else None
        for value in silent:
            value._declare_device(node._device)


def _moves(pairs: Pairs, most: int | None = None) -> list[Move]:
    """Return the ways in which all shapes can have changed, the most likely first.

    Either a dim was taken off, or dims were put in, at one place that is the same for all.
    ``most`` are looked for, as to look on fixes sizes that may stand for any.
    """
    changes = {len(new) - len(old) for old, new in pairs}
    change = changes.pop() if len(changes) == 1 else 0
    if not change:
        return []
    found: list[Move] = []
    for at in range(max([len(old) for old, _ in pairs]) + 1):
        put_in = [new[at : at + change] if change > 0 else () for _, new in pairs]
        same = all([dims == put_in[0] for dims in put_in])
        if same and all([_explains(old, new, at, change) for old, new in pairs]):
            found.append((at, change, put_in[0]))
            if len(found) == most:
                break
    return found


def _explains(old: Shape, new: Shape, at: int, change: int) -> bool:
    """Return whether ``new`` is ``old`` with ``change`` dims put in (or taken off) at ``at``."""
    if change > 0:
        return len(old) >= at and new[:at] + new[at + change :] == old
    return len(old) >= at - change and old[:at] + old[at - change :] == new


def _follow(size: torch.Size, names: Names, moves: list[Move]) -> tuple[torch.Size, Names]:
    """Return the batch size and its names after the first of the moves.

    Where equal sizes leave open which dim was taken off, a name that is in doubt is dropped.
    """
    after, called = _moved(size, names, moves[0])
    for move in moves[1:]:
        other, names_then = _moved(size, names, move)
        if called is not None and other == after:
            pairs = zip(called, names_then or (None,) * len(called), strict=True)
            called = tuple([one if one == two else None for one, two in pairs])
    return after, called if called and any(called) else None


def _moved(size: torch.Size, names: Names, move: Move) -> tuple[torch.Size, Names]:
    """Return the batch size after a change, if that is among the batch dims."""
    at, change, put_in = move
    dims = tuple(size)
    if change > 0 and at <= len(dims):
        dims = dims[:at] + put_in + dims[at:]
        names = names and (*names[:at], *[None] * change, *names[at:])
    elif change < 0 and at < len(dims):
        dims = dims[:at] + dims[at - change :]
        names = names and (names[:at] + names[at - change :] or None)
    return torch.Size(dims), names


def _shared(size: torch.Size, names: Names, pairs: Pairs) -> tuple[torch.Size, Names]:
    """Return the longest beginning that the old batch size and all the shapes share.

    Where no shape gained or lost a dim, as when a chunked ``vmap`` puts its chunks together, the
    sizes may be other ones than before; a dim with another size loses its name.
    """
    before, first = size, pairs[0][1]
    if all([len(old) == len(new) for old, new in pairs]):
        size = torch.Size(first[: len(size)])
    size = common_start([size, *[new for _, new in pairs]])
    if names is not None:
        kept = zip(names, size, before, strict=False)  # the size may be shorter now
        names = tuple([name if now == then else None for name, now, then in kept])
    return size, names if names and any(names) else None


# -- torch.export writes layouts to disk -----------------------------------------------------------


def _dump(structure: Structure) -> dict[str, Any]:
    return {
        "root": _dumped(structure.root),
        "shapes": [None if shape is None else _dumped_size(shape) for shape in structure.shapes],
        "is_named": structure.is_named,
        "is_traced": structure.is_traced,
    }


def _dumped_size(size: Shape) -> list[int]:
    """Return a size as plain ints, with -1 for one that stands for any."""
    return [n if type(n) is int else -1 for n in size]


def _dumped(layout: Layout) -> dict[str, Any]:
    return {
        "kind": f"{layout.kind.__module__}.{layout.kind.__qualname__}",
        "keys": list(layout.keys),
        "batch_size": _dumped_size(layout.batch_size),
        "device": None if layout.device is None else str(layout.device),
        "names": None if layout.names is None else list(layout.names),
        "branches": {key: _dumped(branch) for key, branch in (layout.branches or {}).items()},
    }


def _undump(dumped: dict[str, Any]) -> Structure:
    shapes: list[Shape | None] = [
        None if shape is None else torch.Size(shape) for shape in dumped["shapes"]
    ]
    return Structure(_undumped(dumped["root"]), shapes, dumped["is_named"], dumped["is_traced"])


def _undumped(dumped: dict[str, Any]) -> Layout:
    kinds = {f"{k.__module__}.{k.__qualname__}": k for k in _kinds(TensorDictBase)}
    device, names = dumped["device"], dumped["names"]
    return Layout(
        kinds[dumped["kind"]],
        tuple(dumped["keys"]),
        torch.Size(dumped["batch_size"]),
        None if device is None else torch.device(device),
        None if names is None else tuple(names),
        {key: _undumped(branch) for key, branch in dumped["branches"].items()} or None,
    )


def _kinds(base: type[TensorDictBase]) -> Iterable[type[TensorDictBase]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
