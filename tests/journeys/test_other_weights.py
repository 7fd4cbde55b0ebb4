"""Run a model on other weights, for every kind of module: the same as a copy that holds them."""

import copy

import pytest
import torch
from torch import nn
from zoo import KINDS, LAZY, changed, equal, exact, make, same, values, weights_of

from tdnn import TensorDict

BOTH = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
EVERY = pytest.mark.parametrize("kind", KINDS)


def every_but(*kinds):
    return pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in kinds])


# Their __setattr__ keeps what is set elsewhere as well.
CACHING = ["caching", "lstm", "projected lstm", "gru", "rnn"]


def leaves(tree):
    return list(tree.values(True, True))


def stop(net, x, error):
    net(x)
    raise error


def grads(tree):
    """The gradients of a tree's leaves by name; a leaf under two names counts once for each."""
    return {key: leaf.grad for key, leaf in tree.items(True, True)}


def assert_same_tensors(one, other):
    assert set(one) == set(other)
    for key, tensor in one.items():
        if tensor is None:
            assert other[key] is None, key
        else:
            torch.testing.assert_close(tensor, other[key], rtol=1e-9, atol=1e-9, msg=str(key))


@EVERY
@BOTH
def test_a_swapped_net_is_a_copy_that_holds_the_weights(kind, training):
    net, x = make(kind, training)
    twin = changed(net)
    params = weights_of(twin)
    before, held = exact(net), values(net)

    wanted = twin(x)
    with params.to_module(net):
        found = net(x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    wanted.pow(2).sum().backward()
    found.pow(2).sum().backward()

    theirs = TensorDict.from_module(twin)
    assert_same_tensors(grads(params), grads(theirs))
    # What the forward changed in the copy (statistics, power iterations) it changed in the tree.
    assert_same_tensors(dict(params.items(True, True)), dict(theirs.items(True, True)))
    assert same(before, exact(net))
    assert equal(held, values(net))
    assert all(p.grad is None for p in net.parameters())


@every_but("embedding", "embedding bag")  # integers have no gradient
@BOTH
def test_swapped_inputs_get_their_gradient(kind, training):
    net, x = make(kind, training)
    twin = changed(net)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with weights_of(twin).to_module(net):
        net(mine).pow(3).sum().backward()
    twin(theirs).pow(3).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@EVERY
@BOTH
def test_a_kept_swap_serves_again_after_the_leaves_were_replaced(kind, training):
    net, x = make(kind, training)
    one, two = changed(net, 1), changed(net, 2)
    params = weights_of(one)
    before = exact(net)
    swap = params.to_module(net)
    with swap:
        torch.testing.assert_close(net(x), one(x))
    params.update(weights_of(two))
    with swap:
        torch.testing.assert_close(net(x), two(x))
        with swap:
            torch.testing.assert_close(net(x), two(x))
    assert same(before, exact(net))


@EVERY
def test_swaps_nest(kind):
    net, x = make(kind, training=False)
    one, two = changed(net, 1), changed(net, 2)
    with weights_of(one).to_module(net):
        inside = exact(net)
        with weights_of(two).to_module(net):
            torch.testing.assert_close(net(x), two(x))
        assert same(inside, exact(net))
        torch.testing.assert_close(net(x), one(x))
    torch.testing.assert_close(net(x), make(kind, training=False)[0](x))


@EVERY
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_in_the_block_gives_everything_back(kind, error):
    net, x = make(kind)
    params = weights_of(changed(net))
    held, entries = exact(net), dict(params.items(True))
    with pytest.raises(error), params.to_module(net):
        stop(net, x, error)
    assert same(held, exact(net))
    assert all(params[key] is value for key, value in entries.items())
    assert list(entries) == list(params.keys(True))


@EVERY
@BOTH
def test_weights_that_are_loaded_to_stay_can_be_trained(kind, training):
    net, x = make(kind, training)
    twin = changed(net)
    params = TensorDict.from_module(twin).data.clone()
    named, flags = list(net.state_dict()), [p.requires_grad for p in net.parameters()]
    params.to_module(net)
    assert list(net.state_dict()) == named
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    assert [p.requires_grad for p in net.parameters()] == flags

    for module in (net, twin):
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
        for _ in range(2):
            optimizer.zero_grad()
            module(x).pow(2).mean().backward()
            optimizer.step()
    theirs = dict(twin.named_parameters())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter, theirs[name])
    torch.testing.assert_close(net(x), twin(x))


