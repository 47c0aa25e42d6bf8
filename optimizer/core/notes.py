"""Notes for people on a run, a sweep or a verification: a closed list of facts, each with its sentence.

A note is an object of one of the classes below. ``str(note)`` is its sentence, which only people read. Later steps
read fields of ``run.json`` and of measurements.

The classes are grouped by their subject: the server with its CPUs and GPUs, the measurements, sweeps, the search, the
confirmation, and clusters. At the end, ``DETAILS`` has the notes that the terminal shows with --verbose only, and
``LASTING`` those that a continued run keeps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, dataclass_transform

from objectives.metrics import four_digits


@dataclass_transform(frozen_default=True)
class Note(ABC):
    """A fact that readers of a result should know. Each class below it is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    @abstractmethod
    def __str__(self) -> str:
        """Return the sentence."""


def present(notes: Iterable[Note | None]) -> tuple[Note, ...]:
    """Return the notes that are not None, each once."""
    return tuple(dict.fromkeys(note for note in notes if note is not None))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cpus(cpus: str) -> str:
    """Return a list of CPUs with its noun: ``CPU 3`` or ``CPUs 0-2``."""
    return f"CPU{'' if cpus.isdigit() else 's'} {cpus}"


# -- the server, its CPUs and its GPUs ---------------------------------------------------------------------------


class SeparateCpus(Note):
    """The server and the load generator run on different CPUs, each a list such as ``0-3``."""

    server: str
    client: str

    def __str__(self) -> str:
        return f"the server runs on {_cpus(self.server)}, the load generator on {_cpus(self.client)}"


class SharedCpus(Note):
    """The server and the load generator share the CPUs of a list that the user gave."""

    cpus: str

    def __str__(self) -> str:
        return f"server and load generator share {_cpus(self.cpus)}"


class SharedQuota(Note):
    """The server and the load generator share a quota of CPUs."""

    quota: float

    def __str__(self) -> str:
        return f"a quota of {self.quota:g} CPUs: server and load generator share it"


class SharedMachine(Note):
    """The server and the load generator share all CPUs, because there are too few to divide."""

    cpu_count: int
    core_count: int

    def __str__(self) -> str:
        cores = "" if self.core_count == self.cpu_count else f" on {_count(self.core_count, 'core')}"
        them = "them" if self.cpu_count > 1 else "it"
        return f"{_count(self.cpu_count, 'CPU')}{cores}: server and load generator share {them}"


class ShareOfNode(Note):
    """Each trial used ``share`` of a node.

    ``client_cpus`` is the number of CPUs of the load generator; 0 if it shares those of the server.
    """

    share: str
    client_cpus: int

    def __str__(self) -> str:
        client_text = f", {self.client_cpus} of them for the load generator" if self.client_cpus else ""
        return f"each trial used {self.share} of a node of the cluster{client_text}"


class OwnBackend(Note):
    """The model was served by a Python backend of tritune."""

    backend: str

    def __str__(self) -> str:
        backend = f"tritune's own Python-based {self.backend} backend"
        return f"served by {backend}: a production build's native one is faster"


class WithoutBatches(Note):
    """The ONNX model is served without batches; ``obstacle`` says why its graph has no batch dimension.

    It is empty if the graph may have one, and only max_batch_size is 0.
    """

    obstacle: str

    def __str__(self) -> str:
        if not self.obstacle:
            advice = "write max_batch_size: 64 and leave that dimension out of all dims to tune batches"
            return (
                "served without batches, because max_batch_size is 0 in config.pbtxt; if the open first dimension of "
                f"the model's inputs and outputs is that of the batch, {advice}"
            )
        advice = "to tune batches, export the model with an open first dimension of every input and output"
        return f"served without batches, because {self.obstacle}; {advice}"


class SettingsUnread(Note):
    """The recommended configuration has ``settings`` that only tune's own backend reads."""

    settings: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"the recommended configuration has {', '.join(self.settings)}: Triton's own onnxruntime backend does "
            "not read that, so its performance differs (--target local, docker or remote measures it)"
        )


class RemoteServerUsed(Note):
    """The measured server was not started by tune."""

    address: str

    def __str__(self) -> str:
        return f"measured on the server at {self.address}: it was not restarted, only the model was loaded again"


