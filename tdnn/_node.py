"""One node of the tree: its slots, the walks over it, and the only ways in which it changes.

A node holds ``_data``, a dict from ``str`` to a leaf (a tensor) or a branch (another node).
Everything above builds on the primitives here: ``_leaves`` walks over all leaves, ``_rebuild``
maps a function over them into a new tree, ``_zip`` does so for two trees, and ``_put``, ``_drop``
and ``_refill`` change a node.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from tdnn._keys import Path, as_key, listing
from tdnn.errors import MissingKeyError

__all__ = ["IsLeaf", "Names", "Node", "Scope"]

Names: TypeAlias = tuple[str | None, ...] | None
IsLeaf: TypeAlias = Callable[[type], bool]

_new = object.__new__


class Scope(ABC):
    """What a ``with`` block on a tree begins and ends; one object for each block.

    Methods that can be undone (``lock_``, ``unlock_``, ``flatten_keys``, ``unflatten_keys``) leave
    one on the tree that they return, and ``with`` takes it from there. A scope does not refer to
    that tree, so that no cycle keeps it alive.
    """

    __slots__ = ("entered", "outer")

    def __init__(self) -> None:
        self.entered = False
        self.outer: Scope | None = None

    def enter(self, node: Any) -> None:  # noqa: B027  # most blocks need nothing
        """Begin the block on ``node``."""

    @abstractmethod
    def leave(self, node: Any, failed: bool) -> None:
        """End the block on ``node``; ``failed`` says that an exception passes through it."""


class Node:
    """The slots of a node and the primitives on them; nothing here is checked or locked."""

    __slots__ = (
        "__weakref__",
        "_batch_size",
        "_data",
        "_device",
        "_lock",
        "_memory",
        "_names",
        "_scope",
    )

    # Classes that lower layers make and higher ones define; each is set beside its definition.
    _kind: ClassVar[Any]  # of what an operation on this class returns
    _plain_kind: ClassVar[Any]  # TensorDict itself
    _swap_kind: ClassVar[Any]
    _params_kind: ClassVar[Any]
    _lazy_kind: ClassVar[Any]

    _data: dict[str, Any]
    _batch_size: torch.Size
    _device: torch.device | None
    _names: Names
    _lock: list["weakref.ref[Node]"] | None  # None: unlocked; else the locked parents
    _scope: Scope | None
    _memory: Any  # of the last swap into a module; unset before the first one

    def _like(self, data: dict[str, Any], batch_size: torch.Size, names: Names = None) -> Self:
        """Return a new unlocked node on this one's device; nothing is checked."""
        node: Self = _new(self._kind)
        node._data = data
        node._batch_size = batch_size
        node._device = self._device
        node._names = names
        node._lock = None
        node._scope = None
        return node

    def _dicts(self) -> tuple[dict[str, Any], ...]:
        """Return the dicts that hold the entries; ``_data`` may be made of several."""
        return (self._data,)

    def _put(self, key: str, value: Any) -> None:
        """Store an admitted value; the lock was checked."""
        self._data[key] = value

    def _drop(self, key: str) -> None:
        """Remove an entry that is there; the lock was checked."""
        del self._data[key]

    def _refill(self, data: dict[str, Any]) -> None:
        """Hold exactly ``data``, in its order; the dict object stays, because swaps refer to it."""
        mine = self._data
        mine.clear()
        mine.update(data)

    def _leaves(self, prefix: Path = (), is_leaf: IsLeaf | None = None) -> list[tuple[Path, Any]]:
        """Return ``(path, leaf)`` for every leaf, depth first."""
        found: list[tuple[Path, Any]] = []
        self._collect(prefix, found, is_leaf)
        return found

    def _collect(self, prefix: Path, found: list[tuple[Path, Any]], is_leaf: IsLeaf | None) -> None:
        for key, value in self._data.items():
            path = (*prefix, key)
            kind = type(value)
            # The two exact types come first: a test of identity against an isinstance call.
            if (
                kind is Tensor
                or kind is Parameter
                or not isinstance(value, Node)
                or (is_leaf is not None and is_leaf(kind))
            ):
                found.append((path, value))
            else:
                value._collect(path, found, is_leaf)

    def _values(self) -> list[Any]:
        """Return every leaf, depth first, without its path."""
        found: list[Any] = []
        _add_values(self._data, found)
        return found

    def _refuse_lost_write(self) -> None:
        """Raise if entries are made anew when they are read: a write into one would be lost."""

    def _refuse_lost_writes(self) -> None:
        """Raise if that is so here or in a branch below; called before all leaves are written."""
        self._refuse_lost_write()
        for branch in self._branches():
            branch._refuse_lost_writes()

    def _branches(self) -> Iterator[Any]:
        """Yield the branches directly below this node."""
        for value in self._data.values():
            if type(value) is not Tensor and isinstance(value, Node):
                yield value

    # -- mapping -----------------------------------------------------------------------------

    def _rebuild(
        self,
        fn: Callable[[Any], Any],
        batch_size: torch.Size,
        names: Names,
        memo: dict[Any, Any] | None = None,
        tag: Callable[[Any], Any] = id,
    ) -> Self:
        """Return a new tree of ``fn(leaf)``, with ``batch_size`` in place of this node's own.

        ``fn`` is called once for a leaf that stands under several keys, so that a tie stays a tie
        and an in-place ``fn`` changes it once. A branch whose batch size goes further than this
        node's keeps its further dims behind the new ones.
        """
        if memo is None:
            memo = {}
            if is_compiling():
                tag = itself  # an id would be a guard, and every call a recompile
        depth = len(self._batch_size)
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            kind = type(value)
            if kind is Tensor or kind is Parameter or not isinstance(value, Node):
                at = tag(value)
                if at in memo:
                    data[key] = memo[at][1]
                else:
                    data[key] = made = fn(value)
                    # With the leaf, whose id would pass on if it were made by reading and freed.
                    memo[at] = value, made
            elif len(value._batch_size) == depth:
                data[key] = value._rebuild(fn, batch_size, names, memo, tag)
            else:
                further = torch.Size((*batch_size, *value._batch_size[depth:]))
                called = extended(names, len(batch_size), value, depth)
                data[key] = value._rebuild(fn, further, called, memo, tag)
        return self._like(data, batch_size, names)

    def _shallow_copy(self) -> Self:
        """Return new nodes over the same leaves."""
        data = self._data.copy()
        # Hot (test_exclude_nested): leaves are copied by the dict, and the loop is for branches.
        for key, value in data.items():
            if type(value) is not Tensor and isinstance(value, Node):
                data[key] = value._shallow_copy()
        return self._like(data, self._batch_size, self._names)

    def _zip(
        self, fn: Callable[[Any, Any], Any], other: "Node", roots: "tuple[Node, Node] | None" = None
    ) -> Self:
        """Return a new tree of ``fn(leaf, other_leaf)``, paired by key in this tree's order."""
        one, two = roots = roots or (self, other)
        theirs = other._data
        if self._data.keys() != theirs.keys():
            raise one._unpaired(two)
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            match = theirs[key]
            if isinstance(value, Node) is not isinstance(match, Node):
                raise one._unpaired(two)
            if isinstance(value, Node):
                data[key] = value._zip(fn, match, roots)
            else:
                data[key] = fn(value, match)
        return self._like(data, self._batch_size, self._names)

    def _unpaired(
        self,
        other: "Node",
        names: tuple[str, str] = ("the first", "the second"),
        what: str = "the trees differ",
    ) -> MissingKeyError:
        """Return the error for two trees whose keys differ, with every key that has no partner."""
        here: list[Path] = []
        there: list[Path] = []
        mixed: list[Path] = []
        self._compare(other, (), here, there, mixed)
        faults = [
            f"{text} {listing(map(as_key, paths))}"
            for text, paths in (
                (f"only {names[0]} has", here),
                (f"only {names[1]} has", there),
                ("a leaf in one and a branch in the other:", mixed),
            )
            if paths
        ]
        return MissingKeyError(f"{what}: {'; '.join(faults)}")

    def _compare(
        self, other: "Node", above: Path, here: list[Path], there: list[Path], mixed: list[Path]
    ) -> None:
        """Add the paths that only this tree has, only the other, and both, of two kinds."""
        theirs = other._data
        there += [(*above, key) for key in theirs if key not in self._data]
        for key, value in self._data.items():
            path = (*above, key)
            if key not in theirs:
                here.append(path)
            elif isinstance(value, Node) is not isinstance(theirs[key], Node):
                mixed.append(path)
            elif isinstance(value, Node):
                value._compare(theirs[key], path, here, there, mixed)


def _add_values(data: dict[str, Any], found: list[Any]) -> None:
    # Hot (test_add_td)
    for value in data.values():
        kind = type(value)
        if kind is Tensor or kind is Parameter or not isinstance(value, Node):
            found.append(value)
        else:
            _add_values(value._data, found)


def itself(value: Any) -> Any:
    return value


def extended(names: Names, count: int, branch: Node, depth: int) -> Names:
    """Return the names of a branch in which ``count`` dims, called ``names``, replace the first
    ``depth``.
    """
    own = branch._names
    if names is None:
        return None if own is None or not any(own[depth:]) else (*[None] * count, *own[depth:])
    return (*names, *(own or (None,) * len(branch._batch_size))[depth:])
