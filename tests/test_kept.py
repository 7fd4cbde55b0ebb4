"""A swap that is kept and entered again and again."""

import pytest
import torch
from torch import nn
from zoo import Counter, blank, chain, equal, exact, rebind, same, values, warmed

from tdnn import MissingKeyError, SwapError, TensorDict, TensorDictParams


def test_a_swap_can_be_entered_while_it_is_entered():
    net = chain()
    before = exact(net)
    params = blank(net)
    swap = params.to_module(net)
    with swap, swap:
        with swap:
            assert net[0].weight is params["0", "weight"]
        assert net[0].weight is params["0", "weight"]
    assert same(before, exact(net))
    with swap:
        assert net[0].weight is params["0", "weight"]
    assert same(before, exact(net))


@pytest.mark.parametrize("as_module", [False, True])
def test_a_kept_swap_follows_branches_that_were_replaced_and_entries_that_were_added(as_module):
    net = chain()
    before = exact(net)
    params = TensorDict({"0": {"weight": torch.zeros(4, 4)}})
    if as_module:
        params = TensorDictParams(params)
    swap = warmed(params.to_module(net))
    params["0"] = TensorDict({"weight": torch.ones(4, 4)})
    with swap:
        assert net[0].weight is params["0", "weight"]
        assert net[0].weight.all()
    params["2"] = {"bias": torch.full((2,), 3.0)}
    params["0", "bias"] = torch.full((4,), 3.0)
    with swap:
        assert net[2].bias.tolist() == [3, 3]
        assert net[0].bias.tolist() == [3] * 4
    del params["0", "weight"]
    own = net[0].weight
    with swap:
        assert net[0].weight is own
        assert net[2].bias.tolist() == [3, 3]
    del params["2"]
    with swap:
        assert net[2].bias.all()
        assert net[0].bias.tolist() == [3] * 4
    assert same(before, exact(net))


def test_a_kept_swap_follows_a_module_that_was_replaced():
    net = chain()
    params = blank(net)
    swap = warmed(params.to_module(net))
    net[0] = nn.Linear(4, 4)
    before = exact(net)
    with swap:
        assert net[0].weight is params["0", "weight"]
    assert same(before, exact(net))


def test_a_kept_swap_into_a_slot_that_is_gone_is_refused_and_nothing_is_swapped():
    net = chain()
    params = blank(net)
    swap = warmed(params.to_module(net))
    del net[0].weight
    before = exact(net)
    with pytest.raises(MissingKeyError, match=r"unknown \('0', 'weight'\)"):
        swap.__enter__()
    assert same(before, exact(net))
    net[0].weight = nn.Parameter(torch.ones(4, 4))
    with swap:
        assert not net[0].weight.any()


def test_a_kept_swap_refuses_a_branch_where_a_leaf_was():
    net = chain()
    params = blank(net)
    swap = warmed(params.to_module(net))
    params["0", "weight"] = {"x": torch.zeros(1)}
    before = exact(net)
    with pytest.raises(MissingKeyError, match=r"\('0', 'weight'\) is a tensor there, and a branch"):
        swap.__enter__()
    assert same(before, exact(net))


def test_a_buffer_that_is_rebound_twice_in_a_kept_swap_goes_on_from_the_tree():
    net = Counter(rebind)
    params = TensorDict.from_module(net).clone()
    swap = params.to_module(net)
    for n in range(1, 4):
        with swap:
            net(torch.ones(1))
        assert params["calls"] == n
        assert net.calls == 0


@pytest.mark.parametrize("stay", [True, False])
def test_a_swap_that_another_one_undid_begins_anew_when_it_is_entered(stay):
    net, other = chain(), chain()
    params, more = TensorDict.from_module(chain()), TensorDict.from_module(other)
    before, wanted = exact(net), exact_leaves(params)
    swap = params.to_module(net)
    if stay:
        more.to_module(net, return_swap=False)
        before = exact(net)
    else:
        swap.to_module(net)
    with blank(other).to_module(other):  # takes the place of the claims that are garbage
        pass
    with swap:
        assert net[0].weight is params["0", "weight"]
    assert same(before, exact(net))
    assert exact_leaves(params) == wanted


def exact_leaves(tree):
    return [(path, id(leaf)) for path, leaf in tree.items(include_nested=True, leaves_only=True)]


def test_a_swap_is_there_still_after_a_block_of_another_one():
    net = chain()
    params, before = blank(net), exact(net)
    swap = params.to_module(net)
    with TensorDict.from_module(chain()).to_module(net):
        pass
    with swap:
        assert net[0].weight is params["0", "weight"]
    assert same(before, exact(net))


@pytest.mark.parametrize("way", [{}, {"inplace": True}, {"use_state_dict": True}])
@pytest.mark.parametrize("other", [{}, {"inplace": True}, {"use_state_dict": True}])
def test_kept_swaps_that_were_made_one_after_the_other_can_be_entered_in_turn(way, other):
    net = chain()
    before, held = exact(net), values(net)
    one, two = blank(net), blank(net) + 1
    swaps = [(one, one.to_module(net, **way)), (two, two.to_module(net, **other))]
    for _ in range(2):
        for params, swap in swaps:
            with swap:
                assert torch.equal(net[0].weight, params["0", "weight"])
    assert same(before, exact(net))
    assert equal(held, values(net))


def test_a_kept_swap_of_a_tree_with_batch_dims_is_refused():
    net = nn.Linear(2, 2)
    params = blank(net)
    kept = warmed(params.to_module(net))
    params.batch_size = [2]
    with pytest.raises(SwapError, match=r"the tree has batch size \(2,\)"), kept:
        pass