class SharedMemoryUsed(Note):
    """Inputs and outputs were passed in ``kind`` shared memory, not in the messages."""

    kind: str

    def __str__(self) -> str:
        return (
            f"inputs and outputs were passed in {self.kind} shared memory: clients on other machines, or that send "
            "tensors in messages, may be served slower"
        )


class ServerProcessesVaried(Note):
    """The search includes configurations of several server processes, which share the load and divide the CPUs."""

    def __str__(self) -> str:
        return (
            "several server processes divide the CPUs, and each request goes to the one with the fewest unanswered "
            "requests: to serve a configuration of several, spread the load in the same way"
        )


class ServedOnCpu(Note):
    """The model is served on the CPU although there is a GPU."""

    cause: Literal[
        "kind_cpu",
        "no_kind_gpu",
        "onnxruntime_without_cuda",
        "torch_without_cuda",
        "server_sees_no_gpu",
    ]

    def __str__(self) -> str:
        reasons = {
            "kind_cpu": "config.pbtxt asks for the CPU (KIND_CPU): served on the CPU",
            "no_kind_gpu": "config.pbtxt does not ask for it (kind: KIND_GPU): served on the CPU",
            "onnxruntime_without_cuda": "the installed onnxruntime has no CUDA provider: served on the CPU (to "
            "change that, install onnxruntime-gpu instead)",
            "torch_without_cuda": "the installed torch has no CUDA: served on the CPU (to change that, install its "
            "CUDA build)",
            "server_sees_no_gpu": "the server has put the instances, whose kind config.pbtxt leaves open, on the "
            "CPU, and GPU metrics are left out (its log has the error of CUDA; kind: KIND_GPU refuses the CPU)",
        }
        return f"there is a GPU, but {reasons[self.cause]}"


class MigInstanceUsed(Note):
    """NVML cannot read the utilization, power and clocks of one instance of a GPU."""

    def __str__(self) -> str:
        return "under MIG, utilization, power and clocks of one instance cannot be read"


class GpusNotRead(Note):
    """NVML cannot read the GPUs; ``fault`` is its error with advice."""

    fault: str

    def __str__(self) -> str:
        return self.fault


class BatcherTuned(Note):
    """The settings of candidates belong to the model ``name``, which has the batcher."""

    name: str

    def __str__(self) -> str:
        return f"settings without a model's name are those of {self.name}"


class SeveralModelsLoaded(Note):
    """Several models get load at the same time: ``shares`` times that of the model ``name``, by model."""

    name: str
    shares: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:g}" for name, share in ((self.name, 1), *self.shares))
        return (
            f"several models get load, in the proportion {shares}; the throughput is their sum, the latency that of "
            "the slowest"
        )


# -- the measurements -------------------------------------------------------------------------------------------


class ConfirmedByPerfAnalyzer(Note):
    """perf_analyzer, not tune's own load client, measures the confirmation; ``reason`` is a clause that says why."""

    reason: str

    def __str__(self) -> str:
        return f"perf_analyzer measures the confirmation instead of tune's own client, because {self.reason}"


class PerfAnalyzerSampleLimit(Note):
    """perf_analyzer sends only ``sent`` of the recorded samples, in requests of ``batch_size``."""

    sent: int
    recorded: int
    batch_size: float

    def __str__(self) -> str:
        return (
            f"{self.sent:,} of the {self.recorded:,} samples are sent: perf_analyzer takes long to prepare requests "
            f"of {self.batch_size:,} from more (up to 65,536 are sent at a request rate)"
        )


class OpenLoopSampleLimit(Note):
    """An open loop sends only ``sent`` of the recorded samples, chosen evenly."""

    sent: int
    recorded: int

    def __str__(self) -> str:
        return (
            f"{self.sent:,} of the {self.recorded:,} samples are sent, chosen evenly: tune's client keeps them in "
            "memory, at most 65,536 samples and 32 MiB of the file"
        )


class OutputsNotCompared(Note):
    """The outputs were not compared with the baseline's. An empty ``reason``: the user turned the check off."""

    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else " (--no-output-check)"
        return f"outputs were not compared with the baseline's{reason}"


