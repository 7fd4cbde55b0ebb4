"""Pictures of a tree: text for a terminal, a collapsible list for a notebook.

Both are drawn from the same lines, which are found in one walk: the header, then one line for
each leaf and each branch. Only attributes are read, never values, so a picture is cheap, waits for
no device, and works for tensors that have no values: meta, fake, uninitialised, or batched by
``vmap``.
"""

from collections.abc import Iterator
from html import escape
from itertools import islice
from reprlib import repr as short_repr
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tdnn._core import TensorDictBase
from tdnn._keys import Path

__all__ = ["Pictures"]

_MOST_TEXT = 200  # lines; beyond this, a count of what is left out
_MOST_HTML = 1000
_UNFOLDED = 40  # lines of a picture in a notebook that is shown with all branches open
_WIDEST = 60  # characters; what is longer pushes only its own line to the right


class _Line(NamedTuple):
    """What the picture says about one entry."""

    depth: int  # of the entry; the header has 0
    key: str
    cells: tuple[str, ...]  # shape, dtype and device of a tensor; other entries have none
    note: str
    holds: int = 0  # the number of entries of a branch


class Pictures(TensorDictBase):
    """``repr(td)``, and what a notebook shows."""

    __slots__ = ()

    def __repr__(self) -> str:
        lines, more = _drawn(self, _MOST_TEXT)
        text = [" ".join(filter(None, [lines[0].key, lines[0].note])), *_aligned(lines[1:])]
        return "\n".join([*text, f"  {_left_out(more)}"] if more else text)

    def _repr_html_(self) -> str:
        return _page(*_drawn(self, _MOST_HTML))


# -- what the lines say ----------------------------------------------------------------------


def _drawn(tree: TensorDictBase, most: int) -> tuple[list[_Line], int]:
    """Return the first lines of the picture, and how many entries they leave out."""
    title = f"{type(tree).__name__}({_title(tree, None)})"
    lines = [_Line(0, title, (), "" if tree._data else "empty", len(tree._data))]
    lines += islice(_below(tree, (), {}), most)
    return lines, 1 + _count(tree) - len(lines)


def _count(node: TensorDictBase) -> int:
    """Return the number of entries, branches included."""
    return len(node._data) + sum([_count(branch) for branch in node._branches()])


def _left_out(more: int) -> str:
    return f"... and {more} more {'entry' if more == 1 else 'entries'}"


def _below(node: TensorDictBase, above: Path, seen: dict[int, str]) -> Iterator[_Line]:
    """Yield the lines of a node's entries; ``seen`` has the first name of each tensor."""
    for key, value in node._data.items():
        path = (*above, key)
        depth, shown = len(path), _shown(key)
        if isinstance(value, TensorDictBase):
            note = _title(value, node)
            if type(value) is not type(node) and type(value) is not node._kind:
                note = f"{type(value).__name__}({note})" if note else type(value).__name__
            words = [note, "" if value._data else "empty"]
            yield _Line(depth, shown, (), " ".join(filter(None, words)), len(value._data))
            yield from _below(value, path, seen)
        elif isinstance(value, Tensor):
            name = ".".join(path)
            first = seen.setdefault(id(value), name)
            words = _marks(value) if first is name else [*_marks(value), f"= {first!r}"]
            yield _Line(depth, shown, _cells(value), " ".join(words))
        else:
            text = " ".join(short_repr(value).split())
            yield _Line(depth, shown, (), f"{type(value).__name__} {text}")


def _title(node: TensorDictBase, parent: TensorDictBase | None) -> str:
    """Return what a node declares: everything for the root, what differs for a branch."""
    parts = []
    if parent is None or node._batch_size != parent._batch_size:
        parts.append(f"batch_size={list(node._batch_size)}")
    if node._device != (None if parent is None else parent._device):
        parts.append(f"device={node._device}")
    known = [] if parent is None else parent.names
    if node.names != known + [None] * (len(node._batch_size) - len(known)):
        parts.append(f"names={node.names}")
    if node.is_locked is not (parent is not None and parent.is_locked):
        parts.append("locked" if node.is_locked else "unlocked")
    return ", ".join(parts)


