"""What may be an entry of a tree that is a module, and by which way it gets there."""

import copy
import pickle

import pytest
import torch
from one_store import assert_one, sample
from torch import nn

from tdnn import LockedError, TensorDict, TensorDictParams


def test_attributes_of_modules_do_not_hide_entries_nor_entries_attributes():
    names = ["keys", "data", "_parameters", "state_dict", "training", "no_convert", "_lock"]
    names += ["_batch_size", "_device", "_data", "_names", "_scope"]
    params = TensorDictParams({name: float(n) for n, name in enumerate(names)})
    params = copy.deepcopy(params.train().eval().to("cpu").lock_().unlock_())
    assert_one(params)
    assert [params[name].item() for name in names] == list(range(len(names)))
    assert not params.training
    assert not params.is_locked
    assert params.batch_size == ()
    assert type(params.data) is TensorDict


def test_only_tensors_can_be_parameters():
    with pytest.raises(TypeError):
        TensorDictParams({"a": "text"})
    params = sample()
    with pytest.raises(TypeError):
        params["a"] = object()
    assert_one(params)


def test_a_registered_slot_of_the_module_is_an_entry_of_the_tree():
    params = sample()
    params.register_buffer("late", torch.ones(1))
    params.register_parameter("later", nn.Parameter(torch.ones(1)))
    assert_one(params)
    params.late = torch.zeros(1)
    assert params["late"] == 0
    assert_one(params)


@pytest.mark.parametrize(
    "change",
    [
        lambda params: params,
        lambda params: params.double(),
        lambda params: params.clone(),
        lambda params: copy.deepcopy(params),
        lambda params: pickle.loads(pickle.dumps(params)),
        lambda params: params.set("b", torch.zeros(2)),
        lambda params: params.update({"b": torch.zeros(2)}),
    ],
)
def test_a_buffer_stays_one_under_another_name(change):
    params = TensorDictParams({"w": nn.Parameter(torch.ones(2)), "b": nn.Buffer(torch.ones(2))})
    params = change(params).rename_key_("b", ("inner", "c"))
    assert [name for name, _ in params.named_buffers()] == ["inner.c"]
    assert [name for name, _ in params.named_parameters()] == ["w"]


ADDED = {
    "parameter": nn.Parameter(torch.ones(1)),
    "buffer": nn.Buffer(torch.ones(1)),
    "branch": TensorDictParams({"x": 1.0}),
}


def register(params, name, value):
    if isinstance(value, nn.Module):
        params.register_module(name, value)
    elif isinstance(value, nn.Parameter):
        params.register_parameter(name, value)
    else:
        params.register_buffer(name, value)


@pytest.mark.parametrize("add", [setattr, register])
@pytest.mark.parametrize("value", ADDED.values(), ids=ADDED.keys())
def test_the_module_adds_entries_to_an_unlocked_tree_only(add, value):
    params = sample()
    add(params, "new", value)
    assert params["new"] is value
    assert_one(params)
    params.lock_()
    with pytest.raises(LockedError, match="cannot set 'newer': the tree is locked"):
        add(params, "newer", value)
    with pytest.raises(LockedError, match="cannot set 'stat': the tree is locked"):
        params.stat = torch.zeros(3)
    assert "newer" not in params
    assert_one(params)


@pytest.mark.parametrize("add", [setattr, register, TensorDictParams.add_module])
def test_a_module_that_is_no_tree_is_no_entry(add):
    params = sample()
    with pytest.raises(
        TypeError, match=r"'head': a TensorDictParams holds tensors and branches, n"
    ):
        add(params, "head", nn.Linear(2, 2))
    add(params, "head", TensorDict.from_module(nn.Linear(2, 2), as_module=True))
    assert params["head", "weight"].shape == (2, 2)
    assert_one(params)


def test_an_entry_has_a_value():
    params = sample()
    for method in (params.register_parameter, params.register_buffer, params.add_module):
        with pytest.raises(
            TypeError, match="'none': a TensorDictParams holds tensors and branches"
        ):
            method("none", None)
    assert_one(params)


def test_a_tie_of_plain_tensors_is_one_parameter():
    tied, other = torch.zeros(2), torch.zeros(2)
    params = TensorDictParams(TensorDict({"a": tied, "b": {"c": tied, "d": other}}))
    assert params["a"] is params["b", "c"]
    assert params["a"].data_ptr() == tied.data_ptr()
    assert len(list(params.parameters())) == 2
    params.data.add_(1)
    assert params["a"].tolist() == [1, 1]
    assert_one(params)


def test_the_module_deletes_entries_of_an_unlocked_tree_only():
    params = sample().lock_()
    with pytest.raises(LockedError, match="cannot delete 'weight': the tree is locked"):
        del params.weight
    del params.unlock_().weight
    assert "weight" not in params
    assert_one(params)


@pytest.mark.parametrize("add", [setattr, register])
def test_what_the_module_adds_fits_the_tree(add):
    params = TensorDictParams(TensorDict({"w": torch.ones(2)}, [2], device="cpu"))
    with pytest.raises(ValueError, match=r"key 'w2': shape \(3,\) does not begin with the batch"):
        add(params, "w2", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="key 'w2': it is on the device meta, and the tree on cpu"):
        add(params, "w2", nn.Parameter(torch.zeros(2, device="meta")))
    with pytest.raises(ValueError, match=r"key 'w2': shape \(\) does not begin with the batch"):
        add(params, "w2", TensorDictParams({"x": 1.0}, lock=True))
    add(params, "w2", nn.Parameter(torch.zeros(2, 5)))
    assert_one(params)


def test_a_new_value_of_a_parameter_is_a_parameter_whatever_plain_tensors_become():
    params = TensorDictParams(TensorDict.from_module(nn.Linear(4, 2)), no_convert=True)
    params["bias"].requires_grad_(False)
    plain = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}
    writes = [
        lambda: params.update(plain),
        lambda: [params.set(key, value) for key, value in plain.items()],
        lambda: [params.__setitem__(key, value) for key, value in plain.items()],
    ]
    for write in writes:
        write()
        assert {n: p.requires_grad for n, p in params.named_parameters()} == {
            "weight": True,
            "bias": False,
        }
    with params.flatten_keys(".") as view:
        view["weight"] = torch.zeros(2, 4)
        view["extra"] = torch.zeros(1)
    assert [name for name, _ in params.named_parameters()] == ["weight", "bias"]
    assert [name for name, _ in params.named_buffers()] == ["extra"]
    params["weight"] = nn.Buffer(torch.ones(2, 4))  # asked for
    assert [name for name, _ in params.named_parameters()] == ["bias"]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda p: p.clone(), None])
def test_a_copy_knows_which_buffers_are_not_saved(duplicate):
    params = TensorDictParams({"w": torch.zeros(2), "b": {"v": torch.zeros(2)}})
    params["b"].register_buffer("cache", torch.ones(1), persistent=False)
    made = params.clone(False) if duplicate is None else duplicate(params)
    assert list(made.state_dict()) == ["w", "b.v"]
    assert ("b", "cache") in made
