"""How the values of leaves get into a module and back."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from zoo import Counter, blank, chain, equal, exact, rebind, same, stop, values, weights_of

from tdnn import MissingKeyError, SwapError, TensorDict

WAYS = [{"inplace": True}, {"use_state_dict": True}]


def test_values_that_cannot_be_copied_are_all_listed_and_nothing_is_copied():
    net = chain()
    before, held = exact(net), values(net)
    params = blank(net)
    params["0", "bias"] = torch.ones(1)
    params["2", "weight"] = torch.ones(3, 3)
    with pytest.raises(
        ValueError,
        match=r"cannot copy into Sequential: \('0', 'bias'\) has shape \(1,\) for a slot of shape "
        r"\(4,\); \('2', 'weight'\) has shape \(3, 3\) for a slot of shape \(2, 4\)",
    ):
        params.to_module(net, inplace=True)
    assert same(before, exact(net))
    assert equal(held, values(net))


@pytest.mark.parametrize("way", [{}, {"inplace": True}, {"use_state_dict": True}])
@pytest.mark.parametrize("view", [False, True])
def test_tensors_of_the_module_may_trade_places(way, view):
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    before, held = exact(net), values(net)
    own = [net[i].weight.detach().clone() for i in (0, 1)]
    params = TensorDict({"0": {"weight": net[1].weight}, "1": {"weight": net[0].weight}})
    with (params.data if view else params).to_module(net, **way):
        assert torch.equal(net[0].weight, own[1])
        assert torch.equal(net[1].weight, own[0])
    assert same(before, exact(net))
    assert equal(held, values(net))


@pytest.mark.parametrize("way", [{}, {"inplace": True}, {"use_state_dict": True}])
@pytest.mark.parametrize("view", [False, True])
def test_a_buffer_that_tree_and_module_share_keeps_its_update(way, view):
    net = nn.BatchNorm1d(2)
    params = TensorDict.from_module(net)
    params = params.data if view else params
    with params.to_module(net, **way):
        net(torch.randn(4, 2))
    assert params["num_batches_tracked"] == 1


def test_nothing_can_be_copied_into_a_slot_without_memory():
    net = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="'bias' has no memory to copy into or from"):
        TensorDict({"bias": torch.ones(2)}).to_module(net, inplace=True)


def test_two_values_cannot_be_copied_into_one_tied_weight():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    held = values(net)
    params = TensorDict({"0": {"weight": torch.zeros(2, 2)}, "1": {"weight": torch.ones(2, 2)}})
    for inplace in (True, False):
        with pytest.raises(SwapError, match=r"\('1', 'weight'\) are one tensor there and"):
            params.to_module(net, inplace=inplace)
    assert equal(held, values(net))


def test_a_copy_that_fails_half_way_is_undone():
    net = chain()
    before, held = exact(net), values(net)
    params = blank(net)
    params["2", "bias"] = torch.ones(2, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        params.to_module(net, inplace=True)
    assert same(before, exact(net))
    assert equal(held, values(net))


# -- through the state dict --------------------------------------------------------------------


class Scaled(nn.Module):
    """Saves its weight doubled, and loads it halved."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_state_dict_post_hook(self._saved)
        self.register_load_state_dict_pre_hook(self._loaded)

    @staticmethod
    def _saved(module, state, prefix, metadata):
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    @staticmethod
    def _loaded(module, state, prefix, *rest):
        if prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] / 2

    def forward(self, x):
        self.calls += 1
        return x * self.weight


def test_use_state_dict_runs_the_hooks_of_the_module():
    net = Scaled()
    params = TensorDict.from_module(net, use_state_dict=True)
    assert params["weight"].tolist() == [2, 2]
    params = params.apply(lambda leaf: leaf.detach() * 4)
    with params.to_module(net, use_state_dict=True):
        assert net.weight.tolist() == [4, 4]
    assert net.weight.tolist() == [1, 1]
    params.to_module(net, use_state_dict=True)
    assert net.weight.tolist() == [4, 4]


def test_use_state_dict_brings_updated_buffers_into_the_tree():
    net = nn.Sequential(Scaled())
    params = TensorDict.from_module(net, use_state_dict=True).data.clone()
    with params.to_module(net, use_state_dict=True):
        net(torch.ones(2))
    assert params["0", "calls"] == 1
    assert net[0].calls == 0
    assert params["0", "weight"].tolist() == [2, 2]
    with pytest.raises(ZeroDivisionError), params.to_module(net, use_state_dict=True):
        stop(net, torch.ones(2))
    assert params["0", "calls"] == 1
    assert net[0].calls == 0


