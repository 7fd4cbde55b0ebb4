"""The tree as its users meet it: made from a mapping, read and written by key.

What a user writes is checked once, in :meth:`TensorDictBase._admit`; everything behind that
boundary trusts the dicts and loops over them. ``_entry`` and ``_home`` walk to an entry.
"""

from collections.abc import ItemsView, Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias, Union, cast

import torch
from torch import Size, Tensor

from tdnn._declared import Declared, Device, as_device, as_size, negative, on_device
from tdnn._keys import NestedKey, Path, as_key, as_path, hint, listing
from tdnn._lock import locked
from tdnn._marks import ABSENT
from tdnn._node import IsLeaf, Names, Scope
from tdnn._writes import Write, refuse_unwritable, write
from tdnn.errors import KeyConflictError, MissingKeyError

__all__ = [
    "TREES",
    "Entry",
    "IsLeaf",
    "Names",
    "Scope",
    "TensorDictBase",
    "entries_of",
    "locked",
]

Entry: TypeAlias = Union[Tensor, "TensorDictBase"]

_AS_TENSOR = (bool, int, float, complex, list, tuple)


class TensorDictBase(Declared):
    """A node of the tree; :class:`tdnn.TensorDict` is this and its themes."""

    __slots__ = ()

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
        if type(source) is not dict and source is not None:
            if isinstance(source, TensorDictBase):
                if names is not None:  # they replace those that the source has
                    source = source._shallow_copy()
                    source._set_names(None)
                if batch_size is None:
                    batch_size = source._batch_size
                    device = source._device if device is None else device
                    names = source._names if names is None else names
                source = source._data
            elif not isinstance(source, Mapping):
                raise TypeError(
                    f"{type(self).__name__} is made from a mapping or a tree, not {source!r}"
                )
        if type(batch_size) is tuple:  # Hot (test_creation_empty): the usual kind without a call.
            self._batch_size = size = Size(batch_size)
            for n in size:
                if n < 0:
                    raise negative(size)
        else:
            self._batch_size = as_size(batch_size)
        if device is None:
            self._device = None
        else:
            self._device = place = as_device(device)
            source, kwargs = on_device((source, kwargs), place, non_blocking or False, {})
        self._names = None
        self._lock = None
        self._scope = None
        self._data = {}
        if names is not None:
            self.names = names
        if source:
            self._fill(self._data, cast(Any, source), non_blocking or False)
        if kwargs:
            self._fill(self._data, kwargs, non_blocking or False)
        if lock:
            self._hold(None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_kind" not in cls.__dict__:
            cls._kind = cls

    # -- the boundary ------------------------------------------------------------------------

    def _fill(
        self,
        data: dict[str, Any],
        source: Mapping[Any, Any] | Self,
        non_blocking: bool,
        owned: dict[str, Any] | None = None,
    ) -> None:
        """Add the entries of a mapping, whose keys may be tuples, to the dict of a new node.

        ``owned`` has, by key, the branches that were made on the way (with the like dicts for
        theirs); others may be the user's.
        """
        if type(source) is dict and self._device is None and not data:
            # Hot (test_creation): the dict is copied as a whole, if it has no nested keys, and
            # a tensor needs nothing done to it.
            data.update(source)
            size = self._batch_size
            depth = len(size)
            fits = size  # the last shape that did: most leaves share one
            for key, value in source.items():
                if type(key) is not str:
                    data.clear()
                    break
                if type(value) is Tensor:
                    shape = value.shape if depth else fits
                    if shape == fits:
                        continue
                    if shape[:depth] == size:
                        fits = shape
                        continue
                data[key] = self._admit(value, key)
            else:
                return
        owned = {} if owned is None else owned
        for key, value in entries_of(source):
            self._meet(data, as_path(key), value, non_blocking, owned)

    def _meet(
        self,
        data: dict[str, Any],
        path: Path,
        value: Any,
        non_blocking: bool,
        owned: dict[str, Any],
    ) -> None:
        """Add a value to the dict of a new node; branches merge, leaves collide."""
        key = path[0]
        for step in path[:0:-1]:
            value = {step: value}
        mine = data.get(key)
        if mine is None:
            data[key] = self._admit(value, key, non_blocking)
        elif isinstance(mine, TensorDictBase) and isinstance(value, TREES):
            if key not in owned:  # adding to it would change a tree of the user's
                data[key] = mine = mine._like(dict(mine._data), mine._batch_size, mine._names)
                owned[key] = {}
            mine._fill(mine._data, cast(Any, value), non_blocking, owned[key])
        else:
            raise KeyConflictError(f"two entries for the key {key!r}")

    def _admit(self, value: Any, key: NestedKey, non_blocking: bool = False) -> Entry:
        """Return ``value`` as this node may hold it, or say why it cannot."""
        if type(value) is dict:  # Hot (test_creation_nested_1): the new branch fits.
            return self._branch(value, key)
        if type(value) is not Tensor and not isinstance(value, _KINDS):
            value = self._convert(value, key)
        size = self._batch_size
        if size:
            shape = value.shape
            if shape != size and shape[: len(size)] != size:
                value = self._fit(value, key)
            if self._names is not None and isinstance(value, TensorDictBase):
                value = value._with_dim_names(self._names, key)
        if self._device is not None and value.device != self._device:
            value = cast(Any, value).to(self._device, non_blocking=non_blocking)
        return cast(Entry, value)

    def _convert(self, value: Any, key: NestedKey) -> Entry:
        """Return a number, an array or a mapping as a leaf or a branch."""
        if isinstance(value, Mapping):
            return self._branch(value, key)
        if isinstance(value, _AS_TENSOR) or hasattr(value, "__array__"):
            try:
                return torch.as_tensor(value, device=self._device)
            except (TypeError, ValueError, RuntimeError) as err:
                err.add_note(f"while making a tensor of the value for key {key!r}")
                raise
        raise TypeError(
            f"key {key!r}: a tree holds tensors, numbers, arrays, mappings and trees, "
            f"not {type(value).__name__}"
        )

    def _branch(self, source: Mapping[Any, Any], key: NestedKey) -> Self:
        """Return a new branch of this node's batch size that holds the entries of a mapping."""
        data: dict[str, Any] = {}
        branch = self._like(data, self._batch_size, self._names)
        try:
            branch._fill(data, source, False)
        except (TypeError, ValueError, KeyError) as err:
            err.add_note(f"in the branch {key!r}")
            raise
        return branch

    def _fit(self, value: Entry, key: NestedKey) -> Entry:
        """Return a branch with this node's batch size; a leaf that does not have it is an error."""
        size = self._batch_size
        if isinstance(value, TensorDictBase):
            branch = value._shallow_copy()
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
        try:
            for step in path:
                node = node._data[step]
        except (KeyError, AttributeError):
            raise self._astray(path) from None
        return node  # type: ignore[no-any-return]  # a cast would take as long as two steps

    def _target(self, path: Path) -> Entry:
        """Return what is at ``path``, to be written in place."""
        found = self._entry(path)
        cast(TensorDictBase, self._entry(path[:-1]))._refuse_lost_write()
        return found

    def _astray(self, path: Path) -> MissingKeyError:
        """Return the error for a path that leads to no entry."""
        node: Any = self
        depth = 0
        while isinstance(node, TensorDictBase) and path[depth] in node._data:
            node = node._data[path[depth]]
            depth += 1
        if isinstance(node, TensorDictBase):
            return node._missing(path[depth], path)
        return MissingKeyError(
            f"{as_key(path)!r} goes through {as_key(path[:depth])!r}, which is a leaf"
        )

    def _missing(self, step: str, path: Path) -> MissingKeyError:
        nested, joined = tuple(step.split(".")), ".".join(path)
        if len(nested) > 1 and nested in self:
            near = f" (did you mean {nested!r}?)"
        elif len(path) > 1 and joined in self._data:
            near = f" (did you mean {joined!r}?)"
        else:
            near = hint(step, self._data)
        return MissingKeyError(
            f"{as_key(path)!r} is not in the {type(self).__name__}: "
            f"no {step!r} among {listing(self._data)}{near}"
        )

    def _home(self, path: Path) -> tuple["TensorDictBase", Path]:
        """Return the deepest branch on the way to ``path`` that exists, and what is left to go."""
        if len(path) == 1:
            return self, path
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

    # -- reading and writing entries ---------------------------------------------------------

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """Return the entry at ``key``, or ``default`` when it is not there.

        Args:
            key: a ``str``, or a tuple for a nested entry.
            default: returned for a missing key.

        Returns:
            The leaf or branch itself, not a copy.

        Raises:
            TypeError: ``key`` is neither.

        Example:
            >>> td = TensorDict({"a": {"b": torch.ones(3)}}, [3])
            >>> td.get(("a", "b")), td.get("zzz")
            (tensor([1., 1., 1.]), None)
        """
        if type(key) is str:
            return self._data.get(key, default)
        if type(key) is tuple and key:
            node: Any = self
            try:
                for step in key:
                    node = node._data[step]
            except (KeyError, TypeError, AttributeError):
                return self._get_slowly(key, default)
            return node
        return self._get_slowly(key, default)

    def _get_slowly(self, key: NestedKey, default: Any) -> Any:
        """Serve keys with inner tuples, missing keys and wrong ones."""
        node: Any = self
        for step in as_path(key):
            if not isinstance(node, TensorDictBase) or step not in node._data:
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
                another device; a tree without the batch size of this one is held as new nodes
                that have it.
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
        if type(item) is Tensor and not inplace:
            if type(key) is not str:
                if self._set_plain(key, item):
                    return self
            elif self._lock is None and self._device is None:
                # Hot (test_set): what _takes tests, without a call.
                size = self._batch_size
                if not size or item.shape[: len(size)] == size:
                    self._data[key] = item
                    return self
        return self._set(key, item, inplace, non_blocking)

    def _set_plain(self, key: Any, item: Tensor) -> bool:
        """Set a tensor at a nested key if it can be held as is; return whether it was set.

        Hot (test_set_nested, test_set_nested_new): the short way through :meth:`_set`.
        """
        if type(key) is not tuple or not key:
            return False
        node: Any = self
        depth, last = 0, len(key) - 1
        try:
            while depth < last:
                below = node._data.get(key[depth])
                if below is None:
                    break
                node = below
                depth += 1
            size = node._batch_size
            if node._lock is not None or node._device is not None:
                return False
        except (TypeError, AttributeError):
            return False
        if size and item.shape[: len(size)] != size:
            return False
        if depth == last:
            # A branch of another class may store it in its own way, as TensorDictParams does.
            if type(key[-1]) is not str or type(node) is not type(self):
                return False
            node._data[key[-1]] = item
        else:
            way = key[depth:]
            if as_path(way) is not way:  # it has inner tuples
                return False
            node._put(way[0], node._wrapped(way, item))
        return True

    def _takes(self, item: Tensor) -> bool:
        """Return whether this node is unlocked and can hold a tensor as it is."""
        size = self._batch_size
        return (
            self._lock is None
            and self._device is None
            and (not size or item.shape[: len(size)] == size)
        )

    def _set(self, key: NestedKey, item: Any, inplace: bool, non_blocking: bool) -> Self:
        """Write any entry; :meth:`set` serves the most common ones itself."""
        if inplace and key in self:
            return self.set_(key, item, non_blocking=non_blocking)
        node, way = self._home(as_path(key))
        if node._lock is not None:
            raise locked(f"set {key!r}")
        if node._device is not None:
            item = on_device(item, node._device, non_blocking, {})
        value = node._admit(item, key, non_blocking)
        if isinstance(value, TensorDictBase):
            node._refuse_cycle(value, key)
        node._put(way[0], node._wrapped(way, value))
        return self

    def _wrapped(self, way: Path, value: Entry) -> Entry:
        """Return a value in new branches like this node, one for each step but the first."""
        for step in way[:0:-1]:
            value = self._like({step: value}, self._batch_size, self._names)
        return value

    def _refuse_cycle(self, value: "TensorDictBase", key: NestedKey) -> None:
        """Raise if this tree stands somewhere in ``value``, which is about to stand in it."""
        if value is self:
            raise ValueError(f"cannot set {key!r}: a tree cannot hold itself")
        for below in value._branches():
            self._refuse_cycle(below, key)

    def set_(self, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Self:
        """Copy a value into an existing leaf or branch, which keeps its identity and storage.

        Args:
            key: a ``str``, or a tuple for a nested entry.
            item: for a leaf a tensor of its shape, or a number or 0-d tensor, which fills it; for
                a branch a tree or a mapping of such values.
            non_blocking: for a copy between devices.

        Returns:
            The tree itself.

        Raises:
            MissingKeyError: the key is not there.
            TypeError: a tree for a leaf, or a tensor for a branch.
            ValueError: the shapes differ, or a tensor under two names would get two values.
            RuntimeError: the leaf requires grad, or its elements share memory (``expand``).

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3], lock=True)
            >>> td.set_("a", torch.ones(3))["a"]
            tensor([1., 1., 1.])
        """
        write(self._copies(key, self._target(as_path(key)), item), non_blocking)
        return self

    def _copies(self, key: NestedKey, target: Any, item: Any) -> list[Write]:
        """Return what an in-place write copies where, after checking that shapes fit."""
        if type(target) is not Tensor and isinstance(target, TensorDictBase):
            if not isinstance(item, TREES):
                raise TypeError(f"{key!r} is a branch; write a tree or a mapping into it")
            return target._all_copies(entries_of(item), as_path(key))
        value = item if isinstance(item, Tensor) else self._convert(item, key)
        if not isinstance(value, Tensor):
            raise TypeError(f"{key!r} is a leaf; write a tensor or a number into it")
        if value.shape != target.shape and value.ndim:
            raise ValueError(
                f"key {key!r}: cannot write shape {tuple(value.shape)} into "
                f"shape {tuple(target.shape)} in place"
            )
        return [(target, value, key)]

    def _all_copies(self, entries: Iterable[tuple[Any, Any]], above: Path = ()) -> list[Write]:
        """Return what :meth:`_copies` does, for many entries; ``above`` leads to this node."""
        self._refuse_lost_write()
        data = self._data
        writes = []
        for key, item in entries:
            known = type(key) is str and key in data
            target = data[key] if known else self._target(as_path(key))
            writes += self._copies((*above, *as_path(key)) if above else key, target, item)
        return writes

    def _writable(self) -> list[Tensor]:
        """Return the leaves, to be written in place, or raise an error that lists the unfit."""
        self._refuse_lost_writes()
        leaves = self._leaves()
        refuse_unwritable([(leaf, as_key(path)) for path, leaf in leaves])
        return [leaf for _, leaf in leaves]

    def __delitem__(self, key: NestedKey) -> None:
        path = as_path(key)
        self._entry(path)
        node, way = self._home(path)
        if node._lock is not None:
            raise locked(f"delete {key!r}")
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
        return self.get(cast(NestedKey, key), ABSENT) is not ABSENT

    # -- copies by protocol ------------------------------------------------------------------

    def __getstate__(self) -> tuple[Any, ...]:
        return (self._data, self._batch_size, self._device, self._names, self._lock is not None)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._data, self._batch_size, self._device, self._names, was_locked = state
        self._lock = None
        self._scope = None
        if was_locked:
            self._hold(None)


def is_tensor_collection(datatype: Any) -> bool:
    """Return whether an object is a tree, or a type one of trees.

    Example:
        >>> is_tensor_collection(TensorDict({})), is_tensor_collection(TensorDict)
        (True, True)
        >>> is_tensor_collection({"a": torch.ones(2)}), is_tensor_collection(torch.ones(2))
        (False, False)
    """
    kind = datatype if isinstance(datatype, type) else type(datatype)
    return issubclass(kind, TensorDictBase)


def entries_of(source: Mapping[Any, Any] | TensorDictBase) -> ItemsView[Any, Any]:
    return (source._data if isinstance(source, TensorDictBase) else source).items()


_KINDS = (Tensor, TensorDictBase)
TREES = (TensorDictBase, dict, Mapping)  # in the order of what a test against each costs
