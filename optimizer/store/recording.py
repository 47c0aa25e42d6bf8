"""A recorded table as search space, target and load generator: only recorded configurations and loads exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from objectives.metrics import METRICS, Measurement
from optimizer.config.problem import Problem
from optimizer.config.search_space import OFF, BatcherBehaviour, SearchSpace
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, DeploymentError, MeasurementError
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.trial import LoadPoint, Trial, TrialRole
from optimizer.store.recorded_rows import REQUIRED, RecordedRow, read_recorded_rows
from optimizer.store.trials_reader import CsvTable, read_csv

DEPLOY_SECONDS = 0.25  # if a table has no times: the median of results/dlrm/sample


@dataclass(frozen=True)
class RecordedSpace(SearchSpace):
    """A search space in which a combination is valid if it behaves like a candidate of ``recorded``.

    ``recorded`` has the concurrencies of each candidate, none if its deployment failed. Candidates that behave the
    same are one, written as the first of them and with the loads of all. ``recorded_space`` makes one, with the
    choices of the candidates.
    """

    recorded: Mapping[Candidate, Set[int]] = field(default_factory=dict, hash=False)

    def candidate(self, values: Mapping[str, FieldValue]) -> Candidate | None:
        """Return the recorded candidate with these values; None if there is none."""
        candidate = super().candidate(values)
        return candidate if candidate in self._loads else None

    def parameter_values(self, candidate: Candidate) -> dict[str, FieldValue] | None:
        return super().parameter_values(candidate) if self.canonical(candidate) in self._loads else None

    def allowed_concurrencies(self, candidate: Candidate) -> tuple[int, ...] | None:
        return self._loads.get(self.canonical(candidate), ())

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the candidates in the order of the table."""
        return tuple(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    @cached_property
    def _loads(self) -> dict[Candidate, tuple[int, ...]]:
        loads: dict[Candidate, tuple[int, ...]] = {}
        for candidate, concurrencies in self.recorded.items():
            canonical = self.canonical(candidate)
            loads[canonical] = tuple(sorted({*concurrencies, *loads.get(canonical, ())}))
        return loads

    @cached_property
    def _batchings(self) -> dict[object, BatcherBehaviour]:
        """The first spelling of each behaviour by its key, among the recorded candidates only."""
        spellings: dict[object, BatcherBehaviour] = {}
        policies = _policies(self.recorded)
        for candidate in self.recorded:
            batching = replace(candidate, instance_count=1, fields=())
            values: dict[str, FieldValue] = {
                "max_batch_size": candidate.max_batch_size,
                "max_queue_delay_us": candidate.max_queue_delay_us if candidate.dynamic_batching else OFF,
                "preferred_batch_sizes": policies[candidate],
            }
            spellings.setdefault(self._key(candidate), BatcherBehaviour(batching, values))
        return spellings


def recorded_space(recorded: Mapping[Candidate, Set[int]], request_batch_size: int) -> RecordedSpace:
    """Return the space of ``recorded``, which maps candidates to concurrencies.

    Raises ValueError if the candidates do not fit in one space.
    """
    fields: dict[str, list[FieldValue]] = {}
    for candidate in recorded:
        for path, value in candidate.fields:
            fields.setdefault(path, []).append(value)
    delays = {candidate.max_queue_delay_us for candidate in recorded if candidate.dynamic_batching}
    off = (OFF,) if not all(candidate.dynamic_batching for candidate in recorded) else ()
    return RecordedSpace(
        max_batch_size=tuple(sorted({candidate.max_batch_size for candidate in recorded})),
        max_queue_delay_us=(*off, *sorted(delays)),
        preferred_batch_sizes=tuple(_policies(recorded).values()),
        instance_count=tuple(sorted({candidate.instance_count for candidate in recorded})),
        fields={path: tuple(values) for path, values in fields.items()},
        request_batch_size=request_batch_size,
        recorded=recorded,
    )


def _policies(candidates: Iterable[Candidate]) -> dict[Candidate, str]:
    """Return the preferred sizes of each candidate as a policy.

    Policies are relative to max_batch_size unless that gives more of them: 4 of 8 and 8 of 16 are one choice,
    ``max/2``, so that a measurement of one informs the other.
    """
    relative, absolute = dict[Candidate, str](), dict[Candidate, str]()
    for candidate in candidates:
        sizes = candidate.preferred_batch_sizes
        absolute[candidate] = ",".join(map(str, sizes)) or "none"
        relative[candidate] = ",".join(_relative_size(size, candidate.max_batch_size) for size in sizes) or "none"
    return min((relative, absolute), key=lambda policies: len(set(policies.values())))


def _relative_size(size: int, max_batch_size: int) -> str:
    """Return a preferred size as ``max`` or ``max/2``; as a number if it does not divide ``max_batch_size``."""
    if max_batch_size % size:
        return str(size)
    return "max" if size == max_batch_size else f"max/{max_batch_size // size}"


def baselines(space: SearchSpace) -> list[tuple[TrialRole, Candidate]]:
    """Return the roles and candidates that a search in ``space`` is compared with.

    They have the largest max_batch_size and the fewest instances. The baseline has no dynamic batching; the other
    one has it without a delay and preferred sizes. A table does not record the original values of the other fields,
    so their first choices are used. Candidates outside ``space`` are left out; there is one entry if the two behave
    the same.
    """
    baseline = Candidate(
        max_batch_size=max(space.max_batch_size),
        instance_count=min(space.instance_count),
        fields=tuple((path, choices[0]) for path, choices in space.fields.items()),
    )
    dynamic_batching = replace(baseline, dynamic_batching=True)
    roles: dict[TrialRole, Candidate] = {"baseline": baseline, "dynamic_batching": dynamic_batching}
    candidates: dict[Candidate, TrialRole] = {}
    for role, candidate in roles.items():
        if space.parameter_values(candidate) is not None:
            candidates.setdefault(space.canonical(candidate), role)
    return [(role, candidate) for candidate, role in candidates.items()]


class RecordedServer:
    """A Target, LoadGenerator and Telemetry that returns the recorded measurements of ``trials``.

    Other candidates and loads raise DeploymentError and MeasurementError. A candidate whose recorded deployment
    failed fails again, with the recorded reason. If a load was recorded more than once, the last measurement counts.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = {trial.candidate: trial for trial in trials}
        self._cells = {
            (trial.candidate, load): measurement for trial in trials for load, measurement in trial.measurements
        }

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        trial = self._trials.get(candidate)
        if trial is None:
            raise DeploymentError(f"not in the table: {candidate}")
        if trial.status == "failed":
            raise DeploymentError(trial.reason, lacks_gpu_memory=trial.lacks_gpu_memory)
        seconds = DEPLOY_SECONDS if trial.deploy_seconds is None else trial.deploy_seconds
        yield Endpoint("recorded", candidate, deploy_seconds=seconds)

    def close(self) -> None:
        """Do nothing: a table holds no resources."""

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        measurement = self._cells.get((endpoint.candidate, load))
        if measurement is None:
            raise MeasurementError(f"not in the table: {load} of {endpoint.candidate}")
        return measurement

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None:
        """Do nothing: recorded measurements need no warm-up."""

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        """Yield no resource usage: the measurements have the recorded one."""
        yield ResourceUsage()


RecordedLoad = tuple[Candidate, LoadPoint | None]
FINGERPRINT = "fingerprint"


@dataclass(frozen=True)
class Recording:
    """A recorded table: its rows, and the search space of its configurations.

    Attributes:
        name: The file, as errors show it.
        rows: The rows, without those that a later row replaces.
        space: The search space of the recorded configurations.
        answers: The row that counts for a canonical candidate at a load. Among candidates that behave the same it is
            the first one recorded. They count as failed to deploy (no load) if all of them failed.
        request_batch_size: Samples of each request.
        fingerprint: Short form of the device and server; empty if unknown.
        cpu_count: Number of the server's CPUs; None if it served on a GPU or the number is unknown.
    """

    name: str
    rows: tuple[RecordedRow, ...]
    space: RecordedSpace
    answers: Mapping[RecordedLoad, RecordedRow]
    request_batch_size: int
    fingerprint: str = ""
    cpu_count: int | None = None

    def best(self, problem: Problem) -> RecordedRow | None:
        """Return the row with the highest throughput that meets the constraints; None if no row does."""
        return problem.best_point(self._measured())

    def closest(self, problem: Problem) -> RecordedRow | None:
        """Return the row that violates the constraints least."""
        return problem.sla.closest_point(self._measured(), problem.objectives)

    def has(self, metric: str) -> bool:
        """Return whether any row has the metric, which need not be a listed one, such as ``latency-p99.9``.

        ``latency-p95`` is a required column, so a table has it even if no row has a value.
        """
        return metric == "latency-p95" or any(METRICS[metric].value(row.measurement) is not None for row in self.rows)

    @cached_property
    def server(self) -> RecordedServer:
        """The target, load generator and telemetry with the recorded measurements."""
        return RecordedServer(self.trials())

    @cached_property
    def deploy_seconds(self) -> Mapping[Candidate, float]:
        """The time of each candidate's deployment, where it was recorded."""
        rows = self.answers.items()
        return {candidate: row.deploy_seconds for (candidate, _), row in rows if row.deploy_seconds is not None}

    def trials(self) -> list[Trial]:
        """Return the recorded measurements as one trial per candidate."""
        trials: dict[Candidate, Trial] = {}
        for (candidate, load), row in self.answers.items():
            trial = trials.get(candidate) or Trial(len(trials), candidate, deploy_seconds=row.deploy_seconds)
            if load is None:
                trials[candidate] = replace(
                    trial, status="failed", reason=row.measurement.reason, lacks_gpu_memory=row.lacks_gpu_memory
                )
            else:
                trials[candidate] = replace(trial, measurements=(*trial.measurements, (load, row.measurement)))
        return list(trials.values())

    def _measured(self) -> list[RecordedRow]:
        return [row for row in self.rows if row.load]


def read_recording(path: Path) -> Recording:
    """Return the table at ``path``, which must be of one device and server.

    Raises BadInputError with the line and the column of an error.
    """
    recordings = read_recordings(path)
    if len(recordings) > 1:
        raise BadInputError(
            f"{recordings[0].name}: has rows of {len(recordings)} devices or servers; keep only those of one"
        )
    return recordings[0]


def read_recordings(path: Path) -> list[Recording]:
    """Return the table at ``path``, split by device and server if it has rows of several. Raises BadInputError."""
    table = read_csv(path, REQUIRED)
    fingerprints = dict.fromkeys(table.texts(FINGERPRINT))
    if len(fingerprints) == 1:
        return [_recording(table, *fingerprints)]
    recordings = []
    for fingerprint in fingerprints:
        rows = table.select(FINGERPRINT, fingerprint)
        recordings.append(_recording(replace(rows, name=f"{table.name} ({fingerprint or 'unknown'})"), fingerprint))
    return recordings


def _recording(table: CsvTable, fingerprint: str) -> Recording:
    recorded = read_recorded_rows(table)
    is_deployed = {row.candidate: row.load is not None for row in recorded.rows}  # according to its last row
    rows = [row for row in recorded.rows if is_deployed[row.candidate] == (row.load is not None)]
    loads: dict[Candidate, set[int]] = {}
    for row in rows:
        loads.setdefault(row.candidate, set()).update({row.load.concurrency} if row.load else ())
    try:
        space = recorded_space(loads, recorded.request_batch_size)
    except ValueError as error:
        raise BadInputError(f"{table.name}: {error}") from None
    canonical = {candidate: space.canonical(candidate) for candidate in loads}
    measured = {canonical[row.candidate] for row in rows if row.load}
    answers: dict[RecordedLoad, RecordedRow] = {}
    for row in rows:
        if row.load or canonical[row.candidate] not in measured:
            answers.setdefault((canonical[row.candidate], row.load), row)
    return Recording(
        name=table.name,
        rows=tuple(rows),
        space=space,
        answers=answers,
        request_batch_size=recorded.request_batch_size,
        fingerprint=fingerprint,
        cpu_count=recorded.cpu_count,
    )
