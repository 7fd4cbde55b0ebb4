"""Random indices over the batch dims of random trees."""

import torch
from hypothesis import strategies as st
from strategies import sizes, trees

from tdnn import TensorDict

CHUNK = st.none() | st.integers(-5, 5)
MASK = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])


def make():
    """Return a tree of the batch size that :data:`MASK` has."""
    return TensorDict(
        {"a": torch.arange(24.0).reshape(3, 4, 2), "b": {"c": torch.arange(12).reshape(3, 4)}},
        [3, 4],
    )


@st.composite
def indices(draw, size):
    """An index that fits a batch size; tensors in it broadcast."""
    length = draw(st.integers(1, 3))
    masked = False
    parts, dim = [], 0
    while dim < len(size):
        n = size[dim]
        kinds = ["slice", "slice", "none", "stop"]
        kinds += ["int", "positions", "list", "range", "zero_dim"] if n else []
        kinds += [] if masked else ["mask", "wide_mask"]
        kind = draw(st.sampled_from(kinds))
        at = st.integers(-n, n - 1)
        if kind == "stop":
            break
        if kind == "none":
            parts.append(None)
            if len(parts) > 5:
                break
            continue
        if kind == "slice":
            parts.append(slice(draw(CHUNK), draw(CHUNK), draw(st.none() | st.integers(1, 3))))
        elif kind == "int":
            parts.append(draw(at))
        elif kind == "zero_dim":
            parts.append(torch.tensor(draw(at)))
        elif kind in ("list", "range", "positions"):
            count = 1 if masked else draw(st.sampled_from([1, length]))
            parts.append(draw(some_positions(kind, at, count, n)))
        else:
            wide = 2 if kind == "wide_mask" and dim + 1 < len(size) else 1
            shape = size[dim : dim + wide]
            bits = draw(
                st.lists(st.booleans(), min_size=shape_size(shape), max_size=shape_size(shape))
            )
            parts.append(torch.tensor(bits, dtype=torch.bool).reshape(shape))
            # Whatever the number of true places, a single position broadcasts with it.
            masked, length = True, 1
            parts = [one_position(part, size) for part in parts]
            dim += wide - 1
        dim += 1
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(parts)))
        used = sum(consumed(part) for part in parts[cut:])
        if used == 0 or dim == len(size):
            parts.insert(cut, ...)
    if len(parts) == 1 and draw(st.booleans()):
        return parts[0]
    return tuple(parts)


@st.composite
def some_positions(draw, kind, at, count, n):
    if kind == "range":
        return range(min(count, n)) if min(count, n) == count else [0] * count
    found = draw(st.lists(at, min_size=count, max_size=count))
    if kind == "list":
        return found
    tensor = torch.tensor(found, dtype=draw(st.sampled_from([torch.int64, torch.int32])))
    return tensor.unsqueeze(0) if draw(st.booleans()) else tensor


def one_position(part, size):
    if isinstance(part, list | range):
        return list(part)[:1]
    if isinstance(part, torch.Tensor) and part.dtype is not torch.bool and part.ndim:
        return part[..., :1]
    return part


def consumed(part):
    if part is None or part is ...:
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1


def shape_size(shape):
    return torch.Size(shape).numel()


@st.composite
def trees_and_indices(draw, **kwargs):
    size = draw(sizes())
    td = draw(trees(batch_size=size, names=draw(st.booleans()), **kwargs))
    return td, draw(indices(size))
