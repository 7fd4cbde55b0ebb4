"""How the leaves of a tree get into a module, and the module's own values back.

An exchange is planned and checked as a whole, then written slot by slot straight into the dicts
of the modules, and undone the same way, so that the module gets back the very objects that it
held, in the order of its names. Torch offers no public way to do this without copying values or
rebuilding names.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from operator import getitem, is_, setitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.jit import ScriptModule
from torch.nn import Parameter
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from tdnn import _claims
from tdnn._claims import Claim
from tdnn._core import Scope, TensorDictBase
from tdnn._keys import NestedKey, Path, as_key, hint, listing
from tdnn._plan import SETATTR, Plan, Slots, forget_plan, nodes_of, plan_for, refuse, title
from tdnn.errors import MissingKeyError, SwapError

__all__ = ["CopyExchange", "Exchange", "SlotExchange", "StateExchange"]

_ONLY_PARAMETERS = {Parameter}
_GONE: Any = object()


class Exchange(Scope):
    """A swap; ``put`` and ``leave`` come in pairs that may be nested and repeated."""

    __slots__ = ("_found", "_root", "_stack", "_tree")

    def __init__(self, tree: TensorDictBase, module: nn.Module) -> None:
        super().__init__()
        self._tree = tree
        self._root = module
        self._stack: list[Any] = []  # a claim for each `put` that was not left yet
        self._found: Any = None  # what the module held before the first of them

    @abstractmethod
    def put(self) -> None:
        """Bring the tree's values into the module; after an error nothing has changed."""

    @abstractmethod
    def held(self) -> dict[str, Any]:
        """Return nested dicts of what the module held before the first ``put``."""

    def keep_parameters(self) -> None:  # only tensors that replace others need it
        """Make what stands for a parameter one, for as long as no block begins."""

    def enter(self, node: TensorDictBase) -> None:
        """Begin a block: the first one with what ``put`` brought in, later ones anew."""
        stack = self._stack
        if stack and not stack[-1].is_open and not stack[-1].is_there():
            stack.pop()
        if not stack or stack[-1].is_open:
            self.put()
        stack[-1].is_open = True


class _Turn(Claim):
    """One time that leaves stand in the slots."""

    __slots__ = ("caches", "kept", "lazy", "new", "old", "plan", "values")

    def __init__(self, plan: Plan, root: nn.Module) -> None:
        super().__init__(root)
        self.plan = plan
        self.old: list[Any] | None = None  # what the slots held; None: not read yet
        self.new: list[Any] = []
        self.kept: Sequence[Any] = ()  # what is in the slots instead of ``new``, outside a block
        self.lazy: Sequence[_LazyState] = ()
        self.caches: Sequence[tuple[nn.Module, dict[str, Any]]] = ()
        self.values: Sequence[Tensor] = ()  # copies of what tensors held that were written to

    @property
    def modules(self) -> set[nn.Module]:
        return self.plan.modules(self.root)

    def write(self, values: list[Any]) -> None:
        """Write values into the slots."""
        if self.plan.has_listeners:
            _tell(self, values)
        else:
            deque(map(setitem, self.plan.targets, self.plan.keys, values), maxlen=0)

    def is_on(self) -> bool:
        if self.is_open or self.old is None:
            return True
        plan = self.plan
        now = map(dict.get, plan.targets, plan.keys)
        return any(map(is_, now, self.kept or self.new))

    def is_there(self) -> bool:
        """Return whether a block can begin with what is in the slots: no other swap took its place.

        What was assigned to a slot right after the swap is in the block too.
        """
        if self.is_over or _claims.is_latest(self):
            return not self.is_over
        now = map(dict.get, self.plan.targets, self.plan.keys)
        return all(map(is_, now, self.kept or self.new))


