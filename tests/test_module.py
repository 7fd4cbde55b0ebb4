"""``TensorDictModule``, its base, and ``WrapModule``."""

import copy
import functools
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
from chains import ONE, TWO, fork, keys, plus_one, tree
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tdnn import TensorDict
from tdnn.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    WrapModule,
    dispatch,
)


class Doubling(TensorDictModuleBase):
    """A module with a forward of its own, and keys in the class."""

    in_keys, out_keys = ["a"], ["b", "c"]

    @dispatch
    def forward(self, tensordict):
        tensordict["b"] = 2 * tensordict["a"]
        tensordict["c"] = 4 * tensordict["a"]
        return tensordict


# -- reading -------------------------------------------------------------------------------------


def test_a_module_reads_in_the_order_of_its_in_keys_and_writes_into_the_input():
    module = TensorDictModule(torch.sub, in_keys=["x", "y"], out_keys=["z"])
    td = tree(y=ONE, x=TWO)
    assert module(td) is td
    assert torch.equal(td["z"], ONE)
    assert keys(td) == ["y", "x", "z"]


def test_keys_may_be_nested():
    module = TensorDictModule(fork, [("in", "x")], [("out", "deep", "y"), ("out", "z")])
    td = module(tree(**{"in": {"x": ONE}}))
    assert torch.equal(td["out", "deep", "y"], TWO)
    assert torch.equal(td["out", "z"], ONE + 2)
    assert td["out", "deep"].batch_size == (2,)


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("x", ["x"]),
        (("n", "x"), [("n", "x")]),
        ([("n", ("m", "x")), ("y",)], [("n", "m", "x"), "y"]),
        ([], []),
    ],
)
def test_keys_are_normalised_on_construction(given, normal):
    module = TensorDictModule(plus_one, given, given)
    assert module.in_keys == normal
    assert module.out_keys == normal


def test_a_branch_may_be_an_input_and_an_output():
    module = TensorDictModule(lambda branch: branch.apply(plus_one), ["n"], ["m"])
    td = module(tree(n={"x": ONE}))
    assert torch.equal(td["m", "x"], TWO)


@pytest.mark.parametrize("turned", [False, True])
def test_a_dict_passes_inputs_by_name(turned):
    def minus(*, a, b, c=0):
        return a - b + c

    names = {"b": "y", "a": ("n", "x")}
    if turned:
        names = {key: name for name, key in names.items()}
    module = TensorDictModule(minus, names, ["z"], out_to_in_map=not turned)
    assert module.in_keys == ["y", ("n", "x")]
    td = tree(n={"x": 3 * ONE}, y=TWO)
    assert torch.equal(module(td)["z"], ONE)
    assert torch.equal(module(td, c=5)["z"], 6 * ONE)
    assert torch.equal(module(y=TWO, n_x=3 * ONE), ONE)


def test_one_key_may_serve_several_arguments():
    module = TensorDictModule(lambda *, a, b: a * b, {"a": "x", "b": "x"}, ["z"])
    assert torch.equal(module(tree(x=TWO))["z"], 2 * TWO)
    assert torch.equal(module(TWO), 2 * TWO)


def test_a_method_may_be_called_with_arguments_of_its_own():
    class Net(nn.Module):
        def scale(self, x, by):
            return x * by

    module = TensorDictModule(Net(), ["x"], ["y"], method="scale", method_kwargs={"by": 3})
    assert torch.equal(module(tree())["y"], 3 * ONE)
    assert torch.equal(module(tree(), by=5)["y"], 5 * ONE)  # the call's own argument wins
    assert torch.equal(module(ONE), 3 * ONE)


def test_method_kwargs_serve_the_module_itself_too():
    module = TensorDictModule(lambda x, by=1: x * by, ["x"], ["y"], method_kwargs={"by": 3})
    assert torch.equal(module(tree())["y"], 3 * ONE)


def test_get_kwargs_reach_get():
    seen = []

    class Watched(TensorDict):
        def get(self, key, default=None, **kwargs):
            seen.append(kwargs)
            return super().get(key, default)

    module = TensorDictModule(plus_one, ["x"], ["y"], get_kwargs={"padded": True})
    module(Watched({"x": ONE}, [2]))
    assert seen == [{"padded": True}]


