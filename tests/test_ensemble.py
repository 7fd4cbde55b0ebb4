"""Members of an ensemble are what separate nets would be, in a loop."""

import copy
import functools
import gc
import io
import pickle
import warnings
from itertools import product

import pytest
import torch
import zoo
from members import COPIES, Rebinding, batch_normed, draw, mlp, nets_of, wrapped
from torch import nn
from zoo import DTYPE, changed, make

from tdnn import TensorDict, TensorDictParams
from tdnn.nn import EnsembleModule, TensorDictModule, TensorDictSequential

# What torch.vmap cannot map, as of torch 2.14: a tensor read as a number, and a write in place
# of a power iteration.
NOT_MAPPED = ["batch norm without momentum", "spectral norm"]
WAYS = [
    pytest.param(kind, training, vectorize, id=f"{kind}-{training * 'train' or 'eval'}-{vectorize}")
    for kind, training, vectorize in product(zoo.KINDS, [True, False], [True, False])
    if kind != "resnet"  # is slow, and made of other kinds
    and not (kind in NOT_MAPPED and training and vectorize)
]


@functools.cache
def scripted_linear():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(nn.Linear(4, 2))


# -- equal to a loop ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "training", "vectorize"), WAYS)
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop",
    "ignore:An output with one or",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # dynamo reads it
)
def test_members_are_separate_nets_in_a_loop(kind, training, vectorize):
    net, x = make(kind, training)
    net = changed(net)
    ensemble = EnsembleModule(net, COPIES, parameter_init_function=draw, vectorize=vectorize)
    nets = nets_of(ensemble, net)

    found = ensemble(x)
    wanted = torch.stack([net(x) for net in nets])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    found.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    stacked = TensorDict.from_modules(*nets)
    assert ensemble.params_td.keys(True, True) == stacked.keys(True, True)
    for key, leaf in ensemble.params_td.items(True, True):
        torch.testing.assert_close(leaf, stacked[key], rtol=1e-6, atol=1e-6)
        one_of_each = [TensorDict.from_module(net)[key] for net in nets]
        if one_of_each[0].grad is not None:
            grads = torch.stack([leaf.grad for leaf in one_of_each])
            torch.testing.assert_close(leaf.grad, grads, rtol=1e-6, atol=1e-6)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_members_train_as_separate_nets_do(optimizer):
    net, x = mlp(), torch.randn(5, 4, dtype=DTYPE)
    ensemble = EnsembleModule(net, COPIES)
    nets = nets_of(ensemble, net)
    mine = optimizer(ensemble.parameters(), lr=0.05)
    theirs = [optimizer(net.parameters(), lr=0.05) for net in nets]
    for _ in range(3):
        mine.zero_grad()
        ensemble(x).pow(2).mean((1, 2)).sum().backward()
        mine.step()
        for net, step in zip(nets, theirs, strict=True):
            step.zero_grad()
            net(x).pow(2).mean().backward()
            step.step()
    torch.testing.assert_close(ensemble(x), torch.stack([net(x) for net in nets]))


def test_each_member_keeps_its_own_statistics():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(DTYPE)
    ensemble = EnsembleModule(net, COPIES)
    nets = nets_of(ensemble, net)
    for _ in range(3):
        x = torch.randn(6, 4, dtype=DTYPE)
        torch.testing.assert_close(ensemble(x), torch.stack([net(x) for net in nets]))
    for n, one in enumerate(nets):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(ensemble.params_td["1", name][n], one[1].get_buffer(name))
    assert ensemble.params_td["1", "num_batches_tracked"].tolist() == [3] * COPIES
    ensemble.eval()
    [net.eval() for net in nets]
    torch.testing.assert_close(ensemble(x), torch.stack([net(x) for net in nets]))
    assert ensemble.params_td["1", "num_batches_tracked"].tolist() == [3] * COPIES


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(3, 4))

    def forward(self, x):
        self.state = self.layer(x) + self.state
        return self.state


@pytest.mark.parametrize("vectorize", [True, False])
def test_gradients_flow_through_a_buffer_that_the_forward_rebinds(vectorize):
    ensemble, x = EnsembleModule(Recurrent(), 2, vectorize=vectorize), torch.randn(3, 4)
    nets = nets_of(ensemble, Recurrent())
    for each in (ensemble, *nets):
        each(x)
        each(x).sum().backward()
    for n, net in enumerate(nets):
        torch.testing.assert_close(ensemble.params_td["layer", "bias"].grad[n], net.layer.bias.grad)
    assert list(ensemble.state_dict()) == [f"params_td.{name}" for name in nets[0].state_dict()]


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = [self.layer(x)]
        self.seen = x + self.last[0].sum()
        return self.last[0]


