"""Flat and nested views of one tree, and how a view writes back.

``flatten_keys`` and ``unflatten_keys`` return a view: new nodes over the same leaves. Used as a
context manager, a view is a lens: when the block ends, the tree gets exactly what the view shows.
Each leaf of the view has a path in the tree: the one it came from if its name is still the same,
or else the one that its new name spells. Everything is planned and checked before the first
node changes, and branches that still exist are refilled rather than replaced.
"""

from abc import abstractmethod
from typing import Any, Self, cast

from torch import Tensor
from torch.nn import Parameter

from tdnn._core import IsLeaf, Scope, TensorDictBase, locked
from tdnn._keys import Path, as_key
from tdnn.errors import KeyConflictError

__all__ = ["Lenses"]


class Lenses(TensorDictBase):
    """flatten_keys and unflatten_keys."""

    __slots__ = ()

    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: IsLeaf | None = None
    ) -> Self:
        """Return a tree of one level, in which a name joins the parts of a nested key.

        As a context manager it is a lens: when the block ends, this tree ends up with what the
        flat one shows, be it set, deleted or renamed; a new name is split at the separator. An
        entry whose name was not touched returns to the path that it came from, even if a key
        contains the separator. Branches that still exist keep their identity, and branches that
        held no leaf stay. If an exception leaves the block, this tree is as it was.

        Args:
            separator: joins the parts.
            inplace: flatten this tree itself; as a context manager, for the block only.
            is_leaf: takes a type; branches of a type for which it is true stay whole.

        Returns:
            A tree of the same leaves (not copies), locked if this one is locked.

        Raises:
            KeyConflictError: two leaves would get the same name; both are named.
            RuntimeError: (on leaving) this tree was changed while the view was open.

        Example:
            >>> td = TensorDict({"0": {"weight": 1, "bias": 2}})
            >>> with td.flatten_keys(".") as flat:
            ...     _ = flat.rename_key_("0.weight", "stem.weight")
            >>> list(td.keys(True, True))
            [('0', 'bias'), ('stem', 'weight')]
        """
        if inplace and self._lock is not None:
            raise locked("flatten", "the tree")
        flat: dict[str, Any] = {}
        if not _flatten(self._data, "", separator, flat, is_leaf):
            raise _collision(_FlatLens(self, None, separator, is_leaf).pairs())
        if inplace:
            original = self._like(dict(self._data), self._batch_size, self._names)
            self._open(_FlatLens(original, None, separator, is_leaf))
            self._refill(flat)
            return self
        view = self._like(flat, self._batch_size, self._names)
        view._scope = _FlatLens(self, self, separator, is_leaf)
        if self._lock is not None:
            view._hold(None)
        return view

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """Return a tree in which the top-level keys are split into nested ones.

        As a context manager it is a lens, with the rules of :meth:`flatten_keys`: a new entry is
        written to this tree under its joined name.

        Args:
            separator: where keys are split.
            inplace: unflatten this tree itself; as a context manager, for the block only.

        Returns:
            A tree of the same leaves (not copies), locked if this one is locked.

        Raises:
            KeyConflictError: two leaves would get the same key, or a key would be both a leaf and a
                branch; both are named.
            RuntimeError: (on leaving) this tree was changed while the view was open.

        Example:
            >>> td = TensorDict({"0.weight": 1, "0.bias": 2})
            >>> with td.unflatten_keys(".") as nested:
            ...     del nested["0", "bias"]
            >>> list(td.keys())
            ['0.weight']
        """
        if inplace and self._lock is not None:
            raise locked("unflatten", "the tree")
        original = self
        if inplace:
            original = self._like(dict(self._data), self._batch_size, self._names)
        lens = _NestedLens(original, None if inplace else self, separator, None)
        nested = _split(original, separator)
        if nested is None:
            nested = _nest(original, lens.pairs())
        if inplace:
            self._open(lens)
            self._refill(nested._data)
            return self
        nested._scope = lens
        if self._lock is not None:
            nested._hold(None)
        return cast(Self, nested)


