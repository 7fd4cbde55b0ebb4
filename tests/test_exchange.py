"""How leaves get into the slots of a module and back: what can go wrong on the way."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations
from zoo import Counter, blank, chain, exact, in_thread, rebind, same, stop, weights_of

from tdnn import LockedError, SwapError, TensorDict, TensorDictParams

# -- what the block does to the slots ----------------------------------------------------------


def remake(net):
    del net.calls
    net.register_buffer("calls", torch.tensor(5.0))


def drop(net):
    del net.calls


def clear(net):
    net.calls = None


@pytest.mark.parametrize("kind", [TensorDict, TensorDictParams])
@pytest.mark.parametrize(
    ("act", "wanted"), [(rebind, 1.0), (remake, 5.0), (drop, None), (clear, None)]
)
def test_what_the_forward_assigns_to_a_buffer_goes_into_the_tree(kind, act, wanted):
    net = Counter(act)
    before = exact(net)
    params = kind(TensorDict.from_module(net).clone())
    with params.to_module(net):
        net(torch.ones(1))
    assert same(before, exact(net))
    assert net.calls == 0
    assert ("calls" in params) is (wanted is not None)
    if wanted is not None:
        assert params["calls"].item() == wanted
        assert params["calls"] is dict(params.items())["calls"]


@pytest.mark.parametrize("act", [rebind, remake, drop, clear])
def test_after_an_exception_the_tree_is_not_touched(act):
    net = Counter(act)
    before = exact(net)
    params = TensorDict.from_module(net).clone()
    entries = dict(params.items())
    with pytest.raises(ZeroDivisionError), params.to_module(net):
        stop(net, torch.ones(1))
    assert same(before, exact(net))
    assert list(params.items()) == list(entries.items())


def test_a_buffer_that_is_rebound_stays_a_buffer_of_the_params():
    net = Counter(rebind)
    params = TensorDictParams(TensorDict({}), no_convert=False)
    for name, buffer in net.named_buffers():
        params[name] = nn.Buffer(buffer.clone())
    with params.to_module(net):
        net(torch.ones(1))
    assert params["calls"] == 1
    assert not list(params.parameters())
    assert [name for name, _ in params.named_buffers()] == ["first", "calls", "last"]


@pytest.mark.parametrize("as_module", [False, True])
def test_a_buffer_that_is_filled_by_the_forward_goes_into_the_tree(as_module):
    """A cache that is None until the first call must not leak from one set of weights to others."""

    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("seen", None)

        def forward(self, x):
            self.seen = x * self.weight if self.seen is None else self.seen + 1
            return self.seen

    net = nn.Sequential(Cache())
    before = exact(net)
    params = weights_of(net)
    if as_module:
        params = TensorDictParams(params, no_convert=True)
    with params.to_module(net):
        net(torch.ones(2))
    assert same(before, exact(net))
    assert net[0].seen is None
    assert params["0", "seen"].tolist() == [1, 1]
    with params.to_module(net):
        net(torch.ones(2))
    assert same(before, exact(net))
    assert params["0", "seen"].tolist() == [2, 2]
    torch.vmap(lambda p, x: _call(p, net, x), (0, None))(
        TensorDict.from_modules(net, net), torch.ones(2)
    )
    assert same(before, exact(net))


def _call(params, net, x):
    with params.to_module(net):
        return net(x)


@pytest.mark.parametrize("act", [rebind, remake])
def test_a_locked_tree_takes_a_new_value_into_its_tensor(act):
    net = Counter(act)
    params = TensorDict.from_module(net).clone().lock_()
    own = params["calls"]
    with params.to_module(net):
        net(torch.ones(1))
    assert params["calls"] is own
    assert own == (1 if act is rebind else 5)


def test_a_locked_tree_refuses_what_its_tensors_cannot_hold():
    def grow(net):
        net.calls = torch.zeros(7)
        net.last = None

    net = Counter(grow)
    before = exact(net)
    params = TensorDict.from_module(net).clone().lock_()
    with (
        pytest.raises(
            SwapError,
            match=r"assigned to \['calls', 'last'\], and the locked tree cannot take that",
        ),
        params.to_module(net),
    ):
        net(torch.ones(1))
    assert same(before, exact(net))
    assert params["calls"].shape == ()


def test_a_locked_tree_takes_all_that_the_block_assigned_or_nothing():
    def act(net):
        net.first = net.first + 1
        net.calls = torch.zeros(3)

    net = Counter(act)
    params = TensorDict.from_module(net).clone().lock_()
    with (
        pytest.raises(SwapError, match=r"the block assigned to \['calls'\], and the locked tree"),
        params.to_module(net),
    ):
        net(torch.ones(1))
    assert params["first"] == 0


def test_a_parameter_that_the_block_replaces_goes_into_the_tree():
    net = nn.Linear(2, 2)
    before = exact(net)
    params = blank(net)
    new = nn.Parameter(torch.ones(2))
    with params.to_module(net):
        net.bias = new
    assert params["bias"] is new
    assert same(before, exact(net))


def test_what_the_block_adds_stays():
    net = nn.Linear(2, 2)
    with blank(net).to_module(net):
        net.register_buffer("extra", torch.ones(1))
        net.note = "kept"
    assert net.extra == 1
    assert net.note == "kept"
    assert list(net.state_dict()) == ["weight", "bias", "extra"]


def test_in_place_changes_reach_the_trees_tensors():
    net = nn.BatchNorm1d(2)
    params = TensorDict.from_module(net).data.clone()
    own = params["running_mean"]
    with params.to_module(net):
        net(torch.randn(5, 2) + 3)
    assert params["running_mean"] is own
    assert own.min() > 0
    assert params["num_batches_tracked"] == 1
    assert not net.running_mean.any()
    assert net.num_batches_tracked == 0


class Backwards(nn.Module):
    """Its parameters stand in another order than those of most modules."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.weight + self.bias


