"""Wrap a model: every kind of module, in chains, called with trees and tensors, transformed."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from zoo import KINDS, make, values

from tdnn import TensorDict
from tdnn.errors import MissingKeyError
from tdnn.nn import TensorDictModule, TensorDictSequential, WrapModule

DTYPE = torch.float64
EVERY = pytest.mark.parametrize("kind", KINDS)


def assert_alike(one, other):
    """The same parameters, buffers and gradients, to the last bit."""
    assert all(map(torch.equal, values(one), values(other)))
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, msg=name)


def squared(out):
    return out.pow(2).sum()


# -- every kind of module ------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("call", ["tree", "position", "name"])
def test_a_wrapped_module_gives_what_the_module_gives(kind, call):
    net, x = make(kind)
    plain = copy.deepcopy(net)
    module = TensorDictModule(net, in_keys=[("in", "x")], out_keys=[("out", "y")])
    if call == "tree":
        found = module(TensorDict({"in": {"x": x}}, x.shape[:1]))["out", "y"]
    else:
        found = module(x) if call == "position" else module(in_x=x)
    wanted = plain(x)
    assert torch.equal(found, wanted)
    squared(found).backward()
    squared(wanted).backward()
    assert_alike(net, plain)


@EVERY
def test_a_chain_of_every_kind_survives_copies_with_its_weights(kind):
    net, x = make(kind, training=False)
    seq = TensorDictSequential(
        {"net": TensorDictModule(net, ["x"], ["y"]), "act": WrapModule(tanh)}
    )
    twins = [copy.deepcopy(seq)]
    if kind not in NO_PICKLE:
        twins.append(pickle.loads(pickle.dumps(seq)))
    if kind not in NOT_ALL_IN_STATE:
        other = TensorDictModule(make(kind, training=False, seed=3)[0], ["x"], ["y"])
        twins.append(TensorDictSequential({"net": other}))
        twins[-1].load_state_dict(seq.state_dict())
    wanted = net(x)
    for twin in twins:
        assert torch.equal(twin(TensorDict({"x": x}))["y"], wanted)


NO_PICKLE = {"compiled", "weight norm", "spectral norm", "orthogonal"}  # torch refuses these itself


NOT_ALL_IN_STATE = {"sparse"}  # it has a buffer that is not saved


def tanh(td):
    return td.set("z", td["y"].tanh())


@pytest.mark.parametrize("kind", ["linear", "conv", "batch norm", "attention", "embedding"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_compiled_wrapper_gives_what_the_module_gives(kind, training):
    torch._dynamo.reset()
    net, x = make(kind, training)
    plain = copy.deepcopy(net)
    module = TensorDictModule(net, ["x"], ["y"])
    found = torch.compile(module, backend="eager", fullgraph=True)(TensorDict({"x": x}))["y"]
    wanted = plain(x)
    torch.testing.assert_close(found, wanted)
    squared(found).backward()
    squared(wanted).backward()
    torch.testing.assert_close(values(net), values(plain))


# -- TorchScript ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, scale: float = 1.0):
        return scale * self.layer(x)

    @torch.jit.export
    def both(self, x):
        return self.layer(x), x


def through_a_file(scripted):
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("make_copy", [lambda scripted: scripted, through_a_file])
def test_a_scripted_module_is_wrapped_like_any_other(make_copy):
    net, x = Scaled(), torch.randn(2, 4)
    scripted = make_copy(torch.jit.script(net))
    td = TensorDict({"x": x}, [2])
    both = TensorDictModule(scripted, ["x"], ["y", ("n", "x")], method="both")
    module = TensorDictModule(scripted, "x", "y")
    assert torch.equal(module(td.copy())["y"], net(x))
    assert torch.equal(module(x), net(x))
    assert torch.equal(module(td.copy(), scale=2.0)["y"], 2 * net(x))
    assert torch.equal(both(td.copy())["y"], net(x))
    assert torch.equal(both(td.copy())["n", "x"], x)
    assert module.state_dict().keys() == {"module.layer.weight", "module.layer.bias"}
    module(x).sum().backward()
    assert module.layer.weight.grad.any()
    module.load_state_dict({name: torch.zeros_like(v) for name, v in module.state_dict().items()})
    assert not module(x).any()
    with pytest.raises(RuntimeError) as caught:
        module(torch.randn(2, 7))
    assert caught.value.__notes__ == ["TensorDictModule(scripted Scaled) read 'x' float32 (2, 7)"]
    with pytest.raises(TypeError, match=r"scripted Scaled has no 'boht' \(did you mean 'both'\?\)"):
        TensorDictModule(scripted, "x", "y", method="boht")
    with pytest.raises(ValueError, match=r"^TensorDictModule\(scripted Scaled\) returned"):
        TensorDictModule(scripted, "x", ["y", "z"])(td)
    assert module.double().eval()(x.double()).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_functions_are_wrapped_and_wrappers_are_traced():
    module = TensorDictModule(torch.jit.trace(plus_one, torch.ones(2)), "x", "y")
    x = torch.randn(2)
    assert torch.equal(module(x), x + 1)
    assert repr(module) == (
        "TensorDictModule(module=scripted plus_one, in_keys=['x'], out_keys=['y'])"
    )
    net, x = nn.Linear(4, 3), torch.randn(2, 4)
    traced = torch.jit.trace(TensorDictModule(net, "x", "y"), torch.randn(5, 4))
    assert torch.equal(traced(x), net(x))
    assert torch.equal(TensorDictModule(traced, "x", "y")(x), net(x))


def plus_one(x):
    return x + 1


# -- a chain, eager and compiled -----------------------------------------------------------------


def policy(**options):
    """A chain with nested keys, a dropped output, inputs by name, and a chain inside."""
    torch.manual_seed(1)
    body = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), [("obs", "x")], [("h", "a")]),
        TensorDictModule(nn.Tanh(), [("h", "a")], [("h", "b")]),
    )
    return TensorDictSequential(
        {
            "body": body,
            "fork": TensorDictModule(lambda b: b.chunk(2, -1), [("h", "b")], ["loc", "scale"]),
            "look": TensorDictModule(
                nn.MultiheadAttention(2, 1, batch_first=True),
                {"query": "loc", "key": "loc", "value": "loc"},
                ["seen", "_"],
            ),
            "head": TensorDictModule(
                lambda *, mean, by: mean * by.exp(), {"by": "scale", "mean": "seen"}, ["act"]
            ),
        },
        **options,
    ).to(DTYPE)


def act(chain, x):
    """What ``policy`` computes, in plain torch."""
    first, look = chain["body"][0].module, chain["look"].module
    loc, scale = first(x).tanh().chunk(2, -1)
    return look(loc, loc, loc)[0] * scale.exp()


def observation(*batch):
    return torch.randn(*batch, 3, dtype=DTYPE)


def in_tree(chain, x):
    return chain(TensorDict({"obs": {"x": x}}, x.shape[:-1]))["act"]


def by_position(chain, x):
    return chain(x)[-1]


def by_name(chain, x):
    return chain(obs_x=x)[-1]


def selected(chain, x):
    chain = chain.select_out_keys("act")
    return chain(x)


def cut(chain, x):
    return chain.select_subsequence(out_keys=["act"])(x)[-1]


WAYS = [in_tree, by_position, by_name, selected, cut]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"inplace": "empty"}, {"partial_tolerant": True}])
def test_a_chain_gives_what_plain_torch_gives(way, options):
    chain, x = policy(**options), observation(5, 6)
    assert chain.in_keys == [("obs", "x")]
    twin = copy.deepcopy(chain)
    found, wanted = way(chain, x), act(twin, x)
    assert torch.equal(found, wanted)
    squared(found).backward()
    squared(wanted).backward()
    assert_alike(chain, twin)


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("options", [{}, {"inplace": "empty"}, {"selected_out_keys": ["act"]}])
def test_a_chain_is_compiled_once(way, options):
    torch._dynamo.reset()
    chain, counter = policy(**options), CompileCounter()
    if options.get("selected_out_keys"):
        way = {in_tree: in_tree}.get(way, lambda chain, x: chain(x))
    twin = copy.deepcopy(chain)
    compiled = torch.compile(way, backend=counter, fullgraph=True)
    for _ in range(3):
        x = observation(5, 6)
        found, wanted = compiled(chain, x), act(twin, x)
        torch.testing.assert_close(found, wanted)
        squared(found).backward()
        squared(wanted).backward()
    assert counter.frame_count == 1
    torch.testing.assert_close(
        [p.grad for p in chain.parameters()], [p.grad for p in twin.parameters()]
    )


def test_a_chain_is_compiled_by_inductor_once():
    torch._dynamo.reset()
    chain, counter = policy(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(chain, backend=counter, fullgraph=True)
    for _ in range(3):
        x = observation(5, 6)
        td = TensorDict({"obs": {"x": x}}, [5, 6])
        assert compiled(td) is td
        torch.testing.assert_close(td["act"], act(chain, x))
    assert counter.frame_count == 1
    squared(td["act"]).backward()
    assert all(p.grad is not None for p in chain.parameters())


def test_dispatch_is_compiled_by_inductor_once():
    torch._dynamo.reset()
    chain, counter = policy(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(chain, backend=counter, fullgraph=True)
    for _ in range(3):
        x = observation(5, 6)
        torch.testing.assert_close(compiled(obs_x=x)[-1], act(chain, x))
    assert counter.frame_count == 1


def test_keys_that_change_are_seen_by_a_compiled_chain():
    torch._dynamo.reset()
    chain = policy()
    compiled = torch.compile(lambda x: chain(x)[-1], backend="eager", fullgraph=True)
    x = observation(5, 6)
    torch.testing.assert_close(compiled(x), act(chain, x))
    chain["head"] = TensorDictModule(lambda seen: -seen, ["seen"], ["neg"])
    torch.testing.assert_close(compiled(x), chain(x)[-1])
    assert chain.out_keys[-1] == "neg"
    chain["head"].in_keys = ["scale"]
    torch.testing.assert_close(compiled(x), chain(x)[-1])


def test_an_input_that_may_be_missing_compiles():
    torch._dynamo.reset()
    module = TensorDictModule(
        lambda x, mask: x + 1 if mask is None else x * mask, ["x", "mask"], ["y"], strict=False
    )
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    x = observation(5)
    for td in (TensorDict({"x": x}), TensorDict({"x": x, "mask": x})):
        assert torch.equal(compiled(td.copy())["y"], module(td)["y"])


def test_a_compiled_chain_raises_what_the_chain_raises():
    torch._dynamo.reset()
    compiled = torch.compile(policy(), backend="eager")
    match = r"step 0 \('body'\) of TensorDictSequential: step 0 of .*missing is \('obs', 'x'\)"
    with pytest.raises(MissingKeyError, match=match):
        compiled(TensorDict({"obs": {"y": observation(5)}}))


# -- training ------------------------------------------------------------------------------------


def test_training_a_chain_is_training_the_nets():
    chain = policy()
    twin = copy.deepcopy(chain)
    one, other = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (chain, twin))
    for _ in range(5):
        x = observation(4, 6)
        for optimizer, loss in ((one, squared(chain(x)[-1])), (other, squared(act(twin, x)))):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_alike(chain, twin)


def test_a_chain_runs_on_other_weights():
    chain, x = policy(), observation(5, 6)
    other = copy.deepcopy(chain)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    params = TensorDict.from_module(other).detach()
    with params.to_module(chain):
        found = chain(x)[-1]
        torch.testing.assert_close(torch.vmap(lambda x: chain(x)[-1])(x), found)
    # Weights that need no gradient take another kernel on some CPUs: equal, but for rounding.
    torch.testing.assert_close(found, act(other, x).detach())
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, chain(x)[-1].detach())
    called = torch.func.functional_call(chain, other.state_dict(), (x,))[-1]
    torch.testing.assert_close(called.detach(), found)


# -- many at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dim", [0, 1, -1])
@pytest.mark.parametrize("out_dim", [0, 1])
def test_a_module_is_mapped_over_any_dim(in_dim, out_dim):
    module = TensorDictModule(lambda a: a.cumsum(0), in_keys=["a"], out_keys=["b"])
    a = torch.randn(5, 3)
    found = torch.vmap(module, in_dim, out_dim)(TensorDict({"a": a}, [5, 3]))
    wanted = torch.stack([column.cumsum(0) for column in a.unbind(in_dim)], out_dim)
    torch.testing.assert_close(found["b"], wanted)
    assert found.batch_size == found["b"].shape == found["a"].shape


@pytest.mark.parametrize("depth", [1, 2])
def test_a_chain_is_mapped_over_trees_and_tensors(depth):
    chain, x = policy(), observation(2, 4, 6)
    mapped, called = chain, chain
    for _ in range(depth):
        mapped, called = torch.vmap(mapped), torch.vmap(called)
    batch = x.shape[:depth]
    found = mapped(TensorDict({"obs": {"x": x}}, batch))
    assert found.batch_size == batch
    torch.testing.assert_close(found["act"], act(chain, x.flatten(0, 1)).view_as(found["act"]))
    torch.testing.assert_close(called(x)[-1], found["act"])


def test_gradients_of_a_chain_by_torch_func():
    chain, x = policy(), observation(4, 6)
    params = TensorDict.from_module(chain).detach()

    def loss(params, x):
        with params.to_module(chain):
            return squared(chain(x)[-1])

    grads = torch.func.grad(loss)(params, x)
    loss(TensorDict.from_module(chain), x).backward()
    for name, p in chain.named_parameters():
        torch.testing.assert_close(grads[tuple(name.split("."))], p.grad)
    each = torch.vmap(torch.func.grad(loss), (None, 0))(params, x.unsqueeze(1))
    summed = each["module", "body"].apply(lambda g: g.sum(0), batch_size=[])
    for name, p in chain["body"].named_parameters():
        torch.testing.assert_close(summed[tuple(name.split("."))], p.grad)


# -- export --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("way", ["position", "name"])
def test_a_chain_is_exported_with_its_weights(way, strict):
    chain, x = policy(), observation(5, 6)
    args, kwargs = ((x,), {}) if way == "position" else ((), {"obs_x": x})
    program = torch.export.export(chain, args, kwargs, strict=strict)
    assert set(program.state_dict) == set(chain.state_dict())
    y = observation(5, 6)
    found = program.module()(*((y,) if args else ()), **({"obs_x": y} if kwargs else {}))
    torch.testing.assert_close(found[-1], act(chain, y))


def test_a_chain_is_exported_for_any_batch():
    chain = policy()
    free = {"tensordict": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(chain, (observation(5, 6),), dynamic_shapes=free)
    x = observation(8, 6)
    torch.testing.assert_close(program.module()(x)[-1], act(chain, x))


def test_a_chain_is_exported_with_a_tree_as_input():
    chain, x = policy(), observation(5, 6)
    program = torch.export.export(chain, (TensorDict({"obs": {"x": x}}, [5, 6]),))
    y = observation(5, 6)
    found = program.module()(TensorDict({"obs": {"x": y}}, [5, 6]))
    torch.testing.assert_close(found["act"], act(chain, y))
