"""Write run.json and the files that are derived from the trials."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from optimizer.config import model_config
from optimizer.config.model_source import served_models
from optimizer.config.problem import ModelKind
from optimizer.confirmation.plan import ConfirmationPlan, plan_document, read_plan_document
from optimizer.core import interrupts
from optimizer.core.budget import SpentTime
from optimizer.core.candidate import Candidate
from optimizer.core.errors import TuneError
from optimizer.core.notes import Note, OtherRun, lasting_documents, present
from optimizer.core.process import COMMAND_LOG
from optimizer.core.request_sizes import TokenRequests
from optimizer.core.stopwatch import with_earlier_times
from optimizer.core.trial import Trial
from optimizer.deploy import runtime
from optimizer.deploy.perf_analyzer_release import measuring_version
from optimizer.machine.conditions import ConditionValue, machine_conditions
from optimizer.machine.hardware import Fingerprint
from optimizer.options import server_options
from optimizer.options.addresses import redact, redact_header, redact_words
from optimizer.options.command_line import command_line, command_with_larger_budget
from optimizer.options.values import write_load_shares
from optimizer.results import result_document, summary
from optimizer.results.finished_run import FinishedRun, candidate_document
from optimizer.results.recommendation import Outcome
from optimizer.simulator.closed_network import ClosedNetwork
from optimizer.simulator.concurrent_models import ConcurrentServerModel
from optimizer.simulator.continuous_batching_model import ContinuousBatchingModel
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel
from optimizer.simulator.performance_model import model_type
from optimizer.store.run_folder import ENDED, WRITTEN_FORMAT, RunFolder, remove_configs, write_configs
from optimizer.study.environment import Environment
from optimizer.study.load_generators import PerfAnalyzerReason
from optimizer.study.scheduler import SearchEnd
from optimizer.study.task import Task

LENGTH_QUANTILES = 21  # quantiles of the numbers of tokens
_SERVER, _UNKNOWN = "tritonserver", "unknown"  # key and value of ``versions``
VERSIONS = ("tritune", "numpy", "onnxruntime", "optuna", "protobuf", "tritonclient")


def problem_document(task: Task) -> dict[str, Any]:
    """Return the problem of ``task`` for run.json."""
    problem = task.problem
    return {
        "model": problem.model,
        "batcher": task.source.tuned_model,
        "concurrent_models": write_load_shares(task.source.concurrent) or None,
        "concurrent_candidates": {other.name: candidate_document(other.candidate) for other in problem.concurrent},
        "facts": task.source.facts,
        "constraints": list(map(str, problem.sla)),
        "objectives": [metric.name for metric in problem.objectives],
        "request_batch_size": problem.request_batch_size,
        "sequence_length": task.sequence_length and str(task.sequence_length),
        "tokens": None if problem.tokens is None else _tokens_document(problem.tokens),
        "space": {k: list(v) for k, v in problem.space.parameters().items()},
        "candidates": len(problem.space),
        "cpu_count": problem.cpu_count,
        "max_concurrency": problem.max_concurrency,
        "kind": problem.kind.value,
        "server_model": model_type(problem).name,
        "request_times": problem.request_times and asdict(problem.request_times),
        "priorities": problem.priorities and str(problem.priorities),
        "queue": dict(problem.queue),
        "baseline": candidate_document(task.baseline),
        "dynamic_batching": candidate_document(task.dynamic_batching),
        "input_data": task.input_data.name,
    }


def _tokens_document(tokens: TokenRequests) -> dict[str, dict[str, Any]]:
    """Return the numbers of tokens of prompts and outputs for run.json."""
    return {
        name: {
            "smallest": lengths.smallest,
            "mean": round(lengths.mean, 2),
            "largest": lengths.largest,
            "quantiles": lengths.quantiles(LENGTH_QUANTILES),
        }
        for name, lengths in (("prompt", tokens.prompt), ("output", tokens.output))
    }


def current_versions(before: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the versions of this process, and that of the server in ``before``, run.json of the continued run.

    A session that starts no server, such as one after the last test, must not forget that version. The fingerprint
    ensures that a later server has the same one.
    """
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in VERSIONS}}
    earlier = (before or {}).get("versions")
    server = earlier.get(_SERVER) if isinstance(earlier, dict) else None
    return {**versions, _SERVER: server} if isinstance(server, str) and server != _UNKNOWN else versions


def _arguments() -> list[str]:
    """Return the arguments of ``tune``; empty if the process is another program."""
    return sys.argv[1:] if Path(sys.argv[0]).name in ("tune", "__main__.py") else []


