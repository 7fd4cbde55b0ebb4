"""Many copies of one module, run at once."""

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from tdnn._core import TensorDictBase
from tdnn._keys import as_key, listing
from tdnn.nn.base import TensorDictModuleBase
from tdnn.nn.dispatch import dispatch
from tdnn.nn.params import TensorDictParams
from tdnn.tensordict import TensorDict

__all__ = ["EnsembleModule"]


class EnsembleModule(TensorDictModuleBase):
    """Run ``num_copies`` copies of a module, each with weights of its own, in one vmapped call.

    The weights are in ``params_td``, a :class:`TensorDictParams` of batch size
    ``(num_copies,)``, and nowhere else: the module itself is kept without memory for them.
    Dropout and other randomness differ from member to member. Buffers (the statistics of
    BatchNorm) are each member's own, also if the forward rebinds them.

    Args:
        module: a module on trees, or any ``nn.Module`` on tensors. It is copied, not changed.
        num_copies: the number of members, at least 1.
        expand_input: every member gets the whole input; otherwise the input has a first dim of
            ``num_copies``, of which each member gets its part (for an ensemble that reads the
            output of another).
        parameter_init_function: called on a copy of ``module`` for each member to set its
            weights. By default every submodule's ``reset_parameters`` (or
            ``_reset_parameters``) is called.

    Raises:
        ValueError: ``num_copies`` is less than 1; or no ``reset_parameters`` reaches some
            weights, so that all members would start alike.

    Example:
        >>> module = TensorDictModule(nn.Linear(4, 2), in_keys=["x"], out_keys=["y"])
        >>> members = EnsembleModule(module, 3)
        >>> members(TensorDict({"x": torch.ones(5, 4)}, [5]))["y"].shape
        torch.Size([3, 5, 2])
        >>> EnsembleModule(nn.Linear(4, 2), 3)(torch.ones(5, 4)).shape
        torch.Size([3, 5, 2])
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
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"EnsembleModule takes an nn.Module, not {type(module).__name__}")
        if num_copies < 1:
            raise ValueError(f"an ensemble has at least 1 member, not {num_copies}")
        members = [copy.deepcopy(module) for _ in range(num_copies)]
        for member in members:
            (parameter_init_function or _reset)(member)
        self.params_td = TensorDict.from_modules(*members, as_module=True, lock=False)
        if parameter_init_function is None:
            _refuse_equal_members(module, self.params_td)
        self.num_copies = num_copies
        self.expand_input = expand_input
        # In __dict__, so that it is no submodule: its parameters are not this module's.
        self.__dict__["_shell"] = _without_memory(module)
        if TensorDictModuleBase.is_tdmodule_compatible(module):
            self.in_keys = list(module.in_keys)  # type: ignore[arg-type]  # just seen to be there
            self.out_keys = list(module.out_keys)  # type: ignore[arg-type]  # as above

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all members; on a tree or, if the module takes tensors, on tensors."""
        if TensorDictModuleBase.is_tdmodule_compatible(self):
            return super().__call__(*args, **kwargs)
        return self._members(args, kwargs)

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> Any:
        """Return the tree that the module returns, with the members as a new first dim.

        Args:
            tensordict: batch ``(*B,)``, or ``(num_copies, *B)`` without ``expand_input``.

        Returns:
            Batch ``(num_copies, *B)``; inputs that every member got are expanded.
        """
        return self._members((tensordict,), {})

    def _members(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run all members, mapped over the tensors among the arguments or over none of them."""
        values, spec = pytree.tree_flatten((args, kwargs))
        dims = [0 if isinstance(value, Tensor) else None for value in values]
        if self.expand_input:
            dims = [None] * len(values)
        else:
            self._check_first_dim([value for value in values if isinstance(value, Tensor)])

        def run(_: Tensor, weights: TensorDict, values: list[Any]) -> Any:
            args, kwargs = pytree.tree_unflatten(values, spec)
            # Without a leaf, nothing tells an empty tree that its first dim is mapped over.
            return self._run(weights if weights._data else TensorDict(), args, kwargs)

        # The numbers of the members: a module may have no weights to map over.
        numbers = torch.arange(self.num_copies)
        mapped = torch.vmap(run, (0, 0, dims), randomness="different")
        out, rebound = mapped(numbers, self.params_td, values)
        for path, value in rebound.items():
            self.params_td.set(path, nn.Buffer(value))
        return out

    def _run(self, weights: TensorDict, args: Any, kwargs: Any) -> tuple[Any, dict[Any, Tensor]]:
        """Run one member; return also the buffers that its forward rebound or filled."""
        shell = self._shell
        has_buffers = any([module._buffers for module in shell.modules()])
        before = dict(weights._leaves()) if has_buffers else {}
        with weights.to_module(shell):
            out = shell(*args, **kwargs)
        after = weights._leaves() if has_buffers else []
        return out, {path: leaf for path, leaf in after if before.get(path) is not leaf}

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


def _reset(module: nn.Module) -> None:
    """Initialise a module as its constructor does: inner modules first."""
    for inner in reversed(list(module.modules())):
        reset = getattr(inner, "reset_parameters", None) or getattr(
            inner, "_reset_parameters", None
        )
        if callable(reset):
            reset()


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
