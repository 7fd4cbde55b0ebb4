"""How the values of leaves, rather than the leaves themselves, get into a module and back."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.jit import ScriptModule

from tdnn import _claims
from tdnn._claims import Claim, SlotId
from tdnn._core import TensorDictBase
from tdnn._exchange import Exchange, SlotExchange, can_copy
from tdnn._held import nested
from tdnn._keys import NestedKey, as_key, hint, listing
from tdnn._plan import UNINITIALISED, Plan, Slots, module_title
from tdnn._transforms import is_transformed
from tdnn._turn import Turn, forget_cached
from tdnn._writes import alike, first_rows, same_value
from tdnn.errors import MissingKeyError, SwapError

__all__ = ["CopyExchange", "StateExchange"]


class CopyExchange(SlotExchange):
    """The values of the leaves in the module's own tensors."""

    __slots__ = ("_non_blocking",)

    def __init__(self, tree: TensorDictBase, module: nn.Module, non_blocking: bool) -> None:
        super().__init__(tree, module)
        self._non_blocking = non_blocking

    def _new_turn(self, plan: Plan) -> Turn:
        return _CopyTurn(plan, self._root, self._non_blocking)

    def _checked(self, turn: Turn, leaves: list[Any]) -> list[Any]:
        plan, targets = turn.plan, turn.at_start
        faults = []
        for i, (target, leaf) in enumerate(zip(targets, leaves, strict=True)):
            if not _can_hold(target, leaf):
                faults.append(f"{self._key(plan, i)!r} has no memory to copy into or from")
            elif target.shape != leaf.shape:
                shapes = f"shape {tuple(leaf.shape)} for a slot of shape {tuple(target.shape)}"
                faults.append(f"{self._key(plan, i)!r} has {shapes}")
        if faults:
            raise ValueError(f"cannot copy into {module_title(self._root)}: {'; '.join(faults)}")
        if not is_compiling():
            self._refuse_two_values(plan, list(map(id, targets)), leaves)
        return leaves


