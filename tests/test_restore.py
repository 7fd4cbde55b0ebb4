"""What a block did to the tensors of a module is undone, also where it changed more than values."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations, parametrize

from tdnn import SwapError, TensorDict, TensorDictParams
from tdnn.nn import EnsembleModule

COPYING = [{"inplace": True}, {"use_state_dict": True}]


def zeros_of(net):
    return TensorDict.from_module(net).data.clone().zero_()


@pytest.mark.parametrize("options", COPYING, ids=str)
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.half(),
        lambda net: net.double(),
        lambda net: net.requires_grad_(False),
        lambda net: setattr(net[0].weight, "data", torch.ones(2, 2)),
        lambda net: setattr(net[0].bias, "data", torch.ones(2)),
    ],
    ids=["half", "double", "frozen", "other weight", "other bias"],
)
def test_memory_dtype_and_flags_are_those_of_before(options, fails, change):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    flat = torch.arange(4.0)
    net[0].weight = nn.Parameter(flat.view(2, 2))
    before = [
        (p, p.data_ptr(), p.dtype, p.requires_grad, p.detach().clone()) for p in net.parameters()
    ]
    with contextlib.suppress(KeyError), zeros_of(net).to_module(net, **options):
        change(net)
        if fails:
            raise KeyError
    for now, (was, place, dtype, flag, value) in zip(net.parameters(), before, strict=True):
        assert now is was
        assert (now.data_ptr(), now.dtype, now.requires_grad) == (place, dtype, flag)
        assert torch.equal(now, value)
    assert flat.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", COPYING, ids=str)
def test_a_tensor_of_another_shape_keeps_no_other_from_its_value(options):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [p.detach().clone() for p in net.parameters()]

    def run():
        with zeros_of(net).to_module(net, **options):
            net[0].weight.data = torch.zeros(5, 5)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert all(map(torch.equal, net.parameters(), before))


def test_a_buffer_that_became_a_parameter_is_a_buffer_again():
    net = nn.BatchNorm1d(2)
    own, tree = net.running_mean, TensorDict.from_module(net).data.clone()
    names = [name for name, _ in net.named_buffers()]
    with contextlib.suppress(KeyError), tree.to_module(net):
        net.running_mean = nn.Parameter(torch.ones(2))
        raise KeyError
    assert net.running_mean is own
    assert [name for name, _ in net.named_buffers()] == names
    assert [name for name, _ in net.named_parameters()] == ["weight", "bias"]
    with tree.to_module(net):
        net.running_mean = nn.Parameter(torch.ones(2))
    assert net.running_mean is own
    assert tree["running_mean"].tolist() == [1, 1]


def test_a_parameter_that_was_registered_as_a_buffer_goes_into_the_tree():
    net = nn.Linear(2, 2)
    own, tree = net.weight, TensorDict.from_module(net).data.clone()
    wanted = tree["weight"] * 2
    with tree.to_module(net):
        weight = net.weight
        del net.weight
        net.register_buffer("weight", weight * 2)
    assert net.weight is own
    assert not net._buffers
    assert torch.equal(tree["weight"], wanted)


def test_cached_parametrizations_are_computed_anew_in_a_block_of_use_state_dict():
    net = parametrizations.weight_norm(nn.Linear(2, 2))
    x, zeros = torch.ones(1, 2), zeros_of(net)
    zeros["parametrizations", "weight", "original1"].fill_(1)
    own = net(x)
    with parametrize.cached():
        net(x)
        with zeros.to_module(net, use_state_dict=True):
            assert not net(x).any()
        assert torch.equal(net(x), own)


def test_a_locked_tree_that_is_a_module_can_be_written_in_place():
    params = TensorDictParams({"a": torch.ones(2)}, lock=True)
    tree = TensorDict({"a": torch.zeros(2)})
    with tree.to_module(params, inplace=True), torch.no_grad():
        params["a"].add_(5)
    assert tree["a"].tolist() == [5, 5]
    assert params["a"].tolist() == [1, 1]


@pytest.mark.parametrize("options", [{}, {"inplace": True}], ids=str)
def test_a_scripted_module_is_refused_with_the_way_that_works(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        scripted = torch.jit.script(nn.Linear(2, 2))
    tree = TensorDict.from_module(nn.Linear(2, 2)).data
    with pytest.raises(SwapError, match="cannot be exchanged, only overwritten; use to_module"):
        tree.to_module(scripted, **options)


def test_use_state_dict_needs_a_module_with_memory():
    tree = TensorDict.from_module(nn.Linear(2, 2)).data
    with pytest.raises(ValueError, match=r"\['weight', 'bias'\] are on the meta device there"):
        tree.to_module(nn.Linear(2, 2, device="meta"), use_state_dict=True)
    with pytest.raises(SwapError, match=r"LazyLinear.* is not initialised"):
        tree.to_module(nn.LazyLinear(2), use_state_dict=True)


@pytest.mark.parametrize("target", ["params_td", ""])
def test_a_swap_into_an_ensemble_compiles_once(target):
    members = EnsembleModule(nn.Linear(3, 2), 4)
    module = members.get_submodule(target)
    x, tree = torch.randn(5, 3), TensorDict.from_module(module).data * 2

    def run(tree, x):
        with tree.to_module(module):
            return members(x)

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for _ in range(3):
        torch.testing.assert_close(compiled(tree, x), run(tree, x))
    assert counter.frame_count == 1