def test_an_ensemble_can_be_copied_after_a_call_whose_forward_kept_tensors():
    ensemble, x = EnsembleModule(Keeping(), 2), torch.randn(3, 4)
    want = ensemble(x)
    for copied in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        assert torch.equal(copied(x), want)
    assert ensemble._shell.last is None
    assert not hasattr(ensemble._shell, "seen")


class Once(nn.Module):
    """Adds its buffer in the first call, and gives it up."""

    def __init__(self, only_if=lambda first: True):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("first", torch.ones(2))
        self.only_if = only_if

    def forward(self, x):
        out = self.layer(x) * 0
        if self.first is not None:
            out = out + self.first
            if self.only_if(self.first):
                self.first = None
        return out


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_buffer_that_the_forward_sets_to_none_is_gone(vectorize):
    ensemble = EnsembleModule(Once(), 2, vectorize=vectorize)
    sums = [ensemble(torch.ones(2)).sum().item() for _ in range(3)]
    assert sums == [4, 0, 0]
    assert "first" not in ensemble.params_td


def test_a_buffer_is_set_to_none_for_all_members_or_for_none():
    ensemble = EnsembleModule(Once(lambda first: first[0] > 1), 2, vectorize=False)
    ensemble.params_td["first"].data[1] += 1
    with pytest.raises(ValueError, match=r"Once set \['first'\] to None for some members only"):
        ensemble(torch.ones(2))


def test_buffers_that_the_forward_rebinds_are_each_members_own():
    ensemble = EnsembleModule(Rebinding(), COPIES, parameter_init_function=draw)
    x = torch.randn(4)
    params = ensemble.params_td
    for n in range(1, 3):
        ensemble(x)
        torch.testing.assert_close(params["sum"], n * (params["weight"].detach() * x).sum(1))
        torch.testing.assert_close(params["last"], n * params["weight"].detach() * x)
    assert set(dict(ensemble.named_buffers())) == {"params_td.sum", "params_td.last"}
    assert not params["sum"].requires_grad


# -- inputs and outputs ------------------------------------------------------------------------


def test_randomness_differs_by_member():
    ensemble = EnsembleModule(nn.Dropout(0.5), COPIES)
    one, two, three = ensemble(torch.ones(1000))
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    assert (one == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    ensemble.eval()
    assert (ensemble(torch.ones(1000)) == 1).all()


def test_train_and_eval_reach_what_runs():
    owner = nn.Sequential(EnsembleModule(wrapped(nn.Sequential(nn.Dropout(0.5))), 2))
    td = TensorDict({"x": torch.ones(100)}, [100])
    owner.eval()
    assert (owner(td.copy())["y"] == 1).all()
    owner.train()
    assert (owner(td.copy())["y"] != 1).all()
    assert owner.training
    assert owner[0].params_td.training


def test_a_tree_gets_the_members_as_its_first_dim():
    ensemble = EnsembleModule(wrapped(mlp()), COPIES)
    x = torch.randn(5, 4, dtype=DTYPE)
    td = TensorDict({"x": x, "more": {"z": torch.ones(5)}}, [5])
    out = ensemble(td)
    assert out.batch_size == (COPIES, 5)
    assert out["x"].shape == (COPIES, 5, 4)
    assert out["more", "z"].shape == (COPIES, 5)
    assert out["more"].batch_size == (COPIES, 5)
    assert td.batch_size == (5,)
    nets = nets_of(ensemble, wrapped(mlp()))
    torch.testing.assert_close(out["y"], torch.stack([net(td.copy())["y"] for net in nets]))


def test_dispatch_takes_tensors():
    ensemble = EnsembleModule(wrapped(mlp()), COPIES)
    x = torch.randn(5, 4, dtype=DTYPE)
    found = ensemble(x=x)
    assert found.shape == (COPIES, 5, 2)
    assert torch.equal(found, ensemble(x))
    assert ensemble.in_keys == ["x"]
    assert ensemble.out_keys == ["y"]


def test_a_plain_module_takes_and_returns_what_it_takes_and_returns():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, *, scale, flag=False, pair=None):
            y = self.layer(x) * scale
            return {"y": y, "pair": pair[0] + y} if flag else y

    ensemble = EnsembleModule(Both(), COPIES)
    x = torch.randn(2, 4)
    plain = ensemble(x, scale=2.0)
    assert plain.shape == (COPIES, 2, 4)
    out = ensemble(x, scale=torch.tensor(2.0), flag=True, pair=(x, None))
    assert torch.equal(out["y"], plain)
    torch.testing.assert_close(out["pair"], plain + x)
    # One part for each member, beside what is no tensor.
    chained = EnsembleModule(Both(), COPIES, expand_input=False)
    parts = torch.randn(COPIES, 2, 4)
    out = chained(parts, scale=2.0, flag=True, pair=(parts, None))
    for n, net in enumerate(nets_of(chained, Both())):
        torch.testing.assert_close(out["y"][n], net(parts[n], scale=2.0))