class SlotExchange(Exchange):
    """The leaves themselves in the slots of a module."""

    __slots__ = ("_all_parameters", "_last")

    def __init__(self, tree: TensorDictBase, module: nn.Module) -> None:
        super().__init__(tree, module)
        self._all_parameters = False
        self._last: Any = None  # the plan, the lock of the tree, and its leaves

    # -- in ------------------------------------------------------------------------------------

    def put(self) -> None:
        plan, new = self._read()
        self._check(plan, new)
        turn = _Turn(plan, self._root)
        try:
            _claims.take(turn)
            turn.old = list(map(getitem, plan.targets, plan.keys))
            if plan.has_lazy:
                turn.lazy = _lazy_states(turn)
            if plan.has_listeners:
                turn.caches = _caches(turn)
            self._bring_in(turn, new)
            _forget_cached()
        except BaseException as error:
            _claims.release(turn)
            if turn.old is not None:
                self._restore(turn, turn.old)
            elif isinstance(error, KeyError):  # the module lost a slot since it was planned
                self._last = None
                forget_plan(self._tree)
                self.put()
                return
            raise
        turn.new = new
        self._stack.append(turn)
        if self._found is None:
            self._found = plan, turn.old

    def _read(self) -> tuple[Plan, list[Any]]:
        """Return the plan and the leaves, which are those of the last time in a locked tree."""
        tree, lock = self._tree, self._tree._lock
        if self._last is not None and lock is not None and not is_compiling():
            plan, last_lock, new = self._last
            if lock is last_lock and plan.fits_module():
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
        if not self._all_parameters and any([issubclass(k, TensorDictBase) for k in kinds]):
            refuse(tree, self._root)
        self._last = (plan, lock, new) if plan.is_plain and lock is not None else None
        return plan, new

    def _check(self, plan: Plan, new: list[Any]) -> None:
        if plan.is_shared:
            self._refuse_two_values(plan, plan.slot_ids(), new)

    def _refuse_two_values(self, plan: Plan, places: Sequence[Any], new: list[Any]) -> None:
        """Raise if the tree has two values for one of the ``places``."""
        if is_compiling():
            return
        first: dict[Any, int] = {}
        for i, place in enumerate(places):
            one, two = new[first.setdefault(place, i)], new[i]
            if one is two or _is_transformed(two):
                continue
            if one.shape != two.shape or not torch.equal(one, two):
                raise SwapError(
                    f"{self._key(plan, i)!r} is one slot of {title(self._root)} with two names, "
                    "and the tree has two values for it"
                )

    def _key(self, plan: Plan, i: int) -> NestedKey:
        return as_key(plan.paths(self._tree, self._root)[i])

    def _bring_in(self, turn: _Turn, new: list[Any]) -> None:
        turn.write(new)

    def keep_parameters(self) -> None:
        """Wrap plain tensors in ``nn.Parameter`` where a parameter was; a block unwraps them.

        Tensors that need a gradient, and all tensors inside a functorch transform, stay as they
        are, or else no gradient would reach them.
        """
        turn = self._stack[-1]
        if self._all_parameters or is_compiling() or _in_transform():
            return
        made: dict[tuple[int, bool], Parameter] = {}  # so that a tie stays one
        kept = []
        for before, leaf in zip(turn.old, turn.new, strict=True):
            if isinstance(before, Parameter) and not (
                isinstance(leaf, Parameter) or leaf.requires_grad
            ):
                flag = before.requires_grad and (leaf.is_floating_point() or leaf.is_complex())
                if (id(leaf), flag) not in made:
                    made[id(leaf), flag] = Parameter(leaf, requires_grad=flag)
                leaf = made[id(leaf), flag]
            kept.append(leaf)
        if made:
            turn.kept = kept
            turn.write(kept)

    def enter(self, node: TensorDictBase) -> None:
        """Begin a block, on the leaves themselves."""
        super().enter(node)
        turn = self._stack[-1]
        if turn.kept:
            turn.write(turn.new)
            turn.kept = ()

    # -- out -----------------------------------------------------------------------------------

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: the slots as they were; what was assigned to them goes into the tree."""
        turn = self._stack.pop()
        plan, old = turn.plan, turn.old
        now = turn.new
        try:
            if not all(map(is_, map(getitem, plan.targets, plan.keys), now)):
                now = list(map(getitem, plan.targets, plan.keys))
        except KeyError:  # the block deleted a slot
            now = [slots.get(k, _GONE) for slots, k in zip(plan.targets, plan.keys, strict=True)]
        filled = [none for none in plan.nones if none[1].get(none[2], _GONE) is not None]
        assigned = [(slots.get(key), home, key) for home, slots, key in filled]
        changed = now is not turn.new or filled
        later = _claims.release(turn)
        if later:
            old, now = _hand_over(turn, later, now)
        for _, slots, key in filled:
            slots[key] = None
        self._restore(turn, old)
        if changed or later:
            _restore_order(turn)
            if not failed:
                self._write_back(turn, now, assigned)

    def _restore(self, turn: _Turn, old: list[Any]) -> None:
        _forget_cached()
        for module, attributes in turn.caches:
            module.__dict__.update(attributes)
        try:
            turn.write(old)
        except BaseException:  # a module's own __setattr__ refused a value
            deque(map(setitem, turn.plan.targets, turn.plan.keys, old), maxlen=0)
            raise
        finally:
            for state in turn.lazy:
                state.restore()

    def _write_back(self, turn: _Turn, now: list[Any], filled: list[Any]) -> None:
        """Put what was assigned to the slots during the block into the tree."""
        places = {id(home): (path, node) for path, node, home in nodes_of(self._tree, ())}
        plan, refused = turn.plan, []
        changed = [
            (value, home, key)
            for value, leaf, home, key in zip(now, turn.new, plan.homes, plan.keys, strict=True)
            if value is not leaf
        ]
        for value, home, key in [*changed, *filled]:
            if id(home) not in places:
                continue  # its branch left the tree during the block
            path, node = places[id(home)]
            there = node._data.get(key)
            if node._lock is not None:
                if not _copied(there, value):
                    refused.append(as_key((*path, key)))
            elif value is not _GONE and value is not None:
                node._put(key, node._admit(value, key))
            elif there is not None:
                node._drop(key)
        if refused:
            raise SwapError(
                f"the block assigned to {listing(refused)}, and the locked tree cannot take that "
                "(a new name, another shape or dtype); unlock the tree to let it replace entries"
            )

    def held(self) -> dict[str, Any]:
        plan, found = self._found
        pairs = zip(plan.paths(self._tree, self._root), found, strict=True)
        return _nested([(path, value) for path, value in pairs if value is not None])


class CopyExchange(SlotExchange):
    """The values of the leaves in the module's own tensors."""

    __slots__ = ("_non_blocking",)

    def __init__(self, tree: TensorDictBase, module: nn.Module, non_blocking: bool) -> None:
        super().__init__(tree, module)
        self._non_blocking = non_blocking

    def put(self) -> None:
        super().put()
        turn = self._stack[-1]
        turn.new = list(turn.old)  # the slots keep their objects
        if self._found[1] is turn.old:
            self._found = turn.plan, turn.values

    def _check(self, plan: Plan, new: list[Any]) -> None:
        targets = list(map(dict.get, plan.targets, plan.keys))
        faults = []
        for i, (target, leaf) in enumerate(zip(targets, new, strict=True)):
            if target is None or is_lazy(target) or is_lazy(leaf):
                faults.append(f"{self._key(plan, i)!r} has no memory to copy into or from")
            elif target.shape != leaf.shape:
                shapes = f"shape {tuple(leaf.shape)} for a slot of shape {tuple(target.shape)}"
                faults.append(f"{self._key(plan, i)!r} has {shapes}")
        if faults:
            raise ValueError(f"cannot copy into {title(self._root)}: {'; '.join(faults)}")
        self._refuse_two_values(plan, list(map(id, targets)), new)

    def _bring_in(self, turn: _Turn, new: list[Any]) -> None:
        old: Any = turn.old
        turn.values = [target.detach().clone() for target in old]
        try:
            self._copy(old, new)
        except BaseException:
            self._copy(old, turn.values)
            raise

    def _copy(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                if target is not value:
                    target.copy_(value, non_blocking=self._non_blocking)

    def keep_parameters(self) -> None:
        """Nothing: the module's own parameters stay."""

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: the values as they were; buffers that the forward changed go to the tree."""
        turn = self._stack[-1]
        if not failed:
            updated = [
                (slots[key], target)
                for slots, key, target in zip(
                    turn.plan.homes, turn.plan.keys, turn.new, strict=True
                )
                if key in slots and not isinstance(target, Parameter)
            ]
            self._copy([leaf for leaf, _ in updated], [target for _, target in updated])
        try:
            super().leave(node, failed)
        finally:
            self._copy(turn.new, turn.values)


class _StateTurn(Claim):
    __slots__ = ("before", "slots", "values")

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self.before: dict[str, Any] = {}
        self.slots: list[tuple[Slots, Slots]] = [
            (slots, dict(slots))
            for module in root.modules()
            if not isinstance(module, ScriptModule)  # its tensors are only overwritten
            for slots in (cast(Slots, module._parameters), cast(Slots, module._buffers))
        ]
        self.values = [
            (tensor, tensor.detach().clone())
            for tensor in (*root.parameters(), *root.buffers())
            if not is_lazy(tensor)
        ]

    def is_on(self) -> bool:
        return True  # the values are copies, so nothing shows

    def is_there(self) -> bool:
        return not self.is_over

    def restore(self) -> None:
        for slots, held in self.slots:
            if any([slots.get(key, _GONE) is not value for key, value in held.items()]):
                more = {key: value for key, value in slots.items() if key not in held}
                slots.clear()
                slots.update({**held, **more})
        if self.before:
            self.root.load_state_dict(self.before, strict=False)
        with torch.no_grad():
            for tensor, value in self.values:
                tensor.copy_(value)


class StateExchange(Exchange):
    """The values of the leaves, through the module's ``load_state_dict``."""

    __slots__ = ()

    def put(self) -> None:
        module = self._root
        turn = _StateTurn(module)
        _claims.take(turn)
        try:
            for name, value in module.state_dict().items():
                turn.before[name] = value.detach().clone() if isinstance(value, Tensor) else value
            state = {".".join(path): leaf for path, leaf in self._tree._leaves()}
            report = module.load_state_dict(state, strict=False)
            if report.unexpected_keys:
                unknown = [f"unknown {n!r}{hint(n, turn.before)}" for n in report.unexpected_keys]
                raise MissingKeyError(f"cannot load into {title(module)}: {'; '.join(unknown)}")
        except BaseException:
            _claims.release(turn)
            turn.restore()
            raise
        self._stack.append(turn)
        if self._found is None:
            self._found = turn.before

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: load what the module had; updated buffers go into the tree."""
        module, turn = self._root, self._stack.pop()
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        now = {
            name: value.detach().clone()
            for name, value in module.state_dict().items()
            if name in buffers
        }
        _claims.release(turn)
        turn.restore()
        leaves = {".".join(path): leaf for path, leaf in self._tree._leaves()}
        for name in [] if failed else leaves.keys() & now.keys():
            if not _copied(leaves[name], now[name]):
                self._tree.set(tuple(name.split(".")), now[name])

    def held(self) -> dict[str, Any]:
        return _nested([(tuple(name.split(".")), value) for name, value in self._found.items()])


# -- writing to slots --------------------------------------------------------------------------


def _tell(turn: _Turn, values: list[Any]) -> None:
    """Write the slots, through its own ``__setattr__`` where a module has one."""
    owners = {
        id(slots): module
        for module in turn.modules
        if type(module).__setattr__ is not SETATTR
        for slots in (module._parameters, module._buffers)
    }
    for slots, key, value in zip(turn.plan.targets, turn.plan.keys, values, strict=True):
        if id(slots) in owners:
            _set_through(owners[id(slots)], slots, key, value)
        else:
            slots[key] = value


def _set_through(module: nn.Module, slots: Slots, key: str, value: Any) -> None:
    """Write a slot so that the module's own ``__setattr__`` sees the value, as ``nn.RNN``'s must.

    ``nn.Module.__setattr__`` refuses a plain tensor under the name of a parameter; so the name is
    out of the way while the module is told, and the value then moves to its slot.
    """
    held = dict(slots)
    del slots[key]
    try:
        setattr(module, key, value)
    finally:
        module.__dict__.pop(key, None)
        for registry in (module._parameters, module._buffers):
            registry.pop(key, None)
        slots.clear()
        slots.update(held)
    slots[key] = value


def _restore_order(turn: _Turn) -> None:
    """Bring the names back into their order, if the block deleted and remade a slot."""
    planned = tuple(dict.fromkeys(turn.plan.keys))
    orders = [(module._parameters, planned) for module in turn.modules]
    for slots, order in [*turn.plan.orders, *orders]:
        wanted = [key for key in order if key in slots]
        if wanted != [key for key in slots if key in set(wanted)]:
            held = dict(slots)
            slots.clear()
            slots.update({key: held.pop(key) for key in wanted})
            slots.update(held)


def _hand_over(turn: _Turn, later: list[Claim], now: list[Any]) -> tuple[list[Any], list[Any]]:
    """Make blocks that began later and go on give back, at their end, what this one found.

    A later swap in which no block runs ends here, with the block around it.

    Returns:
        What to write now and what this block left, for each slot: those of a later swap keep its
        values, and it has what this block left.
    """
    mine = {slot: i for i, slot in enumerate(turn.plan.slot_ids())}
    write, left = list(turn.old or ()), list(now)
    for other in later:
        if not isinstance(other, _Turn) or other.modules.isdisjoint(turn.modules):
            continue
        if not other.is_open:
            _claims.release(other)
            other.is_over = True
            continue
        theirs: Any = other.old
        for n, slot in enumerate(other.plan.slot_ids()):
            i = mine.pop(slot, None)
            if i is not None:
                write[i], left[i], theirs[n] = now[i], theirs[n], write[i]
    return write, left


# -- rare kinds of modules and values ----------------------------------------------------------


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


def _lazy_states(turn: _Turn) -> list[_LazyState]:
    return [_LazyState(module) for module in turn.modules if isinstance(module, LazyModuleMixin)]


def _caches(turn: _Turn) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the lists in which RNNs keep their weights once more; a forward makes new ones."""
    names = ("_flat_weights", "_flat_weight_refs")  # as of torch 2.14
    return [
        (module, {name: module.__dict__[name] for name in names if name in module.__dict__})
        for module in turn.modules
        if isinstance(module, nn.RNNBase)
    ]


def _copied(leaf: Any, value: Any) -> bool:
    """Copy a value into the leaf of a tree, if it fits exactly."""
    if not (isinstance(leaf, Tensor) and isinstance(value, Tensor)) or _is_transformed(value):
        return False
    if leaf.shape != value.shape or leaf.dtype != value.dtype:
        return False
    with torch.no_grad():
        leaf.copy_(value)
    return True


def _forget_cached() -> None:
    """Drop what ``parametrize.cached()`` holds: it was computed from other weights."""
    # No public name for this as of torch 2.14.
    if parametrize._cache_enabled and not is_compiling():
        parametrize._cache.clear()


def _in_transform() -> bool:
    """Return whether a functorch transform is running."""
    # No public name for this as of torch 2.14.
    return torch._C._functorch.maybe_current_level() is not None


def _is_transformed(tensor: Any) -> bool:
    """Return whether a tensor belongs to a functorch transform that is running."""
    # No public name for this as of torch 2.14.
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _nested(entries: list[tuple[Path, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in entries:
        at = tree
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = value
    return tree