def test_any_callable_will_do():
    class Callable:
        def __call__(self, x):
            return x + 1

        def shift(self, x):
            return x + 1

    partial = functools.partial(torch.add, other=1)
    for function in (plus_one, Callable(), Callable().shift, partial, nn.Identity(), torch.relu):
        assert "y" in TensorDictModule(function, ["x"], ["y"])(tree())


def test_an_empty_container_is_a_module_like_any_other():
    module = TensorDictModule(nn.Sequential(), ["x"], ["y"])
    assert module(tree())["y"] is not None


# -- what the module returns ---------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "several", [lambda x: (x, x + 1), lambda x: [x, x + 1], lambda x: Pair(x, x + 1)]
)
def test_outputs_are_written_in_order(several):
    td = TensorDictModule(several, ["x"], ["p", "q"])(tree())
    assert torch.equal(td["p"], ONE)
    assert torch.equal(td["q"], TWO)


@pytest.mark.parametrize("kind", [dict, OrderedDict, TensorDict])
def test_a_mapping_that_holds_all_keys_is_read_by_key(kind):
    def named(x):
        return kind({"q": x + 1, "more": x, "n": {"p": x}})

    td = TensorDictModule(named, ["x"], [("n", "p"), "q"])(tree())
    assert torch.equal(td["n", "p"], ONE)
    assert torch.equal(td["q"], TWO)
    assert "more" not in td
    td = TensorDictModule(named, ["x"], ["_", "q"])(tree())
    assert keys(td) == ["x", "q"]


def test_a_mapping_with_tuple_keys_is_read_by_key():
    td = TensorDictModule(lambda x: {("n", "p"): x, "q": x}, ["x"], ["q", ("n", "p")])(tree())
    assert td["n", "p"] is td["x"]


def test_another_mapping_is_the_value_of_a_single_key():
    td = TensorDictModule(lambda x: {"p": x, "q": x + 1}, ["x"], ["y"])(tree())
    assert torch.equal(td["y", "q"], TWO)


def test_an_underscore_drops_an_output_of_any_kind():
    td = TensorDictModule(lambda x: (x, None, object()), ["x"], ["y", "_", "_"])(tree())
    assert keys(td) == ["x", "y"]
    assert TensorDictModule(fork, ["x"], ["_", "y"])(ONE).tolist() == [3, 3]
    assert keys(TensorDictModule(lambda x: {"p": x}, ["x"], ["_"])(tree())) == ["x"]
    assert keys(TensorDictModule(plus_one, ["x"], ["_"])(tree())) == ["x"]


def test_a_module_without_outputs_returns_none():
    seen = []
    td = TensorDictModule(seen.append, ["x"], [])(tree())
    assert keys(td) == ["x"]
    assert torch.equal(seen[0], ONE)


def test_a_module_without_inputs_only_writes():
    module = TensorDictModule(lambda: torch.zeros(2), [], ["y"])
    assert keys(module(TensorDict({}, [2]))) == ["y"]
    assert torch.equal(module(), torch.zeros(2))


# -- where the outputs go ------------------------------------------------------------------------


def test_inplace_says_where_the_outputs_go():
    td = TensorDict({"x": ONE}, [2], device="cpu")
    out = TensorDictModule(plus_one, ["x"], ["y"], inplace=False)(td)
    assert (keys(out), out.batch_size, out.device) == (["y"], (), None)
    out = TensorDictModule(plus_one, ["x"], ["y"], inplace="empty")(td)
    assert (keys(out), out.batch_size, out.device) == (["y"], (2,), torch.device("cpu"))
    assert keys(td) == ["x"]


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_tensordict_out_is_written_whatever_inplace_says(inplace):
    td, out = tree(), TensorDict({"old": ONE})
    module = TensorDictModule(plus_one, ["x"], ["y"], inplace=inplace)
    assert module(td, tensordict_out=out) is out
    assert keys(td) == ["x"]
    assert keys(out) == ["old", "y"]
    assert torch.equal(module(ONE, tensordict_out=out), TWO)


def test_inplace_may_be_changed_later():
    module = TensorDictModule(plus_one, ["x"], ["y"])
    module.inplace = False
    assert keys(module(tree())) == ["y"]
    with pytest.raises(ValueError, match=r"inplace is one of \[True, False, 'empty'\], not 'no'"):
        module.inplace = "no"


# -- keys that are changed later -----------------------------------------------------------------


