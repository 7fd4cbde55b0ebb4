"""The trees and nets that the benchmarks share.

Leaves and nets are as small as torch allows, so that its work counts little. Trees are nested
dicts, which the twins in plain torch use as they are:

- ``small``: three leaves, one of them in a branch, like a batch of data;
- ``flat``: eight leaves without branches;
- ``deep``: 16 levels with two leaves on each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIZE = (4, 6)
Tree = dict[str, Any]
Path = tuple[str, ...]
Found = list[tuple[Path, Any]]


def leaf(*size: int) -> Tensor:
    return torch.ones(*size or SIZE, 2)


def small(*size: int) -> Tree:
    return {"a": leaf(*size), "b": leaf(*size), "c": {"d": leaf(*size)}}


def flat() -> Tree:
    return {f"a{i}": leaf() for i in range(8)}


def deep(levels: int = 16) -> Tree:
    below = {"next": deep(levels - 1)} if levels > 1 else {}
    return {"x": leaf(), "y": leaf(), **below}


BOTTOM = ("next",) * 15  # the path to the last branch of the deep tree


def walk(tree: Tree, path: Path = (), found: Found | None = None) -> Found:
    """Return each path and what it leads to, a branch before what it holds."""
    found = [] if found is None else found
    for key, value in tree.items():
        found.append(((*path, key), value))
        if type(value) is dict:
            walk(value, (*path, key), found)
    return found


def leaves(tree: Tree, path: Path = (), found: Found | None = None) -> Found:
    """Return each path to a leaf, and the leaf."""
    found = [] if found is None else found
    for key, value in tree.items():
        if type(value) is dict:
            leaves(value, (*path, key), found)
        else:
            found.append(((*path, key), value))
    return found


def mapped(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return a dict of the same form with ``fn`` of each leaf."""
    return {
        key: mapped(fn, value) if type(value) is dict else fn(value) for key, value in tree.items()
    }


def reached(tree: Tree, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def joined(tree: Tree) -> dict[str, Tensor]:
    """Return the leaves by name, as ``flatten_keys`` does."""
    return {".".join(path): value for path, value in leaves(tree)}


def bare_swap(net: nn.Module, weights: dict[str, Tensor], call: Callable[[], Any]) -> Any:
    """Return a work that calls with other parameters, put into the modules' dicts by a loop.

    This is the least that a swap can cost: nothing is checked, and an error is not undone.
    """
    modules = dict(net.named_modules())
    slots = []
    for name, new in weights.items():
        owner, _, last = name.rpartition(".")
        slots.append((modules[owner]._parameters, last, new))

    def work() -> Any:
        undo = []
        for slot, name, new in slots:
            undo.append((slot, name, slot[name]))
            slot[name] = new
        result = call()
        for slot, name, old in reversed(undo):
            slot[name] = old
        return result

    return work


def idle(x: Tensor) -> Tensor:
    """Do none of the user's work."""
    return x


class IdleTransformer(nn.Transformer):
    """The 184 parameters of ``nn.Transformer()``; a call does nothing with them."""

    def __init__(self) -> None:
        super().__init__(batch_first=True)  # the same modules, and torch has nothing to warn about

    def forward(self, x: Tensor) -> Tensor:
        return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def state(net: nn.Module) -> dict[str, Tensor]:
    """Return what ``torch.func.functional_call`` takes."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}
