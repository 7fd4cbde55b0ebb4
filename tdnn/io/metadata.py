"""The structure of a tree as plain JSON: what a file says besides the tensors themselves.

The tree is a list of rows, depth first and in the order of the keys, so that a deep tree needs no
nesting. The row of a node is ``[depth, key, {"batch_size": [3], "names": ["time"]}]``, with
``"device"`` and ``"names"`` only where the node has them; the row of a leaf is
``[depth, key, "name of its tensor"]``. The first row is the root's, at depth 0. A tie is two
leaves with one tensor.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdnn._core import TensorDictBase
from tdnn._keys import Path, as_key, listing
from tdnn.errors import FileFormatError

__all__ = ["Row", "brief", "describe", "grow", "misfits"]

Row: TypeAlias = list[Any]


def describe(tree: TensorDictBase, tensors: Iterable[str]) -> list[Row]:
    """Return the rows of ``tree``.

    Args:
        tree: any tree of tensors.
        tensors: the name of the tensor for each leaf, depth first.

    Example:
        >>> describe(TensorDict({"a": {"b": 1}}), ["a.b"])
        [[0, '', {'batch_size': []}], [1, 'a', {'batch_size': []}], [2, 'b', 'a.b']]
    """
    rows: list[Row] = []
    _describe(tree, 0, "", iter(tensors), rows)
    return rows


def _describe(
    node: TensorDictBase, depth: int, key: str, tensors: Iterator[str], rows: list[Row]
) -> None:
    about: dict[str, Any] = {"batch_size": list(node._batch_size)}
    if node._names is not None:
        about["names"] = list(node._names)
    if node._device is not None:
        about["device"] = str(node._device)
    rows.append([depth, key, about])
    for below, value in node._data.items():
        if isinstance(value, TensorDictBase):
            _describe(value, depth + 1, below, tensors, rows)
        else:
            rows.append([depth + 1, below, next(tensors)])


def misfits(tree: TensorDictBase, prefix: Path = ()) -> list[str]:
    """Return what a file cannot hold: leaves that do not begin with the batch size of their node,
    and keys that JSON changes.

    Example:
        >>> misfits(TensorDict({"a": torch.ones(3)}, [3]))
        []
    """
    size = tree._batch_size
    found: list[str] = []
    for key, value in tree._data.items():
        path = (*prefix, key)
        if not key.isascii() and json.loads(json.dumps(key)) != key:
            found.append(f"{as_key(path)!r} has the two halves of a character, which JSON joins")
        if isinstance(value, TensorDictBase):
            found += misfits(value, path)
        elif isinstance(value, Tensor) and value.shape[: len(size)] != size:
            found.append(
                f"{as_key(path)!r} has shape {tuple(value.shape)} in batch size {tuple(size)}"
            )
    return found


def grow(
    rows: Any,
    tensors: Mapping[str, Tensor],
    kind: type[TensorDictBase],
    device: torch.device | None,
) -> TensorDictBase:
    """Return the tree that ``rows`` describe.

    Args:
        rows: as :func:`describe` returns them; nothing about them is trusted.
        tensors: by name; each must be used.
        kind: the class of the nodes.
        device: of every node. If None, a node that had a device gets the CPU.

    Raises:
        FileFormatError: the rows contradict themselves or the tensors.

    Example:
        >>> rows = [[0, "", {"batch_size": [3]}], [1, "a", "w"], [1, "b", "w"]]
        >>> tree = grow(rows, {"w": torch.ones(3)}, TensorDict, None)
        >>> tree["a"] is tree["b"], tree.batch_size
        (True, torch.Size([3]))
    """
    if not isinstance(rows, list) or not rows:
        raise FileFormatError("its tree has no rows")
    root, *rest = rows
    match root:
        case [0, "", dict(about)]:
            stack = [_node(kind, about, device, root)]
        case _:
            raise FileFormatError(f"its tree does not begin with a root, but with {brief(root)}")
    used = set()
    for row in rest:
        match row:
            case [int(depth), str(key), str() | dict() as what] if 1 <= depth <= len(stack):
                del stack[depth:]
            case _:
                raise FileFormatError(f"its tree has the malformed row {brief(row)}")
        home = stack[-1]
        if key in home._data:
            raise FileFormatError(f"its tree has the key {key!r} twice in one node")
        if isinstance(what, dict):
            below = _node(kind, what, device, row)
            home._data[key] = below
            stack.append(below)
        else:
            home._data[key] = _leaf(tensors, what, home._batch_size)
            used.add(what)
    if unused := tensors.keys() - used:
        raise FileFormatError(f"no leaf of its tree uses the tensors {listing(sorted(unused))}")
    return stack[0]


def _node(
    kind: type[TensorDictBase], about: dict[str, Any], device: torch.device | None, row: Row
) -> TensorDictBase:
    size, names = about.get("batch_size"), about.get("names")
    if not isinstance(size, list) or not all(type(n) is int and 0 <= n < 2**63 for n in size):
        raise FileFormatError(f"its tree has no batch size in the row {brief(row)}")
    if device is None and "device" in about:
        device = torch.device("cpu")
    node = kind({}, torch.Size(size), device)
    if names is not None:
        if not isinstance(names, list) or not all(n is None or type(n) is str for n in names):
            raise FileFormatError(f"its tree has wrong names of dims in the row {brief(row)}")
        try:
            node.names = names
        except ValueError as err:
            raise FileFormatError(f"its tree has a row with wrong names: {err}") from None
    return node


def _leaf(tensors: Mapping[str, Tensor], name: str, size: torch.Size) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise FileFormatError(f"its tree names the tensor {name!r}, which is not in the file")
    if tensor.shape[: len(size)] != size:
        raise FileFormatError(
            f"the tensor {name!r} of shape {tuple(tensor.shape)} does not begin with the batch "
            f"size {tuple(size)} of its node"
        )
    return tensor


def brief(found: object) -> str:
    """Return what was found as a message shows it: its ``repr``, cut when it is long.

    Example:
        >>> brief([1, "a"])
        "[1, 'a']"
    """
    text = repr(found)
    return text if len(text) <= 80 else f"{text[:77]}..."
