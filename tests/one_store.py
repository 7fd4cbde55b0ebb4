"""A tree that is a module: what both must show."""

import torch
from torch import nn

from tdnn import TensorDict, TensorDictParams


def registered(params):
    """What the module shows, by name; a tie under each of its names."""
    return {
        **dict(params.named_parameters(remove_duplicate=False)),
        **dict(params.named_buffers(remove_duplicate=False)),
    }


def shown(params):
    """What the tree shows, by name."""
    return {
        ".".join(key) if isinstance(key, tuple) else key: leaf
        for key, leaf in params.items(True, True)
    }


def assert_one(params):
    """The tree and the module show the same objects, and so does every branch."""
    assert type(params) is TensorDictParams
    mine, theirs = shown(params), registered(params)
    assert mine.keys() == theirs.keys()
    assert all(mine[name] is tensor for name, tensor in theirs.items())
    assert params.state_dict().keys() == mine.keys()
    assert all(type(branch) is TensorDictParams for branch in params.modules())
    for key, branch in params.items():
        assert params[key] is branch is params.get(key)
    assert all(leaf.is_leaf for leaf in mine.values())


def sample():
    """Parameters, buffers of several dtypes, branches, and keys that are names of attributes."""
    tied = nn.Parameter(torch.randn(3))
    return TensorDictParams(
        TensorDict(
            {
                "weight": nn.Parameter(torch.randn(2, 3)),
                "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
                "0": {"data": tied, "training": torch.randn(3), "keys": {"shape": tied}},
                "stat": nn.Buffer(torch.randn(3)),
                "step": torch.tensor(3),
                "mask": torch.tensor([True, False]),
                "wave": torch.randn(2, dtype=torch.complex64),
                "small": torch.randn(2, dtype=torch.bfloat16),
            }
        )
    )
