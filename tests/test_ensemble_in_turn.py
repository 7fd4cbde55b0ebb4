"""Ensembles of what torch cannot map, and of modules that return more than tensors."""

import copy

import pytest
import torch
from members import COPIES, Rebinding, batch_normed, draw, nets_of, wrapped
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from zoo import DTYPE, make

from tdnn import TensorDict
from tdnn.nn import EnsembleModule, TensorDictSequential


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Returns(nn.Module):
    """Returns what a function makes of its output."""

    def __init__(self, fn):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.fn = fn

    def forward(self, x):
        return self.fn(self.layer(x))


# -- what torch.vmap cannot map ----------------------------------------------------------------

IN_TURN = [
    lambda: nn.LSTM(4, 3, 2, batch_first=True),
    lambda: nn.GRU(4, 3, bidirectional=True),
    lambda: nn.RNN(4, 3),
    lambda: nn.LSTMCell(4, 3),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3)),
]


@pytest.mark.parametrize("build", IN_TURN)
def test_members_that_torch_cannot_map_run_in_turn(build):
    ensemble = EnsembleModule(build(), COPIES)
    assert not ensemble.vectorize
    x = torch.randn(5, 4) if isinstance(build(), nn.LSTMCell) else torch.randn(5, 2, 4)
    found = ensemble(x)
    each = [net(x) for net in nets_of(ensemble, build())]
    torch.testing.assert_close(found[0], torch.stack([one for one, _ in each]))
    if isinstance(found[1], tuple):
        hidden, cell = found[1]
        torch.testing.assert_close(hidden, torch.stack([state[0] for _, state in each]))
        torch.testing.assert_close(cell, torch.stack([state[1] for _, state in each]))
    found[0].sum().backward()
    for n, net in enumerate(nets := nets_of(ensemble, build())):
        net(x)[0].sum().backward()
        for key, leaf in ensemble.params_td.items(True, True):
            grad = TensorDict.from_module(nets[n])[key].grad
            torch.testing.assert_close(leaf.grad[n], grad, rtol=1e-5, atol=1e-6)


def test_members_in_turn_take_trees_and_parts_as_mapped_ones_do():
    net = wrapped(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(DTYPE))
    td = TensorDict({"x": torch.randn(COPIES, 5, 4, dtype=DTYPE), "more": {}}, [COPIES, 5])
    for expand in (True, False):
        one, two = (EnsembleModule(net, COPIES, expand, vectorize=v).eval() for v in (True, False))
        two.load_state_dict(one.state_dict())
        found, wanted = two(td.copy()), one(td.copy())
        assert found.batch_size == wanted.batch_size
        assert found["more"].batch_size == wanted["more"].batch_size
        assert set(found.keys(True)) == set(wanted.keys(True))
        for key, leaf in wanted.items(True, True):
            torch.testing.assert_close(found[key], leaf)
    assert (two(torch.ones(COPIES, 1, 4, dtype=DTYPE)) == two(x=torch.ones(3, 1, 4).double())).all()


def test_members_in_turn_share_what_they_all_return():
    ensemble = EnsembleModule(Returns(lambda y: y), COPIES, vectorize=False)
    x = torch.randn(5, 4)
    td = EnsembleModule(wrapped(nn.Linear(4, 2)), COPIES, vectorize=False)(TensorDict({"x": x}))
    assert td["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert not torch.equal(ensemble(x)[0], ensemble(x)[1])


def test_members_in_turn_rebind_buffers_as_mapped_ones_do():
    one, two = (
        EnsembleModule(Rebinding(), COPIES, parameter_init_function=draw, vectorize=vectorize)
        for vectorize in (True, False)
    )
    two.load_state_dict(one.state_dict())
    for _ in range(2):
        x = torch.randn(4)
        assert torch.equal(one(x), two(x))
    mine, theirs = one.state_dict(), two.state_dict()
    assert mine.keys() == theirs.keys() == {f"params_td.{n}" for n in ("weight", "sum", "last")}
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name])


