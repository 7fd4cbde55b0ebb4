"""Flat and nested views of one tree, and how a view writes back.

``flatten_keys`` and ``unflatten_keys`` return a view: new nodes over the same leaves. Used as a
context manager, a view is a lens: when the block ends, the tree gets exactly what the view shows.
Each leaf of the view has a path in the tree: the one it came from if its name is still the same,
or else the one that its new name spells. Everything is planned and checked before the first
node changes, and branches that still exist are refilled rather than replaced.
"""

from abc import abstractmethod
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from tdnn._core import IsLeaf, Scope, TensorDictBase, locked
from tdnn._declared import common_start
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
            raise locked("flatten the tree")
        _require_text(separator)
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
            raise locked("unflatten the tree")
        _require_text(separator)
        if not separator:
            raise ValueError("a separator to split keys at has at least one character")
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

    __slots__ = ("_came_from", "_declared", "_is_leaf", "_original", "_separator", "_target")

    _keeps_empty = False  # a view that does not show empty branches must not remove them

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
        self._declared: Any = None  # the batch size and names of the view when the block began

    @abstractmethod
    def pairs(self) -> list[tuple[Path, Path, Any]]:
        """Return ``(shown, home, value)`` for what the view shows: the path there, and its own."""

    @abstractmethod
    def back(self, path: Path) -> Path:
        """Return where a new path of the view belongs in the tree."""

    @abstractmethod
    def shown(self, view: TensorDictBase) -> list[tuple[Path, Any]]:
        """Return the paths and values of a view."""

    def hidden(self, view: TensorDictBase) -> list[tuple[Path, Path, Any]]:
        """Return, like ``pairs``, the empty branches that the view holds without showing them."""
        return []

    def enter(self, node: TensorDictBase) -> None:
        self._original._refuse_lost_writes()
        self._came_from = self.pairs()
        self._declared = node._batch_size, node._names
        before = {shown: value for shown, _, value in self._came_from}
        shown = self.shown(node)
        if len(shown) != len(before) or not all(
            [path in before and _alike(before[path], value) for path, value in shown]
        ):
            raise RuntimeError(
                "the tree or its view changed since the view was made; "
                "make it in the `with` statement itself"
            )

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        if self._target is None:
            self._leave_in_place(node, failed)
        elif not failed:
            self._give_back(node, self._target)

    def _leave_in_place(self, node: TensorDictBase, failed: bool) -> None:
        """Bring the tree back that ``node`` was, then give it what ``node`` shows."""
        original = self._original
        view = node._like(dict(node._data), node._batch_size, node._names)
        lock, node._lock = node._lock, None  # a lock set in the block is for what it leaves behind
        node._refill(original._data)
        try:
            if failed:
                node._batch_size, node._names = original._batch_size, original._names
            else:
                self._give_back(view, node)
        finally:
            if lock is not None:
                node._hold(None)
                node._lock = lock

    def _give_back(self, view: TensorDictBase, target: TensorDictBase) -> None:
        """Make ``target`` hold what ``view`` shows."""
        now, then = self.pairs(), self._came_from
        if len(now) != len(then) or not all(
            [
                here == there and one is two
                for (_, here, one), (_, there, two) in zip(now, then, strict=True)
            ]
        ):
            raise RuntimeError(
                "the tree was changed while a view of it was open, and neither can be kept "
                "without losing the other; change the view instead"
            )
        homes = {shown: home for shown, home, _ in then}
        plan = _as_branch_plan(
            [
                (shown, homes.get(shown) or self.back(shown), value)
                for shown, value in self.shown(view)
            ]
        )
        for _, home, value in self.hidden(view):
            _add_hidden(plan, home, value)
        self.describe(plan, view)
        size, names = self._declared
        before = target._batch_size, target._names
        if view._batch_size != size:  # what it took in fits the size that it has now
            target._batch_size = common_start([target._batch_size, view._batch_size])
            target._names = None
        try:
            _WriteBack(target, plan, self._keeps_empty).commit()
        except BaseException:
            target._batch_size, target._names = before
            raise
        if view._batch_size != size:
            target.batch_size = view._batch_size
        if view._batch_size != size or view._names != names:
            target._set_names(view._names)

    def describe(self, plan: "_BranchPlan", view: TensorDictBase) -> None:
        """Note the branches of the view whose batch size new branches of the tree take over."""


class _FlatLens(_Lens):
    __slots__ = ()

    _keeps_empty = True

    def pairs(self) -> list[tuple[Path, Path, Any]]:
        join = self._separator.join
        leaves = self._original._leaves(is_leaf=self._is_leaf)
        return [((join(home),), home, value) for home, value in leaves]

    def back(self, path: Path) -> Path:
        parts = path[0].split(self._separator) if self._separator else [path[0]]
        return (*parts, *path[1:])

    def shown(self, view: TensorDictBase) -> list[tuple[Path, Any]]:
        return _all_entries(view, (), self._is_leaf)

    def describe(self, plan: "_BranchPlan", view: TensorDictBase) -> None:
        for key, value in view._data.items():
            if isinstance(value, TensorDictBase):
                _describe(plan, self.back((key,)), value)


