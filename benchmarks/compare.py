"""Measure tdnn, tensordict and plain torch alternately in one run, and print their ratios.

Run ``python -m benchmarks.compare --help`` for the options.
"""

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import test_containers, test_nn, test_pytree  # noqa: F401  # they register cases
from benchmarks.cases import CASES, OURS, PEER, PLAIN, load, peer
from benchmarks.growth import SIZES, Growth, grow
from benchmarks.targets import IMPORT_LIMIT, TARGETS, Times, Verdict, import_seconds, judge
from benchmarks.timing import Ratio, measure, middle, ratio

IMPORT, GROWTH = "import", "growth"  # further names for --only


@dataclass
class Report:
    """All that one run found; times in seconds."""

    environment: dict[str, Any]
    measured: dict[str, Times] = field(default_factory=dict)
    import_time: float | None = None
    growth: Growth = field(default_factory=dict)

    def verdicts(self) -> list[Verdict]:
        found = (judge(target, self.measured) for target in TARGETS)
        return [verdict for verdict in found if verdict is not None]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = parse(argv)
    report = run(args.only, args.rounds or (15 if args.quick else 100), args.quick)
    print("\n\n".join(describe(report, markdown if args.markdown else aligned)))
    if args.json:
        args.json.write_text(json.dumps(as_json(report), indent=1) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or leave with a message about the wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__.partition("\n")[0]
    )
    option = parser.add_argument
    option("--only", default="", metavar="SUBSTRING", help="only names with this in them")
    option("--rounds", type=int, metavar="N", help="rounds for each name (100; --quick: 15)")
    option("--quick", action="store_true", help="short rounds: a first look in half a minute")
    option("--markdown", action="store_true", help="print Markdown tables")
    option("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    args = parser.parse_args(argv)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1 round is needed")
    if not any(args.only in name for name in names()):
        near = get_close_matches(args.only, names(), n=3, cutoff=0)
        parser.error(f"--only {args.only}: no name contains it; the nearest: {', '.join(near)}")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json}: not a file in a folder that exists")
    return args


def names() -> list[str]:
    """Return what ``--only`` chooses from."""
    return [*(case.name for case in CASES), IMPORT, GROWTH]


def run(only: str, rounds: int, quick: bool) -> Report:
    """Measure every benchmark whose name contains ``only``."""
    torch.set_num_threads(1)
    ours, theirs = load(OURS), peer()
    gc.freeze()  # what the imports left behind is not collected again and again
    report = Report(environment(theirs, rounds))
    chosen = [case for case in CASES if only in case.name]
    for count, case in enumerate(chosen, 1):
        progress(f"{count}/{len(chosen)} {case.name}")
        works = case.works({OURS: ours} | theirs)
        report.measured[case.name] = measure(works, rounds, 2e-4 if quick else 1e-3)
    if only in IMPORT:
        progress("import tdnn")
        report.import_time = import_seconds(3 if quick else 7)
    if only in GROWTH:
        progress("growth")
        report.growth = grow(ours, SIZES, 3 if quick else 9)
    progress("")
    return report


def environment(libs: Iterable[str], rounds: int) -> dict[str, Any]:
    versions = {name: version(name) for name in ("torch", OURS, *libs)}
    return {
        "python": platform.python_version(),
        **versions,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }


def processor() -> str:
    """Return the model of the CPU where the system tells, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def progress(text: str) -> None:
    """Show on a terminal what is measured now, over what was shown before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


# -- the report as text --------------------------------------------------------------------------

Rows = list[list[str]]
Table = Callable[[list[str], Rows], str]


def describe(report: Report, table: Table) -> list[str]:
    """Return the parts of the printed report, each under a line that says what it is."""
    has_peer = PEER in report.environment
    parts = [", ".join(f"{name} {value}" for name, value in report.environment.items())]
    if not has_peer:
        parts.append(f"{PEER} is not installed: its columns and targets are left out.")
    if report.measured:
        parts += ["µs per call (medians), and ratios of medians (10 to 90 % of the rounds):"]
        parts += [table(*times_table(report.measured, has_peer))]
    targets = targets_rows(report)
    if targets:
        head = ["target", "at", "bound", "found", "met", "plain torch reaches"]
        parts += ["Targets, each with the benchmark that comes out worst:", table(head, targets)]
    if report.growth:
        parts += [f"µs per leaf, by the number of leaves ({PLAIN} in brackets):"]
        parts += [table(*growth_table(report.growth))]
    return parts


def times_table(measured: dict[str, Times], has_peer: bool) -> tuple[list[str], Rows]:
    libs = [PLAIN, OURS, PEER] if has_peer else [PLAIN, OURS]
    ratios = [(PEER, OURS), (OURS, PLAIN)] if has_peer else [(OURS, PLAIN)]
    head = ["benchmark", *libs, *(f"{over} / {under}" for over, under in ratios)]
    rows = []
    for name, times in measured.items():
        row = [name, *(micros(middle(times[lib])) if lib in times else "" for lib in libs)]
        for pair in ratios:
            known = all(lib in times for lib in pair)
            row.append(spread(ratio(*(times[lib] for lib in pair))) if known else "")
        rows.append(row)
    return head, rows


def targets_rows(report: Report) -> Rows:
    rows = [
        [
            verdict.target.what,
            verdict.name,
            verdict.target.rule,
            spread(verdict.ratio),
            yes_or_no(verdict.met),
            "" if verdict.cap is None else f"{verdict.cap:.2f}x",
        ]
        for verdict in report.verdicts()
    ]
    if report.import_time is not None:
        met = yes_or_no(report.import_time < IMPORT_LIMIT)
        bound, found = f"< {IMPORT_LIMIT * 1e3:.0f} ms", f"{report.import_time * 1e3:.1f} ms"
        rows.append(["import tdnn after torch", IMPORT, bound, found, met, ""])
    return rows


def growth_table(growth: Growth) -> tuple[list[str], Rows]:
    head = ["leaves", *next(iter(growth.values()))]
    rows = [
        [f"{size:,}", *(f"{micros(of[OURS])} ({micros(of[PLAIN])})" for of in costs.values())]
        for size, costs in growth.items()
    ]
    return head, rows


def yes_or_no(met: bool) -> str:
    return "yes" if met else "NO"


def micros(seconds: float) -> str:
    """Return microseconds with three significant digits, without a fraction from 100 on."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(found: Ratio) -> str:
    """Return a ratio and, in brackets, between what most rounds lie."""
    return f"{found.value:.2f}x ({found.low:.2f}-{found.high:.2f})"


def aligned(head: list[str], rows: Rows) -> str:
    """Return a table for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, rule, *rows)
    )


def markdown(head: list[str], rows: Rows) -> str:
    """Return the same table in Markdown."""
    rule = [":--"] + ["--:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def as_json(report: Report) -> dict[str, Any]:
    """Return all figures for a file: medians and rounds in seconds, and the verdicts."""
    return {
        **asdict(report),
        "medians": {
            name: {lib: middle(each) for lib, each in times.items()}
            for name, times in report.measured.items()
        },
        "targets": [{**asdict(verdict), "met": verdict.met} for verdict in report.verdicts()],
    }


if __name__ == "__main__":
    main()
