"""Swaps of one module that end in another order than they began."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from zoo import Counter, blank, chain, equal, exact, rebind, same, values, warmed, weights_of

from tdnn import TensorDict
from tdnn.errors import SwapError


def opened(params, net):
    with params.to_module(net):
        yield
    yield


def test_generators_may_leave_their_blocks_in_any_order():
    net = chain()
    before = exact(net)
    one, two = blank(net), blank(net)
    first, second = opened(one, net), opened(two, net)
    next(first)
    next(second)
    next(first)
    assert net[0].weight is two["0", "weight"]
    next(second)
    assert same(before, exact(net))


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_three_swaps_may_end_in_any_order(order):
    net = chain()
    before = exact(net)
    trees = [blank(net), blank(net).select("0"), blank(net)]
    blocks = [opened(tree, net) for tree in trees]
    for block in blocks:
        next(block)
    alive = [0, 1, 2]
    for n in order:
        next(blocks[n])
        alive.remove(n)
        for key in ("0", "2"):
            holders = [trees[i][key, "weight"] for i in alive if key in trees[i]]
            if holders:
                assert net[int(key)].weight is holders[-1]
    assert same(before, exact(net))


def test_a_module_with_two_names_gets_its_own_back_in_any_order():
    net = nn.Module()
    net.a = net.b = nn.Linear(2, 2)
    before = exact(net)
    first, second = opened(blank(net), net), opened(blank(net), net)
    next(first)
    next(second)
    next(first)
    next(second)
    assert same(before, exact(net))


WAYS = [{}, {"inplace": True}, {"use_state_dict": True}]


@settings(max_examples=150, deadline=None)
@given(
    ways=st.lists(st.sampled_from(WAYS), min_size=2, max_size=4),
    shared=st.booleans(),
    data=st.data(),
)
def test_swaps_of_all_kinds_may_end_in_any_order(ways, shared, data):
    """The block that began last of those that go on is the one whose weights run."""
    net = chain()
    if shared:
        net.append(net[0])
    before, held = exact(net), values(net)
    trees = [blank(net).apply_(lambda leaf, n=n: leaf.fill_(n)) for n in range(len(ways))]
    wanted = [tree.clone() for tree in trees]

    def block(tree, way):
        with tree.to_module(net, **way):
            yield
        yield

    blocks = [block(tree, way) for tree, way in zip(trees, ways, strict=True)]
    for each in blocks:
        next(each)
    alive = list(range(len(ways)))
    for n in data.draw(st.permutations(alive), label="order of the ends"):
        next(blocks[n])
        alive.remove(n)
        if alive:
            assert all([(leaf == alive[-1]).all() for leaf in net.state_dict().values()])
    assert same(before, exact(net))
    assert equal(held, values(net))
    assert all([bool((tree == copy).all()) for tree, copy in zip(trees, wanted, strict=True)])


@pytest.mark.parametrize("copy_first", [True, False])
def test_a_swap_of_values_may_overlap_one_of_slots(copy_first):
    net = chain()
    before, held = exact(net), values(net)

    def block(inplace):
        params = blank(net)
        with params.to_module(net, inplace=inplace):
            yield params
        yield

    first, second = block(copy_first), block(not copy_first)
    trees = [next(first), next(second)]
    next(first)
    next(second)
    assert same(before, exact(net))
    assert equal(held, values(net))
    assert not any(leaf.any() for tree in trees for leaf in tree.values(True, True))


def test_a_swap_that_ended_with_the_block_around_it_begins_anew_when_it_is_entered():
    net = nn.Linear(2, 2)
    before = exact(net)
    outer, inner = blank(net), weights_of(nn.Linear(2, 2))
    with outer.to_module(net):
        swap = inner.to_module(net)
    assert same(before, exact(net))
    for _ in range(2):
        with swap:
            assert net.weight is inner["weight"]
        assert same(before, exact(net))


def test_buffers_rebound_in_overlapping_blocks_reach_their_trees():
    net = Counter(rebind)
    before = exact(net)
    one, two = (TensorDict.from_module(net).clone() for _ in range(2))
    first, second = opened(one, net), opened(two, net)
    next(first)
    net(torch.ones(1))
    next(second)
    net(torch.ones(1))
    net(torch.ones(1))
    next(first)
    net(torch.ones(1))
    next(second)
    assert (one["calls"], two["calls"]) == (1, 3)
    assert same(before, exact(net))


def test_a_block_left_by_closing_its_generator_gives_everything_back():
    net = chain()
    before = exact(net)
    block = opened(blank(net), net)
    next(block)
    block.close()
    assert same(before, exact(net))


# -- buffers without a value ---------------------------------------------------------------------


class Hollow(nn.Module):
    """Fills its buffer at each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", None)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.seen = x if self.seen is None else self.seen + x
        return x * self.weight


