"""torch.vmap and torch.func with trees as arguments and results."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

from tdnn import TensorDict

# torch scripts some derivatives when forward mode is first used.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

SIZES = (2, 3, 5, 7)  # all different, so that a dim in the wrong place shows


def make(scale=1.0):
    """Batch (2, 3), a branch of batch (2, 3, 5), and one without a leaf; leaves (2, 3, 5, 7)."""
    x = torch.arange(210, dtype=torch.float64).reshape(SIZES) * scale
    further = TensorDict({"y": x + 1000}, [2, 3, 5])
    return TensorDict({"x": x, "b": further, "e": {}}, [2, 3], names=["t", "u"])


def without(items, dim):
    return tuple(items[:dim]) + tuple(items[dim + 1 :])


def put(items, dim, item):
    return (*items[:dim], item, *items[dim:]) if dim <= len(items) else tuple(items)


@pytest.mark.parametrize("out_dim", [0, 1, 2, 3])
@pytest.mark.parametrize("in_dim", [0, 1, 2, 3])
def test_the_batch_size_follows_every_dim_in_and_out(in_dim, out_dim):
    td, seen = make(), []

    def fn(td):
        seen.append((td.batch_size, td["b"].batch_size, td["e"].batch_size, tuple(td.names)))
        return td * 2

    result = vmap(fn, in_dim, out_dim)(td)
    inner = [without(size, in_dim) for size in ((2, 3), (2, 3, 5), (2, 3))]
    assert seen == [(*inner, without(("t", "u"), in_dim))]
    size = SIZES[in_dim]
    outer = [put(sizes, out_dim, size) for sizes in inner]
    assert [result.batch_size, result["b"].batch_size, result["e"].batch_size] == outer
    assert tuple(result.names) == put(without(("t", "u"), in_dim), out_dim, None)
    for key in ("x", ("b", "y")):
        assert torch.equal(result[key], td[key].movedim(in_dim, out_dim) * 2)


@given(st.integers(-4, 3), st.integers(-3, 2), st.integers(-3, 2), st.integers(-4, 3))
def test_nested_vmap_equals_the_same_on_plain_tensors(outer_in, inner_in, inner_out, outer_out):
    def twice(fn):
        return vmap(vmap(fn, inner_in, inner_out), outer_in, outer_out)

    td = make()
    result = twice(lambda td: td.apply(torch.sin))(td)
    for node in (result, result["b"]):
        assert all(leaf.shape[: node.ndim] == node.batch_size for leaf in node.values(True, True))
    for key in ("x", ("b", "y")):
        assert torch.equal(result[key], twice(torch.sin)(td[key]))


def test_trees_beside_tensors_and_numbers():
    td, x = make(), torch.rand(3, dtype=torch.float64)
    result = vmap(lambda td, x, n: (td * x, x + n), (1, 0, None))(td, x, 5)
    assert result[0].batch_size == (3, 2)
    assert torch.equal(result[0]["x"], (td["x"] * x[:, None, None]).movedim(1, 0))
    assert torch.equal(result[1], x + 5)


def test_a_tree_that_is_not_mapped_is_the_same_inside():
    td = make()
    result = vmap(lambda td, x: td["x"].sum() * x + len(td.batch_size), (None, 0))(
        td, torch.ones(4)
    )
    assert result.tolist() == [td["x"].sum() + 2] * 4


def test_each_leaf_may_have_a_dim_of_its_own():
    td = TensorDict({"x": torch.rand(2, 3), "b": {"y": torch.rand(3, 2)}})
    dims = TensorDict({"x": torch.tensor(0), "b": {"y": torch.tensor(0)}})
    dims = torch.utils._pytree.tree_map_with_path(
        lambda path, _: 1 if "b" in str(path) else 0, dims
    )
    result = vmap(lambda td: td["x"] + td["b", "y"], (dims,))(td)
    assert torch.equal(result, td["x"] + td["b", "y"].T)


def test_the_members_of_a_stack_are_run_as_in_a_loop():
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double() for _ in range(4)]
    params = TensorDict.from_modules(*nets, lock=False)
    x = torch.rand(5, 3, dtype=torch.float64)

    def run(params, x):
        with params.to_module(nets[0]):
            return nets[0](x)

    torch.testing.assert_close(vmap(run, (0, None))(params, x), torch.stack([n(x) for n in nets]))
    grads = vmap(grad(lambda p, x: run(p, x).square().sum()), (0, None))(params, x)
    assert grads.batch_size == grads["0"].batch_size == (4,)
    for i, net in enumerate(nets):
        expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        torch.testing.assert_close([grads[i][k] for k in grads.keys(True, True)], [*expected])


# -- torch.func ------------------------------------------------------------------------------------


def weights():
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    params = TensorDict.from_module(net).data
    return net, params, {".".join(key): leaf for key, leaf in params.items(True, True)}


def losses(net, x):
    """The same function of a tree, and of a dict of names as plain torch has it."""

    def of_tree(params):
        with params.to_module(net):
            return net(x)

    return of_tree, lambda params: functional_call(net, params, x)


def pairs(tree, named):
    return [tree[tuple(name.split("."))] for name in named], list(named.values())


def test_gradients_come_back_as_a_tree():
    net, params, named = weights()
    of_tree, of_dict = losses(net, torch.rand(4, 3, dtype=torch.float64))
    grads = grad(lambda p: of_tree(p).sum())(params)
    torch.testing.assert_close(*pairs(grads, grad(lambda p: of_dict(p).sum())(named)))
    both, value = grad_and_value(lambda p: of_tree(p).sum())(params)
    torch.testing.assert_close(*pairs(both, grad(lambda p: of_dict(p).sum())(named)))
    torch.testing.assert_close(value, of_dict(named).sum())
    second = grad(lambda p: grad(lambda q: of_tree(q).sum())(p)["0", "weight"].sum())(params)
    expected = grad(lambda p: grad(lambda q: of_dict(q).sum())(p)["0.weight"].sum())(named)
    torch.testing.assert_close(*pairs(second, expected))


@FORWARD_MODE
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_a_jacobian_has_the_dims_of_the_result_in_front(jacobian):
    net, params, named = weights()
    of_tree, of_dict = losses(net, torch.rand(4, 3, dtype=torch.float64))
    result, expected = jacobian(of_tree)(params), jacobian(of_dict)(named)
    torch.testing.assert_close(*pairs(result, expected))
    for node in (result, result["0"]):
        assert node.batch_size in ((4, 2), ())
        assert all(leaf.shape[: node.ndim] == node.batch_size for leaf in node.values(True, True))


@FORWARD_MODE
def test_a_tree_may_be_what_is_differentiated():
    x = torch.rand(3, dtype=torch.float64)

    def fn(x):
        return TensorDict({"s": x.sin(), "b": {"o": torch.outer(x, x)}}, [3])

    for jacobian in (jacrev, jacfwd):
        result = jacobian(fn)(x)
        torch.testing.assert_close(result["s"], x.cos().diag())
        assert result["b", "o"].shape == (3, 3, 3)
        for node in (result, result["b"]):
            assert all(
                leaf.shape[: node.ndim] == node.batch_size for leaf in node.values(True, True)
            )


def test_a_jacobian_from_tree_to_tree_has_a_tree_for_each_leaf():
    td = TensorDict({"x": torch.rand(2, dtype=torch.float64)}, [2])
    result = jacrev(lambda td: TensorDict({"y": td["x"].prod(0, True).expand(3)}, [3]))(td)
    torch.testing.assert_close(result["y"]["x"], td["x"].flip(0).expand(3, 2))


@FORWARD_MODE
def test_forward_and_reverse_products_take_and_give_trees():
    td = TensorDict({"x": torch.rand(3), "b": {"y": torch.rand(3)}}, [3])
    tangent = td.apply(torch.ones_like)

    def fn(td):
        return TensorDict({"z": td["x"] * td["b", "y"]}, [3])

    value, change = jvp(fn, (td,), (tangent,))
    torch.testing.assert_close(change["z"], td["x"] + td["b", "y"])
    assert value.batch_size == change.batch_size == (3,)
    _, pull = vjp(fn, td)
    (back,) = pull(TensorDict({"z": torch.ones(3)}, [3]))
    torch.testing.assert_close(back["b", "y"], td["x"])
    assert back.batch_size == back["b"].batch_size == (3,)


@FORWARD_MODE
def test_a_hessian_is_a_tree_of_trees():
    td = TensorDict({"x": torch.rand(2, dtype=torch.float64)})
    result = hessian(lambda td: td["x"].prod())(td)
    torch.testing.assert_close(result["x"]["x"], torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double())


# -- compiled --------------------------------------------------------------------------------------


def per_sample(td, w):
    return vmap(grad(lambda w, td: (td["x"].mean() * w + td["b", "y"].sum() * w).sin()), (None, 0))(
        w, td
    ), vmap(lambda td: td + 1, 1, 1)(td)


def test_transforms_of_trees_trace_without_a_second_compilation():
    counter = CompileCounter()
    compiled = torch.compile(per_sample, fullgraph=True, backend=counter)
    for scale in (1.0, 2.0, 3.0):
        td, w = make(scale), torch.rand((), dtype=torch.float64)
        (grads, plus), (expected, more) = compiled(td, w), per_sample(td, w)
        torch.testing.assert_close(grads, expected)
        assert torch.equal(plus["b", "y"], more["b", "y"])
        assert plus.batch_size == more.batch_size == (2, 3)
    assert counter.frame_count == 1


def test_transforms_of_trees_compile_with_inductor():
    td, w = make(), torch.rand((), dtype=torch.float64)
    (grads, plus), (expected, more) = (
        torch.compile(per_sample, fullgraph=True)(td, w),
        per_sample(td, w),
    )
    torch.testing.assert_close(grads, expected)
    assert torch.equal(plus["x"], more["x"])