@EVERY
def test_values_can_be_copied_into_the_modules_own_tensors(kind):
    net, x = make(kind, training=False)
    twin = changed(net)
    params = weights_of(twin)
    before, held = exact(net), values(net)
    with params.to_module(net, inplace=True):
        torch.testing.assert_close(net(x), twin(x))
        assert same(before, exact(net))
    assert same(before, exact(net))
    assert equal(held, values(net))
    params.to_module(net, inplace=True)
    torch.testing.assert_close(net(x), twin(x))
    assert same(before, exact(net))


@every_but("caching")  # load_state_dict does not tell it, either
def test_values_can_go_through_the_state_dict(kind):
    net, x = make(kind, training=False)
    twin = changed(net)
    params = TensorDict.from_module(twin, use_state_dict=True).data.clone()
    before, held = exact(net), values(net)
    rest = dict(net.named_buffers()).keys() - net.state_dict().keys()
    for name in rest:
        twin.get_buffer(name).copy_(net.get_buffer(name))  # not in a state dict
    with params.to_module(net, use_state_dict=True):
        torch.testing.assert_close(net(x), twin(x))
    assert same(before, exact(net))
    assert equal(held, values(net))


@every_but(*CACHING)  # functional_call does not tell them
@BOTH
def test_a_swap_is_a_functional_call(kind, training):
    net, x = make(kind, training)
    params, twins = weights_of(changed(net)), weights_of(changed(net))
    names = {
        ".".join(key if isinstance(key, tuple) else (key,)): v for key, v in twins.items(True, True)
    }
    wanted = torch.func.functional_call(net, names, x)
    with params.to_module(net):
        found = net(x)
    torch.testing.assert_close(found, wanted)


@EVERY
def test_copies_of_the_swapped_net_hold_the_weights(kind):
    net, x = make(kind, training=False)
    twin = changed(net)
    with TensorDict.from_module(twin).data.clone().to_module(net):
        copied = copy.deepcopy(net)
    torch.testing.assert_close(copied(x), twin(x))


# -- modules that are not initialised yet ------------------------------------------------------


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_runs_on_real_weights_and_stays_lazy(kind):
    net, x = make(kind)
    twin, _ = make(kind)  # torch cannot copy all modules that are not initialised
    twin(x)
    twin = changed(twin)
    params = weights_of(twin)
    before = exact(net)
    for _ in range(2):
        with params.to_module(net):
            found = net(x)
        assert same(before, exact(net))
        torch.testing.assert_close(found, twin(x))
    assert all(map(nn.parameter.is_lazy, net.parameters()))
    net(x)
    assert not any(map(nn.parameter.is_lazy, [*net.parameters(), *net.buffers()]))
    assert [type(m) for m in net.modules()] == [type(m) for m in twin.modules()]
    with params.to_module(net):
        torch.testing.assert_close(net(x), twin(x))


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_can_take_weights_for_good(kind):
    net, x = make(kind)
    twin, _ = make(kind)  # torch cannot copy all modules that are not initialised
    twin(x)
    twin = changed(twin)
    TensorDict.from_module(twin).data.clone().to_module(net)
    torch.testing.assert_close(net(x), twin(x))
    assert [type(m) for m in net.modules()] == [type(m) for m in twin.modules()]


# -- gradients that flow on --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv", "attention", "tied", "weight norm", "sparse"])
def test_a_step_of_gradient_descent_can_be_differentiated(kind):
    """The inner step of MAML: gradients go through the new weights to the old ones."""
    net, x = make(kind)
    start = weights_of(changed(net))

    def loss(tree):
        with tree.to_module(net):
            return net(x).pow(2).mean()

    trained = [leaf for leaf in dict.fromkeys(leaves(start)) if leaf.requires_grad]
    steps = torch.autograd.grad(loss(start), trained, create_graph=True, allow_unused=True)
    moved = dict(zip(trained, steps, strict=True))
    after = start.apply(lambda leaf: leaf if moved.get(leaf) is None else leaf - 0.1 * moved[leaf])
    found = torch.autograd.grad(loss(after), trained, allow_unused=True)

    names = {".".join(k if isinstance(k, tuple) else (k,)): v for k, v in start.items(True, True)}
    first = torch.func.functional_call(net, names, x).pow(2).mean()
    steps = torch.autograd.grad(first, trained, create_graph=True, allow_unused=True)
    moved = dict(zip(trained, steps, strict=True))
    after = {v: v if moved.get(v) is None else v - 0.1 * moved[v] for v in names.values()}
    names = {key: after[leaf] for key, leaf in names.items()}
    second = torch.func.functional_call(net, names, x).pow(2).mean()
    wanted = torch.autograd.grad(second, trained, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