@pytest.mark.parametrize("act", [lambda net: None, lambda net: delattr(net[1], "bias")])
def test_each_module_keeps_the_order_of_its_names(act):
    net = nn.Sequential(nn.Linear(3, 3), Backwards())
    before = exact(net)
    params = blank(net)
    with params.to_module(net):
        net(torch.ones(3))
        act(net)
    assert same(before, exact(net))
    turned = TensorDict({"1": {"weight": torch.ones(3), "bias": torch.ones(3)}})
    with turned.to_module(net):
        net(torch.ones(3))
        act(net)
    assert [name for name, _ in net.named_parameters()][2:] == ["1.bias", "1.weight"]


def test_equal_values_for_one_slot_stay_two_tensors_of_the_tree():
    net = nn.Module()
    net.a = net.b = nn.Linear(2, 2, bias=False)
    one = torch.full((2, 2), torch.nan)
    params = TensorDict({"a": {"weight": one}, "b": {"weight": one.clone()}}, lock=True)
    held = [params["a", "weight"], params["b", "weight"]]
    with params.to_module(net):
        assert net.a.weight is one
    assert [params["a", "weight"], params["b", "weight"]] == held
    with pytest.raises(SwapError, match="have two values in the tree"):
        TensorDict({"a": {"weight": one}, "b": {"weight": one.double()}}).to_module(net)
    with TensorDict({k: {"weight": torch.ones(2, 2, device="meta")} for k in "ab"}).to_module(net):
        assert net.a.weight.is_meta


