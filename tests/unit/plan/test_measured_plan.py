"""``tune plan`` for models that stream or keep state: the rate of a replica by its measured throughput alone."""

from __future__ import annotations

import heapq
import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from objectives import model_stats
from objectives.intervals import ConfidenceInterval
from objectives.metrics import Measurement
from optimizer.cli.plan import main
from optimizer.core.errors import BadInputError
from optimizer.plan.measured_capacity import (
    MEASURED_KIND,
    LengthSummary,
    MeasuredCapacity,
    ReplicaCurve,
    derive_capacity,
)
from optimizer.plan.measured_plan import replicas_for
from optimizer.results.finished_run import read_run
from optimizer.store.run_folder import RunFolder
from tests import stateful_run, streaming_run
from tests.csv_tables import read_rows, write_rows
from tests.run_folders import change_info, copy_run, write_run

Array: TypeAlias = npt.NDArray[Any]
SLOTS = 16
PERMITTED = 0.05
SERVICE_S = 0.5  # of a request alone


def curve(throughput: Any, late: Any = 0.0, permitted: float = PERMITTED) -> ReplicaCurve:
    values = np.asarray(throughput, np.float64)
    return ReplicaCurve(values, np.broadcast_to(late, values.shape)[None], np.array([permitted]))


COUNTS = np.arange(1, SLOTS + 1)
SLOTTED = curve(COUNTS / SERVICE_S)  # every request in a slot is as fast as alone
BATCHED = curve(COUNTS / (SERVICE_S * (0.6 + 0.4 * COUNTS)))  # a step takes longer with more requests in it


def capacity(rates: tuple[float, float, float]) -> MeasuredCapacity:
    safe, likely, high = rates
    return MeasuredCapacity(
        safe=safe,
        likely=likely,
        high=high,
        confidence=0.99,
        confirmed=likely,
        interval=ConfidenceInterval(safe, high),
        concurrency=8,
        lengths=LengthSummary({}, ""),
        assumptions=(),
    )


def plan_of_two_models(folder: Path, other_infer_per_sec: float) -> MeasuredCapacity:
    """Return the capacity of a run with 20 requests in flight to one model, and 60 to the other, of two samples."""
    latencies: dict[str, Any] = {
        "latency_avg_ms": 5.0,
        "latency_p50_ms": 5.0,
        "latency_p95_ms": 8.0,
        "requests": 1000,
    }
    models = {"doubler": Measurement(600.0, **latencies), "other": Measurement(other_infer_per_sec, **latencies)}
    total = 600.0 + other_infer_per_sec
    measured = Measurement(total, **latencies, by_model=model_stats.to_text(models), stable=True)
    run = change_info(write_run(folder, measured=measured), "problem", concurrent_models="other=3")
    return derive_capacity(read_run(run))


def test_the_model_with_the_lowest_rate_limits_several(tmp_path: Path) -> None:
    slow, fast = (plan_of_two_models(tmp_path / name, rate) for name, rate in (("slow", 400.0), ("fast", 9000.0)))
    assert (slow.limiting_model, slow.concurrency) == ("other", 60)
    assert 0 < slow.safe < slow.likely < 200 / 0.75, "it serves 200 of its three quarters of the requests"
    assert (fast.limiting_model, fast.concurrency) == ("doubler", 20)
    assert 0 < fast.safe < fast.likely < 300 / 0.25
    assert slow.assumptions[0].startswith("the models get requests in the proportion of the run")


# -- the rate of a replica ---------------------------------------------------------------------------------------


def test_the_probabilities_are_those_of_erlang() -> None:
    """The number in flight is Poisson without queueing (M/G/∞), and geometric with one slot (M/M/1)."""
    many = curve(np.arange(1, 200) / SERVICE_S)
    poisson = np.exp(-4.0) * np.cumprod([1.0, *(4.0 / np.arange(1, 20))])
    assert many.in_flight(8.0)[:20] == pytest.approx(poisson, rel=1e-9)
    assert many.mean_in_flight(8.0) == pytest.approx(4.0)
    single = curve([10.0])
    assert single.in_flight(6.0) == pytest.approx([0.4, 0.6])
    assert single.mean_in_flight(6.0) == pytest.approx(1.5)
    assert single.highest_rate() == pytest.approx(PERMITTED * 10.0, rel=1e-4)