def test_ensembles_chain_member_by_member():
    first, second = (nn.Linear(4, 3), nn.Linear(3, 2))
    one = EnsembleModule(TensorDictModule(first, ["x"], ["hidden"]), COPIES)
    two = EnsembleModule(TensorDictModule(second, ["hidden"], ["y"]), COPIES, expand_input=False)
    x = torch.randn(5, 4)
    out = TensorDictSequential(one, two)(TensorDict({"x": x}, [5]))
    assert out.batch_size == (COPIES, 5)
    firsts = nets_of(one, TensorDictModule(first, ["x"], ["hidden"]))
    seconds = nets_of(two, TensorDictModule(second, ["hidden"], ["y"]))
    for n in range(COPIES):
        torch.testing.assert_close(out["y"][n], seconds[n].module(firsts[n].module(x)))


@pytest.mark.parametrize("shape", [(5, 4), (), (1, 5, 4)])
def test_parts_must_be_as_many_as_members(shape):
    ensemble = EnsembleModule(nn.Linear(4, 2), COPIES, expand_input=False)
    with pytest.raises(
        ValueError, match="without expand_input, the input has a first dim of 3 members"
    ):
        ensemble(torch.randn(shape))


def test_an_error_in_a_member_leaves_the_ensemble_whole():
    ensemble = EnsembleModule(mlp(), COPIES)
    own = dict(ensemble.params_td.items(True, True))
    x = torch.randn(2, 4, dtype=DTYPE)
    wanted = ensemble(x)
    with pytest.raises(RuntimeError):
        ensemble(torch.randn(2, 7, dtype=DTYPE))
    assert all(ensemble.params_td[key] is leaf for key, leaf in own.items())
    assert torch.equal(ensemble(x), wanted)


def test_keys_of_an_ensemble_are_those_of_its_module():
    ensemble = EnsembleModule(wrapped(mlp()), COPIES)
    x = torch.randn(5, 4, dtype=DTYPE)
    wanted = ensemble(x)
    ensemble.in_keys, ensemble.out_keys = ["obs"], [("n", "act")]
    out = ensemble(TensorDict({"obs": x}, [5]))
    assert torch.equal(out["n", "act"], wanted)
    assert torch.equal(ensemble(obs=x), wanted)
    assert "params_td.module.0.weight" in ensemble.state_dict()
    assert not hasattr(EnsembleModule(mlp(), COPIES), "in_keys")


def test_outputs_of_an_ensemble_are_selected_as_those_of_its_module():
    def fork(x):
        return x, 2 * x

    twice = TensorDictModule(fork, ["x"], ["y", "z"])
    later = EnsembleModule(TensorDictSequential(twice), COPIES)
    assert later.select_out_keys("z") is later
    before = EnsembleModule(TensorDictModule(fork, ["x"], ["y", "z"]).select_out_keys("z"), COPIES)
    x = torch.randn(5)
    for ensemble in (later, before):
        assert (ensemble.out_keys, ensemble.out_keys_source) == (["z"], ["y", "z"])
        assert set(ensemble(TensorDict({"x": x})).keys()) == {"x", "z"}
        assert torch.equal(ensemble(x), (2 * x).expand(COPIES, 5))
        assert ensemble.reset_out_keys() is ensemble
        assert len(ensemble(x)) == 2


