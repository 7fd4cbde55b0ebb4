"""A tree from the parameters and buffers of modules, and a module run on another tree."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from tdnn._core import TensorDictBase
from tdnn._exchange import Exchange, SlotExchange
from tdnn._keys import NestedKey, Path, as_key, listing
from tdnn._overwrite import CopyExchange, StateExchange
from tdnn._plan import batched, module_title, nodes_of

__all__ = ["Swaps"]


class Swaps(TensorDictBase):
    """from_module, from_modules and to_module."""

    __slots__ = ()

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: bool = False,
        lock: bool = False,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> Any:
        """Return a tree of a module's parameters and buffers; they are not copied.

        Args:
            module: any module; a slot that holds None gets no entry, a parameter with two names
                (a tie) gets both.
            as_module: return a :class:`tdnn.nn.TensorDictParams`.
            lock: lock the tree.
            use_state_dict: read ``module.state_dict()`` instead, so that its hooks run.
            filter_empty: leave out submodules without parameters and buffers.

        Returns:
            A tree with the structure of the module and an empty batch size.

        Raises:
            TypeError: ``module`` is no module, or its state dict has entries that are no tensors.

        Example:
            >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
            >>> params = TensorDict.from_module(net)
            >>> params["0", "weight"] is net[0].weight, list(params.keys())
            (True, ['0'])
        """
        _require_module(module)
        if use_state_dict:
            tree = cls._kind(_nested_state(module), [])
        else:
            tree = _read(cls, module, filter_empty)
        made = cls._params_kind(tree, no_convert=True) if as_module else tree
        return made.lock_() if lock else made

    @classmethod
    def from_modules(
        cls,
        *modules: nn.Module,
        as_module: bool = False,
        lock: bool = True,
        use_state_dict: bool = False,
        lazy_stack: bool = False,
        expand_identical: bool = False,
    ) -> Any:
        """Stack the parameters and buffers of modules with the same structure.

        Args:
            *modules: one or more; each leaf must have one shape in all of them.
            as_module: return a :class:`tdnn.nn.TensorDictParams`.
            lock: lock the tree.
            use_state_dict: read each module's ``state_dict()``, so that its hooks run.
            lazy_stack: stack anew whenever an entry is read, differentiably, so that gradients
                reach the parameters of the modules; not together with ``as_module``.
            expand_identical: a tensor that is the same object in every module is expanded (a
                view, through which gradients reach it) rather than copied.

        Returns:
            Batch ``(len(modules),)``; each leaf ``(len(modules), ...)`` is a new
            ``nn.Parameter`` or buffer with the ``requires_grad`` of the first module's. Ties are
            kept.

        Raises:
            ValueError: no modules; shapes differ or parameters are not initialised (all are
                listed); or ``lazy_stack`` with ``as_module``.
            MissingKeyError: the modules have different names.

        Example:
            >>> nets = [nn.Linear(3, 4) for _ in range(2)]
            >>> params = TensorDict.from_modules(*nets)
            >>> params.batch_size, params["weight"].shape
            (torch.Size([2]), torch.Size([2, 4, 3]))
        """
        if not modules:
            raise ValueError("from_modules needs at least one module")
        trees = [cls.from_module(module, use_state_dict=use_state_dict) for module in modules]
        if lazy_stack:
            if as_module:
                raise ValueError("a lazy stack reads the modules' own parameters; drop as_module")
            made = cls._lazy_kind(*trees, stack_dim=0)
        else:
            _refuse_unfit(trees)
            made = _stacked(trees, expand_identical, {})
            if as_module:
                made = cls._params_kind(made, no_convert=True)
        return made.lock_() if lock else made

    def to_module(
        self,
        module: nn.Module,
        *,
        inplace: bool | None = None,
        return_swap: bool = True,
        swap_dest: TensorDictBase | None = None,
        use_state_dict: bool = False,
        non_blocking: bool = False,
        preserve_module_state: bool = True,
    ) -> Any:
        """Put the leaves into the slots of a module: for a ``with`` block, or to stay.

        In a block the module runs on exactly these tensors, so gradients reach them. When the
        block ends, every slot that has a leaf holds the object that it held before; what the
        forward assigned to it, or to a buffer that was None, goes into this tree. If an
        exception leaves the block, this tree keeps the leaves that it has; what was written into
        them in place (BatchNorm's statistics) stays written. Names, submodules and hooks that
        the block adds to the module are not the swap's, and stay.

        Without a block the leaves stay in the module; a plain tensor for a parameter becomes an
        ``nn.Parameter`` over the same memory. One that needs a gradient, which would then not
        reach it, stays as it is, and no optimizer takes it; to load values for good, swap in
        ``params.data.clone()``.

        A module that uses ``torch.utils.checkpoint`` runs again in the backward pass, which
        therefore belongs into the block too.

        Args:
            module: has a slot for every leaf; slots without a leaf keep what they hold.
            inplace: copy the values into the module's own tensors, which keep their identity.
                Shapes must be equal. Two more copies are kept as long as the block runs.
            return_swap: return what the module held; a ``with`` block needs it.
            swap_dest: a tree to write that into, and to return.
            use_state_dict: load through ``module.load_state_dict``, so that its hooks run; the
                values are copied.
            non_blocking: for copies between devices.
            preserve_module_state: without a block, keep parameters ``nn.Parameter``.

        Returns:
            A tree of what the module held, which is also the context manager. Keep it to enter
            it again: it then puts in what this tree holds by then. That costs least if the tree
            is locked.

        Raises:
            MissingKeyError: there are leaves without a slot; all are listed, nothing is changed.
            SwapError: this tree has batch dims, a module is a ``torch.jit.ScriptModule`` (which
                only ``use_state_dict`` can serve), or another thread is in a swap of the module.
                A swap without a block counts while what it returned is kept and its leaves are
                in the module.
            ValueError: (in place) a shape differs or there is no memory to write to; all are
                listed, nothing is changed. Or ``swap_dest`` is this tree, or a branch of it.

        Example:
            >>> net = nn.Linear(3, 4)
            >>> zeros = TensorDict.from_module(net).data.clone().zero_()
            >>> with zeros.to_module(net):
            ...     inside = net(torch.ones(3))
            >>> bool((inside == 0).all()), bool((net.weight == 0).all())
            (True, False)
        """
        _require_module(module)
        if self._batch_size and not isinstance(module, TensorDictBase):
            raise batched(self, module)
        if swap_dest is not None and _contains(self, swap_dest):
            raise ValueError("swap_dest is this tree or a branch of it, whose leaves would be lost")
        exchange: Exchange
        if use_state_dict:
            if inplace is not None:
                raise ValueError("use_state_dict copies values in its own way; drop inplace")
            exchange = StateExchange(self, module)
        elif inplace:
            exchange = CopyExchange(self, module, non_blocking)
        else:
            exchange = SlotExchange(self, module)
        exchange.put()
        try:
            if preserve_module_state:
                exchange.wrap_parameters(self._own_leaves(), to_stay=not return_swap)
            if return_swap and swap_dest is not None:
                swap_dest.update(exchange.found_tree())  # type: ignore[attr-defined]  # higher mixin
        except BaseException:
            exchange.leave(self, True)
            raise
        if not return_swap:
            return None
        if swap_dest is not None:
            swap_dest._open(exchange)
            return swap_dest
        return self._swap_kind(exchange)

    def _own_leaves(self) -> Sequence[Any]:
        """Return the leaves that are a module's own, which get back into it as they are."""
        return ()


# -- from modules to trees ---------------------------------------------------------------------


def _require_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"a torch.nn.Module was expected, not {type(module).__name__}")