def test_a_buffer_that_some_members_rebind_is_kept_for_the_others():
    class Sometimes(Rebinding):
        def forward(self, x):
            y = x * self.weight
            if y.sum() > 0:
                self.sum = self.sum + 1
            return y

    ensemble = EnsembleModule(Sometimes(), 20, parameter_init_function=draw, vectorize=False)
    x = torch.randn(4)
    positive = ensemble(x).sum(1) > 0
    assert 0 < positive.sum() < 20
    assert torch.equal(ensemble.params_td["sum"], positive.float())


def test_an_ensemble_of_members_in_turn_can_itself_have_copies():
    inner = EnsembleModule(nn.LSTMCell(4, 3), 2)
    outer = EnsembleModule(inner, COPIES, parameter_init_function=draw)
    assert not outer.vectorize
    x = torch.randn(5, 4)
    hidden, cell = outer(x)
    assert hidden.shape == cell.shape == (COPIES, 2, 5, 3)
    net = nn.LSTMCell(4, 3)
    weights = {key: leaf[1, 0] for key, leaf in outer.params_td["params_td"].items()}
    with TensorDict(weights).to_module(net):
        torch.testing.assert_close(hidden[1, 0], net(x)[0])


@pytest.mark.usefixtures("fresh")
def test_a_compiled_ensemble_in_turn_is_the_eager_one():
    ensemble = EnsembleModule(wrapped(batch_normed()), COPIES, vectorize=False).eval()
    td = TensorDict({"x": torch.randn(5, 4, dtype=DTYPE)}, [5])
    found = torch.compile(ensemble, backend="eager", fullgraph=True)(td.copy())
    torch.testing.assert_close(found["y"], ensemble(td.copy())["y"])


@pytest.mark.parametrize("kind", ["attention", "transformer layer"])
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_compiled_attention_in_eval_has_gradients(kind):
    ensemble = EnsembleModule(make(kind)[0], COPIES).eval()
    x = torch.randn(2, 3, 4, dtype=DTYPE)
    run = torch.compile(ensemble, backend="eager", fullgraph=True)
    for call in (ensemble, run):
        ensemble.zero_grad()
        call(x).pow(2).sum().backward()
        assert all(p.grad.any(dim=1).any() for p in ensemble.parameters())
    outer = EnsembleModule(ensemble, 2, parameter_init_function=draw).eval()
    outer(x).pow(2).sum().backward()
    assert all(p.grad.any() for p in outer.parameters())


def branching(y):
    return y if y.sum() > 0 else -y


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.BatchNorm1d(4, momentum=None), "calling .item"),
        (parametrizations.spectral_norm(nn.Linear(4, 2)), "Batching rule not implemented"),
        (lambda: Returns(branching), "data-dependent control flow"),
    ],
)
def test_what_cannot_be_mapped_gets_told_of_the_other_way(net, message):
    net = net if isinstance(net, nn.Module) else net()
    with pytest.raises(RuntimeError, match=message) as caught:
        EnsembleModule(net, COPIES, parameter_init_function=draw)(torch.randn(5, 4))
    advice, where = caught.value.__notes__
    assert advice.endswith(
        "vectorize=False runs them one after the other, which works for any module"
    )
    assert where.startswith("a member of EnsembleModule: ")
    assert where.endswith(" ran on float32 (5, 4)")
    other = EnsembleModule(net, COPIES, parameter_init_function=draw, vectorize=False)
    assert other(torch.randn(5, 4)).shape[0] == COPIES


