"""Names of a branch's further dims, which the tree above does not have, in every operation."""

import pytest
import torch

from tdnn import TensorDict

OPERATIONS = {
    "row": lambda td: td[0],
    "last row": lambda td: td[-1],
    "0-dim index": lambda td: td[torch.tensor(0)],
    "ellipsis": lambda td: td[..., 0],
    "slice": lambda td: td[:1],
    "list": lambda td: td[[0]],
    "mask": lambda td: td[torch.tensor([True, False])],
    "new dim": lambda td: td[None],
    "iteration": lambda td: next(iter(td)),
    "unbind": lambda td: td.unbind(0)[0],
    "split": lambda td: td.split(1)[0],
    "chunk": lambda td: td.chunk(2)[1],
    "reshape": lambda td: td.reshape(1, 2),
    "view": lambda td: td.view(1, 2),
    "squeeze": lambda td: td[:1].squeeze(),
    "unsqueeze": lambda td: td.unsqueeze(-1),
    "flatten": lambda td: td.unsqueeze(0).flatten(0, 1),
    "unflatten": lambda td: td.unflatten(0, (1, 2)),
    "transpose": lambda td: td.unsqueeze(0).transpose(0, 1),
    "permute": lambda td: td.permute(0),
    "expand": lambda td: td.expand(4, 2),
    "repeat": lambda td: td.repeat(2),
    "repeat_interleave": lambda td: td.repeat_interleave(2, 0),
    "flip": lambda td: td.flip(0),
    "roll": lambda td: td.roll(1, 0),
    "sum": lambda td: td.sum(0),
    "mean": lambda td: td.mean(0),
    "all": lambda td: td.all(0),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "gather": lambda td: td.gather(0, torch.zeros(1, dtype=torch.int64)),
    "where": lambda td: td.where(torch.tensor([True, False]), 0),
    "clone": lambda td: td.clone(),
    "cast": lambda td: td.to(torch.float64),
    "arithmetic": lambda td: td + 1,
    "vmap": lambda td: torch.vmap(lambda row: row * 2)(td),
}


@pytest.mark.parametrize("names", [["x"], None])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_branch_keeps_the_names_of_its_further_dims(operation, names):
    inner = TensorDict({"e": torch.zeros(2, 3)}, [2, 3], names=["x", "y"])
    branch = TensorDict({"c": torch.zeros(2, 3), "d": inner}, [2, 3], names=["x", "y"])
    result = operation(TensorDict({"a": torch.zeros(2), "b": branch}, [2], names=names))
    above = result.names
    for node in (result["b"], result["b", "d"]):
        assert node.names[-1] == "y"
        assert len(node.names) == len(node.batch_size) == len(above) + 1
        node.permute(*reversed(range(len(node.batch_size))))  # which reads the names