@pytest.mark.parametrize("replica", [SLOTTED, BATCHED])
def test_the_highest_rate_permits_just_the_share(replica: ReplicaCurve) -> None:
    rate = replica.highest_rate()
    assert 0 < rate < replica.capacity
    shares = [replica.over_bound_shares(factor * rate)[0] for factor in (0.99, 1.0, 1.01)]
    assert shares[1] == pytest.approx(PERMITTED, rel=1e-3)
    assert shares[0] < shares[1] < shares[2]


def test_the_highest_rate_rises_with_throughput_and_slots_and_falls_with_late_requests() -> None:
    rates = [BATCHED.faster(factor).highest_rate() for factor in (0.8, 1.0, 1.2)]
    assert rates == pytest.approx([factor * rates[1] for factor in (0.8, 1.0, 1.2)], rel=1e-4)
    shares = [curve(np.arange(1, slots + 1)).highest_rate() / slots for slots in (1, 4, 16, 64)]
    assert shares == sorted(shares)
    late = [curve(BATCHED.throughput, share).highest_rate() for share in (0.0, 0.02, 0.04)]
    assert late == sorted(late, reverse=True)
    assert late[2] > 0
    assert curve(BATCHED.throughput, 0.06).highest_rate() == 0.0
    assert curve(BATCHED.throughput, permitted=0.01).highest_rate() < late[0]


def test_each_bound_counts() -> None:
    both = replace(
        BATCHED, over_bound=np.array([np.zeros(SLOTS), np.full(SLOTS, 0.04)]), permitted=np.array([0.05, 0.05])
    )
    assert both.highest_rate() == pytest.approx(curve(BATCHED.throughput, 0.04).highest_rate())


def drawn_services(draw: np.random.Generator, count: int, kind: str) -> Array:
    if kind == "constant":
        return np.full(count, SERVICE_S)
    return draw.lognormal(np.log(SERVICE_S) - 0.32, 0.8, count)


@pytest.mark.parametrize("kind", ["constant", "lognormal"])
def test_a_server_with_slots_keeps_the_permitted_share(kind: str) -> None:
    """Requests wait first come, first served for one of SLOTS slots (M/G/c). A request that waits is late."""
    draw, count = np.random.default_rng(5), 60_000
    arrivals = np.cumsum(draw.exponential(1 / SLOTTED.highest_rate(), count))
    free, waited = [0.0] * SLOTS, 0
    for arrival, service in zip(arrivals.tolist(), drawn_services(draw, count, kind).tolist(), strict=True):
        start = max(arrival, heapq.heappop(free))
        waited += start > arrival
        heapq.heappush(free, start + service)
    assert 0.8 * PERMITTED < waited / count < 1.1 * PERMITTED


@pytest.mark.parametrize("kind", ["constant", "lognormal"])
def test_a_server_of_continuous_batching_keeps_the_permitted_share(kind: str) -> None:
    """Up to SLOTS requests are computed, each the slower the more there are, and others wait for a slot."""
    draw, count = np.random.default_rng(6), 200_000
    arrivals = np.cumsum(draw.exponential(1 / BATCHED.highest_rate(), count)).tolist()
    work = drawn_services(draw, count, kind) / SERVICE_S  # in requests of the mean length
    running: list[float] = []  # each with the progress at which it ends
    waiting: deque[float] = deque()
    now = progress = 0.0  # progress of each running request since the start, in requests
    found_full = 0
    for arrival, amount in zip(arrivals, work.tolist(), strict=True):
        while running:
            speed = float(BATCHED.throughput[len(running) - 1]) / len(running)
            end = now + (running[0] - progress) / speed
            if end > arrival:
                progress += (arrival - now) * speed
                break
            now, progress = end, heapq.heappop(running)
            if waiting:
                heapq.heappush(running, progress + waiting.popleft())
        now = arrival
        if len(running) == SLOTS:
            found_full += 1
            waiting.append(amount)
        else:
            heapq.heappush(running, progress + amount)
    assert 0.8 * PERMITTED < found_full / count < 1.2 * PERMITTED


