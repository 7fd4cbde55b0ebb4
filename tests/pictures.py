"""What a tree holds as plain data, and tensors whose every bit counts."""

import torch

from tdnn import TensorDict, TensorDictBase

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def raw(leaf):
    """The bytes of a tensor in row-major order: NaNs, too, must come back bit by bit."""
    return bytes(leaf.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def picture(tree):
    """Everything that a file keeps of a tree, as plain data that `==` compares."""
    ties = {}

    def node(tree):
        entries = [
            (key, node(value) if isinstance(value, TensorDictBase) else leaf(value))
            for key, value in tree.items()
        ]
        return tuple(tree.batch_size), tree.names, entries

    def leaf(value):
        tie = ties.setdefault(id(value), len(ties))
        return tie, value.dtype, tuple(value.shape), raw(value)

    return node(tree)


def noise(shape, dtype, seed=0):
    """A tensor of random bits, so that floats have NaNs and infinities among them."""
    count = dtype.itemsize * torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    source = torch.Generator().manual_seed(seed)
    bits = torch.randint(high, (count,), dtype=torch.uint8, generator=source)
    return bits.view(dtype).view(shape)


def round_trip(tree, path, **kwargs):
    assert tree.save(path) is tree
    return TensorDict.load(path, **kwargs)


def state(td):
    """Return all that a failed call must not change: nodes and leaves by identity, in order."""
    found = [id(td), td.batch_size, td.names]
    for key, value in td.items():
        found += [key, id(value), value._version if isinstance(value, torch.Tensor) else 0]
        if isinstance(value, TensorDict):
            found += state(value)
    return found
