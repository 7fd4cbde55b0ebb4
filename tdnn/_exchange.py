"""How the leaves of a tree get into a module, and the module's own values back.

An exchange is planned and checked as a whole, then written slot by slot, and undone the same way.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.nn.modules.lazy import LazyModuleMixin

from tdnn import _claims
from tdnn._core import Scope, TensorDictBase
from tdnn._held import held_tree
from tdnn._keys import NestedKey, Path, as_key, listing
from tdnn._node import itself
from tdnn._plan import (
    UNINITIALISED,
    Plan,
    batched,
    forget_plan,
    module_title,
    nodes_of,
    plan_for,
    refuse,
)
from tdnn._transforms import in_transform, is_transformed
from tdnn._turn import GONE, Filled, Turn
from tdnn._writes import same_value
from tdnn.errors import SwapError

__all__ = ["Exchange", "SlotExchange", "can_copy"]

_ONLY_PARAMETERS = {Parameter}
_UNUSUAL = (TensorDictBase, *UNINITIALISED)


class Exchange(Scope):
    """A swap; ``put`` and ``leave`` come in pairs that may be nested and repeated."""

    __slots__ = ("_found", "_root", "_stack", "_tree")

    def __init__(self, tree: TensorDictBase, module: nn.Module) -> None:
        super().__init__()
        self._tree = tree
        self._root = module
        self._stack: list[Any] = []  # a Claim for each `put` that was not left yet
        self._found: Any = None  # what the module held before the first of them

    @abstractmethod
    def put(self, is_open: bool = False) -> None:
        """Bring the tree's values into the module; after an error nothing has changed.

        Args:
            is_open: for a block that begins now.
        """

    @abstractmethod
    def found(self) -> Sequence[Any]:
        """Return what the module held before the first ``put``."""

    @abstractmethod
    def found_tree(self) -> TensorDictBase:
        """Return that as a tree."""

    def wrap_parameters(self, own: Sequence[Any], to_stay: bool) -> None:
        """Make what stands for a parameter one, for as long as no block begins.

        Only tensors that replace others need it. Those in ``own`` are a module's and are on their
        way back: they stay what they are. ``to_stay``: no block will begin.
        """

    def enter(self, node: TensorDictBase) -> None:
        """Begin a block: the first one with what ``put`` brought in, later ones anew."""
        if not _claims.begin(self._stack):
            self.put(is_open=True)


class SlotExchange(Exchange):
    """The leaves themselves in the slots of a module."""

    __slots__ = ("_all_parameters", "_last")

    def __init__(self, tree: TensorDictBase, module: nn.Module) -> None:
        super().__init__(tree, module)
        self._all_parameters = False
        self._last: Any = None  # the plan, the lock of the tree, and its leaves

    # -- in ------------------------------------------------------------------------------------

    def put(self, is_open: bool = False) -> None:
        plan, leaves = self._read()
        turn = self._new_turn(plan)
        turn.is_open = is_open
        try:
            _claims.take(turn)
            turn.read()
            turn.bring_in(self._checked(turn, leaves))
        except BaseException as error:
            try:
                if turn.owed is not None:
                    turn.restore()
            finally:
                _claims.release(turn)
            # The module may have lost a slot since it was planned.
            if turn.owed is None and isinstance(error, KeyError):
                self._last = None
                forget_plan(self._tree)
                self.put(is_open)
                return
            raise
        self._stack.append(turn)
        if self._found is None:
            self._found = plan, turn.found()

    def _read(self) -> tuple[Plan, list[Any]]:
        """Return the plan and the leaves, which are those of the last time in a locked tree."""
        tree, lock = self._tree, self._tree._lock
        if tree._batch_size and not isinstance(self._root, TensorDictBase):
            raise batched(tree, self._root)
        if self._last is not None and lock is not None and not is_compiling():
            plan, last_lock, new = self._last
            if lock is last_lock and plan.fits_module(self._root):
                return plan, new
        plan = plan_for(tree, self._root)
        try:
            new = plan.leaves()
        except KeyError:  # an entry was renamed since it was planned
            forget_plan(tree)
            plan = plan_for(tree, self._root)
            new = plan.leaves()
        kinds = set(map(type, new))
        self._all_parameters = kinds == _ONLY_PARAMETERS
        if not self._all_parameters and any([issubclass(k, _UNUSUAL) for k in kinds]):
            plan, new = self._look_at(plan, new)
        self._last = (plan, lock, new) if plan.is_plain and lock is not None else None
        return plan, new

    def _new_turn(self, plan: Plan) -> Turn:
        return Turn(plan, self._root)

    def _checked(self, turn: Turn, leaves: list[Any]) -> list[Any]:
        """Return what goes into the slots: of two leaves for one slot, the first.

        Raises:
            SwapError: the leaves have two values for one slot, or for one tensor of the module.
        """
        if is_compiling():
            return leaves
        plan, held = turn.plan, turn.at_start
        if plan.is_tied is None:
            plan.is_tied = len(set(map(id, held))) < len(held)  # with slots that have two names
        if not plan.is_tied:
            return leaves
        slots = plan.slot_ids()
        debts = _claims.all_debts()  # what stands in the slots now may be tied by another tree
        own = [debts.get(slot, value) for slot, value in zip(slots, held, strict=True)]
        places = [
            slot if value is None else id(value) for slot, value in zip(slots, own, strict=True)
        ]
        self._refuse_two_values(plan, places, leaves)
        first: dict[Any, Any] = {}
        new = [first.setdefault(slot, leaf) for slot, leaf in zip(slots, leaves, strict=True)]
        turn.twins = [(leaf, one) for leaf, one in zip(leaves, new, strict=True) if leaf is not one]
        return new if turn.twins else leaves

    def _look_at(self, plan: Plan, new: list[Any]) -> tuple[Plan, list[Any]]:
        """Return a plan and leaves that fit; some of those given are branches, or without a value.

        Raises:
            MissingKeyError: there is a branch for a slot.
            SwapError: there are leaves without a value for modules that would not give them one.
        """
        tree, root = self._tree, self._root
        if any([isinstance(leaf, TensorDictBase) for leaf in new]):
            # A leaf has become a branch since it was planned, and its slot perhaps a module.
            forget_plan(tree)
            plan = Plan(tree, root)
            new = plan.leaves()
            if any([isinstance(leaf, TensorDictBase) for leaf in new]):
                refuse(tree, root)
        waiting = plan.owners(root, LazyModuleMixin)
        faults = [
            as_key(path)
            for path, slots, leaf in zip(plan.paths(tree, root), plan.targets, new, strict=True)
            if isinstance(leaf, UNINITIALISED) and id(slots) not in waiting
        ]
        if faults:
            raise SwapError(
                f"{listing(faults)} of the tree have no value yet, and the modules that they are "
                "for are initialised; a `with` block makes a module lazy again when it ends"
            )
        return plan, new

    def _refuse_two_values(self, plan: Plan, places: Sequence[Any], new: list[Any]) -> None:
        """Raise if the tree has two values for one of the ``places``."""
        first: dict[Any, int] = {}
        faults = []
        for i, place in enumerate(places):
            at = first.setdefault(place, i)
            one, two = new[at], new[i]
            if one is two or is_transformed(two):
                continue
            if (one.shape, one.dtype) != (two.shape, two.dtype) or not same_value(one, two):
                faults.append(f"{self._key(plan, at)!r} and {self._key(plan, i)!r}")
        if faults:
            raise SwapError(
                f"cannot swap into {module_title(self._root)}: {'; '.join(faults)} are one tensor "
                "there and have two values in the tree; give both names one tensor"
            )

    def _key(self, plan: Plan, i: int) -> NestedKey:
        return as_key(plan.paths(self._tree, self._root)[i])

    def wrap_parameters(self, own: Sequence[Any], to_stay: bool) -> None:
        """Wrap plain tensors in ``nn.Parameter`` where a parameter was; a block unwraps them.

        Tensors that need a gradient, and all tensors inside a functorch transform, stay as they
        are, or else no gradient would reach them.
        """
        turn = self._stack[-1]
        if self._all_parameters or (not to_stay if is_compiling() else in_transform()):
            return
        tag: Callable[[Any], Any] = itself if is_compiling() else id
        as_they_are = set(map(tag, own))
        buffers = set() if is_compiling() else {id(slots) for _, slots in turn.plan.buffers}
        made: dict[tuple[Any, bool], Parameter] = {}  # so that a tie of the tree stays one,
        tied: dict[Any, Parameter] = {}  # and one of the module, for which there is one value
        wrapped = []
        for slots, before, leaf in zip(turn.plan.targets, turn.owed, turn.new, strict=True):
            if (
                # Exact types first: torch has isinstance(…, Parameter) call Python.
                (type(leaf) is Tensor or not isinstance(leaf, Parameter))
                and (type(before) is Parameter or isinstance(before, Parameter))
                and not leaf.requires_grad
                and tag(leaf) not in as_they_are
                and not (buffers and id(slots) in buffers)
            ):
                flag = before.requires_grad and _can_need_gradient(leaf)
                look = tag(leaf), flag
                if look not in made:
                    one = tied.get(tag(before)) if turn.plan.is_tied else None
                    made[look] = Parameter(leaf, requires_grad=flag) if one is None else one
                leaf = tied[tag(before)] = made[look]
            wrapped.append(leaf)
        if made:
            turn.wrapped = wrapped
            turn.write(wrapped)

    def enter(self, node: TensorDictBase) -> None:
        """Begin a block, on the leaves themselves."""
        super().enter(node)
        turn = self._stack[-1]
        if turn.wrapped:
            turn.write(turn.new)
            turn.wrapped = ()

    # -- out -----------------------------------------------------------------------------------

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: the slots as they were; what was assigned to them goes into the tree."""
        turn = self._stack.pop()
        try:
            left, filled, news = self._undo(turn, failed)
        finally:
            _claims.release(turn)
        if news or turn.twins:
            self._follow(news, turn.twins)
        if turn.covered and not failed:
            raise SwapError(
                f"the block put something in the place of {', '.join(turn.covered)} (such as a "
                "parametrization), so that the module no longer reads what it got back; "
                "change the structure of a module outside of blocks"
            )
        if not failed and (filled or left is not turn.new):
            self._write_back(turn, left, filled)

    def _follow(
        self, news: Sequence[tuple[Tensor, Tensor]], twins: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Write into leaves that were not in the slots themselves."""
        with torch.no_grad():
            for leaf, value in news:
                leaf.copy_(value)
            for leaf, one in twins:
                if not (is_transformed(one) or same_value(leaf, one)):
                    leaf.copy_(one)

    def _undo(
        self, turn: Turn, failed: bool
    ) -> tuple[list[Any], list[Filled], Sequence[tuple[Tensor, Tensor]]]:
        """Bring the slots back.

        Returns:
            What was left in them, what was left in those that held None, and what the leaves are
            to hold that were not in the slots themselves.
        """
        now = turn.held_now()
        later = _claims.later(turn)
        handed = turn.hand_over(later, now) if later else {}
        left = now
        if handed:
            pairs = zip(turn.plan.slot_ids(), now, strict=True)
            left = [handed.get(slot, value) for slot, value in pairs]
        filled = turn.take_out(handed)
        try:
            news = () if failed else turn.news(left, lambda at: self._key(turn.plan, at))
        finally:
            turn.restore()
            if filled or left is not turn.new or not turn.plan.has_order():
                turn.restore_order()
        return left, filled, news

    def _write_back(self, turn: Turn, left: list[Any], filled: list[Filled]) -> None:
        """Put what was assigned to the slots during the block into the tree; all or nothing."""
        plan = turn.plan
        # What the slots held before is no news, but an early way back; None is, if it is alone.
        is_back = all(map(operator.is_, left, turn.at_start))
        changed = [
            (home, key, value)
            for value, leaf, own, home, key in zip(
                left, turn.new, turn.at_start, plan.homes, plan.keys, strict=True
            )
            if value is not leaf and (value is not own or (own is None and not is_back))
        ]
        places = {id(home): (path, node) for path, node, home in nodes_of(self._tree, ())}
        refused = []
        copies: list[tuple[Any, Any]] = []
        writes: list[tuple[TensorDictBase, str, Any]] = []
        for home, key, value in _single([*changed, *filled], places):
            path, node = places[id(home)]
            there = node._data.get(key)
            if node._lock is not None:
                copies.append((there, turn.what_was_left(value)))
                if not can_copy(there, value):
                    refused.append(as_key((*path, key)))
            elif value is not GONE and value is not None:
                writes.append((node, key, node._admit(value, key)))
            elif there is not None:
                writes.append((node, key, None))
        if refused:
            raise SwapError(
                f"the block assigned to {listing(refused)}, and the locked tree cannot take that "
                "(a new name, another shape or dtype); unlock the tree to let it replace entries"
            )
        with torch.no_grad():
            for leaf, value in copies:
                leaf.copy_(value)
        for node, key, value in writes:
            if value is None:
                node._drop(key)
            else:
                node._put(key, value)

    def found(self) -> Sequence[Any]:
        found: list[Any] = self._found[1]
        return found

    def found_tree(self) -> TensorDictBase:
        plan, found = self._found
        return held_tree(plan, found, self._tree, self._root)


# -- values ------------------------------------------------------------------------------------


def _can_need_gradient(leaf: Tensor) -> bool:
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return False
    return is_compiling() or not leaf.is_inference()


def _single(entries: list[Filled], places: dict[int, tuple[Path, TensorDictBase]]) -> list[Filled]:
    """Return the entries whose branch is still in the tree.

    Raises:
        SwapError: there are two values for one entry, for which two slots stand.
    """
    given: dict[tuple[int, str], Any] = {}
    entries = [entry for entry in entries if id(entry[0]) in places]
    for home, key, value in entries:
        if given.setdefault((id(home), key), value) is not value:
            raise SwapError(
                "the block assigned two values to slots that share the entry "
                f"{as_key((*places[id(home)][0], key))!r} of the tree, which can take only one"
            )
    return entries


def can_copy(leaf: Any, value: Any) -> bool:
    """Return whether a value can be written into the leaf of a tree exactly."""
    return (
        isinstance(leaf, Tensor)
        and isinstance(value, Tensor)
        and not is_transformed(value)
        and (leaf.shape, leaf.dtype) == (value.shape, value.dtype)
    )
