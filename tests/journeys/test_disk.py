"""Keep the parameters of a model in a file, and use them in this program or another."""

import copy

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tdnn import LazyStackedTensorDict, TensorDict, TensorDictParams


class TwoNames(nn.Module):
    """One module under two names, and a weight that stands in two modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.tied(self.again(self.first(x)))


class Lists(nn.Module):
    """Parameters in a list and in a dict, whose keys may hold anything but a dot."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.dict = nn.ParameterDict({"a/b": torch.randn(4), "ключ": torch.randn(4)})

    def forward(self, x):
        return x * self.list[0] + self.list[1] * self.dict["a/b"] - self.dict["ключ"]


def seen(net, x):
    """Bring statistics of batches, powers and the like away from where they begin."""
    net(x)
    return net.eval()


MODELS = {
    "linear": lambda: (nn.Linear(4, 3), torch.randn(2, 4)),
    "conv and batch norm": lambda: (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        torch.randn(2, 1, 5, 5),
    ),
    "lstm": lambda: (nn.LSTM(4, 3, num_layers=2, bidirectional=True), torch.randn(5, 2, 4)),
    "transformer layer": lambda: (
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        torch.randn(2, 3, 4),
    ),
    "embedding": lambda: (nn.Embedding(5, 4, padding_idx=0), torch.tensor([0, 3, 4])),
    "weight norm": lambda: (parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(2, 4)),
    "spectral norm": lambda: (parametrizations.spectral_norm(nn.Linear(4, 3)), torch.randn(2, 4)),
    "lists and dicts": lambda: (Lists(), torch.randn(2, 4)),
    "two names": lambda: (TwoNames(), torch.randn(2, 4)),
    "half precision": lambda: (nn.Linear(4, 3, dtype=torch.bfloat16), torch.randn(2, 4).bfloat16()),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "params.safetensors"


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("kind", MODELS)
def test_a_second_net_with_the_loaded_parameters_predicts_the_same(path, kind):
    net, x = MODELS[kind]()
    seen(net, x)
    other, _ = MODELS[kind]()
    other.eval()
    TensorDict.from_module(net).save(path)
    with torch.no_grad():  # attention takes another path, and rounds differently, with gradients
        want = first_of(net(x))
        assert not torch.equal(first_of(other(x)), want)
        with TensorDict.load(path).to_module(other):
            got = first_of(other(x))
    assert torch.equal(got, want)


def test_a_compiled_net_runs_on_loaded_parameters(path):
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(2, 4)
    other = copy.deepcopy(net)
    TensorDict.from_module(net).save(path)
    with torch.no_grad():
        other[0].weight.zero_()
    params = TensorDict.load(path)

    @torch.compile(fullgraph=True, backend="eager")
    def run(x):
        with params.to_module(other):
            return other(x)

    torch.testing.assert_close(run(x), net(x))


def test_other_programs_load_the_file_as_a_state_dict(path):
    net, x = MODELS["conv and batch norm"]()
    seen(net, x)
    TensorDict.from_module(net).save(path)
    other, _ = MODELS["conv and batch norm"]()
    other.eval().load_state_dict(safetensors.torch.load_file(path))
    assert torch.equal(other(x), net(x))


def test_the_state_dict_of_another_program_runs_in_a_net(path):
    net, x = MODELS["conv and batch norm"]()
    seen(net, x)
    safetensors.torch.save_file(net.state_dict(), path)
    other, _ = MODELS["conv and batch norm"]()
    with TensorDict.load(path).unflatten_keys(".").to_module(other.eval()):
        assert torch.equal(other(x), net(x))


def test_tied_weights_are_stored_once_and_stay_tied(path):
    net, x = MODELS["two names"]()
    TensorDict.from_module(net).save(path)
    assert len(safetensors.torch.load_file(path)) == 2
    params = TensorDict.load(path)
    assert params["first", "weight"] is params["again", "weight"] is params["tied", "weight"]
    params.requires_grad_()
    with params.to_module(net):
        net(x).sum().backward()
    want = copy.deepcopy(net)
    want(x).sum().backward()
    torch.testing.assert_close(params["tied", "weight"].grad, want.first.weight.grad)


def test_a_stage_renamed_before_saving_fits_a_net_with_the_new_name(path):
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(2, 4)
    params = TensorDict.from_module(net)
    with params.flatten_keys(".") as flat:
        for name in [name for name in flat.keys() if name.startswith("0.")]:  # noqa: SIM118  # a tree iterates over its batch
            flat.rename_key_(name, f"stem.{name[2:]}")
    params.save(path)
    other = nn.Sequential()
    other.add_module("stem", nn.Linear(4, 3))
    other.add_module("1", nn.Tanh())
    other.add_module("2", nn.Linear(3, 2))
    with TensorDict.load(path).to_module(other):
        assert torch.equal(other(x), net(x))


def test_the_parameters_of_an_ensemble_keep_their_batch_dim(path):
    nets = [nn.Linear(4, 3) for _ in range(5)]
    x = torch.randn(2, 4)
    torch.stack([TensorDict.from_module(net) for net in nets]).save(path)
    params = TensorDict.load(path)
    assert params.batch_size == (5,)

    def run(params, x):
        with params.to_module(nets[0]):
            return nets[0](x)

    got = torch.vmap(run, (0, None))(params, x)
    torch.testing.assert_close(got, torch.stack([net(x) for net in nets]))


def test_a_lazy_stack_of_parameters_is_saved_as_a_stack(path):
    trees = [TensorDict.from_module(nn.Linear(4, 3)) for _ in range(5)]
    LazyStackedTensorDict(*trees).save(path)
    params = TensorDict.load(path)
    assert params.batch_size == (5,)
    for tree, row in zip(trees, params.unbind(0), strict=True):
        assert torch.equal(row["weight"], tree["weight"])


def test_parameters_that_are_a_module_are_saved_and_loaded_as_one(path):
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(2, 4)
    params = TensorDictParams(TensorDict.from_module(net))
    assert params.save(path) is params
    plain, module = TensorDict.load(path), TensorDictParams.load(path)
    assert type(plain) is TensorDict
    assert type(module) is TensorDictParams
    assert [type(leaf) for leaf in module.parameters()] == [nn.Parameter] * 2
    other = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    for loaded in (plain, module):
        with loaded.to_module(other):
            assert torch.equal(other(x), net(x))


def test_loaded_parameters_can_be_trained_and_saved_over_their_own_file(path):
    net, x = nn.Linear(4, 1), torch.randn(8, 4)
    TensorDict.from_module(net).save(path)
    params = TensorDict.load(path)
    params.requires_grad_()
    optimizer = torch.optim.SGD(list(params.values()), lr=0.1)
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    twin = copy.deepcopy(net)
    for _ in range(3):
        with params.to_module(twin):
            loss = twin(x).square().mean()
        for optim, value in ((optimizer, loss), (own, net(x).square().mean())):
            optim.zero_grad()
            value.backward()
            optim.step()
        params.save(path)
    back = TensorDict.load(path)
    for key, leaf in TensorDict.from_module(net).items():
        torch.testing.assert_close(back[key], leaf.detach())