def test_use_state_dict_gives_back_the_objects_that_the_block_replaced():
    net = Counter(rebind)
    before = exact(net)
    params = TensorDict.from_module(net, use_state_dict=True).data.clone()
    with params.to_module(net, use_state_dict=True):
        net(torch.ones(1))
        net.last = torch.ones(7)
    assert same(before, exact(net))
    assert net.calls == 0
    assert params["calls"] == 1
    assert params["last"].shape == (7,)


def test_use_state_dict_lists_unknown_names_and_loads_nothing():
    net = chain()
    held = values(net)
    params = blank(net)
    params["0", "weigth"] = torch.zeros(4, 4)
    params["extra"] = torch.zeros(1)
    with pytest.raises(
        MissingKeyError,
        match=r"cannot load into Sequential: unknown 'extra'; unknown '0.weigth' "
        r"\(did you mean '0.weight'\?\)",
    ):
        params.to_module(net, use_state_dict=True)
    assert equal(held, values(net))
    params = blank(net)
    params["0", "weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        params.to_module(net, use_state_dict=True)
    assert equal(held, values(net))


def test_use_state_dict_has_its_own_way_of_copying():
    net = chain()
    with pytest.raises(ValueError, match="copies values in its own way; drop inplace"):
        blank(net).to_module(net, use_state_dict=True, inplace=True)


def test_the_swap_through_the_state_dict_is_a_tree_too():
    net = chain()
    held = values(net)
    old = blank(net).to_module(net, use_state_dict=True)
    assert not any(v.any() for v in values(net))
    assert list(old.keys(True, True)) == list(TensorDict.from_module(net).keys(True, True))
    old.to_module(net, use_state_dict=True)
    assert equal(held, values(net))


@pytest.mark.parametrize("way", [{}, {"inplace": True}, {"use_state_dict": True}])
@pytest.mark.parametrize("other", [{}, {"inplace": True}, {"use_state_dict": True}])
def test_a_rebound_buffer_reaches_its_tree_though_a_later_block_goes_on(way, other):
    net = Counter(rebind)
    before, held = exact(net), values(net)
    one, two = (TensorDict({"calls": torch.tensor(10.0 * n)}) for n in (1, 2))
    first, second = one.to_module(net, **way), two.to_module
    first.__enter__()
    net(torch.ones(1))
    second = second(net, **other)
    second.__enter__()
    first.__exit__(None, None, None)
    net(torch.ones(1))
    second.__exit__(None, None, None)
    assert (one["calls"], two["calls"]) == (11, 21)
    assert same(before, exact(net))
    assert equal(held, values(net))


@pytest.mark.parametrize("way", [{}, {"inplace": True}, {"use_state_dict": True}])
def test_a_buffer_without_a_value_that_the_forward_fills_goes_into_the_tree(way):
    net = nn.Linear(2, 2)
    net.register_buffer("last", None)
    params = blank(net)
    with params.to_module(net, **way):
        net.last = torch.ones(2)
    assert net.last is None
    assert params["last"].tolist() == [1, 1]


def test_a_way_back_inside_the_block_is_nothing_new_for_the_tree():
    net = chain()
    before, params = exact(net), blank(net)
    held = [id(leaf) for leaf in params.values(True, True)]
    with params.to_module(net) as old:
        old.to_module(net)
        assert same(before, exact(net))
    assert [id(leaf) for leaf in params.values(True, True)] == held
    assert same(before, exact(net))


# -- what a block writes into the module's tensors -------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_training_in_the_block_reaches_the_tree_only(way):
    net, params, x = chain(), weights_of(chain()), torch.ones(3, 4)
    twin = chain()
    params.data.to_module(twin, inplace=True, return_swap=False)
    before, held = exact(net), values(net)
    for each in (twin, net):
        with contextlib.nullcontext() if each is twin else params.to_module(net, **way):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(before, exact(net))
    assert equal(held, values(net))
    for key, leaf in TensorDict.from_module(twin).items(True, True):
        torch.testing.assert_close(params[key], leaf)


def track(net):
    net(torch.rand(4, 3))  # batch_norm does not count its writes to the statistics


def step(net, **options):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, **options)
    net(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fused(net):
    step(net, fused=True)


def through_data(net):
    for p in net.parameters():
        p.data.add_(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("act", [track, step, fused, through_data])
def test_whatever_way_of_writing_a_block_uses_the_tree_gets_it(way, act):
    net, twin = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    params = TensorDict.from_module(twin).data.clone()
    before, held = exact(net), values(net)
    torch.manual_seed(0)
    act(twin)
    torch.manual_seed(0)
    with params.to_module(net, **way):
        act(net)
    for key, leaf in TensorDict.from_module(twin).items():
        torch.testing.assert_close(params[key], leaf.detach())
    assert same(before, exact(net))
    assert equal(held, values(net))


@pytest.mark.parametrize("way", WAYS)
def test_what_block_and_tree_both_write_to_is_refused(way):
    net = nn.BatchNorm1d(3)
    params = TensorDict.from_module(net).data.clone()
    before, held = exact(net), values(net)
    block = params.to_module(net, **way)
    block.__enter__()
    track(net)
    with params.to_module(net, **way):
        track(net)
    with pytest.raises(SwapError, match=r"two values for \['running_mean', 'running_var', 'num_ba"):
        block.__exit__(None, None, None)
    assert params["num_batches_tracked"] == 1
    assert same(before, exact(net))
    assert equal(held, values(net))
    with params.to_module(net, **way):
        with params.to_module(net.eval(), **way):
            track(net)
        track(net.train())
        params["bias"] = torch.ones(3)
    assert params["num_batches_tracked"] == 2
    assert params["bias"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("way", [{}, *WAYS])
def test_what_a_block_writes_goes_into_leaves_that_are_the_modules_own(way):
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    params = TensorDict.from_module(net)
    exchanged = TensorDict({"0": params["1"], "1": params["0"]})
    want = [net[at].weight.detach() + (1 + at) for at in (1, 0)]
    with exchanged.to_module(net, **way), torch.no_grad():
        net[0].weight.add_(2)
        net[1].weight.add_(1)
    found = [exchanged[at, "weight"] for at in "01"]
    assert all(map(torch.equal, found, want))
    assert found == [params["1", "weight"], params["0", "weight"]]


def test_a_tied_leaf_cannot_take_what_two_weights_have_become():
    net, w = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), torch.ones(2)
    params = TensorDict({"0": {"weight": w.diag()}})
    params["1"] = params["0"]
    block = params.to_module(net, inplace=True)
    block.__enter__()
    net[0].weight.data.add_(1)
    net[1].weight.data.add_(2)
    with pytest.raises(ValueError, match=r"values for one tensor: \('0', 'weight'\) and \('1', 'w"):
        block.__exit__(None, None, None)
    with params.to_module(net, inplace=True):
        for layer in net:
            layer.weight.data.add_(1)
    assert params["0", "weight"].tolist() == [[2, 1], [1, 2]]


@pytest.mark.parametrize("way", [{}, *WAYS])
def test_what_autocast_made_of_other_weights_is_not_used(way):
    net, x = nn.Linear(3, 3), torch.ones(1, 3)
    zeros = blank(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = net(x)
        for _ in range(2):
            with zeros.to_module(net, **way):
                assert not net(x).any()
            assert torch.equal(net(x), own)


def test_what_a_block_writes_is_found_under_the_name_that_hooks_give():
    net = nn.Sequential(nn.Linear(2, 2))

    def rename(old, new):
        def hook(module, state, *rest):
            for key in list(state):
                state[key.replace(old, new)] = state.pop(key)

        return hook

    net.register_state_dict_post_hook(rename("0.", "old."))
    net.register_load_state_dict_pre_hook(rename("old.", "0."))
    params = TensorDict.from_module(net, use_state_dict=True).data.clone().zero_()
    assert list(params.keys(True, True)) == [("old", "weight"), ("old", "bias")]
    with params.to_module(net, use_state_dict=True), torch.no_grad():
        net[0].bias.add_(4)
    assert params["old", "bias"].tolist() == [4, 4]
    assert not params["old", "weight"].any()


@pytest.mark.parametrize("way", WAYS)
def test_two_threads_do_not_keep_each_others_weights(way):
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    two.weight = one.weight
    held = one.weight.detach().clone()

    def work(net, value):
        params = TensorDict({"weight": torch.full((2, 2), value)})
        for _ in range(500):
            with contextlib.suppress(SwapError), params.to_module(net, **way):
                assert net.weight[0, 0] == value

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(work, one, 1.0), pool.submit(work, two, 2.0)]:
                future.result()
    finally:
        sys.setswitchinterval(before)
    assert torch.equal(one.weight, held)


@pytest.mark.parametrize("way", WAYS)
def test_a_leaf_that_the_block_does_not_write_to_keeps_its_precision(way):
    net = nn.BatchNorm1d(2)
    params = TensorDict.from_module(net).data.clone().double().add_(1 / 3)
    params["num_batches_tracked"] = torch.tensor(0)
    before = params.clone()
    with params.to_module(net.eval(), **way):
        net(torch.rand(3, 2))
    assert bool((params == before).all())


def test_two_values_for_a_tie_are_refused_by_a_state_dict_too():
    net = chain()
    net[2] = net[0]
    held, params = values(net), blank(net)
    params["2", "weight"] = torch.ones(4, 4)
    with pytest.raises(SwapError, match=r"one tensor would get two values, of '0.weight' and '2.w"):
        params.to_module(net, use_state_dict=True)
    assert equal(held, values(net))
    params["2", "weight"] = params["0", "weight"].clone()
    with params.to_module(net, use_state_dict=True):
        assert not net[0].weight.any()


def test_values_are_not_copied_to_where_none_are_kept():
    net = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="'weight' has no memory to copy into or from; 'bias' has"):
        blank(nn.Linear(2, 2)).to_module(net, inplace=True)
    TensorDict.from_module(nn.Linear(2, 2, device="meta")).to_module(net, inplace=True)


def test_a_name_outside_the_state_dict_is_told_apart_from_an_unknown_one():
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.ones(2), persistent=False)
    params = blank(net)
    params["weigth"] = torch.ones(1)
    with pytest.raises(
        MissingKeyError,
        match=r"'mask' is not part of the module's state_dict; unknown 'weigth' \(did you mean 'w",
    ):
        params.to_module(net, use_state_dict=True)


