"""A tree as one safetensors file, which any reader of that format opens.

The format (https://github.com/huggingface/safetensors): 8 bytes for the length of the header,
little-endian; the header, JSON that maps names to dtype, shape and place; the data, without gaps.
Under ``__metadata__``, a map of strings, this file keeps two:

- ``tdnn``: JSON with ``version``; ``tree``, the rows of :mod:`tdnn.io.metadata`; ``crc32`` of the
  bytes of each tensor; and ``dtypes``, for tensors of a dtype that the format does not have.
- ``tdnn.sha256``: the digest of everything behind it in the header. It stands first, at a fixed
  place, so that no byte of the header can change unnoticed.

The format is read and written here rather than by the ``safetensors`` package, because the digest
is over the raw header, leaves that are not contiguous or not on the CPU are copied one at a time,
and names that stand twice are refused. Tensors are made over a map of the file, nothing else is
ever constructed from it.
"""

import ctypes
import errno
import hashlib
import json
import mmap
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tdnn._core import TensorDictBase
from tdnn._declared import Device, as_device
from tdnn._keys import Path, as_key, listing
from tdnn.errors import FileFormatError
from tdnn.io.metadata import brief, describe, grow, misfits

__all__ = ["Disk"]

PathLike: TypeAlias = str | os.PathLike[str]

_VERSION = 1
_HEAD = b'{"__metadata__":{"tdnn.sha256":"'
_DIGEST = 64  # hex digits of a SHA-256
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
_CHUNK = 1 << 22  # bytes that are copied at a time while writing
_SMALL = 1 << 26  # bytes; a file up to this size is checked in some 20 ms

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# What the format does not have is stored as what it is made of, with the dims that this adds.
_PARTS: dict[torch.dtype, tuple[str, list[int]]] = {
    torch.complex128: ("F64", [2]),
    torch.complex32: ("F16", [2]),
    torch.float4_e2m1fn_x2: ("U8", []),
}
_PARTED = {str(dtype).removeprefix("torch."): dtype for dtype in _PARTS}