class NanOutputs(Note):
    """A share (0 to 1) of the values of an output of the baseline is NaN."""

    output: str
    share: float

    def __str__(self) -> str:
        return (
            f"{100 * self.share:.3g} % of the baseline's values of the output {self.output} are NaN: check the "
            "model, and whether it can answer these requests (--input-data sends others)"
        )


class ModelNotes(Note):
    """Notes on several models: pairs of a model's name and its note."""

    notes: tuple[tuple[str, Note], ...]

    def __str__(self) -> str:
        return "; ".join(f"{model}: {note}" for model, note in self.notes)


class LateRequests(Note):
    """A share of the requests was sent late; ``worst_p99_ms`` is the highest p99 lateness of a measurement."""

    share: float
    late_ms: float
    worst_p99_ms: float

    def __str__(self) -> str:
        worst = f"{four_digits(self.worst_p99_ms)} ms"
        return (
            f"the load generator sent {100 * self.share:.3g} % of the requests more than {self.late_ms:g} ms late, "
            f"in one measurement 1 % of them by more than {worst}; latency counts from the planned time, so it "
            "includes the lateness"
        )


class ClocksLowered(Note):
    """The GPU lowered its clocks in some of the measurements."""

    lowered: int
    measured: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        reasons = ", ".join(self.reasons)
        share = f"{self.lowered} of {self.measured} measurements"
        return f"the GPU lowered its clocks, and so its throughput, in {share}: {reasons}"


class OtherRun(Note):
    """Another process, ``pid``, measured for the run in ``folder`` on this machine at the same time."""

    pid: int
    folder: str

    def __str__(self) -> str:
        return (
            f"another tune run measures on this machine (process {self.pid}, {self.folder}) and changes the results: "
            "repeat this one without it"
        )


class SpeedVaried(Note):
    """The slowest probe of the machine took ``factor`` times as long as the fastest."""

    factor: float

    def __str__(self) -> str:
        return f"the machine's speed varied by a factor {self.factor:.1f} during the run"


class DisturbedWindowsCounted(Note):
    """Other programs disturbed this share (0 to 1) of the windows of the confirmation, and all windows count."""

    disturbed_share: float

    def __str__(self) -> str:
        return (
            f"other programs disturbed {100 * self.disturbed_share:.0f} % of the windows on fresh servers, and all "
            "of them count: a quiet machine may serve more"
        )


class DisturbedWindowsLeftOut(Note):
    """Windows of the confirmation do not count, and with them the recommendation would miss bounds.

    ``disturbed_share`` is their share, 0 to 1, and ``missed`` the values with them, such as ``p95 31.2 ms``.
    """

    disturbed_share: float
    missed: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"other programs disturbed {100 * self.disturbed_share:.0f} % of the windows on fresh servers, which do "
            f"not count: next to such programs the SLA may be missed ({', '.join(self.missed)} with these windows)"
        )


class UsualStatesJudged(Note):
    """Latencies are judged as higher than measured; ``latency_rise`` is the difference of their logs."""

    latency_rise: float

    def __str__(self) -> str:
        return (
            "other programs were usually more active during this run than during this test, so latencies are judged "
            f"as {100 * math.expm1(self.latency_rise):.3g} % higher than measured"
        )


class ServerCrashes(Note):
    """Servers with the recommended configuration crashed, but not in its test; ``error`` is that of the last one."""

    crashes: int
    error: str

    def __str__(self) -> str:
        times = "once" if self.crashes == 1 else f"{self.crashes:,} times"
        return (
            f"with the recommended configuration the server crashed {times} ({self.error}), though not in the "
            "test of the recommended load: find the cause in logs/ before you deploy it"
        )


# -- sweeps -----------------------------------------------------------------------------------------------------


class UnstableCells(Note):
    """Cells of a sweep whose windows disagreed."""

    unstable: int
    measured: int

    def __str__(self) -> str:
        return f"{self.unstable} of {self.measured} measurements are unstable (marked *): their windows disagreed"


