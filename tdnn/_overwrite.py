"""How the values of leaves, rather than the leaves themselves, get into a module and back."""

from collections.abc import Container, Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.jit import ScriptModule
from torch.nn import Parameter

from tdnn import _claims
from tdnn._claims import Claim, SlotId
from tdnn._core import TensorDictBase
from tdnn._exchange import Exchange, SlotExchange, can_copy
from tdnn._held import nested
from tdnn._keys import hint
from tdnn._plan import UNINITIALISED, Plan, Slots, module_title
from tdnn._ties import same_value
from tdnn._transforms import is_transformed
from tdnn._turn import Filled, Turn
from tdnn.errors import MissingKeyError, SwapError

__all__ = ["CopyExchange", "StateExchange"]


class CopyExchange(SlotExchange):
    """The values of the leaves in the module's own tensors."""

    __slots__ = ("_non_blocking",)

    def __init__(self, tree: TensorDictBase, module: nn.Module, non_blocking: bool) -> None:
        super().__init__(tree, module)
        self._non_blocking = non_blocking

    def _check(self, plan: Plan, new: list[Any]) -> None:
        targets: list[Any] = list(map(dict.get, plan.targets, plan.keys))
        faults = []
        for i, (target, leaf) in enumerate(zip(targets, new, strict=True)):
            if not _can_hold(target, leaf):
                faults.append(f"{self._key(plan, i)!r} has no memory to copy into or from")
            elif target.shape != leaf.shape:
                shapes = f"shape {tuple(leaf.shape)} for a slot of shape {tuple(target.shape)}"
                faults.append(f"{self._key(plan, i)!r} has {shapes}")
        if faults:
            raise ValueError(f"cannot copy into {module_title(self._root)}: {'; '.join(faults)}")
        if not is_compiling():
            self._refuse_two_values(plan, list(map(id, targets)), new)

    def _bring_in(self, turn: Turn, new: list[Any]) -> list[Any]:
        old: Any = turn.old
        pairs = [(t, leaf) for t, leaf in zip(old, new, strict=True) if not _is_one(t, leaf)]
        turn.saved = {target: target.detach().clone() for target, _ in pairs}
        _claims.refuse_rivals(turn)
        try:
            _copy(pairs, self._non_blocking)
        except BaseException:
            _copy(turn.saved.items())
            raise
        turn.versions = list(map(_version, old))
        return list(old)  # the slots keep their objects

    def _collect(self, turn: Turn, left: list[Any]) -> None:
        """Bring what the block wrote into the module's tensors into the leaves."""
        plan = turn.plan
        _copy(
            [
                (home[key], turn.what_was_left(target))
                for home, key, target, value, version in zip(
                    plan.homes, plan.keys, turn.new, left, turn.versions, strict=True
                )
                if value is target and key in home and _is_changed(target, version)
            ]
        )

    def _undo(self, turn: Turn, failed: bool) -> tuple[list[Any], list[Filled]]:
        try:
            return super()._undo(turn, failed)
        finally:
            try:
                _copy(turn.saved.items())
            except BaseException:  # Ctrl-C
                _copy(turn.saved.items())
                raise


def _version(tensor: Tensor) -> int | None:
    """Return the number of writes to a tensor so far, if it is counted and can be seen."""
    if is_compiling() or tensor.is_inference() or is_transformed(tensor):
        return None
    return tensor._version


def _is_changed(tensor: Tensor, version: int | None) -> bool:
    """Return whether a tensor was written to; of one that does not say, a buffer may have been."""
    if version is None:
        return not isinstance(tensor, Parameter)
    return tensor._version != version


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
    if is_compiling() or is_transformed(tensor) or tensor.is_meta:  # which have no address
        return tensor
    return tensor.untyped_storage().data_ptr()


