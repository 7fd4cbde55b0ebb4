"""A stack that is made anew whenever it is read."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tdnn import LazyStackedTensorDict, LockedError, MissingKeyError, TensorDict


def rows(count=3):
    return [
        TensorDict({"a": torch.full((2,), float(n)), "b": {"c": torch.full((2, 4), n)}}, [2])
        for n in range(count)
    ]


def test_it_reads_as_the_stack_of_its_members():
    members = rows()
    lazy, dense = LazyStackedTensorDict(*members), torch.stack(members)
    assert lazy.batch_size == dense.batch_size == (3, 2)
    assert lazy["b"].batch_size == dense["b"].batch_size
    assert lazy.keys(True, True) == dense.keys(True, True)
    for key in dense.keys(True, True):
        assert torch.equal(lazy[key], dense[key])
    assert (lazy == dense).all()
    assert all(mine is member for mine, member in zip(lazy.tensordicts, members, strict=True))


def test_operations_give_plain_trees_like_those_of_the_stack():
    lazy, dense = LazyStackedTensorDict(*rows()), torch.stack(rows())
    for act in (
        lambda td: td + 1,
        lambda td: td.reshape(-1),
        lambda td: td[1],
        lambda td: td.clone(),
        lambda td: td.flatten_keys("."),
        lambda td: td.select("a"),
    ):
        found, wanted = act(lazy), act(dense)
        assert type(found) is TensorDict
        assert found.batch_size == wanted.batch_size
        assert (found == wanted).all()


def test_it_shows_the_present_values_and_keys_of_its_members():
    members = rows(2)
    lazy = LazyStackedTensorDict(*members)
    members[0]["a"].fill_(9)
    assert lazy["a"][0].tolist() == [9, 9]
    for member in members:
        member["new"] = torch.ones(2)
        del member["b"]
    assert list(lazy.keys()) == ["a", "new"]


def test_gradients_reach_the_members():
    nets = [nn.Linear(2, 2) for _ in range(2)]
    shell = nn.Linear(2, 2, device="meta")
    lazy = TensorDict.from_modules(*nets, lazy_stack=True)

    def run(weights, x):
        with weights.to_module(shell):
            return shell(x)

    x = torch.randn(4, 2)
    torch.vmap(run, (0, None))(lazy, x).pow(2).sum().backward()
    for net in nets:
        found = net.weight.grad.clone()
        net.zero_grad()
        net(x).pow(2).sum().backward()
        torch.testing.assert_close(found, net.weight.grad)


def test_it_cannot_be_written():
    lazy = LazyStackedTensorDict(*rows())
    for write in (
        lambda: lazy.set("a", torch.zeros(3, 2)),
        lambda: lazy.set("z", torch.zeros(3, 2)),
        lambda: lazy["b"].set("c", torch.zeros(3, 2)),
        lambda: lazy.del_("a"),
        lambda: lazy.rename_key_("a", "z"),
        lambda: lazy.update({"a": torch.zeros(3, 2)}),
    ):
        with pytest.raises(LockedError):
            write()
    assert lazy.lock_() is lazy
    with pytest.raises(
        LockedError, match="a lazy stack has no entries of its own to unlock; change"
    ):
        lazy.unlock_()
    assert lazy.is_locked


@pytest.mark.parametrize("open_lens", [TensorDict.flatten_keys, TensorDict.unflatten_keys])
def test_a_lens_on_one_is_refused_because_what_it_writes_would_be_lost(open_lens):
    lazy = LazyStackedTensorDict(*rows())
    for tree in (lazy, lazy["b"], TensorDict({"in": {"a": lazy}})):
        view = open_lens(tree, ".")
        with pytest.raises(LockedError, match="a lazy stack has no memory of its own"), view:
            pass


def test_a_file_gives_back_the_stack_and_not_its_members(tmp_path):
    lazy = LazyStackedTensorDict(*rows())
    found = type(lazy.save(tmp_path / "stack")).load(tmp_path / "stack", verify=True)
    assert type(found) is TensorDict
    assert found.batch_size == (3, 2)
    assert (found == torch.stack(rows())).all()


def test_a_dict_becomes_a_plain_tree():
    found = LazyStackedTensorDict.from_dict({"a": torch.zeros(3, 2)}, batch_size=[3])
    assert type(found) is TensorDict
    assert found.batch_size == (3,)
    lazy = LazyStackedTensorDict(*rows())
    assert lazy.from_dict(lazy.to_dict(), batch_size=[3])["b", "c"].shape == (3, 2, 4)


@pytest.mark.parametrize("member", [{"a": torch.zeros(2)}, torch.zeros(2), None])
def test_a_stack_is_made_of_trees(member):
    with pytest.raises(TypeError, match=r"stack is made of trees, not of (dict|Tensor|NoneType)"):
        LazyStackedTensorDict(*rows(), member)


IN_PLACE = [
    name
    for name in dir(TensorDict)
    if (name.endswith("_") and name[0] != "_")
    or (name.startswith("__i") and not name.startswith(("__init", "__iter", "__inv")))
]
STRUCTURE = {"lock_", "unlock_", "del_", "rename_key_"}  # refused as on any locked tree


NO_OPERAND = {"abs_", "exp_", "log_", "neg_", "reciprocal_", "sqrt_", "zero_"}
OPERANDS = {
    "addcdiv_": (1, 1),
    "addcmul_": (1, 1),
    "auto_batch_size_": (),
    "copy_": ({"b": {"c": 0}},),
    "fill_": ("b", 0),
    "masked_fill_": (torch.ones(3, dtype=torch.bool), 0),
    "apply_": (torch.zeros_like,),
    "lerp_": (1, 0.5),
    "set_": ("a", 0),
    "set_at_": ("a", 0, 0),
    "update_": ({"b": {"c": 0}},),
}


@pytest.mark.parametrize("name", sorted({*IN_PLACE} - STRUCTURE))
def test_writes_in_place_are_refused_because_they_would_be_lost(name):
    operands = () if name in NO_OPERAND else OPERANDS.get(name, (1,))
    with pytest.raises(LockedError, match="a lazy stack has no memory of its own to write to"):
        getattr(LazyStackedTensorDict(*rows()), name)(*operands)


def test_entries_cannot_be_written_in_place():
    lazy = LazyStackedTensorDict(*rows())
    value = torch.zeros(3, 2)
    for write in (
        lambda: lazy.set("a", value, inplace=True),
        lambda: lazy.set("z", value),
        lambda: lazy.update({"a": value}, inplace=True),
        lambda: lazy.apply(torch.zeros_like, inplace=True),
        lambda: lazy.__setitem__(0, TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2, 4)}})),
        lambda: lazy.__setitem__("a", value),
        lambda: lazy["b"].set_("c", torch.zeros(3, 2, 4)),
    ):
        with pytest.raises(LockedError):
            write()
    assert lazy["a"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_members_must_agree():
    with pytest.raises(ValueError, match=r"a stack needs trees of one batch size, not of \[\]"):
        LazyStackedTensorDict()
    with pytest.raises(ValueError, match="a stack needs trees of one batch size, not of"):
        LazyStackedTensorDict(TensorDict({}, [2]), TensorDict({}, [3]))
    with pytest.raises(ValueError, match="a lazy stack is along dim 0 so far, not 1"):
        LazyStackedTensorDict(*rows(), stack_dim=1)
    one, two = rows(2)
    lazy = LazyStackedTensorDict(one, two)
    two["a"] = torch.zeros(2, 7)
    with pytest.raises(ValueError, match=r"cannot stack 'a': the members have shapes \[\(2"):
        lazy["a"]
    two["z"] = torch.zeros(2)
    with pytest.raises(MissingKeyError, match=r"differ: only the second has \['z'\]"):
        lazy["a"]


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda lazy: pickle.loads(pickle.dumps(lazy))]
)
def test_copies_stay_lazy(make_copy):
    members = rows()
    lazy = make_copy(LazyStackedTensorDict(*members))
    assert type(lazy) is LazyStackedTensorDict
    assert lazy.batch_size == (3, 2)
    lazy.tensordicts[0]["a"].fill_(5)
    assert lazy["a"][0].tolist() == [5, 5]
    assert not members[0]["a"].any()


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.zero_(),
        lambda td: td.add_(1),
        lambda td: td.__imul__(2),
        lambda td: td.clamp_(0, 1),
        lambda td: td.apply_(torch.zeros_like),
        lambda td: td.named_apply(lambda _, leaf: leaf * 0, inplace=True),
        lambda td: td.__setitem__(0, 5),
        lambda td: td.__setitem__(0, td[1]),
        lambda td: td.__setitem__(torch.tensor([True, False, False]), td[1:2]),
        lambda td: td.set_(("many", "a"), 5),
        lambda td: td.set_("many", {("b", "c"): 5}),
        lambda td: td.set(("many", "a"), 5, inplace=True),
        lambda td: td.set_at_(("many", "a"), 5, 0),
        lambda td: td.set_at_("many", 5, 0),
        lambda td: td.update_({"own": 5, "many": {"b": {"c": 5}}}),
        lambda td: td.update({"own": 5, "many": {"b": {"c": 5}}}, inplace=True),
        lambda td: td.requires_grad_(),
        lambda td: td.zero_grad(),
        lambda td: torch.stack([td[0], td[1], td[2]], out=td),
    ],
)
def test_writes_into_a_tree_that_holds_one_are_refused_before_anything_is_written(write):
    members = rows()
    td = TensorDict({"own": torch.ones(3), "many": LazyStackedTensorDict(*members)}, [3])
    with pytest.raises(LockedError, match="a lazy stack has no memory of its own to write to"):
        write(td)
    assert td["own"].tolist() == [1, 1, 1]
    assert not td["own"].requires_grad
    assert (td["many"] == torch.stack(rows())).all()
