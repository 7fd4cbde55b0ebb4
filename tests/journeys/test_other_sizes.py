"""What was traced for one batch size serves the others: torch.compile and torch.export."""

import io

import pytest
import torch
from strategies import flat
from torch import nn
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict
from tdnn.nn import EnsembleModule, TensorDictModule, TensorDictSequential

NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
PARAMS = TensorDict.from_module(NET).data
MODULE = TensorDictModule(NET, ["a"], ["y"])
CHAIN = TensorDictSequential(
    MODULE, TensorDictModule(lambda y, c: y.sum(-1) + c.sum(-1), ["y", ("b", "c")], [("o", "z")])
)
MEMBERS = EnsembleModule(MODULE, 3)


def tree(n):
    return TensorDict({"a": torch.randn(n, 3), "b": {"c": torch.randn(n, 3)}}, [n])


def energy(td):
    return td["a"].sum() + td["b", "c"].pow(2).sum()


def swapped(td):
    with PARAMS.to_module(NET):
        return NET(td["a"])


def renamed(td):
    td = td.clone()
    with td.flatten_keys(".") as flat:
        flat.rename_key_("b.c", "b.d")
        flat["q"] = flat["a"] * 2
    return td


def written(td):
    td = td.clone()
    td[:-1] = td[1:].clone()
    td[0] = 0
    return td


OPERATIONS = {
    "slice": lambda td: td[1:],
    "last rows": lambda td: td[-2:],
    "steps": lambda td: td[::2],
    "row": lambda td: td[0],
    "list": lambda td: td[[0, 2]],
    "write": written,
    "split": lambda td: td.split(1000),
    "chunk": lambda td: td.chunk(2),
    "reshape": lambda td: td.reshape(-1, 1).flatten(),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "arithmetic": lambda td: (td + 1) * td,
    "vmap": lambda td: torch.vmap(lambda row: row * 2)(td),
    "vmap to a new tree": lambda td: torch.vmap(lambda row: TensorDict({"s": energy(row)}))(td),
    "vmap of grad": torch.vmap(torch.func.grad(energy)),
    "grad": torch.func.grad(energy),
    "swap": swapped,
    "lens": renamed,
    "module": lambda td: MODULE(td.clone()),
    "chain": lambda td: CHAIN(td.clone()),
    "ensemble": MEMBERS,
}


def same(one, two):
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, TensorDict):
        leaves = zip(flat(one).values(), flat(two).values(), strict=True)
        return one.batch_size == two.batch_size and all(torch.allclose(*pair) for pair in leaves)
    return torch.allclose(one, two)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_batch_size_after_the_second_compiles_anew(name, dynamic):
    torch.compiler.reset()
    counter = CompileCounter()
    operation = OPERATIONS[name]
    compiled = torch.compile(operation, backend=counter, fullgraph=True, dynamic=dynamic)
    for n in (5, 6, 7, 9):
        td = tree(n)
        assert same(compiled(td), operation(td))
    assert counter.frame_count <= (1 if dynamic else 2)


class Program(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation, self.net = operation, NET

    def forward(self, td):
        return self.operation(td)


EXPORTED = {
    "leaf": lambda td: NET(td["a"]),
    "tree": lambda td: td * 2,
    "new tree": lambda td: TensorDict({"y": {"z": NET(td["a"])}, "e": {}}, td.batch_size),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "cat": lambda td: torch.cat([td, td]),
    "vmap": lambda td: torch.vmap(lambda row: row * 2)(td),
    "chain": lambda td: CHAIN(td.clone()),
}


@pytest.mark.parametrize("way", ["list", "collection"])
@pytest.mark.parametrize("name", EXPORTED)
def test_a_program_exported_with_a_free_batch_dim_takes_trees_of_any_size(name, way):
    td, operation = tree(5), EXPORTED[name]
    free = torch.export.Dim("rows", min=2, max=100)
    if way == "list":
        shapes = ([{0: free}, {0: free}],)  # one for each leaf of the tree, depth first
    else:
        shapes = torch.export.ShapesCollection()
        for leaf in td.values(True, True):
            shapes[leaf] = [free, None]
    program = torch.export.export(Program(operation), (td,), dynamic_shapes=shapes)
    for n in (5, 9):
        assert same(program.module()(tree(n) * 0 + n), operation(tree(n) * 0 + n))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with torch.serialization.safe_globals([TensorDict]):
        again = torch.export.load(file).module()
    td = tree(7)
    assert same(again(td), operation(td))


def test_a_strict_export_gives_trees():
    td = tree(5)
    program = torch.export.export(Program(lambda td: td * 2), (td,), strict=True)
    assert same(program.module()(td), td * 2)