def test_a_tree_may_come_with_more_arguments():
    def scale(x, by=1, shift=0):
        return by * x + shift

    x, shift = torch.randn(5), torch.arange(3.0)
    td = TensorDict({"x": x}, [5])
    ensemble = EnsembleModule(wrapped(scale), COPIES)
    assert torch.equal(ensemble(td, by=2)["y"], (2 * x).expand(COPIES, 5))
    assert torch.equal(ensemble(x, by=2), (2 * x).expand(COPIES, 5))
    parts = EnsembleModule(wrapped(scale), COPIES, expand_input=False)
    assert torch.equal(parts(td.expand(3, 5), shift=shift)["y"], x + shift.unsqueeze(1))
    target = TensorDict({"kept": torch.ones(COPIES)}, [COPIES])
    assert ensemble(td, tensordict_out=target) is target
    assert set(target.keys()) == {"kept", "y"}
    assert torch.equal(target["y"], x.expand(COPIES, 5))


@pytest.mark.parametrize("on_trees", [True, False])
def test_hooks_of_an_ensemble_run(on_trees):
    ensemble = EnsembleModule(wrapped(mlp()) if on_trees else mlp(), COPIES)
    seen = []
    ensemble.register_forward_pre_hook(lambda module, args: seen.append(args))
    ensemble.register_forward_hook(lambda module, args, out: seen.append(out))
    x = torch.randn(5, 4, dtype=DTYPE)
    out = ensemble(x)
    assert seen[0][0] is x
    assert seen[1] is out


def test_ensembles_nest():
    inner = EnsembleModule(nn.Linear(4, 2), 2)
    outer = EnsembleModule(inner, COPIES, parameter_init_function=draw)
    x = torch.randn(5, 4)
    found = outer(x)
    assert found.shape == (COPIES, 2, 5, 2)
    weight, bias = outer.params_td["params_td", "weight"], outer.params_td["params_td", "bias"]
    wanted = torch.einsum("mnij,bj->mnbi", weight, x) + bias.unsqueeze(2)
    torch.testing.assert_close(found, wanted)


# -- an nn.Module like others ------------------------------------------------------------------


def storages(module):
    """The bytes of every memory that can be reached from a module, each counted once."""
    found, todo, seen = {}, [module], set()
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.device.type != "meta":
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            continue
        if isinstance(item, dict | list | tuple | set | nn.Module):
            todo += gc.get_referents(item)
    return sum(found.values())


@pytest.mark.parametrize("kind", ["linear", "batch norm", "tied", "weight norm", "lstm", "sparse"])
def test_weights_are_held_once(kind):
    net, _ = make(kind)
    ensemble = EnsembleModule(net, COPIES, parameter_init_function=draw)
    tensors = {*net.parameters(), *net.buffers()}
    assert storages(net) == sum(t.nbytes for t in tensors)
    assert storages(ensemble) == COPIES * storages(net)


def test_the_parameters_are_the_stacked_ones_and_no_others():
    ensemble = EnsembleModule(wrapped(mlp()), COPIES)
    assert isinstance(ensemble.params_td, TensorDictParams)
    assert [id(p) for p in ensemble.parameters()] == [
        id(leaf) for leaf in ensemble.params_td.values(True, True)
    ]
    assert all(p.shape[0] == COPIES and p.is_leaf for p in ensemble.parameters())
    assert all(name.startswith("params_td.") for name in ensemble.state_dict())


def test_a_state_dict_makes_a_new_ensemble_the_same():
    one, two = (EnsembleModule(wrapped(batch_normed()), COPIES) for _ in range(2))
    td = TensorDict({"x": torch.randn(5, 4, dtype=DTYPE)}, [5])
    one(td.copy())
    report = two.load_state_dict(one.state_dict())
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert torch.equal(one.eval()(td.copy())["y"], two.eval()(td.copy())["y"])


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_file(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, through_pickle, through_file])
@pytest.mark.parametrize("kind", ["linear", "batch norm", "tied", "sparse"])
def test_copies_run_alike_and_on_their_own(make_copy, kind):
    net, x = make(kind, training=False)
    one = EnsembleModule(net, COPIES, parameter_init_function=draw)
    two = make_copy(one)
    assert torch.equal(one(x), two(x))
    assert {id(t) for t in one.state_dict(keep_vars=True).values()}.isdisjoint(
        {id(t) for t in two.state_dict(keep_vars=True).values()}
    )
    with torch.no_grad():
        [p.zero_() for p in two.parameters()]
    assert any(p.any() for p in one.parameters())
    assert storages(two) == storages(one)


