"""The lock of a tree, and what a ``with`` block on a tree restores."""

import weakref
from typing import Any, Self, cast

from torch.compiler import is_compiling

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
        context manager, restore on exit what was before; what another locked tree holds by then
        stays locked.

        Example:
            >>> td = TensorDict({"a": 1})
            >>> with td.lock_():
            ...     td["b"] = 2
            Traceback (most recent call last):
            ...
            tdnn.errors.LockedError: cannot set 'b': the tree is locked; use unlock_() first, ...
        """
        self._open(_Relock(self))
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
        scope = _Relock(self)
        self._refuse_held()
        self._release()
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
            # A new list, never +=: a kept swap knows by it whether the tree stayed locked.
            self._lock = self._lock + mine

    def _refuse_held(self) -> None:
        """Raise if a locked tree that is not part of this one holds this node or one below it."""
        nodes: list[Node] = []
        self._gather(nodes)
        mine = None if is_compiling() else set(map(id, nodes))  # an id would be a guard there
        for node in nodes:
            for holder in node._lock or ():
                tree = holder()
                if tree is None:
                    continue
                if not (any([tree is one for one in nodes]) if mine is None else id(tree) in mine):
                    raise LockedError(
                        "cannot unlock: the tree, or a branch of it, is part of another locked "
                        "tree; unlock that one first"
                    )

    def _gather(self, nodes: list[Node]) -> None:
        nodes.append(self)
        for branch in self._branches():
            branch._gather(nodes)

    def _release(self) -> None:
        self._lock = None
        for branch in self._branches():
            branch._release()

    def _let_go(self, holders: "tuple[Node, ...]", stay: list[Node]) -> None:
        """Unlock this node and what is below it, but for what another locked tree holds.

        Args:
            holders: the nodes above that let it go.
            stay: branches that were locked before, on their own or by another tree.
        """
        gone = (None, *holders)
        held = self._lock or ()
        others = [ref for ref in held if not any([ref() is node for node in gone])]
        if others or any([self is branch for branch in stay]):
            self._lock = others
            return
        self._lock = None
        for branch in self._branches():
            branch._let_go((*holders, self), stay)

    def _locked_branches(self) -> list[Node]:
        """Return the locked branches below this node, without those below another one."""
        found: list[Node] = []
        for branch in self._branches():
            found += branch._locked_branches() if branch._lock is None else [branch]
        return found

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
                "`with` needs a change that it can undo, made just before: to_module(net), "
                "lock_(), unlock_(), flatten_keys() or unflatten_keys(); each call serves one block"
            )
        scope.enter(self)
        scope.entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        scope = cast(Scope, self._scope)
        if not scope.entered:  # announced inside the block by a call without a `with`
            scope = cast(Scope, scope.outer)
        self._scope = scope.outer
        scope.leave(self, kind is not None)


class _Relock(Scope):
    """Puts the locks back as they were when the block was announced."""

    __slots__ = ("_locked_branches", "_was_locked")

    def __init__(self, node: Lockable) -> None:
        super().__init__()
        self._was_locked = node._lock is not None
        self._locked_branches = [] if self._was_locked else node._locked_branches()

    def leave(self, node: Lockable, failed: bool) -> None:
        if self._was_locked:
            if node._lock is None:
                node._hold(None)
            return
        node._let_go((), self._locked_branches)


def locked(action: str) -> LockedError:
    """Return the error for an action, such as ``"set 'a'"``, that a lock forbids."""
    return LockedError(
        f"cannot {action}: the tree is locked; use unlock_() first, "
        "or write into the existing tensors with set_() or update_()"
    )
