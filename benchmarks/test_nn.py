"""The group ``nn`` of the list: calling wrapped modules, and running modules on other weights.

Not here: the ``vmap`` of a transformer, which torch runs by a slow fallback on a CPU.
"""

from functools import partial
from itertools import cycle, pairwise

import torch
from torch.func import functional_call

from benchmarks.cases import case, twin
from benchmarks.samples import IdleTransformer, bare_swap, idle, leaf, mlp, state

# -- calling a wrapped module --------------------------------------------------------------------

STEPS = ("a", "b", "c", "d")


def pass_on(data, keys):
    for source, result in pairwise(keys):
        data[result] = idle(data[source])


def hand_on(value, calls):
    for _ in range(calls):
        value = idle(value)
    return value


def wrapped(lib, source="a", result="b"):
    return lib.nn.TensorDictModule(idle, in_keys=[source], out_keys=[result])


def sequence(lib):
    return lib.nn.TensorDictSequential(*(wrapped(lib, *step) for step in pairwise(STEPS)))


@case(plain=lambda: partial(pass_on, {"a": leaf()}, STEPS[:2]))
def test_tdmodule(lib):
    return partial(wrapped(lib), lib.TensorDict({"a": leaf()}))


@case(plain=lambda: partial(hand_on, leaf(), 1))
def test_tdmodule_dispatch(lib):
    return partial(wrapped(lib), a=leaf())


@case(plain=lambda: partial(pass_on, {"a": leaf()}, STEPS))
def test_tdseq(lib):
    return partial(sequence(lib), lib.TensorDict({"a": leaf()}))


@case(plain=lambda: partial(hand_on, leaf(), 3))
def test_tdseq_dispatch(lib):
    return partial(sequence(lib), a=leaf())


# -- taking the weights out ----------------------------------------------------------------------


@twin
def test_instantiation_functorch():
    return partial(state, IdleTransformer())


@case(plain=test_instantiation_functorch.build)
def test_instantiation_td(lib):
    return partial(lib.TensorDict.from_module, IdleTransformer())


# -- running on other weights --------------------------------------------------------------------
# "td" swaps in and out by two calls, "decorator" by a `with` block.


def swapped(net, params, *args):
    old = params.to_module(net)
    result = net(*args)
    old.to_module(net)
    return result


def in_block(net, params, *args):
    with params.to_module(net):
        return net(*args)


@twin
def test_exec_functional_call():
    net, weights, x = mlp(), state(mlp()), torch.ones(1, 4)
    return lambda: functional_call(net, weights, x)


@twin
def test_exec_functorch():
    """Call a shell without weights on parameters and buffers apart, as functorch did."""
    net, shell, x = mlp(), mlp().to("meta"), torch.ones(1, 4)
    weights = dict(net.named_parameters()), dict(net.named_buffers())
    return lambda: functional_call(shell, weights, x)


@case(plain=test_exec_functional_call.build)
def test_exec_td(lib):
    return partial(swapped, mlp(), lib.TensorDict.from_module(mlp()), torch.ones(1, 4))


@case(plain=test_exec_functorch.build)
def test_exec_td_decorator(lib):
    return partial(in_block, mlp(), lib.TensorDict.from_module(mlp()), torch.ones(1, 4))


def functional_swap(_):
    net, weights, x = IdleTransformer(), state(IdleTransformer()), leaf()
    return lambda: functional_call(net, weights, x)


@case(plain=functional_swap, each={"True": True, "False": False})
def test_to_module_speed(lib, as_module):
    """Swap in and out around a call that does nothing; the value is ``as_module``."""
    params = lib.TensorDict.from_module(IdleTransformer(), as_module=as_module)
    return partial(in_block, IdleTransformer(), params, leaf())


@case(plain=lambda: functional_swap(None))
def test_tensor_swap_speed(lib):
    """Swap in a tree of tensors that are no parameters, as averages of weights are."""
    params = lib.TensorDict.from_module(IdleTransformer()).data.clone()
    return partial(in_block, IdleTransformer(), params, leaf())


@case(plain=lambda: functional_swap(None))
def test_first_swap_speed(lib):
    """Swap one tree into two nets in turn, so that no swap finds what the one before had learnt."""
    params, x = lib.TensorDict.from_module(IdleTransformer()), leaf()
    nets = cycle([IdleTransformer(), IdleTransformer()])
    return lambda: in_block(next(nets), params, x)


def bare_loop(_):
    net, x = IdleTransformer(), leaf()
    return bare_swap(net, state(IdleTransformer()), partial(net, x))


@case(plain=bare_loop, on_peer=False, each={"locked": True, "unlocked": False})
def test_kept_swap_speed(lib, lock):
    """Enter the same swap again and again; tensordict's serves one block only.

    The entries of a locked tree cannot have changed since the last block; others are checked.
    """
    net, x = IdleTransformer(), leaf()
    swap = lib.TensorDict.from_module(IdleTransformer(), lock=lock).to_module(net)
    for _ in range(2):
        with swap:
            pass

    def work():
        with swap:
            return net(x)

    return work


# -- many at once --------------------------------------------------------------------------------
# The first value says whether the weights of three nets are stacked, or those of one expanded;
# the second, whether a TensorDictParams holds them.

HOW = {f"{stacked}-{held}": (stacked, held) for stacked in (True, False) for held in (True, False)}
COPIES = 3


def many(lib, make, how):
    """Return the weights of several nets as one tree with a batch dim."""
    stacked, held = how
    if stacked:
        nets = [make() for _ in range(COPIES)]
        return lib.TensorDict.from_modules(*nets, as_module=held)
    weights = lib.TensorDict.from_module(make()).data.expand(COPIES)
    return lib.nn.TensorDictParams(weights) if held else weights


def many_by_hand(make, how, inputs):
    net, nets = make(), [make() for _ in range(COPIES)]
    if how[0]:
        weights, _ = torch.func.stack_module_state(nets)
    else:
        weights = {
            # A TensorDictParams makes parameters of them, through which gradients flow.
            key: value.data.expand(COPIES, *value.shape).requires_grad_(how[1])
            for key, value in state(net).items()
        }
    run = torch.vmap(partial(functional_call, net), (0, None))
    return lambda: run(weights, inputs)


def mapped_over(run, lib, make, how, inputs):
    """Return a work that maps ``run(net, params, *inputs)`` over the batch of weights."""
    call = torch.vmap(lambda params: run(net, params, *inputs))
    net, params = make(), many(lib, make, how)
    return partial(call, params)


MLP_INPUTS = (torch.ones(4, 4),)


def mlp_by_hand(how):
    return many_by_hand(mlp, how, MLP_INPUTS)


@case(plain=mlp_by_hand, each=HOW)
def test_vmap_mlp_speed(lib, how):
    return mapped_over(swapped, lib, mlp, how, MLP_INPUTS)


@case(plain=mlp_by_hand, each=HOW)
def test_vmap_mlp_speed_decorator(lib, how):
    return mapped_over(in_block, lib, mlp, how, MLP_INPUTS)