class DisturbedCells(Note):
    """Cells of a sweep during which others took a share of the CPUs; ``worst_share`` is the largest."""

    disturbed: int
    measured: int
    worst_share: float

    def __str__(self) -> str:
        return (
            f"{self.disturbed} of {self.measured} measurements were disturbed: other processes or machines took up "
            f"to {100 * self.worst_share:.0f} % of the CPUs"
        )


class CombinationsLeftOut(Note):
    """A sweep does not measure combinations that only repeat others.

    ``unused`` are the settings without effect, such as ``timeout_action with default_timeout_microseconds 0``.
    """

    combinations: int
    unused: tuple[str, ...]

    def __str__(self) -> str:
        left_out = f"left out {_count(self.combinations, 'combination')} that would repeat others"
        return f"{left_out}, because these have no effect: {', '.join(self.unused)}"


# -- the search -------------------------------------------------------------------------------------------------


class SearchConverged(Note):
    """The search ended because another trial promised less than ``smallest_gain`` of the throughput."""

    smallest_gain: float

    def __str__(self) -> str:
        gain = f"{100 * self.smallest_gain:.0f} %"
        return f"search converged: expected gain of another trial below about {gain} of the throughput"


class SearchedWithoutSimulator(Note):
    """No simulator describes the model, so a closed queueing network guided the search."""

    def __str__(self) -> str:
        return (
            "no simulator describes this model: a closed queueing network, fitted to the measurements, guides the "
            "search, which may need more trials"
        )


class ContinuousBatchingSimulated(Note):
    """A simulator of continuous batching guided the search, in place of that of the dynamic batcher."""

    def __str__(self) -> str:
        return "a simulator of continuous batching, fitted to the measurements, guides the search"


class RefusalsSimulated(Note):
    """The search simulated which requests a limited queue refuses.

    ``agreed`` of ``compared`` measurements were on the same side of the bound as the simulation.
    """

    compared: int
    agreed: int
    is_trusted: bool

    def __str__(self) -> str:
        right = f"right about {self.agreed} of {_count(self.compared, 'measurement')}"
        if self.is_trusted:
            return f"the search simulated how many requests a limited queue refuses, and was {right}"
        return (
            f"simulated refusals of a limited queue were {right} only: the search predicted failed requests from "
            "the measurements alone"
        )


class WarmStarted(Note):
    """The search began with configurations of another study; ``machine`` is empty if it is unknown."""

    configurations: int
    study: str
    machine: str

    def __str__(self) -> str:
        on = f" on {self.machine}" if self.machine else ""
        return f"warm start: {_count(self.configurations, 'configuration')} of {self.study}{on}"


class OtherModelTransferred(Note):
    """The transferred study tuned another model."""

    study: str
    model: str

    def __str__(self) -> str:
        return f"{self.study} tuned the model {self.model}: the search learns how far its trials apply here"


class TransferLeftOut(Note):
    """Parts of a transferred study do not fit: configurations of another space or other request batch sizes."""

    count: int
    kind: Literal["configuration", "measurement"]
    study: str

    def __str__(self) -> str:
        reason = "not in this space" if self.kind == "configuration" else "other request batch sizes"
        was = "was" if self.count == 1 else "were"
        return f"{_count(self.count, self.kind)} of {self.study} {was} left out: {reason}"


class WarmStartMissing(Note):
    """A resumed run continued without the study that it began with."""

    error: str

    def __str__(self) -> str:
        return f"continued without the warm start: {self.error}"


# -- the confirmation -------------------------------------------------------------------------------------------


class HighestConcurrency(Note):
    """The recommended load is the highest one that the profile allows, and clearly inside the latency bound."""

    concurrency: int

    def __str__(self) -> str:
        return (
            f"{_count(self.concurrency, 'request')} in flight is the highest load tried, and well inside the bound: "
            "a higher load.max_concurrency in the profile may serve more"
        )


class LessThanInSearch(Note):
    """Fresh servers passed only at loads with clearly less throughput than the search measured."""

    searched_infer_per_sec: float
    passed_infer_per_sec: float

    def __str__(self) -> str:
        searched, passed = four_digits(self.searched_infer_per_sec), four_digits(self.passed_infer_per_sec)
        return (
            f"the search measured {searched} infer/s within the bound, but on fresh servers no load with more than "
            f"{passed} infer/s passed"
        )