MOST_RUNNING, PROMPT_S, STEP_S, STEP_S_OF_REQUEST = 32, 0.012, 0.006, 0.0008  # of ``served``


def served(tokens: Array, arrivals_s: Array | None, concurrency: int = 0) -> tuple[Array, Array, Array]:
    """Return the time to first response, the inter-token latency and the end of each request in seconds.

    A step computes the prompts of new requests and a token of every running one. Without arrivals a closed loop keeps
    ``concurrency`` requests in flight.
    """
    count = len(tokens)
    sent = [0.0] * count if arrivals_s is None else arrivals_s.tolist()
    first, last, left = [0.0] * count, [0.0] * count, tokens.tolist()
    arrived, now = concurrency, 0.0
    waiting, running = deque(range(concurrency)), list[int]()
    while running or waiting or arrived < count:
        if arrivals_s is not None:
            if not running and not waiting:
                now = max(now, sent[arrived])
            while arrived < count and sent[arrived] <= now:
                waiting.append(arrived)
                arrived += 1
        new = [waiting.popleft() for _ in range(min(len(waiting), MOST_RUNNING - len(running)))]
        running += new
        now += PROMPT_S * len(new) + STEP_S + STEP_S_OF_REQUEST * len(running)
        for request in running:
            first[request] = first[request] or now
            last[request] = now
            left[request] -= 1
            if arrivals_s is None and not left[request] and arrived < count:
                sent[arrived] = now
                waiting.append(arrived)
                arrived += 1
        running = [request for request in running if left[request]]
    firsts, lasts = np.array(first), np.array(last)
    return firsts - np.array(sent), (lasts - firsts) / (tokens - 1), lasts


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "confirmed"), [(0.075, 0.06, 24), (1.0, 0.036, 24), (0.3, 0.1, 40), (1.0, 0.03, 12)]
)
def test_a_server_that_decodes_in_steps_meets_its_bounds_at_the_highest_rate(
    ttft_s: float, itl_s: float, confirmed: int
) -> None:
    draw, loads, counts = np.random.default_rng(7), [1, 4, 8, 16, 24, 32], np.arange(1, confirmed + 1)
    loads = [load for load in loads if load < confirmed] + [confirmed]
    throughput, late = [], []
    for load in loads:
        ttft, itl, ends = served(draw.integers(16, 64, 2000), None, load)
        middle = np.sort(ends)[200:-200]
        throughput.append(len(middle) / (middle[-1] - middle[0]))
        late.append([(ttft[load:] > ttft_s).mean(), (itl > itl_s).mean()])
    shares = np.maximum.accumulate(np.array(late).T, axis=1)[:, np.searchsorted(loads, counts)]
    measured = np.minimum(np.interp(counts, [0, *loads], [0.0, *throughput]), throughput[-1])
    rate = ReplicaCurve(measured, shares, np.array([PERMITTED, PERMITTED])).highest_rate()
    assert 0.5 < rate / throughput[-1] < 0.95
    requests = 20_000
    ttft, itl, _ = served(draw.integers(16, 64, requests), np.cumsum(draw.exponential(1 / rate, requests)))
    assert (ttft > ttft_s).mean() <= PERMITTED
    assert (itl > itl_s).mean() <= PERMITTED


