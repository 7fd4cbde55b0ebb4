"""Batch dims: counting them, indexing them, and writing a result into a given tree.

An index is brought into *parts*: an ellipsis becomes the slices that it stands for, a list becomes
a tensor. :func:`outline` then says what batch size comes out, without touching a leaf.
"""

import operator
from array import array
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdnn._core import Names, TensorDictBase
from tdnn._writes import write

__all__ = [
    "Part",
    "Tree",
    "basic_outline",
    "batch_dim",
    "deliver",
    "index_parts",
    "is_mask",
    "outline",
    "row_positions",
    "sliced",
    "with_rows",
]

# One part of an index: int, slice, None, bool, or a tensor of positions or of truth values.
Part: TypeAlias = Any
Tree = TypeVar("Tree", bound=TensorDictBase)

_lift = torch.ops.aten.lift_fresh.default
_MASKS = (torch.bool, torch.uint8)  # torch reads uint8 as truth values
_POSITIONS = (torch.int64, torch.int32)


def basic_outline(index: tuple[Any, ...], size: torch.Size) -> torch.Size | None:
    """Return the batch size that ints, slices and Nones give; None if :func:`outline` is needed."""
    out: list[int] = []
    dim, depth = 0, len(size)
    for part in index:
        kind = type(part)
        if kind is slice and dim < depth:
            out.append(sliced(part, size[dim]))
            dim += 1
        elif kind is int and dim < depth and -size[dim] <= part < size[dim]:
            dim += 1
        elif part is None:
            out.append(1)
        else:
            return None
    left = size[dim:]
    return torch.Size((*out, *left)) if out else left


def with_rows(size: torch.Size, n: int) -> torch.Size:
    """Return a batch size with ``n`` for its first dim."""
    dims = list(size)  # a torch.Size takes three times as long to cut as a list to write to
    dims[0] = n
    return torch.Size(dims)


def row_positions(
    index: list[int] | range, size: torch.Size, device: torch.device | None
) -> Tensor | None:
    """Return the positions that a list or range gives along the first dim, none below 0.

    None means that it is no list of ints, and needs :func:`index_parts`.
    """
    if not index or not size or (type(index) is list and set(map(type, index)) != {int}):
        return None
    low, high = (min(index), max(index)) if type(index) is list else sorted((index[0], index[-1]))
    if not -size[0] <= low <= high < size[0]:
        wrong = low if low < -size[0] else high
        raise IndexError(f"index {wrong} is out of range for dim 0 of batch size {tuple(size)}")
    if is_compiling():
        found = torch.tensor(list(index))
    else:
        # Hot (test_getitem[list]): half the time of torch.tensor, which goes by the kind of each
        # int. Like that, it tells modes such as FakeTensorMode of the new tensor.
        found = _lift(torch.frombuffer(array("q", index), dtype=torch.int64))
    if device is not None:
        found = found.to(device)
    return found % size[0] if low < 0 else found


def index_parts(index: Any, node: TensorDictBase) -> list[Part]:
    """Return the parts of an index, each int, slice, None, bool or tensor, without ellipsis."""
    parts: list[Part] = []
    used, gap = 0, -1
    for part in index if isinstance(index, tuple) else (index,):
        kind = type(part)
        if kind is int or kind is slice:
            used += 1
        elif part is Ellipsis:
            if gap >= 0:
                raise IndexError("an index can have one ellipsis ('...'), not two")
            gap = len(parts)
            continue
        elif part is not None:
            part = _part(part, node._device)
            used += part.ndim if is_mask(part) else not isinstance(part, bool)
        parts.append(part)
    size = node._batch_size
    if used > len(size):
        raise IndexError(
            f"too many indices: {used} for batch size {tuple(size)}; "
            "to index the leaves' further dims use td.apply(lambda leaf: leaf[...])"
        )
    if gap >= 0:
        parts[gap:gap] = [slice(None)] * (len(size) - used)
    return parts


def _part(part: Any, device: torch.device | None) -> Part:
    """Return a part that is not an int, slice, None or ellipsis as an int, a bool or a tensor."""
    if isinstance(part, bool):
        return part
    if isinstance(part, Tensor):
        if part.dtype not in _MASKS and part.dtype not in _POSITIONS:
            raise IndexError(f"an index tensor is int64, int32 or bool, not {part.dtype}")
        return part
    if isinstance(part, range):
        stop = part.stop if len(part) else part.start  # torch refuses a stop on the wrong side
        return torch.arange(part.start, stop, part.step, device=device)
    if isinstance(part, list | tuple) or hasattr(part, "__array__"):
        try:
            found = torch.tensor(part, device=device)
        except (TypeError, ValueError, RuntimeError) as err:
            raise IndexError(f"cannot make index positions of {part!r}: {err}") from None
        if found.dtype is torch.int64:
            return found
        listed = isinstance(part, list | tuple)
        if not found.numel() if listed else not found.is_floating_point():
            # An empty list makes a float tensor; an array may have ints of any width.
            found = found if found.dtype in _MASKS else found.to(torch.int64)
        return _part(found, device)
    if hasattr(part, "__index__"):
        return operator.index(part)
    raise IndexError(
        f"a tree is indexed with ints, slices, tensors, lists, masks, '...' and None, "
        f"not {type(part).__name__}"
    )