@dataclass
class RunRecord:
    """Writes run.json and the files derived from the trials of one run.

    Attributes:
        folder: The folder of the run.
        environment: The options, the machine and the stopwatch of this session.
        task: The model and the problem.
        fingerprint: The device and the server, on which measurements depend.
        notes: Notes for the user; values that programs need are fields.
        search_ended: Why the search ended; None before it has.
        perf_analyzer_reason: Why perf_analyzer confirms; None if tune's own client does.
        at_start: The conditions on this machine when the session began, see ``machine_conditions``.
        versions: Versions of programs and packages; ``recording_server_version`` adds that of the server.
        planned: The document of the confirmation's plan, see ``write_plan``; empty before.
        earlier_times: The value of ``times`` in run.json of the sessions that are continued.
        spent: The time of the budget that these used.
        remaining_tests: The tests on fresh servers that are left; those of the earlier session until this one ends.
    """

    folder: RunFolder
    environment: Environment
    task: Task
    fingerprint: Fingerprint
    notes: tuple[Note, ...]
    search_ended: SearchEnd | None = None
    perf_analyzer_reason: PerfAnalyzerReason | None = None
    at_start: dict[str, ConditionValue] = field(default_factory=machine_conditions)
    versions: dict[str, str] = field(default_factory=current_versions)
    planned: dict[str, Any] = field(default_factory=dict)
    earlier_times: object = None
    spent: SpentTime = field(default_factory=SpentTime)
    remaining_tests: summary.RemainingTests = summary.UNKNOWN_TESTS

    def add_notes(self, notes: Iterable[Note | None]) -> None:
        """Add those of ``notes`` that are not None and that the record lacks."""
        self.notes = present([*self.notes, *notes])

    @contextlib.contextmanager
    def recording_server_version(self, server_version: Callable[[], str]) -> Iterator[None]:
        """Record the version of the server when the context ends, whatever ends it."""
        try:
            yield
        finally:
            with contextlib.suppress(TuneError):
                self.versions[_SERVER] = server_version() or self.versions.get(_SERVER, _UNKNOWN)

    def confirmation_plan(self) -> ConfirmationPlan | None:
        """Return the plan of the confirmation; None before it has begun. Raises BadInputError if it is damaged."""
        try:
            return read_plan_document(self.planned) if self.planned else None
        except ValueError as error:
            raise self.folder.no_record(error) from None

    def write_plan(self, plan: ConfirmationPlan) -> None:
        """Write ``plan`` to run.json, which keeps the status and the result of an earlier session. Note other runs.

        Raises EnvironmentFault if it cannot be written, and BadInputError if another program has changed it.
        """
        self.add_notes(self.environment.other_runs())
        self.planned.update(plan_document(plan))
        self.folder.update_info(
            {
                "written": time.strftime(WRITTEN_FORMAT),
                "confirmation_plan": self.planned,
                "times": self._times(),
            }
        )

    def write_start(self) -> None:
        """Write run.json without a result at the start of a session.

        The status is ``running`` until the session ends, also if it is killed: its search is then to be continued. A
        session that only confirms calls this only if run.json is missing. Raises EnvironmentFault if it cannot be
        written.
        """
        self._write_info("running", "", {})

    def write(self, status: str, outcome: Outcome, reason: str = "") -> dict[str, Any]:
        """Write run.json and the derived files. Return the document of ``--json``.

        ``reason`` is the error of a failed run.
        """
        next_command = ""
        if status in ENDED:
            longer = command_with_larger_budget(self.environment.options)
            next_command = summary.next_command(outcome, self.folder.path, longer, self.remaining_tests)
        wall_seconds = self._times()["wall_seconds"] or 0.0
        document = {
            **result_document.document(outcome, wall_seconds=wall_seconds, results_dir=str(self.folder.path)),
            "status": status,
            "next_command": next_command or None,
            "sla": list(map(str, self.task.problem.sla)),
            "model": {"name": self.task.source.name, **self.task.source.facts},
            "hardware": str(self.environment.hardware),
            "notes": [*self.task.notes, *map(str, self.notes)],
        }
        self._write_derived(outcome)
        self._write_info(status, reason, document)
        return document

    def write_page(self, status: str, outcome: Outcome, trials: list[Trial], document: Mapping[str, Any]) -> None:
        """Write the report page, then run.json again with the time that the page took. An interrupt waits for both.

        ``document`` is what ``write`` returned.
        """
        with interrupts.deferred():
            from optimizer.results.report.writer import write_page  # takes a second

            run = FinishedRun(
                folder=self.folder,
                options=self.environment.options,
                info=self.folder.read_info(),
                problem=self.task.problem,
                baseline=self.task.baseline,
                dynamic_batching=self.task.dynamic_batching,
                trials=tuple(trials),
                outcome=outcome,
            )
            write_page(run)
            self._write_info(status, "", document)

    def _write_info(self, status: str, reason: str, document: Mapping[str, Any]) -> None:
        """Write run.json, with secrets replaced. ``document`` is that of ``--json``, empty without a result."""
        options = replace(
            self.environment.options,
            storage=self.environment.options.storage and redact(self.environment.options.storage),
            headers=tuple(map(redact_header, self.environment.options.headers)),
        )
        self.folder.write_info(
            options,
            {
                "status": status,
                "verdict": document.get("verdict"),
                "reason": reason,
                "command": command_line(options),
                "argv": ["tune", *(redact(word) for word in redact_words(_arguments()))],
                "written": time.strftime(WRITTEN_FORMAT),
                "problem": problem_document(self.task),
                "hardware": {**asdict(self.environment.hardware), "system": platform.platform()},
                "fingerprint": self.fingerprint.to_document(),
                **asdict(self.environment.server_resources(self.task)),
                "search_ended": self.search_ended,
                "confirmed_by_perf_analyzer": self.perf_analyzer_reason and self.perf_analyzer_reason.name.lower(),
                "confirmation_plan": self.planned or None,
                **self.remaining_tests.document(),
                "versions": self._all_versions(),
                "notes": [*self.task.notes, *map(str, self.notes)],
                "lasting_notes": lasting_documents(self.notes),
                "other_runs": [vars(note) for note in self.notes if isinstance(note, OtherRun)],
                "machine": {"at_start": self.at_start, "when_written": machine_conditions()},
                "commands": f"logs/{COMMAND_LOG}",
                "times": self._times(),
                "spent": asdict(self.spent),
                "result": document,
            },
        )

    def _times(self) -> dict[str, float | None]:
        """Return the times of all sessions together."""
        return with_earlier_times(self.environment.stopwatch.report(), self.earlier_times)

    def _all_versions(self) -> dict[str, str]:
        """Return ``versions``, and those of the perf_analyzer and of the build with OpenVINO that were used."""
        version = self.fingerprint.perf_analyzer
        if version and self.environment.options.perf_analyzer_image is None:
            version = measuring_version(version, self.versions.get(_SERVER, ""))
        added = {"perf_analyzer": version} if version else {}
        if self.environment.uses_openvino(self.task):
            added["onnxruntime-openvino"] = runtime.OPENVINO_ONNX_RUNTIME
        return {**self.versions, **added}

    def _write_derived(self, outcome: Outcome) -> None:
        result_document.write_pareto_csv(self.folder.pareto, outcome)
        if outcome.recommended:
            write_configs(self.folder.best, *self._configs(outcome.recommended.candidate))
            write_configs(self.folder.baseline, *self._configs(self.task.baseline))
        else:
            remove_configs(self.folder.best)  # an earlier session may have had a recommendation

    def _configs(self, candidate: Candidate) -> tuple[dict[str, str], tuple[str, ...], dict[str, str]]:
        """Return the text of config.pbtxt by model, the options of the server, and the changed model.json by path."""
        served = served_models(self.task.source, candidate)
        texts = {name: model_config.to_text(config) for name, config in served.configs.items()}
        changed = served.files if candidate.model_json else {}
        files = {f"{served.batcher}/{path}": content.decode() for path, content in changed.items()}
        return texts, server_options.to_arguments(candidate.fields), files


