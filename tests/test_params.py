"""A tree that is a module: after whatever either side does, both show the same tensors."""

import copy
import io
import pickle

import pytest
import torch
from one_store import assert_one, registered, sample, shown
from torch import nn
from zoo import KINDS, make

from tdnn import LockedError, TensorDict, TensorDictParams


class Holder(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.params = params


# -- what is what ------------------------------------------------------------------------------


def test_tensors_that_can_have_a_gradient_become_parameters():
    params = sample()
    assert_one(params)
    assert set(dict(params.named_buffers())) == {"stat", "step", "mask"}
    assert params["small"].requires_grad
    assert params["wave"].requires_grad
    assert not params["frozen"].requires_grad
    assert params["0", "data"] is params["0", "keys", "shape"]
    assert len(list(params.parameters())) == 6  # the tie is one


def test_no_convert_makes_buffers_of_all_but_parameters():
    tree = TensorDict({"a": torch.ones(1), "b": nn.Parameter(torch.ones(1)), "c": {"d": 1.0}})
    params = TensorDictParams(tree, no_convert=True)
    assert_one(params)
    assert set(dict(params.named_buffers())) == {"a", "c.d"}
    params["e"] = torch.ones(1)
    params["c", "f"] = torch.ones(1)
    assert set(dict(params.named_buffers())) == {"a", "c.d", "e", "c.f"}
    assert params["a"] is tree["a"]


def test_parameters_keep_their_identity_and_tensors_their_memory():
    net, tree = nn.Linear(2, 2), TensorDict({"a": torch.ones(2)})
    assert TensorDictParams(TensorDict.from_module(net))["weight"] is net.weight
    assert TensorDictParams(tree)["a"].data_ptr() == tree["a"].data_ptr()
    assert not isinstance(tree["a"], nn.Parameter)  # the given tree is not changed


def test_entries_may_be_a_mapping_or_keywords_but_not_both():
    assert_one(TensorDictParams({"a": torch.ones(2), ("b", "c"): torch.ones(2)}))
    assert_one(TensorDictParams(a=torch.ones(2), b={"c": 1.0}))
    assert TensorDictParams().is_empty()
    with pytest.raises(ValueError, match="as one tree or as keyword arguments, not both"):
        TensorDictParams({"a": torch.ones(2)}, b=torch.ones(2))


def test_it_has_the_batch_size_device_and_names_of_the_tree():
    tree = TensorDict({"a": torch.ones(2, 3)}, [2], device="cpu", names=["member"])
    params = TensorDictParams(tree, lock=True)
    assert params.batch_size == (2,)
    assert params.device == torch.device("cpu")
    assert params.names == ["member"]
    assert params.is_locked
    assert type(params[0]) is TensorDict


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_of_every_kind_of_module_can_be_a_module(kind):
    net, _ = make(kind)
    params = TensorDict.from_module(net, as_module=True)
    assert_one(params)
    named = registered(net)
    assert registered(params).keys() == named.keys()
    assert all(named[name] is tensor for name, tensor in registered(params).items())
    assert {n for n, _ in params.named_parameters()} == {n for n, _ in net.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_swapped_with_params_gives_them_their_gradients(kind):
    net, x = make(kind)
    params = TensorDict.from_module(make(kind, seed=5)[0], as_module=True)
    with params.to_module(net):
        net(x).pow(2).sum().backward()
    trained = [p for p in params.parameters() if p.requires_grad]
    assert all(p.grad is None for p in net.parameters())
    assert any(p.grad is not None for p in trained) or not trained
    assert_one(params)


# -- changing the tree -------------------------------------------------------------------------


def edit_set(params):
    params["new"] = torch.ones(2)
    params["weight"] = torch.zeros(5)
    params["step"] = torch.ones(3)  # a buffer of whole numbers stays a buffer
    params["0", "deep", "er"] = nn.Parameter(torch.ones(1))
    params["branch"] = {"x": 1.0}
    assert set(dict(params.named_buffers())) == {"stat", "step", "mask"}


def edit_kind(params):
    params["stat"] = nn.Parameter(torch.ones(2))  # from buffer to parameter
    params["weight"] = {"x": 1.0}  # from parameter to branch
    params["0"] = nn.Buffer(torch.ones(1))  # from branch to buffer


def edit_delete(params):
    del params["weight"]
    del params["0", "keys"]
    params.pop("stat")


def edit_rename(params):
    params.rename_key_("weight", "w")
    params.rename_key_("stat", ("0", "stat"))
    params.rename_key_("0", "zero")
    assert "zero.stat" in dict(params.named_buffers())


def edit_lens(params):
    with params.flatten_keys(".") as flat:
        flat.rename_key_("0.data", "stem.weight")
        del flat["step"]
        flat["0.more"] = torch.ones(1)
    assert "stem.weight" in dict(params.named_parameters(remove_duplicate=False))
    assert "0.more" in dict(params.named_parameters())


def edit_update(params):
    params.update({"weight": torch.ones(2), "0": {"training": torch.ones(3), "n": torch.ones(1)}})
    params.update_({"stat": torch.zeros(3)})
    assert not params["stat"].any()


def edit_select(params):
    params.select("weight", ("0", "data"), inplace=True)
    assert list(registered(params)) == ["weight", "0.data"]


def edit_exclude(params):
    params.exclude("weight", ("0", "keys"), inplace=True)


def edit_flatten_in_place(params):
    params.flatten_keys("_", inplace=True)
    assert "0_data" in dict(params.named_parameters())
    params.unflatten_keys("_", inplace=True)


def edit_batch_size(params):
    del params["step"]
    params["mask"] = torch.tensor([True, False, True])
    params.exclude("weight", "wave", "small", inplace=True)
    params.batch_size = [3]
    assert params["0", "keys"].batch_size == (3,)


EDITS = [
    edit_set,
    edit_kind,
    edit_delete,
    edit_rename,
    edit_lens,
    edit_update,
    edit_select,
    edit_exclude,
    edit_flatten_in_place,
    edit_batch_size,
]


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_the_tree_are_seen_by_the_module(edit):
    params = sample()
    edit(params)
    assert_one(params)


@pytest.mark.parametrize("edit", [e for e in EDITS if e is not edit_batch_size])
def test_a_locked_one_refuses_edits(edit):
    params = sample().lock_()
    before = registered(params)
    with pytest.raises(LockedError):
        edit(params)
    assert registered(params) == before
    assert_one(params)
    params.unlock_()
    edit(params)
    assert_one(params)


# -- what a module can do ----------------------------------------------------------------------


def test_casts_keep_the_parameters_and_reach_both_sides():
    for cast, dtype in [("double", torch.float64), ("half", torch.float16)]:
        params = sample()
        own = dict(params.named_parameters())
        assert getattr(params, cast)() is params
        assert_one(params)
        assert all(dict(params.named_parameters())[name] is p for name, p in own.items())
        assert params["weight"].dtype is params["0", "training"].dtype is dtype
        assert params["step"].dtype == torch.int64
        assert params["mask"].dtype == torch.bool
    params = sample()
    del params["wave"]  # torch casts complex numbers, too
    params = params.to(torch.float64).float().bfloat16().cpu()
    assert_one(params)
    assert params["stat"].dtype == torch.bfloat16


def test_moves_let_the_device_follow():
    params = TensorDictParams(TensorDict({"a": torch.ones(2), "b": {"c": 1.0}}, device="cpu"))
    params.to("meta")
    assert_one(params)
    assert params.device == params["b"].device == params["b", "c"].device == torch.device("meta")
    params.to_empty(device="cpu")
    assert params.device == params["b"].device == torch.device("cpu")
    params["b", "d"] = torch.ones(1)
    assert_one(params)


@pytest.mark.parametrize("change", ["double", "half", "share_memory", "to_empty"])
def test_what_its_owner_does_reaches_both_sides(change):
    owner = Holder(sample())
    if change == "to_empty":
        owner.to_empty(device="cpu")
    else:
        getattr(owner, change)()
    assert_one(owner.params)
    named = registered(owner)
    assert all(named[f"params.{name}"] is leaf for name, leaf in shown(owner.params).items())
    if change == "double":
        assert owner.params["weight"].dtype == torch.float64


def test_apply_of_the_owner_reaches_the_leaves():
    owner, seen = Holder(sample()), []
    owner.apply(seen.append)
    leaves = {id(leaf) for leaf in owner.params.values(True, True)}
    assert leaves <= {id(value) for value in seen}


def test_apply_is_that_of_the_tree():
    params = sample()
    doubled = params.apply(lambda leaf: leaf.detach() * 2)
    assert type(doubled) is TensorDict
    assert torch.equal(doubled["weight"], params["weight"].detach() * 2)


def test_flags_reach_both_sides():
    params = sample()
    params["0"].requires_grad_(False)
    assert not params["0", "data"].requires_grad
    assert params["weight"].requires_grad
    params.requires_grad_(False)
    assert not any(p.requires_grad for p in params.parameters())
    params.requires_grad_()
    assert all(p.requires_grad for p in params.parameters())
    assert not any(b.requires_grad for b in params.buffers())
    assert_one(params)


def test_gradients_are_cleared():
    params = sample()
    sum(p.abs().sum() for p in params.parameters()).backward()
    assert params.grad["weight"] is params["weight"].grad is not None
    params.zero_grad()
    assert all(p.grad is None for p in params.parameters())


def test_training_mode_is_that_of_the_module_whatever_the_keys():
    params = sample()
    params.eval()
    assert not params.training
    assert isinstance(params["0", "training"], nn.Parameter)
    Holder(params).train()
    assert params.training
    assert_one(params)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]
)
def test_optimizers_step_as_on_the_net_itself(optimizer):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    params = TensorDictParams(TensorDict.from_module(copy.deepcopy(net)))
    x = torch.randn(5, 3)
    mine, theirs = optimizer(params.parameters(), lr=0.1), optimizer(net.parameters(), lr=0.1)
    shell = copy.deepcopy(net)
    for _ in range(3):
        mine.zero_grad()
        with params.to_module(shell):
            shell(x).pow(2).mean().backward()
        mine.step()
        theirs.zero_grad()
        net(x).pow(2).mean().backward()
        theirs.step()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(registered(params)[name], parameter)
    state = copy.deepcopy(mine.state_dict())
    again = optimizer(copy.deepcopy(params).parameters(), lr=0.1)
    again.load_state_dict(state)
    assert_one(params)


