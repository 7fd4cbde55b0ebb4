"""How the leaves of a tree get into a module, and the module's own values back.

A *slot* is an entry of ``module._parameters`` or ``module._buffers``. An exchange is planned and
checked as a whole, then written slot by slot straight into those dicts, and undone the same way,
so that the module gets back the very objects that it held, in the order of its names. Torch
offers no public way to do this without copying values or rebuilding names.
"""

import threading
import weakref
from abc import abstractmethod
from collections import deque
from operator import getitem, is_, setitem
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from tdnn._core import Scope, TensorDictBase
from tdnn._keys import NestedKey, Path, as_key, hint, listing
from tdnn.errors import MissingKeyError, SwapError

__all__ = ["CopyExchange", "Exchange", "SlotExchange", "StateExchange"]

Slots: TypeAlias = dict[str, Any]
Turn: TypeAlias = tuple[list[Any], list[Any], list["_LazyState"]]  # old values, new ones, lazy

_SETATTR: Any = nn.Module.__setattr__
_ONLY_PARAMETERS = {Parameter}
_GONE: Any = object()
_CLAIMS: list["weakref.ref[SlotExchange]"] = []  # the swaps that are on, oldest first
_CLAIMS_LOCK = threading.Lock()


class Exchange(Scope):
    """A swap; ``put`` and ``leave`` come in pairs that may be nested and repeated."""

    __slots__ = ()

    @abstractmethod
    def put(self) -> None:
        """Bring the tree's values into the module; after an error nothing has changed."""

    @abstractmethod
    def held(self) -> dict[str, Any]:
        """Return nested dicts of what the module held before the first ``put``."""

    def keep_parameters(self) -> None:  # only tensors that replace others need it
        """Make what stands for a parameter one, for as long as no block begins."""


