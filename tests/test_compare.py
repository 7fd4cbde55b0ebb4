"""The comparison of benchmarks: its statistics, its verdicts and its tables, on a fake clock."""

import gc
import json

import pytest
import torch

import tdnn
from benchmarks import compare
from benchmarks.cases import CASES, OURS, PEER, PLAIN
from benchmarks.targets import TARGETS, Target, judge
from benchmarks.timing import Prepared, Ratio, measure, ratio


class Clock:
    """A clock that only works move on."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def work(self, name, seconds):
        def run():
            self.now += seconds
            self.log.append(name)

        return run


@pytest.fixture
def clock():
    return Clock()


# -- timing --------------------------------------------------------------------------------------


def test_measure_returns_the_seconds_of_one_call(clock):
    times = measure({"a": clock.work("a", 2e-5), "b": clock.work("b", 3e-4)}, 5, clock=clock)
    assert times == {"a": pytest.approx([2e-5] * 5), "b": pytest.approx([3e-4] * 5)}


def test_each_round_runs_every_work_once_in_an_order_that_changes(clock):
    works = {name: clock.work(name, 1.0) for name in "abc"}
    measure(works, 20, clock=clock)
    rounds = ["".join(clock.log[at : at + 3]) for at in range(12, 72, 3)]
    assert len(clock.log) == 72  # each three times ahead, and once to see how long it takes
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 1


def test_a_short_work_is_repeated_for_about_the_time_of_a_round(clock):
    measure({"a": clock.work("a", 1e-6)}, 1, clock=clock)
    calls = len(clock.log)
    measure({"a": clock.work("a", 1e-6)}, 11, clock=clock)
    assert 0.5e-3 <= (len(clock.log) - 2 * calls) / 10 * 1e-6 <= 2e-3


def test_what_comes_before_a_prepared_work_is_not_timed(clock):
    work = Prepared(clock.work("before", 1.0), clock.work("run", 2e-3))
    assert measure({"a": work}, 3, clock=clock)["a"] == pytest.approx([2e-3] * 3)
    assert clock.log == ["before", "run"] * 7


def test_no_garbage_is_collected_inside_a_round_and_the_switch_is_put_back(clock):
    seen = []

    def work():
        seen.append(gc.isenabled())
        clock.now += 1
        if len(seen) == 3:
            raise LookupError

    with pytest.raises(LookupError):
        measure({"a": work}, 9, clock=clock)
    assert seen == [False] * 3
    assert gc.isenabled()


def test_a_ratio_is_that_of_the_medians():
    assert ratio([2.0, 4.0, 600.0], [1.0, 1.0, 1.0]).value == 4.0


def test_a_machine_that_slows_down_does_not_widen_the_spread_of_a_ratio():
    under = [1.0, 1.0, 5.0, 5.0]
    found = ratio([3 * time for time in under], under)
    assert (found.low, found.value, found.high) == (3.0, 3.0, 3.0)


def test_the_spread_leaves_out_a_tenth_of_the_rounds_at_each_end():
    found = ratio([float(time) for time in range(101)], [1.0] * 101)
    assert (found.low, found.high) == pytest.approx((10.0, 90.0))


def test_a_ratio_of_one_round_has_no_spread():
    assert ratio([3.0], [2.0]) == Ratio(1.5, 1.5, 1.5)


def test_a_ratio_needs_both_times_of_each_round():
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


# -- verdicts ------------------------------------------------------------------------------------


def times(ours, theirs, plain):
    return {OURS: [ours] * 3, PEER: [theirs] * 3, PLAIN: [plain] * 3}


@pytest.mark.parametrize(("bound", "met"), [(2.9, True), (3.0, True), (3.1, False)])
def test_a_floor_is_judged_by_the_smallest_ratio(bound, met):
    target = Target("speed", PEER, OURS, bound, ("quick", "slow"), capped=True)
    verdict = judge(target, {"quick": times(1.0, 9.0, 1.0), "slow": times(2.0, 6.0, 0.5)})
    assert (verdict.name, verdict.ratio.value, verdict.met) == ("slow", 3.0, met)
    assert verdict.cap == 12.0
    assert target.rule == f"≥ {bound:g}x"


@pytest.mark.parametrize(("bound", "met"), [(1.9, False), (2.0, True), (2.1, True)])
def test_a_ceiling_is_judged_by_the_largest_ratio(bound, met):
    target = Target("cost", OURS, PLAIN, bound, ("quick", "slow"))
    verdict = judge(target, {"quick": times(1.0, 1.0, 1.0), "slow": times(2.0, 1.0, 1.0)})
    assert (verdict.name, verdict.ratio.value, verdict.met) == ("slow", 2.0, met)
    assert verdict.cap is None
    assert target.rule == f"≤ {bound:g}x"


def test_a_target_is_not_judged_by_a_part_of_its_benchmarks():
    target = Target("speed", PEER, OURS, 2, ("measured", "left out"))
    assert judge(target, {"measured": times(1.0, 9.0, 1.0)}) is None
    assert judge(target, {"measured": {OURS: [1.0]}, "left out": {OURS: [1.0]}}) is None


def test_every_target_is_about_benchmarks_that_exist():
    known = [case.name for case in CASES]
    assert len(set(known)) == len(known)
    assert [name for target in TARGETS for name in target.names if name not in known] == []


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Return a function that runs the command on one small benchmark, with or without a peer."""

    def call(*options, libs):
        monkeypatch.setattr(compare, "peer", lambda: libs)
        monkeypatch.setattr(compare, "version", lambda name: "1.0")
        compare.main(["--only", "creation_empty", "--quick", "--rounds", "2", *options])

    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)
    gc.unfreeze()


