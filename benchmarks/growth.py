"""How cost grows with the number of leaves: the same cost per leaf means linear growth.

The twin in plain torch tells our growth from that of the machine, whose caches hold the small
trees and not the large ones.
"""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TypeAlias

import torch
from torch import nn

from benchmarks.cases import OURS, PLAIN
from benchmarks.samples import bare_swap, joined, mapped, state
from benchmarks.timing import Work, measure, middle

SIZES = (10, 100, 1_000, 10_000, 100_000)
Growth: TypeAlias = dict[int, dict[str, dict[str, float]]]  # size, operation, library: seconds
_BRANCH = 10  # leaves in a branch


def grow(lib: ModuleType, sizes: Sequence[int], rounds: int) -> Growth:
    """Return the seconds per leaf of each operation on each library, for trees of each size."""
    grown: Growth = {}
    for size in sizes:
        grown[size] = {}
        for name, works in _works(lib, size).items():
            times = measure(works, rounds)
            grown[size][name] = {which: middle(each) / size for which, each in times.items()}
    return grown


def _works(lib: ModuleType, size: int) -> dict[str, dict[str, Work]]:
    """Return the operations, each with its twin in plain torch."""
    tree = {
        f"layer{i}": {f"w{j}": torch.ones(1) for j in range(_BRANCH)}
        for i in range(size // _BRANCH)
    }
    td, net, other = lib.TensorDict(tree), _net(size), _net(size)
    params = lib.TensorDict.from_module(other)

    def swap() -> None:
        with params.to_module(net):
            pass

    def no_call() -> None:
        return None

    return {
        "flatten_keys": {OURS: partial(td.flatten_keys, "."), PLAIN: partial(joined, tree)},
        "swap": {OURS: swap, PLAIN: bare_swap(net, state(other), no_call)},
        "clone": {OURS: td.clone, PLAIN: partial(mapped, torch.clone, tree)},
    }


def _net(size: int) -> nn.Module:
    net = nn.Module()
    for i in range(size // _BRANCH):
        layer = nn.Module()
        for j in range(_BRANCH):
            layer.register_parameter(f"w{j}", nn.Parameter(torch.ones(1)))
        net.add_module(f"layer{i}", layer)
    return net