# -- state dicts -------------------------------------------------------------------------------


def test_a_state_dict_comes_back():
    one, two = sample(), sample()
    own = registered(two)
    assert not torch.equal(one["weight"], two["weight"])
    two.load_state_dict(one.state_dict())
    assert_one(two)
    for name, tensor in registered(two).items():
        assert tensor is own[name]
        assert torch.equal(tensor, registered(one)[name])


def test_a_state_dict_comes_back_through_the_owner():
    one, two = Holder(sample()), Holder(sample())
    two.load_state_dict(one.state_dict())
    assert_one(two.params)
    assert torch.equal(two.params["0", "keys", "shape"], one.params["0", "keys", "shape"])


def test_assigned_tensors_are_seen_by_the_tree():
    one, two = sample(), Holder(sample())
    state = {f"params.{name}": tensor.clone() for name, tensor in one.state_dict().items()}
    two.load_state_dict(state, strict=False, assign=True)
    assert_one(two.params)
    assert two.params["weight"].data_ptr() == state["params.weight"].data_ptr()
    assert two.params["stat"] is state["params.stat"]


def test_tensors_on_another_device_than_the_tree_cannot_be_assigned():
    params = TensorDictParams(TensorDict({"a": torch.zeros(2), "n": torch.tensor(0)}, device="cpu"))
    with pytest.raises(RuntimeError, match=r"'a': it is on the device meta(.|\n)*'n': it is on"):
        params.load_state_dict(params.data.to("meta").to_dict(), assign=True)
    assert {leaf.device.type for leaf in params.values()} == {"cpu"}


