"""The tree as a mapping: its keys, items and values, and moving entries in, out and about."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from tdnn._core import Entry, IsLeaf, TensorDictBase, entries_of, locked
from tdnn._declared import as_device, as_size
from tdnn._keys import NestedKey, Path, as_key, as_path, listing
from tdnn._node import itself
from tdnn.errors import KeyConflictError, MissingKeyError

__all__ = ["Entries"]

_NO_DEFAULT: Any = object()
_KEEP: Any = object()

KeySet = Sequence[NestedKey] | Mapping[NestedKey, NestedKey] | Callable[[Path, Any], bool]


class NestedKeys(Set[NestedKey]):
    """The keys of a tree at every depth; follows the tree, and compares like a set."""

    __slots__ = ("_is_leaf", "_leaves_only", "_node", "_sort")

    def __init__(
        self, node: TensorDictBase, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool
    ) -> None:
        self._node = node
        self._leaves_only = leaves_only
        self._is_leaf = is_leaf
        self._sort = sort

    def __iter__(self) -> Iterator[NestedKey]:
        found = _nested(self._node, self._leaves_only, self._is_leaf, self._sort)
        return iter([key for key, _ in found])

    def __len__(self) -> int:
        return len(_nested(self._node, self._leaves_only, self._is_leaf, False))

    def __contains__(self, key: object) -> bool:
        if self._is_leaf is not None:
            return key in list(self)
        if key not in self._node:
            return False
        found = self._node.get(cast(NestedKey, key))
        return not (self._leaves_only and isinstance(found, TensorDictBase))

    def __repr__(self) -> str:
        return f"NestedKeys({list(self)})"

    @classmethod
    def _from_iterable(cls, keys: Any) -> Any:
        return set(keys)


class Entries(TensorDictBase):
    """Keys, items, values, select, exclude, split, update, rename, pop, empty, to_dict."""

    __slots__ = ()

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Set[Any]:
        """Return the keys, in the order of the tree or sorted.

        Args:
            include_nested: also the entries of branches, as tuples; a branch follows its entries.
            leaves_only: leave out the keys of branches.
            is_leaf: takes a type; a branch of a type for which it is true is not entered.
            sort: by their parts.

        Returns:
            A view that follows the tree and supports ``in``, ``len`` and set operations.

        Example:
            >>> td = TensorDict({"a": 1, "b": {"c": 2}})
            >>> list(td.keys()), list(td.keys(True)), list(td.keys(True, True))
            (['a', 'b'], ['a', ('b', 'c'), 'b'], ['a', ('b', 'c')])
        """
        if include_nested:
            return NestedKeys(self, leaves_only, is_leaf, sort)
        if not leaves_only and not sort:
            return self._data.keys()
        return dict(_shallow(self, leaves_only, is_leaf, sort)).keys()

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return the ``(key, entry)`` pairs; the arguments are those of :meth:`keys`.

        Example:
            >>> td = TensorDict({"a": 1, "b": {"c": 2}})
            >>> list(td.items(True, True))
            [('a', tensor(1)), (('b', 'c'), tensor(2))]
        """
        if include_nested:
            return _nested(self, leaves_only, is_leaf, sort)
        if not leaves_only and not sort:
            return self._data.items()
        return _shallow(self, leaves_only, is_leaf, sort)

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return the entries; the arguments are those of :meth:`keys`.

        Example:
            >>> list(TensorDict({"a": 1, "b": {"c": 2}}).values(True, True))
            [tensor(1), tensor(2)]
        """
        if include_nested:
            found: list[Any] = []
            if sort or is_leaf is not None:
                return [value for _, value in _nested(self, leaves_only, is_leaf, sort)]
            _add_values(self._data, found, leaves_only)
            return found
        if not leaves_only and not sort:
            return self._data.values()
        return [value for _, value in _shallow(self, leaves_only, is_leaf, sort)]

    # -- taking entries out and putting them in ------------------------------------------------

    def pop(self, key: NestedKey, default: Any = _NO_DEFAULT) -> Any:
        """Remove an entry and return it.

        Raises:
            MissingKeyError: the key is not there and no ``default`` is given.
            LockedError: the tree is locked.

        Example:
            >>> td = TensorDict({"a": {"b": 1}})
            >>> td.pop(("a", "b")), td.pop("zzz", None)
            (tensor(1), None)
        """
        if default is not _NO_DEFAULT and key not in self:
            return default
        found = self._entry(as_path(key))
        del self[key]
        return found

    def setdefault(self, key: NestedKey, default: Any, inplace: bool = False) -> Any:
        """Return the entry at ``key``, after setting it to ``default`` if it was missing.

        Example:
            >>> td = TensorDict({"a": 1})
            >>> td.setdefault("a", 5), td.setdefault("b", 2)
            (tensor(1), tensor(2))
        """
        if key not in self:
            self.set(key, default, inplace=inplace)
        return self._entry(as_path(key))

    def update(
        self,
        input_dict_or_td: Mapping[Any, Any] | TensorDictBase | None = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
        is_leaf: IsLeaf | None = None,
        **kwargs: Any,
    ) -> Self:
        """Write the entries of a mapping or a tree; branches are merged. All or nothing.

        Args:
            input_dict_or_td: the entries; keys may be tuples.
            clone: copy the tensors before they are held.
            inplace: copy into the tensors that are there; new keys are still added.
            non_blocking: for copies between devices.
            keys_to_update: only these.
            is_leaf: takes a type; a branch of such a type replaces instead of merging.
            **kwargs: more entries.

        Returns:
            The tree itself. After an error nothing has changed.

        Raises:
            LockedError: the tree is locked and an entry would be added or replaced.
            ValueError: a shape does not fit.

        Example:
            >>> td = TensorDict({"a": {"x": 1}})
            >>> list(td.update({"a": {"y": 2}}).keys(True, True))
            [('a', 'x'), ('a', 'y')]
        """
        source = {} if input_dict_or_td is None else input_dict_or_td
        if not isinstance(source, Mapping | TensorDictBase):
            raise TypeError(f"update takes a mapping or a tree, not {type(source).__name__}")
        plan = _Update(inplace, clone, non_blocking, is_leaf)
        plan.add(self, _chosen(source, keys_to_update), ())
        plan.add(self, kwargs, ())
        plan.commit()
        return self

    def update_(
        self,
        input_dict_or_td: Mapping[Any, Any] | TensorDictBase | None = None,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Copy values into entries that exist; they keep identity and storage. All or nothing.

        Args:
            input_dict_or_td: the values, of the shapes that are there (a number fills).
            clone: accepted for compatibility; a copy is made in any case.
            non_blocking: for copies between devices.
            keys_to_update: only these.
            **kwargs: more values.

        Raises:
            MissingKeyError: a key is not there.
            ValueError: a shape is another.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2], lock=True)
            >>> td.update_({"a": torch.ones(2)})["a"]
            tensor([1., 1.])
        """
        source = {} if input_dict_or_td is None else input_dict_or_td
        pairs = []
        for entries in (_chosen(source, keys_to_update), kwargs.items()):
            for key, value in entries:
                pairs += self._copies(key, self._entry(as_path(key)), value)
        for leaf, value in pairs:
            leaf.copy_(value, non_blocking=non_blocking)
        return self

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
            raise locked("rename", old_key)
        if safe is not False and not inside and len(way) == 1 and way[0] in home._data:
            raise KeyConflictError(
                f"cannot rename {old_key!r} to {new_key!r}, which is taken; "
                "delete that first, or pass safe=False to replace it"
            )
        value = home._admit(value, new_key)
        source._drop(old[-1])
        home._branch_off(way[:-1])._put(way[-1], value)
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
        paths = [as_path(key) for key in keys]
        if strict:
            self._require(paths)
        wanted = _as_spec(paths)
        return self._keep_only(wanted) if inplace else _picked(self, wanted)

    def _keep_only(self, wanted: dict[str, Any]) -> Self:
        if self._lock is not None:
            raise locked("select in place from", "the tree")
        kept = {}
        for key, value in self._data.items():
            if key in wanted:
                kept[key] = value
                if wanted[key] and isinstance(value, Entries):
                    value._keep_only(wanted[key])
        self._refill(kept)
        return self

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
        tree = self if inplace else self._shallow_copy()
        for key in keys:
            if key in tree:
                del tree[key]
        return tree

    def split_keys(
        self,
        *key_sets: KeySet,
        inplace: bool = False,
        default: Any = _NO_DEFAULT,
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
            reproduce_struct: every tree has all the branches of this one, even without entries.

        Returns:
            ``len(key_sets) + 1`` trees; nothing is copied. Branches that lost all they held are
            left out of the last one, unless ``reproduce_struct``.

        Raises:
            MissingKeyError: keys that are not there, or were taken by a set before.
            LockedError: the tree is locked and ``inplace`` is true.

        Example:
            >>> td = TensorDict({"a": 1, "b": {"c": 2}, "d": 3})
            >>> one, two, rest = td.split_keys(["a"], {("b", "c"): "c"})
            >>> list(one.keys()), list(two.keys()), list(rest.keys())
            (['a'], ['c'], ['d'])
        """
        if inplace and self._lock is not None:
            raise locked("split in place", "the tree")
        rest = self._shallow_copy()
        parts, taken, missing = [], [], []
        for keys in key_sets:
            part = self.empty(recurse=True) if reproduce_struct else self.empty()
            for old, new in _named(keys, rest):
                if old in rest:
                    part.set(new, rest.pop(old))
                    taken.append(as_path(old))
                elif strict:
                    missing.append(old)
                elif default is not _NO_DEFAULT and default is not None:
                    part.set(new, default)
            parts.append(part)
        if missing:
            raise MissingKeyError(
                f"cannot split off {listing(missing)}: not there, or taken by a set before"
            )
        last = self if inplace else rest
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
        device: Any = _KEEP,
        names: Any = _KEEP,
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
                    below = value._batch_size if batch_size is None else size
                    node._data[key] = value.empty(True, batch_size=below, device=device)
        if device is not _KEEP:
            node._device = None if device is None else as_device(device)
        if names is not _KEEP:
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
        return cls(input_dict, batch_size, device, names)

    # -- helpers -------------------------------------------------------------------------------

    def _shallow_copy(self) -> Self:
        """Return new nodes over the same leaves."""
        return self._rebuild(itself, self._batch_size, self._names)

    def _require(self, paths: Sequence[Path]) -> None:
        missing = [path for path in paths if path not in self]
        if len(missing) == 1:
            self._entry(missing[0])
        elif missing:
            raise MissingKeyError(
                f"not in the {type(self).__name__}: {listing(map(as_key, missing))}; "
                f"it has {listing(self._data)}"
            )


class _Update:
    """The writes of one ``update``: all are checked before the first is made."""

    def __init__(
        self, inplace: bool, clone: bool, non_blocking: bool, is_leaf: IsLeaf | None
    ) -> None:
        self._inplace = inplace
        self._clone = clone
        self._non_blocking = non_blocking
        self._is_leaf = is_leaf
        self._puts: list[tuple[TensorDictBase, Path, Entry]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def add(self, node: TensorDictBase, entries: Any, above: Path) -> None:
        """Plan the writes of ``(key, value)`` pairs, or a mapping, below ``node``."""
        pairs = entries_of(entries) if isinstance(entries, Mapping | TensorDictBase) else entries
        for key, value in pairs:
            home, way = node._home(as_path(key))
            mine = home._data.get(way[0]) if len(way) == 1 else None
            full = (*above, *as_path(key))
            if isinstance(mine, TensorDictBase) and self._merges(value):
                self.add(mine, value, full)
            elif self._inplace and mine is not None:
                self._copies += home._copies(as_key(full), mine, value)
            else:
                self._add_put(home, way, value, full)

    def _merges(self, value: Any) -> bool:
        if self._is_leaf is not None and self._is_leaf(type(value)):
            return False
        return isinstance(value, Mapping | TensorDictBase)

    def _add_put(self, home: TensorDictBase, way: Path, value: Any, full: Path) -> None:
        if home._lock is not None:
            raise locked("set", as_key(full))
        value = home._admit(value, as_key(full), self._non_blocking)
        if isinstance(value, TensorDictBase):
            home._refuse_cycle(value, as_key(full))
            value = value._rebuild(itself, value._batch_size, value._names)
        if self._clone:
            value = cast(Any, value).clone()
        self._puts.append((home, way, value))

    def commit(self) -> None:
        for home, way, value in self._puts:
            home._branch_off(way[:-1])._put(way[-1], value)
        for leaf, value in self._copies:
            leaf.copy_(value, non_blocking=self._non_blocking)


def _nested(
    node: TensorDictBase, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool
) -> list[tuple[NestedKey, Any]]:
    """Return the pairs of a tree at every depth; top-level keys are ``str``, others paths."""
    found: list[tuple[Any, Any]] = []
    for key, value in node._data.items():
        kind = type(value)
        is_branch = kind is not Tensor and isinstance(value, TensorDictBase)
        if is_branch and (is_leaf is None or not is_leaf(kind)):
            _add_nested(value._data, (key,), found, leaves_only, is_leaf)
            if leaves_only:
                continue
        found.append((key, value))
    if sort:
        found.sort(key=lambda pair: as_path(pair[0]))
    return found


def _add_nested(
    data: dict[str, Any],
    prefix: Path,
    found: list[tuple[Any, Any]],
    leaves_only: bool,
    is_leaf: IsLeaf | None,
) -> None:
    for key, value in data.items():
        path = (*prefix, key)
        kind = type(value)
        # Hot (test_items_nested): the exact type before the isinstance call.
        is_branch = kind is not Tensor and isinstance(value, TensorDictBase)
        if is_branch and (is_leaf is None or not is_leaf(kind)):
            _add_nested(value._data, path, found, leaves_only, is_leaf)
            if leaves_only:
                continue
        found.append((path, value))


def _add_values(data: dict[str, Any], found: list[Any], leaves_only: bool) -> None:
    for value in data.values():
        kind = type(value)
        if kind is not Tensor and kind is not Parameter and isinstance(value, TensorDictBase):
            _add_values(value._data, found, leaves_only)
            if leaves_only:
                continue
        found.append(value)


def _shallow(
    node: TensorDictBase, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool
) -> list[tuple[str, Any]]:
    found = [
        (key, value)
        for key, value in node._data.items()
        if not leaves_only
        or not isinstance(value, TensorDictBase)
        or (is_leaf is not None and is_leaf(type(value)))
    ]
    return sorted(found, key=lambda pair: pair[0]) if sort else found


def _chosen(
    source: Mapping[Any, Any] | TensorDictBase, keys: Sequence[NestedKey] | None
) -> list[tuple[NestedKey, Any]]:
    """Return the pairs of ``source``, or those of ``keys`` only."""
    if keys is None:
        return list(entries_of(source))
    if isinstance(keys, str):
        raise TypeError(f"keys_to_update is a list of keys; write [{keys!r}]")
    if isinstance(source, TensorDictBase):
        return [(key, source._entry(as_path(key))) for key in keys]
    found = []
    for key in keys:
        value: Any = source
        for step in (key,) if key in source else as_path(key):
            value = value[step]
        found.append((key, value))
    return found


def _as_spec(paths: Sequence[Path]) -> dict[str, Any]:
    """Return nested dicts with the steps of ``paths``; an empty dict means all below."""
    spec: dict[str, Any] = {}
    for path in sorted(paths, key=len):
        at: dict[str, Any] | None = spec
        for depth, step in enumerate(path):
            if at is None:
                break  # a shorter path took the whole branch
            at = at.setdefault(step, {} if depth < len(path) - 1 else None)
    return spec


def _picked(node: TensorDictBase, wanted: dict[str, Any]) -> Any:
    data = {}
    for key, value in node._data.items():
        if key in wanted:
            if not isinstance(value, TensorDictBase):
                data[key] = value
            elif wanted[key]:
                data[key] = _picked(value, wanted[key])
            else:
                data[key] = value._rebuild(itself, value._batch_size, value._names)
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


def _prune(tree: TensorDictBase, path: Path) -> None:
    """Remove the branches along ``path`` that hold nothing any more, from the bottom up."""
    for end in range(len(path), 0, -1):
        branch = tree.get(path[:end])
        if not isinstance(branch, TensorDictBase) or branch._data:
            break
        del tree[path[:end]]
