"""The tree: its nodes, its lock, reading and writing entries, and the primitives beneath the rest.

A node holds ``_data``, a dict from ``str`` to a leaf (a tensor) or a branch (another node). What a
user writes is checked once, in :meth:`TensorDictBase._admit`; everything behind that boundary
trusts the dicts and loops over them. Every other file builds on a handful of primitives:
``_entry`` and ``_home`` walk to an entry, ``_leaves`` walks over all of them, ``_rebuild`` maps a
function over the leaves into a new tree, ``_zip`` does the same for two trees, and ``_put``,
``_drop`` and ``_refill`` are the only ways in which a node changes.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias, Union, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from tdnn._keys import NestedKey, Path, as_key, as_path, hint, listing
from tdnn.errors import KeyConflictError, LockedError, MissingKeyError

__all__ = ["Entry", "IsLeaf", "Names", "Scope", "TensorDictBase"]

Names: TypeAlias = tuple[str | None, ...] | None
Entry: TypeAlias = Union[Tensor, "TensorDictBase"]
IsLeaf: TypeAlias = Callable[[type], bool]
Device: TypeAlias = torch.device | str | int

_new = object.__new__
_NUMBERS = (bool, int, float, complex, list, tuple)


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

    def enter(self, node: "TensorDictBase") -> None:  # noqa: B027  # most blocks need nothing
        """Begin the block on ``node``."""

    @abstractmethod
    def leave(self, node: "TensorDictBase", failed: bool) -> None:
        """End the block on ``node``; ``failed`` says that an exception passes through it."""


class TensorDictBase:
    """A node of the tree; :class:`tdnn.TensorDict` is this and its themes."""

    __slots__ = ("__weakref__", "_batch_size", "_data", "_device", "_lock", "_names", "_scope")

    # Classes that lower layers make and higher ones define; each is set beside its definition.
    _kind: ClassVar[type["TensorDictBase"]]  # of what an operation on this class returns
    _swap_kind: ClassVar[Any]
    _params_kind: ClassVar[Any]
    _lazy_kind: ClassVar[Any]

    _data: dict[str, Any]
    _batch_size: torch.Size
    _device: torch.device | None
    _names: Names
    _lock: list["weakref.ref[TensorDictBase]"] | None  # None: unlocked; else the locked parents
    _scope: Scope | None

    def __init__(
        self,
        source: Mapping[Any, Any] | Self | None = None,
        batch_size: Sequence[int] | int | None = None,
        device: Device | None = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        if batch_size is None and isinstance(source, TensorDictBase):
            batch_size = source._batch_size
            device = source._device if device is None else device
            names = source._names if names is None else names
        self._data = {}
        self._batch_size = _as_size(batch_size)
        self._device = None if device is None else _as_device(device)
        self._names = None
        self._lock = None
        self._scope = None
        if source:
            self._fill(source, non_blocking or False)
        elif source is not None and not isinstance(source, Mapping | TensorDictBase):
            raise TypeError(f"{type(self).__name__} is made from a mapping or a tree, not {source!r}")
        if kwargs:
            self._fill(kwargs, non_blocking or False)
        if names is not None:
            self.names = names
        if lock:
            self._hold(None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_kind" not in cls.__dict__:
            cls._kind = cls

    # -- nodes -------------------------------------------------------------------------------

    def _like(self, data: dict[str, Any], batch_size: torch.Size, names: Names = None) -> Self:
        """Return a new unlocked node on this one's device; nothing is checked."""
        node = _new(self._kind)
        node._data = data
        node._batch_size = batch_size
        node._device = self._device
        node._names = names
        node._lock = None
        node._scope = None
        return cast(Self, node)

    def _dicts(self) -> tuple[dict[str, Any], ...]:
        """Return the dicts that hold the entries themselves, as ``_data`` may be made of several."""
        return (self._data,)

    def _put(self, key: str, value: Entry) -> None:
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

    # -- the boundary ------------------------------------------------------------------------

    def _fill(self, source: Mapping[Any, Any] | Self, non_blocking: bool) -> None:
        """Take the entries of a mapping, whose keys may be tuples, into a node being made."""
        for key, value in _entries(source):
            if type(key) is str:
                if key in self._data:
                    self._meet(key, value, non_blocking)
                else:
                    self._put(key, self._admit(value, key, non_blocking))
                continue
            path = as_path(key)
            branch = {path[-1]: value}
            for step in path[-2:0:-1]:
                branch = {step: branch}
            self._meet(path[0], branch if len(path) > 1 else value, non_blocking)

    def _meet(self, key: str, value: Any, non_blocking: bool) -> None:
        """Put a value at a key that may be there already: branches merge, leaves collide."""
        mine = self._data.get(key)
        if mine is None:
            self._put(key, self._admit(value, key, non_blocking))
        elif isinstance(mine, TensorDictBase) and isinstance(value, Mapping | TensorDictBase):
            mine._fill(cast(Any, value), non_blocking)
        else:
            raise KeyConflictError(f"two entries for the key {key!r}")

    def _admit(self, value: Any, key: NestedKey, non_blocking: bool = False) -> Entry:
        """Return ``value`` as this node may hold it, or say why it cannot."""
        if not isinstance(value, Tensor | TensorDictBase):
            value = self._convert(value, key)
        size = self._batch_size
        if size and value.shape[: len(size)] != size:
            value = self._fit(value, key)
        if self._device is not None and value.device != self._device:
            value = cast(Any, value).to(self._device, non_blocking=non_blocking)
        return cast(Entry, value)

    def _convert(self, value: Any, key: NestedKey) -> Entry:
        """Return a number, an array or a mapping as a leaf or a branch."""
        if isinstance(value, Mapping):
            branch = self._like({}, self._batch_size, self._names)
            branch._fill(value, False)
            return branch
        if isinstance(value, _NUMBERS) or hasattr(value, "__array__"):
            try:
                return torch.as_tensor(value, device=self._device)
            except (TypeError, ValueError, RuntimeError) as err:
                err.add_note(f"while making a tensor of the value for key {key!r}")
                raise
        raise TypeError(
            f"key {key!r}: a tree holds tensors, numbers, arrays, mappings and trees, "
            f"not {type(value).__name__}"
        )

    def _fit(self, value: Entry, key: NestedKey) -> Entry:
        """Return a branch with this node's batch size; a leaf that does not have it is an error."""
        size = self._batch_size
        if isinstance(value, TensorDictBase):
            branch = value._rebuild(_itself, value._batch_size, value._names)
            try:
                branch._set_batch_size(size)
            except ValueError as err:
                raise ValueError(f"cannot set branch {key!r}: {err}") from None
            return branch
        raise ValueError(
            f"key {key!r}: shape {tuple(value.shape)} does not begin with the batch size "
            f"{tuple(size)}"
        )

    # -- walking -----------------------------------------------------------------------------

    def _entry(self, path: Path) -> Entry:
        """Return what is at ``path``, or raise an error that names the nearest key."""
        node: Any = self
        for depth, step in enumerate(path):
            if not isinstance(node, TensorDictBase):
                raise MissingKeyError(
                    f"{as_key(path)!r} goes through {as_key(path[:depth])!r}, which is a leaf"
                )
            try:
                node = node._data[step]
            except KeyError:
                raise node._missing(step, path) from None
        return cast(Entry, node)

    def _missing(self, step: str, path: Path) -> MissingKeyError:
        return MissingKeyError(
            f"{as_key(path)!r} is not in the {type(self).__name__}: "
            f"no {step!r} among {listing(self._data)}{hint(step, self._data)}"
        )

    def _home(self, path: Path) -> tuple["TensorDictBase", Path]:
        """Return the deepest branch on the way to ``path`` that exists, and what is left to go."""
        node: TensorDictBase = self
        for depth, step in enumerate(path[:-1]):
            below = node._data.get(step)
            if below is None:
                return node, path[depth:]
            if not isinstance(below, TensorDictBase):
                raise MissingKeyError(
                    f"cannot set {as_key(path)!r}: {as_key(path[: depth + 1])!r} is a leaf; "
                    "delete it first to put a branch there"
                )
            node = below
        return node, path[-1:]

    def _leaves(self, prefix: Path = (), is_leaf: IsLeaf | None = None) -> list[tuple[Path, Any]]:
        """Return ``(path, leaf)`` for every leaf, depth first."""
        found: list[tuple[Path, Any]] = []
        self._collect(prefix, found, is_leaf)
        return found

    def _collect(
        self, prefix: Path, found: list[tuple[Path, Any]], is_leaf: IsLeaf | None
    ) -> None:
        for key, value in self._data.items():
            path = (*prefix, key)
            kind = type(value)
            # The two exact types come first: a test of identity against an isinstance call.
            if kind is Tensor or kind is Parameter or not isinstance(value, TensorDictBase):
                found.append((path, value))
            elif is_leaf is not None and is_leaf(kind):
                found.append((path, value))
            else:
                value._collect(path, found, is_leaf)

    def _branches(self) -> Iterator["TensorDictBase"]:
        """Yield the branches directly below this node."""
        for value in self._data.values():
            if isinstance(value, TensorDictBase):
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
            if torch.compiler.is_compiling():
                tag = _itself  # a compiled caller would recompile for every new id; else ids are fast
        depth = len(self._batch_size)
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            kind = type(value)
            if kind is Tensor or kind is Parameter or not isinstance(value, TensorDictBase):
                done = memo.get(tag(value))
                if done is None:
                    memo[tag(value)] = done = fn(value)
                data[key] = done
            elif len(value._batch_size) == depth:
                data[key] = value._rebuild(fn, batch_size, names, memo, tag)
            else:
                further = torch.Size((*batch_size, *value._batch_size[depth:]))
                data[key] = value._rebuild(fn, further, _extend(names, value, depth), memo, tag)
        return self._like(data, batch_size, names)

    def _zip(self, fn: Callable[[Any, Any], Any], other: "TensorDictBase") -> Self:
        """Return a new tree of ``fn(leaf, other_leaf)``, paired by key in this tree's order."""
        theirs = other._data
        if self._data.keys() != theirs.keys():
            raise self._unpaired(other)
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            if isinstance(value, TensorDictBase):
                match = theirs[key]
                if not isinstance(match, TensorDictBase):
                    raise MissingKeyError(f"{key!r} is a branch here and a leaf there")
                data[key] = value._zip(fn, match)
            elif isinstance(theirs[key], TensorDictBase):
                raise MissingKeyError(f"{key!r} is a leaf here and a branch there")
            else:
                data[key] = fn(value, theirs[key])
        return self._like(data, self._batch_size, self._names)

    def _unpaired(self, other: "TensorDictBase") -> MissingKeyError:
        """Return the error for two trees whose keys differ, with every key that has no partner."""
        here = listing(key for key in self._data if key not in other._data)
        there = listing(key for key in other._data if key not in self._data)
        return MissingKeyError(f"the trees differ: only the first has {here}, only the second {there}")

    # -- reading and writing entries ---------------------------------------------------------

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """Return the entry at ``key``, or ``default`` when it is not there.

        Args:
            key: a ``str``, or a tuple for a nested entry.
            default: returned for a missing key.

        Returns:
            The leaf or branch itself, not a copy.

        Raises:
            MissingKeyError: ``key`` goes through a leaf.

        Example:
            >>> td = TensorDict({"a": {"b": torch.ones(3)}}, [3])
            >>> td.get(("a", "b")), td.get("zzz")
            (tensor([1., 1., 1.]), None)
        """
        if type(key) is str:
            return self._data.get(key, default)
        node: Any = self
        try:
            for step in key:
                node = node._data[step]
        except (KeyError, TypeError, AttributeError):
            return self._get_slowly(key, default)
        return node

    def _get_slowly(self, key: NestedKey, default: Any) -> Any:
        """Serve keys with inner tuples, missing keys and wrong ones."""
        path = as_path(key)
        node: Any = self
        for depth, step in enumerate(path):
            if not isinstance(node, TensorDictBase):
                return self._entry(path[: depth + 1])
            if step not in node._data:
                return default
            node = node._data[step]
        return node

    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
    ) -> Self:
        """Write an entry, making the branches on the way, and return the tree.

        Args:
            key: a ``str``, or a tuple for a nested entry.
            item: a tensor ``(*B, ...)``, a tree, a mapping (which becomes a branch), a number or
                an array (which becomes a tensor). Held as it is, not copied, unless the tree has
                another device.
            inplace: copy into the existing tensor, if the key is there.
            non_blocking: for a copy between devices.

        Raises:
            LockedError: the tree is locked and ``inplace`` is false or the key is new.
            ValueError: the shape does not begin with the batch size.
            TypeError: the key or the value is of a kind that a tree does not hold.

        Example:
            >>> TensorDict({}, [3]).set(("a", "b"), torch.ones(3))["a", "b"]
            tensor([1., 1., 1.])
        """
        if inplace and key in self:
            return self.set_(key, item, non_blocking=non_blocking)
        if type(key) is str:
            node, way = self, (key,)
        else:
            node, way = self._home(as_path(key))  # type: ignore[assignment]  # any node will do
        if node._lock is not None:
            raise _locked("set", key)
        value = node._admit(item, key, non_blocking)
        if isinstance(value, TensorDictBase):
            self._refuse_cycle(value, key)
        node._branch_off(way[:-1])._put(way[-1], value)
        return self

    def _branch_off(self, way: Path) -> "TensorDictBase":
        """Return the last branch of ``way`` below this node, making those that are not there."""
        node: TensorDictBase = self
        for step in way:
            if step not in node._data:
                node._put(step, node._like({}, node._batch_size, node._names))
            node = node._data[step]
        return node

    def _refuse_cycle(self, value: "TensorDictBase", key: NestedKey) -> None:
        """Raise if this tree stands somewhere in ``value``, which is about to stand in it."""
        if value is self:
            raise ValueError(f"cannot set {key!r}: a tree cannot hold itself")
        for below in value._branches():
            self._refuse_cycle(below, key)

    def set_(self, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Self:
        """Copy a value into an existing leaf or branch, which keeps its identity and storage.

        Raises:
            MissingKeyError: the key is not there.
            ValueError: the shapes differ; a number or 0-d tensor fills the leaf.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3], lock=True)
            >>> td.set_("a", torch.ones(3))["a"]
            tensor([1., 1., 1.])
        """
        for leaf, value in self._copies(key, self._entry(as_path(key)), item):
            leaf.copy_(value, non_blocking=non_blocking)
        return self

    def _copies(self, key: NestedKey, target: Any, item: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs to ``copy_`` for an in-place write, after checking all of them."""
        if isinstance(target, TensorDictBase):
            if not isinstance(item, Mapping | TensorDictBase):
                raise TypeError(f"{key!r} is a branch; write a tree or a mapping into it")
            pairs = []
            for name, value in _entries(item):
                path = as_path(name)
                pairs += self._copies((key, name), target._entry(path), value)
            return pairs
        value = item if isinstance(item, Tensor) else self._convert(item, key)
        if not isinstance(value, Tensor):
            raise TypeError(f"{key!r} is a leaf; write a tensor or a number into it")
        if value.shape != target.shape and value.ndim:
            raise ValueError(
                f"key {key!r}: cannot write shape {tuple(value.shape)} into "
                f"shape {tuple(target.shape)} in place"
            )
        return [(target, value)]

    def __delitem__(self, key: NestedKey) -> None:
        path = as_path(key)
        self._entry(path)
        node, way = self._home(path)
        if node._lock is not None:
            raise _locked("delete", key)
        node._drop(way[0])

    def del_(self, key: NestedKey) -> Self:
        """Delete an entry and return the tree.

        Raises:
            MissingKeyError: the key is not there.
            LockedError: the tree is locked.

        Example:
            >>> list(TensorDict({"a": 1, "b": 2}).del_("a").keys())
            ['b']
        """
        del self[key]
        return self

    def __contains__(self, key: object) -> bool:
        if type(key) is str:
            return key in self._data
        node: Any = self
        for step in as_path(cast(NestedKey, key)):
            if not isinstance(node, TensorDictBase) or step not in node._data:
                return False
            node = node._data[step]
        return True

    # -- shape, device, names ----------------------------------------------------------------

    @property
    def batch_size(self) -> torch.Size:
        """The dims that every leaf begins with; set it to declare more or fewer of them."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, size: Sequence[int] | int) -> None:
        if self._lock is not None and _as_size(size) != self._batch_size:
            raise _locked("change the batch size of", "the tree")
        self._set_batch_size(_as_size(size))

    shape = batch_size

    def _set_batch_size(self, size: torch.Size) -> None:
        """Declare ``size`` here, and below where a branch does not have it, after checking all."""
        depth = len(size)
        wrong = [as_key(path) for path, leaf in self._leaves() if leaf.shape[:depth] != size]
        if wrong:
            shapes = [tuple(self._entry(as_path(key)).shape) for key in wrong]
            raise ValueError(
                f"batch size {tuple(size)} does not fit {listing(wrong)} of shapes {shapes}"
            )
        self._declare(size)

    def _declare(self, size: torch.Size) -> None:
        self._batch_size = size
        if self._names is not None:
            self._names = (*self._names, *[None] * len(size))[: len(size)]
        for branch in self._branches():
            if branch._batch_size[: len(size)] != size:
                branch._declare(size)

    def _adopt(self, size: torch.Size, names: Names) -> None:
        """Take a batch size here and in every branch; there is no leaf to contradict it."""
        self._batch_size = size
        self._names = names
        for branch in self._branches():
            branch._adopt(size, names)

    @property
    def batch_dims(self) -> int:
        """The number of batch dims."""
        return len(self._batch_size)

    ndim = batch_dims

    def dim(self) -> int:
        """Return the number of batch dims.

        Example:
            >>> TensorDict({}, [3, 4]).dim()
            2
        """
        return len(self._batch_size)

    ndimension = dim

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the batch size, or its entry for ``dim``.

        Example:
            >>> TensorDict({}, [3, 4]).size(1)
            4
        """
        return self._batch_size if dim is None else self._batch_size[dim]

    def numel(self) -> int:
        """Return the number of batch elements, 1 without batch dims.

        Example:
            >>> TensorDict({}, [3, 4]).numel()
            12
        """
        return self._batch_size.numel()

    @property
    def device(self) -> torch.device | None:
        """The device that every entry is moved to when it is set; None leaves them where they are."""
        return self._device

    @property
    def names(self) -> list[str | None]:
        """The names of the batch dims, None for a dim without one."""
        return [None] * len(self._batch_size) if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._set_names(None if names is None else tuple(names))

    def _set_names(self, names: Names) -> None:
        depth = len(self._batch_size)
        if names is not None:
            given = [name for name in names if name is not None]
            if len(names) != depth or len(set(given)) != len(given):
                raise ValueError(
                    f"{list(names)} cannot name {depth} batch dims: one name each, no name twice"
                )
            names = names if given else None
        self._names = names
        for branch in self._branches():
            further = len(branch._batch_size) - depth
            own = (None,) * further if branch._names is None else branch._names[depth:]
            branch._set_names((*(names or (None,) * depth), *own))

    def is_empty(self) -> bool:
        """Return whether there is no leaf anywhere in the tree.

        Example:
            >>> TensorDict({"a": {}}).is_empty()
            True
        """
        return not self._leaves()

    def __len__(self) -> int:
        return self._batch_size[0] if self._batch_size else 0

    def __bool__(self) -> bool:
        raise RuntimeError(
            "a tree has no truth value; use td.is_empty(), len(td.keys()) or (a == b).all()"
        )

    # -- lock --------------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        """Whether entries can no longer be added, removed, renamed or replaced."""
        return self._lock is not None

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def lock_(self) -> Self:
        """Forbid to add, remove, rename or replace entries, here and in every branch.

        Writing into the existing tensors (``set_``, ``update_``, ``add_``) stays possible. As a
        context manager, restore on exit what was before.

        Example:
            >>> td = TensorDict({"a": 1})
            >>> with td.lock_():
            ...     td["b"] = 2
            Traceback (most recent call last):
            ...
            tdnn.errors.LockedError: cannot set 'b': the tree is locked; use unlock_() first, ...
        """
        self._open(_Relock(self._lock is not None))
        self._hold(None)
        return self

    def unlock_(self) -> Self:
        """Allow changes again, here and in every branch.

        As a context manager, restore on exit what was before.

        Raises:
            LockedError: the tree, or a branch of it, also stands in another locked tree.

        Example:
            >>> td = TensorDict({"a": 1}, lock=True)
            >>> with td.unlock_():
            ...     td["b"] = 2
            >>> td.is_locked, list(td.keys())
            (True, ['a', 'b'])
        """
        scope = _Relock(self._lock is not None)
        if self._lock is not None:
            self._refuse_held(None)
            self._release(None)
        self._open(scope)
        return self

    def _hold(self, holder: "weakref.ref[TensorDictBase] | None") -> None:
        """Lock this node, on behalf of the locked parent ``holder`` or on its own."""
        mine: list[weakref.ref[TensorDictBase]] = [] if holder is None else [holder]
        if self._lock is None:
            self._lock = mine
            me = weakref.ref(self)
            for branch in self._branches():
                branch._hold(me)
        else:
            self._lock = self._lock + mine

    def _refuse_held(self, holder: "weakref.ref[TensorDictBase] | None") -> None:
        """Raise if a locked tree other than ``holder`` holds this node or one below it."""
        if any(other is not holder and other() is not None for other in self._lock or ()):
            raise LockedError(
                "cannot unlock: the tree, or a branch of it, is part of another locked tree; "
                "unlock that one first"
            )
        me = weakref.ref(self)
        for branch in self._branches():
            branch._refuse_held(me)

    def _release(self, holder: "weakref.ref[TensorDictBase] | None") -> None:
        self._lock = None
        me = weakref.ref(self)
        for branch in self._branches():
            branch._release(me)

    # -- blocks ------------------------------------------------------------------------------

    def _open(self, scope: Scope) -> None:
        """Leave ``scope`` for the next ``with`` on this tree."""
        before = self._scope
        scope.outer = before if before is None or before.entered else before.outer
        self._scope = scope

    def __enter__(self) -> Self:
        scope = self._scope
        if scope is None or scope.entered:
            raise RuntimeError(
                "`with` needs a change that it can undo, made just before: lock_(), unlock_(), "
                "flatten_keys() or unflatten_keys(); each call serves one block"
            )
        scope.enter(self)
        scope.entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        scope = cast(Scope, self._scope)
        self._scope = scope.outer
        scope.leave(self, kind is not None)

    # -- copies by protocol ------------------------------------------------------------------

    def __getstate__(self) -> tuple[Any, ...]:
        return (self._data, self._batch_size, self._device, self._names, self._lock is not None)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._data, self._batch_size, self._device, self._names, locked = state
        self._lock = None
        self._scope = None
        if locked:
            self._hold(None)


class _Relock(Scope):
    """Puts the lock back as it was when the block was announced."""

    __slots__ = ("_was_locked",)

    def __init__(self, was_locked: bool) -> None:
        super().__init__()
        self._was_locked = was_locked

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        if self._was_locked and node._lock is None:
            node._hold(None)
        elif not self._was_locked and node._lock is not None:
            node._refuse_held(None)
            node._release(None)


def _entries(source: Mapping[Any, Any] | TensorDictBase) -> ItemsView[Any, Any]:
    return (source._data if isinstance(source, TensorDictBase) else source).items()


def _itself(value: Any) -> Any:
    return value


def _extend(names: Names, branch: TensorDictBase, depth: int) -> Names:
    """Return the names of a branch whose dims before ``depth`` are now called ``names``."""
    if branch._names is None:
        return None if names is None else (*names, *[None] * (len(branch._batch_size) - depth))
    return (*(names or ()), *branch._names[depth:]) if names is not None else None


def _as_size(size: Sequence[int] | int | None) -> torch.Size:
    if type(size) is torch.Size:
        return size
    if size is None:
        return torch.Size(())
    return torch.Size((size,) if isinstance(size, int) else tuple(size))


def _as_device(device: Device) -> torch.device:
    """Return the device with its index, so that "cuda" and "cuda:0" are one."""
    made = torch.device(device)
    if made.type == "cuda" and made.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return made


def _locked(action: str, key: NestedKey) -> LockedError:
    return LockedError(
        f"cannot {action} {key!r}: the tree is locked; use unlock_() first, "
        "or write into the existing tensors with set_() or update_()"
    )