def is_mask(part: Part) -> bool:
    return isinstance(part, Tensor) and part.dtype in _MASKS


def outline(
    parts: list[Part], size: torch.Size, names: Names
) -> tuple[tuple[Part, ...], torch.Size, Names]:
    """Return what to index leaves with, the batch size that this gives, and its names.

    As in torch, ints take their dim away first. The tensors among the parts then broadcast, and
    their joint dims stand where the first of them stood if they are neighbours, else in front.
    """
    if names is None and len(parts) == 1:  # the most common index by far: benchmark test_getitem
        only = parts[0]
        if isinstance(only, Tensor) and only.dtype is torch.int64 and only.ndim:
            return (only,), torch.Size((*only.shape, *size[1:])), None
    place: list[Part] = []
    dims: list[tuple[int, str | None]] = []  # what the basic parts leave
    at: list[int] = []  # for each tensor of positions, how many of ``dims`` and tensors precede it
    shapes: list[torch.Size] = []
    single: str | None = None
    dim = 0
    for part in parts:
        name = names[dim] if names and dim < len(size) else None
        if part is None:
            dims.append((1, None))
        elif type(part) is slice:
            dims.append((sliced(part, size[dim]), name))
            dim += 1
        elif type(part) is int:
            if not -size[dim] <= part < size[dim]:
                raise IndexError(
                    f"index {part} is out of range for dim {dim} of batch size {tuple(size)}"
                )
            dim += 1
        elif isinstance(part, Tensor) and part.ndim == 0 and part.dtype not in _MASKS:
            dim += 1
        else:
            found = _positions(part, size, dim)
            place += found or [part]
            single = name if found else None
            shapes.append(found[0].shape if found else torch.Size((int(bool(part)),)))
            wide = len(found) or 1
            at += range(len(dims) + len(at), len(dims) + len(at) + wide)
            dim += len(found)
            continue
        place.append(part)
    dims += [(n, names[i] if names else None) for i, n in enumerate(size[dim:], start=dim)]
    if shapes:
        shape = shapes[0] if len(shapes) == 1 else _joint(shapes)
        front = at[0] if at[-1] - at[0] + 1 == len(at) else 0
        keeps = len(at) == 1 and len(shape) == 1
        dims[front:front] = [(n, single if keeps else None) for n in shape]
    out = torch.Size([n for n, _ in dims])
    return tuple(place), out, (tuple([name for _, name in dims]) or None) if names else None


def _positions(part: Part, size: torch.Size, dim: int) -> list[Tensor]:
    """Return a tensor of positions for each dim that a part stands for; none for a lone truth."""
    if not is_mask(part):
        return [part] if isinstance(part, Tensor) else []
    if part.ndim == 0:
        return []
    if part.shape != size[dim : dim + part.ndim]:
        raise IndexError(
            f"a mask of shape {tuple(part.shape)} at dim {dim} does not fit batch size "
            f"{tuple(size)}"
        )
    # Looking the true places up here does it once for all leaves.
    return list(part.nonzero(as_tuple=True))


def _joint(shapes: list[torch.Size]) -> torch.Size:
    try:
        return cast(torch.Size, torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # torch's own lack
    except RuntimeError:
        shown = [tuple(shape) for shape in shapes]
        raise IndexError(f"index tensors of shapes {shown} do not broadcast") from None


def sliced(part: slice, n: int) -> int:
    """Return the number of rows that a slice takes of ``n``."""
    # By arithmetic, and not by slice.indices(), which would compile anew for each n.
    start: int | None
    stop: int | None
    step: int | None
    start, stop, step = part.start, part.stop, part.step
    if start is None:
        start = 0
    elif start < 0:
        start = max(start + n, 0)
    if stop is None or stop > n:
        stop = n
    elif stop < 0:
        stop += n
    rows = max(stop - start, 0)
    if step is None:
        return rows
    if step <= 0:
        raise ValueError(f"a slice needs a step of at least 1, not {step}; use td.flip")
    return -(-rows // step)


def batch_dim(dim: int, size: torch.Size) -> int:
    """Return a batch dim counted from the front."""
    depth = len(size)
    if not -depth <= dim < depth:
        raise IndexError(f"dim {dim} is out of range for batch size {tuple(size)}")
    return dim % depth


def deliver(result: Tree, out: Any) -> Tree:
    """Return a result, or write it into the tensors of ``out``, after checking, and return that."""
    if out is None:
        return result
    given: Tree = out
    if given._batch_size != result._batch_size:
        raise RuntimeError(
            f"out has batch size {tuple(given._batch_size)}, the result {tuple(result._batch_size)}"
        )
    write(given._copies("out", given, result))
    return given