class _NestedLens(_Lens):
    __slots__ = ()

    def pairs(self) -> list[tuple[Path, Path, Any]]:
        return self._sorted_out()[0]

    def hidden(self, view: TensorDictBase) -> list[tuple[Path, Path, Any]]:
        return [found for found in self._sorted_out()[1] if found[0] in view]

    def _sorted_out(self) -> tuple[list[Any], list[Any]]:
        """Return what the view shows, and the empty branches in whose place others stand."""
        split = self._separator
        found = [
            ((*home[0].split(split), *home[1:]), home, value)
            for home, value in _all_entries(self._original, (), None)
        ]
        branches = {shown[:end] for shown, _, _ in found for end in range(1, len(shown))}
        pairs, hidden = [], []
        for shown, home, value in found:
            if isinstance(value, TensorDictBase) and shown in branches:
                hidden.append((shown, home, value))
            else:
                pairs.append((shown, home, value))
                if isinstance(value, TensorDictBase):
                    branches.add(shown)
        return pairs, hidden

    def back(self, path: Path) -> Path:
        return (self._separator.join(path),)

    def shown(self, view: TensorDictBase) -> list[tuple[Path, Any]]:
        return _all_entries(view, (), None)


class _BranchPlan(dict[str, Any]):
    """What a branch shall hold: leaves, and further plans for branches."""

    __slots__ = ("like",)

    def __init__(self) -> None:
        super().__init__()
        self.like: TensorDictBase | None = None  # what a branch made for it takes after


def _require_text(separator: str) -> None:
    if not isinstance(separator, str):
        raise TypeError(f"a separator is a str, not {separator!r}")


def _alike(one: Any, other: Any) -> bool:
    """Return whether two entries are the same; a view has empty branches of its own.

    Here and below objects are compared with ``is``: under ``torch.compile`` an ``id`` would be a
    guard, and every call a recompile.
    """
    if one is other:
        return True
    both = isinstance(one, TensorDictBase) and isinstance(other, TensorDictBase)
    return both and not one._data and not other._data


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
    homes: dict[Path, list[Path]] = {}
    for shown, home, _ in pairs:
        homes.setdefault(shown, []).append(home)
    clashes = [
        f"{' and '.join(repr(as_key(path)) for path in paths)} would both be {as_key(shown)!r}"
        for shown, paths in homes.items()
        if len(paths) > 1
    ]
    return KeyConflictError("; ".join(clashes))


def _as_branch_plan(moves: list[tuple[Path, Path, Any]]) -> _BranchPlan:
    """Return nested plans for ``(shown, home, value)``; refuse what cannot stand together.

    Raises:
        KeyConflictError: two entries for one place, or a place that would be a leaf and a branch.
    """
    plan = _BranchPlan()
    origin: dict[Path, Path] = {}  # where each home is shown
    for shown, home, value in moves:
        below = plan
        for depth, step in enumerate(home[:-1]):
            below = below.setdefault(step, _BranchPlan())
            if not isinstance(below, _BranchPlan):
                other = origin[home[: depth + 1]]
                raise KeyConflictError(
                    f"{as_key(shown)!r} needs a branch where {as_key(other)!r} is an entry"
                )
        if home[-1] in below:
            if isinstance(below[home[-1]], _BranchPlan):
                other = next(at for to, at in origin.items() if to[: len(home)] == home)
                raise KeyConflictError(
                    f"{as_key(other)!r} needs a branch where {as_key(shown)!r} is an entry"
                )
            raise _collision([(home, origin[home], None), (home, shown, None)])
        below[home[-1]] = value
        origin[home] = shown
    return plan


def _add_hidden(plan: _BranchPlan, home: Path, value: Any) -> None:
    """Add an empty branch of the tree to the plan, unless something stands there or below."""
    below: Any = plan
    for step in home[:-1]:
        below = below.setdefault(step, _BranchPlan())
        if not isinstance(below, _BranchPlan):
            return
    below.setdefault(home[-1], value)


def _describe(plan: Any, path: Path, branch: TensorDictBase) -> None:
    """Let the plans at ``path`` and below take after ``branch`` and the branches below it."""
    for step in path:
        if not isinstance(plan, _BranchPlan) or step not in plan:
            return
        plan = plan[step]
    if isinstance(plan, _BranchPlan):
        plan.like = branch
        for key, value in branch._data.items():
            if isinstance(value, TensorDictBase):
                _describe(plan, (key,), value)