class Disk(TensorDictBase):
    """Saving a tree to a file and loading it."""

    __slots__ = ()

    def save(self, prefix: PathLike) -> Self:
        """Write the tree to one safetensors file and return the tree itself.

        Any reader of safetensors opens the file: it finds each leaf under its path joined by
        dots (with ``#2`` and so on behind it where two leaves would have one name). Keys, their
        order, batch sizes, names of dims, empty branches and ties are kept in the header. A tie
        is stored once, under the first of its names.

        What a file does not keep: strides (leaves come back contiguous), a lock, gradients and
        ``requires_grad``, the class of ``nn.Parameter``, memory that two leaves share only in
        part. This is as for a ``state_dict``: a swap or a copy into the module's own parameters
        needs none of it.

        The data goes to a new file beside the old one, which then takes its place at once: an
        error leaves the old file as it was, and trees that were loaded from it stay valid. Leaves
        that are not contiguous, or not on the CPU, are copied one at a time.

        Args:
            prefix: the path of the file, which is replaced if it exists. Its directory must exist.

        Raises:
            ValueError: some leaves cannot come back from a file (on the meta device, sparse,
                nested, quantized, uninitialised, without memory of their own); all are listed.
            OSError: the file cannot be written there.

        Example:
            >>> params = TensorDict.from_module(nn.Linear(4, 2)).save("p.safetensors")
            >>> sorted(TensorDict.load("p.safetensors").keys())
            ['bias', 'weight']
        """
        path = os.fsdecode(prefix)
        tensors, names = _tensors(self, path)
        _write(path, tensors, {"version": _VERSION, "tree": describe(self, names)})
        return self

    @classmethod
    def load(
        cls,
        prefix: PathLike,
        device: Device | None = None,
        non_blocking: bool = False,
        *,
        verify: bool | None = None,
    ) -> Self:
        """Return the tree in a safetensors file, unlocked, its leaves mapped and not copied.

        A leaf's bytes are read from the disk when they are first used. The map is private: writing
        to a leaf changes memory, never the file. A file that another program wrote comes back flat,
        with its names as keys; ``unflatten_keys(".")`` makes branches of them.

        The header is checked in full: it must be what ``save`` wrote, byte by byte, and describe
        the whole file. Nothing in the file is ever unpickled or run.

        Args:
            prefix: the path of the file.
            device: to move every leaf to, which reads it. If None, leaves are on the CPU, and a
                node that had a device has the CPU as its device.
            non_blocking: for the copies to ``device``.
            verify: whether to read the data as well and compare its checksums. If None, this is
                done for files up to 64 MiB, where it costs milliseconds. Files of other programs
                have no checksums.

        Raises:
            FileFormatError: the file was cut or altered, or is not a safetensors file.
            OSError: there is no such file, it is a directory, or it cannot be read.

        Example:
            >>> td = TensorDict({"a": {"b": torch.ones(3)}}, [3]).save("t.safetensors")
            >>> TensorDict.load("t.safetensors")["a", "b"]
            tensor([1., 1., 1.])
        """
        path = os.fsdecode(prefix)
        place = None if device is None else as_device(device)
        try:
            tensors, about = _read(path, verify)
            if place is not None:
                tensors = {
                    name: tensor.to(place, non_blocking=non_blocking)
                    for name, tensor in tensors.items()
                }
            rows = _flat(tensors) if about is None else about.get("tree")
            tree = grow(rows, tensors, cls._kind, place)
        except FileFormatError as err:
            raise FileFormatError(f"cannot load {path!r}: {err}") from None
        except RecursionError:
            raise FileFormatError(f"cannot load {path!r}: its header is nested too deep") from None
        return tree if isinstance(tree, cls) else cls(cast(Any, tree))


# -- from leaves to named tensors ----------------------------------------------------------------


