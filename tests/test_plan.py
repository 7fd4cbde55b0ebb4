"""Where in a module the leaves of a tree go, and what is said of those that have no place."""

import pytest
import torch
from torch import nn
from zoo import Sparse, blank, chain, exact, same

from tdnn import MissingKeyError, SwapError, TensorDict

# -- names that do not fit ---------------------------------------------------------------------


def test_all_unknown_names_are_listed_with_hints_and_nothing_is_swapped():
    net = chain()
    before = exact(net)
    params = blank(net)
    params["0", "weigth"] = torch.zeros(4, 4)
    params["2", "bais"] = torch.zeros(2)
    params["extra"] = {"weight": torch.zeros(1)}
    wanted = (
        r"cannot swap into Sequential: unknown \('0', 'weigth'\) \(did you mean 'weight'\?\); "
        r"unknown \('2', 'bais'\) \(did you mean 'bias'\?\); unknown 'extra'"
    )
    for options in ({}, {"inplace": True}, {"return_swap": False}):
        with pytest.raises(MissingKeyError, match=wanted):
            params.to_module(net, **options)
    assert same(before, exact(net))


def test_the_error_names_what_a_linear_module_maps():
    with pytest.raises(
        MissingKeyError,
        match=r"cannot swap into Linear\(4→2\): unknown 'weigth' \(did you mean 'wei",
    ):
        TensorDict({"weigth": torch.zeros(2, 4)}).to_module(nn.Linear(4, 2))


def test_a_branch_for_a_tensor_and_a_leaf_for_a_module_are_refused_together():
    net = chain()
    before = exact(net)
    params = TensorDict({"0": {"weight": {"x": torch.zeros(1)}}, "2": torch.zeros(1)})
    with pytest.raises(
        MissingKeyError,
        match=r"\('0', 'weight'\) is a tensor there, and a branch here; "
        "'2' is a module there, and a leaf here",
    ):
        params.to_module(net)
    only = TensorDict({"0": {"weight": {"x": torch.zeros(1)}}})
    with pytest.raises(MissingKeyError, match="is a tensor there, and a branch here"):
        only.to_module(net)
    with pytest.raises((MissingKeyError, ValueError), match="tensor there, and a branch here"):
        only.to_module(net, inplace=True)
    assert same(before, exact(net))


def test_a_branch_for_a_child_that_is_none_is_unknown():
    net = Sparse()
    net.register_module("gone", None)
    with pytest.raises(MissingKeyError, match="unknown 'gone'"):
        TensorDict({"gone": {"weight": torch.zeros(1)}}).to_module(net)


def test_an_attribute_that_is_no_slot_is_unknown():
    net = nn.Linear(4, 2)
    net.scale = torch.ones(1)
    with pytest.raises(MissingKeyError, match="unknown 'scale'"):
        TensorDict({"scale": torch.zeros(1)}).to_module(net)


def test_empty_branches_ask_for_nothing():
    net = chain()
    with TensorDict({"1": {}, "nowhere": {}, "2": {"bias": torch.ones(2)}}).to_module(net):
        assert net[2].bias.tolist() == [1, 1]


@pytest.mark.parametrize("value", [None, 3, TensorDict({}), lambda x: x], ids=repr)
def test_only_a_module_can_be_swapped_into(value):
    for call in (TensorDict().to_module, TensorDict.from_module):
        with pytest.raises(TypeError, match=r"a torch\.nn\.Module was expected, not "):
            call(value)


def test_a_leftover_batch_dim_is_refused():
    nets = [nn.Linear(2, 2) for _ in range(3)]
    stacked = TensorDict.from_modules(*nets)
    before = exact(nets[0])
    with pytest.raises(
        SwapError,
        match=r"batch size \(3,\), but a module takes one set of weights: index it "
        r"\(params\[0\].to_module\(net\)\) or map over it with torch.vmap",
    ):
        stacked.to_module(nets[0])
    assert same(before, exact(nets[0]))
    with stacked[1].to_module(nets[0]):
        assert torch.equal(nets[0].weight, nets[1].weight)


def test_a_leftover_batch_dim_of_a_branch_is_refused():
    net = chain()
    stacked = TensorDict.from_modules(net[0], net[0])
    before = exact(net)
    with pytest.raises(SwapError, match=r"'0' has batch size \(2,\), but a module takes one set"):
        TensorDict({"0": stacked}).to_module(net)
    assert same(before, exact(net))


def test_a_module_that_is_a_tree_takes_leaves_with_its_batch_dims():
    stacked = TensorDict.from_modules(nn.Linear(2, 2), nn.Linear(2, 2), as_module=True, lock=False)
    net = nn.Sequential(nn.Linear(2, 2), stacked)
    before, zeros = exact(net), stacked.data.clone().zero_()
    assert zeros.batch_size == (2,)
    with zeros.to_module(stacked):
        assert not stacked["weight"].any()
    with TensorDict({"1": zeros}).to_module(net):
        assert stacked["weight"] is zeros["weight"]
    assert same(before, exact(net))


# -- part of a module --------------------------------------------------------------------------


def test_slots_without_a_leaf_keep_what_they_hold():
    net = chain()
    own = net[0].weight
    with TensorDict({"2": {"weight": torch.zeros(2, 4)}}).to_module(net):
        assert net[0].weight is own
        assert not net[2].weight.any()


def test_a_slot_that_holds_none_can_take_a_leaf():
    net = nn.Linear(2, 2, bias=False)
    before = exact(net)
    with TensorDict({"bias": torch.ones(2)}).to_module(net):
        assert (net(torch.zeros(2)) == 1).all()
    assert same(before, exact(net))
    assert net.bias is None


def test_the_order_of_the_trees_keys_does_not_matter():
    net = nn.Linear(2, 3)
    before = exact(net)
    with TensorDict({"bias": torch.ones(3), "weight": torch.zeros(3, 2)}).to_module(net):
        assert [name for name, _ in net.named_parameters()] == ["weight", "bias"]
    assert same(before, exact(net))