def _nest(node: TensorDictBase, pairs: list[tuple[Path, Path, Any]]) -> Any:
    """Return a new tree with each value at its path in the view."""
    return _grown(node, _as_branch_plan([(home, shown, value) for shown, home, value in pairs]))


def _grown(node: TensorDictBase, plan: _BranchPlan) -> TensorDictBase:
    """Return a new node like ``node`` that holds ``plan``, with new branches where it has plans.

    A branch that stands in ``node`` already lends its batch size to the one that takes its place.
    """
    grown = node._like({}, node._batch_size, node._names)
    for key, value in plan.items():
        if isinstance(value, _BranchPlan):
            below = node._data.get(key)
            grown._data[key] = _grown(below if isinstance(below, TensorDictBase) else grown, value)
        elif isinstance(value, TensorDictBase):
            grown._data[key] = value._like({}, value._batch_size, value._names)
        else:
            grown._data[key] = value
    return grown


class _WriteBack:
    """The changes that make a tree hold a plan; all are known before the first is made.

    Entries keep their places; new ones follow. A branch that still exists is refilled. Where one
    branch stands under two keys and the plan differs, the first keeps it.
    """

    __slots__ = ("_keep_empty", "_places", "_planned")

    def __init__(self, target: TensorDictBase, plan: _BranchPlan, keep_empty: bool) -> None:
        self._keep_empty = keep_empty
        self._planned: list[tuple[TensorDictBase, dict[str, Any]]] = []
        self._places: dict[int, int] = {}
        self._branch(target, plan, ())

    def commit(self) -> None:
        """Refill the branches that change; nothing changes if one is locked."""
        changed = [(node, data) for node, data in self._planned if not _same(node._data, data)]
        if any(node._lock is not None for node, _ in changed):
            raise locked("write the view back to the tree")
        for node, data in changed:
            node._refill(data)

    def _branch(self, node: TensorDictBase, plan: _BranchPlan, path: Path) -> TensorDictBase:
        """Plan what ``node`` shall hold, and return it or the one that takes its place."""
        return self._plan_node(node, self._wanted(node, plan, path))

    def _plan_node(self, node: TensorDictBase, data: dict[str, Any]) -> TensorDictBase:
        first = self._earlier(node)
        if first is None:
            if not torch.compiler.is_compiling():
                self._places[id(node)] = len(self._planned)
            self._planned.append((node, data))
        if first is None or _same(first, data):
            return node
        return node._like(data, node._batch_size, node._names)

    def _earlier(self, node: TensorDictBase) -> dict[str, Any] | None:
        """Return what was planned for a branch that was met before."""
        if torch.compiler.is_compiling():  # no id, as above
            found = [data for other, data in self._planned if other is node]
            return found[0] if found else None
        at = self._places.get(id(node))
        return None if at is None else self._planned[at][1]

    def _wanted(self, node: TensorDictBase, plan: _BranchPlan, above: Path) -> dict[str, Any]:
        """Return what ``node`` shall hold by the plan."""
        data: dict[str, Any] = {}
        mine = node._data
        for key, value in mine.items():
            path = (*above, key)
            if key in plan:
                data[key] = self._entry(node, plan[key], value, path)
            elif self._keep_empty and isinstance(value, TensorDictBase):
                # A flat view does not show empty branches, so they are not the user's to remove.
                left = self._wanted(value, _BranchPlan(), path)
                if left or not value._data:
                    data[key] = self._plan_node(value, left)
        for key, value in plan.items():
            if key not in mine:
                data[key] = self._entry(node, value, None, (*above, key))
        return data

    def _entry(self, node: TensorDictBase, value: Any, before: Any, path: Path) -> Any:
        """Return the entry of ``node`` for one value of a plan."""
        if isinstance(value, _BranchPlan):
            if isinstance(before, TensorDictBase):
                return self._branch(before, value, path)
            return self._made(node, value, path)
        if value is before:
            return before
        both = isinstance(value, TensorDictBase) and isinstance(before, TensorDictBase)
        if both and not value._data:
            return self._plan_node(before, {})
        return node._admit(value, as_key(path))

    def _made(self, node: TensorDictBase, plan: _BranchPlan, path: Path) -> TensorDictBase:
        """Return a new branch for a plan, below ``node``."""
        size, names = node._batch_size, node._names
        if plan.like is not None and plan.like._batch_size[: len(size)] == size:
            size, names = plan.like._batch_size, plan.like._names
        made = node._like({}, size, names)
        made._data.update(self._wanted(made, plan, path))
        return made


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two dicts hold the same objects under the same keys in the same order."""
    if len(one) != len(other):
        return False
    pairs = zip(one.items(), other.items(), strict=True)
    return all([key == name and value is found for (key, value), (name, found) in pairs])
