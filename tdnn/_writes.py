"""Writing many leaves in place: what torch allows, and one value for a tensor under two names.

Each way to do it comes through here before it writes the first leaf.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdnn._keys import NestedKey, listing
from tdnn._node import itself

__all__ = [
    "Write",
    "alike",
    "as_before",
    "first_rows",
    "is_writable",
    "put_at",
    "refuse_meta",
    "refuse_unwritable",
    "same_value",
    "write",
]

Write: TypeAlias = tuple[Tensor, Tensor, NestedKey]  # a leaf, what to copy into it, and its key


def write(writes: list[Write], non_blocking: bool = False) -> None:
    """Copy each value into its leaf, once for each tensor.

    A value that is itself one of the leaves is read as it was before.

    Raises:
        RuntimeError: torch forbids to write into a leaf; all are listed.
        ValueError: two values for one tensor differ, or a value is on the meta device.
    """
    refuse_unwritable([(leaf, key) for leaf, _, key in writes])
    if len(writes) > 1:
        # Hot (test_update__nested): a set of ids takes two thirds of the time of one of tensors.
        tag: Callable[[Any], Any] = itself if is_compiling() else id
        targets = {tag(leaf) for leaf, _, _ in writes}
        if len(targets) < len(writes):
            leaves, values, keys = zip(*writes, strict=True)
            writes = [writes[at] for at in first_rows(leaves, [values], keys.__getitem__)]
        if not targets.isdisjoint([tag(value) for _, value, _ in writes]):
            leaves, values, keys = zip(*writes, strict=True)
            writes = list(zip(leaves, as_before(leaves, values), keys, strict=True))
        refuse_meta(writes)
    for leaf, value, _ in writes:
        try:
            leaf.copy_(value, non_blocking=non_blocking)
        except RuntimeError:
            if is_compiling() or not _overlap(leaf, value):
                raise
            leaf.copy_(value.clone())


def refuse_meta(writes: Iterable[Write]) -> None:
    """Raise if a value is on the meta device and its leaf is not, so that none would arrive."""
    without = [key for leaf, value, key in writes if value.is_meta and not leaf.is_meta]
    if without:
        raise ValueError(
            f"cannot write the values for {listing(without)}: they are on the meta device, which "
            "has none; nothing was written"
        )


def refuse_unwritable(leaves: Iterable[tuple[Tensor, NestedKey]]) -> None:
    """Raise if torch forbids to write into a leaf; all are listed, each with its key."""
    faults: dict[str, list[NestedKey]] = {}
    for leaf, key in leaves:
        why = obstacle(leaf)
        if why is not None:
            faults.setdefault(why, []).append(key)
    if faults:
        texts = [f"{listing(keys)}: {why}" for why, keys in faults.items()]
        raise RuntimeError(f"cannot write in place into {'; '.join(texts)}")


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors may share memory, which torch refuses to copy within."""
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def put_at(leaf: Tensor, place: Any, value: Any) -> None:
    """Write a value at an index; cast, and copied before if it shares memory with the leaf."""
    if not isinstance(value, Tensor):
        leaf[place] = value
    elif is_compiling():
        leaf[place] = value.to(leaf)
    else:
        try:
            leaf[place] = value
        except RuntimeError:  # torch casts for slices only, and copies within no memory
            is_alike = (value.dtype, value.device) == (leaf.dtype, leaf.device)
            if is_alike and not _overlap(leaf, value):
                raise
            leaf[place] = value.to(leaf, copy=True)


def as_before(leaves: Sequence[Tensor], values: Sequence[Any]) -> list[Any]:
    """Return the values, with a copy of each that is another one of the leaves.

    So they are read as they were before the first leaf is written. Tensors that share memory
    without being one are not looked for.
    """
    tag: Callable[[Any], Any] = itself if is_compiling() else id
    targets = {*map(tag, leaves)}
    if targets.isdisjoint(map(tag, values)):  # Hot (test_setitem_dim)
        return values if type(values) is list else list(values)
    return [
        value.clone() if value is not leaf and tag(value) in targets else value
        for leaf, value in zip(leaves, values, strict=True)
    ]


def first_rows(
    leaves: Sequence[Tensor],
    columns: Sequence[Sequence[Tensor]],
    key_at: Callable[[int], NestedKey],
) -> list[int]:
    """Return where each tensor first stands among ``leaves``.

    Args:
        leaves: tensors to be written, some of them several times.
        columns: for each leaf, what is written to it or takes part in that.
        key_at: the key of a leaf, for the error.

    Raises:
        ValueError: in one of the columns, two values for one tensor differ; all are listed.
    """
    first: dict[Tensor, int] = {}
    pairs = []
    for at, leaf in enumerate(leaves):
        before = first.setdefault(leaf, at)
        if not all([same_value(column[before], column[at]) for column in columns]):
            pairs.append(f"{key_at(before)!r} and {key_at(at)!r}")
    if pairs:
        raise ValueError(
            "cannot write in place, because there are two different values for one tensor: "
            f"{', '.join(pairs)}; nothing was written"
        )
    return list(first.values())


def same_value(one: Tensor, two: Tensor) -> bool:
    """Return whether two values would leave the same in a tensor that they broadcast to."""
    if one is two or one.is_meta or two.is_meta:  # there are no values to compare
        return True
    return bool(alike(one, two.to(one.device)).all())


def alike(one: Tensor, two: Tensor) -> Tensor:
    """Return where two tensors have the same elements; NaN is like NaN."""
    if one.is_meta:  # there are no elements
        return torch.ones(one.shape, dtype=torch.bool)
    if one.layout is not torch.strided:
        one, two = one.to_dense(), two.to_dense()
    return (one == two) | ((one != one) & (two != two))


def obstacle(target: Tensor) -> str | None:
    """Return what keeps torch from writing into a tensor in place, or None."""
    guarded = target.requires_grad and torch.is_grad_enabled()
    if guarded and (target.is_leaf or (target._is_view() and _is_fixed(target))):
        return "requires_grad is set; use torch.no_grad(), or write into td.data"
    if not is_writable(target):
        return "it was made in inference mode; clone() it first"
    if target.layout is not torch.strided:  # which has no strides
        return None
    # Most are contiguous, and then their strides need no look.
    if not target.is_contiguous() and any(
        [not step and n > 1 for n, step in zip(target.shape, target.stride(), strict=True)]
    ):
        return "elements share memory (expand); clone() it first"
    return None


def is_writable(target: Tensor) -> bool:
    """Return whether the mode that a tensor was made in lets one write into it now."""
    # Dynamo of torch 2.14 cannot trace the question.
    return is_compiling() or not target.is_inference() or torch.is_inference_mode_enabled()


def _is_fixed(view: Tensor) -> bool:
    """Return whether autograd forbids to write into a view that requires grad."""
    base, maker = view._base, view.grad_fn
    is_of_leaf = base is not None and base.is_leaf and base.requires_grad
    return is_of_leaf or (maker is not None and maker.name().startswith(("Split", "Unbind")))
