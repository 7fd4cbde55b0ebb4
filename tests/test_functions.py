"""torch's functions on trees, each against the same function on every leaf."""

import pytest
import torch
from strategies import flat

from tdnn import TensorDict
from tdnn._functions import TABLE
from tdnn.errors import MissingKeyError


@pytest.fixture
def td():
    return TensorDict(
        {"a": torch.arange(24.0).reshape(3, 4, 2), "b": {"c": torch.arange(12).reshape(3, 4)}},
        [3, 4],
    )


MASK = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.stack([x, x], 1),
        lambda x: torch.stack((x, x), dim=0),
        lambda x: torch.stack(tensors=[x, x]),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.concat([x, x], dim=0),
        lambda x: torch.concatenate([x, x]),
        lambda x: torch.unbind(x, 1),
        lambda x: torch.unbind(x, dim=0),
        lambda x: torch.split(x, 2, dim=1),
        lambda x: torch.split(x, [1, 2]),
        lambda x: torch.chunk(x, 2, 1),
        lambda x: torch.clone(x),
        lambda x: torch.squeeze(x[:1], 0),
        lambda x: torch.unsqueeze(x, 1),
        lambda x: torch.unsqueeze(input=x, dim=0),
        lambda x: torch.transpose(x, 0, 1),
        lambda x: torch.flatten(x, 0, 1),
        lambda x: torch.unflatten(x, 1, (2, 2)),
        lambda x: torch.unflatten(x, dim=1, sizes=(2, -1)),
        lambda x: torch.flip(x, (0,)),
        lambda x: torch.flip(x, dims=[1]),
        lambda x: torch.roll(x, 1, 0),
        lambda x: torch.roll(x, shifts=(1, 2), dims=(0, 1)),
        lambda x: torch.movedim(x, 0, 1),
        lambda x: torch.sum(x, 0, keepdim=True),
        lambda x: torch.sum(x),
        lambda x: torch.mean(x, dim=1, dtype=torch.float64),
        lambda x: torch.all(x, 0),
        lambda x: torch.any(x, dim=1),
        lambda x: torch.repeat_interleave(x, 2, 1),
        lambda x: torch.zeros_like(x),
        lambda x: torch.ones_like(x),
        lambda x: torch.full_like(x, 7),
        lambda x: torch.full_like(x, fill_value=7, dtype=torch.float64),
        lambda x: torch.zeros_like(x, dtype=torch.int16, device="cpu"),
    ],
)
def test_a_function_does_to_a_tree_what_it_does_to_its_leaves(td, call):
    found = call(td)
    want = {path: call(leaf) for path, leaf in flat(td).items()}
    for at, part in enumerate(found if isinstance(found, tuple) else (found,)):
        for path, leaf in flat(part).items():
            expected = want[path][at] if isinstance(found, tuple) else want[path]
            torch.testing.assert_close(leaf, expected, rtol=0, atol=0)
            assert expected.shape[: part.batch_dims] == part.batch_size


def test_reshape_permute_and_gather_work_on_the_batch_dims(td):
    assert torch.equal(torch.reshape(td, (2, 6)), td.reshape(2, 6))
    assert torch.equal(torch.permute(td, (1, 0)), td.transpose(0, 1))
    index = torch.tensor([[3], [0], [1]])
    assert torch.equal(torch.gather(td, 1, index), td.gather(1, index))
    out = td[:, :1].clone()
    assert torch.gather(td, 1, index, out=out) is out


def test_where_takes_a_tree_at_any_place(td):
    zero = torch.zeros_like(td)
    for found in (
        torch.where(MASK, td, 0),
        torch.where(MASK, td, zero),
        torch.where(~MASK, 0, td),
        torch.where(MASK, td, torch.tensor(0)),
    ):
        torch.testing.assert_close(found["a"], td["a"] * MASK[..., None])
        torch.testing.assert_close(found["b", "c"], td["b", "c"] * MASK)
    assert torch.where(td > 3, 1, 0)["b", "c"].sum() == 8
    torch.testing.assert_close(
        torch.where(td > 3, td, -td)["a"], torch.where(td["a"] > 3, td["a"], -td["a"])
    )