@pytest.mark.parametrize("owned", [False, True])
def test_missing_and_unexpected_names_are_reported_as_for_any_module(owned):
    params = sample()
    module, prefix = (Holder(params), "params.") if owned else (params, "")
    state = module.state_dict()
    del state[prefix + "weight"], state[prefix + "0.data"]
    state[prefix + "0.extra"] = torch.ones(1)
    state[prefix + "other"] = torch.ones(1)
    state[prefix + "no.where"] = torch.ones(1)
    report = module.load_state_dict(state, strict=False)
    assert sorted(report.missing_keys) == [prefix + "0.data", prefix + "weight"]
    assert sorted(report.unexpected_keys) == [
        prefix + name for name in ("0.extra", "no.where", "other")
    ]
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key\(s\) in state_dict: .*Unexpected key\(s\)"
    ):
        module.load_state_dict(state)
    state[prefix + "weight"] = torch.ones(9)
    with pytest.raises(RuntimeError, match="size mismatch for " + prefix + "weight"):
        module.load_state_dict(state, strict=False)
    assert_one(params)


@pytest.mark.parametrize("owned", [False, True])
def test_keys_with_dots_come_back(owned):
    def build():
        params = TensorDictParams(
            {"a.b": torch.randn(2), "c.d": {"e.f": torch.randn(2), "g": {"h.": torch.randn(2)}}}
        )
        return Holder(params) if owned else params

    one, two = build(), build()
    report = two.load_state_dict(one.state_dict())
    assert not report.missing_keys
    assert not report.unexpected_keys
    mine, theirs = registered(two), registered(one)
    assert len(mine) == 3 + 2 * owned
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    state = one.state_dict()
    state[("params." if owned else "") + "a.c"] = torch.ones(1)
    report = two.load_state_dict(state, strict=False)
    assert report.unexpected_keys == [("params." if owned else "") + "a.c"]


