"""Where in a module the leaves of a tree go.

A *slot* is an entry of ``module._parameters`` or ``module._buffers``. A plan finds the slot of
every leaf, or lists all leaves that have none, before anything is written.
"""

import gc
import weakref
from itertools import chain
from operator import getitem, is_
from typing import Any, NoReturn, TypeAlias, cast

from torch import nn
from torch.compiler import is_compiling
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tdnn._core import TensorDictBase
from tdnn._keys import Path, as_key, hint
from tdnn._node import Node
from tdnn._registrations import registrations
from tdnn._transforms import in_transform
from tdnn.errors import MissingKeyError, SwapError

__all__ = [
    "SETATTR",
    "UNINITIALISED",
    "Plan",
    "Slots",
    "batched",
    "forget_plan",
    "module_title",
    "nodes_of",
    "plan_for",
    "refuse",
]

Slots: TypeAlias = dict[str, Any]

SETATTR: Any = nn.Module.__setattr__
_MOST_FAULTS = 20  # that an error lists
UNINITIALISED = (UninitializedParameter, UninitializedBuffer)


class Plan:
    """A slot for every leaf of a tree; it does not look at the leaves themselves.

    It refers to neither of the two roots, so that the tree can remember it.

    Raises:
        MissingKeyError: some entries have no place; all are listed.
        SwapError: a branch has batch dims, or a module is a ``ScriptModule``.
    """

    __slots__ = (
        "buffers",
        "children",
        "has_lazy",
        "has_listeners",
        "homes",
        "is_plain",
        "is_tied",
        "keys",
        "kind",
        "names",
        "nones",
        "registered",
        "registries",
        "sizes",
        "targets",
        "watches",
    )

    def __init__(self, tree: TensorDictBase, root: nn.Module, watch: bool = False) -> None:
        # Of each slot: the dict of the tree that has its leaf, the dict of the module, the key.
        self.homes: list[Slots] = []
        self.targets: list[Slots] = []
        self.keys: list[str] = []
        self.registries: list[Slots] = []  # the dicts of the modules that have names
        self.buffers: list[tuple[Slots, Slots]] = []  # those of buffers, and their homes
        self.nones: list[tuple[Slots, Slots, str]] = []  # buffers without a value, and their home
        self.children: list[nn.Module] = []  # that it enters; one with two names is here twice
        # Each dict of the tree, with its module.
        visits = [(home, root) for home in tree._dicts()]
        kinds: set[type] = {type(tree)}  # of the nodes
        try:
            self._visit(tree, root, visits, kinds)
            self.names = [*chain.from_iterable(self.registries)]
            self.sizes = [*map(len, self.registries)]
        except TypeError:
            _refuse_scripts(root)
            raise
        self.is_plain = kinds == {tree._kind}
        self.registered = 0 if is_compiling() else registrations()  # when the order was seen
        if self.nones:  # the nodes of a TensorDictParams have several dicts
            taken = set(self.slot_ids())
            nones = {(id(slots), key): (home, slots, key) for home, slots, key in self.nones}
            self.nones = [none for slot, none in nones.items() if slot not in taken]
        self.is_tied: bool | None = None  # whether two slots hold one tensor; None: not known
        classes = set(map(type, self.modules(root)))
        self.kind = type(root)
        self.has_listeners = any([each.__setattr__ is not SETATTR for each in classes])
        self.has_lazy = any([issubclass(each, LazyModuleMixin) for each in classes])
        self.watches: tuple[Watch, Watch] | None = None  # of the module and of the tree
        if watch and kinds <= {tree._kind, tree._params_kind}:  # others make their dicts anew
            self.watches = _watch_module(self, visits), _watch_tree(tree)

    def _visit(
        self,
        tree: TensorDictBase,
        root: nn.Module,
        visits: list[tuple[Slots, nn.Module]],
        kinds: set[type],
    ) -> None:
        """Find a slot for every leaf.

        Hot (test_to_module_speed): flat lists, local names, one loop over a list that grows, and
        no look at the leaves themselves.
        """
        homes, targets, keys, children = self.homes, self.targets, self.keys, self.children
        registries = self.registries
        plain = tree._kind  # nodes whose entries are all in the one dict _data
        for home, module in visits:
            parameters: Any = module._parameters
            modules = module._modules
            buffers: Any = module._buffers
            for key in home:
                if key in parameters:
                    homes.append(home)
                    targets.append(parameters)
                    keys.append(key)
                elif key in modules:
                    branch, child = home[key], modules[key]
                    if type(branch) is plain and child is not None and not branch._batch_size:
                        visits.append((branch._data, child))
                    elif child is not None and isinstance(branch, TensorDictBase):
                        if branch._batch_size and not isinstance(child, TensorDictBase):
                            raise batched(tree, root)
                        visits += [(below, child) for below in branch._dicts() if below]
                        kinds.add(type(branch))
                    elif _has_leaf(branch):
                        refuse(tree, root)
                    else:  # an empty branch for a module that is None
                        continue
                    children.append(child)
                elif key in buffers:
                    homes.append(home)
                    targets.append(buffers)
                    keys.append(key)
                elif _has_leaf(home[key]):
                    refuse(tree, root)
            if parameters:
                registries.append(parameters)
            if buffers:
                registries.append(buffers)
                self.buffers.append((home, buffers))
                self._note_nones(home, buffers)

    def _note_nones(self, home: Slots, buffers: Slots) -> None:
        """Note the buffers without a value, for which the tree has no entry."""
        for key in buffers:
            if buffers[key] is None and key not in home:
                self.nones.append((home, buffers, key))

    def modules(self, root: nn.Module) -> set[nn.Module]:
        """Return the modules that it enters."""
        return {root, *self.children}

    def owners(self, root: nn.Module, kind: type) -> dict[int, nn.Module]:
        """Return the modules of a kind that it enters, by the ids of the dicts of their slots."""
        return {
            id(slots): module
            for module in self.modules(root)
            if isinstance(module, kind)
            for slots in (module._parameters, module._buffers)
        }

    def slot_ids(self) -> list[tuple[int, str]]:
        return list(zip(map(id, self.targets), self.keys, strict=True))

    def fits_module(self, root: nn.Module) -> bool:
        """Return whether the module is known to be built as it was when this was planned."""
        if self.watches is None or type(root) is not self.kind or not self.watches[0].holds():
            return False
        # Hot (test_to_module_speed, test_kept_swap_speed): a look at names and ties costs a tenth.
        now = registrations()
        if now != self.registered:
            if not self.has_order():
                return False
            self.registered, self.is_tied = now, None
        return True

    def has_order(self) -> bool:
        """Return whether the names in the dicts of the modules are those of then, in order."""
        if not is_compiling() and self.registered == registrations():
            return True
        return [*chain.from_iterable(self.registries)] == self.names

    def fits_tree(self) -> bool:
        """Return whether the tree is known to be built as it was when this was planned."""
        return self.watches is not None and self.watches[1].holds()

    def leaves(self) -> list[Any]:
        """Return what the tree has for each slot now."""
        return list(map(getitem, self.homes, self.keys))

    def paths(self, tree: TensorDictBase, root: nn.Module) -> list[Path]:
        """Return the path of each slot: in the module, or, if it has no place there, in the tree.

        Of several paths in the module, the one that the tree has too is meant.
        """
        at: dict[int, list[Path]] = {}
        for path, _, home in nodes_of(tree, ()):
            at.setdefault(id(home), []).append(path)
        for name, module in root.named_modules(remove_duplicate=False):
            for slots in (module._parameters, module._buffers):
                at.setdefault(id(slots), []).append(tuple(name.split(".")) if name else ())
        found = []
        for home, slots, key in zip(self.homes, self.targets, self.keys, strict=True):
            here, there = at.get(id(home), []), at.get(id(slots), [])
            above = next(iter([path for path in there if path in here] or there or here), None)
            if above is None:
                raise SwapError(
                    f"{module_title(root)} and the tree have both changed since the swap, so that "
                    "what the module held has no names any more"
                )
            found.append((*above, key))
        return found