def seen_in(trees):
    return [tree["seen"].item() if "seen" in tree else None for tree in trees]


@settings(max_examples=200, deadline=None)
@given(
    has_leaf=st.lists(st.booleans(), min_size=2, max_size=3),
    data=st.data(),
)
def test_what_overlapping_blocks_give_to_a_buffer_without_a_value_goes_into_their_own_trees(
    has_leaf, data
):
    """A call counts for the block that began last; without another's value, if that has ended."""
    net = Hollow()
    before = exact(net)
    count = len(has_leaf)
    trees = [blank(net) for _ in range(count)]
    for tree, has in zip(trees, has_leaf, strict=True):
        if has:
            tree["seen"] = torch.zeros(1)
    blocks = [opened(tree, net) for tree in trees]
    stack = []  # of the blocks that run: the tree, and what it has for the buffer
    wanted = [0.0 if has else None for has in has_leaf]
    events = data.draw(st.permutations([*range(count), *range(count), "call", "call"]))
    ended = set()
    for event in events:
        if event == "call":
            if not stack:
                continue
            net(torch.ones(1))
            owner = next((n for n in reversed(stack) if wanted[n] is not None), stack[-1])
            wanted[owner] = (wanted[owner] or 0.0) + 1
        elif event not in stack and event not in ended:
            next(blocks[event])
            stack.append(event)
        elif event in stack:
            next(blocks[event])
            stack.remove(event)
            ended.add(event)
    for n in list(stack):
        next(blocks[n])
    assert seen_in(trees) == wanted
    assert same(before, exact(net))


# -- the order of names --------------------------------------------------------------------------


def register_again(net):
    """Delete a parameter and register the very same object, as torch's parametrizations do."""
    weight = net[0].weight
    del net[0].weight
    net[0].register_parameter("weight", weight)


def parametrize_for_a_while(net):
    parametrize.register_parametrization(net[0], "weight", nn.Identity())
    parametrize.remove_parametrizations(net[0], "weight")


@pytest.mark.parametrize("way", [*WAYS, {"inplace": True, "kept": True}, {"kept": True}])
@pytest.mark.parametrize("act", [register_again, parametrize_for_a_while])
@pytest.mark.parametrize("times", [1, 3])
def test_a_name_that_is_deleted_and_registered_again_keeps_its_place(way, act, times):
    net = chain()
    order = list(net.state_dict())
    params = TensorDict.from_module(chain())
    options = {name: value for name, value in way.items() if name != "kept"}
    swap = params.to_module(net, **options)
    for n in range(times):
        if n and "kept" not in way:
            swap = params.to_module(net, **options)
        with swap:
            act(net)
            assert list(net[0].state_dict()) == ["bias", "weight"]
        assert list(net.state_dict()) == order
        assert [name for name, _ in net.named_parameters()] == order


def test_an_order_of_names_that_was_changed_between_two_blocks_stays():
    net = chain()
    net.append(Counter(rebind))
    params = blank(net)
    kept = warmed(params.to_module(net))
    register_again(net)
    before = exact(net)
    with kept:
        net(torch.ones(1, 4))
    assert same(before, exact(net))
    with params.to_module(net):
        net(torch.ones(1, 4))
    assert same(before, exact(net))


@pytest.mark.parametrize("held", [None, torch.zeros(2)])
def test_a_buffer_that_a_block_sets_to_none_leaves_the_tree_whatever_the_module_held(held):
    net = nn.Linear(2, 2)
    net.register_buffer("h", held)
    tree = TensorDict({"bias": torch.zeros(2), "h": torch.ones(2)})
    with tree.to_module(net):
        net.h = None
    assert list(tree.keys()) == ["bias"]
    assert net.h is held
    with pytest.raises(SwapError, match="assigned to"), tree.lock_().to_module(net):
        net.bias = None