def test_keys_may_be_reassigned():
    net = nn.Identity()
    module = TensorDictModule(net, ["x"], ["y"])
    net.register_forward_hook(lambda mod, args, out: (out, out + 1))
    module.out_keys = ["p", ("n", "q")]
    module.in_keys = "z"
    td = module(tree(z=ONE))
    assert keys(td) == ["z", "p", ("n", "q")]
    assert [out.tolist() for out in module(z=ONE)] == [[1, 1], [2, 2]]


def test_a_list_of_keys_that_was_read_is_a_copy():
    module = TensorDictModule(plus_one, ["x"], ["y"])
    module.in_keys.append("more")
    module.out_keys.append("more")
    assert (module.in_keys, module.out_keys) == (["x"], ["y"])


def test_reassigned_keys_keep_the_names_of_arguments():
    module = TensorDictModule(lambda *, a, b: a - b, {"a": "x", "b": "y"}, ["z"])
    module.in_keys = ["p", "q"]
    assert torch.equal(module(tree(p=TWO, q=ONE))["z"], ONE)
    with pytest.raises(ValueError, match=r"by name, to \['a', 'b'\]; \['p'\] does not fit"):
        module.in_keys = ["p"]
    module.in_keys = {"b": "p", "a": "q"}
    assert torch.equal(module(tree(p=TWO, q=ONE))["z"], -ONE)


def test_an_input_list_may_become_a_dict():
    module = TensorDictModule(torch.sub, ["x", "y"], ["z"])
    module.in_keys = {"other": "x", "input": "y"}
    assert torch.equal(module(tree(x=ONE, y=TWO))["z"], ONE)


def test_selected_keys_are_the_only_ones_written():
    module = TensorDictModule(fork, ["x"], ["y", "z"])
    assert module.select_out_keys("z") is module
    assert (module.out_keys, module.out_keys_source) == (["z"], ["y", "z"])
    td = module(tree(x=ONE, y=7 * ONE))
    assert torch.equal(td["y"], 7 * ONE)
    assert torch.equal(td["z"], ONE + 2)
    assert torch.equal(module(ONE), ONE + 2)
    module.select_out_keys("y")
    assert torch.equal(module(ONE), TWO)
    assert module.reset_out_keys() is module
    assert (module.out_keys, module.out_keys_source) == (["y", "z"], ["y", "z"])
    assert len(module(ONE)) == 2


def test_selected_outputs_come_in_the_order_of_the_selection():
    for module in (
        TensorDictModule(fork, ["x"], ["y", "z"]),
        TensorDictSequential(TensorDictModule(fork, ["x"], ["y", "z"])),
        WithBoth(),
    ):
        for order in (["z", "y"], ["y", "z"]):
            module.select_out_keys(*order)
            assert module.out_keys == order
            named = dict(zip(order, module(ONE), strict=True))
            assert torch.equal(named["y"], ONE + 1)
            assert torch.equal(named["z"], ONE + 2)


class WithBoth(TensorDictModuleBase):
    in_keys, out_keys = ["x"], ["y", "z"]

    @dispatch
    def forward(self, tensordict):
        return tensordict.update({"y": tensordict["x"] + 1, "z": tensordict["x"] + 2})


def test_new_out_keys_end_a_selection():
    module = TensorDictModule(fork, ["x"], ["y", "z"]).select_out_keys("z")
    module.out_keys = ["p", "q"]
    assert module.out_keys_source == ["p", "q"]
    assert len(module(ONE)) == 2


def test_a_module_with_its_own_forward_deletes_what_is_not_selected():
    module = Doubling().select_out_keys("c")
    assert (module.out_keys, module.out_keys_source) == (["c"], ["b", "c"])
    assert keys(module(tree(a=ONE))) == ["a", "c"]
    assert torch.equal(module(ONE), 4 * ONE)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert keys(copied(tree(a=ONE))) == ["a", "c"]
    for one in (copied, module):
        assert keys(one.reset_out_keys()(tree(a=ONE))) == ["a", "b", "c"]
    assert keys(copied(tree(a=ONE))) == ["a", "b", "c"]
    assert Doubling.out_keys == ["b", "c"]


@pytest.mark.parametrize(
    "module", [TensorDictModule(fork, ["a"], ["b", "c"]), Doubling()], ids=["wrapped", "own"]
)
def test_only_outputs_can_be_selected(module):
    match = (
        r"cannot select \['bb', \('n', 'x'\)\]: its out_keys are \['b', 'c'\] \(did you mean 'b'"
    )
    with pytest.raises(ValueError, match=match):
        module.select_out_keys("bb", "c", ("n", "x"))
    assert module.out_keys == ["b", "c"]


