"""How the members of an ensemble begin: apart, with weights of their own."""

import functools
import warnings

import pytest
import torch
from members import COPIES, Rebinding, draw, mlp, nets_of, wrapped
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from zoo import DTYPE, make

from tdnn.nn import EnsembleModule


@functools.cache
def scripted_linear():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(nn.Linear(4, 2))


def test_members_begin_apart_each_with_the_distribution_of_its_layer():
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.MultiheadAttention(64, 2))
    params = EnsembleModule(net, COPIES).params_td
    for key in [("0", "weight"), ("0", "bias"), ("2", "in_proj_weight")]:
        one, two, three = params[key]
        assert not torch.equal(one, two)
        assert not torch.equal(two, three)
    assert (params["1", "weight"] == 1).all()
    assert params["0", "weight"].abs().max() <= 1 / 8
    assert params["0", "weight"].std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)


def test_the_module_itself_is_not_changed():
    net = mlp()
    held = [p.clone() for p in net.parameters()]
    EnsembleModule(net, COPIES)(torch.randn(2, 4, dtype=DTYPE)).sum().backward()
    assert all(map(torch.equal, net.parameters(), held))
    assert all(p.grad is None for p in net.parameters())


def test_members_are_drawn_anew_each_for_itself():
    net = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), parametrizations.weight_norm(nn.Linear(4, 2))
    )
    ensemble = EnsembleModule(net, COPIES, vectorize=False)
    ensemble(torch.randn(5, 4))
    own = dict(ensemble.named_parameters())
    torch.manual_seed(5)
    other = EnsembleModule(net, COPIES).params_td
    torch.manual_seed(5)
    assert ensemble.reset_parameters_recursive() is None
    assert all(own[name] is p for name, p in ensemble.named_parameters())
    for key, leaf in other.items(True, True):
        assert torch.equal(ensemble.params_td[key], leaf), key
    tree = ensemble.params_td.data.clone()
    fresh = ensemble.reset_parameters_recursive(tree)
    assert fresh["0", "weight"].data_ptr() == tree["0", "weight"].data_ptr()
    assert fresh["0", "weight"].requires_grad
    assert not torch.equal(tree["0", "weight"], other["0", "weight"])
    assert torch.equal(ensemble.params_td["0", "weight"], other["0", "weight"])
    with pytest.raises(ValueError, match=r"has 3 members; found parameters of batch size \(\)"):
        ensemble.reset_parameters_recursive(tree[0])
    with pytest.raises(RuntimeError, match="holds no module with a reset_parameters method"):
        EnsembleModule(nn.ReLU(), COPIES).reset_parameters_recursive()


def test_one_member_needs_no_reset():
    net = Rebinding()
    assert torch.equal(EnsembleModule(net, 1).params_td["weight"][0], net.weight)


def test_weights_that_no_reset_reaches_are_refused_and_named():
    net = nn.Sequential(nn.Linear(4, 4), Rebinding())
    with pytest.raises(
        ValueError,
        match=r"no reset_parameters\(\) of Sequential reaches \[\('1', 'weight'\)\], so all "
        "members would start alike; pass parameter_init_function=",
    ):
        EnsembleModule(net, COPIES)
    EnsembleModule(net, COPIES, parameter_init_function=draw)
    with torch.no_grad():
        net[1].weight.fill_(1)  # a constant is a fine beginning
    EnsembleModule(net, COPIES)


def test_the_init_function_sets_each_member():
    values = iter([1.0, 2.0, 3.0])

    def init(module):
        nn.init.constant_(module.weight, next(values))

    params = EnsembleModule(nn.Linear(2, 2), 3, parameter_init_function=init).params_td
    assert params["weight"][:, 0, 0].tolist() == [1, 2, 3]


def test_ties_flags_and_dtypes_are_kept():
    net, _ = make("tied")
    net.first.bias.requires_grad_(False)
    params = EnsembleModule(net, COPIES).params_td
    assert params["first", "weight"] is params["second", "weight"]
    assert not params["first", "bias"].requires_grad
    assert params["first", "weight"].dtype == DTYPE
    assert len(list(params.parameters())) == 2


@pytest.mark.parametrize("number", [2.0, "2", None])
def test_the_number_of_members_is_a_whole_one(number):
    with pytest.raises(TypeError, match=f"num_copies is a whole number, not {number!r}"):
        EnsembleModule(nn.Linear(2, 2), number)


@pytest.mark.parametrize("number", [0, -1])
def test_an_ensemble_has_at_least_one_member(number):
    with pytest.raises(ValueError, match=f"an ensemble has at least 1 member, not {number}"):
        EnsembleModule(nn.Linear(2, 2), number)


def test_only_a_module_can_have_copies():
    with pytest.raises(TypeError, match=r"EnsembleModule takes an nn\.Module, not function"):
        EnsembleModule(lambda x: x, 2)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_module_that_is_not_initialised_is_called_once_before():
    net = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(
        ValueError,
        match=r"TensorDictModule\(Sequential\) is not initialised: \['module.0.weight', .*"
        r"'module.1.running_var'\]; call it once on an example, then make the ensemble",
    ):
        EnsembleModule(wrapped(net), 2)
    x = torch.randn(5, 4)
    net(x)
    ensemble = EnsembleModule(net, 2)
    assert not torch.equal(*ensemble.params_td["0", "weight"])
    nets = nets_of(ensemble, net)
    torch.testing.assert_close(ensemble(x), torch.stack([net(x) for net in nets]))


def test_a_scripted_module_has_no_copies_with_other_weights():
    scripted = scripted_linear()
    for module in (scripted, nn.Sequential(scripted)):
        with pytest.raises(
            TypeError, match=r"a ScriptModule cannot run on other weights than its own.* scripted$"
        ):
            EnsembleModule(module, 2)


def test_weights_that_are_computed_begin_apart_as_they_would_plain():
    net = parametrizations.weight_norm(nn.Linear(64, 64))
    with torch.no_grad():
        net.weight = torch.ones(64, 64)
    params = EnsembleModule(net, COPIES).params_td
    weights = []
    for n in range(COPIES):
        with torch.no_grad(), params[n].to_module(net):
            weights.append(net.weight)
    one, two, _ = weights
    assert not torch.allclose(one, two)
    assert one.abs().max() <= 1 / 8 + 1e-6
    assert one.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)


def test_weights_that_are_computed_one_way_are_refused():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    net = nn.Linear(3, 3)
    parametrize.register_parametrization(net, "weight", Twice())
    for refused in (net, parametrizations.spectral_norm(nn.Linear(3, 3))):
        with pytest.raises(
            ValueError, match=r"reaches \[\('parametrizations', 'weight', 'original'\)\]"
        ):
            EnsembleModule(refused, 2)


@pytest.mark.parametrize("vectorize", [True, False])
def test_the_init_function_may_take_a_bias_away(vectorize):
    def begin(linear):
        linear.bias = None
        nn.init.normal_(linear.weight)

    members = EnsembleModule(nn.Linear(4, 2), 3, parameter_init_function=begin, vectorize=vectorize)
    x = torch.ones(5, 4)
    wanted = x @ members.params_td["weight"].mT
    torch.testing.assert_close(members(x), wanted)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_at_the_start(layer):
    net = nn.Sequential(layer(3, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"\['0'\] would give sparse gradients.*sparse=False"):
        EnsembleModule(net, 2)
