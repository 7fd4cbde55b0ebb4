"""Two threads in one module: an error for the second, and never the weights of the other."""

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from zoo import blank, chain, equal, exact, in_thread, same, values

from tdnn import MissingKeyError, SwapError, TensorDict


def test_a_second_thread_is_refused_with_both_named():
    net = nn.Linear(4, 2)
    with blank(net).to_module(net):
        before = exact(net)
        with pytest.raises(
            SwapError,
            match=r"Linear\(4→2\) is in a swap of thread 'MainThread'; wait until that block ends",
        ):
            in_thread(lambda: blank(net).to_module(net))
        assert same(before, exact(net))
    in_thread(lambda: blank(net).to_module(net))


@pytest.mark.parametrize("options", [{"inplace": True}, {"use_state_dict": True}])
def test_a_second_thread_is_refused_however_it_swaps(options):
    net = nn.Linear(4, 2)
    with (
        blank(net).to_module(net),
        pytest.raises(SwapError, match="is in a swap of thread 'MainThread'"),
    ):
        in_thread(lambda: blank(net).to_module(net, **options))
    with (
        blank(net).to_module(net, **options),
        pytest.raises(SwapError, match="is in a swap of thread 'MainThread'"),
    ):
        in_thread(lambda: blank(net).to_module(net))
    in_thread(lambda: blank(net).to_module(net))


def test_a_kept_swap_is_refused_in_a_second_thread():
    net = nn.Linear(4, 2)
    before = exact(net)
    swap = blank(net).to_module(net)
    with (
        swap,
        pytest.raises(SwapError, match="is in a swap of thread 'MainThread'"),
    ):
        in_thread(swap.__enter__)
    assert same(before, exact(net))

    def use():
        with swap:
            return bool(net.weight.any())

    assert in_thread(use) is False
    assert same(before, exact(net))


def test_a_swap_belongs_to_the_thread_whose_block_it_begins():
    net = nn.Linear(4, 2)
    params, before = blank(net), exact(net)
    swap = params.to_module(net)
    began, go_on, found = threading.Event(), threading.Event(), []

    def run():
        with swap:
            with blank(net).to_module(net):  # the same thread may
                pass
            began.set()
            go_on.wait(10)
            found.append(net.weight is params["weight"])

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(10)
    with pytest.raises(SwapError, match="is in a swap of thread"):
        blank(net).to_module(net)
    go_on.set()
    thread.join()
    assert found == [True]
    assert same(before, exact(net))
    with blank(net).to_module(net):
        pass


def test_a_part_of_a_module_that_runs_elsewhere_is_refused():
    net = chain()
    with (
        TensorDict({"0": blank(net[0])}).to_module(net),
        pytest.raises(SwapError, match="is in a swap of thread"),
    ):
        in_thread(lambda: TensorDict({"2": blank(net[2])}).to_module(net))
    with (
        blank(net[0]).to_module(net[0]),
        pytest.raises(SwapError, match="is in a swap of thread"),
    ):
        in_thread(lambda: TensorDict({"2": blank(net[2])}).to_module(net))
    with blank(net[0]).to_module(net[0]):
        in_thread(lambda: blank(net[2]).to_module(net[2]))


def test_modules_that_share_one_without_tensors_do_not_meet():
    tanh = nn.Tanh()
    one, two = nn.Sequential(nn.Linear(2, 2), tanh), nn.Sequential(nn.Linear(2, 2), tanh)
    with blank(one).to_module(one):
        in_thread(lambda: blank(two).to_module(two))


def test_a_load_whose_result_was_dropped_is_no_swap():
    net = nn.Linear(4, 2)
    blank(net).to_module(net)
    in_thread(lambda: blank(net).to_module(net))
    blank(net).to_module(net, return_swap=False)
    in_thread(lambda: blank(net).to_module(net))


def test_a_load_that_went_back_by_a_second_call_is_no_swap():
    net = nn.Linear(4, 2)
    old = blank(net).to_module(net)
    with pytest.raises(SwapError, match="is in a swap"):
        in_thread(lambda: blank(net).to_module(net))
    old.to_module(net)
    in_thread(lambda: blank(net).to_module(net))


def test_a_swap_that_is_garbage_is_no_swap():
    net = nn.Linear(4, 2)
    swap = blank(net).to_module(net)
    with pytest.raises(SwapError, match="is in a swap"):
        in_thread(lambda: blank(net).to_module(net))
    del swap
    in_thread(lambda: blank(net).to_module(net))


def test_the_swap_of_a_thread_that_ended_is_no_swap():
    net = nn.Linear(4, 2)
    kept = in_thread(lambda: blank(net).to_module(net))
    with blank(net).to_module(net):
        pass
    assert kept is not None


