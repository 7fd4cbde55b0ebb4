"""Where in a module the leaves of a tree go, and what is said of those that have no place."""

import contextlib
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zoo import Sparse, blank, chain, exact, same, warmed

from tdnn import MissingKeyError, SwapError, TensorDict, TensorDictParams
from tdnn._plan import plan_for

# -- names that do not fit ---------------------------------------------------------------------


def test_all_unknown_names_are_listed_with_hints_and_nothing_is_swapped():
    net = chain()
    before = exact(net)
    params = blank(net)
    params["0", "weigth"] = torch.zeros(4, 4)
    params["2", "bais"] = torch.zeros(2)
    params["extra"] = {"weight": torch.zeros(1)}
    wanted = (
        r"cannot swap into Sequential: unknown \('0', 'weigth'\) \(did you mean 'weight'\?\); "
        r"unknown \('2', 'bais'\) \(did you mean 'bias'\?\); unknown 'extra'"
    )
    for options in ({}, {"inplace": True}, {"return_swap": False}):
        with pytest.raises(MissingKeyError, match=wanted):
            params.to_module(net, **options)
    assert same(before, exact(net))


def test_joined_names_are_told_to_be_nested_first():
    net = chain()
    flat = blank(net).flatten_keys(".")
    with pytest.raises(
        MissingKeyError,
        match=r"Sequential: its names are nested keys, use unflatten_keys\('\.'\); unknown '0\.w",
    ):
        flat.to_module(net)
    with flat.unflatten_keys(".").to_module(net):
        assert not net[0].weight.any()


def test_names_that_fit_a_part_are_told_where_they_belong():
    net = chain()
    params = blank(net)
    wrapped = nn.Sequential()
    wrapped.add_module("inner", net)
    with pytest.raises(MissingKeyError, match=r"those of its submodule 'inner', swap into that; "):
        params.to_module(wrapped)
    with pytest.raises(MissingKeyError, match=r"the branch 'module' of the tree fits, swap that; "):
        TensorDict({"module": params}).to_module(net)


def test_an_error_lists_the_first_faults_and_how_many_follow():
    params = TensorDict({f"w{n}": 0.0 for n in range(100)})
    with pytest.raises(MissingKeyError, match=r"unknown 'w19'; and 80 more$"):
        params.to_module(nn.Linear(2, 2))


def test_the_error_names_what_a_linear_module_maps():
    with pytest.raises(
        MissingKeyError,
        match=r"cannot swap into Linear\(4→2\): unknown 'weigth' \(did you mean 'wei",
    ):
        TensorDict({"weigth": torch.zeros(2, 4)}).to_module(nn.Linear(4, 2))


def test_a_branch_for_a_tensor_and_a_leaf_for_a_module_are_refused_together():
    net = chain()
    before = exact(net)
    params = TensorDict({"0": {"weight": {"x": torch.zeros(1)}}, "2": torch.zeros(1)})
    with pytest.raises(
        MissingKeyError,
        match=r"\('0', 'weight'\) is a tensor there, and a branch here; "
        "'2' is a module there, and a leaf here",
    ):
        params.to_module(net)
    only = TensorDict({"0": {"weight": {"x": torch.zeros(1)}}})
    with pytest.raises(MissingKeyError, match="is a tensor there, and a branch here"):
        only.to_module(net)
    with pytest.raises((MissingKeyError, ValueError), match="tensor there, and a branch here"):
        only.to_module(net, inplace=True)
    assert same(before, exact(net))


def test_a_branch_for_a_child_that_is_none_is_unknown():
    net = Sparse()
    net.register_module("gone", None)
    with pytest.raises(MissingKeyError, match="unknown 'gone'"):
        TensorDict({"gone": {"weight": torch.zeros(1)}}).to_module(net)


def test_an_attribute_that_is_no_slot_is_unknown():
    net = nn.Linear(4, 2)
    net.scale = torch.ones(1)
    with pytest.raises(MissingKeyError, match="unknown 'scale'"):
        TensorDict({"scale": torch.zeros(1)}).to_module(net)