# -- a module like any other ---------------------------------------------------------------------


def test_public_attributes_are_those_of_the_wrapped_module():
    module = TensorDictModule(nn.Linear(2, 3), ["x"], ["y"])
    for one in (
        module,
        copy.copy(module),
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
    ):
        assert one.in_features == 2
        assert one.weight is one.module.weight
        assert list(one.state_dict()) == ["module.weight", "module.bias"]
        assert not hasattr(one, "no_such_thing")
        assert not hasattr(one, "_no_such_thing")
        match = "no attribute 'weigth', and neither has the wrapped Linear"
        with pytest.raises(AttributeError, match=match) as info:
            one.weigth  # noqa: B018  # reading it is the test
        assert info.value.name == "weigth"


def test_private_attributes_are_not_those_of_the_wrapped_module():
    net = nn.Linear(2, 3)
    net._secret = 1
    with pytest.raises(
        AttributeError, match="'TensorDictModule' object has no attribute '_secret'"
    ):
        TensorDictModule(net, ["x"], ["y"])._secret  # noqa: B018  # reading it is the test


def test_a_half_made_module_has_no_endless_recursion():
    bare = TensorDictModule.__new__(TensorDictModule)
    with pytest.raises(AttributeError, match="weight"):
        bare.weight  # noqa: B018  # reading it is the test
    nn.Module.__init__(bare)
    with pytest.raises(AttributeError, match="weight"):
        bare.weight  # noqa: B018  # reading it is the test


def test_a_wrapped_module_may_be_replaced():
    module = TensorDictModule(plus_one, ["x"], ["y"])
    module.module = nn.Identity()
    assert torch.equal(module(tree())["y"], ONE)
    module.module = nn.Flatten(0)
    assert module.start_dim == 0


def test_copies_are_independent():
    module = TensorDictModule(nn.Linear(2, 2), ["x"], ["y"]).select_out_keys("y")
    twin = copy.deepcopy(module)
    twin.out_keys = ["z"]
    with torch.no_grad():
        twin.weight.zero_()
    assert module.out_keys == ["y"]
    assert module.weight.abs().sum() > 0


def test_hooks_of_wrapper_and_wrapped_run():
    net, seen = nn.Linear(2, 2), []
    module = TensorDictModule(net, ["x"], ["y"])
    for one, name in ((module, "wrapper"), (net, "net")):
        one.register_forward_pre_hook(lambda mod, args, name=name: seen.append((name, "pre")))
        one.register_forward_hook(lambda mod, args, out, name=name: seen.append((name, "post")))
    wanted = [("wrapper", "pre"), ("net", "pre"), ("net", "post"), ("wrapper", "post")]
    module(tree())
    assert seen == wanted
    module(ONE)
    assert seen == 2 * wanted


def test_modes_casts_and_gradients_reach_the_wrapped_module():
    module = TensorDictModule(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), ["x"], ["y"])
    assert not module.eval().module[1].training
    module.double().requires_grad_(False)
    assert module(ONE.double()).dtype == torch.float64
    module.requires_grad_(True)(ONE.double()).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(
    ("module", "picture"),
    [
        (
            TensorDictModule(nn.ReLU(), ["x"], [("n", "y")]),
            "TensorDictModule(module=ReLU(), in_keys=['x'], out_keys=[('n', 'y')])",
        ),
        (
            TensorDictModule(torch.add, {"input": "x", "other": "y"}, ["z"], inplace=False),
            "TensorDictModule(\n  module=add,\n  in_keys={'input': 'x', 'other': 'y'},\n"
            "  out_keys=['z'],\n  inplace=False\n)",
        ),
        (
            TensorDictModule(nn.Sequential(nn.ReLU()), ["x"], ["y"], method="forward"),
            "TensorDictModule(\n  module=Sequential(\n    (0): ReLU()\n  ),\n  method='forward',\n"
            "  in_keys=['x'],\n  out_keys=['y']\n)",
        ),
        (WrapModule(plus_one), "WrapModule(plus_one)"),
        (
            WrapModule(plus_one, in_keys="x", out_keys=[]),
            "WrapModule(plus_one, in_keys=['x'], out_keys=[])",
        ),
    ],
)
def test_the_picture_shows_the_keys(module, picture):
    assert repr(module) == picture