class _Lens(Scope):
    """A view's way back to the tree that it was made from."""

    __slots__ = ("_came_from", "_is_leaf", "_original", "_separator", "_target")

    def __init__(
        self,
        original: TensorDictBase,
        target: TensorDictBase | None,
        separator: str,
        is_leaf: IsLeaf | None,
    ) -> None:
        super().__init__()
        self._original = original  # the tree as it is shown
        self._target = target  # where to write; None: the view itself, changed in place
        self._separator = separator
        self._is_leaf = is_leaf
        self._came_from: list[tuple[Path, Path, Any]] = []

    @abstractmethod
    def pairs(self) -> list[tuple[Path, Path, Any]]:
        """Return ``(path in the view, path in the tree, value)`` for what the view shows."""

    @abstractmethod
    def back(self, path: Path) -> Path:
        """Return where a new path of the view belongs in the tree."""

    @abstractmethod
    def shown(self, view: TensorDictBase) -> list[tuple[Path, Any]]:
        """Return the paths and values of a view."""

    def enter(self, node: TensorDictBase) -> None:
        self._came_from = self.pairs()
        before = {path: id(value) for path, _, value in self._came_from}
        if before != {path: id(value) for path, value in self.shown(node)}:
            raise RuntimeError(
                "the tree or its view changed since the view was made; "
                "make it in the `with` statement itself"
            )

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        target = self._target
        if target is None:
            target = node
            shown = self.shown(node)
            node._refill(self._original._data)
        else:
            shown = self.shown(node)
        if failed:
            return
        now, then = self.pairs(), self._came_from
        if [(at, id(value)) for _, at, value in now] != [(at, id(value)) for _, at, value in then]:
            raise RuntimeError(
                "the tree was changed while a view of it was open, and neither can be kept "
                "without losing the other; change the view instead"
            )
        home = {path: at for path, at, _ in then}
        moves = [(path, home.get(path) or self.back(path), value) for path, value in shown]
        _write_back(target, _as_plan(moves), keep_empty=isinstance(self, _FlatLens))


class _FlatLens(_Lens):
    __slots__ = ()

    def pairs(self) -> list[tuple[Path, Path, Any]]:
        join = self._separator.join
        leaves = self._original._leaves(is_leaf=self._is_leaf)
        return [((join(path),), path, value) for path, value in leaves]

    def back(self, path: Path) -> Path:
        return (*path[0].split(self._separator), *path[1:])

    def shown(self, view: TensorDictBase) -> list[tuple[Path, Any]]:
        return _all_entries(view, (), self._is_leaf)


class _NestedLens(_Lens):
    __slots__ = ()

    def pairs(self) -> list[tuple[Path, Path, Any]]:
        split = self._separator
        return [
            ((*path[0].split(split), *path[1:]), path, value)
            for path, value in _all_entries(self._original, (), None)
        ]

    def back(self, path: Path) -> Path:
        return (self._separator.join(path),)

    def shown(self, view: TensorDictBase) -> list[tuple[Path, Any]]:
        return _all_entries(view, (), None)


class _Plan(dict[str, Any]):
    """What a branch shall hold: leaves, and further plans for branches."""

    __slots__ = ()


def _flatten(
    data: dict[str, Any], prefix: str, separator: str, flat: dict[str, Any], is_leaf: IsLeaf | None
) -> bool:
    """Add the leaves of ``data`` to ``flat`` by name; return False at the first collision."""
    for key, value in data.items():
        name = prefix + key
        kind = type(value)
        # Hot (test_flatten_speed): exact types before the isinstance call.
        if (
            kind is Tensor
            or kind is Parameter
            or not isinstance(value, TensorDictBase)
            or (is_leaf is not None and is_leaf(kind))
        ):
            if name in flat:
                return False
            flat[name] = value
        elif not _flatten(value._data, name + separator, separator, flat, is_leaf):
            return False
    return True


def _split(node: Any, separator: str) -> Any:
    """Return the tree of split keys in the plain case: only leaves, and no two in conflict.

    Hot (test_unflatten_speed): one split and one look-up a leaf. Otherwise return None, and leave
    branches and the wording of errors to :func:`_nest`.
    """
    root = node._like({}, node._batch_size, node._names)
    branches: dict[str, dict[str, Any]] = {}
    for name, value in node._data.items():
        if type(value) is not Tensor and isinstance(value, TensorDictBase):
            return None
        above, found, key = name.rpartition(separator)
        if not found:
            data = root._data
        elif above in branches:
            data = branches[above]
        else:
            data = root._data
            for step in above.split(separator):
                below = data.get(step)
                if below is None:
                    below = data[step] = node._like({}, node._batch_size, node._names)
                elif not isinstance(below, TensorDictBase):
                    return None
                data = below._data
            branches[above] = data
        if key in data:
            return None
        data[key] = value
    return root


def _all_entries(
    node: TensorDictBase, above: Path, is_leaf: IsLeaf | None
) -> list[tuple[Path, Any]]:
    """Return the leaves and the empty branches of a tree, with their paths."""
    found: list[tuple[Path, Any]] = []
    for key, value in node._data.items():
        path = (*above, key)
        if (
            isinstance(value, TensorDictBase)
            and value._data
            and not (is_leaf is not None and is_leaf(type(value)))
        ):
            found += _all_entries(value, path, is_leaf)
        else:
            found.append((path, value))
    return found