def test_empty_branches_ask_for_nothing():
    net = chain()
    net.register_module("gone", None)
    with TensorDict({"gone": {}, "nowhere": {"deep": {"er": {}}}}).to_module(net):
        assert net.gone is None
    with pytest.raises(MissingKeyError, match=r"unknown 'nowhere'$"):
        TensorDict({"gone": {}, "nowhere": {"deep": {"er": {}, "x": 1.0}}}).to_module(net)
    with TensorDict({"1": {}, "nowhere": {}, "2": {"bias": torch.ones(2)}}).to_module(net):
        assert net[2].bias.tolist() == [1, 1]


@pytest.mark.parametrize("value", [None, 3, TensorDict({}), lambda x: x], ids=repr)
def test_only_a_module_can_be_swapped_into(value):
    for call in (TensorDict().to_module, TensorDict.from_module):
        with pytest.raises(TypeError, match=r"a torch\.nn\.Module was expected, not "):
            call(value)


def test_a_leftover_batch_dim_is_refused():
    nets = [nn.Linear(2, 2) for _ in range(3)]
    stacked = TensorDict.from_modules(*nets)
    before = exact(nets[0])
    with pytest.raises(
        SwapError,
        match=r"batch size \(3,\), but a module takes one set of weights: index it "
        r"\(params\[0\].to_module\(net\)\) or map over it with torch.vmap",
    ):
        stacked.to_module(nets[0])
    assert same(before, exact(nets[0]))
    with stacked[1].to_module(nets[0]):
        assert torch.equal(nets[0].weight, nets[1].weight)


def test_a_leftover_batch_dim_of_a_branch_is_refused():
    net = chain()
    stacked = TensorDict.from_modules(net[0], net[0])
    before = exact(net)
    with pytest.raises(SwapError, match=r"'0' has batch size \(2,\), but a module takes one set"):
        TensorDict({"0": stacked}).to_module(net)
    assert same(before, exact(net))
    deep = nn.Sequential(nn.Sequential(net))
    params = TensorDict({"0": {"0": {"0": stacked}}})
    with pytest.raises(
        SwapError, match=r"branch \('0', '0', '0'\) has .*params\[\('0', '0', '0'\)\]\[0"
    ):
        params.to_module(deep)


def test_a_module_that_is_a_tree_takes_leaves_with_its_batch_dims():
    stacked = TensorDict.from_modules(nn.Linear(2, 2), nn.Linear(2, 2), as_module=True, lock=False)
    net = nn.Sequential(nn.Linear(2, 2), stacked)
    before, zeros = exact(net), stacked.data.clone().zero_()
    assert zeros.batch_size == (2,)
    with zeros.to_module(stacked):
        assert not stacked["weight"].any()
    with TensorDict({"1": zeros}).to_module(net):
        assert stacked["weight"] is zeros["weight"]
    assert same(before, exact(net))


# -- part of a module --------------------------------------------------------------------------


def test_slots_without_a_leaf_keep_what_they_hold():
    net = chain()
    own = net[0].weight
    with TensorDict({"2": {"weight": torch.zeros(2, 4)}}).to_module(net):
        assert net[0].weight is own
        assert not net[2].weight.any()


def test_a_slot_that_holds_none_can_take_a_leaf():
    net = nn.Linear(2, 2, bias=False)
    before = exact(net)
    with TensorDict({"bias": torch.ones(2)}).to_module(net):
        assert (net(torch.zeros(2)) == 1).all()
    assert same(before, exact(net))
    assert net.bias is None


def test_the_order_of_the_trees_keys_does_not_matter():
    net = nn.Linear(2, 3)
    before = exact(net)
    with TensorDict({"bias": torch.ones(3), "weight": torch.zeros(3, 2)}).to_module(net):
        assert [name for name, _ in net.named_parameters()] == ["weight", "bias"]
    assert same(before, exact(net))


# -- a plan that is used again -----------------------------------------------------------------


