"""Many sets of weights at once: maps and derivatives of a swap, eager and compiled."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call, grad, jacrev, jvp, vmap
from zoo import DTYPE, changed, exact, make, same, weights_of

from tdnn import TensorDict
from tdnn.nn import EnsembleModule, TensorDictModule

KINDS = ["linear", "conv", "group norm", "layer norm", "embedding", "tied", "sparse", "attention"]
# Torch does not compile RNNs, as of 2.14.
COMPILED = [
    "linear",
    "conv",
    "batch norm",
    "group norm",
    "transformer layer",
    "embedding",
    "weight norm",
    "lists and dicts",
    "tied",
    "two names",
    "sparse",
    "wrapped",
    "gru cell",
    "resnet",
    "caching",
    "attention",
    "spectral norm",
]


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def call(net):
    """A function (weights, x) that runs the net on the weights."""

    def run(weights, x):
        with weights.to_module(net):
            return net(x)

    return run


def named(tree):
    return {
        ".".join(key) if isinstance(key, tuple) else key: leaf
        for key, leaf in tree.items(True, True)
    }


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(DTYPE)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# -- maps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_module", [False, True])
def test_a_map_over_weights_is_a_loop_over_nets(kind, as_module):
    net, x = make(kind)
    nets = [changed(net, seed) for seed in range(3)]
    params = TensorDict.from_modules(*nets, as_module=as_module)
    before = exact(net)
    found = vmap(call(net), (0, None))(params, x)
    wanted = torch.stack([one(x) for one in nets])
    close(found, wanted)
    found.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    for key, leaf in params.items(True, True):
        own = [TensorDict.from_module(one)[key] for one in nets]
        if own[0].grad is not None:
            close(leaf.grad, torch.stack([tensor.grad for tensor in own]))
    assert same(before, exact(net))


def test_a_map_needs_no_memory_in_the_net_that_it_runs():
    nets = [mlp() for _ in range(3)]
    shell, x = mlp().to("meta"), torch.randn(5, 4, dtype=DTYPE)
    before = exact(shell)
    close(
        vmap(call(shell), (0, None))(TensorDict.from_modules(*nets), x),
        torch.stack([one(x) for one in nets]),
    )
    assert same(before, exact(shell))


@pytest.mark.parametrize(("in_dims", "out_dim"), [((0, 0), 0), ((0, 1), 0), ((0, 0), 1)])
def test_each_set_of_weights_may_have_its_own_input(in_dims, out_dim):
    nets = [mlp() for _ in range(3)]
    xs = torch.randn(3, 5, 4, dtype=DTYPE)
    wanted = torch.stack([net(x) for net, x in zip(nets, xs, strict=True)])
    params = TensorDict.from_modules(*nets)
    found = vmap(call(mlp()), in_dims, out_dim)(params, xs.movedim(0, in_dims[1]))
    close(found, wanted.movedim(0, out_dim))


def test_maps_nest():
    nets = [[mlp() for _ in range(2)] for _ in range(3)]
    params = torch.stack([TensorDict.from_modules(*row).data for row in nets])
    xs = torch.randn(6, 4, dtype=DTYPE)
    run = call(mlp())
    found = vmap(vmap(vmap(run, (None, 0)), (0, None)), (0, None))(params, xs)
    wanted = torch.stack([torch.stack([net(xs) for net in row]) for row in nets])
    close(found, wanted)


def test_statistics_stay_with_their_member():
    nets = [nn.BatchNorm1d(4).to(DTYPE) for _ in range(3)]
    net = nn.BatchNorm1d(4).to(DTYPE)
    params, before = TensorDict.from_modules(*nets), exact(net)
    xs = torch.randn(3, 8, 4, dtype=DTYPE)
    found = vmap(call(net))(params, xs)
    close(found, torch.stack([one(x) for one, x in zip(nets, xs, strict=True)]))
    close(params["running_var"], torch.stack([one.running_var for one in nets]))
    assert params["num_batches_tracked"].tolist() == [1, 1, 1]
    assert same(before, exact(net))


def test_an_exception_in_a_map_gives_everything_back():
    net = mlp()
    params, before = TensorDict.from_modules(mlp(), mlp()), exact(net)
    with pytest.raises(RuntimeError):
        vmap(call(net), (0, None))(params, torch.randn(7, 9, dtype=DTYPE))
    assert same(before, exact(net))


# -- derivatives -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_derivative_of_a_swap_is_that_of_a_functional_call(kind):
    net, x = make(kind)
    params = TensorDict.from_module(changed(net)).data
    before = exact(net)
    if kind == "sparse":
        params = params.select("scale", "inner")

    def loss(weights):
        return call(net)(weights, x).pow(2).mean()

    found = grad(loss)(params)
    ties = {id(leaf): leaf.clone().requires_grad_() for leaf in params.values(True, True)}
    twins = {name: ties[id(leaf)] for name, leaf in named(params).items()}
    functional_call(net, twins, x, tie_weights=False).pow(2).mean().backward()
    total = named(found)
    for leaf in ties.values():
        parts = [total[other] for other, twin in twins.items() if twin is leaf]
        close(sum(parts), leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
    assert type(found) is TensorDict
    assert same(before, exact(net))


# torch scripts some derivatives when forward mode is first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_jacobians_and_directional_derivatives():
    net, x = mlp(), torch.randn(4, dtype=DTYPE)
    params = TensorDict.from_module(net).data.clone()
    run = call(net)
    jacobian = jacrev(run)(params, x)
    wanted = jacrev(lambda weights: functional_call(net, weights, x))(named(params))
    assert named(jacobian).keys() == wanted.keys()
    for name, tensor in named(jacobian).items():
        close(tensor, wanted[name])
    direction = params.apply(torch.randn_like)
    _, found = jvp(lambda weights: run(weights, x), (params,), (direction,))
    _, other = jvp(
        lambda weights: functional_call(net, weights, x), (named(params),), (named(direction),)
    )
    close(found, other)


def test_gradients_of_each_sample():
    net = mlp()
    params = TensorDict.from_module(net).data
    xs = torch.randn(5, 4, dtype=DTYPE)

    def loss(weights, x):
        return call(net)(weights, x).pow(2).sum()

    found = vmap(grad(loss), (None, 0))(params, xs)
    assert found["0", "weight"].shape == (5, 8, 4)
    for n, x in enumerate(xs):
        net.zero_grad()
        net(x).pow(2).sum().backward()
        for name, parameter in net.named_parameters():
            close(named(found)[name][n], parameter.grad)


def test_a_step_inside_a_derivative_differentiates_through():
    net = mlp()
    params = TensorDict.from_module(net).data.clone()
    x = torch.randn(5, 4, dtype=DTYPE)

    def loss(weights):
        return call(net)(weights, x).pow(2).mean()

    def after(weights):
        return loss(weights - 0.1 * grad(loss)(weights))

    def plain(weights):
        def value(weights):
            return functional_call(net, weights, x).pow(2).mean()

        steps = grad(value)(weights)
        return value({name: leaf - 0.1 * steps[name] for name, leaf in weights.items()})

    found, wanted = grad(after)(params), grad(plain)(named(params))
    for name, tensor in named(found).items():
        close(tensor, wanted[name])


def test_an_average_of_weights_can_be_kept_and_run():
    net = mlp()
    average = TensorDict.from_module(net).data.clone()
    x = torch.randn(5, 4, dtype=DTYPE)
    wanted = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        optimizer.step()
        average.lerp_(TensorDict.from_module(net).data, 0.1)
        wanted = {name: wanted[name].lerp(p.detach(), 0.1) for name, p in net.named_parameters()}
    with average.to_module(net):
        found = net(x)
    close(found, functional_call(net, wanted, x))
    assert not found.requires_grad


# -- compiled ----------------------------------------------------------------------------------


def compiled(fn, backend="eager"):
    """Return ``fn`` compiled as a whole, and the counter of its compilations."""
    counter = CompileCounter() if backend == "eager" else None
    return torch.compile(fn, backend=counter or backend, fullgraph=True), counter


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.usefixtures("fresh")
def test_a_compiled_swap_is_the_eager_one(kind, training):
    net, x = make(kind, training)
    twins = [changed(net, seed) for seed in range(3)]
    before = exact(net)
    run, counter = compiled(call(net))
    for twin in twins:
        nn.Linear(2, 2)  # another module registers names, which is no reason to compile again
        params = weights_of(twin)
        found, wanted = run(params, x), twin(x)
        close(found, wanted)
        found.pow(2).sum().backward()
        wanted.pow(2).sum().backward()
        for name, leaf in TensorDict.from_module(twin).items(True, True):
            close(params[name], leaf)
            if leaf.grad is not None:
                close(params[name].grad, leaf.grad)
        assert same(before, exact(net))
    assert counter.frame_count == 1


class Rebinding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x + self.calls


@pytest.mark.usefixtures("fresh")
def test_a_buffer_that_is_rebound_in_a_compiled_swap_goes_into_the_tree():
    net = Rebinding()
    own, params = net.calls, TensorDict({"calls": torch.zeros(())})
    run, counter = compiled(call(net))
    for n in range(1, 4):
        assert run(params, torch.zeros(())) == n
        assert params["calls"] == n
        assert net.calls is own
        assert own == 0
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh")
def test_a_kept_swap_can_be_entered_again_in_a_compiled_function():
    net, x = nn.Linear(4, 4).to(DTYPE), torch.randn(4, dtype=DTYPE)
    before = exact(net)

    def twice(weights, x):
        swap = weights.to_module(net)
        with swap:
            x = net(x)
        weights["weight"] = weights["weight"] * 2
        with swap, swap:
            return net(x)

    run, counter = compiled(twice)
    for seed in range(3):
        one, two = (weights_of(changed(net, seed)) for _ in range(2))
        close(run(one, x), twice(two, x))
        close(one["weight"], two["weight"])
        assert same(before, exact(net))
    assert counter.frame_count == 1


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.usefixtures("fresh")
def test_a_compiled_map_is_a_loop(as_module):
    nets, x = [mlp() for _ in range(3)], torch.randn(5, 4, dtype=DTYPE)
    shell = mlp().to("meta")
    params = TensorDict.from_modules(*nets, as_module=as_module)
    run, counter = compiled(vmap(call(shell), (0, None)))
    for _ in range(3):
        found, wanted = run(params, x), torch.stack([net(x) for net in nets])
        close(found, wanted)
    found.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    close(params["0", "weight"].grad, torch.stack([net[0].weight.grad for net in nets]))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh")
def test_a_compiled_derivative_is_the_eager_one():
    net, x = mlp(), torch.randn(5, 4, dtype=DTYPE)

    def step(weights, x):
        gradient = grad(lambda weights: call(net)(weights, x).pow(2).mean())(weights)
        return weights - 0.1 * gradient

    run, counter = compiled(step)
    for seed in range(3):
        params = TensorDict.from_module(changed(net, seed)).data
        found, wanted = run(params, x), step(params, x)
        assert type(found) is TensorDict
        for name, tensor in named(found).items():
            close(tensor, named(wanted)[name])
    assert counter.frame_count == 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.usefixtures("fresh")
def test_a_compiled_ensemble_is_the_eager_one(training):
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).to(DTYPE)
    members = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), 3).train(training)
    twin = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), 3).train(training)
    twin.load_state_dict(members.state_dict())
    run, counter = compiled(members)
    for seed in range(3):
        torch.manual_seed(seed)
        td = TensorDict({"x": torch.randn(5, 4, dtype=DTYPE)}, [5])
        found, wanted = run(td.copy()), twin(td.copy())
        assert found.batch_size == wanted.batch_size == (3, 5)
        close(found["y"], wanted["y"])
    found["y"].pow(2).sum().backward()
    wanted["y"].pow(2).sum().backward()
    for leaf, other in zip(members.parameters(), twin.parameters(), strict=True):
        close(leaf.grad, other.grad)
    for leaf, other in zip(members.buffers(), twin.buffers(), strict=True):
        close(leaf, other)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh")
def test_inductor_runs_a_swap_and_a_map_of_it():
    nets, x = [mlp() for _ in range(2)], torch.randn(5, 4, dtype=DTYPE)
    shell = mlp()
    before = exact(shell)
    one, _ = compiled(call(shell), "inductor")
    many, _ = compiled(vmap(call(shell), (0, None)), "inductor")
    params = TensorDict.from_modules(*nets)
    for _ in range(2):
        close(one(weights_of(nets[0]), x), nets[0](x))
        close(many(params, x), torch.stack([net(x) for net in nets]))
    many(params, x).pow(2).sum().backward()
    torch.stack([net(x) for net in nets]).pow(2).sum().backward()
    close(params["2", "bias"].grad, torch.stack([net[2].bias.grad for net in nets]))
    assert same(before, exact(shell))


@pytest.mark.usefixtures("fresh")
def test_a_module_that_swaps_can_be_exported():
    class Runs(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = TensorDict.from_module(mlp(), as_module=True)
            self.__dict__["shell"] = mlp().to("meta")

        def forward(self, x):
            with self.weights.to_module(self.shell):
                return self.shell(x)

    module, x = Runs(), torch.randn(5, 4, dtype=DTYPE)
    exported = torch.export.export(module, (x,))
    close(exported.module()(x), module(x))
    assert set(exported.state_dict) == set(module.state_dict())
