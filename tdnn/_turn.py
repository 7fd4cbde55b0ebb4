"""One time that values stand in the slots of a module: how they get there, and out again.

The slots are written straight in the dicts of the modules, so that the module gets back the very
objects that it held, in the order of its names. Torch offers no public way to do this without
copying values or rebuilding names.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import getitem, is_, setitem
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from tdnn import _claims
from tdnn._claims import Claim, SlotId
from tdnn._keys import NestedKey
from tdnn._plan import SETATTR, Plan, Slots, module_title

__all__ = ["GONE", "Filled", "Turn", "forget_cached"]

Filled: TypeAlias = tuple[Slots, str, Any]  # the home of a buffer, its key, and its value

GONE: Any = object()  # what a slot holds that was deleted


class Turn(Claim):
    """One time that leaves stand in the slots."""

    __slots__ = (
        "_caches",
        "_lazy",
        "at_start",
        "covered",
        "left",
        "new",
        "nones",
        "owed",
        "plan",
        "twins",
        "wrapped",
    )

    def __init__(self, plan: Plan, root: nn.Module) -> None:
        super().__init__(root)
        self.plan = plan
        self.owed: list[Any] | None = None  # what to give back to the slots; None: not read yet
        self.at_start: list[Any] = []  # what the slots held
        self.new: Any = None  # what is in the slots; None: not there yet
        self.wrapped: Sequence[Any] = ()  # what is in the slots instead of ``new``, outside a block
        self.twins: Sequence[Any] = ()  # other leaves for slots, each with the one in the slot
        self.nones = plan.nones  # buffers without a value, which a block may fill
        self.covered: list[str] = []  # slots that the module does not read any more
        self.left: dict[Tensor, Tensor] = {}  # what it wrote to tensors that a later block uses
        self._lazy: Sequence[_LazyState] = ()
        self._caches: Sequence[tuple[nn.Module, dict[str, Any]]] = ()

    @property
    def modules(self) -> set[nn.Module]:
        return self.plan.modules(self.root)

    # -- what is in the slots ------------------------------------------------------------------

    def read(self) -> None:
        """Remember what the slots hold, and what else of the modules a block may change.

        Raises:
            KeyError: a slot is gone.
        """
        plan = self.plan
        self.owed = self.at_start = list(map(getitem, plan.targets, plan.keys))
        forget_cached()
        if plan.has_lazy:
            self._lazy = _lazy_states(self.modules)
        if plan.has_listeners:
            self._caches = _caches(self.modules)

    def found(self) -> list[Any]:
        """Return what the slots held, with the values of then."""
        old: Any = self.owed
        return [self.saved.get(value, value) for value in old] if self.saved else old

    def held_now(self) -> list[Any]:
        """Return what the slots hold: the list ``new`` itself, if nothing was assigned to them."""
        plan, new = self.plan, cast(list[Any], self.new)
        try:
            if all(map(is_, map(getitem, plan.targets, plan.keys), new)):
                return new
        except KeyError:
            pass  # a slot was deleted
        now = [slots.get(k, GONE) for slots, k in zip(plan.targets, plan.keys, strict=True)]
        if any([value is GONE for value in now]):
            self._look_aside(now)
        return now

    def _look_aside(self, now: list[Any]) -> None:
        """Find what the block set as an attribute, or registered, where it had deleted a slot.

        It is taken out of the way of the slot, and put into ``now``; an attribute of the class,
        as a parametrization makes one, cannot be.
        """
        owners = self.plan.owners(self.root, nn.Module)
        for at, (slots, key) in enumerate(zip(self.plan.targets, self.plan.keys, strict=True)):
            if now[at] is GONE:
                owner = owners[id(slots)]
                # What was registered anew, as another kind, stands in another dict.
                held: Any = (owner.__dict__, owner._parameters, owner._buffers, owner._modules)
                for other in held:
                    if now[at] is GONE and other is not slots:
                        now[at] = other.pop(key, GONE)
                if now[at] is GONE and hasattr(type(owner), key):
                    self.covered.append(f"{key!r} of {module_title(owner)}")

    def take_out(self, handed: dict[SlotId, Any]) -> list[Filled]:
        """Leave the buffers that had no value without one; return what the block gave them."""
        found = []
        for home, slots, key in self.nones:
            if handed and (id(slots), key) in handed:  # a later block goes on with it
                value = handed[id(slots), key]
            else:
                value = slots.get(key, GONE)
                if value is not None:
                    slots[key] = None
            if value is not None:
                found.append((home, key, value))
        return found

    def shows(self) -> bool:
        if self.is_open or self.new is None:
            return True
        plan = self.plan
        now = map(dict.get, plan.targets, plan.keys)
        return any(map(is_, now, self.wrapped or self.new))

    def is_whole(self) -> bool:
        plan = self.plan
        now = map(dict.get, plan.targets, plan.keys)
        return all(map(is_, now, self.wrapped or self.new))

    # -- writing -------------------------------------------------------------------------------

    def write(self, values: Sequence[Any]) -> None:
        """Write values into the slots."""
        plan = self.plan
        if plan.has_listeners:
            _write_through(self, values)
        else:
            # Hot (test_to_module_speed): as all loops over slots, in C.
            deque(map(setitem, plan.targets, plan.keys, values), maxlen=0)

    def bring_in(self, leaves: list[Any]) -> None:
        """Let the slots show leaves."""
        self.write(leaves)
        self.new = leaves

    def news(
        self, left: list[Any], key_at: Callable[[int], NestedKey]
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the leaves that are to take values: none, as they were in the slots themselves.

        Args:
            left: what was left in the slots.
            key_at: the key of a slot, for an error.
        """
        return ()

    def restore(self) -> None:
        """Write what the slots held, and restore what else the block changed."""
        old: Any = self.owed
        forget_cached()
        for module, attributes in self._caches:
            module.__dict__.update(attributes)
        try:
            self.write(old)
        except BaseException:  # a module's own __setattr__ refused a value
            deque(map(setitem, self.plan.targets, self.plan.keys, old), maxlen=0)
            raise
        finally:
            for state in self._lazy:
                state.restore()

    def restore_order(self) -> None:
        """Bring the names back into their order, if the block deleted and remade a slot."""
        plan = self.plan
        names = iter(plan.names)
        for slots, size in zip(plan.registries, plan.sizes, strict=True):
            order = [*islice(names, size)]
            if [*slots] != order:
                held = dict(slots)
                slots.clear()
                slots.update({key: held.pop(key) for key in order if key in held})
                slots.update(held)
        for module in self.modules:
            if isinstance(module, nn.ParameterDict):  # as of torch 2.14 it lists its names itself
                module._keys = {**dict.fromkeys(module._parameters), **module._keys}

    def what_was_left(self, value: Any) -> Any:
        """Return a value as the block left it, if a later block has written to it."""
        return self.left.get(value, value) if self.left else value

    # -- blocks that end in another order than they began --------------------------------------

    def debts(self) -> dict[SlotId, Any]:
        nones = {(id(slots), key): None for _, slots, key in self.nones}
        return {**nones, **dict(zip(self.plan.slot_ids(), self.owed or (), strict=True))}

    def redirect(self, debts: dict[SlotId, Any]) -> None:
        pairs = zip(self.plan.slot_ids(), self.owed or (), strict=True)
        self.owed = [debts.get(slot, value) for slot, value in pairs]

    def expect(self, emptied: set[SlotId]) -> None:
        mine = {
            (id(slots), key): (home, slots, key)
            for home, slots in self.plan.buffers
            for key in slots
            if (id(slots), key) in emptied
        }
        self.nones = [*self.nones, *mine.values()]

    def hand_over(self, later: list[Claim], now: list[Any]) -> dict[SlotId, Any]:
        """Let later blocks go on, which give back at their end what this one found.

        A later swap in which no block runs ends here, with the block around it.

        Returns:
            What this block left in the slots of the later blocks; ``owed`` is then what to write.
        """
        for other in later:
            if not other.is_open and not other.debts().keys().isdisjoint(self.debts().keys()):
                _claims.release(other)
                other.is_over = True
        handed, self.left = _claims.hand_over(self, [other for other in later if other.is_open])
        slots = self.plan.slot_ids()
        self.owed = [
            value if slot in handed and value is not GONE else before
            for slot, value, before in zip(slots, now, self.owed or (), strict=True)
        ]
        return handed


