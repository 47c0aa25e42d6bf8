"""The change of a batch's entries since an earlier batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.study.batch.changes import change_percent, compare_batches, compare_entries
from optimizer.study.batch.record import BatchRecord, EntryRecord, EntryStatus, Estimate

CONDITIONS = {"hardware": "a CPU, 2 CPUs", "load": "concurrency"}
SINCE = "2026-11-01"


def entry(
    value: float | None, half: float | None = 1.0, *, state: EntryStatus = "found", model: str = "bert"
) -> EntryRecord:
    """Return an entry with ``value`` and half the width of its interval; None if it was not confirmed."""
    estimate = None
    if value is not None:
        estimate = Estimate("throughput", value, unsure="the machine was busy")
    if value is not None and half is not None:
        estimate = Estimate("throughput", value, value - half, value + half)
    verdict = {"found": "PASS", "none": "FAIL"}.get(state, "")
    return EntryRecord(
        model, "", "", "tune bert", model, state=state, recommended=estimate, verdict=verdict, conditions=CONDITIONS
    )


def undecided(value: float | None) -> EntryRecord:
    """Return an UNDECIDED entry, without a recommendation if ``value`` is None."""
    return replace(entry(value, None, state="none" if value is None else "found"), verdict="UNDECIDED")


def batch(*entries: EntryRecord) -> BatchRecord:
    return BatchRecord("nightly", f"{SINCE}T04:00:00+0000", 60.0, entries, status="finished")


def change_text(before: EntryRecord | None, now: EntryRecord) -> str:
    return compare_entries(before, now, SINCE).description


def test_a_loss_is_reported_with_its_interval() -> None:
    change = compare_entries(entry(100.0), entry(94.0), SINCE)
    assert change.kind == "lost"
    assert change.description == "lost 6 % since 2026-11-01 (between 4 % and 7.9 %)"
    assert change.share == pytest.approx(-0.06)


def test_intervals_of_disturbed_confirmations_are_not_compared() -> None:
    quiet, slower = entry(100.0), entry(50.0)
    assert slower.recommended is not None
    disturbed = replace(slower, recommended=replace(slower.recommended, unsure="31 % were disturbed"))
    assert change_text(quiet, disturbed) == "-50 % since 2026-11-01, which may be noise (now: 31 % were disturbed)"
    assert change_text(disturbed, quiet) == "+100 % since 2026-11-01, which may be noise (then: 31 % were disturbed)"


def test_a_loss_of_an_undecided_entry_is_no_regression() -> None:
    """Its test ended early, so its interval may be that of a low load or of a few servers."""
    passed, ended_early = entry(100.0), replace(entry(50.0), verdict="UNDECIDED")
    assert change_text(passed, ended_early) == "-50 % since 2026-11-01, which may be noise (now: UNDECIDED)"
    assert change_text(ended_early, passed) == "+100 % since 2026-11-01, which may be noise (then: UNDECIDED)"
    (compared,) = compare_batches(batch(ended_early), [batch(passed)], 0.05).entries
    assert (compared.change and compared.change.kind, compared.regressed) == ("undecided", False)


def test_a_loss_within_the_intervals_is_noise() -> None:
    assert change_text(entry(100.0, 5.0), entry(94.0, 2.0)) == "-6 % since 2026-11-01, within noise"


def test_a_gain_is_reported_with_its_date() -> None:
    assert change_text(entry(100.0), entry(150.0)).startswith("gained 50 % since 2026-11-01")


def test_lower_is_better_for_a_latency() -> None:
    slow, quick = (
        replace(entry(1.0), recommended=Estimate("latency-p95", value, value - 0.1, value + 0.1))
        for value in (12.0, 10.0)
    )
    assert compare_entries(slow, quick, SINCE).kind == "gained"
    assert compare_entries(quick, slow, SINCE).kind == "lost"


@pytest.mark.parametrize(("before", "now", "which"), [(None, 1.0, "then"), (1.0, None, "now")])
def test_an_unconfirmed_change_may_be_noise(before: float | None, now: float | None, which: str) -> None:
    change = compare_entries(entry(100.0, before), entry(50.0, now), SINCE)
    assert change.kind == "undecided"
    assert change.description == f"-50 % since 2026-11-01, which may be noise ({which}: the machine was busy)"


@pytest.mark.parametrize(
    ("then", "now", "kind"),
    [(0.01, 0.62, "undecided"), (0.62, 0.01, "undecided"), (0.3, 0.35, "lost"), (None, 0.62, "lost")],
)
def test_a_loss_while_others_used_the_machine_more_is_no_regression(
    then: float | None, now: float | None, kind: str
) -> None:
    def disturbed(value: float, share: float | None) -> EntryRecord:
        estimate = Estimate("throughput", value, value - 1, value + 1, other_cpu_share=share)
        return replace(entry(value), recommended=estimate)

    (compared,) = compare_batches(batch(disturbed(50.0, now)), [batch(disturbed(100.0, then))], 0.05).entries
    assert compared.change is not None
    assert compared.change.kind == kind
    assert compared.regressed is (kind == "lost")
    if (then, now) == (0.01, 0.62):
        reason = "other processes or machines took 62 % of the CPUs now, and 1 % then"
        assert compared.change.description == f"-50 % since {SINCE}, which may be noise ({reason})"


def test_another_machine_is_no_comparison() -> None:
    other = replace(entry(50.0), conditions={**CONDITIONS, "hardware": "another CPU"})
    assert change_text(entry(100.0), other) == (
        "not comparable with 2026-11-01: other hardware, a CPU, 2 CPUs then and another CPU now"
    )


@pytest.mark.parametrize(
    ("metric", "before", "now", "text"),
    [
        ("error-rate", 0.0, 0.0, "error-rate: 0.00 % now and 0.00 % on 2026-11-01, which have no ratio"),
        ("error-rate", 0.0, 0.5, "error-rate: 0.500 % now and 0.00 % on 2026-11-01, which have no ratio"),
        ("score", -2.0, 4.0, "score: 4.00 now and -2.00 on 2026-11-01, which have no ratio"),
    ],
)
def test_values_without_a_ratio_are_no_change(metric: str, before: float, now: float, text: str) -> None:
    earlier, current = (
        replace(entry(1.0), recommended=Estimate(metric, value, value, value), baseline=Estimate(metric, value))
        for value in (before, now)
    )
    (compared,) = compare_batches(batch(current), [batch(earlier)], 0.05).entries
    assert compared.change is not None
    assert (compared.change.kind, compared.change.description, compared.regressed) == ("undecided", text, False)


def test_a_baseline_of_zero_explains_nothing() -> None:
    before, now = (
        replace(entry(value), baseline=Estimate("error-rate", percent))
        for value, percent in ((100.0, 0.0), (94.0, 0.1))
    )
    assert change_text(before, now) == "lost 6 % since 2026-11-01 (between 4 % and 7.9 %)"


def test_other_changes_are_reported_with_it() -> None:
    before = replace(entry(100.0), baseline=Estimate("throughput", 50.0), circumstances={"tritonserver": "2.50.0"})
    now = replace(entry(80.0), baseline=Estimate("throughput", 40.0), circumstances={"tritonserver": "2.51.0"})
    assert change_text(before, now).endswith("; its baseline -20 %; tritonserver 2.50.0 -> 2.51.0")


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (None, entry(100.0), "new"),
        (entry(None, state="waiting"), entry(100.0), "new"),
        (entry(None, state="none"), entry(100.0), "met"),
        (entry(None, state="none"), entry(None, state="none"), "same"),
        (entry(None, state="failed"), entry(None, state="none"), "incomparable"),
        (entry(100.0), entry(None, state="none"), "missed"),
        (undecided(100.0), entry(None, state="none"), "undecided"),
        (undecided(None), entry(None, state="none"), "undecided"),
        (undecided(None), entry(100.0), "met"),
        (entry(None, state="none"), undecided(None), "undecided"),
        (entry(None, state="none"), undecided(100.0), "undecided"),
        (entry(100.0), undecided(None), "undecided"),
        (entry(100.0), entry(None, state="failed"), "failed"),
    ],
)
def test_the_change_of_an_entry_without_a_result_has_its_kind(
    before: EntryRecord | None, now: EntryRecord, kind: str
) -> None:
    assert compare_entries(before, now, SINCE).kind == kind


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (entry(100.0), "it had a configuration that meets its bounds on 2026-11-01"),
        (undecided(100.0), "it ended UNDECIDED with a recommendation on 2026-11-01"),
        (undecided(None), "it ended UNDECIDED without a recommendation on 2026-11-01"),
    ],
)
def test_an_undecided_entry_did_not_meet_its_bounds_before(before: EntryRecord, text: str) -> None:
    assert change_text(before, entry(None, state="none")) == text


def test_an_entry_that_failed_twice_says_so() -> None:
    failed = entry(None, state="failed")
    assert change_text(failed, failed) == "it failed too on 2026-11-01"
    assert change_text(entry(100.0), failed) == "it had a configuration that meets its bounds on 2026-11-01"


@pytest.mark.parametrize(
    ("now", "share", "regressed"),
    [
        (entry(94.0), 0.05, True),
        (entry(94.0), 0.07, False),
        (entry(94.0), None, False),
        (entry(94.0, 10.0), 0.05, False),  # the intervals explain it
        (entry(50.0, None), 0.05, False),
        (entry(150.0), 0.05, False),
    ],
)
def test_a_loss_above_the_share_that_no_interval_explains_is_a_regression(
    now: EntryRecord, share: float | None, regressed: bool
) -> None:
    assert compare_batches(batch(now), [batch(entry(100.0))], share).entries[0].regressed is regressed


def test_entries_are_matched_by_their_label() -> None:
    before = batch(entry(100.0), entry(10.0, model="old"))
    result = compare_batches(batch(entry(1.0, model="new"), entry(90.0)), [before], 0.05)
    assert [compared.change.kind for compared in result.entries if compared.change] == ["new", "lost"]
    assert result.gone == ("old",)


def test_an_entry_that_failed_last_night_is_compared_with_the_night_before() -> None:
    failed = entry(None, state="failed")
    first = replace(batch(entry(100.0)), started="2026-10-30T04:00:00+0000")
    earlier = [batch(failed, entry(5.0, model="other")), first]
    (compared,) = compare_batches(batch(entry(50.0)), earlier, 0.05).entries
    assert compared.change is not None
    assert compared.change.description.startswith("lost 50 % since 2026-10-30")
    assert compared.regressed
    (again,) = compare_batches(batch(failed), earlier, 0.05).entries
    assert again.change is not None
    assert again.change.description == f"it failed too on {SINCE}"
    (alone,) = compare_batches(batch(entry(50.0)), earlier[:1], 0.05).entries
    assert alone.change is not None
    assert (alone.change.kind, alone.regressed) == ("met", False)


def test_unfinished_entries_are_not_compared() -> None:
    (compared,) = compare_batches(batch(entry(None, state="searched")), [batch(entry(100.0))], 0.05).entries
    assert compared.change is None


@given(st.floats(1, 1e6), st.floats(0, 0.5), st.floats(1, 1e6), st.floats(0, 0.5), st.floats(0.01, 0.5))
def test_only_disjoint_intervals_are_a_change(a: float, i: float, b: float, j: float, share: float) -> None:
    before, now = entry(a, a * i), entry(b, b * j)
    change = compare_entries(before, now, SINCE)
    apart = a - a * i > b + b * j or b - b * j > a + a * i  # rounded as the ends of the intervals
    assert (change.kind in ("lost", "gained")) == apart
    if compare_batches(batch(now), [batch(before)], share).entries[0].regressed:
        assert b + b * j < a - a * i
        assert b <= a * (1 - share) * (1 + 1e-9)


@pytest.mark.parametrize(("share", "text"), [(0.06, "6 %"), (-0.0583, "5.8 %"), (0.0043, "0.43 %"), (1.2, "120 %")])
def test_a_share_is_shown_in_percent_with_two_digits(share: float, text: str) -> None:
    assert change_percent(share) == text


def test_a_value_has_the_name_of_any_metric_that_a_bound_may_have() -> None:
    """METRICS does not list percentiles such as p99.9."""
    assert Estimate("latency-p99.9", 20.0).metric == "latency-p99.9"
    for metric, value in (("p95", 20.0), ("unknown", 20.0), ("latency-p95", math.nan)):
        with pytest.raises(ValueError, match="is not a"):
            Estimate(metric, value)
