"""The environment of a run: hardware, model, target, load generator, output check and telemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from optimizer.config import gpu_placement
from optimizer.config.backends import backend_of, is_ensemble
from optimizer.config.model_source import ModelSource
from optimizer.config.ort_settings import uses_openvino
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SERVER_CPUS, FieldChoices
from optimizer.core.errors import EnvironmentFault, TuneError
from optimizer.core.interfaces import OutputCheck, ProgressObserver, ServerTarget, Telemetry, TrialStore
from optimizer.core.measuring_runs import mark_measuring, other_runs
from optimizer.core.notes import (
    BatcherTuned,
    ContinuousBatchingSimulated,
    GpusNotRead,
    MigInstanceUsed,
    Note,
    OtherRun,
    OutputsNotCompared,
    OwnBackend,
    RemoteServerUsed,
    SearchedWithoutSimulator,
    ServerProcessesVaried,
    SeveralModelsLoaded,
    SharedMemoryUsed,
    WithoutBatches,
    present,
)
from optimizer.core.stopwatch import Stopwatch
from optimizer.deploy import runtime, target_factory
from optimizer.deploy.managed_target import exports_metrics
from optimizer.deploy.remote_address import metrics_address, other_machine_address
from optimizer.deploy.target_settings import ServerPorts, TargetSettings, model_load_timeout_within
from optimizer.deploy.visible_gpus import VisibleGpus, visible_gpus
from optimizer.machine import cpus
from optimizer.machine import hardware as machine
from optimizer.machine.cpus import CpuPlacement
from optimizer.machine.engine_telemetry import EngineTelemetry
from optimizer.machine.gpu_telemetry import GpuTelemetry
from optimizer.machine.hardware import Fingerprint, Hardware, backend_identities
from optimizer.machine.nvml import VISIBLE_DEVICES
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.machine.speed_probe import SpeedProbe
from optimizer.measure.measurer import Measurer
from optimizer.measure.output_check import (
    BaselineOutputCheck,
    CombinedOutputCheck,
    NoOutputCheck,
    SequenceOutputCheck,
    infer_streamed,
)
from optimizer.measure.score import read_scorer
from optimizer.model.instances import DeviceAssignment, has_gpu_choice
from optimizer.model.requests import Requests
from optimizer.options.addresses import server_address
from optimizer.options.run_options import PROGRAM_TARGETS, RunOptions
from optimizer.options.values import format_cpus, parse_cpus, usable_cpus
from optimizer.simulator.continuous_batching_model import ContinuousBatchingModel
from optimizer.simulator.performance_model import model_type
from optimizer.store.run_folder import RunFolder
from optimizer.study.load_generators import LoadGenerators, make_load_generators, perf_analyzer_identity
from optimizer.study.task import Task, prepare_task

NO_POWER = (
    "--objective energy: power is read from NVIDIA GPUs, but this model is served on the CPU; "
    "choose throughput, latency-p95 or memory"
)
TargetMaker = Callable[[ModelSource, SearchSpace, RunOptions, TargetSettings], ServerTarget]


@dataclass(frozen=True)
class ServerResources:
    """CPUs and GPUs that the measured server had, as run.json keeps them.

    Attributes:
        server_cpus: Number of CPUs of the server, fractional under a quota; None if its machine is not known.
        server_cpu_list: CPUs of the server, such as ``0-3``; empty if they differ between the nodes of a cluster.
        client_cpu_list: CPUs of the load generator, in the same form.
        client_shares_cpus: Whether the load generator shares CPUs with the server; None if that is not known.
        cpu_quota: Number of CPUs that a control group allows the server; None is no limit.
        server_uses_gpus: Whether the server had the GPUs of the machine; None if that is not known.
    """

    server_cpus: float | None = None
    server_cpu_list: str = ""
    client_cpu_list: str = ""
    client_shares_cpus: bool | None = None
    cpu_quota: float | None = None
    server_uses_gpus: bool | None = None


@dataclass(frozen=True)
class Environment:
    """The machine, server and load generator of one run.

    ``hardware`` is this machine with the GPUs that serve; its CPU is described as unknown if a remote machine serves.
    ``on_progress`` gets one line for each slow preparation. On a cluster, ``node_placement`` and ``cpu_quota``
    describe a node. Without ``node_placement``, the CPUs follow from ``topology``; None stands for the CPUs that this
    process may use.
    """

    options: RunOptions
    hardware: Hardware
    gpus: VisibleGpus
    stopwatch: Stopwatch
    on_progress: Callable[[str], None]
    node_placement: CpuPlacement | None = None
    cpu_quota: float | None = None
    topology: cpus.CpuTopology | None = None

    @classmethod
    def detect(
        cls, options: RunOptions, on_progress: Callable[[str], None], stopwatch: Stopwatch | None = None
    ) -> Environment:
        """Return the environment on this machine. Without a ``stopwatch``, one begins now.

        Raises EnvironmentFault if this machine lacks a requirement of ``options``, BadInputError if an option is
        wrong for it.
        """
        stopwatch = Stopwatch() if stopwatch is None else stopwatch
        if reason := runtime.unsupported():
            raise EnvironmentFault(reason)
        needed = machine.SERVER_THREADS if options.target in PROGRAM_TARGETS else machine.CLIENT_THREADS
        if problem := machine.thread_problem(needed):
            raise EnvironmentFault(f"{problem}; {machine.MORE_THREADS}")
        target_factory.check_target(options, on_progress)
        gpus = visible_gpus(options)
        hardware = machine.detect()
        server = other_machine_address(options)
        cpu = f"CPU of {server} unknown; load from {hardware.cpu}" if server else hardware.cpu
        hardware = replace(hardware, gpus=gpus.names, cpu=cpu)
        fault = gpus.fault
        if "energy" in options.objectives and not hardware.gpus:
            raise EnvironmentFault(f"--objective energy: no power can be read: {fault}" if fault else NO_POWER)
        if gpus.unusable:
            raise EnvironmentFault(f"{fault}; to continue without GPUs: {VISIBLE_DEVICES}= tune …")
        if fault:
            on_progress(f"GPUs are not measured: {fault}")
        # a container runs outside this control group
        quota = None if options.target == "docker" else cpus.cpu_quota()
        return cls(options, hardware, gpus, stopwatch, on_progress, cpu_quota=quota)

    def server_hardware(self) -> Hardware:
        """Return the hardware with the number of CPUs that the server gets; a quota is rounded down, to 1 or more."""
        count = len(self.placement().server)
        if self.cpu_quota is not None:
            count = max(1, min(count, int(self.cpu_quota)))
        return replace(self.hardware, cpu_count=count)

    def make_task(self, *, fetch_server: bool = True, swept: FieldChoices | None = None) -> Task:
        """Return the model, found or built, and the problem to solve. Raises BadInputError and EnvironmentFault.

        With ``fetch_server`` the embedded server and perf_analyzer are downloaded if they are not installed, and
        OpenVINO if a configuration names it. ``swept`` are the fields of a sweep, see ``task.prepare_task``.
        """
        with self.stopwatch.count("set_up"):
            task = prepare_task(self.options, self.server_hardware(), self.on_progress, swept)
            if "energy" in self.options.objectives and not task.on_gpu:
                raise EnvironmentFault(NO_POWER)
            if fetch_server:
                runtime.ensure(self.on_progress)
                self._ensure_openvino(task)
        shares_cpus = bool(self.server_resources(task).client_shares_cpus)  # follows from the task's search space
        return replace(task, problem=replace(task.problem, client_shares_cpus=shares_cpus))

    def fingerprint(self, task: Task) -> Fingerprint:
        """Return the fingerprint of this environment, on which measurements depend.

        Raises EnvironmentFault if the server does not answer.
        """
        backends = [backend_of(config) for config in task.source.models.values() if not is_ensemble(config)]
        if self.uses_openvino(task):
            backends.append(f"onnxruntime-openvino {runtime.OPENVINO_ONNX_RUNTIME}")
        server = target_factory.server_identity(self.options, self.on_progress)
        at = other_machine_address(self.options)
        return Fingerprint(
            cpu="" if at else self.hardware.cpu,
            cpu_count=0 if at else self.hardware.cpu_count,
            gpus=self.hardware.gpus,
            target=self.options.target,
            server=server,
            backends=backend_identities(backends, self.options.target),
            at=at,
            perf_analyzer=perf_analyzer_identity(self.options, task, self.on_progress),
        )

    @contextmanager
    def open_target(
        self,
        task: Task,
        folder: RunFolder,
        ports: tuple[ServerPorts, ...] = (),
        arguments: tuple[str, ...] = (),
        *,
        make_target: TargetMaker = target_factory.make_target,
    ) -> Iterator[ServerTarget]:
        """Yield the target that ``make_target`` returns for ``task``, and close it at the end.

        Its log is in ``folder``. ``ports`` and ``arguments`` are those of its servers if clients of the user connect
        to them. The budget of the run limits the loading of a model. An error of closing is a note of the error that
        ended the context, if there is one. ``on_progress`` gets a warning for each other run that measures.
        """
        settings = TargetSettings(
            log=folder.server_log,
            cpus=self.placement(task).server,
            sees_gpus=self.server_sees_gpus(task),
            metrics=self._metrics_address(task),
            stopwatch=self.stopwatch,
            on_progress=self.on_progress,
            ports=ports,
            arguments=arguments,
            model_load_timeout_seconds=model_load_timeout_within(self.options.budget_seconds),
        )
        self._ensure_openvino(task)  # a sweep may name it after ``make_task``, and a node of a cluster may lack it
        target = make_target(task.source, task.problem.space, self.options, settings)
        with ExitStack() as opened:
            opened.callback(target.close)
            if not ports:  # clients of the user measure nothing
                opened.enter_context(mark_measuring(folder.path, self._shared_study))
                for run in self.other_runs():
                    self.on_progress(f"WARNING: {run}")
            try:
                yield target
            except TuneError as error:
                try:
                    opened.close()
                except TuneError as second:
                    error.add_note(str(second))
                raise

    def make_measurer(self, task: Task, folder: RunFolder, table: TrialStore, observer: ProgressObserver) -> Measurer:
        """Return the measurer of ``task``. It writes to ``table`` and reports to ``observer``."""
        generators = self.make_generators(task, folder)
        return Measurer(
            generators.search,
            self._make_telemetry(task),
            table,
            observer,
            self.make_output_check(task, folder),
            read_scorer(task.score) if task.score else None,
            self.stopwatch,
            confirmation=generators.confirmation,
            cross_checking=generators.cross_checking,
            speed_probe=None if self._is_remote else SpeedProbe().seconds,
        )

    def make_output_check(self, task: Task, folder: RunFolder) -> OutputCheck:
        """Return the check that compares outputs with the reference outputs in ``folder``, written if missing."""
        if not self.options.output_check:
            return NoOutputCheck(OutputsNotCompared())
        kind: Callable[..., BaselineOutputCheck] = BaselineOutputCheck
        if task.sequence_length is not None:
            kind = partial(SequenceOutputCheck, sequence_length=task.sequence_length.largest)
        elif task.source.is_streaming:
            kind = partial(BaselineOutputCheck, infer=infer_streamed)

        def make_check(file: Path, requests: Task | Requests, other_model: str = "") -> BaselineOutputCheck:
            return kind(
                file,
                input_data=requests.input_data,
                shapes=requests.shapes,
                request_batch_size=task.problem.space.request_batch_size,
                unbounded=requests.unbounded,
                other_model=other_model,
                tolerance=task.tolerance,
            )

        check = make_check(folder.reference, task)
        if not task.concurrent:
            return check
        other_checks = {
            name: make_check(folder.reference_of(name), requests, name) for name, requests in task.concurrent.items()
        }
        return CombinedOutputCheck({task.source.name: check, **other_checks})

    def _make_telemetry(self, task: Task) -> Telemetry:
        """Return the telemetry of processes, GPUs and an engine, as far as the target and the model have them."""
        placement = self.placement(task)
        gpus = self.gpus.local if self._needs_gpus(task) or self._is_remote else ()
        processes = ProcessTelemetry(
            placement.server | placement.client, load_in_container=self.options.perf_analyzer_image is not None
        )
        telemetry: Telemetry = GpuTelemetry(processes, gpus)
        return EngineTelemetry(telemetry) if exports_metrics(task.source) else telemetry

    def make_generators(self, task: Task, folder: RunFolder, options: RunOptions | None = None) -> LoadGenerators:
        """Return the load generators of ``task``; ``options`` replace those of this environment."""
        placement = self.placement(task)
        cpus = placement.server | placement.client if self._is_remote else placement.client
        return make_load_generators(options or self.options, task, folder, cpus, self.stopwatch, self.on_progress)

    def placement(self, task: Task | None = None) -> CpuPlacement:
        """Return the CPUs of server and load generator.

        If the candidates of ``task`` choose the server's CPUs, the load generator gets none of these.
        """
        if self.node_placement is not None:
            return self.node_placement
        choices = task.problem.space.fields.get(SERVER_CPUS, ()) if task else ()
        lists = [self.options.server_cpus] if self.options.server_cpus else [str(choice) for choice in choices]
        server = frozenset[int]().union(*map(parse_cpus, lists)) or None
        client = parse_cpus(self.options.client_cpus) if self.options.client_cpus else None
        topology = self.topology or cpus.read_topology(usable_cpus())
        return cpus.place_server_and_client(topology, self.cpu_quota, server=server, client=client)

    def server_resources(self, task: Task) -> ServerResources:
        """Return the CPUs and GPUs that the server of ``task`` has."""
        if self._is_remote:
            # A remote server on this machine may use all of its CPUs, as its load generator does.
            is_elsewhere = bool(other_machine_address(self.options))
            return ServerResources(client_shares_cpus=None if is_elsewhere else True)
        placement, is_here = self.placement(task), self.node_placement is None
        count = len(placement.server)
        return ServerResources(
            server_cpus=count if self.cpu_quota is None else min(self.cpu_quota, count),
            server_cpu_list=format_cpus(placement.server) if is_here else "",
            client_cpu_list=format_cpus(placement.client) if is_here else "",
            client_shares_cpus=bool(placement.server & placement.client),
            cpu_quota=self.cpu_quota,
            server_uses_gpus=self._needs_gpus(task),
        )

    def remote_note(self) -> RemoteServerUsed | None:
        """Return a note that the measured server was not started by tune; None if it was."""
        return RemoteServerUsed(server_address(self.options.url).host_port) if self._is_remote else None

    def other_runs(self) -> list[OtherRun]:
        """Return a note for each other run that measures on this machine now. On a cluster, each node has others."""
        return [] if self.options.cluster else other_runs(self._shared_study)

    @property
    def _shared_study(self) -> str:
        """The name of the study that the workers of a shared one have in common; empty for a run of its own."""
        name, storage = self.options.study_name, self.options.storage
        return f"{name} in {Path(storage.partition('?')[0]).name}" if name and storage else ""

    def notes(self, task: Task) -> tuple[Note, ...]:
        """Return notes for the user on the conditions of the measurements."""
        notes = list[Note | None]()
        if self.options.target == "embedded":
            backends = map(backend_of, task.source.models.values())
            notes += [OwnBackend(name) for name in dict.fromkeys(backends) if name in ("onnxruntime", "pytorch")]
        notes += [self.remote_note() or self.placement(task).note, task.request_note]
        if task.source.batch_obstacle is not None:
            notes.append(WithoutBatches(task.source.batch_obstacle))
        if self.options.shared_memory != "none":
            notes.append(SharedMemoryUsed(self.options.shared_memory))
        if task.problem.space.max_server_processes > 1:
            notes.append(ServerProcessesVaried())
        if task.source.batcher:
            notes.append(BatcherTuned(task.source.batcher))
        if shares := task.source.concurrent:
            notes.append(SeveralModelsLoaded(task.source.name, tuple(shares.items())))
        if self.options.search == "simulated" and not task.problem.is_simulated:
            is_batching = model_type(task.problem) is ContinuousBatchingModel
            notes.append(ContinuousBatchingSimulated() if is_batching else SearchedWithoutSimulator())
        if self.hardware.gpus and not self._is_remote and not self._needs_gpus(task):
            devices = DeviceAssignment.of(self.options, self.hardware.gpus)
            notes.append(devices.explain_cpu_serving(task.source.tuned_config))
        if self._needs_gpus(task) and any(gpu.mig for gpu in self.gpus.local):
            notes.append(MigInstanceUsed())
        notes.append(GpusNotRead(self.gpus.fault) if self.gpus.fault else None)
        return present(notes)

    def _ensure_openvino(self, task: Task) -> None:
        if self.uses_openvino(task):
            runtime.ensure_openvino(self.on_progress)

    def uses_openvino(self, task: Task) -> bool:
        """Return whether the embedded server needs the build of ONNX Runtime with OpenVINO."""
        is_embedded = self.options.target == "embedded"
        return is_embedded and uses_openvino(task.source.models.values(), task.problem.space.fields)

    def _metrics_address(self, task: Task) -> str:
        """Return the address of the metrics of a remote server if they report GPUs or an engine; otherwise empty."""
        if self._is_remote and exports_metrics(task.source):
            return metrics_address(self.options)
        return self.gpus.metrics

    @property
    def _is_remote(self) -> bool:
        return self.options.target == "remote"

    def server_sees_gpus(self, task: Task) -> bool:
        """Return whether the server of ``task`` sees the GPUs of this machine.

        If NVML has a fault, CUDA may work nevertheless: a model that asks for a GPU gets it, without GPU metrics.
        """
        asks_for_gpu = any(
            "KIND_GPU" in gpu_placement.instance_kinds(config) for config in task.source.models.values()
        )
        return self._needs_gpus(task) or (bool(self.gpus.fault) and asks_for_gpu)

    def _needs_gpus(self, task: Task) -> bool:
        return task.on_gpu or (bool(self.hardware.gpus) and has_gpu_choice(task.problem.space.fields))
