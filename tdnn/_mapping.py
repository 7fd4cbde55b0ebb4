"""Entries that move: out of the tree, to another key, or into parts of the tree."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor

from tdnn._core import TensorDictBase, locked
from tdnn._declared import as_device, as_size
from tdnn._keys import NestedKey, Path, as_key, as_path, listing, unravel_key
from tdnn._marks import KEEP, NO_DEFAULT
from tdnn.errors import KeyConflictError, MissingKeyError

__all__ = ["Entries"]

KeySet = Sequence[NestedKey] | Mapping[NestedKey, NestedKey] | Callable[[Path, Any], bool]


class Entries(TensorDictBase):
    """pop, popitem, clear, setdefault, rename_key_, select, exclude, split_keys, empty, to_dict."""

    __slots__ = ()

    # -- taking entries out and putting them in ------------------------------------------------

    def pop(self, key: NestedKey, default: Any = NO_DEFAULT) -> Any:
        """Remove an entry and return it.

        Args:
            key: a ``str``, or a tuple for a nested entry.
            default: returned for a missing key.

        Raises:
            MissingKeyError: the key is not there and no ``default`` is given.
            LockedError: the tree is locked.

        Example:
            >>> td = TensorDict({"a": {"b": 1}})
            >>> td.pop(("a", "b")), td.pop("zzz", None)
            (tensor(1), None)
        """
        if default is not NO_DEFAULT and key not in self:
            return default
        found = self._entry(as_path(key))
        del self[key]
        return found

    def popitem(self) -> tuple[str, Any]:
        """Remove the last entry of the top level and return its key and what it was.

        Raises:
            MissingKeyError: the tree has no entries.
            LockedError: the tree is locked.

        Example:
            >>> td = TensorDict({"a": 1, "b": 2})
            >>> td.popitem(), list(td.keys())
            (('b', tensor(2)), ['a'])
        """
        data = self._data
        if not data:
            raise MissingKeyError("cannot pop an entry: the tree has none")
        key = next(reversed(data))
        return key, self.pop(key)

    def clear(self) -> Self:
        """Remove all entries and return the tree; its batch size, device and names stay.

        Raises:
            LockedError: the tree is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3)}}, [3])
            >>> list(td.clear().keys()), td.batch_size
            ([], torch.Size([3]))
        """
        if self._lock is not None:
            raise locked("clear the tree")
        self._refill({})
        return self

    def setdefault(self, key: NestedKey, default: Any, inplace: bool = False) -> Any:
        """Return the entry at ``key``, after setting it to ``default`` if it was missing.

        Args:
            key: a ``str``, or a tuple for a nested entry.
            default: what :meth:`set` takes.
            inplace: accepted for compatibility; there is nothing to write into.

        Raises:
            LockedError: the key is missing and the tree is locked.

        Example:
            >>> td = TensorDict({"a": 1})
            >>> td.setdefault("a", 5), td.setdefault("b", 2)
            (tensor(1), tensor(2))
        """
        if key not in self:
            self.set(key, default)
        return self._entry(as_path(key))

    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool | None = None) -> Self:
        """Move an entry to another key; it becomes the last of its branch.

        Args:
            old_key: a leaf or a branch.
            new_key: where it goes; branches on the way are made. It may lie inside ``old_key``.
            safe: an entry at ``new_key`` is an error, unless this is explicitly False.

        Raises:
            MissingKeyError: ``old_key`` is not there.
            KeyConflictError: ``new_key`` is taken.
            LockedError: the tree is locked.

        Example:
            >>> td = TensorDict({"norm": {"gamma": 1}})
            >>> list(td.rename_key_(("norm", "gamma"), ("norm", "weight"))["norm"].keys())
            ['weight']
        """
        old, new = as_path(old_key), as_path(new_key)
        value = self._entry(old)
        source, _ = self._home(old)
        if old == new:
            return self
        inside = new[: len(old)] == old
        home, way = (source, new[len(old) - 1 :]) if inside else self._home(new)
        if source._lock is not None or home._lock is not None:
            raise locked(f"rename {old_key!r}")
        if safe is not False and not inside and len(way) == 1 and way[0] in home._data:
            raise KeyConflictError(
                f"cannot rename {old_key!r} to {new_key!r}, which is taken; "
                "delete that first, or pass safe=False to replace it"
            )
        value = home._admit(value, new_key)
        if isinstance(value, TensorDictBase) and not inside:
            home._refuse_cycle(value, new_key)
        source._drop(old[-1])
        home._put(way[0], home._wrapped(way, value))
        return self

    # -- parts of the tree ---------------------------------------------------------------------

    def select(self, *keys: NestedKey, inplace: bool = False, strict: bool = True) -> Self:
        """Return a tree of only these entries, which are not copied.

        Args:
            *keys: leaves, or branches with all they hold.
            inplace: remove the others from this tree instead, and return it.
            strict: a missing key is an error; otherwise it is passed over.

        Raises:
            MissingKeyError: some keys are not there; all of them are listed.
            LockedError: the tree is locked and ``inplace`` is true.

        Example:
            >>> td = TensorDict({"a": 1, "b": {"c": 2, "d": 3}})
            >>> list(td.select("a", ("b", "d")).keys(True, True))
            ['a', ('b', 'd')]
        """
        if strict:
            self._require(keys)
        picked = _picked(self, _as_spec(keys))
        return self._shrunk(picked, "select in place") if inplace else cast(Self, picked)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        """Return a tree without these entries; the others are not copied.

        Args:
            *keys: leaves or whole branches; a missing key is passed over.
            inplace: remove them from this tree instead, and return it.

        Raises:
            LockedError: the tree is locked and ``inplace`` is true.

        Example:
            >>> td = TensorDict({"a": 1, "b": {"c": 2, "d": 3}})
            >>> list(td.exclude("a", ("b", "d")).keys(True, True))
            [('b', 'c')]
        """
        left = _without(self, _as_spec(keys))
        return self._shrunk(left, "exclude in place") if inplace else cast(Self, left)

    def split_keys(
        self,
        *key_sets: KeySet,
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        strict: bool = True,
        reproduce_struct: bool = False,
    ) -> tuple[Self, ...]:
        """Divide the entries over one tree per set of keys, and one more for the rest.

        Args:
            *key_sets: taken in order, each from what the ones before left. A sequence names its
                keys; a dict also renames them to its values; a callable ``fn(path, leaf)`` takes
                the leaves for which it is true.
            inplace: the last tree is this one, with the taken entries removed.
            default: put in place of a missing key when ``strict`` is false.
            strict: a missing key is an error; otherwise it is passed over.
            reproduce_struct: every tree has all the branches of this one, even without entries; a
                branch that is taken as a whole is missing in the last one.

        Returns:
            ``len(key_sets) + 1`` trees; nothing is copied. Branches that lost all they held are
            left out of the last one, unless ``reproduce_struct``.

        Raises:
            MissingKeyError: keys that are not there, or were taken by a set before.
            KeyConflictError: one set renames two entries to the same key.
            LockedError: the tree is locked and ``inplace`` is true.

        Example:
            >>> td = TensorDict({"a": 1, "b": {"c": 2}, "d": 3})
            >>> one, two, rest = td.split_keys(["a"], {("b", "c"): "c"})
            >>> list(one.keys()), list(two.keys()), list(rest.keys())
            (['a'], ['c'], ['d'])
        """
        if inplace and self._lock is not None:
            raise locked("split in place")
        rest = self._shallow_copy()
        parts, taken, missing = [], [], []
        for keys in key_sets:
            part = self.empty(recurse=True) if reproduce_struct else self.empty()
            for old, new in _named(keys, rest):
                if old in rest:
                    _move_entry(part, self, as_path(old), as_path(new), rest.pop(old))
                    taken.append(as_path(old))
                elif strict:
                    missing.append(old)
                elif default is not NO_DEFAULT and default is not None:
                    part.set(new, default)
            parts.append(part)
        if missing:
            raise MissingKeyError(
                f"cannot split off {listing(missing)}: not there, or taken by a set before"
            )
        last = self if inplace else rest
        if any(last._home(path)[0]._lock is not None for path in taken):
            raise locked("split a branch in place")
        for path in taken:
            if inplace:
                del last[path]
            if not reproduce_struct:
                _prune(last, path[:-1])
        return (*parts, last)

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: Sequence[int] | None = None,
        device: Any = KEEP,
        names: Any = KEEP,
    ) -> Self:
        """Return a tree without leaves, of the same batch size, device and names.

        Args:
            recurse: keep the branches, empty.
            batch_size: another one.
            device: another one, or None.
            names: others, or None.

        Example:
            >>> td = TensorDict({"a": 1, "b": {"c": 2}})
            >>> list(td.empty().keys(True)), list(td.empty(recurse=True).keys(True))
            ([], ['b'])
        """
        size = self._batch_size if batch_size is None else as_size(batch_size)
        node = self._like({}, size, self._names if batch_size is None else None)
        if recurse:
            for key, value in self._data.items():
                if isinstance(value, Entries):
                    node._data[key] = value.empty(True, batch_size=batch_size, device=device)
        if device is not KEEP:
            node._device = None if device is None else as_device(device)
        if names is not KEEP:
            node.names = names
        return node

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested dicts of the same tensors.

        Example:
            >>> TensorDict({"a": 1, "b": {"c": 2}}).to_dict()
            {'a': tensor(1), 'b': {'c': tensor(2)}}
        """
        return {
            key: value.to_dict() if isinstance(value, Entries) else value
            for key, value in self._data.items()
        }

    def numpy(self) -> dict[str, Any]:
        """Return nested dicts of numpy arrays that share memory with the tensors.

        Raises:
            TypeError: a leaf is not on the CPU, or numpy does not have its dtype.
            RuntimeError: a leaf requires grad; use ``td.detach().numpy()``.

        Example:
            >>> TensorDict({"a": {"b": torch.zeros(2)}}).numpy()
            {'a': {'b': array([0., 0.], dtype=float32)}}
        """
        return _arrays(self, ())

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[Any, Any],
        *,
        batch_size: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Return a tree of the entries of a nested dict; the same as the constructor.

        Example:
            >>> TensorDict.from_dict({"a": {"b": torch.ones(3)}}, batch_size=[3])["a", "b"]
            tensor([1., 1., 1.])
        """
        tree = cls._kind(input_dict, batch_size, device, names)
        return tree if cls is cls._kind else cls(tree)

    # -- helpers -------------------------------------------------------------------------------

    def _shrunk(self, like: TensorDictBase, action: str) -> Self:
        refills: Refills = []
        _shrink(self, like, refills)
        _refill_all(refills, action)
        return self

    def _require(self, keys: Sequence[NestedKey]) -> None:
        missing = [key for key in keys if key not in self]
        if len(missing) == 1:
            self._entry(as_path(missing[0]))
        elif missing:
            raise MissingKeyError(
                f"not in the {type(self).__name__}: {listing(map(unravel_key, missing))}; "
                f"it has {listing(self._data)}"
            )


def _arrays(node: TensorDictBase, above: Path) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for key, value in node._data.items():
        path = (*above, key)
        if isinstance(value, TensorDictBase):
            arrays[key] = _arrays(value, path)
            continue
        try:
            arrays[key] = value.numpy()
        except Exception as err:
            err.add_note(f"at the leaf {as_key(path)!r}")
            raise
    return arrays


def _as_spec(keys: Sequence[NestedKey]) -> dict[str, Any]:
    """Return nested dicts with the steps of ``keys``; None means all below."""
    spec: dict[str, Any] = {}
    for key in keys:
        if type(key) is str:  # Hot (test_select): no path, no walk.
            spec[key] = None
            continue
        path = as_path(key)
        at: Any = spec
        for step in path[:-1]:
            at = at.setdefault(step, {})
            if at is None:
                break  # a shorter path took the whole branch
        else:
            at[path[-1]] = None
    return spec


def _picked(node: TensorDictBase, wanted: dict[str, Any]) -> Any:
    data = {}
    for key, value in node._data.items():
        if key in wanted:
            if type(value) is Tensor or not isinstance(value, TensorDictBase):
                if not wanted[key]:
                    data[key] = value
            elif wanted[key]:
                data[key] = _picked(value, wanted[key])
            else:
                data[key] = value._shallow_copy()
    return node._like(data, node._batch_size, node._names)


Refills: TypeAlias = list[tuple[TensorDictBase, dict[str, Any]]]


def _shrink(node: TensorDictBase, like: TensorDictBase, refills: Refills) -> None:
    """Note that ``node`` and its branches shall hold no more than those of ``like`` do."""
    kept = {key: node._data[key] for key in like._data}
    if len(kept) < len(node._data):
        refills.append((node, kept))
    for key, value in kept.items():
        if isinstance(value, TensorDictBase):
            _shrink(value, like._data[key], refills)


def _refill_all(refills: Refills, action: str) -> None:
    """Make the changes, unless one of the nodes is locked."""
    if any(node._lock is not None for node, _ in refills):
        raise locked(action)
    for node, kept in refills:
        node._refill(kept)


def _without(node: TensorDictBase, unwanted: dict[str, Any]) -> Any:
    data = {}
    for key, value in node._data.items():
        if type(value) is Tensor or not isinstance(value, TensorDictBase):
            if key not in unwanted or unwanted[key]:
                data[key] = value
        elif key not in unwanted:
            data[key] = value._shallow_copy()
        elif unwanted[key]:
            data[key] = _without(value, unwanted[key])
    return node._like(data, node._batch_size, node._names)


def _named(keys: KeySet, tree: TensorDictBase) -> list[tuple[NestedKey, NestedKey]]:
    """Return ``(old, new)`` for the keys that a set names, or for the leaves that it takes."""
    if isinstance(keys, Mapping):
        return list(keys.items())
    if callable(keys):
        return [(path, path) for path, leaf in tree._leaves() if keys(path, leaf)]
    if isinstance(keys, str):
        raise TypeError(f"a set of keys is a sequence, a dict or a callable; write [{keys!r}]")
    return [(key, key) for key in keys]


def _move_entry(
    part: TensorDictBase, tree: TensorDictBase, old: Path, new: Path, value: Any
) -> None:
    """Put an entry that was at ``old`` in ``tree`` at ``new`` in ``part``.

    Branches on the way are like those of the tree, if they have the same place in it.
    """
    there = part.get(new)
    if old == new and isinstance(there, TensorDictBase) and isinstance(value, TensorDictBase):
        cast(Any, there).update(value)  # a part of the branch was taken by a key before
        return
    if there is not None and not (isinstance(there, TensorDictBase) and there.is_empty()):
        raise KeyConflictError(f"cannot split off {as_key(old)!r} as {as_key(new)!r}, taken twice")
    if old == new:
        at = part
        for step in old[:-1]:
            tree = cast(TensorDictBase, tree._data[step])
            if step not in at._data:
                at._put(step, at._like({}, tree._batch_size, tree._names))
            at = at._data[step]
    part.set(new, value)


def _prune(tree: TensorDictBase, path: Path) -> None:
    """Remove the branches along ``path`` that hold nothing any more, from the bottom up."""
    for end in range(len(path), 0, -1):
        branch = tree.get(path[:end])
        if not isinstance(branch, TensorDictBase) or branch._data:
            break
        del tree[path[:end]]
