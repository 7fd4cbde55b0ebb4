"""A benchmark as one definition, which pytest collects and ``benchmarks.compare`` reads.

A function decorated with :func:`case` builds the work: it gets the library under test as a module
and returns what is timed. The name stays bound to a test, so pytest finds it under that name::

    @case(plain=lambda: flat().items)
    def test_items(lib):
        return lib.TensorDict(flat(), SIZE).items
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from benchmarks.timing import Prepared, Work, measure, middle

CASES: list["Case"] = []
OURS, PEER, PLAIN = "tdnn", "tensordict", "plain torch"


@dataclass(frozen=True)
class Case:
    """A benchmark: its name, the group that it stands in, and what builds its work."""

    name: str
    group: str
    build: Callable[[ModuleType], Work]
    plain: Callable[[], Work] | None
    on_peer: bool

    def works(self, libs: Mapping[str, ModuleType]) -> dict[str, Work]:
        """Return what to time, by name: the twin in plain torch first, then each library."""
        works = {} if self.plain is None else {PLAIN: self.plain()}
        for name, lib in libs.items():
            if self.on_peer or name != PEER:
                works[name] = self.build(lib)
        return works


def case(
    plain: Callable[..., Work] | None = None,
    each: Mapping[str, Any] | None = None,
    on_peer: bool = True,
) -> Callable[[Callable[..., Work]], Callable[..., None]]:
    """Return a decorator that registers a benchmark and puts a test for pytest in its place.

    Args:
        plain: builds the twin in plain torch; None where plain torch has no such thing.
        each: values for a second argument of the benchmark (the first of the twin), by test id.
        on_peer: whether tensordict can do it.
    """

    def register(build: Callable[..., Work]) -> Callable[..., None]:
        name, group = build.__name__, build.__module__.rpartition("test_")[2]
        if each is None:
            mine = [Case(name, group, build, plain, on_peer)]
        else:
            mine = [
                Case(
                    f"{name}[{label}]",
                    group,
                    lambda lib, value=value: build(lib, value),
                    plain and (lambda value=value: plain(value)),
                    on_peer,
                )
                for label, value in each.items()
            ]
        CASES.extend(mine)
        return _test(mine[0]) if each is None else _tests(mine, list(each))

    return register


def twin(build: Callable[[], Work]) -> Callable[..., None]:
    """Put a test in the place of a twin in plain torch that has a listed name of its own.

    The test's attribute ``build`` is the twin, for :func:`case`.
    """

    def test(benchmark: Any) -> None:
        _time(benchmark, build())

    test.build = build
    return test


def load(name: str) -> ModuleType:
    """Import a library and its ``nn``; what an import warns about is not our concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module(f"{name}.nn")
        return import_module(name)


def peer() -> dict[str, ModuleType]:
    """Return tensordict by its name, or nothing if it is not installed."""
    try:
        return {PEER: load(PEER)}
    except ModuleNotFoundError as err:
        if err.name != PEER:
            raise
        return {}


def _test(only: Case) -> Callable[..., None]:
    def test(benchmark: Any) -> None:
        _run(benchmark, only)

    return test


def _tests(cases: list[Case], labels: list[str]) -> Callable[..., None]:
    @pytest.mark.parametrize("chosen", cases, ids=labels)
    def test(benchmark: Any, chosen: Case) -> None:
        _run(benchmark, chosen)

    return test


def _run(benchmark: Any, chosen: Case) -> None:
    """Time a case on tdnn; with the clock on, keep the ratios to its twins beside the result."""
    libs = {OURS: load(OURS)}
    works = chosen.works(libs | peer() if benchmark.enabled else libs)
    _time(benchmark, works[OURS])
    if PLAIN in works:
        works[PLAIN]()  # that it runs
    if benchmark.enabled:
        medians = {name: middle(times) for name, times in measure(works, rounds=20).items()}
        ours = medians.pop(OURS)
        for name, median in medians.items():
            benchmark.extra_info[f"{name} / {OURS}"] = round(median / ours, 2)


def _time(benchmark: Any, work: Work) -> None:
    if isinstance(work, Prepared):

        def before() -> None:  # what it returns would become arguments
            work.before()

        benchmark.pedantic(work.run, setup=before, rounds=200)
    else:
        benchmark(work)
