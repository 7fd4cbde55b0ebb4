"""How the values of leaves, rather than the leaves themselves, get into a module and back."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from tdnn import _claims
from tdnn._claims import Claim
from tdnn._core import TensorDictBase
from tdnn._exchange import Exchange, SlotExchange, copied_into, nested
from tdnn._keys import hint
from tdnn._plan import Plan, Slots, module_title
from tdnn._turn import GONE, Turn
from tdnn.errors import MissingKeyError

__all__ = ["CopyExchange", "StateExchange"]


class CopyExchange(SlotExchange):
    """The values of the leaves in the module's own tensors."""

    __slots__ = ("_non_blocking",)

    def __init__(self, tree: TensorDictBase, module: nn.Module, non_blocking: bool) -> None:
        super().__init__(tree, module)
        self._non_blocking = non_blocking

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
            raise ValueError(f"cannot copy into {module_title(self._root)}: {'; '.join(faults)}")
        self._refuse_two_values(plan, list(map(id, targets)), new)

    def _bring_in(self, turn: Turn, new: list[Any]) -> list[Any]:
        old: Any = turn.old
        turn.values = [target.detach().clone() for target in old]
        try:
            self._copy(old, new)
        except BaseException:
            self._copy(old, turn.values)
            raise
        return list(old)  # the slots keep their objects

    def _copy(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                if target is not value:
                    target.copy_(value, non_blocking=self._non_blocking)

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

    def shows(self) -> bool:
        return True  # the values are copies, so nothing shows

    def can_begin(self) -> bool:
        return not self.is_over

    def restore(self) -> None:
        for slots, held in self.slots:
            if any([slots.get(key, GONE) is not value for key, value in held.items()]):
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
                raise MissingKeyError(
                    f"cannot load into {module_title(module)}: {'; '.join(unknown)}"
                )
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
            if not copied_into(leaves[name], now[name]):
                self._tree.set(tuple(name.split(".")), now[name])

    def held(self) -> dict[str, Any]:
        return nested([(tuple(name.split(".")), value) for name, value in self._found.items()])
