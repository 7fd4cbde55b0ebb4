"""Swaps without a block: what the module held, the way back, and weights that stay."""

import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from zoo import Counter, blank, chain, exact, rebind, same, slots, warmed

from tdnn import SwapError, TensorDict, TensorDictParams

# -- what a module held --------------------------------------------------------------------------


def test_a_branch_under_two_names_is_there_twice_in_what_the_module_held():
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    branch = blank(net)["a"]
    old = TensorDict({"a": branch, "b": branch}).to_module(net)
    assert net["a"].weight.data_ptr() == net["b"].weight.data_ptr()
    assert old["a", "weight"] is not old["b", "weight"]
    old.to_module(net)
    assert net["a"].weight is old["a", "weight"]
    assert net["b"].weight is old["b", "weight"]


@pytest.mark.parametrize("as_module", [False, True])
def test_what_a_module_held_is_there_though_the_tree_lost_its_branch(as_module):
    net = chain()
    own = slots(net)
    params = TensorDictParams(blank(net)) if as_module else blank(net)
    old = params.to_module(net)
    del params["0"]
    assert all(old[path] is value for path, value in own.items() if value is not None)
    assert list(old.keys(True, True)) == list(TensorDict.from_module(chain()).keys(True, True))


def test_two_values_for_slots_that_share_an_entry_are_refused():
    net = nn.ModuleDict({"a": Counter(rebind), "b": Counter(rebind)})
    before = exact(net)
    branch = TensorDict({"calls": torch.zeros(())})
    tree = TensorDict({"a": branch, "b": branch})
    swap = tree.to_module(net)
    swap.__enter__()
    net["a"](1)
    net["b"](1)
    with pytest.raises(SwapError, match=r"two values to slots that share the entry .*'calls'\) of"):
        swap.__exit__(None, None, None)
    assert same(before, exact(net))
    assert branch["calls"] == 0


def exchange_branches(tree):
    tree["0"], tree["2"] = tree["2"], tree["0"]


EDITS = {
    "branches exchanged": exchange_branches,
    "branch renamed": lambda tree: tree.rename_key_("0", "stem"),
    "leaf renamed": lambda tree: tree.rename_key_(("0", "weight"), ("0", "heavy")),
    "flattened": lambda tree: tree.flatten_keys(".", inplace=True),
    "emptied": lambda tree: tree.clear(),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("as_module", [False, True])
def test_what_a_module_held_does_not_follow_later_edits_of_the_tree(edit, is_known, as_module):
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    before, own = exact(net), slots(net)
    params = TensorDict.from_module(net).data.clone()
    params = TensorDictParams(params) if as_module else params
    if is_known:
        warmed(params.to_module(net))
    old = params.to_module(net)
    edit(params)
    assert all(old[path] is value for path, value in own.items())
    old.to_module(net)
    assert same(before, exact(net))
    params = blank(net)
    with params.to_module(net) as old:
        edit(params)
    assert same(before, exact(net))
    assert all(old[path] is value for path, value in own.items())


# -- the way back ----------------------------------------------------------------------------------


def test_the_way_back_makes_no_parameter_of_a_buffer():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = exact(net)
    params = TensorDictParams(TensorDict.from_module(net).data.clone())
    assert isinstance(params["1", "running_mean"], nn.Parameter)
    old = params.to_module(net)
    old.to_module(net)
    assert same(before, exact(net))


def test_two_calls_inside_a_block_leave_its_leaves_in_place():
    net, other = chain(), TensorDict.from_module(chain())
    before, params = exact(net), blank(net)
    own = dict(params.items(True, True))
    with params.to_module(net):
        inside = exact(net)
        old = other.to_module(net)
        assert net[0].weight is other["0", "weight"]
        old.to_module(net)
        assert same(inside, exact(net))
    assert same(before, exact(net))
    assert all(params[key] is leaf for key, leaf in own.items())


def test_what_was_written_into_the_way_back_becomes_a_parameter():
    net = chain()
    old = blank(net).to_module(net)
    own = old["0", "bias"]
    old["0", "weight"] = torch.ones(4, 4)
    old.to_module(net)
    assert isinstance(net[0].weight, nn.Parameter)
    assert net[0].weight.data_ptr() == old["0", "weight"].data_ptr()
    assert net[0].bias is own


def test_what_a_module_held_can_be_pickled():
    net = chain()
    with blank(net).to_module(net) as old:
        pass
    again = pickle.loads(pickle.dumps(old))
    assert type(again) is TensorDict
    assert bool((again == old).all())


# -- weights that stay -----------------------------------------------------------------------------


def test_inference_tensors_can_be_weights():
    net = chain()
    before, x = exact(net), torch.ones(2, 4)
    with torch.inference_mode():
        params = TensorDict.from_module(chain()).data.clone()
    with torch.no_grad():
        with params.to_module(net):
            found = net(x)
        names = params.flatten_keys(".").to_dict()
        assert torch.equal(found, torch.func.functional_call(net, names, (x,)))
        assert same(before, exact(net))
        params.to_module(net, return_swap=False)
        assert not net[0].weight.requires_grad
        assert torch.equal(found, net(x))


def test_weights_that_stay_are_parameters_in_a_compiled_function_too():
    net, x = chain(), torch.ones(2, 4)
    trees = [TensorDict.from_module(chain()).data.clone() for _ in range(2)]
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def run(params, x):
        params.to_module(net, return_swap=False)
        return net(x)

    for params in trees * 2:
        found = run(params, x)
        assert isinstance(net[0].weight, nn.Parameter)
        assert net[0].weight.requires_grad
        assert net[0].weight.data_ptr() == params["0", "weight"].data_ptr()
        torch.testing.assert_close(found, net(x))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_module_that_is_initialised_does_not_go_back_to_leaves_without_a_value():
    net = nn.LazyLinear(2)
    old = blank(nn.Linear(4, 2)).to_module(net)
    net(torch.ones(1, 4))
    before = exact(net)
    with pytest.raises(SwapError, match=r"\['weight', 'bias'\] of the tree have no value yet, and"):
        old.to_module(net)
    assert same(before, exact(net))
    lazy = nn.LazyLinear(2)
    TensorDict.from_module(nn.LazyLinear(2)).to_module(lazy)
    assert lazy(torch.ones(1, 3)).shape == (1, 2)