class _CopyTurn(Turn):
    __slots__ = ("_brought", "_leaves", "_non_blocking")

    def __init__(self, plan: Plan, root: nn.Module, non_blocking: bool) -> None:
        super().__init__(plan, root)
        self._non_blocking = non_blocking
        self._leaves: list[_Seen] = []
        self._brought: dict[Tensor, Tensor] = {}  # what the tensors that it wrote to got

    def bring_in(self, leaves: list[Any]) -> None:
        """Copy the values of leaves into the tensors in the slots, which stay there."""
        pairs = [
            (t, leaf) for t, leaf in zip(self.at_start, leaves, strict=True) if not _is_one(t, leaf)
        ]
        self.save([target for target, _ in pairs])
        _copy(pairs, self._non_blocking)
        self.new = list(self.at_start)
        # By value, as not all that torch writes is counted (batch_norm, fused optimizers, .data).
        self._brought = {target: target.detach().clone() for target in self.saved}
        self._leaves = _seen(leaves, self.saved)

    def news(
        self, left: list[Any], key_at: Callable[[int], NestedKey]
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the leaves that the block wrote to by their copies, with their new values.

        Raises:
            SwapError: it wrote to such a leaf itself as well; all are listed.
            ValueError: two copies of one leaf have become different.
        """
        plan = self.plan
        ats, leaves, values, both = [], [], [], []
        rows = zip(plan.homes, plan.keys, self.new, left, self._leaves, strict=True)
        for at, (home, key, target, value, seen) in enumerate(rows):
            if value is not target or target not in self._brought or key not in home:
                continue
            now, leaf = self.what_was_left(target), home[key]
            is_same = alike(now, self._brought[target])
            if _can_look(now) and bool(is_same.all()):
                continue
            if seen.is_changed(leaf):
                both.append(key_at(at))
            if not seen.is_shared and leaf.layout is torch.strided:
                now = torch.where(is_same.to(leaf.device), leaf, now.to(leaf.device))
            ats.append(at)
            leaves.append(leaf)
            values.append(now.detach().clone())
        if both:
            raise _two_writers(self.root, both)
        kept: Sequence[int] = range(len(ats))
        if not is_compiling() and len(set(leaves)) < len(leaves):
            kept = first_rows(leaves, [values], lambda row: key_at(ats[row]))
        return [(leaves[row], values[row]) for row in kept]

    def restore(self) -> None:
        try:
            super().restore()
        finally:
            self.give_back()

    def is_whole(self) -> bool:
        return is_compiling() or (
            super().is_whole()
            and all([bool(alike(now, value).all()) for now, value in self._brought.items()])
        )


class _Seen:
    """A leaf, and the number of writes to it so far, if they are counted and can be seen."""

    __slots__ = ("_leaf", "_version", "is_shared")

    def __init__(self, leaf: Tensor, is_shared: bool) -> None:
        self._leaf = leaf
        self.is_shared = is_shared  # with the module, which is written to
        is_counted = not (
            is_shared or is_compiling() or leaf.is_inference() or is_transformed(leaf)
        )
        self._version = leaf._version if is_counted else None

    def is_changed(self, leaf: Tensor) -> bool:
        """Return whether another leaf took its place, or it was written to."""
        if leaf is not self._leaf:
            return True
        return self._version is not None and leaf._version != self._version


def _seen(leaves: Iterable[Tensor], written: Iterable[Tensor]) -> list[_Seen]:
    memories = {_memory(tensor) for tensor in written}
    return [_Seen(leaf, _memory(leaf) in memories) for leaf in leaves]


def _two_writers(root: nn.Module, keys: list[NestedKey]) -> SwapError:
    return SwapError(
        f"the block wrote two values for {listing(keys)}, one into {module_title(root)} and one "
        "into the tree, which keeps its own; a block of the same tree in this one does that too"
    )


def _is_as_before(value: Any, before: Any) -> bool:
    """Return whether an entry of a state holds what it held."""
    if not isinstance(value, Tensor):
        return True
    if before is None or (value.shape, value.dtype) != (before.shape, before.dtype):
        return False
    return bool(alike(value, before).all())


def _can_look(value: Tensor) -> bool:
    """Return whether Python can see what is in a tensor."""
    return not is_compiling() and not is_transformed(value)


def _has_value(tensor: Tensor | None) -> bool:
    return tensor is not None and not isinstance(tensor, UNINITIALISED)


def _can_hold(target: Any, leaf: Any) -> bool:
    """Return whether what is copied from a leaf into a target is there afterwards."""
    return _has_value(target) and _has_value(leaf) and (leaf.is_meta or not target.is_meta)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]], non_blocking: bool = False) -> None:
    """Copy into each target a value, as it was before the first copy."""
    pairs = [(target, value) for target, value in pairs if target is not value]
    written = {_memory(target) for target, _ in pairs}
    with torch.no_grad():
        pairs = [(t, value.clone() if _memory(value) in written else value) for t, value in pairs]
        for target, value in pairs:
            target.copy_(value, non_blocking=non_blocking)


def _memory(tensor: Tensor) -> Any:
    """Return what tensors that share memory have in common."""
    return tensor.untyped_storage().data_ptr() if _has_address(tensor) else tensor


def _has_address(tensor: Tensor) -> bool:
    """Return whether a tensor has one memory, and Python can see where it is."""
    return _can_look(tensor) and not tensor.is_meta and tensor.layout is torch.strided


def _is_one(target: Tensor, leaf: Tensor) -> bool:
    """Return whether a leaf is the target's own memory, seen in the same way."""
    if target is leaf or not (_has_address(leaf) and _has_address(target)):
        return target is leaf
    looks = [(t.dtype, t.device, t.shape, t.stride(), t.data_ptr()) for t in (target, leaf)]
    return looks[0] == looks[1] and leaf.numel() > 0


class _StateTurn(Claim):
    __slots__ = ("before", "brought", "leaves", "slots")

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self.before: dict[str, Any] = {}
        self.brought: dict[str, Any] = {}  # the state when the values were in
        self.leaves: dict[str, _Seen] = {}
        self.slots: list[tuple[Slots, Slots]] = []

    def read(self) -> None:
        """Remember what the module holds."""
        root = self.root
        self.slots = [
            (slots, dict(slots))
            for module in root.modules()
            if not isinstance(module, ScriptModule)  # its tensors are only overwritten
            for slots in (cast(Slots, module._parameters), cast(Slots, module._buffers))
        ]
        tensors = (*root.parameters(), *root.buffers())
        if not all(map(_has_value, tensors)):
            raise SwapError(
                f"{module_title(root)} is not initialised, so that there is nothing to bring back; "
                "load into it with load_state_dict(), or swap without use_state_dict"
            )
        self.save(tensors)
        self.before = _state_of(root)
        forget_cached()

    def note(self, leaves: dict[str, Tensor]) -> None:
        """Note what stands where, to tell later what the block wrote."""
        self.brought = _state_of(self.root)
        self.leaves = dict(zip(leaves, _seen(leaves.values(), self.saved), strict=True))

    def shows(self) -> bool:
        return True  # the values are copies, so nothing shows

    def is_whole(self) -> bool:
        now = self.root.state_dict()
        return all(_is_as_before(value, self.brought.get(name)) for name, value in now.items())

    def debts(self) -> dict[SlotId, Any]:
        return {(id(slots), key): held[key] for slots, held in self.slots for key in held}

    def redirect(self, debts: dict[SlotId, Any]) -> None:
        for slots, held in self.slots:
            for key in held:
                held[key] = debts.get((id(slots), key), held[key])
        if debts:  # what was read of the tensors that it found is not for those it gives back
            self.before = _without_tensors(self.before)

    def expect(self, emptied: set[SlotId]) -> None:
        """Do nothing: all slots are among its debts."""

    def restore(self, handed: Container[SlotId] = ()) -> None:
        """Give back what the module had, but for slots in which a later block goes on."""
        for slots, held in self.slots:
            back = {
                key: slots[key] if (id(slots), key) in handed and key in slots else value
                for key, value in held.items()
            }
            moved = [*slots][: len(back)] != [*back]
            if moved or any([slots[key] is not value for key, value in back.items()]):
                more = {key: value for key, value in slots.items() if key not in back}
                slots.clear()
                slots.update({**back, **more})
        self.move_back()
        before = _without_tensors(self.before) if handed else self.before  # or they are in use
        try:
            if before:
                self.root.load_state_dict(before, strict=False)
        finally:
            self.give_back()
            forget_cached()


def _state_of(root: nn.Module) -> dict[str, Any]:
    """Return a copy of a module's state."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in root.state_dict().items()
    }


def _without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


class StateExchange(Exchange):
    """The values of the leaves, through the module's ``load_state_dict``."""

    __slots__ = ()

    def put(self, is_open: bool = False) -> None:
        module = self._root
        turn = _StateTurn(module)
        turn.is_open = is_open
        try:
            _claims.take(turn)
            turn.read()
        except BaseException:
            _claims.release(turn)
            raise
        try:
            state = self._state({_memory(tensor) for tensor in turn.saved})
            self._refuse_two_values(state)
            self._refuse_meta(state)
            report = module.load_state_dict(state, strict=False)
            if report.unexpected_keys:
                self._refuse_unknown(report.unexpected_keys, turn.before)
            turn.note(self._leaves())
        except BaseException:
            try:
                turn.restore()
            finally:
                _claims.release(turn)
            raise
        self._stack.append(turn)
        if self._found is None:
            self._found = turn.before

    def _refuse_two_values(self, state: dict[str, Tensor]) -> None:
        """Raise if one tensor of the module would get two values."""
        held = self._root.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        faults = []
        for name, value in state.items():
            other = first.setdefault(id(held.get(name, value)), name)
            one = state[other]
            if one is not value and (one.shape != value.shape or not same_value(one, value)):
                faults.append(f"{other!r} and {name!r}")
        if faults:
            raise SwapError(
                f"cannot load into {module_title(self._root)}: one tensor would get two values, "
                f"of {', '.join(faults)}"
            )

    def _refuse_meta(self, state: dict[str, Tensor]) -> None:
        """Raise if the module has no memory for a value."""
        held = self._root.state_dict()
        faults = [
            name
            for name, value in state.items()
            if isinstance(held.get(name), Tensor) and held[name].is_meta and not value.is_meta
        ]
        if faults:
            raise ValueError(
                f"cannot load into {module_title(self._root)}: {listing(faults)} are on the meta "
                "device there, which has no memory; swap without use_state_dict"
            )

    def _refuse_unknown(self, unknown: list[str], known: Iterable[str]) -> NoReturn:
        """Raise the error for names that ``load_state_dict`` did not take."""
        buffers = dict(self._root.named_buffers(remove_duplicate=False))
        faults = [
            f"{name!r} is not part of the module's state_dict"
            if name in buffers
            else f"unknown {name!r}{hint(name, [other for other in known if other != name])}"
            for name in unknown
        ]
        raise MissingKeyError(f"cannot load into {module_title(self._root)}: {'; '.join(faults)}")

    def _state(self, written: set[Any]) -> dict[str, Tensor]:
        """Return the leaves by name; copies of those in memory that is about to be written."""
        return {
            name: leaf.clone() if _memory(leaf) in written else leaf
            for name, leaf in self._leaves().items()
        }

    def _leaves(self) -> dict[str, Tensor]:
        return {".".join(path): leaf for path, leaf in self._tree._leaves()}

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: load what the module had; what was written in it goes into the tree."""
        turn = self._stack.pop()
        try:
            later = [other for other in _claims.later(turn) if other.is_open]
            handed, values = _claims.hand_over(turn, later)
            try:
                written = {} if failed else self._written(turn, handed, values)
            finally:
                turn.restore(handed)
        finally:
            _claims.release(turn)
        leaves = self._leaves()
        copies = [(leaves[name], each) for name, each in written.items() if name in leaves]
        fits = [can_copy(leaf, value) for leaf, value in copies]
        _copy([pair for pair, fit in zip(copies, fits, strict=True) if fit])
        for name, value in written.items():
            if not can_copy(leaves.get(name), value):
                self._tree.set(tuple(name.split(".")), value)

    def _written(
        self, turn: _StateTurn, handed: dict[SlotId, Any], values: dict[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        """Return copies of what the block wrote to entries of the tree, or to empty buffers."""
        state = self._root.state_dict()
        filled = set()
        none = {slot for slot, value in turn.debts().items() if value is None}
        for name, module in self._root.named_modules(remove_duplicate=False):
            for slots in (cast(Slots, module._parameters), cast(Slots, module._buffers)):
                for key, tensor in slots.items():
                    path, slot = f"{name}.{key}" if name else key, (id(slots), key)
                    if slot in none:
                        filled.add(path)
                    left: Any = handed.get(slot, tensor)
                    if path in state and (left is not tensor or left in values):
                        state[path] = values.get(left, left)
        leaves = self._leaves()
        found = {
            name: value.detach().clone()
            for name, value in state.items()
            if (name in leaves or name in filled)
            and not _is_as_before(value, turn.brought.get(name))
        }
        both = [
            as_key(tuple(name.split(".")))
            for name in found
            if name in turn.leaves and name in leaves and turn.leaves[name].is_changed(leaves[name])
        ]
        if both:
            raise _two_writers(self._root, both)
        return found

    def found(self) -> Sequence[Any]:
        return list(self._found.values())

    def found_tree(self) -> TensorDictBase:
        entries = [(tuple(name.split(".")), value) for name, value in self._found.items()]
        return nested(self._tree, entries)