@pytest.mark.parametrize("like", [torch.rand_like, torch.randn_like, torch.empty_like])
def test_likes_keep_shapes_and_take_a_dtype(td, like):
    td = td.apply(lambda x: x.float())
    found = like(td, dtype=torch.float64)
    for path, leaf in flat(found).items():
        assert leaf.shape == flat(td)[path].shape
        assert leaf.dtype is torch.float64
    assert found["b"].batch_size == (3, 4)
    if like is not torch.empty_like:
        assert len(torch.unique(found["a"])) == found["a"].numel()


def test_likes_keep_names_and_ties(td):
    leaf = td["a"]
    td["b", "tie"] = leaf
    td.names = ["x", "y"]
    found = torch.rand_like(td.select("a", ("b", "tie")))
    assert found["a"] is found["b", "tie"]
    assert found.names == ["x", "y"]


def test_likes_declare_the_device_that_they_make(td):
    found = torch.zeros_like(td, device="meta")
    assert found.device == found["b"].device == torch.device("meta")
    assert found["b", "c"].device == torch.device("meta")
    assert torch.zeros_like(td).device is None


def test_likes_pass_requires_grad_on(td):
    assert torch.ones_like(td.select("a"), requires_grad=True)["a"].requires_grad


def test_equal_compares_keys_batch_sizes_and_values(td):
    assert torch.equal(td, td.clone())
    assert not torch.equal(td, td + 1)
    assert not torch.equal(td, td.select("a"))
    assert not torch.equal(td, TensorDict(td.to_dict(), [3]))
    assert not torch.equal(td, torch.zeros(3, 4))
    other = td.clone()
    other["b"] = torch.zeros(3, 4)
    assert not torch.equal(td, other)


def test_allclose_compares_every_leaf(td):
    td = td.apply(lambda x: x.double())
    assert torch.allclose(td, td + 1e-9)
    assert not torch.allclose(td, td + 1e-3)
    assert torch.allclose(td, td + 1e-3, atol=1e-2)
    other = td.clone()
    other["b", "c"][0] = torch.nan
    assert not torch.allclose(other, other)
    assert torch.allclose(other, other, equal_nan=True)
    with pytest.raises(MissingKeyError, match="the trees differ"):
        torch.allclose(td, td.select("a"))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda td: torch.relu(td), "torch.relu"),
        (lambda td: torch.nn.functional.linear(td, torch.zeros(2, 2)), "linear"),
        (lambda td: torch.matmul(torch.zeros(2, 3), td), "torch.matmul"),
        (lambda td: torch.zeros(3, 4).copy_(td), r"torch\.Tensor\.copy_"),
    ],
)
def test_a_function_that_knows_no_trees_points_to_apply(td, call, name):
    with pytest.raises(TypeError, match=rf"{name} does not take a tree; use td.apply\({name}\)"):
        call(td)


def test_an_operator_with_a_tensor_on_the_left_asks_the_tree(td):
    tensor = torch.full((3, 4), 2)
    ints = td.select("b")
    assert torch.equal(tensor + ints, ints + tensor)
    assert torch.equal(tensor - ints, -(ints - tensor))
    assert torch.equal(tensor * ints, ints * tensor)
    assert isinstance(tensor == ints, TensorDict)
    assert isinstance(tensor < ints, TensorDict)


def test_the_table_names_functions_of_torch_only():
    for func in TABLE:
        assert getattr(torch, func.__name__) is func


@pytest.mark.parametrize(
    "call",
    [
        lambda td: torch.stack([td, td * 2], 1),
        lambda td: torch.cat([td, td * 2], 1),
        lambda td: torch.unbind(td, 1)[2],
        lambda td: torch.split(td, 2, 1)[0],
        lambda td: torch.clone(td),
        lambda td: torch.where(MASK, td, 0),
        lambda td: torch.where(td > 5, td, 0),
        lambda td: torch.zeros_like(td),
        lambda td: torch.full_like(td, 3),
        lambda td: torch.flatten(torch.permute(td, (1, 0)), 0, 1),
        lambda td: torch.gather(td, 1, torch.zeros(3, 2, dtype=torch.int64)),
        lambda td: torch.movedim(torch.roll(td, 1, 0), 0, 1),
    ],
)
def test_functions_trace(td, call):
    found = torch.compile(call, fullgraph=True, backend="eager")(td)
    want = call(td)
    assert found.batch_size == want.batch_size
    assert torch.equal(found, want)
