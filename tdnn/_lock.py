"""The lock of a tree, and what a ``with`` block on a tree restores."""

import weakref
from typing import Any, Self, cast

from tdnn._keys import NestedKey
from tdnn._node import Node, Scope
from tdnn.errors import LockedError

__all__ = ["Lockable", "locked"]


class Lockable(Node):
    """lock_, unlock_, is_locked, and blocks."""

    __slots__ = ()

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

    def _hold(self, holder: "weakref.ref[Any] | None") -> None:
        """Lock this node, on behalf of the locked parent ``holder`` or on its own."""
        mine: list[weakref.ref[Any]] = [] if holder is None else [holder]
        if self._lock is None:
            self._lock = mine
            me = weakref.ref(self)
            for branch in self._branches():
                branch._hold(me)
        else:
            self._lock = self._lock + mine

    def _refuse_held(self, holder: "weakref.ref[Any] | None") -> None:
        """Raise if a locked tree other than ``holder`` holds this node or one below it."""
        if any(other is not holder and other() is not None for other in self._lock or ()):
            raise LockedError(
                "cannot unlock: the tree, or a branch of it, is part of another locked tree; "
                "unlock that one first"
            )
        me = weakref.ref(self)
        for branch in self._branches():
            branch._refuse_held(me)

    def _release(self, holder: "weakref.ref[Any] | None") -> None:
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


class _Relock(Scope):
    """Puts the lock back as it was when the block was announced."""

    __slots__ = ("_was_locked",)

    def __init__(self, was_locked: bool) -> None:
        super().__init__()
        self._was_locked = was_locked

    def leave(self, node: Lockable, failed: bool) -> None:
        if self._was_locked and node._lock is None:
            node._hold(None)
        elif not self._was_locked and node._lock is not None:
            node._refuse_held(None)
            node._release(None)


def locked(action: str, key: NestedKey) -> LockedError:
    return LockedError(
        f"cannot {action} {key!r}: the tree is locked; use unlock_() first, "
        "or write into the existing tensors with set_() or update_()"
    )