class UntestedServedMore(Note):
    """The search measured clearly more throughput within the bound with a configuration that was not tested."""

    trial: int
    searched_infer_per_sec: float

    def __str__(self) -> str:
        return (
            f"in the search, trial {self.trial} served {four_digits(self.searched_infer_per_sec)} infer/s within the "
            "bound, but it was not tested on fresh servers; run again with a larger --budget"
        )


class ConfirmationComplete(Note):
    """No further server can change a verdict of the confirmation."""

    def __str__(self) -> str:
        return "the tests on fresh servers are complete: more servers cannot change the verdict"


MIN_NOTED_SECONDS = 2.0  # no fresh server can be measured in a shorter rest of the time


class NextVerdictNeeds(Note):
    """The next verdict of the confirmation needs ``servers`` more, which take about ``seconds``.

    ``seconds_left`` is the time that the session had left; negative if its last measurement exceeded it.
    """

    servers: int
    seconds: float
    seconds_left: float

    def __str__(self) -> str:
        servers = _count(self.servers, "more fresh server")
        needs = f"the next verdict needs {servers}, about {self.seconds:.0f} s"
        if self.seconds_left < min(self.seconds, MIN_NOTED_SECONDS):
            return f"the time ended before the tests were complete: {needs}"
        left = f", and {self.seconds_left:.0f} s were left" if self.seconds_left < self.seconds else ""
        return f"the tests are not complete: {needs}{left}"


class ConfirmationLeftOut(Note):
    """The run was to end with its search."""

    def __str__(self) -> str:
        return "nothing was tested on fresh servers, because of --no-confirmation"


# -- clusters ---------------------------------------------------------------------------------------------------


class NodeLeftOut(Note):
    """A node of the cluster was not used."""

    host: str
    reason: str

    def __str__(self) -> str:
        return f"{self.host} is left out: {self.reason}"


class FewerCpusThanRayCounts(Note):
    """Ray counts more CPUs than the node has."""

    host: str
    counted: int
    available: int

    def __str__(self) -> str:
        return (
            f"{self.host}: Ray counts {self.counted} CPUs, but the node has {self.available}: trials there share them"
        )


class CpusUsedByOthers(Note):
    """Trials outside this Ray cluster use the CPUs of the node too."""

    host: str

    def __str__(self) -> str:
        return f"{self.host}: trials outside this Ray cluster use its CPUs too: all trials there share them"


class ConfirmationIncomplete(Note):
    """The confirmation lost its worker too often."""

    crashes: int

    def __str__(self) -> str:
        return f"the confirmation lost its worker {self.crashes} times; `tune verify RUN` continues it"


# -- groups of notes ----------------------------------------------------------------------------------------------

# these explain a run, but change nothing that a reader would do: the terminal shows them with --verbose
DETAILS = (
    SeparateCpus,
    SharedCpus,
    SharedMachine,
    ShareOfNode,
    MigInstanceUsed,
    ConfirmedByPerfAnalyzer,
    SearchConverged,
    WarmStarted,
)

# these say how a session measured or searched, which only it knows: the run keeps them when another one continues it
LASTING = (
    ServedOnCpu,
    WarmStarted,
    OtherModelTransferred,
    TransferLeftOut,
    FewerCpusThanRayCounts,
    CpusUsedByOthers,
    OtherRun,
)


def lasting_documents(notes: Iterable[Note]) -> list[dict[str, object]]:
    """Return those of ``notes`` that last for run.json: the name of the class as ``note``, and its fields."""
    return [{"note": type(note).__name__, **vars(note)} for note in notes if isinstance(note, LASTING)]


def read_lasting(documents: object) -> tuple[Note, ...]:
    """Return the notes that ``lasting_documents`` wrote. Anything else in ``documents`` is left out."""
    classes = {note_class.__name__: note_class for note_class in LASTING}
    notes = list[Note]()
    for document in documents if isinstance(documents, list) else ():
        try:
            fields = dict(document)
            note = classes[fields.pop("note")](**fields)
            str(note), hash(note)
        except (TypeError, ValueError, KeyError):
            continue
        notes.append(note)
    return tuple(notes)
