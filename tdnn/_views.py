"""The keys, items and values of a tree, at one level or at all of them."""

from collections.abc import Iterator, Set
from itertools import chain
from typing import Any, cast

from torch import Tensor
from torch.nn import Parameter

from tdnn._core import IsLeaf, TensorDictBase
from tdnn._keys import NestedKey, Path, as_path
from tdnn._marks import ABSENT

__all__ = ["Views"]


class Views(TensorDictBase):
    """keys, items and values."""

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
            What supports ``in``, ``len`` and set operations: a view that follows the tree, but,
            with ``leaves_only`` or ``sort`` at one level, the keys as they are now.

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

        Returns:
            A view of one level that follows the tree; with any argument, a list of what is there.

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

        Returns:
            A view of one level that follows the tree; with any argument, a list of what is there.

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


class NestedKeys(Set[NestedKey]):
    """The keys of a tree at every depth; follows the tree, and compares like a set.

    Hot (test_keys_nested): ``list(view)`` asks for the iterator, then for the length, then for
    the first key. The iterator walks over the tree only then, if no length was asked for before.
    """

    __slots__ = ("_found", "_is_leaf", "_leaves_only", "_node", "_sort")

    def __init__(
        self, node: TensorDictBase, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool
    ) -> None:
        self._node = node
        self._leaves_only = leaves_only
        self._is_leaf = is_leaf
        self._sort = sort
        self._found: list[Any] | None = None

    def __iter__(self) -> Iterator[NestedKey]:
        self._found = None
        return chain.from_iterable(map(NestedKeys._given, (self,)))

    def __len__(self) -> int:
        self._found = found = self._walk()
        return len(found)

    def _given(self) -> list[Any]:
        """Return the keys that a length was taken of since the iterator was made, or walk."""
        found, self._found = self._found, None
        return self._walk() if found is None else found

    def _walk(self) -> list[Any]:
        if self._sort or self._is_leaf is not None:
            found = _nested(self._node, self._leaves_only, self._is_leaf, self._sort)
            return [key for key, _ in found]
        keys: list[Any] = []
        for key, value in self._node._data.items():
            if type(value) is not Tensor and isinstance(value, TensorDictBase):
                _add_keys(value._data, (key,), keys, self._leaves_only)
                if self._leaves_only:
                    continue
            keys.append(key)
        return keys

    def __contains__(self, key: object) -> bool:
        if self._is_leaf is not None:
            return key in list(self)
        found = self._node.get(cast(NestedKey, key), ABSENT)
        return found is not ABSENT and not (self._leaves_only and isinstance(found, TensorDictBase))

    def __repr__(self) -> str:
        return f"NestedKeys({list(self)})"

    @classmethod
    def _from_iterable(cls, keys: Any) -> Any:
        return set(keys)


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
        # Hot (test_items_nested): the exact type before the isinstance call; joined tuples.
        path = prefix + (key,)  # noqa: RUF005
        kind = type(value)
        is_branch = kind is not Tensor and isinstance(value, TensorDictBase)
        if is_branch and (is_leaf is None or not is_leaf(kind)):
            _add_nested(value._data, path, found, leaves_only, is_leaf)
            if leaves_only:
                continue
        found.append((path, value))


def _add_keys(data: dict[str, Any], prefix: Path, keys: list[Any], leaves_only: bool) -> None:
    for key, value in data.items():
        # Hot (test_keys_nested): joining tuples is quicker than unpacking them.
        path = prefix + (key,)  # noqa: RUF005
        if type(value) is not Tensor and isinstance(value, TensorDictBase):
            _add_keys(value._data, path, keys, leaves_only)
            if leaves_only:
                continue
        keys.append(path)


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
