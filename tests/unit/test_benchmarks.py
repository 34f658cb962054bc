from __future__ import annotations

import json

import pytest

from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.arithmetic import Spread, differences, percentile, ratios, rotated, together
from benchmarks.child import Child, ChildError
from benchmarks.contest import Contender, compete
from benchmarks.registry import SECTIONS
from benchmarks.results import FLOOR, OURS, PEER, UNIT, Bar, Line, Section


def test_a_ratio_is_made_within_a_round():
    # The machine was half as fast in the second round: the ratio does not see it.
    assert ratios([200.0, 100.0], [100.0, 50.0]) == [2.0, 2.0]


def test_a_round_that_only_one_of_two_has_is_no_ratio():
    assert ratios([200.0], [100.0, 50.0]) == [2.0]
    assert differences([7.0, 9.0], [5.0]) == [2.0]


def test_a_unit_of_zero_is_an_error():
    with pytest.raises(ValueError, match="zero"):
        ratios([1.0], [0.0])


def test_a_spread_is_the_median_and_what_is_around_it():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="needs a value"):
        Spread.of([])


def test_a_percentile_is_one_of_the_values():
    values = [float(number) for number in range(100, 0, -1)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 0.07) == 7.0
    assert percentile(values, 1.0) == 100.0
    assert percentile([4.0], 0.01) == 4.0
    with pytest.raises(ValueError, match="percentile"):
        percentile([], 0.5)


def test_slices_of_equal_size_make_the_rate_of_their_whole_time():
    # 100 operations in one second and 100 in three: 200 in four.
    assert together([100.0, 100 / 3]) == pytest.approx(50.0)
    with pytest.raises(ValueError, match="greater than zero"):
        together([1.0, 0.0])


def test_everybody_begins_once():
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert rotated("abc", 1) == ["b", "c", "a"]
    assert rotated([], 5) == []


def contender(name: str, calls: list[str], rate: float = 100.0) -> Contender:
    def run() -> float:
        calls.append(name)
        return rate

    return Contender(name, PEER, "something", run, "a")


def test_contenders_are_measured_in_turn():
    calls: list[str] = []
    compete([contender(name, calls) for name in "abc"], 2, [].append, slices=2)
    assert "".join(calls) == "abcbcacababc"


def test_a_contender_that_fails_does_not_stop_the_others():
    calls: list[str] = []

    def fail() -> float:
        calls.append("b")
        raise OSError("no connection")

    said: list[str] = []
    lines = compete(
        [contender("a", calls), Contender("b", PEER, "something", fail, "a")], 3, said.append
    )
    assert [line.rates for line in lines] == [[100.0] * 3, []]
    assert lines[1].failed == "OSError: no connection"
    # Not asked again, and said once.
    assert calls.count("b") == 1
    assert sum("no connection" in line for line in said) == 1


def make_section() -> Section:
    section = Section("record-one", "record: one job per transaction", "jobs/s")
    section.lines = [
        Line("unit", UNIT, "a confirmed call", [100.0, 50.0, 200.0], "unit"),
        Line("ours", OURS, "a recorded call", [160.0, 80.0, 300.0], "unit"),
        Line("peer", PEER, "another one", [300.0, 100.0], "unit"),
        Line("broken", FLOOR, "nothing", [], "unit", "OSError: no\nconnection"),
    ]
    return section


def test_a_bar_is_held_against_the_median_of_the_ratios():
    section = make_section()
    section.hold("fast enough", "ours", "unit", 1.6)
    section.hold("too fast", "ours", "unit", 1.7)
    section.hold("not measured", "broken", "unit", 1.0)
    section.ahead("ours", ["peer", "absent"])
    assert [bar.met for bar in section.bars] == [True, False, None, False]
    assert section.bars[0].value == Spread(1.6, 1.5, 1.6)
    assert section.bars[3].value == pytest.approx(Spread((160 / 300 + 0.8) / 2, 160 / 300, 0.8))


def test_a_bar_may_be_a_ceiling():
    assert Bar("size", Spread.of([60.0]), 60.0, at_most=True).met is True
    assert Bar("size", Spread.of([61.0]), 60.0, at_most=True).met is False


def test_the_table_shows_ratios_spread_bars_and_failures():
    section = make_section()
    section.hold("fast enough", "ours", "unit", 1.6)
    section.bars.append(Bar("memory", Spread.of([94.5]), 60, at_most=True, measure="MB"))
    section.bars.append(Bar("bulk", None, 34))
    section.notes.append("rough")
    lines = report.table(section).splitlines()
    assert lines[:2] == ["record: one job per transaction", "=" * 31]
    ours = next(line for line in lines if line.startswith("ours"))
    assert ours.split() == ["ours", "1.60", "1.50", "-", "1.60", "160", "a", "recorded", "call"]
    assert next(line for line in lines if line.startswith("broken")).endswith("FAILED: connection")
    assert [line.split()[-2:] for line in lines if line.startswith(("fast", "memory", "bulk"))] == [
        ["1.60", "met"],
        ["NOT", "MET"],
        ["not", "measured"],
    ]
    assert "94.5 MB" in next(line for line in lines if line.startswith("memory"))
    assert lines[-1] == "* rough"
    assert report.summary([section]).count("\n") == 2


def test_the_json_has_the_raw_rounds_and_the_verdicts():
    section = make_section()
    section.hold("fast enough", "ours", "unit", 1.6)
    plain = json.loads(json.dumps(section.as_json()))
    assert plain["lines"][1]["rates"] == [160.0, 80.0, 300.0]
    assert plain["lines"][1]["ratio"] == {"median": 1.6, "least": 1.5, "most": 1.6}
    assert plain["lines"][3]["ratio"] is None
    assert plain["bars"][0]["met"] is True


def test_sections_can_be_listed_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SECTIONS)
    for wrong in (["--only", "speed"], ["--rounds", "0"], ["--quick", "--full"]):
        with pytest.raises(SystemExit) as exit:
            main(wrong)
        assert exit.value.code == 2


def test_an_object_in_another_process_answers_and_fails_as_itself():
    child = Child("fractions:Fraction", 3, 4)
    try:
        assert child.call("as_integer_ratio") == (3, 4)
        with pytest.raises(ChildError, match="AttributeError"):
            child.call("speed")
        assert child.call("limit_denominator", 2).numerator == 1
    finally:
        child.close()
    with pytest.raises(ChildError, match="is gone"):
        child.call("as_integer_ratio")


def test_an_object_that_cannot_be_made_says_why():
    with pytest.raises(ChildError, match="ZeroDivisionError"):
        Child("fractions:Fraction", 3, 0)


def test_a_child_that_does_not_answer_is_ended():
    child = Child("threading:Event")
    try:
        with pytest.raises(ChildError, match=r"did not answer within 0\.1 s"):
            child.call("wait", timeout=0.1)
        with pytest.raises(ChildError):
            child.call("is_set")
    finally:
        child.close()