# -- a plan that is used again -----------------------------------------------------------------


class Memory:
    """What a tree remembers of its last swap: the module, and a plan from the second time on.

    A part of the module may refer to the module, and would keep it alive as long as the plan is
    there. So every full garbage collection drops the plans first; the next swap makes a new one.
    """

    __slots__ = ("__weakref__", "plan", "root")

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        self.plan: Plan | None = None

    def keep(self, plan: Plan, root: nn.Module) -> None:
        """Remember a plan for as long as the module is there."""
        me = weakref.ref(self)
        # As a default, because globals are gone when the interpreter ends.
        self.root = weakref.ref(root, lambda _, forget=_forget: forget(me()))  # type: ignore[misc]
        self.plan = plan
        _MEMORIES.add(self)


# The slot itself, because a TensorDictParams may have an entry of its name.
_memory_of: Any = vars(Node)["_memory"].__get__
_remember: Any = vars(Node)["_memory"].__set__

_MEMORIES: "weakref.WeakSet[Memory]" = weakref.WeakSet()


def _forget(memory: Memory | None) -> None:
    if memory is not None:
        memory.plan = None


def _before_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "start" and info["generation"] == 2:
        for memory in list(_MEMORIES):
            memory.plan = None


gc.callbacks.append(_before_collection)