def test_two_keys_with_one_name_are_refused():
    """``a.b`` beside a branch ``a`` with ``b``: a state dict would lose one of them."""
    params = TensorDictParams({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(KeyError, match=r"two entries would have the name 'a\.b' in a state dict"):
        params.state_dict()
    with pytest.raises(
        KeyError, match=r"the name 'params\.a\.b' in a state dict: the key 'b', and"
    ):
        Holder(params).state_dict()


# -- copies ------------------------------------------------------------------------------------


def through_pickle(params):
    return pickle.loads(pickle.dumps(params))


def through_file(params):
    buffer = io.BytesIO()
    torch.save(params, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = [copy.deepcopy, through_pickle, through_file, TensorDictParams.clone]


@pytest.mark.parametrize(
    ("make_copy", "owned"),
    [
        (make_copy, owned)
        for make_copy in COPIES
        for owned in (False, True)
        if not (owned and make_copy is TensorDictParams.clone)  # a module has no clone
    ],
)
def test_copies_are_their_own_and_alike(make_copy, owned):
    params = sample()
    params["weight"].requires_grad_(False)
    copied = make_copy(Holder(params)).params if owned else make_copy(params)
    assert_one(copied)
    mine, theirs = registered(params), registered(copied)
    assert list(shown(params)) == list(shown(copied))
    assert set(dict(params.named_parameters())) == set(dict(copied.named_parameters()))
    for name, tensor in mine.items():
        other = theirs[name]
        assert torch.equal(tensor, other)
        assert tensor.data_ptr() != other.data_ptr()
        assert (tensor.dtype, tensor.requires_grad) == (other.dtype, other.requires_grad)
    assert copied["0", "data"] is copied["0", "keys", "shape"]
    copied["more"] = torch.ones(1)
    copied["0", "more"] = torch.ones(1)
    assert_one(copied)
    assert "more" not in params
    assert copied["more"].requires_grad
    assert copied["0", "more"].requires_grad


@pytest.mark.parametrize("make_copy", COPIES[:3])
def test_copies_keep_what_the_tree_declares(make_copy):
    tree = TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.ones(2)}}, [2], "cpu", ["n"])
    copied = make_copy(TensorDictParams(tree, no_convert=True, lock=True))
    assert copied.batch_size == copied["b"].batch_size == (2,)
    assert copied.device == torch.device("cpu")
    assert copied.names == ["n"]
    assert copied.is_locked
    assert copied["b"].is_locked
    with pytest.raises(LockedError):
        copied["b", "d"] = torch.ones(2)
    copied.unlock_()["d"] = torch.ones(2)
    assert not list(copied.parameters())  # no_convert was kept


def test_the_state_dict_can_be_loaded_without_unpickling():
    params, buffer = sample(), io.BytesIO()
    torch.save(params.state_dict(), buffer)
    buffer.seek(0)
    other = sample()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other["wave"], params["wave"])


def test_a_shallow_clone_has_the_same_tensors():
    params = sample()
    other = params.clone(recurse=False)
    assert_one(other)
    assert other["weight"] is params["weight"]
    del other["0", "data"]
    assert ("0", "data") in params


# -- as part of others -------------------------------------------------------------------------


def test_operations_return_plain_trees():
    params = TensorDictParams({"a": torch.ones(2, 3)}, no_convert=False)
    for result in (params + 1, params.detach(), params.data, params.to_dict and params.select("a")):
        assert type(result) is TensorDict
    assert (params * 2)["a"].requires_grad


def test_one_of_them_can_hold_another_and_share_it():
    inner = sample()
    outer = TensorDictParams({"x": 1.0})
    outer["inner"] = inner
    assert outer["inner"] is inner
    inner["more"] = torch.ones(1)
    assert_one(outer)
    assert "inner.more" in dict(outer.named_parameters())


def test_it_can_be_a_pytree_and_be_mapped_over():
    params = TensorDictParams(TensorDict({"w": torch.randn(3, 2), "b": {"c": torch.randn(3)}}, [3]))
    x = torch.randn(2)
    found = torch.vmap(lambda p, x: p["w"] @ x + p["b", "c"], (0, None))(params, x)
    torch.testing.assert_close(found, params["w"] @ x + params["b", "c"])
    gradient = torch.func.grad(lambda p: (p["w"] ** 2).sum() + p["b", "c"].sum())(params)
    torch.testing.assert_close(gradient["w"], 2 * params["w"].detach())
    assert gradient.batch_size == (3,)


def test_the_text_shows_it_as_a_tree():
    text = repr(Holder(sample()))
    assert "TensorDictParams(" in text
    assert "weight" in text
    assert "Parameter" in text


def test_params_are_made_from_a_nested_dict():
    params = TensorDictParams.from_dict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}})
    assert [name for name, _ in params.named_parameters()] == ["a", "b.c"]


def test_a_buffer_stays_in_the_graph_of_its_new_value():
    params = TensorDictParams({"w": torch.ones(2)}).set("stat", nn.Buffer(torch.zeros(2)))
    params["stat"] = params["w"] * 2
    params["stat"].sum().backward()
    assert params["w"].grad.tolist() == [2, 2]
    assert [name for name, _ in params.named_buffers()] == ["stat"]