def test_the_report_shows_times_and_ratios_of_all_three(quick, capsys):
    quick(libs={PEER: tdnn})
    shown = capsys.readouterr().out
    head = next(line for line in shown.splitlines() if line.startswith("benchmark"))
    assert head.endswith(" tdnn / plain torch")
    assert f"{PEER} 1.0" in shown
    row = next(line for line in shown.splitlines() if line.startswith("test_creation_empty"))
    assert row.count("x (") == 2


def test_without_a_peer_its_columns_are_left_out_and_the_report_says_so(quick, capsys):
    quick(libs={})
    shown = capsys.readouterr().out
    assert "tensordict is not installed" in shown
    assert f"{PEER} /" not in shown


def test_the_markdown_table_has_as_many_cells_in_each_row(quick, capsys):
    quick("--markdown", libs={PEER: tdnn})
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {7}
    assert len(rows) == 3


def test_the_file_holds_the_rounds_and_the_medians(quick, tmp_path, capsys):
    quick("--json", str(tmp_path / "out.json"), libs={PEER: tdnn})
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["measured"]["test_creation_empty"][OURS]) == 2
    assert found["medians"]["test_creation_empty"].keys() == {OURS, PEER, PLAIN}
    assert found["environment"]["threads"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "at least 1 round"),
        (["--rounds", "many"], "invalid int value: 'many'"),
        (["--only", "test_clones"], "no name contains it; the nearest: test_clone,"),
        (["--json", "no/such/folder/out.json"], "not a file in a folder that exists"),
    ],
)
def test_a_wrong_option_ends_the_command_with_the_reason(options, message, capsys):
    with pytest.raises(SystemExit):
        compare.parse(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.23456e-6, "1.23"), (5e-8, "0.05"), (1.23456e-3, "1,235")]
)
def test_microseconds_have_three_digits(seconds, text):
    assert compare.micros(seconds) == text


def test_an_aligned_table_puts_its_columns_under_each_other():
    table = compare.aligned(["name", "µs"], [["a", "1,000"], ["longer", "2"]])
    assert table.splitlines() == [
        "name       µs",
        "------  -----",
        "a       1,000",
        "longer      2",
    ]