def plan_for(tree: TensorDictBase, root: nn.Module) -> Plan:
    """Return a plan: the one that the tree remembers, if both are built as they were then."""
    if is_compiling() or in_transform():  # where each call makes trees of its own
        return Plan(tree, root)
    try:
        memory: Memory | None = _memory_of(tree)
    except AttributeError:  # it was never swapped
        memory = None
    if memory is None or memory.root() is not root:
        _remember(tree, Memory(root))  # no more than that, as many trees are swapped once
        return Plan(tree, root)
    plan = memory.plan
    if plan is None or not (plan.fits_module(root) and plan.fits_tree()):
        plan = Plan(tree, root, watch=True)
        if plan.watches is not None:
            memory.keep(plan, root)
    return plan


def forget_plan(tree: TensorDictBase) -> None:
    _remember(tree, None)


class Watch:
    """What must stay as it was when it was planned."""

    __slots__ = ("_dicts", "_empty", "_held", "_holders", "_kinds", "_names", "_objects", "_sizes")

    def __init__(
        self, links: list[tuple[Slots, str, Any]], dicts: list[Slots], objects: list[Any]
    ) -> None:
        # Entries that must be the same objects,
        self._holders, self._names, self._held = ([link[i] for link in links] for i in range(3))
        # dicts that must keep their sizes,
        self._empty = [slots for slots in dicts if not slots]
        self._dicts = [slots for slots in dicts if slots]
        self._sizes = [*map(len, self._dicts)]
        # and objects that must keep their classes.
        self._objects = objects
        self._kinds = [*map(type, objects)]

    def holds(self) -> bool:
        # Hot (test_to_module_speed, test_kept_swap_speed): all loops run in C.
        try:
            return (
                all(map(is_, map(getitem, self._holders, self._names), self._held))
                and not any(self._empty)
                and [*map(len, self._dicts)] == self._sizes
                and [*map(type, self._objects)] == self._kinds
            )
        except KeyError:
            return False


def _watch_tree(tree: TensorDictBase) -> Watch:
    """Watch the branches of a tree, and that no entry comes or goes."""
    homes = [home for _, _, home in nodes_of(tree, ())]
    links = [
        (home, key, value)
        for home in homes
        for key, value in home.items()
        if isinstance(value, TensorDictBase)
    ]
    return Watch(links, homes, [])


