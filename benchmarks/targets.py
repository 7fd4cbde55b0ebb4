"""What the library promises of its speed, and whether one run of the benchmarks bears it out."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.cases import OURS, PEER, PLAIN
from benchmarks.timing import Ratio, middle, ratio

Times = Mapping[str, list[float]]  # seconds per call in each round, by library

IMPORT_LIMIT = 0.050  # seconds
_IMPORT = "import time, torch; t = time.perf_counter(); import tdnn; print(time.perf_counter() - t)"


@dataclass(frozen=True)
class Target:
    """A bound on one ratio of times, which each of some benchmarks must keep.

    ``over`` and ``under`` are the libraries whose times are divided. tdnn as ``under`` says how
    much faster it is, at least ``bound`` times; as ``over``, how much slower, at most that.
    ``capped`` means that most of the time is torch's own work, which the twin in plain torch does
    too: a library without any cost of its own would reach only the ratio to that twin.
    """

    what: str
    over: str
    under: str
    bound: float
    names: tuple[str, ...]
    capped: bool = False

    @property
    def is_floor(self) -> bool:
        return self.under == OURS

    @property
    def rule(self) -> str:
        return f"{'≥' if self.is_floor else '≤'} {self.bound:g}x"


@dataclass(frozen=True)
class Verdict:
    """How a target came out: the benchmark that is nearest to failing, or fails most."""

    target: Target
    name: str
    ratio: Ratio
    cap: float | None  # the ratio that plain torch itself reaches

    @property
    def met(self) -> bool:
        value, bound = self.ratio.value, self.target.bound
        return value >= bound if self.target.is_floor else value <= bound


def _named(stem: str, *labels: str) -> tuple[str, ...]:
    return tuple(f"{stem}[{label}]" for label in labels)


_SWAP = _named("test_to_module_speed", "True", "False")
_KEPT = _named("test_kept_swap_speed", "locked", "unlocked")
_VMAP = tuple(
    name
    for stem in ("test_vmap_mlp_speed", "test_vmap_mlp_speed_decorator")
    for name in _named(stem, "True-True", "True-False", "False-True", "False-False")
)
_NESTED = (
    "test_items_nested",
    "test_items_nested_locked",
    "test_items_nested_leaf",
    "test_keys_nested",
    "test_keys_nested_locked",
    "test_keys_nested_leaf",
)
_GET = ("test_nested_get", "test_nested_getleaf", "test_nested_getitem", "test_nested_getitemleaf")
_CREATION = (
    "test_creation",
    "test_creation_empty",
    "test_creation_nested_1",
    "test_creation_nested_2",
)
_SET = ("test_set", "test_setitem", "test_set_nested", "test_set_nested_new")
_READ = _named("test_getitem", "int", "slice_int", "range", "tuple", "list")
_WRITE = _named("test_setitem_dim", "int", "slice_int", "range", "tuple")
_CALL = ("test_tdmodule", "test_tdmodule_dispatch", "test_tdseq", "test_tdseq_dispatch")

TARGETS = (
    Target("swap in and out of Transformer()", PEER, OURS, 8, _SWAP),
    Target("the same, against functional_call's overhead", PLAIN, OURS, 8, _SWAP),
    Target("kept swap of a locked tree, against a bare loop", OURS, PLAIN, 2, _KEPT[:1]),
    Target("kept swap of an unlocked tree", OURS, PLAIN, 2, _KEPT[1:]),
    Target("flatten_keys", PEER, OURS, 4, ("test_flatten_speed",)),
    Target("nested items and keys", PEER, OURS, 4, _NESTED),
    Target("nested get", PEER, OURS, 4, _GET),
    Target("creation", PEER, OURS, 2, _CREATION),
    Target("set", PEER, OURS, 2, _SET),
    Target("clone", PEER, OURS, 2, ("test_clone",), capped=True),
    Target("reading by index", PEER, OURS, 2, _READ, capped=True),
    Target("writing by index", PEER, OURS, 2, _WRITE, capped=True),
    Target("reshape", PEER, OURS, 2, ("test_reshape_td",), capped=True),
    Target("module and sequence: call and dispatch", PEER, OURS, 2.5, _CALL),
    Target("vmap of a swap, against vmap(functional_call)", OURS, PLAIN, 1, _VMAP),
)


def judge(target: Target, measured: Mapping[str, Times]) -> Verdict | None:
    """Return the verdict, or None if not all that the target needs was measured."""
    pairs = [(name, measured.get(name, {})) for name in target.names]
    if not all(target.over in times and target.under in times for _, times in pairs):
        return None
    sign = 1 if target.is_floor else -1
    found = [(name, ratio(times[target.over], times[target.under])) for name, times in pairs]
    name, worst = min(found, key=lambda pair: sign * pair[1].value)
    times = measured[name]
    cap = ratio(times[target.over], times[PLAIN]).value if target.capped else None
    return Verdict(target, name, worst, cap)


def import_seconds(tries: int) -> float:
    """Return what ``import tdnn`` takes after ``import torch``: the median of fresh processes.

    One more goes ahead, in which Python may compile the files, as it does after an installation.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _IMPORT]
    runs = [
        subprocess.run(command, check=True, capture_output=True, env=env) for _ in range(tries + 1)
    ]
    return middle(float(run.stdout) for run in runs[1:])