def test_swaps_leave_neither_modules_nor_trees_behind():
    net, params = chain(), None
    params = blank(net)
    for _ in range(3):
        with params.to_module(net):
            net(torch.ones(4))
    swap = params.to_module(net)
    with swap:
        pass
    with pytest.raises(MissingKeyError):
        TensorDict({"x": torch.zeros(1)}).to_module(net)
    seen = [weakref.ref(net), weakref.ref(params), weakref.ref(params["0", "weight"])]
    del net, params, swap
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]


@pytest.fixture
def restless():
    """Let threads take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


WAYS = [{}, {"inplace": True}, {"use_state_dict": True}]


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("ways", [*[[way] for way in WAYS], WAYS], ids=str)
def test_no_thread_ever_sees_the_weights_of_another(ways):
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False))
    before, held = exact(net), values(net)
    threads, rounds = 4, 60
    barrier = threading.Barrier(threads)
    mixed, ran, refused = [], [0] * threads, [0] * threads

    def work(n):
        value = torch.full((1, 1), float(n + 1))
        params = TensorDict({"0": {"weight": value.clone()}, "2": {"weight": value.clone()}})
        kept = None
        wanted = ((n + 1) * torch.tanh(torch.tensor([n + 1.0]))).item()
        for i in range(rounds):
            if i % 10 == 0:
                barrier.wait()
            try:
                if kept is None or i % 3:
                    kept = params.to_module(net, **ways[(i + n) % len(ways)])
                with kept:
                    for _ in range(3):
                        found = net(torch.ones(1)).item()
                        if abs(found - wanted) > 1e-6:
                            mixed.append((n, found))
                kept = kept if i % 2 else None
                ran[n] += 1
                if not all([bool((leaf == value).all()) for leaf in params.values(True, True)]):
                    mixed.append((n, params.to_dict()))
            except SwapError:
                refused[n] += 1

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not mixed
    assert sum(ran) > 0
    assert sum(ran) + sum(refused) == threads * rounds
    assert same(before, exact(net))
    assert equal(held, values(net))


def test_a_module_is_taken_until_it_holds_its_own_values_again():
    """The hook runs while the block of the first thread is undone."""
    net = nn.Linear(1, 1, bias=False)
    undoing, go_on, calls = threading.Event(), threading.Event(), []

    def hook(*_):
        if threading.current_thread() is not threading.main_thread():
            calls.append(1)
            if len(calls) == 2:
                undoing.set()
                go_on.wait(10)

    net.register_load_state_dict_pre_hook(hook)

    def run():
        with blank(net).to_module(net, use_state_dict=True):
            pass

    thread = threading.Thread(target=run)
    thread.start()
    assert undoing.wait(10)
    with pytest.raises(SwapError, match="is in a swap of thread"):
        blank(net).to_module(net)
    go_on.set()
    thread.join()
    with blank(net).to_module(net):
        assert not net.weight.any()


def test_a_block_of_a_thread_that_ended_goes_on_in_the_thread_that_swaps_next():
    net = chain()
    before, later = exact(net), blank(net)
    blocks = []

    def block():
        with blank(net).to_module(net):
            yield

    def run():
        blocks.append(block())
        next(blocks[0])

    in_thread(run)
    with later.to_module(net):
        blocks[0].close()
        assert net[0].weight is later["0", "weight"]
    assert same(before, exact(net))


@pytest.mark.parametrize("ways", [(i, j) for i in (1, 2) for j in (1, 2)])
def test_two_modules_with_one_tensor_are_not_written_by_two_threads(ways):
    one, two = nn.Linear(4, 2), nn.Linear(4, 2)
    two.weight = one.weight
    held = values(one)
    with blank(one).to_module(one, **WAYS[ways[0]]):
        with pytest.raises(SwapError, match="is in a swap of thread 'MainThread'"):
            in_thread(lambda: blank(two).to_module(two, **WAYS[ways[1]]))
        assert not one.weight.any()
    assert equal(held, values(one))
    in_thread(lambda: blank(two).to_module(two, **WAYS[ways[1]]))


@pytest.mark.usefixtures("restless")
def test_only_one_of_two_threads_begins_a_block_on_a_swap_that_waits():
    net = chain()
    before, params, faults = exact(net), blank(net), []
    barrier = threading.Barrier(2)
    waiting = []

    def work(n):
        for _ in range(200):
            barrier.wait()
            if n == 0:
                waiting[:] = [params.to_module(net)]
            barrier.wait()
            try:
                with waiting[0]:
                    if net[0].weight is not params["0", "weight"]:
                        faults.append("other weights")
            except SwapError:
                pass
            except BaseException as error:
                faults.append(error)
            barrier.wait()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults
    waiting.clear()
    assert same(before, exact(net))