def test_casts_reach_the_weights_and_the_members_run_on_them():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    ensemble = EnsembleModule(net, COPIES).double()
    out = ensemble(torch.randn(5, 4, dtype=torch.float64))
    assert out.dtype == torch.float64
    assert ensemble.params_td["1", "num_batches_tracked"].dtype == torch.int64
    ensemble.to(torch.bfloat16)
    assert ensemble(torch.randn(5, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    ensemble.to("meta")
    assert ensemble(torch.randn(5, 4, dtype=torch.bfloat16, device="meta")).device.type == "meta"


def test_freezing_reaches_the_weights():
    ensemble = EnsembleModule(mlp(), COPIES).requires_grad_(False)
    assert not ensemble(torch.randn(2, 4, dtype=DTYPE)).requires_grad


def test_weights_of_an_ensemble_can_be_swapped():
    net = mlp()
    one, two = EnsembleModule(net, COPIES), EnsembleModule(net, COPIES)
    x = torch.randn(2, 4, dtype=DTYPE)
    with TensorDict({"params_td": dict(two.params_td.items())}).to_module(one):
        assert torch.equal(one(x), two(x))
    assert not torch.equal(one(x), two(x))


def test_members_without_memory_can_be_given_it_later():
    with torch.device("meta"):
        members = EnsembleModule(nn.Linear(3, 2), COPIES)
    wanted = EnsembleModule(nn.Linear(3, 2), COPIES)
    members.to_empty(device="cpu").load_state_dict(wanted.state_dict())
    points = torch.rand(4, 3)
    assert torch.equal(members(points), wanted(points))


def test_an_ensemble_shows_its_module_and_how_many():
    net = nn.Linear(4, 2)
    assert repr(EnsembleModule(net, 8)) == f"EnsembleModule(module={net!r}, num_copies=8)"
    text = repr(EnsembleModule(wrapped(net), 8, expand_input=False, vectorize=False))
    assert repr(wrapped(net)).replace("\n", "\n  ") in text
    assert text.endswith("  num_copies=8,\n  expand_input=False,\n  vectorize=False\n)")
    assert repr(nn.LSTM(4, 2)) in repr(EnsembleModule(nn.LSTM(4, 2), 8))


def test_buffers_that_are_not_saved_stay_out_of_the_state_dict():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.inner.register_buffer("cache", torch.ones(2), persistent=False)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.inner(x)

    members = EnsembleModule(Cached(), 3)
    members(torch.ones(2))
    wanted = {f"params_td.{name}" for name in Cached().state_dict()}
    assert set(members.state_dict()) == wanted
    members.load_state_dict(members.state_dict())


@pytest.mark.parametrize("vectorize", [False, True])
def test_an_ensemble_of_ensembles_draws_all_weights(vectorize):
    inner = EnsembleModule(nn.Linear(4, 2), 3, vectorize=vectorize)
    members = EnsembleModule(inner, 2)
    weights = members.params_td["params_td", "weight"].flatten(0, 1)
    assert len({row.sum().item() for row in weights.detach()}) == 6
    x = torch.ones(5, 4)
    for i, row in enumerate(members(x)):
        for j, out in enumerate(row):
            weight, bias = (members.params_td["params_td", key][i, j] for key in ("weight", "bias"))
            torch.testing.assert_close(out, nn.functional.linear(x, weight, bias))


def test_an_ensemble_is_in_the_mode_of_its_module():
    assert not EnsembleModule(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval(), 2).training
    with pytest.raises(TypeError, match="num_copies is a whole number, not True"):
        EnsembleModule(nn.Linear(2, 2), True)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("last", None)

    def forward(self, x, keep):
        y = self.layer(x)
        self.last = y.detach() if keep else None
        return y


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_buffer_that_was_none_is_filled_and_emptied_again(vectorize):
    members = EnsembleModule(Remembering(), 3, vectorize=vectorize)
    x = torch.ones(5, 2)
    for _ in range(2):
        y = members(x, True)
        assert torch.equal(members.params_td["last"], y)
        members(x, False)
        assert "last" not in members.params_td