@pytest.mark.parametrize("way", [{}, *WAYS])
def test_a_tree_cannot_be_the_destination_of_its_own_swap(way):
    net = chain()
    before, params = exact(net), blank(net)
    for dest in (params, params["0"]):
        with pytest.raises(ValueError, match="swap_dest is this tree or a branch of it"):
            params.to_module(net, swap_dest=dest, **way)
    assert same(before, exact(net))


@pytest.mark.parametrize("way", WAYS)
def test_sparse_tensors_are_copied_too(way):
    net = nn.Module()
    net.register_buffer("mask", torch.eye(2).to_sparse())
    params = TensorDict({"mask": (torch.eye(2) * 3).to_sparse()})
    held = net.mask
    with params.to_module(net, **way):
        assert net.mask.to_dense().sum() == 6
        net.mask.mul_(2)
    assert params["mask"].to_dense().tolist() == [[6, 0], [0, 6]]
    assert net.mask is held
    assert torch.equal(held.to_dense(), torch.eye(2))


def test_what_a_compiled_block_writes_to_copies_goes_into_the_tree():
    net = nn.BatchNorm1d(3)
    params = TensorDict.from_module(net).data.double()
    params["num_batches_tracked"] = torch.tensor(0)
    twin, x = params.clone(), torch.rand(4, 3)

    @torch.no_grad()
    def run(params, x):
        with params.to_module(net, inplace=True):
            net.bias.add_(1)
            net(x)

    before = params["weight"]
    run(twin, x)
    torch.compile(run, fullgraph=True, backend="aot_eager")(params, x)
    torch.testing.assert_close(params.to_dict(), twin.to_dict())
    assert params["bias"].tolist() == [1, 1, 1]
    assert params["weight"] is before


def test_values_are_copied_in_a_compiled_function():
    net, x = chain(), torch.ones(2, 4)
    before, held = exact(net), values(net)
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def run(params, x):
        with params.to_module(net, inplace=True):
            return net(x) + 0

    for _ in range(3):
        other = chain()
        torch.testing.assert_close(run(TensorDict.from_module(other).data, x), other(x))
        assert same(before, exact(net))
        assert equal(held, values(net))
    assert counter.frame_count == 1