# -- what members return, and what they are told of ---------------------------------------------


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "fn",
    [
        lambda y: (y, None),
        lambda y: None,
        lambda y: {"y": [y, y + 1], "n": (3, "words", torch.float16)},
        lambda y: (None, TensorDict({"y": y, "in": {}}, [5])),
    ],
)
def test_what_is_no_tensor_comes_back_once(fn, vectorize, compiled):
    ensemble = EnsembleModule(Returns(fn), COPIES, vectorize=vectorize)
    x = torch.randn(5, 4)
    run = torch.compile(ensemble, backend="eager", fullgraph=True) if compiled else ensemble
    found, spec = pytree.tree_flatten(run(x))
    each = [pytree.tree_flatten(net(x)) for net in nets_of(ensemble, Returns(fn))]
    assert spec == each[0][1]
    for value, *parts in zip(found, *[values for values, _ in each], strict=True):
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, torch.stack(parts))
        else:
            assert value == parts[0]
    for out in pytree.tree_leaves(run(x), is_leaf=lambda part: isinstance(part, TensorDict)):
        if isinstance(out, TensorDict):
            assert out.batch_size == out["in"].batch_size == (COPIES, 5)


class Pair:
    def __init__(self, first, second):
        self.first, self.second = first, second


@pytest.mark.parametrize("vectorize", [True, False])
def test_an_object_of_another_kind_is_refused(vectorize):
    ensemble = EnsembleModule(Returns(lambda y: Pair(y, y)), COPIES, vectorize=vectorize)
    with pytest.raises(TypeError, match=r"of EnsembleModule: Returns returned Pair; an ensemble"):
        ensemble(torch.randn(5, 4))


@pytest.mark.parametrize("fn", [lambda y: (y, y.sum().item()), lambda y: [y] * int(y.sum() > 0)])
def test_members_in_turn_differ_in_tensors_only(fn):
    ensemble = EnsembleModule(Returns(fn), 20, vectorize=False)
    with pytest.raises(ValueError, match="returned other things for one member than for another"):
        ensemble(torch.randn(5, 4))


def test_an_error_says_what_the_members_ran_on():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale=1):
            return super().forward(x) * scale

    with pytest.raises(RuntimeError) as caught:
        EnsembleModule(Scaled(4, 2), COPIES)(torch.randn(5, 7), scale=2)
    assert caught.value.__notes__ == [
        "a member of EnsembleModule: Scaled ran on float32 (5, 7), scale=int"
    ]
    chain = TensorDictSequential(EnsembleModule(wrapped(nn.Linear(4, 2)), COPIES))
    with pytest.raises(RuntimeError) as caught:
        chain(torch.randn(5, 7))
    assert caught.value.__notes__ == [
        "step 0 of TensorDictSequential: a member of EnsembleModule: "
        "TensorDictModule(Linear) read 'x' float32 (5, 7)"
    ]
    with pytest.raises(
        KeyError, match=r"a member of EnsembleModule: TensorDictModule\(Linear\) reads \['x'\]"
    ):
        chain(TensorDict({"xx": torch.randn(5, 4)}))


def test_a_module_that_changes_its_input_is_refused():
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            x += 1
            return self.inner(x)

    with pytest.raises(RuntimeError, match="Adding changed its input in place, and the next"):
        EnsembleModule(Adding(), 3, vectorize=False)(torch.zeros(2))
    EnsembleModule(Adding(), 1, vectorize=False)(torch.zeros(2))
    with torch.inference_mode():
        EnsembleModule(nn.Linear(2, 2), 3, vectorize=False)(torch.zeros(2))


def test_a_member_may_write_into_its_weights():
    ensemble = EnsembleModule(nn.Embedding(5, 4, max_norm=0.5), 3, vectorize=False)
    twin, x = copy.deepcopy(ensemble), torch.tensor([0, 1, 3])
    found = ensemble(x)
    for n in range(3):
        weight = twin.params_td[n]["weight"].detach().clone()
        wanted = nn.functional.embedding(x, weight, max_norm=0.5)
        torch.testing.assert_close(found[n], wanted)
        torch.testing.assert_close(ensemble.params_td[n]["weight"].detach(), weight)