def test_a_module_with_two_names_runs_on_one_leaf_and_brings_what_it_wrote_to_both():
    shared = nn.BatchNorm1d(2)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    twin = copy.deepcopy(net)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    params = TensorDict(state).unflatten_keys(".")
    for lock in (False, True, True):
        x = torch.randn(5, 2) + 3
        with params.lock_() if lock else params, params.to_module(net):
            assert torch.equal(net(x), twin(x))
        for name, value in twin.state_dict().items():
            assert torch.equal(params[tuple(name.split("."))], value)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def test_a_step_of_its_own_for_each_name_of_a_tie_is_refused():
    net, x = Tied(), torch.randn(4, 3)
    params = TensorDict.from_module(net).detach()

    def loss(params):
        with params.to_module(net):
            return net(x).square().mean()

    def tied_loss(params):  # what the error advises
        return loss(params.copy().set(("two", "weight"), params["one", "weight"]))

    wrong = params - 0.1 * torch.func.grad(loss)(params)
    before = exact(net)
    for _ in range(2):
        with pytest.raises(SwapError, match=r"Tied: \('one', 'weight'\) and \('two', 'weight'"):
            loss(wrong)
        assert same(before, exact(net))
    w = params["one", "weight"].clone().requires_grad_()
    torch.func.functional_call(net, {"one.weight": w}, (x,)).square().mean().backward()
    grad = torch.func.grad(tied_loss)(params)["one", "weight"]
    torch.testing.assert_close(grad, w.grad)


def test_a_tie_of_the_module_stays_one_parameter():
    net = Tied()
    params = TensorDict(net.state_dict()).unflatten_keys(".")  # two tensors over one memory
    assert params["one", "weight"] is not params["two", "weight"]
    params.to_module(net, return_swap=False)
    assert net.one.weight is net.two.weight
    assert len(list(net.parameters())) == 1


def test_what_a_tree_ties_for_a_while_is_no_tie_of_the_module():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before, one = exact(net), blank(net)["0"]
    other = weights_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with TensorDict({"0": one, "1": one}).to_module(net), other.to_module(net):
        assert net[1].weight is other["1", "weight"]
    assert same(before, exact(net))


def test_a_tie_that_is_made_between_two_swaps_is_seen():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    params = weights_of(net)
    for _ in range(3):
        with params.to_module(net):
            assert net[1].weight is params["1", "weight"]
    net[1].weight = net[0].weight
    with pytest.raises(SwapError, match=r"\('0', 'weight'\) and \('1', 'weight'\) are one tensor"):
        params.to_module(net)


def test_a_branch_that_left_the_tree_during_the_block_is_not_written_to():
    net = nn.Sequential(Counter(rebind))
    params = TensorDict.from_module(net).clone()
    branch = params["0"]
    with params.to_module(net):
        net(torch.ones(1))
        del params["0"]
    assert branch["calls"] == 0
    assert net[0].calls == 0


# -- the swap as a tree, and two calls ----------------------------------------------------------


def test_two_calls_are_there_and_back():
    net = chain()
    before = exact(net)
    old = blank(net).to_module(net)
    assert not net[0].weight.any()
    old.to_module(net)
    assert same(before, exact(net))


def test_the_swap_is_a_tree_of_what_the_module_held():
    net = chain()
    own = TensorDict.from_module(net)
    old = blank(net).to_module(net)
    assert old["0", "weight"] is own["0", "weight"]
    assert list(old.keys(True, True)) == list(own.keys(True, True))
    assert isinstance(old, TensorDict)
    assert old.batch_size == ()
    assert type(old.clone()) is TensorDict


def test_two_calls_inside_a_block_change_nothing_outside():
    net = chain()
    before = exact(net)
    outer = blank(net)
    entries = dict(outer.items(True))
    with outer.to_module(net):
        inside = exact(net)
        old = weights_of(chain()).to_module(net)
        assert old["0", "weight"] is outer["0", "weight"]
        old.to_module(net)
        assert same(inside, exact(net))
    assert same(before, exact(net))
    assert list(outer.items(True)) == list(entries.items())
    del old


def test_a_swap_that_stays_inside_a_block_ends_with_it():
    net = nn.Linear(2, 2)
    before = exact(net)
    params, other = blank(net), blank(net)
    with params.to_module(net):
        kept = other.to_module(net)
    assert same(before, exact(net))
    assert kept["weight"] is not None


def test_return_swap_false_returns_nothing():
    net = chain()
    assert blank(net).to_module(net, return_swap=False) is None
    assert not net[0].weight.any()


