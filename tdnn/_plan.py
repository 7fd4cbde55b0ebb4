"""Where in a module the leaves of a tree go.

A *slot* is an entry of ``module._parameters`` or ``module._buffers``. A plan finds the slot of
every leaf, or lists all leaves that have none, before anything is written.
"""

from operator import getitem, is_
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, Path, as_key, hint
from tdnn.errors import MissingKeyError, SwapError

__all__ = ["SETATTR", "Plan", "Slots", "batched", "nodes_of", "title"]

Slots: TypeAlias = dict[str, Any]

SETATTR: Any = nn.Module.__setattr__


class Plan:
    """A slot for every leaf of a tree; it does not look at the leaves themselves.

    Raises:
        MissingKeyError: some entries have no place; all are listed.
        SwapError: a branch has batch dims.
    """

    __slots__ = (
        "_shape",
        "has_lazy",
        "has_listeners",
        "homes",
        "is_shared",
        "keys",
        "modules",
        "nones",
        "orders",
        "root",
        "targets",
        "tree",
        "visits",
    )

    def __init__(self, tree: TensorDictBase, root: nn.Module) -> None:
        self.tree = tree
        self.root = root
        # Of each slot: the dict of the tree that has its leaf, the dict of the module, the key.
        self.homes: list[Slots] = []
        self.targets: list[Slots] = []
        self.keys: list[str] = []
        self.orders: list[tuple[Slots, tuple[str, ...]]] = []  # of the names of buffers
        self.nones: list[tuple[Slots, Slots, str]] = []  # buffers without a value, and their home
        self._shape: Any = None
        entered = [root]
        # Each dict of the tree, with its module.
        self.visits = [(home, root) for home in tree._dicts()]
        self._visit(entered)
        if self.nones:  # the nodes of a TensorDictParams have several dicts
            taken = set(self.slot_ids())
            nones = {(id(slots), key): (home, slots, key) for home, slots, key in self.nones}
            self.nones = [none for slot, none in nones.items() if slot not in taken]
        self.modules = set(entered)
        self.is_shared = len(self.modules) < len(entered)
        kinds = set(map(type, self.modules))
        self.has_listeners = any([kind.__setattr__ is not SETATTR for kind in kinds])
        self.has_lazy = any([issubclass(kind, LazyModuleMixin) for kind in kinds])

    def _visit(self, entered: list[nn.Module]) -> None:
        """Find a slot for every leaf.

        Hot (test_to_module_speed): flat lists, local names, one loop over a list that grows, and
        no look at the leaves themselves.
        """
        homes, targets, keys, visits = self.homes, self.targets, self.keys, self.visits
        plain = self.tree._kind  # nodes whose entries are all in the one dict _data
        params = self.tree._params_kind  # and those whose entries are in the dicts of a module
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
                    elif type(branch) is params and child is not None and not branch._batch_size:
                        for below in (branch._parameters, branch._buffers, branch._modules):
                            if below:
                                visits.append((below, child))
                    else:
                        visits += self._doubtful(branch, child, key)
                    entered.append(child)  # type: ignore[arg-type]  # None was refused
                elif key in buffers:
                    homes.append(home)
                    targets.append(buffers)
                    keys.append(key)
                elif not isinstance(home[key], TensorDictBase) or home[key]._data:
                    self.refuse()
            if buffers:
                self.orders.append((buffers, tuple(buffers)))
                for key in buffers:
                    if buffers[key] is None and key not in home:
                        self.nones.append((home, buffers, key))

    def _doubtful(
        self, branch: Any, child: nn.Module | None, key: str
    ) -> list[tuple[Slots, nn.Module]]:
        """Return the dicts of a branch, with its module, unless something is wrong with it."""
        if child is None or not isinstance(branch, TensorDictBase):
            self.refuse()
        if branch._batch_size and not isinstance(child, TensorDictBase):
            raise batched(branch, key)
        return [(below, child) for below in branch._dicts() if below]

    def refuse(self) -> NoReturn:
        """Raise the error that lists all entries without a place in the module."""
        faults = "; ".join(_faults(self.tree, self.root, ()))
        raise MissingKeyError(f"cannot swap into {title(self.root)}: {faults}")

    # -- whether it is still right -------------------------------------------------------------

    def is_current(self) -> bool:
        """Return whether the tree and the module are built as when they were remembered."""
        if self._shape is None:
            return False
        holders, names, held, dicts, sizes = self._shape
        if torch.compiler.is_compiling():
            return all(map(is_, map(getitem, holders, names), held))
        try:
            # Hot (test_kept_swap_speed): lists compare their items by identity first, in C. Two
            # trees that are not one cannot be told apart by `==`, which raises.
            return bool([*map(getitem, holders, names)] == held and [*map(len, dicts)] == sizes)
        except (KeyError, RuntimeError, TypeError, ValueError):
            return False

    def remember(self) -> "Plan":
        """Remember how the tree and the module are built; it costs about as much as the plan."""
        self._shape = self._read_shape()
        return self

    def _read_shape(self) -> Any:
        """Return what must stay: branches, modules, and the number of entries of each."""
        links: list[tuple[Slots, str, Any]] = []
        for home, module in self.visits:
            children: Any = module._modules
            for key, value in home.items():
                if isinstance(value, TensorDictBase):
                    links.append((home, key, value))
                    if key in children:
                        links.append((children, key, children[key]))
        dicts = [home for _, _, home in nodes_of(self.tree, ())]
        holders, names, held = ([link[i] for link in links] for i in range(3))
        return holders, names, held, dicts, [*map(len, dicts)]

    # -- names, for messages and trees ---------------------------------------------------------

    def paths(self) -> list[Path]:
        """Return the path of each slot: in the tree, or, if that has changed, in the module."""
        at = {id(home): path for path, _, home in nodes_of(self.tree, ())}
        if not all([id(home) in at for home in self.homes]):
            for name, module in self.root.named_modules(remove_duplicate=False):
                path = tuple(name.split(".")) if name else ()
                for slots in (module._parameters, module._buffers):
                    at.setdefault(id(slots), path)
        found = []
        for home, slots, key in zip(self.homes, self.targets, self.keys, strict=True):
            above = at.get(id(home), at.get(id(slots)))
            if above is None:
                raise SwapError(
                    f"{title(self.root)} and the tree have both changed since the swap, so that "
                    "what the module held has no names any more"
                )
            found.append((*above, key))
        return found

    def key_of(self, i: int) -> NestedKey:
        return as_key(self.paths()[i])

    def slot_ids(self) -> list[tuple[int, str]]:
        return list(zip(map(id, self.targets), self.keys, strict=True))


def nodes_of(tree: TensorDictBase, above: Path) -> list[tuple[Path, TensorDictBase, Slots]]:
    """Return the dicts that hold the entries of a tree, with their nodes and the paths to them."""
    found = [(above, tree, home) for home in tree._dicts()]
    for key, value in tree._data.items():
        if isinstance(value, TensorDictBase):
            found += nodes_of(value, (*above, key))
    return found


def batched(tree: TensorDictBase, key: str | None = None) -> SwapError:
    """Return the error for a tree, or the branch of it at ``key``, that has batch dims."""
    what = "the tree" if key is None else f"the branch {key!r}"
    index = "params[0].to_module(net)" if key is None else f"params[{key!r}][0]"
    return SwapError(
        f"{what} has batch size {tuple(tree._batch_size)}, but a module takes one set of "
        f"weights: index it ({index}) or map over it with torch.vmap"
    )


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


def title(module: nn.Module) -> str:
    """Return the name of a module's class, with what it maps if it says so: ``Linear(4→2)``."""
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    mapping = f"({sizes[0]}→{sizes[1]})" if all(isinstance(n, int) for n in sizes) else ""
    return type(module).__name__ + mapping