def seasoned(net, params):
    """Swap until the plan is remembered; the next swap would do without a new one."""
    for _ in range(3):
        with params.to_module(net):
            pass
    assert plan_for(params, net) is plan_for(params, net)
    return params


class Loud(nn.Linear):
    """Keeps what is set in a plain attribute as well, so that a swap must tell it."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["seen"] = value


def replace_branch(net, params):
    params["0"] = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}


def replace_leaf(net, params):
    params["0", "weight"] = torch.ones(4, 4)


def drop_leaf(net, params):
    del params["0", "weight"]


def drop_branch(net, params):
    del params["0"]


def add_leaf(net, params):
    params["2"]["bias"] = torch.ones(2)


def add_branch(net, params):
    params["1"] = {}


def clear_branch(net, params):
    with params["0"].flatten_keys(".") as flat:
        del flat["weight"], flat["bias"]


def replace_child(net, params):
    net[0] = nn.Linear(4, 4)


def replace_parameter(net, params):
    net[0].weight = nn.Parameter(torch.ones(4, 4))


def replace_registry(net, params):
    net[0]._parameters = dict(net[0]._parameters)


def replace_children(net, params):
    net._modules = dict(net._modules)
    net._modules["0"] = nn.Linear(4, 4)


def replace_class(net, params):
    net[0].__class__ = Loud


def exchange_kinds(net, params):
    value = net[0].bias.detach()
    del net[0].bias
    net[0].register_buffer("bias", value)


CHANGES = [
    replace_branch,
    replace_leaf,
    drop_leaf,
    drop_branch,
    add_leaf,
    add_branch,
    clear_branch,
    replace_child,
    replace_parameter,
    replace_registry,
    replace_class,
    replace_children,
    exchange_kinds,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", [TensorDict, TensorDictParams])
@pytest.mark.parametrize("lock", [False, True])
def test_a_swap_after_a_change_is_that_of_a_new_tree(kind, lock, change):
    net = chain()
    weights = blank(net)
    del weights["2", "bias"]
    params = kind(weights)
    kept = params.to_module(net)
    for _ in range(2):
        with kept:
            pass
    if lock:
        params.lock_()
        with kept:
            pass
    seasoned(net, params)
    params.unlock_()
    change(net, params)
    if lock:
        params.lock_()
    before = exact(net)
    with TensorDict(params).to_module(net):
        wanted = exact(net)
    for swap in (params.to_module(net), kept):
        with swap:
            assert same(exact(net), wanted)
        assert same(before, exact(net))


def seen_inside(params, net):
    """Return what the module holds in a swap, or the error."""
    try:
        with params.to_module(net):
            return exact(net)
    except (MissingKeyError, SwapError) as error:
        return str(error)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(CHANGES), min_size=1, max_size=8),
    st.sampled_from([TensorDict, TensorDictParams]),
)
def test_any_changes_are_followed_in_any_order(changes, kind):
    net = chain()
    params = seasoned(net, kind(blank(net)))
    for change in changes:
        with contextlib.suppress(KeyError, AttributeError):  # gone by an earlier change
            change(net, params)
        before = exact(net)
        wanted = seen_inside(TensorDict(params), net)
        for _ in range(2):
            assert seen_inside(params, net) == wanted
            assert same(before, exact(net))


def test_a_renamed_entry_is_unknown_to_a_module_that_took_it_before():
    net = chain()
    params = seasoned(net, blank(net))
    params.rename_key_(("0", "weight"), ("0", "heavy"))
    before = exact(net)
    with pytest.raises(MissingKeyError, match=r"unknown \('0', 'heavy'\)"):
        params.to_module(net)
    assert same(before, exact(net))
    params.rename_key_(("0", "heavy"), ("0", "weight"))
    with params.to_module(net):
        assert net[0].weight is params["0", "weight"]
    assert same(before, exact(net))


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_buffer_that_came_later_goes_into_the_tree_when_the_block_fills_it(is_kept):
    net = chain()
    params = blank(net)
    kept = params.to_module(net)
    for _ in range(2):
        with kept:
            pass
    seasoned(net, params)
    net[0].register_buffer("mask", None)
    with kept if is_kept else params.to_module(net):
        net[0].mask = torch.ones(1)
    assert net[0].mask is None
    assert params["0", "mask"].item() == 1


def test_a_buffer_that_was_filled_outside_a_swap_stays_in_the_module():
    net = Sparse()
    params = seasoned(net, blank(net))
    net.mask = torch.ones(4)
    before = exact(net)
    with params.to_module(net):
        assert net.mask.all()
    assert same(before, exact(net))
    assert "mask" not in params


def test_one_tree_serves_several_modules_in_turn():
    nets = [chain(), chain()]
    params = blank(nets[0])
    before = [exact(net) for net in nets]
    for net in (*nets, *nets, nets[0], nets[0], nets[1]):
        with params.to_module(net):
            assert net[0].weight is params["0", "weight"]
    assert all(same(was, exact(net)) for was, net in zip(before, nets, strict=True))


@pytest.mark.parametrize("kind", [TensorDict, TensorDictParams])
def test_a_plan_keeps_neither_the_module_nor_its_tensors_nor_the_tree(kind):
    gc.collect()
    gc.disable()
    try:
        net = chain()
        params = seasoned(net, kind(blank(net)))
        seen = [weakref.ref(value) for value in (net, net[0], net[0].weight)]
        mine = [weakref.ref(value) for value in (params, params["0"], params["0", "weight"])]
        del net
        assert [ref() for ref in seen] == [None] * 3
        assert params["0", "weight"] is mine[2]()
        del params
        assert [ref() for ref in mine] == [None] * 3
    finally:
        gc.enable()


def test_a_plan_does_not_keep_a_module_that_its_part_refers_to():
    net = chain()
    net[0].register_forward_hook(net.forward)
    params = seasoned(net, blank(net))
    seen = [weakref.ref(net), weakref.ref(net[0].weight)]
    replaced = weakref.ref(net[2].weight)
    net[2] = nn.Linear(4, 2)
    gc.collect()
    assert replaced() is None
    del net
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert not params.is_empty()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("inplace", [None, True])
def test_a_script_module_is_refused_where_only_its_values_can_be_written(is_inner, inplace):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    script, params = torch.jit.script(net), TensorDict.from_module(net).data.clone().zero_()
    if is_inner:
        script, params = nn.Sequential(script), TensorDict({"0": params})
    with pytest.raises(SwapError, match=r"RecursiveScriptModule cannot be exchanged.*use_state_d"):
        params.to_module(script, inplace=inplace)
    x = torch.randn(2, 3)
    before = script.eval()(x)
    with params.to_module(script, use_state_dict=True):
        assert not script(x).any()
    assert torch.equal(script(x), before)


# -- names and kinds that change -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_memory", "_data", "_lock", "_scope", "_batch_size"])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_an_entry_may_have_the_name_of_what_a_node_consists_of(name, kind):
    net = nn.Module()
    if kind == "parameter":
        net.register_parameter(name, nn.Parameter(torch.zeros(2)))
    elif kind == "buffer":
        net.register_buffer(name, torch.zeros(2))
    else:
        net.register_module(name, nn.Linear(2, 2))
    before = exact(net)
    params = TensorDictParams(TensorDict.from_module(net).data.clone())
    for _ in range(3):
        with params.to_module(net):
            assert TensorDict.from_module(net)[name] is not None
        assert same(before, exact(net))


def test_a_slot_that_became_a_module_takes_the_branch_that_a_leaf_became():
    net = nn.Module()
    net.a = nn.Parameter(torch.zeros(2))
    params = blank(net)
    kept = warmed(params.to_module(net))
    del net.a
    net.a = nn.Linear(2, 2)
    params["a"] = blank(net.a)
    before = exact(net)
    with kept:
        assert net.a.weight is params["a", "weight"]
    assert same(before, exact(net))
    with params.to_module(net):
        assert net.a.weight is params["a", "weight"]
    assert same(before, exact(net))