# The descriptions of the keys, except those of the options and of the classes that are written as they are.
KEYS: Final = {
    "schema_version": "Version of this format. Another version of tune may refuse it.",
    "options": "Values of the options, by the names of the fields; passwords and headers are replaced.",
    "started_in": "Folder that relative paths start from, relative to the folder of the run.",
    "signature": "HMAC-SHA256, by a key of the user, of options that name code, addresses or data; may be null.",
    "status": "`running`, also of a run that was killed; `found`, `none` (nothing is recommended), `interrupted`, "
    "`failed`, or `left` (other workers continue the shared study). `tune verify` changes it at its end only.",
    "verdict": "PASS, FAIL or UNDECIDED; null before the end.",
    "reason": "Error of a failed run; empty for another one.",
    "command": "Command that reproduces the run, with all options that are not the default.",
    "argv": "Words of the command as it was given; secrets are replaced.",
    "written": "Time at which the file was written.",
    "problem": "What is searched:",
    "problem.model": "Name of the model.",
    "problem.batcher": "Name of the model whose batches are tuned and counted: that model, or one that it calls.",
    "problem.concurrent_models": "Models that get load at the same time, with their load as a multiple of the "
    "model's, as text such as `encoder=1,ranker=3`; null without any.",
    "problem.concurrent_candidates": "The configurations of these models as given, by model; empty if one of them is "
    "an ensemble.",
    "problem.facts": "Facts about the model, such as its size and the SHA-256 of its files.",
    "problem.constraints": "Bounds, such as `p95 <= 20 ms`.",
    "problem.objectives": "Names of the objectives, the most important one first.",
    "problem.request_batch_size": "Samples of each request (the mean for mixed sizes).",
    "problem.sequence_length": "Requests in each sequence to a stateful model, as text; null for other models.",
    "problem.tokens": "Numbers of tokens (`smallest`, `mean`, `largest`, and `quantiles` at equal distances) of the "
    "generated prompts (`prompt`) and outputs (`output`) of a model that streams; null if there are none.",
    "problem.space": "Choices by parameter; settings have the names of the columns of trials.csv.",
    "problem.candidates": "Number of valid configurations.",
    "problem.cpu_count": "Number of CPUs of the server; null if it serves on a GPU or the number is unknown.",
    "problem.max_concurrency": "The most requests in flight that the search may try.",
    "problem.kind": f"Kind of the model: {', '.join(f'`{kind.value}`' for kind in ModelKind)}.",
    "problem.server_model": "Model of the server that the search `simulated` fits: "
    + ", ".join(
        f"`{model.name}`"
        for model in (DynamicBatchingModel, ConcurrentServerModel, ContinuousBatchingModel, ClosedNetwork)
    )
    + ".",
    "problem.request_times": "When the requests of `--load rate` are sent: `distribution` (or the file), "
    "`period_seconds` of a load shape, `recorded_requests` and `recorded_shares` of a file; null in a closed loop.",
    "problem.priorities": "Shares of the priorities of the requests, as text such as `1*20|2*80`; null without any.",
    "problem.queue": "Settings of the batcher's queue in config.pbtxt, by path; those in the space replace them.",
    "problem.baseline": "The configuration as given.",
    "problem.dynamic_batching": "The same configuration with plain `dynamic_batching {}`.",
    "problem.input_data": "Name of the file of requests.",
    "hardware": "Machine of the server:",
    "hardware.system": "Operating system.",
    "fingerprint": "Device, server and perf_analyzer. Measurements with different ones are not ranked together:",
    "fingerprint.id": "Short hash of the other keys, as in the column `fingerprint` of trials.csv.",
    "search_ended": "`converged`, `budget`, `exhausted` (all were tried) or `interrupted`; null before it ends.",
    "confirmed_by_perf_analyzer": "Why perf_analyzer confirms a closed loop: "
    + ", ".join(f"`{reason.name.lower()}`" for reason in PerfAnalyzerReason)
    + "; null if tune's own client does.",
    "confirmation_complete": "Whether no further server can change a verdict, only `tune verify --fresh` can.",
    "next_verdict_seconds": "Estimated time until the next verdict on fresh servers; null if it is unknown, or if no "
    "further server can change a verdict.",
    "confirmation_plan": "Decisions that are fixed before the first window of the confirmation; null before it:",
    "versions": "Versions of Python, tritune, its main dependencies, tritonserver, perf_analyzer (or the ID of its "
    "image) if it measured or checked, and onnxruntime-openvino if a configuration names it.",
    "notes": "Notes for people; the facts in them are also keys of their own.",
    "lasting_notes": "Those notes that remain when another session continues the run: class (`note`) and fields.",
    "other_runs": "Other runs that measured on this machine at the same time: process (`pid`) and `folder`.",
    "machine": "Load averages, CPUs, quota, frequencies and thermal throttling, `at_start` and `when_written`.",
    "commands": "File with the commands of all processes that the run started.",
    "times": "Seconds by kind of work, of all sessions of the run together:",
    "times.wall_seconds": "Wall time of the run, of all its sessions together.",
    "times.server_seconds": "Starting servers, loading models, status requests.",
    "times.load_generator_seconds": "Measuring.",
    "times.set_up_seconds": "Downloading the server and building the model, once per machine.",
    "times.search_seconds": "Choosing the next configuration, and predicting the loads of the confirmation.",
    "times.cluster_seconds": "Waiting for workers; only on a cluster.",
    "times.confirm_seconds": "The confirmation, with its server and load generator times.",
    "times.own_seconds": "The remaining wall time, which is tune's own.",
    "times.own_probes_seconds": "The part of it for probes of the machine's speed.",
    "times.own_rows_seconds": "The part of it for writing rows of trials.csv.",
    "times.own_display_seconds": "The part of it for showing measurements.",
    "times.own_cpu_seconds": "CPU time of the process.",
    "times.peak_memory_bytes": "Largest resident memory of the process.",
    "spent": "Time of the budget that was used when the latest session began, which `--resume` reads:",
    "result": "Document of `--json`; empty without a result:",
    "result.status": "`status` of the run.",
    "result.next_command": "Command that continues the test of an UNDECIDED run, makes a separate one, or repeats "
    "the run; null for another verdict, and if only a quiet machine helps.",
    "result.sla": "Bounds, such as `p95 <= 20 ms`.",
    "result.model": "Name of the model, and facts about it.",
    "result.hardware": "Hardware in words.",
    "result.notes": "Notes for people.",
    **{f"result.{key}": text for key, text in result_document.KEYS.items()},
}