# -- rare kinds of modules -----------------------------------------------------------------------


def _write_through(turn: Turn, values: Sequence[Any]) -> None:
    """Write the slots, through its own ``__setattr__`` where a module has one."""
    owners = {
        id(slots): module
        for module in turn.modules
        if type(module).__setattr__ is not SETATTR
        for slots in (module._parameters, module._buffers)
    }
    for slots, key, value in zip(turn.plan.targets, turn.plan.keys, values, strict=True):
        if id(slots) in owners and slots.get(key, GONE) is not value:
            _set_through(owners[id(slots)], slots, key, value)
        elif id(slots) not in owners:
            slots[key] = value


def _set_through(module: nn.Module, slots: Slots, key: str, value: Any) -> None:
    """Write a slot so that the module's own ``__setattr__`` sees the value, as ``nn.RNN``'s must.

    ``nn.Module.__setattr__`` refuses a plain tensor under the name of a parameter; so the name is
    out of the way while the module is told, and the value then moves to its slot.
    """
    held = dict(slots)
    slots.pop(key, None)
    try:
        setattr(module, key, value)
    finally:
        module.__dict__.pop(key, None)
        for registry in (module._parameters, module._buffers):
            registry.pop(key, None)
        slots.clear()
        slots.update(held)
    slots[key] = value


class _LazyState:
    """A module that is not initialised yet, as it was: its first forward changes its class."""

    __slots__ = ("_attributes", "_cls", "_hooks", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._cls = type(module)
        self._attributes = dict(module.__dict__)
        self._hooks = [
            (hooks, dict(hooks)) for name, hooks in self._attributes.items() if "_hooks" in name
        ]

    def restore(self) -> None:
        module = self._module
        module.__class__ = self._cls
        module.__dict__.clear()
        module.__dict__.update(self._attributes)
        for hooks, entries in self._hooks:
            hooks.clear()
            hooks.update(entries)


def _lazy_states(modules: set[nn.Module]) -> list[_LazyState]:
    return [_LazyState(module) for module in modules if isinstance(module, LazyModuleMixin)]


def _caches(modules: set[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the lists in which RNNs keep their weights once more; a forward makes new ones."""
    names = ("_flat_weights", "_flat_weight_refs")  # as of torch 2.14
    return [
        (module, {name: module.__dict__[name] for name in names if name in module.__dict__})
        for module in modules
        if isinstance(module, nn.RNNBase)
    ]


def forget_cached() -> None:
    """Drop what ``parametrize.cached()`` holds: it was computed from other weights."""
    # No public name for this as of torch 2.14.
    if parametrize._cache_enabled and not is_compiling():
        parametrize._cache.clear()
