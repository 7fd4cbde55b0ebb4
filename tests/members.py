"""Ensembles of small modules, and the separate nets that they stand for."""

import copy

import torch
from torch import nn
from zoo import DTYPE

from tdnn.nn import TensorDictModule

COPIES = 3


def draw(module):
    """Set all weights, whatever the module."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        for module_ in module.modules():
            if "cached" in module_.__dict__:
                module_.weight = module_.weight


def nets_of(ensemble, net):
    """Separate nets that hold the weights of the members."""
    nets = []
    for n in range(ensemble.num_copies):
        nets.append(copy.deepcopy(net))
        weights = ensemble.params_td[n]
        weights = weights.apply(lambda leaf: leaf.detach().clone())
        weights.to_module(nets[-1], inplace=True)
        nets[-1].train(net.training)
    return nets


def wrapped(net):
    return TensorDictModule(net, in_keys=["x"], out_keys=["y"])


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(DTYPE)


def batch_normed():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).to(DTYPE)


class Rebinding(nn.Module):
    """Its buffers are rebound, filled when they are None, and dropped."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("sum", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        y = x * self.weight
        self.sum = self.sum + y.detach().sum()
        self.last = y.detach() if self.last is None else self.last + y.detach()
        return y