class SlotExchange(Exchange):
    """The leaves themselves in the slots of a module."""

    __slots__ = (
        "__weakref__",
        "_all_parameters",
        "_found",
        "_homes",
        "_keys",
        "_lazy",
        "_listeners",
        "_modules",
        "_orders",
        "_plain",
        "_root",
        "_shared",
        "_stack",
        "_targets",
        "_thread",
        "_tree",
    )

    def __init__(self, tree: TensorDictBase, module: nn.Module) -> None:
        super().__init__()
        self._tree = tree
        self._root = module
        # Of each slot: the dict of the tree that has its leaf, the dict of the module, the key.
        self._homes: list[Slots] = []
        self._targets: list[Slots] = []
        self._keys: list[str] = []
        self._orders: dict[int, tuple[Slots, tuple[str, ...]]] = {}
        self._found: list[Any] | None = None
        self._stack: list[Turn] = []
        self._plain: list[tuple[Slots, str, Tensor]] = []
        self._all_parameters = False
        self._thread = 0
        self._modules = self._plan()
        kinds = set(map(type, self._modules))
        self._listeners = any([kind.__setattr__ is not _SETATTR for kind in kinds])
        self._lazy = any([issubclass(kind, LazyModuleMixin) for kind in kinds])

    def _plan(self) -> set[nn.Module]:
        """Find a slot for every leaf; return the modules that the tree reaches.

        Hot (test_to_module_speed): flat lists, local names, one loop over a list that grows, and
        no look at the leaves themselves.
        """
        homes, targets, keys = self._homes, self._targets, self._keys
        plain = self._tree._kind  # nodes whose entries are all in the one dict _data
        visits = [(home, self._root) for home in self._tree._dicts()]
        again = len(visits) - 1  # visits that reach a module by a name that has been counted
        for home, module in visits:
            parameters: Any = module._parameters
            modules = module._modules
            for key in home:
                if key in parameters:
                    homes.append(home)
                    targets.append(parameters)
                    keys.append(key)
                elif key in modules:
                    branch, child = home[key], modules[key]
                    if type(branch) is plain and child is not None:
                        visits.append((branch._data, child))
                    elif isinstance(branch, TensorDictBase) and child is not None:
                        first = True
                        for below in branch._dicts():
                            if below:
                                visits.append((below, child))
                                again += not first
                                first = False
                    else:
                        self._refuse()
                elif key in module._buffers:
                    buffers: Any = module._buffers
                    self._orders[id(buffers)] = buffers, tuple(buffers)
                    homes.append(home)
                    targets.append(buffers)
                    keys.append(key)
                elif not isinstance(home[key], TensorDictBase) or home[key]._data:
                    self._refuse()
        modules_seen = {module for _, module in visits}
        self._shared = len(modules_seen) < len(visits) - again
        return modules_seen

    def _refuse(self) -> NoReturn:
        """Raise the error that lists all entries without a place in the module."""
        faults = "; ".join(_faults(self._tree, self._root, ()))
        raise MissingKeyError(f"cannot swap into {_title(self._root)}: {faults}")

    # -- in ------------------------------------------------------------------------------------

    def put(self) -> None:
        homes, targets, keys = self._homes, self._targets, self._keys
        new = list(map(getitem, homes, keys))
        if self._found is None:
            kinds = set(map(type, new))
            self._all_parameters = kinds == _ONLY_PARAMETERS
            if not self._all_parameters and any([issubclass(k, TensorDictBase) for k in kinds]):
                self._refuse()
        if self._shared:
            self._refuse_two_values(new)
        self._claim()
        old = list(map(getitem, targets, keys))
        lazy = self._lazy_states()
        try:
            self._write(new)
        except BaseException:
            self._release()
            self._restore(old, lazy)
            raise
        self._stack.append((old, new, lazy))
        if self._found is None:
            self._found = old

    def _write(self, values: list[Any]) -> None:
        if self._listeners:
            self._tell(values)
        else:
            deque(map(setitem, self._targets, self._keys, values), maxlen=0)

    def _lazy_states(self) -> list["_LazyState"]:
        if not self._lazy:
            return []
        modules = [module for module in self._modules if isinstance(module, LazyModuleMixin)]
        return [_LazyState(module) for module in modules]

    def keep_parameters(self) -> None:
        """Wrap plain tensors in ``nn.Parameter`` where a parameter was; a block unwraps them.

        Tensors that need a gradient, and all tensors inside a functorch transform, stay as they
        are, or else no gradient would reach them.
        """
        if self._all_parameters or torch.compiler.is_compiling() or _in_transform():
            return
        old, new, _ = self._stack[-1]
        for slots, key, before, leaf in zip(self._targets, self._keys, old, new, strict=True):
            if isinstance(leaf, Parameter) or not isinstance(before, Parameter):
                continue
            if leaf.requires_grad:
                continue
            slots[key] = Parameter(leaf, requires_grad=before.requires_grad)
            self._plain.append((slots, key, leaf))

    def enter(self, node: TensorDictBase) -> None:
        """Begin a block, on the leaves themselves."""
        for slots, key, leaf in self._plain:
            slots[key] = leaf
        self._plain = []

    # -- out -----------------------------------------------------------------------------------

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: the slots as they were; what was assigned to them goes into the tree."""
        old, new, lazy = self._stack.pop()
        try:
            now = list(map(getitem, self._targets, self._keys))
        except KeyError:  # the block deleted a slot
            now = [d.get(key, _GONE) for d, key in zip(self._targets, self._keys, strict=True)]
        later = self._release()
        if later:
            old, now = self._hand_over(later, old, now)
        self._restore(old, lazy)
        if not all(map(is_, now, new)):
            self._restore_order()
            if not failed:
                self._write_back(new, now)

    def _restore(self, old: list[Any], lazy: list["_LazyState"]) -> None:
        self._write(old)
        for state in lazy:
            state.restore()

    def _restore_order(self) -> None:
        """Bring the names back into their order, if the block deleted and remade a slot."""
        planned = tuple(dict.fromkeys(self._keys))
        orders = [(module._parameters, planned) for module in self._modules]
        for slots, order in [*self._orders.values(), *orders]:
            wanted = [key for key in order if key in slots]
            if wanted != [key for key in slots if key in set(wanted)]:
                held = dict(slots)
                slots.clear()
                slots.update({key: held.pop(key) for key in wanted})
                slots.update(held)

    def _write_back(self, new: list[Any], now: list[Any]) -> None:
        """Put what was assigned to the slots during the block into the tree."""
        nodes = {id(home): node for node in _nodes(self._tree) for home in node._dicts()}
        refused = []
        for i, value in enumerate(now):
            if value is new[i]:
                continue
            home, key = self._homes[i], self._keys[i]
            node = nodes.get(id(home))
            if node is None:
                continue  # its branch left the tree during the block
            if node._lock is not None:
                if not _copied(home[key], value):
                    refused.append(self._key_of(i))
            elif value is _GONE or value is None:
                node._drop(key)
            else:
                node._put(key, node._admit(value, key))
        if refused:
            raise SwapError(
                f"the block assigned to {listing(refused)}, and the locked tree cannot take that "
                "(another shape or dtype); unlock the tree to let it replace its entries"
            )

    def _paths(self) -> dict[int, Path]:
        """Return where each dict of slots stands, by id: in the tree, or else in the module."""
        at = {id(home): path for path, home in _dicts_of(self._tree, ())}
        homes = zip(self._homes, self._targets, strict=True)
        paths = {id(slots): at[id(home)] for home, slots in homes if id(home) in at}
        if len(paths) < len(set(map(id, self._targets))):  # the tree changed meanwhile
            for name, module in self._root.named_modules(remove_duplicate=False):
                path = tuple(name.split(".")) if name else ()
                for slots in (module._parameters, module._buffers):
                    paths.setdefault(id(slots), path)
        return paths

    def _key_of(self, i: int) -> NestedKey:
        return as_key((*self._paths().get(id(self._targets[i]), ()), self._keys[i]))

    def held(self) -> dict[str, Any]:
        paths = self._paths()
        found = self._found or []
        tree: dict[str, Any] = {}
        for slots, key, value in zip(self._targets, self._keys, found, strict=True):
            if value is not None:
                at = tree
                for step in paths[id(slots)]:
                    at = at.setdefault(step, {})
                at[key] = value
        return tree

    # -- rare cases ----------------------------------------------------------------------------

    def _tell(self, values: list[Any]) -> None:
        """Write the slots, through its own ``__setattr__`` where a module has one."""
        owners = {
            id(slots): module
            for module in self._modules
            if type(module).__setattr__ is not _SETATTR
            for slots in (module._parameters, module._buffers)
        }
        for slots, key, value in zip(self._targets, self._keys, values, strict=True):
            if id(slots) in owners:
                _set_through(owners[id(slots)], slots, key, value)
            else:
                slots[key] = value

    def _refuse_two_values(self, new: list[Any]) -> None:
        """Raise if the tree has two values for a slot that it reaches by two names."""
        if torch.compiler.is_compiling():
            return
        first: dict[tuple[int, str], int] = {}
        for i, (slots, key) in enumerate(zip(self._targets, self._keys, strict=True)):
            one, two = new[first.setdefault((id(slots), key), i)], new[i]
            if one is two or _is_transformed(two):
                continue
            if one.shape != two.shape or not torch.equal(one, two):
                raise SwapError(
                    f"{self._key_of(i)!r} is one slot of {_title(self._root)} with two names, "
                    "and the tree has two values for it"
                )

    # -- other swaps of the same modules -------------------------------------------------------

    def _claim(self) -> None:
        """Take the modules for this thread, or raise if another thread is in a swap of them."""
        if torch.compiler.is_compiling():
            return
        me = self._thread = threading.get_ident()
        with _CLAIMS_LOCK:
            _CLAIMS[:] = [ref for ref in _CLAIMS if ref() is not None]
            for ref in _CLAIMS:
                other = ref()
                if other is None or other._thread == me or not self._meets(other):
                    continue
                name = _thread_name(other._thread)
                if name is not None:
                    raise SwapError(
                        f"{_title(self._root)} is in a swap of thread {name!r}; wait until that "
                        "block ends and the swap is let go, or give each thread its own copy"
                    )
            _CLAIMS.append(weakref.ref(self))

    def _meets(self, other: "SlotExchange") -> bool:
        return not self._modules.isdisjoint(other._modules)

    def _release(self) -> list["SlotExchange"]:
        """Let go of the modules; return the swaps of them that were put in later and are on."""
        if torch.compiler.is_compiling():
            return []
        with _CLAIMS_LOCK:
            at = len(_CLAIMS) - 1
            while _CLAIMS[at]() is not self:
                at -= 1
            after = [ref() for ref in _CLAIMS[at + 1 :]]
            del _CLAIMS[at]
        return [other for other in after if other is not None and self._meets(other)]

    def _hand_over(
        self, later: list["SlotExchange"], old: list[Any], now: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Make swaps that came later and stay give back, at their end, what this one found.

        Returns:
            What to write now and what this block left, for each slot: those of a later swap
            keep its values, and it has what this block left.
        """
        mine = {slot: i for i, slot in enumerate(self._slot_ids())}
        write, left = list(old), list(now)
        for other in later:
            theirs = other._stack[-1][0]
            for n, slot in enumerate(other._slot_ids()):
                i = mine.pop(slot, None)
                if i is not None:
                    write[i], left[i], theirs[n] = now[i], theirs[n], old[i]
        return write, left

    def _slot_ids(self) -> list[tuple[int, str]]:
        return list(zip(map(id, self._targets), self._keys, strict=True))


