"""Small trees, steps and chains for the tests of modules."""

import torch
from hypothesis import strategies as st

from tdnn import TensorDict
from tdnn.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential, dispatch

ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


def tree(**entries):
    return TensorDict(entries or {"x": ONE}, [2])


def keys(td):
    return list(td.keys(True, True))


def plus_one(x):
    return x + 1


def fork(x):
    return x + 1, x + 2


def total(*values):
    """The sum of all inputs, branches included, plus one."""
    leaves = [v.values(True, True) if isinstance(v, TensorDict) else [v] for v in values]
    return sum((leaf for some in leaves for leaf in some), torch.ones(2))


def step(reads, writes, fn=None):
    if isinstance(reads, str):
        reads = reads.split()
    if isinstance(writes, str):
        writes = writes.split()
    count = len(writes)

    def several(*values):
        return tuple(total(*values) + at for at in range(count))

    return TensorDictModule(fn or several, reads, writes)


def chain(*pairs, **kwargs):
    """A chain of steps that are each written as "what it reads > what it writes"."""
    return TensorDictSequential(*[step(*pair.split(">")) for pair in pairs], **kwargs)


def notes(info):
    return "\n".join(getattr(info.value, "__notes__", []))


class Own(TensorDictModuleBase):
    """A step with a forward of its own."""

    def __init__(self, reads="x", writes="y"):
        super().__init__()
        self.in_keys, self.out_keys = [reads], [writes]

    @dispatch
    def forward(self, tensordict):
        return tensordict.set(self.out_keys[0], tensordict[self.in_keys[0]] + 1)


POOL = ["a", "b", "c", ("n", "a"), ("n", "b"), ("n", "m", "a")]
READS = st.lists(st.sampled_from([*POOL, "n", ("n", "m")]), max_size=3, unique=True)
WRITES = st.lists(st.sampled_from(POOL), max_size=2, unique=True)
STEPS = st.lists(st.tuples(READS, WRITES), min_size=1, max_size=5)


def filled(wanted):
    """A tree that holds these keys; a branch is full, so that what is below it can be read."""
    full = dict.fromkeys(POOL, ONE)
    td = TensorDict({}, [2])
    for key in wanted:
        path = key if isinstance(key, tuple) else (key,)
        for place, value in full.items():
            there = place if isinstance(place, tuple) else (place,)
            if there[: len(path)] == path:
                td.set(place, value)
    return td


def build(pairs, draw):
    """A chain of the steps, some of them put into a chain of their own."""
    steps = [step(reads, writes) for reads, writes in pairs]
    first, end = sorted([draw.draw(st.integers(0, len(steps))) for _ in "ab"])
    if first == end:
        return TensorDictSequential(*steps)
    inner = TensorDictSequential(*steps[first:end])
    return TensorDictSequential(*steps[:first], inner, *steps[end:])
