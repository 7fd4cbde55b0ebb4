"""A tree whose leaves are the parameters and buffers of an ``nn.Module``."""

from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import Buffer, Parameter

from tdnn._core import Entry, TensorDictBase, locked
from tdnn._keys import NestedKey
from tdnn._node import Node, itself
from tdnn.errors import KeyConflictError
from tdnn.tensordict import TensorDict

__all__ = ["TensorDictParams", "as_buffer"]


class TensorDictParams(TensorDict, nn.Module):  # type: ignore[misc]  # apply and to: see below
    """A tree that is a module, so that an optimizer, ``state_dict`` and ``.to`` see its leaves.

    There is one store: the parameters, buffers and submodules of the module *are* the entries of
    the tree, and every branch is a ``TensorDictParams`` as well. So both show the same tensors
    after each change, made by whichever side. Where both have a method of one name, those that
    cast, move and flag are the module's (``to``, ``double``, ``float``, ``half``, ``bfloat16``,
    ``cpu``, ``cuda``, ``requires_grad_``, ``zero_grad``: in place, parameters keep their
    identity), and ``apply`` is the tree's, also where ``apply`` of an owner calls it: ``fn`` then
    gets the leaves. ``keys()``, ``items()`` and ``values()`` show the entries of the moment. Other
    operations return a plain ``TensorDict``.

    Args:
        parameters: a tree or mapping; its tensors are taken, not copied.
        no_convert: a tensor that is no ``nn.Parameter`` becomes a buffer. Otherwise floating
            point and complex ones become parameters (but an ``nn.Buffer`` does not). A new value
            of a parameter is a parameter either way, and requires grad if that did.
        lock: lock the tree.
        **kwargs: the entries, in place of ``parameters``.

    Raises:
        TypeError: an entry is not a tensor.

    Example:
        >>> params = TensorDictParams(TensorDict.from_module(nn.Linear(3, 4)))
        >>> [name for name, _ in params.named_parameters()]
        ['weight', 'bias']
        >>> params.double()["weight"].dtype
        torch.float64
    """

    _kind = TensorDict

    no_convert: bool

    def __init__(
        self,
        parameters: TensorDictBase | Mapping[Any, Any] | None = None,
        *,
        no_convert: bool = False,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        nn.Module.__init__(self)
        if parameters is not None and kwargs:
            raise ValueError("give the entries as one tree or as keyword arguments, not both")
        tree = parameters if isinstance(parameters, TensorDictBase) else None
        if tree is None:
            tree = TensorDict(cast(Any, parameters) if parameters is not None else kwargs)
        self.no_convert = no_convert
        self._batch_size = tree._batch_size
        self._device = tree._device
        self._names = tree._names
        self._lock = None
        self._scope = None
        for key, value in (tree._data if no_convert else _tied_once(tree)).items():
            self._put(key, value)
        if lock:
            self._hold(None)

    # -- the store -----------------------------------------------------------------------------

    @property
    def _data(self) -> dict[str, Any]:  # type: ignore[override]  # joined when it is read
        return {**self._parameters, **self._buffers, **self._modules}

    def _dicts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        # Hot (test_to_module_speed[True]): typing.cast is a call.
        return self._parameters, self._buffers, self._modules

    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
    ) -> Self:
        """Write an entry as a parameter, a buffer or a branch; see :meth:`TensorDict.set`."""
        return self._set(key, item, inplace, non_blocking)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write an entry, or into the leaves at an index; see :class:`TensorDict`."""
        if isinstance(index, str):
            self._set(index, value, False, False)
        else:
            super().__setitem__(index, value)

    def _put(self, key: str, value: Entry) -> None:
        parameters, buffers, branches = self._dicts()
        if isinstance(value, TensorDictBase):
            store, value = branches, self._as_branch(value)
        elif isinstance(value, Parameter):
            store = parameters
        elif key in parameters and _is_trainable(value) and not isinstance(value, Buffer):
            store, value = parameters, Parameter(value, parameters[key].requires_grad)
        elif isinstance(value, Buffer) or self.no_convert or not _is_trainable(value):
            store = buffers
        elif key in buffers:  # a new value of a buffer is a buffer
            store, value = buffers, as_buffer(value)
        else:
            store, value = parameters, Parameter(value)
        for other in self._dicts():
            if other is not store:
                other.pop(key, None)
        store[key] = value

    def _as_branch(self, value: TensorDictBase) -> "TensorDictParams":
        if isinstance(value, TensorDictParams):
            return value
        return TensorDictParams(value, no_convert=self.no_convert)

    def _drop(self, key: str) -> None:
        for store in self._dicts():
            store.pop(key, None)

    def _refill(self, data: dict[str, Any]) -> None:
        before = dict(self._parameters)
        for store in self._dicts():
            store.clear()
        for key, value in data.items():
            if key in before:  # then it is known what a new value is to be
                self._parameters[key] = before[key]
            self._put(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is an attribute here as one, also if an entry has that name."""
        if name in _ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            if isinstance(value, Parameter | Buffer | nn.Module) or name in self._buffers:
                self._refuse_entry(name, value)
            nn.Module.__setattr__(self, name, value)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Add a parameter, as ``nn.Module`` does; the tree must be unlocked."""
        self._refuse_entry(name, param)
        nn.Module.register_parameter(self, name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer, as ``nn.Module`` does; the tree must be unlocked."""
        self._refuse_entry(name, tensor)
        nn.Module.register_buffer(self, name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a branch, which is a ``TensorDictParams`` too; the tree must be unlocked."""
        self._refuse_entry(name, module)
        nn.Module.add_module(self, name, module)

    def _refuse_entry(self, name: str, value: object) -> None:
        """Raise if the tree cannot take what a method of the module would make an entry."""
        if self._lock is not None:
            raise locked(f"set {name!r}")
        if value is None or (
            isinstance(value, nn.Module) and not isinstance(value, TensorDictParams)
        ):
            raise TypeError(
                f"{name!r}: a TensorDictParams holds tensors and branches, not "
                f"{type(value).__name__}; make a branch of a module with "
                "TensorDict.from_module(module, as_module=True)"
            )
        entry = cast(Entry, value)
        size = self._batch_size
        if size and entry.shape[: len(size)] != size:
            raise ValueError(
                f"key {name!r}: shape {tuple(entry.shape)} does not begin with the batch size "
                f"{tuple(size)}"
            )
        if self._device is not None and entry.device != self._device:
            raise ValueError(
                f"key {name!r}: it is on the device {entry.device}, and the tree on {self._device}"
            )

    def __delattr__(self, name: str) -> None:
        """Delete an entry, as ``nn.Module`` does; the tree must be unlocked."""
        if self._lock is not None and name in self._data:
            raise locked(f"delete {name!r}")
        nn.Module.__delattr__(self, name)

    # -- copies --------------------------------------------------------------------------------

    def clone(self, recurse: bool = True) -> Self:
        """Return an unlocked ``TensorDictParams`` of copies that no gradient flows through.

        Args:
            recurse: copy the tensors; otherwise only the nodes are new.

        Example:
            >>> params = TensorDictParams({"w": torch.zeros(2)})
            >>> copy = params.clone()
            >>> copy["w"] is params["w"], copy["w"].requires_grad
            (False, True)
        """
        tree = self._rebuild(_copied if recurse else itself, self._batch_size, self._names)
        made = TensorDictParams(tree, no_convert=True)
        twins = dict(self.named_modules(remove_duplicate=False))
        for name, node in made.named_modules(remove_duplicate=False):
            object.__setattr__(node, "no_convert", self.no_convert)
            node._non_persistent_buffers_set = set(twins[name]._non_persistent_buffers_set)
        return cast(Self, made)

    def __getstate__(self) -> tuple[Any, ...]:
        slots = (self._batch_size, self._device, self._names, self._lock is not None)
        return (dict(self.__dict__), slots)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        attributes, (self._batch_size, self._device, self._names, was_locked) = state
        nn.Module.__setstate__(self, attributes)  # type: ignore[no-untyped-call]  # torch's own
        self._lock = None
        self._scope = None
        if was_locked:
            self._hold(None)

    # -- what both the tree and the module have ------------------------------------------------

    # In place, as users of modules expect.
    to = nn.Module.to  # type: ignore[assignment]  # torch has it overloaded
    cpu = nn.Module.cpu
    cuda = nn.Module.cuda
    float = nn.Module.float
    double = nn.Module.double
    half = nn.Module.half
    bfloat16 = nn.Module.bfloat16
    requires_grad_ = nn.Module.requires_grad_
    zero_grad = nn.Module.zero_grad  # type: ignore[assignment]  # it returns nothing
    state_dict = nn.Module.state_dict  # type: ignore[assignment]  # torch has it overloaded
    load_state_dict = nn.Module.load_state_dict  # type: ignore[assignment]  # it returns keys

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Change every tensor as ``nn.Module`` does, and let the tree's device follow."""
        marked = [key for key, buffer in self._buffers.items() if isinstance(buffer, Buffer)]
        nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
        for key in marked:  # else it would be a parameter as soon as it is renamed
            buffer = cast(Tensor, self._buffers[key])
            if not isinstance(buffer, Buffer):
                self._buffers[key] = Buffer(buffer)
        if self._device is not None:
            self._device = fn(torch.empty(0, device=self._device)).device
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save as ``nn.Module`` does, but no entry over another."""
        for key in (*self._parameters, *self._buffers):
            if prefix + key in destination:
                raise KeyConflictError(
                    f"two entries would have the name {prefix + key!r} in a state dict: the key "
                    f"{key!r}, and the same with a branch for a dot; rename one of them"
                )
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as ``nn.Module`` does, which takes names with a dot for those of submodules."""
        nn.Module._load_from_state_dict(
            self,
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        mine = {prefix + name for name in (*self._parameters, *self._buffers)}
        unexpected_keys[:] = [name for name in unexpected_keys if name not in mine]


def as_buffer(value: Tensor) -> Tensor:
    """Return a value marked as a buffer; one that autograd made stays in its graph."""
    if value.is_leaf:
        return Buffer(value)
    value._is_buffer = value.persistent = True  # type: ignore[attr-defined]  # as Buffer marks them
    return value


def _tied_once(tree: TensorDictBase) -> dict[str, Any]:
    """Return the entries of a tree, in which a tie that will be a parameter is one already."""
    leaves = [leaf for _, leaf in tree._leaves()]
    if len(set(map(id, leaves))) == len(leaves):
        return tree._data
    made = {
        id(leaf): Parameter(leaf)
        for leaf in leaves
        if not isinstance(leaf, Parameter | Buffer) and _is_trainable(leaf)
    }
    return _replaced(tree, made)._data


def _replaced(tree: TensorDictBase, made: dict[int, Parameter]) -> TensorDictBase:
    """Return a tree with other leaves for some; one that is a ``TensorDictParams`` stays."""
    if isinstance(tree, TensorDictParams):
        return tree
    data = {
        key: _replaced(value, made)
        if isinstance(value, TensorDictBase)
        else made.get(id(value), value)
        for key, value in tree._data.items()
    }
    return tree._like(data, tree._batch_size, tree._names)


def _is_trainable(value: Tensor) -> bool:
    if not isinstance(value, Tensor):
        raise TypeError(f"TensorDictParams holds tensors, not {type(value).__name__}")
    return value.is_floating_point() or value.is_complex()


def _copied(leaf: Tensor) -> Tensor:
    if isinstance(leaf, Parameter):
        return Parameter(leaf.detach().clone(), leaf.requires_grad)
    if isinstance(leaf, Buffer):
        return Buffer(leaf.detach().clone())
    return leaf.detach().clone()


_ATTRIBUTES = {"no_convert", "training", *Node.__slots__}

TensorDict._params_kind = TensorDictParams
