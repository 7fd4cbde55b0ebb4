"""How cost grows with the number of leaves: flat lines per leaf mean linear growth."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import nn

from benchmarks.timing import Work, measure, middle

SIZES = (10, 100, 1_000, 10_000, 100_000)
_BRANCH = 10  # leaves in a branch


def grow(lib: ModuleType, sizes: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """Return the seconds per leaf of each operation, for trees of each size."""
    grown = {}
    for size in sizes:
        times = measure(_works(lib, size), rounds)
        grown[size] = {name: middle(each) / size for name, each in times.items()}
    return grown


def _works(lib: ModuleType, size: int) -> dict[str, Work]:
    tree = {
        f"layer{i}": {f"w{j}": torch.ones(1) for j in range(_BRANCH)}
        for i in range(size // _BRANCH)
    }
    td, net = lib.TensorDict(tree), _net(size)
    params = lib.TensorDict.from_module(_net(size))

    def swap() -> None:
        with params.to_module(net):
            pass

    return {"flatten_keys": lambda: td.flatten_keys("."), "swap": swap, "clone": td.clone}


def _net(size: int) -> nn.Module:
    net = nn.Module()
    for i in range(size // _BRANCH):
        layer = nn.Module()
        for j in range(_BRANCH):
            layer.register_parameter(f"w{j}", nn.Parameter(torch.ones(1)))
        net.add_module(f"layer{i}", layer)
    return net
