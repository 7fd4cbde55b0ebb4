"""Which thread is in a swap of which module, and which block gives back what.

So no two threads mix their weights, and blocks may end in another order than they began.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tdnn._plan import module_title
from tdnn._transforms import is_transformed
from tdnn.errors import SwapError

__all__ = [
    "Claim",
    "SlotId",
    "all_debts",
    "begin",
    "hand_over",
    "is_latest",
    "later",
    "release",
    "take",
]

_CLAIMS: list["weakref.ref[Claim]"] = []  # oldest first
_LOCK = threading.RLock()
_taken = 0  # claims so far, which numbers them


SlotId: TypeAlias = tuple[int, str]  # the id of a dict of a module, and a key


class Claim(ABC):
    """A module that is in a swap of a thread, until it is released or garbage."""

    __slots__ = (
        "__weakref__",
        "_memories",
        "is_open",
        "is_over",
        "number",
        "root",
        "saved",
        "thread",
    )

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.is_open = False  # whether a block runs on it
        self.is_over = False  # whether another block that was around it ended it
        self.thread = 0
        self.number = 0
        self.saved: dict[Tensor, Tensor] = {}  # what tensors held that it wrote to
        self._memories: dict[Tensor, tuple[Tensor, bool]] = {}  # where, and requires_grad

    def save(self, tensors: Iterable[Tensor]) -> None:
        """Keep what tensors hold that are going to be overwritten.

        Raises:
            SwapError: another thread is in a swap of one of them.
        """
        self.saved = {tensor: tensor for tensor in tensors}  # for the other thread to see
        try:
            if not is_compiling():
                with _LOCK:
                    _refuse_rivals(self)
        except BaseException:
            self.saved = {}
            raise
        self.saved = {tensor: tensor.detach().clone() for tensor in self.saved}
        if not is_compiling():
            self._memories = {t: (t.detach(), t.requires_grad) for t in self.saved}
        _forget_casts()

    def give_back(self) -> None:
        """Bring back what was kept."""
        if self.saved:
            try:
                self._write_back()
            except BaseException:  # Ctrl-C
                self._write_back()
                raise
            finally:
                _forget_casts()

    def move_back(self) -> None:
        """Bring the tensors back to their memory, dtype and flags, which a block may have set."""
        for tensor, memory in self._memories.items():
            _move_back(tensor, *memory)

    def _write_back(self) -> None:
        error = None
        self.move_back()
        with torch.no_grad():
            for tensor, value in self.saved.items():
                try:
                    tensor.copy_(value)
                except RuntimeError as err:  # the others come first
                    error = err
        if error is not None:
            raise error

    @abstractmethod
    def debts(self) -> dict[SlotId, Any]:
        """Return what it will give back, by slot."""

    @abstractmethod
    def redirect(self, debts: dict[SlotId, Any]) -> None:
        """Change what it will give back to some of its slots."""

    @abstractmethod
    def expect(self, emptied: set[SlotId]) -> None:
        """When it ends, leave these slots empty too, as an earlier block found them."""

    @abstractmethod
    def shows(self) -> bool:
        """Return whether the module still holds anything that the swap brought in."""

    def can_begin(self) -> bool:
        """Return whether a block can begin with what is in the module.

        That is so unless another swap took its place; what was assigned to a slot right after
        the swap is in the block too.
        """
        return not self.is_over and (is_latest(self) or self.is_whole())

    @abstractmethod
    def is_whole(self) -> bool:
        """Return whether the module still holds all that the swap brought in."""


def begin(stack: list[Any]) -> bool:
    """Begin a block on what the last swap in a stack brought in, if no block runs on it yet.

    Returns:
        Whether there was one. One that another swap took the place of is dropped.

    Raises:
        SwapError: another thread is in a swap of the module, or of a part of it.
    """
    if is_compiling():
        return _begin(stack)
    with _LOCK:
        waiting: Any = stack[-1] if stack else None
        began = _begin(stack)
        if began:
            owner, waiting.thread = waiting.thread, get_ident()
            try:
                if owner != waiting.thread:
                    _refuse_rivals(waiting)
            except SwapError:
                waiting.is_open, waiting.thread = False, owner
                raise
    if waiting is not None and not (waiting.is_open or waiting.is_over):
        hand_over(waiting, later(waiting))  # to the one that took its place
        waiting.give_back()
        release(waiting)
    return began


def _begin(stack: list[Any]) -> bool:
    if not stack or stack[-1].is_open:
        return False
    if stack[-1].can_begin():
        stack[-1].is_open = True
        return True
    stack.pop()
    return False


def take(claim: Claim) -> None:
    """Take the module for this thread.

    Raises:
        SwapError: another thread is in a swap of the module, or of a part of it.
    """
    if is_compiling():
        return
    global _taken
    claim.thread = get_ident()
    with _LOCK:
        _taken += 1
        claim.number = _taken
        if _CLAIMS:
            _CLAIMS[:] = [ref for ref in _CLAIMS if ref() is not None]
        _refuse_rivals(claim)
        _CLAIMS.append(weakref.ref(claim))


def _refuse_rivals(claim: Claim) -> None:
    """Raise if another thread is in a swap of the module, or of a tensor in ``claim.saved``.

    Called with the lock held.
    """
    name = _rival(claim)
    if name is not None:
        raise SwapError(
            f"{module_title(claim.root)} is in a swap of thread {name!r}; wait until that block "
            "ends and the swap is let go, or give each thread its own copy"
        )


def _rival(claim: Claim) -> str | None:
    """Return the name of another thread that is in a swap of the module.

    A block whose thread has ended goes on in this one, where it must be left. Only the name is
    returned: an error raised here would keep the other claim alive by its traceback.
    """
    for ref in _CLAIMS:
        other = ref()
        if other is None or other.thread == claim.thread:
            continue
        name = _thread_name(other.thread)
        if name is None and not other.is_open:
            continue
        if other.shows() and _meet(claim, other):
            if name is not None:
                return name
            other.thread = claim.thread
    return None


def is_latest(claim: Claim) -> bool:
    """Return whether no swap of any module began after this one."""
    return not is_compiling() and claim.number == _taken


def later(claim: Claim) -> list[Claim]:
    """Return the claims of this thread that came later than this one and are there."""
    if is_compiling():
        return []
    with _LOCK:
        at = _index_of(claim)
        after = [] if at < 0 else _CLAIMS[at + 1 :]
    others = [ref() for ref in after]
    return [other for other in others if other is not None and other.thread == claim.thread]


def all_debts() -> dict[SlotId, Any]:
    """Return what the modules in swaps of this thread held before all of these, by slot."""
    with _LOCK:
        claims = [ref() for ref in _CLAIMS]
    found: dict[SlotId, Any] = {}
    for claim in claims:
        if claim is not None and claim.thread == get_ident():
            found = {**claim.debts(), **found}
    return found


def release(claim: Claim) -> None:
    """Let go of the module, once it holds again what it held before."""
    if not is_compiling():
        with _LOCK:
            at = _index_of(claim)
            if at >= 0:  # else it was taken inside a compiled function
                del _CLAIMS[at]


def _index_of(claim: Claim) -> int:
    at = len(_CLAIMS) - 1
    while at >= 0 and _CLAIMS[at]() is not claim:
        at -= 1
    return at


def hand_over(claim: Claim, others: list[Claim]) -> tuple[dict[SlotId, Any], dict[Tensor, Tensor]]:
    """Make others that began later and go on give back, at their end, what this one found.

    Returns:
        What this block left, by slot and by tensor, where one of ``others`` goes on.
        ``claim.saved`` keeps only the other tensors.
    """
    debts = claim.debts()
    left: dict[SlotId, Any] = {}
    values: dict[Tensor, Tensor] = {}
    for other in others:
        theirs = other.debts()
        shared = (debts.keys() & theirs.keys()) - left.keys()
        left.update({slot: theirs[slot] for slot in shared})
        mine = [theirs[slot] for slot in shared]
        values.update({t: other.saved[t] for t in mine if t in other.saved})
        other.redirect({slot: debts[slot] for slot in shared})
        for tensor in [tensor for tensor in claim.saved if tensor in other.saved]:
            values[tensor] = other.saved[tensor]
            other.saved[tensor] = claim.saved.pop(tensor)
            if tensor in claim._memories:
                other._memories[tensor] = claim._memories.pop(tensor)
    emptied = {slot for slot, value in debts.items() if value is None} - left.keys()
    for other in others:
        other.expect(emptied)
    return left, values


def _meet(one: Claim, other: Claim) -> bool:
    """Return whether two swaps are of one module, of a part that has tensors, or of one tensor."""
    return (
        one.root is other.root
        or not one.saved.keys().isdisjoint(other.saved)
        or not _holders(one.root).isdisjoint(_holders(other.root))
    )


def _holders(root: nn.Module) -> set[nn.Module]:
    return {module for module in root.modules() if module._parameters or module._buffers}


def _thread_name(ident: int) -> str | None:
    """Return the name of a thread that is alive."""
    names = [thread.name for thread in threading.enumerate() if thread.ident == ident]
    return names[0] if names else None


def _place(tensor: Tensor) -> Any:
    """Return what is the same of two tensors if they are one memory, seen in the same way."""
    strided = tensor.layout is torch.strided and not is_transformed(tensor)
    place = (tensor.data_ptr(), tensor.stride()) if strided and not tensor.is_meta else None
    return tensor.dtype, tensor.device, tensor.layout, tensor.shape, place


def _move_back(tensor: Tensor, memory: Tensor, requires_grad: bool) -> None:
    """Bring a tensor back to its memory and its flag."""
    if _place(tensor) != _place(memory):
        tensor.data = memory
    if tensor.is_leaf and tensor.requires_grad is not requires_grad:
        tensor.requires_grad_(requires_grad)


def _forget_casts() -> None:
    """Drop what autocast made of weights in lower precision: they are overwritten."""
    if not is_compiling() and torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()