def test_parameters_are_drawn_anew():
    module = TensorDictModule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["x"], ["y"])
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(5)
    assert module.reset_parameters_recursive() is None
    torch.manual_seed(5)
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    for name, value in module.state_dict().items():
        assert not torch.equal(value, before[name])
        assert torch.equal(value, fresh[name.removeprefix("module.")])


def test_parameters_in_a_tree_are_drawn_anew_and_the_module_keeps_its_own():
    module = TensorDictModule(nn.Linear(2, 2), ["x"], ["y"])
    before = copy.deepcopy(module.state_dict())
    params = TensorDict.from_module(module).clone().detach()
    fresh = module.reset_parameters_recursive(params)
    assert all(leaf.requires_grad for leaf in fresh.values(True, True))
    weight = params["module", "weight"]
    assert fresh["module", "weight"].data_ptr() == weight.data_ptr()
    assert not torch.equal(weight, before["module.weight"])
    assert torch.equal(module.weight, before["module.weight"])


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 3), nn.BatchNorm1d(2)),
        lambda: weight_norm(nn.Linear(2, 2)),
        lambda: TensorDictModule(weight_norm(nn.Linear(2, 2)), "x", "y"),
    ],
)
def test_what_is_drawn_anew_is_as_when_it_is_made(build):
    module = TensorDictModule(build(), ["x"], ["y"])
    params = TensorDict.from_module(module).data.clone()
    kept = copy.deepcopy(module.state_dict())
    for draw, found in (
        (lambda: module.reset_parameters_recursive(params), params),
        (module.reset_parameters_recursive, TensorDict.from_module(module)),
    ):
        for name, value in module.state_dict().items():
            assert torch.equal(value, kept[name])
        torch.manual_seed(5)
        draw()
        torch.manual_seed(5)
        for key, value in TensorDict.from_module(TensorDictModule(build(), "x", "y")).items(
            True, True
        ):
            torch.testing.assert_close(found[key], value, msg=str(key))


def test_a_module_may_draw_its_parts_anew_in_a_reset_of_its_own():
    class Resetting(TensorDictModule):
        def reset_parameters(self):
            self.reset_parameters_recursive()
            nn.init.ones_(self.module.bias)

    module = Resetting(nn.Linear(2, 2), ["x"], ["y"])
    before = module.module.weight.clone()
    module.reset_parameters()
    assert not torch.equal(module.module.weight, before)
    assert (module.module.bias == 1).all()
    outer = TensorDictSequential(module)
    outer.reset_parameters_recursive()
    assert (module.module.bias == 1).all()


def test_there_must_be_something_to_draw_anew():
    with pytest.raises(RuntimeError, match="holds no module with a reset_parameters method"):
        TensorDictModule(nn.ReLU(), ["x"], ["y"]).reset_parameters_recursive()


# -- WrapModule ----------------------------------------------------------------------------------


def test_a_function_of_a_tree_may_be_a_module():
    td = TensorDict({"x": torch.ones(2, 3)}, [2, 3])
    assert WrapModule(lambda td: td.reshape(-1))(td).batch_size == (6,)
    assert td.batch_size == (2, 3)


def test_a_function_may_write_its_result_into_the_input():
    td = tree()
    assert WrapModule(lambda td: TensorDict({"y": td["x"] + 1}, [2]), inplace=True)(td) is td
    assert torch.equal(td["y"], TWO)
    assert WrapModule(lambda td: td, inplace=True)(td) is td


def test_a_function_may_be_a_module_with_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, td):
            return td.set("y", self.inner(td["x"]))

    module = WrapModule(Net(), in_keys=["x"], out_keys=["y"])
    assert len(list(module.parameters())) == 2
    assert "y" in module(tree())


def test_wrap_module_wraps_callables():
    with pytest.raises(TypeError, match="WrapModule wraps a function of a tree, not 3"):
        WrapModule(3)
    with pytest.raises(TypeError, match=r"WrapModule\(plus_one\): in_keys \[1\] has \[1\]"):
        WrapModule(plus_one, in_keys=[1])


def test_compatible_modules_say_their_keys():
    class Foreign:
        in_keys, out_keys = [], []

    compatible = TensorDictModuleBase.is_tdmodule_compatible
    assert compatible(Foreign())
    assert compatible(Doubling())
    assert not compatible(nn.Linear(1, 1))
