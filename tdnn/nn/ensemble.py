"""Many copies of one module, run at once."""

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, Path, as_key, listing
from tdnn._transforms import is_transformed
from tdnn.nn._faults import Told, arguments_in_words, place, title
from tdnn.nn.base import TensorDictModuleBase, as_call, draw_anew
from tdnn.nn.dispatch import dispatch
from tdnn.nn.module import write
from tdnn.nn.params import TensorDictParams, as_buffer
from tdnn.tensordict import TensorDict

__all__ = ["EnsembleModule"]

# torch.vmap has no rule for what these call, as of torch 2.14.
_NOT_MAPPED = (nn.RNNBase, nn.LSTMCell)
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

_OF_VMAP = ("vmap", "Batching rule", "functorch")  # in messages that torch.vmap is the cause of
_PLAIN = (type(None), int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_TENSOR = "a tensor"  # stands for one among the rest of an output


class _Ran(NamedTuple):
    """What a member returned, the buffers that its forward rebound or filled, or set to None."""

    out: Any
    rebound: dict[Path, Tensor]
    emptied: set[Path]


class EnsembleModule(TensorDictModuleBase):
    """Run ``num_copies`` copies of a module, each with weights of its own, in one vmapped call.

    The weights are in ``params_td``, a :class:`TensorDictParams` of batch size
    ``(num_copies,)``, and nowhere else: the module itself is kept without memory for them.
    Dropout and other randomness differ from member to member. Buffers (the statistics of
    BatchNorm) are each member's own, also if the forward rebinds them.

    One thread at a time can run it, as with any swap. State that a forward keeps in plain
    attributes, or in a buffer that it registers itself, is one for all members.

    Of what the module returns, every tensor gets a new first dim, the members; what is no tensor
    (None, numbers, text) is the same for all members, and stays as it is.

    Args:
        module: a module on trees, or any ``nn.Module`` on tensors. It is copied, not changed.
        num_copies: the number of members, at least 1.
        expand_input: every member gets the whole input; otherwise the input has a first dim of
            ``num_copies``, of which each member gets its part (for an ensemble that reads the
            output of another).
        parameter_init_function: called on a copy of ``module`` for each member to set its
            weights. By default every submodule's ``reset_parameters`` (or
            ``_reset_parameters``) is called.
        vectorize: map over the members with ``torch.vmap``. Otherwise they run one after the
            other, which takes longer and works for any module. They do so in any case if the
            module holds an ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` or ``nn.LSTMCell``, which
            ``torch.vmap`` cannot map, and in a call with gradients if it holds attention and is
            in eval.

    Raises:
        ValueError: ``num_copies`` is less than 1; parameters are not initialised; an embedding is
            ``sparse``; or no ``reset_parameters`` reaches some weights, so that all members would
            start alike (a weight of one element, or of equal ones, counts as a constant).
        TypeError: ``module`` is no ``nn.Module``, or a ``ScriptModule``.

    Example:
        >>> module = TensorDictModule(nn.Linear(4, 2), in_keys=["x"], out_keys=["y"])
        >>> members = EnsembleModule(module, 3)
        >>> members(TensorDict({"x": torch.ones(5, 4)}, [5]))["y"].shape
        torch.Size([3, 5, 2])
        >>> EnsembleModule(nn.Linear(4, 2), 3)(torch.ones(5, 4)).shape
        torch.Size([3, 5, 2])
        >>> EnsembleModule(nn.Linear(4, 2), 3)
        EnsembleModule(module=Linear(in_features=4, out_features=2, bias=True), num_copies=3)
    """

    params_td: TensorDictParams
    _shell: nn.Module

    def __init__(
        self,
        module: nn.Module,
        num_copies: int,
        expand_input: bool = True,
        *,
        parameter_init_function: Callable[[nn.Module], Any] | None = None,
        vectorize: bool = True,
    ) -> None:
        super().__init__()
        _refuse_unfit(module, num_copies)
        members = [copy.deepcopy(module) for _ in range(num_copies)]
        for member in members:
            (parameter_init_function or draw_anew)(member)
        self.params_td = TensorDict.from_modules(*members, as_module=True, lock=False)
        _mark_not_persistent(members[0], self.params_td)
        self.training = module.training
        if parameter_init_function is None:
            _refuse_equal_members(module, self.params_td)
        self.num_copies = num_copies
        self.expand_input = expand_input
        self.vectorize = vectorize and not any([_is_not_mapped(part) for part in module.modules()])
        # In __dict__, so that it is no submodule: its parameters are not this module's.
        # A member, as it may be without a bias that the module has.
        self.__dict__["_shell"] = _without_memory(members[0])

    # -- keys ----------------------------------------------------------------------------------

    @property
    def in_keys(self) -> list[NestedKey]:
        """The keys that the module reads; assign a list to change them. Not of all modules."""
        return cast(list[NestedKey], self._shell.in_keys)

    @in_keys.setter
    def in_keys(self, keys: Any) -> None:
        self._shell.in_keys = keys

    @property
    def out_keys(self) -> list[NestedKey]:
        """The keys that the module writes; assign a list to change them. Not of all modules."""
        return cast(list[NestedKey], self._shell.out_keys)

    @out_keys.setter
    def out_keys(self, keys: Any) -> None:
        self._shell.out_keys = keys

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """All keys that the module writes, before :meth:`select_out_keys`."""
        return self._keyed.out_keys_source

    def select_out_keys(self, *out_keys: NestedKey) -> Self:  # noqa: D102  # as in the base
        self._keyed.select_out_keys(*out_keys)
        return self

    def reset_out_keys(self) -> Self:  # noqa: D102  # as in the base
        self._keyed.reset_out_keys()
        return self

    @property
    def _keyed(self) -> TensorDictModuleBase:
        return cast(TensorDictModuleBase, self._shell)

    # -- the call ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all members, on what the module takes.

        Args:
            *args: a tree, batch ``(*B,)``, or tensors, as the module takes them; with the members
                as first dim, ``(num_copies, *B)``, without ``expand_input``.
            **kwargs: likewise; and ``tensordict_out``, a tree to write the outputs to, if the
                module takes a tree.

        Returns:
            What the module returns, with the members as a new first dim. In a tree, inputs that
            every member got are expanded.

        Raises:
            ValueError: (without ``expand_input``) an input does not have the members as first dim.
        """
        if TensorDictModuleBase.is_tdmodule_compatible(self):
            return self._on_tree(*args, **kwargs)
        return self._members(args, kwargs)

    @dispatch(auto_batch_size=False)
    def _on_tree(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        out: TensorDictBase = self._members((tensordict,), kwargs)
        if tensordict_out is None:
            return out
        write(tensordict_out, self.out_keys, [out.get(key) for key in self.out_keys])
        return tensordict_out

    def _members(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run all members and put together what they return."""
        values, spec = pytree.tree_flatten((args, kwargs))
        if not self.expand_input:
            self._check_first_dim([value for value in values if isinstance(value, Tensor)])
        is_mapped = self.vectorize and not (torch.is_grad_enabled() and self._loses_gradients())
        try:
            run = self._run_mapped if is_mapped else self._run_in_turn
            out, rebound, emptied = run(values, spec)
        except Exception as err:
            if is_mapped and any([word in str(err) for word in _OF_VMAP]):
                err.add_note(
                    "EnsembleModule maps over its members with torch.vmap; vectorize=False runs "
                    "them one after the other, which works for any module"
                )
            text = f"{title(self._shell)} ran on {arguments_in_words(args, kwargs)}"
            place(err, f"a member of {self._title()}", text)
            raise
        for path, value in rebound.items():
            self.params_td.set(path, as_buffer(value))
        for path in emptied:
            self.params_td.del_(path)
            self._shell.get_submodule(".".join(path[:-1]))._buffers[path[-1]] = None
        return out

    def _run_mapped(self, values: list[Any], spec: Any) -> _Ran:
        """Map over the members and, without ``expand_input``, the tensors among the arguments."""
        dims = [
            0 if isinstance(value, Tensor) and not self.expand_input else None for value in values
        ]
        outputs: list[_Output] = []
        emptied: set[Path] = set()

        def run(_: Tensor, weights: TensorDict, values: list[Any]) -> Any:
            args, kwargs = pytree.tree_unflatten(values, spec)
            # Without a leaf, nothing tells an empty tree that its first dim is mapped over.
            ran = self._run(weights if weights._data else TensorDict(), args, kwargs)
            out, rebound = ran.out, ran.rebound
            emptied.update(ran.emptied)
            outputs.append(_apart(out, self._shell))
            return outputs[0].tensors, rebound

        # The numbers of the members: a module may have no weights to map over.
        numbers = torch.arange(self.num_copies)
        mapped = torch.vmap(run, (0, 0, dims), randomness="different")
        before = (
            [] if is_compiling() else [(part, dict(vars(part))) for part in self._shell.modules()]
        )
        try:
            tensors, rebound = mapped(numbers, self.params_td, values)
        finally:
            for part, attributes in before:
                _drop_tracers(vars(part), attributes)
        return _Ran(_together(tensors, outputs[0]), rebound, emptied)

    def _run_in_turn(self, values: list[Any], spec: Any) -> _Ran:
        """Run one member after the other and stack what they return."""
        outputs: list[_Output] = []
        changed: dict[Path, None] = {}
        emptied: list[set[Path]] = []
        # Not unbind(): autograd forbids to write into its views, as Embedding(max_norm=) does.
        members = [self.params_td[n] for n in range(self.num_copies)]
        for n, weights in enumerate(members):
            mine = [
                value[n] if isinstance(value, Tensor) and not self.expand_input else value
                for value in values
            ]
            args, kwargs = pytree.tree_unflatten(mine, spec)
            before = _versions(values)
            ran = self._run(weights, args, kwargs)
            if self.expand_input and n + 1 < len(members) and _versions(values) != before:
                raise RuntimeError(
                    Told(
                        f"{title(self._shell)} changed its input in place, and the next member "
                        "would get what the first one left; let it work on a copy"
                    )
                )
            outputs.append(_apart(ran.out, self._shell))
            changed.update(dict.fromkeys(ran.rebound))
            emptied.append(ran.emptied)
        if any([each != emptied[0] for each in emptied]):
            keys = sorted({as_key(path) for each in emptied for path in each}, key=str)
            raise ValueError(
                Told(f"{title(self._shell)} set {listing(keys)} to None for some members only")
            )
        first = outputs[0]
        if any([(each.rest, each.spec) != (first.rest, first.spec) for each in outputs]):
            raise ValueError(
                Told(
                    f"{title(self._shell)} returned other things for one member than for another, "
                    "and only tensors may differ"
                )
            )
        tensors = [_stacked(each) for each in zip(*[out.tensors for out in outputs], strict=True)]
        stacked = {path: torch.stack([each[path] for each in members]) for path in changed}
        return _Ran(_together(tensors, first), stacked, emptied[0])

    def _run(self, weights: TensorDict, args: Any, kwargs: Any) -> _Ran:
        """Run one member."""
        shell = self._shell
        has_buffers = any([module._buffers for module in shell.modules()])
        before = dict(weights._leaves()) if has_buffers else {}
        with weights.to_module(shell):
            out = shell(*args, **kwargs)
        after = dict(weights._leaves()) if has_buffers else {}
        rebound = {path: leaf for path, leaf in after.items() if before.get(path) is not leaf}
        return _Ran(out, rebound, before.keys() - after.keys())

    def _loses_gradients(self) -> bool:
        """Return whether the module holds attention in eval.

        Under ``vmap`` its fast path does not see that gradients are needed, and has none; as of
        torch 2.14.
        """
        return any(
            [
                (isinstance(part, _ATTENTION) and not part.training)
                or (isinstance(part, EnsembleModule) and part._loses_gradients())
                for part in self._shell.modules()
            ]
        )

    def _check_first_dim(self, tensors: list[Tensor]) -> None:
        wrong = [tuple(t.shape) for t in tensors if t.shape[:1] != (self.num_copies,)]
        if wrong:
            raise ValueError(
                f"without expand_input, the input has a first dim of {self.num_copies} "
                f"members; found shapes {wrong}"
            )

    def train(self, mode: bool = True) -> Self:
        """Set training mode, also in the copy that runs."""
        self._shell.train(mode)
        return super().train(mode)

    def reset_parameters_recursive(
        self, parameters: TensorDictBase | None = None
    ) -> TensorDictBase | None:
        """Draw new initial values for each member; see :class:`TensorDictModuleBase`.

        Args:
            parameters: a tree like ``params_td``, of as many members, whose tensors are written
                in place; None stands for ``params_td``.

        Returns:
            None without ``parameters``; otherwise a tree of tensors that share their storage with
            ``parameters`` and require gradients.

        Raises:
            RuntimeError: no submodule has ``reset_parameters``.

        Example:
            >>> members = EnsembleModule(nn.Linear(2, 2), 3)
            >>> before = members.params_td["weight"].clone()
            >>> members.reset_parameters_recursive()
            >>> bool((members.params_td["weight"] == before).any())
            False
        """
        stacked: Any = self.params_td if parameters is None else parameters
        if stacked.batch_size[:1] != (self.num_copies,):
            raise ValueError(
                f"{self._title()} has {self.num_copies} members; found parameters of batch size "
                f"{tuple(stacked.batch_size)}"
            )
        for member in stacked.data.unbind(0):
            self._draw_into(member, self._shell)
        return None if parameters is None else cast(TensorDictBase, stacked.data.requires_grad_())

    def _reset_parameters(self) -> None:  # as modules that hold an ensemble call it
        self.reset_parameters_recursive()

    def __repr__(self) -> str:
        parts = [f"module={self._shell!r}", f"num_copies={self.num_copies}"]
        parts += [f"{name}=False" for name in ("expand_input", "vectorize") if not vars(self)[name]]
        return as_call(type(self).__name__, parts)


# -- what a member returns ---------------------------------------------------------------------


class _Output(NamedTuple):
    """What a member returned, taken apart."""

    tensors: list[Tensor]
    rest: list[Any]  # all that it holds, with a word in the place of each tensor
    spec: Any


def _apart(out: Any, module: nn.Module) -> _Output:
    """Take what a member returned apart, if it can be put together again for all members."""
    values, spec = pytree.tree_flatten(out)
    tensors = [value for value in values if isinstance(value, Tensor)]
    rest = [_TENSOR if isinstance(value, Tensor) else value for value in values]
    odd = {type(value).__name__: None for value in rest if not isinstance(value, _PLAIN)}
    if odd:
        raise TypeError(
            Told(
                f"{title(module)} returned {', '.join(odd)}; an ensemble puts together tensors, in "
                "tuples, lists, dicts, trees or a class that is registered as a pytree "
                "(torch.export.register_dataclass)"
            )
        )
    return _Output(tensors, rest, spec)


def _together(tensors: list[Tensor], like: _Output) -> Any:
    """Put tensors in the places where those of a member stood."""
    left = iter(tensors)
    values = [next(left) if value is _TENSOR else value for value in like.rest]
    return pytree.tree_unflatten(values, like.spec)


def _drop_tracers(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Put back the attributes in which a forward kept tensors that are of no use after ``vmap``."""
    for name, value in [(n, v) for n, v in now.items() if v is not before.get(n)]:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        if any(map(is_transformed, tensors)):
            if name in before:
                now[name] = before[name]
            else:
                del now[name]


def _versions(values: list[Any]) -> list[int]:
    """Return how often each tensor was written to, where torch counts that."""
    if is_compiling():
        return []
    return [v._version for v in values if isinstance(v, Tensor) and not v.is_inference()]


def _stacked(tensors: tuple[Tensor, ...]) -> Tensor:
    """Stack the tensors of all members; one that they share is expanded, as by ``vmap``."""
    first = tensors[0]
    if all([tensor is first for tensor in tensors]):
        return first.expand(len(tensors), *first.shape)
    return torch.stack(tensors)


# -- how members begin -------------------------------------------------------------------------


def _refuse_unfit(module: nn.Module, num_copies: int) -> None:
    """Raise if there cannot be that many copies of the module with weights of their own."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"EnsembleModule takes an nn.Module, not {type(module).__name__}")
    if isinstance(num_copies, bool) or not hasattr(num_copies, "__index__"):
        raise TypeError(f"num_copies is a whole number, not {num_copies!r}")
    if num_copies < 1:
        raise ValueError(f"an ensemble has at least 1 member, not {num_copies}")
    if any([isinstance(part, torch.jit.ScriptModule) for part in module.modules()]):
        raise TypeError(
            f"EnsembleModule: a ScriptModule cannot run on other weights than its own, and "
            f"{title(module)} is or holds one; take the module that was scripted"
        )
    held = chain(module.named_parameters(), module.named_buffers())
    sparse = [
        name or title(module)
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    ]
    if sparse:
        raise ValueError(
            f"EnsembleModule: {listing(sparse)} would give sparse gradients, which cannot flow "
            "into the stacked weights of all members; make it with sparse=False"
        )
    lazy = [name for name, tensor in held if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{title(module)} is not initialised: {listing(lazy)}; call it once on an example, "
            "then make the ensemble"
        )


def _mark_not_persistent(module: nn.Module, params: TensorDictParams) -> None:
    """Leave those buffers out of the state dict that are not in that of the module."""
    for name, part in module.named_modules():
        if part._non_persistent_buffers_set:
            node = params._entry(tuple(name.split("."))) if name else params
            cast(nn.Module, node)._non_persistent_buffers_set |= part._non_persistent_buffers_set


def _is_not_mapped(part: nn.Module) -> bool:
    """Return whether ``torch.vmap`` is known not to map a module."""
    if isinstance(part, EnsembleModule):
        return not part.vectorize
    return isinstance(part, _NOT_MAPPED)


def _refuse_equal_members(module: nn.Module, stacked: TensorDict) -> None:
    """Raise if members have equal weights that were not constants to begin with."""
    equal = []
    for path, leaf in stacked._leaves():
        if isinstance(leaf, Parameter) and len(leaf) > 1 and not leaf.is_meta:
            values = leaf.detach()
            varied = values[0].numel() > 1 and bool((values[0] != values[0].flatten()[0]).any())
            if varied and bool((values == values[:1]).all()):
                equal.append(as_key(path))
    if equal:
        raise ValueError(
            f"no reset_parameters() of {type(module).__name__} reaches {listing(equal)}, so all "
            "members would start alike; pass parameter_init_function=..., which sets the weights "
            "of the module that it is given"
        )


def _without_memory(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)
