"""Many entries written at once, all or none of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

from torch import Tensor

from tdnn._core import TREES, Entry, IsLeaf, TensorDictBase, entries_of, locked
from tdnn._declared import common_start, on_device
from tdnn._keys import NestedKey, Path, as_key, as_path, listing
from tdnn._writes import Write, write
from tdnn.errors import KeyConflictError, MissingKeyError

__all__ = ["Updates", "merge_tensordicts"]

Merged = TypeVar("Merged", bound=TensorDictBase)


class Updates(TensorDictBase):
    """update, update_, copy_ and replace."""

    __slots__ = ()

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
            ValueError: a shape does not fit, or a tensor under two names would get two values.

        Example:
            >>> td = TensorDict({"a": {"x": 1}})
            >>> list(td.update({"a": {"y": 2}}).keys(True, True))
            [('a', 'x'), ('a', 'y')]
        """
        source = {} if input_dict_or_td is None else input_dict_or_td
        is_plain = keys_to_update is None and is_leaf is None and not (inplace or clone or kwargs)
        if is_plain and type(self) is self._kind and _takes_all(self, source):
            _merge(self, cast(Any, source))
            return self
        plan = _Update(inplace, clone, non_blocking, is_leaf)
        plan.add(self, _chosen(source, keys_to_update), ())
        if kwargs:
            plan.add(self, kwargs.items(), ())
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

        Returns:
            The tree itself. After an error nothing has changed.

        Raises:
            MissingKeyError: a key is not there.
            ValueError: a shape is another, or a tensor under two names would get two values.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2], lock=True)
            >>> td.update_({"a": torch.ones(2)})["a"]
            tensor([1., 1.])
        """
        source = {} if input_dict_or_td is None else input_dict_or_td
        writes = self._all_copies(_chosen(source, keys_to_update))
        if kwargs:
            writes += self._all_copies(kwargs.items())
        write(writes, non_blocking)
        return self

    def copy_(
        self, tensordict: Mapping[Any, Any] | TensorDictBase, non_blocking: bool = False
    ) -> Self:
        """Copy values into entries that exist; the same as :meth:`update_`.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2], lock=True)
            >>> td.copy_(TensorDict({"a": torch.ones(2)}, [2]))["a"]
            tensor([1., 1.])
        """
        return self.update_(tensordict, non_blocking=non_blocking)

    def replace(
        self, input_dict_or_td: Mapping[Any, Any] | TensorDictBase | None = None, /, **kwargs: Any
    ) -> Self:
        """Return a tree with other values for some entries, or with more; this one stays as it is.

        Args:
            input_dict_or_td: the entries, as for :meth:`update`; branches are merged.
            **kwargs: more entries, which take precedence.

        Returns:
            A new unlocked tree over the same tensors; the tree itself if no entry is given.

        Raises:
            ValueError: a shape does not fit.

        Example:
            >>> td = TensorDict({"a": 1, "b": {"c": 2}}, lock=True)
            >>> td.replace({"b": {"d": 3}}, a=4).to_dict()
            {'a': tensor(4), 'b': {'c': tensor(2), 'd': tensor(3)}}
        """
        given = [each for each in (input_dict_or_td, kwargs) if each is not None]
        if all([isinstance(each, TREES) and not entries_of(each) for each in given]):
            return self
        made = cast(Updates, self._shallow_copy())
        for each in given:
            made.update(each)
        return cast(Self, made)


def merge_tensordicts(
    *tensordicts: Merged,
    callback_exist: Callable[..., Any] | Mapping[NestedKey, Callable[..., Any]] | None = None,
) -> Merged:
    """Return a tree with the entries of several trees; branches are merged.

    Args:
        *tensordicts: two or more. Where several have a leaf, the first of them counts.
        callback_exist: called with the values, in order, for a leaf that all of them have, and
            returns the leaf of the result; or a mapping from keys to such functions.

    Returns:
        A new unlocked tree of the first one's kind, batch size, device and names; tensors are
        held, not copied.

    Raises:
        KeyConflictError: one key is a leaf in one tree and a branch in another.
        MissingKeyError: ``callback_exist`` has keys that are not in all trees.
        ValueError: there are less than two trees, or an entry does not fit the batch size.

    Example:
        >>> one, two = TensorDict({"x": 1, "b": {"c": 2}}), TensorDict({"x": 3, "b": {"d": 4}})
        >>> merged = merge_tensordicts(one, two, callback_exist=torch.add)
        >>> merged["x"], list(merged["b"].keys())
        (tensor(4), ['c', 'd'])
    """
    for tree in tensordicts:
        if not isinstance(tree, TensorDictBase):
            raise TypeError(f"merge_tensordicts takes trees, not {type(tree).__name__}")
    if len(tensordicts) < 2:
        raise ValueError(f"merge_tensordicts takes two or more trees, not {len(tensordicts)}")
    each = callback_exist if callable(callback_exist) else None
    chosen: dict[Path, Callable[..., Any]] = {}
    if each is None and callback_exist is not None:
        chosen = {as_path(key): fn for key, fn in cast(Any, callback_exist).items()}
        lost = [as_key(at) for at in chosen if any([tree.get(at) is None for tree in tensordicts])]
        if lost:
            raise MissingKeyError(f"callback_exist has {listing(lost)}, which not all trees have")
    return _merged(list(tensordicts), len(tensordicts), (), lambda at: chosen.get(at, each))


def _merged(
    nodes: list[Merged], total: int, above: Path, callback: Callable[[Path], Any]
) -> Merged:
    """Return one node of the entries of several, out of ``total`` trees."""
    first = nodes[0]
    # The whole is like the first tree; a branch has the dims that all have of it.
    size = common_start([node._batch_size for node in nodes]) if above else first._batch_size
    made = first._like({}, size, first._names and first._names[: len(size)])
    for key in dict.fromkeys([key for node in nodes for key in node._data]):
        path = (*above, key)
        found = [node._data[key] for node in nodes if key in node._data]
        branches = [isinstance(value, TensorDictBase) for value in found]
        fn = callback(path)
        if all(branches):
            value = _merged(found, total, path, callback)
        elif any(branches):
            where = as_key(path)
            raise KeyConflictError(f"{where!r} is a leaf in one tree and a branch in another")
        else:
            value = fn(*found) if fn is not None and len(found) == total else found[0]
        made._data[key] = made._admit(value, as_key(path))
    return made


def _takes_all(node: TensorDictBase, source: object) -> bool:
    """Return whether nested dicts have only tensors, for nodes that can hold them as they are.

    Hot (test_update, test_update_nested): the usual case, in which nothing is to be planned.
    """
    if type(source) is not dict or node._lock is not None or node._device is not None:
        return False
    size = fits = node._batch_size
    depth = len(size)
    for key, value in source.items():
        kind = type(value)
        if kind is Tensor and type(key) is str:
            shape = value.shape if depth else fits
            if shape != fits:
                if shape[:depth] != size:
                    return False
                fits = shape  # most leaves share a shape
        elif kind is dict:
            mine: Any = node._data.get(key)
            if type(mine) is not type(node) or not _takes_all(mine, value):
                return False
        else:
            return False
    return True


def _merge(node: TensorDictBase, source: dict[str, Any]) -> None:
    data: dict[str, Any] = node._data
    for key, value in source.items():
        if type(value) is dict:
            _merge(data[key], value)
        else:
            data[key] = value


class _Update:
    """The writes of one ``update``: all are checked before the first is made."""

    def __init__(
        self, inplace: bool, clone: bool, non_blocking: bool, is_leaf: IsLeaf | None
    ) -> None:
        self._inplace = inplace
        self._clone = clone
        self._clones: dict[Tensor, Tensor] = {}
        self._moved: dict[Any, Any] = {}
        self._non_blocking = non_blocking
        self._is_leaf = is_leaf
        self._puts: dict[Path, tuple[TensorDictBase, str, Entry]] = {}
        self._copies: list[Write] = []

    def add(self, node: TensorDictBase, entries: Any, above: Path) -> None:
        """Plan the writes of ``(key, value)`` pairs below ``node``."""
        plain = not self._inplace and not self._clone
        puts = self._puts
        for key, value in entries:
            # Hot (test_update_tree): a tensor under a plain key that can be held as it is.
            if plain and type(value) is Tensor and type(key) is str and node._takes(value):
                puts[above + (key,)] = node, key, value  # noqa: RUF005  # a joined tuple is quicker
                continue
            path = as_path(key)
            home, way = node._home(path)
            mine = home._data.get(way[0]) if len(way) == 1 else None
            if isinstance(mine, TensorDictBase) and self._merges(value):
                self.add(mine, entries_of(value), above + path)
            elif self._inplace and mine is not None:
                home._refuse_lost_write()
                self._copies += home._copies(as_key(above + path), mine, value)
            else:
                self._add_put(home, way, value, above + path[: -len(way)])

    def _merges(self, value: Any) -> bool:
        if self._is_leaf is not None and self._is_leaf(type(value)):
            return False
        return isinstance(value, TREES)

    def _add_put(self, home: TensorDictBase, way: Path, value: Any, above: Path) -> None:
        """Plan to put a value into ``home``, or into the branch that is planned there."""
        place = above + way[:1]
        if place in self._puts:
            waiting = self._puts[place][2]
            if isinstance(waiting, TensorDictBase):
                if len(way) > 1:
                    self.add(waiting, [(way[1:], value)], place)
                    return
                if self._merges(value):
                    self.add(waiting, entries_of(value), place)
                    return
            elif len(way) > 1:
                raise KeyConflictError(
                    f"cannot set both {as_key(place)!r}, a leaf, and {as_key(above + way)!r}"
                )
        key = as_key(above + way) if above else as_key(way)
        if home._lock is not None:
            raise locked(f"set {key!r}")
        if home._device is not None:
            value = on_device(value, home._device, self._non_blocking, self._moved)
        value = home._admit(value, key, self._non_blocking)
        if isinstance(value, TensorDictBase):
            home._refuse_cycle(value, key)
            value = value._shallow_copy()
        if self._clone:
            value = self._cloned(value)
        self._puts[place] = (home, way[0], home._wrapped(way, value))

    def _cloned(self, value: Any) -> Any:
        """Return a copy; one for all that hold a tensor, so that a tie stays one."""
        if isinstance(value, TensorDictBase) and type(value) is value._kind:
            return value._rebuild(self._cloned, value._batch_size, value._names)
        if isinstance(value, TensorDictBase):
            return cast(Any, value).clone()
        if value not in self._clones:
            self._clones[value] = value.clone()
        return self._clones[value]

    def commit(self) -> None:
        written = [leaf for leaf, _, _ in self._copies]
        for place, (home, key, value) in self._puts.items():
            if any([value is leaf for leaf in written]):  # it is held as it was given
                self._puts[place] = home, key, cast(Tensor, value).clone()
        write(self._copies, self._non_blocking)
        for home, key, value in self._puts.values():
            home._put(key, value)


def _chosen(
    source: Mapping[Any, Any] | TensorDictBase, keys: Sequence[NestedKey] | None
) -> Iterable[tuple[NestedKey, Any]]:
    """Return the pairs of ``source``, or those of ``keys`` only."""
    if not isinstance(source, TREES):
        raise TypeError(f"update takes a mapping or a tree, not {type(source).__name__}")
    if keys is None:
        return entries_of(source)
    if isinstance(keys, str):
        raise TypeError(f"keys_to_update is a list of keys; write [{keys!r}]")
    return [(key, _found(source, key)) for key in keys]


def _found(source: Mapping[Any, Any] | TensorDictBase, key: NestedKey) -> Any:
    """Return what stands at a key of a tree, or of nested mappings; keys may be tuples there."""
    value: Any = source
    for step in (key,) if key in source else as_path(key):
        if isinstance(value, TensorDictBase):
            value = value._entry(as_path(step))
        elif isinstance(value, Mapping) and step in value:
            value = value[step]
        else:
            known = listing(source.keys() if isinstance(source, Mapping) else source._data)
            raise MissingKeyError(f"keys_to_update has {key!r}, the source only {known}")
    return value