def _is_one(target: Tensor, leaf: Tensor) -> bool:
    """Return whether a leaf is the target's own memory, seen in the same way."""
    if target is leaf or is_compiling() or is_transformed(leaf) or leaf.is_meta:
        return target is leaf
    looks = [(t.dtype, t.device, t.shape, t.stride(), t.data_ptr()) for t in (target, leaf)]
    return looks[0] == looks[1] and leaf.numel() > 0


class _StateTurn(Claim):
    __slots__ = ("before", "slots", "versions")

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self.before: dict[str, Any] = {}
        self.slots: list[tuple[Slots, Slots]] = []
        self.versions: dict[Tensor, int | None] = {}  # of the tensors that it wrote to

    def read(self) -> None:
        """Remember what the module holds."""
        root = self.root
        self.slots = [
            (slots, dict(slots))
            for module in root.modules()
            if not isinstance(module, ScriptModule)  # its tensors are only overwritten
            for slots in (cast(Slots, module._parameters), cast(Slots, module._buffers))
        ]
        self.saved = {
            tensor: tensor.detach().clone()
            for tensor in (*root.parameters(), *root.buffers())
            if _has_value(tensor)
        }
        for name, value in root.state_dict().items():
            self.before[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def is_news(self, tensor: Tensor) -> bool:
        """Return whether the block wrote to a tensor, or brought it in."""
        return tensor not in self.versions or _is_changed(tensor, self.versions[tensor])

    def shows(self) -> bool:
        return True  # the values are copies, so nothing shows

    def can_begin(self) -> bool:
        return not self.is_over

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
        before = _without_tensors(self.before) if handed else self.before  # or they are in use
        if before:
            self.root.load_state_dict(before, strict=False)
        _copy(self.saved.items())


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
            _claims.refuse_rivals(turn)
        except BaseException:
            _claims.release(turn)
            raise
        try:
            state = self._state({_memory(tensor) for tensor in turn.saved})
            self._refuse_two_values(state)
            report = module.load_state_dict(state, strict=False)
            if report.unexpected_keys:
                self._refuse_unknown(report.unexpected_keys, turn.before)
            turn.versions = {tensor: _version(tensor) for tensor in turn.saved}
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
            ".".join(path): leaf.clone() if _memory(leaf) in written else leaf
            for path, leaf in self._tree._leaves()
        }

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: load what the module had; what was written in it goes into the tree."""
        turn = self._stack.pop()
        try:
            handed, values = _claims.hand_over(turn, _claims.later(turn))
            try:
                written = {} if failed else self._written(turn, handed, values)
                none = {slot for slot, value in turn.debts().items() if value is None}
            finally:
                turn.restore(handed)
        finally:
            _claims.release(turn)
        leaves = {".".join(path): leaf for path, leaf in self._tree._leaves()}
        for name, (slot, value) in written.items():
            if can_copy(leaves.get(name), value):
                _copy([(leaves[name], value)])
            elif name in leaves or slot in none:
                self._tree.set(tuple(name.split(".")), value)

    def _written(
        self, turn: _StateTurn, handed: dict[SlotId, Any], values: dict[Tensor, Tensor]
    ) -> dict[str, tuple[SlotId, Tensor]]:
        """Return copies of what the block wrote to or assigned, by the names of a state dict."""
        found: dict[str, tuple[SlotId, Tensor]] = {}
        state = self._root.state_dict()
        for name, module in self._root.named_modules(remove_duplicate=False):
            for slots in (cast(Slots, module._parameters), cast(Slots, module._buffers)):
                for key, tensor in slots.items():
                    path = f"{name}.{key}" if name else key
                    slot = (id(slots), key)
                    left = handed.get(slot, tensor)
                    if path not in state or left is None or not turn.is_news(left):
                        continue
                    is_as_seen = left is tensor and left not in values
                    value = state[path] if is_as_seen else values.get(left, left)
                    found[path] = slot, value.detach().clone()
        return found

    def found(self) -> Sequence[Any]:
        return list(self._found.values())

    def held(self) -> TensorDictBase:
        entries = [(tuple(name.split(".")), value) for name, value in self._found.items()]
        return nested(self._tree, entries)