def _collision(pairs: list[tuple[Path, Path, Any]]) -> KeyConflictError:
    """Return the error that names the leaves which would share a name."""
    by_name: dict[Path, list[Path]] = {}
    for name, path, _ in pairs:
        by_name.setdefault(name, []).append(path)
    clashes = [
        f"{' and '.join(repr(as_key(path)) for path in paths)} would both be {as_key(name)!r}"
        for name, paths in by_name.items()
        if len(paths) > 1
    ]
    return KeyConflictError("; ".join(clashes))


def _as_plan(moves: list[tuple[Path, Path, Any]]) -> _Plan:
    """Return nested plans for ``(view path, tree path, value)``; refuse what cannot stand together.

    Raises:
        KeyConflictError: two entries for one place, or a place that would be a leaf and a branch.
    """
    plan = _Plan()
    origin: dict[Path, Path] = {}
    for shown, path, value in moves:
        at = plan
        for depth, step in enumerate(path[:-1]):
            below = at.setdefault(step, _Plan())
            if not isinstance(below, _Plan):
                other = origin[path[: depth + 1]]
                raise KeyConflictError(
                    f"{as_key(shown)!r} needs a branch where {as_key(other)!r} is an entry"
                )
            at = below
        if path[-1] in at:
            if isinstance(at[path[-1]], _Plan):
                other = next(at for to, at in origin.items() if to[: len(path)] == path)
                raise KeyConflictError(
                    f"{as_key(other)!r} needs a branch where {as_key(shown)!r} is an entry"
                )
            raise _collision([(path, origin[path], None), (path, shown, None)])
        at[path[-1]] = value
        origin[path] = shown
    return plan


def _nest(node: TensorDictBase, pairs: list[tuple[Path, Path, Any]]) -> Any:
    """Return a new tree with each value at its path in the view."""
    return _grown(node, _as_plan([(at, path, value) for path, at, value in pairs]))


def _grown(node: TensorDictBase, plan: _Plan) -> TensorDictBase:
    """Return a new node like ``node`` that holds ``plan``, with new branches where it has plans.

    A branch that stands in ``node`` already lends its batch size to the one that takes its place.
    """
    grown = node._like({}, node._batch_size, node._names)
    for key, value in plan.items():
        if isinstance(value, _Plan):
            below = node._data.get(key)
            grown._data[key] = _grown(below if isinstance(below, TensorDictBase) else grown, value)
        elif isinstance(value, TensorDictBase):
            grown._data[key] = value._like({}, value._batch_size, value._names)
        else:
            grown._data[key] = value
    return grown


def _write_back(target: TensorDictBase, plan: _Plan, keep_empty: bool) -> None:
    """Make ``target`` hold what ``plan`` says; nothing changes if any part is refused."""
    refills: list[tuple[TensorDictBase, dict[str, Any]]] = []
    _settle(target, plan, (), refills, keep_empty)
    for node, _ in refills:
        if node._lock is not None:
            raise locked("write the view back to", "the tree")
    for node, data in refills:
        node._refill(data)


def _settle(
    node: TensorDictBase,
    plan: _Plan,
    above: Path,
    refills: list[tuple[TensorDictBase, dict[str, Any]]],
    keep_empty: bool,
) -> dict[str, Any]:
    """Return what ``node`` shall hold, noting the branches to refill, the deepest first.

    Entries keep their places; new ones follow.
    """
    data: dict[str, Any] = {}
    mine = node._data
    for key, value in mine.items():
        if key in plan:
            data[key] = _settled(node, plan[key], value, (*above, key), refills, keep_empty)
        elif keep_empty and isinstance(value, TensorDictBase):
            # A flat view does not show empty branches, so they are not the user's to remove.
            left = _settle(value, _Plan(), (*above, key), refills, keep_empty)
            if left or not value._data:
                data[key] = value
    for key, value in plan.items():
        if key not in mine:
            data[key] = _settled(node, value, None, (*above, key), refills, keep_empty)
    if [(key, id(v)) for key, v in data.items()] != [(key, id(v)) for key, v in mine.items()]:
        refills.append((node, data))
    return data


def _settled(
    node: TensorDictBase,
    value: Any,
    before: Any,
    path: Path,
    refills: list[tuple[TensorDictBase, dict[str, Any]]],
    keep_empty: bool,
) -> Any:
    """Return the entry of ``node`` for one value of a plan."""
    if isinstance(value, _Plan):
        if isinstance(before, TensorDictBase):
            _settle(before, value, path, refills, keep_empty)
            return before
        made = node._like({}, node._batch_size, node._names)
        made._data.update(_settle(made, value, path, [], keep_empty))
        return made
    if value is before:
        return before
    both = isinstance(value, TensorDictBase) and isinstance(before, TensorDictBase)
    if both and not value._data and not before._data:
        return before
    return node._admit(value, as_key(path))