def test_replicas_rise_with_the_rate_and_fall_with_the_capacity() -> None:
    measured_capacity = capacity((9.0, 10.0, 11.0))
    counts = [replicas_for(rate, measured_capacity) for rate in (1.0, 90.0, 90.1, 1000.0)]
    assert [count.safe for count in counts] == [1, 10, 11, 112]
    assert all(count.low <= count.likely <= count.safe for count in counts)
    assert replicas_for(1000.0, capacity((18.0, 20.0, 22.0))).safe == 56
    with pytest.raises(BadInputError, match="need more than 100,000 replicas"):
        replicas_for(1e9, measured_capacity)


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def streaming(tmp_path: Path) -> Path:
    return streaming_run.write_run(tmp_path / "results" / "tinygpt")


@pytest.fixture
def stateful(tmp_path: Path) -> Path:
    return stateful_run.write_run(tmp_path / "results" / "accumulator")


def planned(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == code
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert isinstance(answer, dict)
    return answer


def test_replicas_of_a_model_that_streams_follow_from_its_measured_capacity(
    streaming: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = planned(capsys, streaming, "--rate", "100/s", "--gpu-hour-cost", "2")
    measured = answer["measured_capacity"]
    assert measured["concurrency"] == 24
    assert measured["interval"]["low"] < measured["confirmed"] < measured["interval"]["high"]
    assert measured["safe"] < measured["likely"] < measured["high"] < measured["confirmed"]
    assert measured["mean_in_flight"] < 24
    assert 0.03 < measured["full_share"] <= 0.05
    assert answer["count"]["safe"] == answer["replicas"] == -(-100 // measured["safe"])
    assert answer["n_plus_1_replicas"] == answer["replicas"] + 1
    assert answer["cost"]["per_hour"] == 2 * answer["replicas"]
    assert (answer["at_rate"], answer["headroom"], answer["further_measuring"]) == (None, [], None)


def test_the_rate_is_proportional_to_the_number_of_replicas(
    streaming: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single_replica, four_replicas = (planned(capsys, streaming, "--replicas", count) for count in ("1", "4"))
    assert four_replicas["rate_requests_per_sec"] == pytest.approx(
        4 * single_replica["rate_requests_per_sec"], rel=1e-3
    )
    assert single_replica["rate_requests_per_sec"] == pytest.approx(
        single_replica["measured_capacity"]["safe"], rel=1e-3
    )
    paid = planned(capsys, streaming, "--max-cost", "9", "--gpu-hour-cost", "2.2")
    assert (paid["replicas"], paid["rate_requests_per_sec"]) == (4, four_replicas["rate_requests_per_sec"])
    unpaid = planned(capsys, streaming, "--max-cost", "1", "--gpu-hour-cost", "2.2", code=1)
    assert (unpaid["replicas"], unpaid["sustainable_requests_per_sec"]) == (0, None)


def test_the_text_names_the_measurements_the_lengths_and_the_assumptions(
    streaming: Path, stateful: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(streaming), "--rate", "100/s"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "measured capacity of a replica, not a simulation" in text
    assert "were confirmed with 24 in flight in a closed loop, 5 loads measured" in text
    assert "prompts of 64 tokens and outputs of 16 to 63 tokens (mean 39.5)" in text
    assert "assumed requests arrive independently of each other" in text
    assert main([str(stateful), "--rate", "9000/s"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "sequences of 10..30 steps" in text
    assert "the client sends a step as soon as it has the answer to the last one" in text


def test_replicas_of_a_stateful_model_follow_from_its_steps_per_second(
    stateful: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = planned(capsys, stateful, "--rate", "9000/s")
    measured = answer["measured_capacity"]
    assert measured["confirmed"] == pytest.approx(24e3 / (4 + 0.3 * 24), rel=0.02)  # steps per second
    assert 0.5 * measured["confirmed"] < measured["safe"] < measured["confirmed"]
    assert answer["replicas"] == -(-9000 // measured["safe"])


def test_an_open_loop_confirms_the_rate_itself(streaming: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = streaming / "trials.csv"
    write_rows(table, ({**row, "concurrency": "", "request_rate": row["concurrency"]} for row in read_rows(table)))
    open_loop = copy_run(streaming, "open", options={"load": "rate"})
    answer = planned(capsys, open_loop, "--rate", "100/s")
    assert (answer["measured_capacity"]["safe"], answer["measured_capacity"]["concurrency"]) == (24.0, 0)
    assert answer["count"] == {"low": 5, "likely": 5, "safe": 5}
    main([str(open_loop), "--rate", "100/s"])
    assert "measured throughput, at a request rate. The plan" in " ".join(capsys.readouterr().out.split())
    constant = copy_run(open_loop, "constant", options={"request_times": "constant"})
    with pytest.raises(BadInputError, match="did not arrive independently of each other"):
        main([str(constant), "--rate", "100/s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rate 0/s", "--rate 0/s: write a positive rate"),
        ("--rate 9/s --replicas 2", "the tightest bound of a number of replicas needs the simulator"),
        ("--rate 9/s --sla-p95 20ms", "was confirmed within TTFT p95 <= 200 ms .* leave --sla-"),
        ("--rate 9/s --traffic diurnal", "give the rate of the busiest time with --rate instead"),
        ("--rate 9/s --traffic constant", "--traffic constant and --traffic diurnal need the simulator"),
        ("--rate 9000000/s", "need more than 100,000 replicas"),
    ],
)
def test_questions_that_need_the_simulator_are_refused(words: str, message: str, streaming: Path) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        main([str(streaming), *words.split()])
    assert "\n" not in str(caught.value)


def test_recorded_traffic_is_refused(streaming: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("timestamp\n" + "".join(f"{0.1 * number}\n" for number in range(100)))
    with pytest.raises(BadInputError, match="--trace, --traffic constant"):
        main([str(streaming), "--trace", str(tmp_path / "trace.csv")])


def test_the_bounds_of_the_run_may_be_repeated(streaming: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = ("--sla-itl-p95", "30ms", "--sla-ttft-p95", "200ms")
    assert planned(capsys, streaming, "--rate", "9/s", *bounds) == planned(capsys, streaming, "--rate", "9/s")


def test_runs_that_no_plan_can_use_are_refused_in_one_line(streaming: Path, tmp_path: Path) -> None:
    unconfirmed = copy_run(streaming, "unconfirmed")
    table = unconfirmed / "trials.csv"
    write_rows(table, (row for row in read_rows(table) if not row["confirmation"]))
    cut_off = copy_run(unconfirmed, "cut_off", status="interrupted")
    averages = copy_run(streaming, "averages", problem={"constraints": ["ttft-avg <= 200 ms"]})
    damaged = copy_run(streaming, "damaged", problem={"tokens": {"prompt": {"smallest": 1}}})
    simulated = Path("tests/data/dlrm/sample").resolve()
    for runs, message in (
        ([unconfirmed], f"no measurement on fresh servers.* `tune verify {unconfirmed} --budget 3m` makes it"),
        ([cut_off], f"no measurement on fresh servers.* `tune --resume {cut_off}` makes it"),
        ([averages], "permits no share of the requests"),
        ([damaged], "problem.tokens"),
        (
            [streaming, simulated],
            f"is no run of {MEASURED_KIND}, as another one is",
        ),
        ([streaming, copy_run(streaming, "same")], "have the same hardware"),
        ([streaming, copy_run(streaming, "other", problem={"model": "gpt"})], "of different models"),
    ):
        with pytest.raises(BadInputError, match=message) as caught:
            main([*map(str, runs), "--rate", "9/s"])
        assert "\n" not in str(caught.value)
    running = copy_run(unconfirmed, "running", status="running")
    with RunFolder(running).locked(), pytest.raises(BadInputError, match="state needs; wait until it ends"):
        main([str(running), "--rate", "9/s"])


def test_runs_on_other_hardware_are_compared(streaming: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy_run(streaming, "other", hardware={"cpu": "Other(R) CPU"})
    assert main([str(streaming), str(other), "--rate", "100/s"]) == 0
    assert capsys.readouterr().out.count("measured capacity of a replica") == 2