def _cells(leaf: Tensor) -> tuple[str, ...]:
    return _shape(leaf), str(leaf.dtype).removeprefix("torch."), str(leaf.device)


def _shape(leaf: Tensor) -> str:
    try:
        sizes = [str(size) for size in leaf.shape]
    except RuntimeError:  # uninitialised parameters and strided nested tensors have none
        return "(?)"
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def _marks(leaf: Tensor) -> list[str]:
    """Return what is special about a leaf."""
    marks = [] if type(leaf) is Tensor else [type(leaf).__name__]
    if leaf.requires_grad is not isinstance(leaf, Parameter):
        marks.append("requires_grad" if leaf.requires_grad else "requires_grad=False")
    if leaf.layout is not torch.strided:
        marks.append(str(leaf.layout).removeprefix("torch."))
    return marks


def _shown(key: str) -> str:
    """Return the key as it is, or quoted if it could be misread."""
    return key if key and key.isprintable() and not set(key) & set(" :'\"") else repr(key)


# -- text ------------------------------------------------------------------------------------


def _aligned(lines: list[_Line]) -> list[str]:
    """Return the lines, indented by depth, the cells of tensors one below the other."""
    heads = ["  " * line.depth + line.key + ":" for line in lines]
    rows = [(head, *line.cells) for head, line in zip(heads, lines, strict=True) if line.cells]
    widths = _widths(rows)
    text = []
    for head, line in zip(heads, lines, strict=True):
        row = _padded((head, *line.cells), widths) if line.cells else head
        text.append(f"{row} {line.note}".rstrip())
    return text


def _widths(rows: list[tuple[str, ...]]) -> list[int]:
    return [min(max(map(len, column)), _WIDEST) for column in zip(*rows, strict=True)]


def _padded(row: tuple[str, ...], widths: list[int]) -> str:
    return " ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)])


# -- HTML: no script, no colours of its own, so that it fits light and dark themes -------------

_FRAME = (
    "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:13px;"
    "line-height:1.5;white-space:pre;overflow-x:auto;text-align:left"
)
_INSIDE = (
    "margin-left:0.6ch;padding-left:calc(1.4ch - 1px);border-left:1px solid rgba(128,128,128,0.4)"
)
_LEAF = "padding-left:1.8ch"  # below the name of a branch, not below its triangle
_DIM = "opacity:0.65"


def _page(lines: list[_Line], more: int) -> str:
    """Return the picture as nested ``<details>``; the branches of a long one begin closed."""
    widths = _widths([("  " * line.depth + line.key, *line.cells) for line in lines if line.cells])
    unfold = " open" if len(lines) <= _UNFOLDED else ""
    parts = [f'<div style="{_FRAME}">']
    depth = 0
    for line in lines:
        parts.append("</div></details>" * (depth - line.depth))
        depth = line.depth + bool(line.holds)
        parts.append(_branch(line, unfold) if line.holds else _leaf(line, widths))
    if more:
        parts.append(
            "</div></details>" * (depth - 1) + f'<div style="{_DIM}">{_left_out(more)}</div>'
        )
        depth = 1
    return "".join([*parts, "</div></details>" * depth, "</div>"])


def _branch(line: _Line, unfold: str) -> str:
    note, unfold = (f"({line.holds}) {line.note}".strip(), unfold) if line.depth else ("", " open")
    return (
        f'<details{unfold}><summary style="cursor:pointer"><b>{escape(line.key)}</b>'
        f'{_dimmed(note)}</summary><div style="{_INSIDE}">'
    )


def _leaf(line: _Line, widths: list[int]) -> str:
    """Return the row of an entry without anything below it: also of an empty branch."""
    key, cells = line.key, ""
    if line.cells:
        key = key.ljust(widths[0] - 2 * line.depth)
        cells = _dimmed(_padded(line.cells, widths[1:]))
    note = f" {escape(line.note)}" if line.note else ""
    return f'<div style="{_LEAF}">{escape(key)}{cells}{note}</div>'


def _dimmed(text: str) -> str:
    return f' <span style="{_DIM}">{escape(text)}</span>' if text else ""