def _tensors(tree: TensorDictBase, path: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors to store by name, and for each leaf, depth first, the name of its tensor.

    Raises:
        ValueError: some leaves cannot be stored.
    """
    leaves = tree._leaves()
    faults = [f"{as_key(at)!r} {why}" for at, leaf in leaves if (why := _fault(leaf))]
    faults = faults or misfits(tree)
    if faults:
        raise ValueError(
            f"cannot save {path!r}, because these leaves would not come back: {'; '.join(faults)}"
        )
    first: dict[Any, int] = {}
    tied = [first.setdefault(_memory(leaf), index) for index, (_, leaf) in enumerate(leaves)]
    names = _names({index: leaves[index][0] for index in first.values()})
    return {names[i]: leaves[i][1] for i in first.values()}, [names[i] for i in tied]


def _fault(leaf: Any) -> str | None:
    """Return why ``leaf`` cannot be stored, or None."""
    if not isinstance(leaf, Tensor):
        return f"is a {type(leaf).__name__}, not a tensor"
    if is_lazy(leaf):
        return "is uninitialised (run the module once first)"
    if leaf.is_nested or leaf.layout is not torch.strided:
        return f"is nested or sparse ({leaf.layout}; store its parts)"
    if leaf.device.type == "meta":
        return "is on the meta device, without values"
    if leaf.dtype not in _CODES and leaf.dtype not in _PARTS:
        return f"is of {leaf.dtype}, which the format cannot hold"
    if type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(leaf).__name__} (store the plain tensors in it)"
    try:
        leaf.data_ptr()
    except RuntimeError:
        return "has no values now (a transform such as vmap or grad traces it)"
    reach = sum([(n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True)])
    needed = (leaf.storage_offset() + reach + 1) * leaf.dtype.itemsize
    if leaf.numel() and leaf.untyped_storage().nbytes() < needed:
        return "has a storage that was freed or made shorter than the tensor"
    return None


def _memory(leaf: Tensor) -> Any:
    """Return what is equal for two leaves that are one tensor, or wholly share their memory."""
    if leaf.numel() == 0:
        return id(leaf)
    flags = (leaf.dtype, leaf.is_conj(), leaf.is_neg())
    return (leaf.device, leaf.data_ptr(), leaf.shape, leaf.stride(), flags)


def _names(paths: dict[int, Path]) -> dict[int, str]:
    """Return a name for each path: joined by dots, and numbered where that is taken."""
    # A lone surrogate is a str that UTF-8, and so the header, cannot hold.
    plain = {
        index: ".".join(path).encode("utf-8", "backslashreplace").decode()
        for index, path in paths.items()
    }
    wanted = set(plain.values())
    taken = {"__metadata__"}
    names: dict[int, str] = {}
    for index, name in plain.items():
        chosen, number = name, 1
        while chosen in taken or (number > 1 and chosen in wanted):
            number += 1
            chosen = f"{name}#{number}"
        taken.add(chosen)
        names[index] = chosen
    return names


# -- writing -------------------------------------------------------------------------------------


def _write(path: str, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write the file: a blank header, the data, and then the header with the checksums."""
    # Wide dtypes first: every tensor is then aligned, without gaps.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    entries: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    end = 0
    for name in order:
        leaf = tensors[name]
        code, further = _PARTS.get(leaf.dtype) or (_CODES[leaf.dtype], [])
        begin, end = end, end + leaf.numel() * leaf.dtype.itemsize
        shape = [*leaf.shape, *further]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        if leaf.dtype in _PARTS:
            dtypes[name] = str(leaf.dtype).removeprefix("torch.")
    sums = dict.fromkeys(order, "0" * 8)
    about = {**about, "dtypes": dtypes, "crc32": sums}
    header = _header(entries, about)
    if len(header) > _LONGEST_HEADER:
        raise ValueError(
            f"cannot save {path!r}: the header of {len(tensors)} tensors has {len(header)} bytes, "
            f"and the format allows {_LONGEST_HEADER}; save the branches in files of their own"
        )
    with _replacing(path) as file:
        file.seek(8 + len(header))
        for name in order:
            data, owner = _bytes(tensors[name])
            sum_so_far = 0
            for begin in range(0, len(data), _CHUNK):
                # A copy, so that the checksum is of what is written though others write meanwhile.
                chunk = bytes(data[begin : begin + _CHUNK])
                file.write(chunk)
                sum_so_far = zlib.crc32(chunk, sum_so_far)
            sums[name] = f"{sum_so_far:08x}"
            del data, owner
        file.seek(0)
        file.write(len(header).to_bytes(8, "little") + _header(entries, about))


def _header(entries: dict[str, Any], about: dict[str, Any]) -> bytes:
    """Return the header, padded so that the data begins at a multiple of 64 bytes."""
    metadata = {"tdnn.sha256": "", "tdnn": json.dumps(about, separators=(",", ":")), "format": "pt"}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":"))
    rest = text.encode()[len(_HEAD) :]
    rest += b" " * (-(8 + len(_HEAD) + _DIGEST + len(rest)) % 64)
    return _HEAD + hashlib.sha256(rest).hexdigest().encode() + rest


def _bytes(leaf: Tensor) -> tuple[memoryview, Tensor]:
    """Return the bytes of ``leaf`` in row-major order, and the tensor that must outlive them."""
    owner = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if owner.numel() == 0:
        return memoryview(b""), owner
    count = owner.numel() * owner.dtype.itemsize
    return memoryview((ctypes.c_char * count).from_address(owner.data_ptr())).cast("B"), owner


@contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` when the block succeeds."""
    target = os.path.realpath(path)  # a link stays a link, to the new file
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "there is no directory to save into", folder)
    mode = None
    if os.path.exists(target):
        mode = _regular(target, "save() writes one file")
    # Created like any file, so that the umask decides who may read it.
    temporary = os.path.join(folder, f".tdnn-{os.urandom(8).hex()}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(temporary, flags, 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        if mode is not None:
            os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _regular(path: str, what: str) -> int:
    """Return the mode of a regular file; anything else is an error."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, f"{what}, and this is a directory", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{what}, and this is a device or a pipe", path)
    return mode


# -- reading -------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a tensor is in the file, in bytes, and what it is there."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: list[int]


def _read(path: str, verify: bool | None) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return the tensors over a map of the file, and what ``save`` wrote about them, if it did."""
    _regular(path, "load() reads one file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _read_header(file, size)
        metadata, entries = _parse_header(header)
        about = _parse_about(header, metadata)
        dtypes = {} if about is None else _strings(about.get("dtypes"), "dtypes")
        places = {
            name: _place(name, entry, dtypes.get(name), 8 + len(header))
            for name, entry in entries.items()
        }
        _refuse_gaps(places, 8 + len(header), size)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if about is not None:
        sums = _strings(about.get("crc32"), "crc32")
        if sums.keys() != places.keys() or not dtypes.keys() <= places.keys():
            raise FileFormatError("its metadata and its tensors have different names")
        if verify or (verify is None and size <= _SMALL):
            _verify(data, places, sums)
    return {name: _tensor(data, name, place) for name, place in places.items()}, about


_ZIP = b"PK\x03\x04"


def _read_header(file: BinaryIO, size: int) -> bytes:
    if size < 8:
        raise FileFormatError(f"it has {size} bytes, too few for a safetensors file")
    start = file.read(8)
    if start.startswith(_ZIP):
        raise FileFormatError(
            "it is a zip archive, as torch.save writes one: read it with torch.load; a state dict "
            "becomes a tree by TensorDict(state).unflatten_keys('.')"
        )
    length = int.from_bytes(start, "little")
    if length > _LONGEST_HEADER:
        raise FileFormatError(
            f"it begins like a header of {length} bytes, and the format allows "
            f"{_LONGEST_HEADER}: it was altered or is not a safetensors file"
        )
    header = file.read(length)
    if len(header) < length:
        raise FileFormatError(
            f"it was cut: it has {len(header)} of the {length} bytes of its header"
        )
    return header


def _parse_header(header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the metadata and the entries of the tensors."""
    entries = _parse_json(header, "header")
    metadata = entries.pop("__metadata__", None)
    return {} if metadata is None else _strings(metadata, "__metadata__"), entries


def _parse_about(header: bytes, metadata: dict[str, str]) -> dict[str, Any] | None:
    """Return what ``save`` wrote about the tree, None if another program wrote the file."""
    if "tdnn" not in metadata and "tdnn.sha256" not in metadata:
        return None
    rest = header[len(_HEAD) + _DIGEST :]
    if header != _HEAD + hashlib.sha256(rest).hexdigest().encode() + rest:
        raise FileFormatError(
            "its header was altered after save() wrote it; safetensors.torch.load_file may still "
            "read its tensors"
        )
    about = _parse_json(metadata.get("tdnn", ""), "metadata")
    if about.get("version") != _VERSION:
        raise FileFormatError(
            f"it has version {about.get('version')!r} of tdnn's metadata, and this tdnn reads "
            f"{_VERSION}; a newer tdnn may read it"
        )
    return about


def _parse_json(text: bytes | str, what: str) -> dict[str, Any]:
    try:
        text = text if isinstance(text, str) else text.decode()
        parsed = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except FileFormatError:
        raise
    except ValueError as err:
        raise FileFormatError(
            f"its {what} is not JSON ({err}): it was altered or is not a safetensors file"
        ) from None
    if not isinstance(parsed, dict):
        raise FileFormatError(f"its {what} is a JSON {type(parsed).__name__}, not an object")
    return cast(dict[str, Any], parsed)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise FileFormatError(f"its header has the names {listing(twice)} more than once")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _strings(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(type(item) is str for item in value.values()):
        raise FileFormatError(f"its {what!r} is not a map of strings")
    return cast(dict[str, str], value)


def _place(name: str, entry: Any, parted: str | None, start: int) -> _Place:
    """Return the place of one tensor, after checking all that can be checked of it alone."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise FileFormatError(f"the entry of {name!r} has no dtype, shape and data_offsets")
    if parted is None:
        dtype = _DTYPES.get(code)
        if code == "F4" and shape and type(shape[-1]) is int and shape[-1] % 2 == 0:
            # The format counts numbers, of which torch keeps two in a byte.
            dtype, shape = torch.float4_e2m1fn_x2, [*shape[:-1], shape[-1] // 2]
        if dtype is None:
            raise FileFormatError(f"{name!r} has the unknown dtype {code!r}")
    else:
        dtype, shape = _whole(name, parted, code, shape)
    count = dtype.itemsize
    for n in shape:
        if type(n) is not int or not 0 <= n < 2**63 or count * n >= 2**63:
            raise FileFormatError(f"{name!r} has the impossible shape {brief(shape)}")
        count *= n
    if not 0 <= begin <= end or end - begin != count:
        raise FileFormatError(
            f"{name!r} of shape {brief(shape)} and {dtype} needs {count} bytes and is said to be "
            f"at {begin} to {end}"
        )
    return _Place(start + begin, start + end, dtype, shape)


def _whole(name: str, parted: str, code: str, shape: list[Any]) -> tuple[torch.dtype, list[Any]]:
    """Return dtype and shape of a tensor that is stored as the parts of its numbers."""
    dtype = _PARTED.get(parted)
    if dtype is not None:
        want, further = _PARTS[dtype]
        cut = len(shape) - len(further)
        if code == want and shape[cut:] == further:
            return dtype, shape[:cut]
    raise FileFormatError(
        f"{name!r} is said to be {parted}, stored as {code} of shape {brief(shape)}"
    )


def _refuse_gaps(places: dict[str, _Place], start: int, size: int) -> None:
    """Raise unless the tensors follow one another from the header to the end of the file."""
    at = start
    for name, place in sorted(places.items(), key=lambda item: item[1][:2]):
        if place.begin != at:
            kind = "overlaps another tensor" if place.begin < at else "comes after a gap"
            raise FileFormatError(f"{name!r} {kind}: the header was altered")
        at = place.end
    if at > size:
        raise FileFormatError(f"it was cut: it has {size} of its {at} bytes")
    if at < size:
        raise FileFormatError(f"it has {size - at} bytes more than its header describes")


def _verify(data: mmap.mmap, places: dict[str, _Place], sums: dict[str, str]) -> None:
    view = memoryview(data)
    wrong = [
        name
        for name, place in places.items()
        if f"{zlib.crc32(view[place.begin : place.end]):08x}" != sums[name]
    ]
    if wrong:
        raise FileFormatError(f"the data of {listing(wrong)} changed after save() wrote it")


def _tensor(data: mmap.mmap, name: str, place: _Place) -> Tensor:
    """Return a tensor over its part of the map, which lives as long as any such tensor."""
    begin, end, dtype, shape = place
    try:
        if begin == end:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if begin % dtype.itemsize:  # only in files of other programs, which need not align
            raw = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin)
            return raw.clone().view(dtype).view(shape)
        count = (end - begin) // dtype.itemsize
        return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).view(shape)
    except RuntimeError as err:
        raise FileFormatError(
            f"torch cannot make {name!r} of shape {brief(shape)}: {err}"
        ) from None


def _flat(tensors: dict[str, Tensor]) -> list[list[Any]]:
    """Return the rows of a tree that has the names as its keys."""
    return [[0, "", {"batch_size": []}], *[[1, name, name] for name in tensors]]