def test_swap_dest_takes_what_the_module_held_and_is_the_block():
    net = chain()
    before, own = exact(net), TensorDict.from_module(net)
    dest = TensorDict({"0": {"weight": torch.zeros(1)}, "note": torch.ones(1)})
    branch = dest["0"]
    with blank(net).to_module(net, swap_dest=dest) as given:
        assert given is dest
        assert not net[0].weight.any()
        assert dest["0", "weight"] is own["0", "weight"]
        assert dest["0"] is branch
        assert dest["note"] == 1
    assert same(before, exact(net))


def test_a_swap_dest_that_cannot_take_it_leaves_the_module_alone():
    net = chain()
    before = exact(net)
    with pytest.raises(LockedError):
        blank(net).to_module(net, swap_dest=TensorDict({}, lock=True))
    assert same(before, exact(net))
    with blank(net).to_module(net):  # and no claim is left
        pass
    in_thread(lambda: blank(net).to_module(net, return_swap=False))


# -- failure half-way --------------------------------------------------------------------------


class Fussy(nn.Module):
    """Refuses some values."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.second = nn.Parameter(torch.ones(1))

    def __setattr__(self, name, value):
        if name == "second" and isinstance(value, torch.Tensor) and (value < 0).any():
            raise ArithmeticError("negative")
        super().__setattr__(name, value)


def test_a_module_that_refuses_a_value_half_way_gets_everything_back():
    net = nn.Sequential(nn.Linear(1, 1), Fussy(), nn.Linear(1, 1))
    before = exact(net)
    params = blank(net)
    params["1", "second"] = torch.tensor([-1.0])
    with pytest.raises(ArithmeticError, match="negative"):
        params.to_module(net)
    assert same(before, exact(net))
    params["1", "second"] = torch.tensor([0.0])
    with params.to_module(net):
        assert net[1].second == 0
    assert same(before, exact(net))
    in_thread(lambda: params.to_module(net, return_swap=False))  # no claim was left


def test_one_slot_with_two_names_takes_one_value():
    net = nn.Module()
    net.a = nn.Linear(2, 2, bias=False)
    net.b = net.a
    before = exact(net)
    params = TensorDict({"a": {"weight": torch.zeros(2, 2)}, "b": {"weight": torch.ones(2, 2)}})
    for inplace in (False, True):
        with pytest.raises(
            SwapError,
            match=r"Module: \('a', 'weight'\) and \('b', 'weight'\) are one tensor there and",
        ):
            params.to_module(net, inplace=inplace)
    assert same(before, exact(net))
    params["b", "weight"] = params["a", "weight"].clone()  # equal values are one value
    with params.to_module(net):
        assert not net.a.weight.any()
    assert same(before, exact(net))
    params["b", "weight"] = torch.zeros(3, 2)
    with pytest.raises(SwapError, match="have two values in the tree"):
        params.to_module(net)


def test_a_module_that_refuses_its_old_value_gets_it_all_the_same():
    net = nn.Sequential(Fussy(), nn.Linear(1, 1))
    with torch.no_grad():
        net[0].second.fill_(-1)
    before = exact(net)
    with pytest.raises(ArithmeticError, match="negative"), blank(net).to_module(net):
        assert not net[0].second.any()
    assert same(before, exact(net))


# -- permanent loads ---------------------------------------------------------------------------


def test_plain_tensors_become_parameters_over_the_same_memory():
    net = chain()
    net[0].requires_grad_(False)
    params = blank(net)
    params.to_module(net)
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]
    assert net[2].weight.data_ptr() == params["2", "weight"].data_ptr()
    assert not isinstance(params["2", "weight"], nn.Parameter)


def test_preserve_module_state_false_keeps_plain_tensors():
    net = nn.Linear(2, 2)
    params = blank(net)
    params.to_module(net, preserve_module_state=False)
    assert net.weight is params["weight"]


def test_a_tied_leaf_stays_one_parameter():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    blank(net).to_module(net)
    assert net[0].weight is net[1].weight
    assert len(list(net.parameters())) == 3


def test_integers_can_stand_for_a_parameter():
    net = nn.Linear(2, 2)
    params = TensorDict({"weight": torch.ones(2, 2, dtype=torch.int8)})
    params.to_module(net)
    assert net.weight.dtype == torch.int8
    assert isinstance(net.weight, nn.Parameter)
    assert not net.weight.requires_grad


def test_tensors_that_need_a_gradient_stay_as_they_are():
    net = nn.Linear(2, 2)
    params = weights_of(net).apply(lambda leaf: leaf * 2)
    old = params.to_module(net)
    assert net.weight is params["weight"]
    net(torch.ones(2)).sum().backward()
    old.to_module(net)


def test_a_module_is_told_of_the_parameters_that_it_keeps():
    """What a module with a ``__setattr__`` of its own saw last is what is in the slot."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "weight":
                self.__dict__["cached"] = value

    net = Cached()
    own, params = net.weight, TensorDict({"weight": torch.zeros(1)})
    swap = params.to_module(net)
    assert net.cached is net.weight
    assert isinstance(net.weight, nn.Parameter)
    with swap:
        assert net.cached is net.weight is params["weight"]
    assert net.cached is net.weight is own