def _watch_module(plan: Plan, visits: list[tuple[Slots, nn.Module]]) -> Watch:
    """Watch the modules that a plan enters, the dicts it writes to, and buffers not in the tree."""
    taken = set(plan.slot_ids())
    links: list[tuple[Slots, str, Any]] = []
    for home, module in visits:
        children: Any = module._modules
        buffers: Any = module._buffers
        links += [(children, key, children[key]) for key in home if key in children]
        links += [(buffers, k, b) for k, b in buffers.items() if (id(buffers), k) not in taken]
    used = {id(slots) for slots in (*plan.targets, *[slots for slots, _, _ in links])}
    modules = list(dict.fromkeys([module for _, module in visits]))
    for module in modules:
        own = vars(module)
        links += [(own, name, slots) for name, slots in own.items() if id(slots) in used]
    empty = [cast(Slots, module._buffers) for module in modules if not module._buffers]
    return Watch(links, empty, plan.children)


def _has_leaf(value: object) -> bool:
    """Return whether an entry is a leaf, or a branch that has one."""
    return not isinstance(value, TensorDictBase) or not value.is_empty()


def nodes_of(tree: TensorDictBase, above: Path) -> list[tuple[Path, TensorDictBase, Slots]]:
    """Return the dicts that hold the entries of a tree, with their nodes and the paths to them."""
    found = [(above, tree, home) for home in tree._dicts()]
    for key, value in tree._data.items():
        if isinstance(value, TensorDictBase):
            found += nodes_of(value, (*above, key))
    return found


def batched(tree: TensorDictBase, root: nn.Module) -> SwapError:
    """Return the error for a tree that has batch dims, or a branch that has."""
    path = _path_to_batch(tree, root) or ()
    what = f"the branch {as_key(path)!r}" if path else "the tree"
    index = f"params[{as_key(path)!r}][0]" if path else "params[0].to_module(net)"
    size = tuple(cast(TensorDictBase, tree._entry(path))._batch_size)
    return SwapError(
        f"{what} has batch size {size}, but a module takes one set of weights: index it "
        f"({index}) or map over it with torch.vmap"
    )


def _path_to_batch(tree: TensorDictBase, module: nn.Module) -> Path | None:
    """Return the path to the first branch with batch dims that belongs to a module."""
    if tree._batch_size and not isinstance(module, TensorDictBase):
        return ()
    for key, value in tree._data.items():
        child = module._modules.get(key)
        if child is not None and isinstance(value, TensorDictBase):
            path = _path_to_batch(value, child)
            if path is not None:
                return (key, *path)
    return None


def _refuse_scripts(root: nn.Module) -> None:
    """Raise if a module keeps its tensors where Python cannot exchange them."""
    for module in root.modules():
        if isinstance(module, ScriptModule):
            raise SwapError(
                f"the tensors of a {type(module).__name__} cannot be exchanged, only overwritten; "
                "use to_module(net, use_state_dict=True)"
            )


def refuse(tree: TensorDictBase, root: nn.Module) -> NoReturn:
    """Raise the error that lists all entries of a tree without a place in a module."""
    faults = _faults(tree, root, ())
    advice = []
    shown = _MOST_FAULTS
    if any([key.partition(".")[0] in root._modules for key in tree._data if "." in key]):
        advice.append("its names are nested keys, use unflatten_keys('.')")
        shown = 3
    # Wrappers, such as torch.compile's, have the net below a name of their own.
    for key, child in root._modules.items():
        if child is not None and not _faults(tree, child, ()):
            advice.append(f"the names are those of its submodule {key!r}, swap into that")
    for key, branch in tree._data.items():
        if isinstance(branch, TensorDictBase) and not _faults(branch, root, ()):
            advice.append(f"the branch {key!r} of the tree fits, swap that")
    if len(faults) > shown:
        faults[shown:] = [f"and {len(faults) - shown} more"]
    raise MissingKeyError(f"cannot swap into {module_title(root)}: {'; '.join([*advice, *faults])}")


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
        elif _has_leaf(value):
            names = [*module._parameters, *module._buffers, *module._modules]
            faults.append(f"unknown {as_key(path)!r}{hint(key, names)}")
    return faults


def module_title(module: nn.Module) -> str:
    """Return the name of a module's class, with what it maps if it says so: ``Linear(4→2)``."""
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    mapping = f"({sizes[0]}→{sizes[1]})" if all(isinstance(n, int) for n in sizes) else ""
    return type(module).__name__ + mapping
