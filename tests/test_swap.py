"""Trees from modules, alone and stacked, and a module run on parts of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo import KINDS, chain, exact, make, same, slots

from tdnn import (
    LazyStackedTensorDict,
    LockedError,
    MissingKeyError,
    TensorDict,
    TensorDictParams,
)

# -- from a module -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_has_all_tensors_of_a_module_under_their_names(kind):
    net, _ = make(kind)
    tree = TensorDict.from_module(net)
    named = {
        **dict(net.named_parameters(remove_duplicate=False)),
        **dict(net.named_buffers(remove_duplicate=False)),
    }
    found = {
        ".".join(key) if isinstance(key, tuple) else key: leaf
        for key, leaf in tree.items(True, True)
    }
    assert found.keys() == named.keys()
    assert all(found[name] is tensor for name, tensor in named.items())
    assert tree.batch_size == ()
    assert tree.device is None
    assert not tree.is_locked


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_can_be_read_from_the_state_dict(kind):
    net, _ = make(kind)
    tree = TensorDict.from_module(net, use_state_dict=True)
    state = net.state_dict(keep_vars=True)
    assert {
        ".".join(key) if isinstance(key, tuple) else key for key in tree.keys(True, True)
    } == set(state)
    assert all(tree[tuple(name.split("."))] is tensor for name, tensor in state.items())


def test_a_state_that_is_no_tensor_is_refused():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"n": 1}

    with pytest.raises(TypeError, match=r"of Counting\(2→2\): \['_extra_state'\] are no tensors"):
        TensorDict.from_module(Counting(2, 2), use_state_dict=True)
    assert list(TensorDict.from_module(Counting(2, 2)).keys()) == ["weight", "bias"]


def test_submodules_without_tensors_are_left_out_or_kept():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.ReLU()))
    assert list(TensorDict.from_module(net).keys()) == ["0"]
    tree = TensorDict.from_module(net, filter_empty=False)
    assert list(tree.keys(True)) == [("0", "weight"), ("0", "bias"), "0", "1", ("2", "0"), "2"]
    with tree.to_module(net):
        pass


def test_the_tree_may_be_locked_or_a_module():
    net = nn.Linear(2, 2)
    assert TensorDict.from_module(net, lock=True).is_locked
    params = TensorDict.from_module(net, as_module=True, lock=True)
    assert type(params) is TensorDictParams
    assert params.is_locked
    assert params["weight"] is net.weight


# -- from several modules ----------------------------------------------------------------------


def test_stacked_leaves_are_new_parameters_and_buffers():
    nets = [nn.BatchNorm1d(3) for _ in range(2)]
    for net in nets:
        net.bias.requires_grad_(False)
        net(torch.randn(4, 3))
    stacked = TensorDict.from_modules(*nets)
    assert stacked.batch_size == (2,)
    assert stacked.is_locked
    for name, leaf in stacked.items():
        own = [getattr(net, name) for net in nets]
        assert torch.equal(leaf, torch.stack(own))
        assert type(leaf) is type(own[0])
        assert leaf.requires_grad == own[0].requires_grad
        assert leaf.is_leaf


def test_stacked_ties_stay_ties():
    nets = []
    for _ in range(2):
        net, _ = make("tied", seed=len(nets))
        nets.append(net)
    stacked = TensorDict.from_modules(*nets, as_module=True, lock=False)
    assert stacked["first", "weight"] is stacked["second", "weight"]
    assert len(list(stacked.parameters())) == 2
    assert not stacked.is_locked


def test_a_tensor_that_is_one_in_all_modules_can_be_expanded():
    shared = nn.Parameter(torch.randn(2, 2))
    nets = [nn.Linear(2, 2) for _ in range(3)]
    for net in nets:
        net.weight = shared
    stacked = TensorDict.from_modules(*nets, expand_identical=True)
    assert stacked["weight"].data_ptr() == shared.data_ptr()
    assert stacked["weight"].shape == (3, 2, 2)
    assert stacked["bias"].data_ptr() != nets[0].bias.data_ptr()
    stacked["weight"].sum().backward()
    assert shared.grad.tolist() == [[3, 3], [3, 3]]
    assert TensorDict.from_modules(*nets)["weight"].data_ptr() != shared.data_ptr()


def test_expanded_tensors_train_through_the_module_that_holds_the_stack():
    net = nn.Linear(2, 2)
    params = TensorDict.from_modules(net, net, expand_identical=True, as_module=True)
    params["weight"].sum().backward()
    assert net.weight.grad.tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("how", [{}, {"lazy_stack": True}, {"as_module": True}])
def test_modules_of_other_structures_cannot_be_stacked(how):
    with pytest.raises(MissingKeyError, match=r"the trees differ: only the first has \['bias'\]$"):
        TensorDict.from_modules(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), **how)["weight"]


def test_what_cannot_be_stacked_is_refused():
    with pytest.raises(ValueError, match="from_modules needs at least one module"):
        TensorDict.from_modules()
    with pytest.raises(
        ValueError,
        match=r"cannot stack the modules: 'weight' has the shapes \[\(2, 2\), \(3, 2\)\]; "
        r"'bias' has the shapes \[\(2,\), \(3,\)\]",
    ):
        TensorDict.from_modules(nn.Linear(2, 2), nn.Linear(2, 3))
    with pytest.raises(
        ValueError, match="a lazy stack reads the modules' own parameters; drop as_m"
    ):
        TensorDict.from_modules(nn.Linear(2, 2), lazy_stack=True, as_module=True)
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module was expected, not int"):
        TensorDict.from_modules(nn.Linear(2, 2), 3)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_modules_that_are_not_initialised_cannot_be_stacked():
    with pytest.raises(
        ValueError,
        match=r"cannot stack the modules: \('0', 'weight'\) is not initialised \(run the nets "
        r"once\); \('0', 'bias'\) is not",
    ):
        TensorDict.from_modules(*[nn.Sequential(nn.LazyLinear(2)) for _ in range(2)])


def test_a_lazy_stack_of_modules_follows_them():
    nets = [nn.Linear(2, 2) for _ in range(2)]
    stack = TensorDict.from_modules(*nets, lazy_stack=True)
    assert type(stack) is LazyStackedTensorDict
    with torch.no_grad():
        nets[1].weight.fill_(7)
    assert (stack["weight"][1] == 7).all()
    stack["weight"].sum().backward()
    assert (nets[0].weight.grad == 1).all()
    with pytest.raises(LockedError):
        stack["weight"] = torch.zeros(2, 2, 2)


# -- any part of any module --------------------------------------------------------------------


@st.composite
def modules(draw, depth=2):
    """A module of parameters, buffers, slots without a value, and children, some of them shared."""
    net = nn.Module()
    kinds = st.sampled_from(["parameter", "buffer", "none", "frozen", "hidden"])
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3)):
        kind = draw(kinds)
        value = torch.full((draw(st.integers(1, 3)),), float(draw(st.integers(0, 9))))
        if kind == "parameter":
            net.register_parameter(name, nn.Parameter(value))
        elif kind == "frozen":
            net.register_parameter(name, nn.Parameter(value, requires_grad=False))
        else:
            value = None if kind == "none" else value
            net.register_buffer(name, value, persistent=kind != "hidden")
    if depth:
        for name in draw(st.lists(st.sampled_from("xyz"), unique=True, max_size=2)):
            children = [child for child in net.children() if child is not None]
            if children and draw(st.booleans()):
                net.register_module(name, draw(st.sampled_from([*children, None])))
            else:
                net.register_module(name, draw(modules(depth=depth - 1)))
    return net


@given(st.data(), modules())
def test_any_part_of_a_module_can_be_swapped(data, net):
    before, own = exact(net), slots(net)
    # One value for each slot, though it may have several paths.
    values = {id(value): torch.zeros(2) for value in own.values() if value is not None}
    entries = {}
    for path, value in own.items():
        if value is not None and data.draw(st.booleans()):
            entries[path] = values[id(value)]
    tree = TensorDict(entries)
    swapped = {id(own[path]): leaf for path, leaf in entries.items()}
    for _ in range(2):
        with tree.to_module(net) as old:
            shared = {path for path in own if own[path] is not None and id(own[path]) in swapped}
            for path, value in slots(net).items():
                if path in entries:
                    assert value is entries[path]
                elif path not in shared:
                    assert value is own[path]
            assert all(old[path] is own[path] for path in entries)
        assert same(before, exact(net))
        assert dict(tree.items(True, True)).keys() == {
            path[0] if len(path) == 1 else path for path in entries
        }


@given(st.data(), modules())
def test_a_name_that_no_slot_has_is_always_refused(data, net):
    before, own = exact(net), slots(net)
    path = data.draw(st.sampled_from([(), *[path[:-1] for path in own]]))
    entries = {path: torch.zeros(1) for path, value in own.items() if value is not None}
    entries[*path, "unknown"] = torch.zeros(1)
    with pytest.raises(MissingKeyError, match=r"unknown .*'unknown'"):
        TensorDict(entries).to_module(net)
    assert same(before, exact(net))


@given(modules())
def test_a_tree_of_all_slots_changes_nothing(net):
    before = exact(net)
    tree = TensorDict.from_module(net)
    with tree.to_module(net):
        assert same(before, exact(net))
    tree.to_module(net)
    assert same(before, exact(net))
    assert slots(net).keys() >= {k if isinstance(k, tuple) else (k,) for k in tree.keys(True, True)}


def test_a_tree_can_be_read_from_a_module_in_a_compiled_function():
    net = chain()
    points = torch.rand(3, net[0].in_features)

    def halved(x):
        with (TensorDict.from_module(net) * 0.5).to_module(net):
            return net(x)

    compiled = torch.compile(halved, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(points), halved(points))