# -- rare kinds of modules ---------------------------------------------------------------------


def test_weights_cached_by_parametrize_do_not_cross_the_border_of_a_swap():
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.parametrizations.weight.original1.add_(1)
    x = torch.ones(3)
    with nn.utils.parametrize.cached():
        before = net(x)
        with TensorDict.from_module(other).to_module(net):
            inside = net(x)
        after = net(x)
    torch.testing.assert_close(inside, other(x))
    torch.testing.assert_close(after, before)
    assert not torch.equal(inside, before)


# -- blocks that change what a module has ----------------------------------------------------------


def shadow(net):
    """Delete a parameter, and set a plain tensor under its name."""
    del net[0].weight
    net[0].weight = torch.ones(4, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_a_plain_attribute_in_the_place_of_a_slot_goes_into_the_tree(fails):
    net, params = chain(), TensorDict.from_module(chain())
    before, own = exact(net), params["0", "weight"]
    with contextlib.suppress(ZeroDivisionError), params.to_module(net):
        shadow(net)
        assert net(torch.ones(1, 4)).shape == (1, 2)
        if fails:
            raise ZeroDivisionError
    assert same(before, exact(net))
    if fails:
        assert params["0", "weight"] is own
    else:
        assert torch.equal(params["0", "weight"], torch.ones(4, 4))


@pytest.mark.parametrize("fails", [False, True])
def test_a_name_popped_from_a_parameter_dict_is_there_again(fails):
    net = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    params = blank(net)
    with contextlib.suppress(ZeroDivisionError), params.to_module(net):
        net.pop("a")
        assert list(net) == ["b"]
        if fails:
            raise ZeroDivisionError
    assert list(net.keys()) == [name for name, _ in net.named_parameters()] == ["a", "b"]
    assert ("a" in params) is fails


def test_a_parametrization_made_in_a_block_is_refused_when_it_ends():
    net, params = chain(), TensorDict.from_module(chain())
    own, there = net[0].weight, dict(params.items(True, True))
    swap = params.to_module(net)
    swap.__enter__()
    parametrizations.weight_norm(net[0])
    with pytest.raises(SwapError, match=r"in the place of 'weight' of ParametrizedLinear"):
        swap.__exit__(None, None, None)
    assert net[0]._parameters["weight"] is own
    assert all(params[key] is leaf for key, leaf in there.items())


def test_a_buffer_that_is_rebound_in_a_compiled_block_is_copied_into_a_locked_tree():
    net = Counter(rebind)
    params = TensorDict.from_module(net).clone().lock_()
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def run(params, x):
        with params.to_module(net):
            return net(x)

    for n in range(1, 4):
        run(params, torch.ones(1))
        assert params["calls"] == n
    assert net.calls == 0
    assert counter.frame_count == 1