class CopyExchange(SlotExchange):
    """The values of the leaves in the module's own tensors."""

    __slots__ = ("_non_blocking", "_values")

    def __init__(self, tree: TensorDictBase, module: nn.Module, non_blocking: bool) -> None:
        super().__init__(tree, module)
        self._non_blocking = non_blocking
        self._values: list[list[Tensor]] = []

    def put(self) -> None:
        new = list(map(getitem, self._homes, self._keys))
        targets = list(map(getitem, self._targets, self._keys))
        self._refuse_shapes(targets, new)
        if self._shared:
            self._refuse_two_values(new)
        self._claim()
        values = [target.detach().clone() for target in targets]
        self._copy(targets, new)
        self._stack.append((targets, targets, []))
        self._values.append(values)
        if self._found is None:
            self._found = values

    def _refuse_shapes(self, targets: list[Any], new: list[Any]) -> None:
        faults = []
        for i, (target, leaf) in enumerate(zip(targets, new, strict=True)):
            if isinstance(leaf, TensorDictBase):
                faults.append(f"{self._key_of(i)!r} is a tensor there, and a branch here")
            elif target is None or is_lazy(target) or is_lazy(leaf):
                faults.append(f"{self._key_of(i)!r} has no memory to copy into or from")
            elif target.shape != leaf.shape:
                shapes = f"shape {tuple(leaf.shape)} for a slot of shape {tuple(target.shape)}"
                faults.append(f"{self._key_of(i)!r} has {shapes}")
        if faults:
            raise ValueError(f"cannot copy into {_title(self._root)}: {'; '.join(faults)}")

    def _copy(self, targets: list[Any], values: list[Any]) -> None:
        with torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                if target is not value:
                    target.copy_(value, non_blocking=self._non_blocking)

    def keep_parameters(self) -> None:
        """Nothing: the module's own parameters stay."""

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: the values as they were; buffers that the forward changed go to the tree."""
        targets = self._stack[-1][0]
        values = self._values.pop()
        if not failed:
            updated = [n for n, target in enumerate(targets) if not isinstance(target, Parameter)]
            leaves = [self._homes[n][self._keys[n]] for n in updated]
            self._copy(leaves, [targets[n] for n in updated])
        super().leave(node, failed)
        self._copy(targets, values)


class StateExchange(Exchange):
    """The values of the leaves, through the module's ``load_state_dict``."""

    __slots__ = ("_found", "_module", "_node", "_stack")

    def __init__(self, node: TensorDictBase, module: nn.Module) -> None:
        super().__init__()
        self._node = node
        self._module = module
        self._found: dict[str, Any] = {}
        self._stack: list[dict[str, Any]] = []

    def put(self) -> None:
        before = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in self._module.state_dict().items()
        }
        state = {".".join(path): leaf for path, leaf in self._node._leaves()}
        try:
            report = self._module.load_state_dict(state, strict=False)
            if report.unexpected_keys:
                raise MissingKeyError(
                    f"cannot load into {_title(self._module)}: "
                    + "; ".join(f"unknown {n!r}{hint(n, before)}" for n in report.unexpected_keys)
                )
        except BaseException:
            self._module.load_state_dict(before)
            raise
        self._stack.append(before)
        self._found = self._found or before

    def leave(self, node: TensorDictBase, failed: bool) -> None:
        """End a block: load what the module had."""
        self._module.load_state_dict(self._stack.pop())

    def held(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, value in self._found.items():
            *above, key = name.split(".")
            at = tree
            for step in above:
                at = at.setdefault(step, {})
            at[key] = value
        return tree


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


def _copied(leaf: Any, value: Any) -> bool:
    """Copy a value into the leaf of a locked tree, if it fits exactly."""
    if not isinstance(value, Tensor) or _is_transformed(value):
        return False
    if leaf.shape != value.shape or leaf.dtype != value.dtype:
        return False
    with torch.no_grad():
        leaf.copy_(value)
    return True


def _in_transform() -> bool:
    """Return whether a functorch transform is running."""
    # No public name for this as of torch 2.14.
    return torch._C._functorch.maybe_current_level() is not None


def _is_transformed(tensor: Any) -> bool:
    """Return whether a tensor belongs to a functorch transform that is running."""
    # No public name for this as of torch 2.14.
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _dicts_of(tree: TensorDictBase, above: Path) -> list[tuple[Path, Slots]]:
    """Return the dicts that hold the entries of a tree, with the paths of their nodes."""
    found = [(above, home) for home in tree._dicts()]
    for key, value in tree._data.items():
        if isinstance(value, TensorDictBase):
            found += _dicts_of(value, (*above, key))
    return found


def _nodes(tree: TensorDictBase) -> list[TensorDictBase]:
    found = [tree]
    for branch in tree._branches():
        found += _nodes(branch)
    return found


def _faults(tree: TensorDictBase, module: nn.Module, above: Path) -> list[str]:
    """Return what is wrong with each entry of ``tree`` that has no place in ``module``."""
    faults = []
    for key, value in tree._data.items():
        path = (*above, key)
        is_branch = isinstance(value, TensorDictBase)
        child = module._modules.get(key)
        if child is not None and is_branch:
            faults += _faults(value, child, path)
        elif child is not None:
            faults.append(f"{as_key(path)!r} is a module there, and a leaf here")
        elif key in module._parameters or key in module._buffers:
            if is_branch:
                faults.append(f"{as_key(path)!r} is a tensor there, and a branch here")
        elif not is_branch or value._data:
            names = [*module._parameters, *module._buffers, *module._modules]
            faults.append(f"unknown {as_key(path)!r}{hint(key, names)}")
    return faults


def _title(module: nn.Module) -> str:
    """Return the name of a module's class, with what it maps if it says so: ``Linear(4→2)``."""
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    mapping = f"({sizes[0]}→{sizes[1]})" if all(isinstance(n, int) for n in sizes) else ""
    return type(module).__name__ + mapping


def _thread_name(ident: int) -> str | None:
    """Return the name of a thread that is alive."""
    names = [thread.name for thread in threading.enumerate() if thread.ident == ident]
    return names[0] if names else None