def _contains(tree: TensorDictBase, other: TensorDictBase) -> bool:
    return any([node is other for _, node, _ in nodes_of(tree, ())])


def _read(cls: Any, module: nn.Module, filter_empty: bool) -> Any:
    data = {key: value for key, value in module._parameters.items() if value is not None}
    for key, buffer in module._buffers.items():
        if buffer is not None:
            data[key] = buffer  # type: ignore[assignment]  # a buffer among parameters
    for key, child in module._modules.items():
        if child is not None:
            branch = _read(cls, child, filter_empty)
            if branch._data or not filter_empty:
                data[key] = branch
    tree = cls._kind()
    tree._data.update(data)
    return tree


def _nested_state(module: nn.Module) -> dict[NestedKey, Any]:
    state = module.state_dict(keep_vars=True)
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise TypeError(
            f"cannot make a tree of the state of {module_title(module)}: {listing(others)} are no "
            "tensors, such as extra state; use from_module(net), which leaves them in the module"
        )
    return {as_key(tuple(name.split("."))): value for name, value in state.items()}


def _refuse_unfit(trees: list[Any]) -> None:
    """Raise if the trees of modules cannot be stacked, with all the leaves that are the cause."""
    first = trees[0]
    columns: dict[Path, list[Tensor]] = {path: [leaf] for path, leaf in first._leaves()}
    for other in trees[1:]:
        leaves = dict(other._leaves())
        if leaves.keys() != columns.keys():
            raise first._unpaired(other)
        for path, leaf in leaves.items():
            columns[path].append(leaf)
    faults = []
    for path, column in columns.items():
        if any([is_lazy(leaf) for leaf in column]):
            faults.append(f"{as_key(path)!r} is not initialised (run the nets once)")
        elif len({leaf.shape for leaf in column}) > 1:
            faults.append(f"{as_key(path)!r} has the shapes {[tuple(x.shape) for x in column]}")
    if faults:
        raise ValueError(f"cannot stack the modules: {'; '.join(faults)}")


def _stacked(trees: list[Any], expand_identical: bool, memo: dict[Any, Tensor]) -> TensorDictBase:
    first = trees[0]
    stacked: TensorDictBase = first._like({}, torch.Size((len(trees),)))
    for key, value in first._data.items():
        column = tuple([tree._data[key] for tree in trees])
        if isinstance(value, TensorDictBase):
            stacked._data[key] = _stacked(list(column), expand_identical, memo)
        else:
            if column not in memo:
                memo[column] = _stack_leaf(column, expand_identical)
            stacked._data[key] = memo[column]
    return stacked


def _stack_leaf(leaves: tuple[Tensor, ...], expand_identical: bool) -> Tensor:
    first = leaves[0]
    if expand_identical and all([leaf is first for leaf in leaves]):
        return first.expand(len(leaves), *first.shape)
    stack = torch.stack([leaf.detach() for leaf in leaves])
    if isinstance(first, Parameter):
        return Parameter(stack, first.requires_grad)
    return stack.requires_grad_(first.requires_grad)
