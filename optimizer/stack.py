"""The real server and the real load generator for a run: what `tune` and `tune verify` measure with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from optimizer import runtime, serving, task
from optimizer.answers.guard import OutputGuard, Unguarded
from optimizer.answers.guards import Guards
from optimizer.answers.score import read_scorer
from optimizer.arguments.target import address
from optimizer.budget import Budget
from optimizer.deploy import choose
from optimizer.deploy.docker.sdk_image import SDK_COMMAND, SdkImage
from optimizer.deploy.docker.target import ContainerTelemetry
from optimizer.deploy.seen_gpus import SeenGpus, seen
from optimizer.errors import EnvironmentFault
from optimizer.interfaces import Guard, LoadGenerator, ServerTarget, Telemetry
from optimizer.load.concurrent import ConcurrentModels
from optimizer.load.launcher import ForEveryServer
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.load.sweep import latency_bounds
from optimizer.load.windows import FIRST_WINDOW_MS, RATE_WINDOW_MS
from optimizer.machine import cpus
from optimizer.machine import hardware as machine
from optimizer.machine.cpus import Placement
from optimizer.machine.fingerprint import Fingerprint, fingerprint
from optimizer.machine.gpu_attribution import CHOSEN
from optimizer.machine.gpu_telemetry import GpuTelemetry
from optimizer.machine.hardware import Hardware
from optimizer.machine.telemetry import ProcessTelemetry
from optimizer.measuring import Measuring, Record, Watcher
from optimizer.open_loop.arrivals import arrivals
from optimizer.open_loop.generator import SCRATCH, OpenLoop
from optimizer.options import RunOptions
from optimizer.problem import Problem
from optimizer.requests.hostile import HintingLoad
from optimizer.sources.repository import backend_of, is_ensemble
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.task import Task
from optimizer.trial import SERVER_CPUS

NO_POWER = (
    "--objective energy: power is read from NVIDIA GPUs, and this serves on its CPU, as far as is told; "
    "choose throughput, latency-p95 or memory"
)
WatcherMaker = Callable[[Problem, Budget, Hardware], AbstractContextManager[Watcher]]


@dataclass(frozen=True)
class Stack:
    """What is measured with. ``hardware`` is this machine with the GPUs that serve; its CPU is told as that of
    another machine where that one serves. ``say`` gets a line for each slow preparation. ``placed``: where server and
    load generator run, for whoever has been told; None: it follows from the CPUs of this process."""

    options: RunOptions
    hardware: Hardware
    gpus: SeenGpus
    stopwatch: Stopwatch
    say: Callable[[str], None]
    placed: Placement | None = None

    @classmethod
    def detect(cls, options: RunOptions, stopwatch: Stopwatch, say: Callable[[str], None]) -> Stack:
        """Raises EnvironmentFault where this machine cannot do what is asked."""
        if reason := runtime.unsupported():
            raise EnvironmentFault(reason)
        choose.check(options, say)
        gpus = seen(options)
        here = machine.detect()
        where = choose.elsewhere(options)
        cpu = f"CPU of {where} unknown; load from {here.cpu}" if where else here.cpu
        hardware = replace(here, gpus=gpus.names, cpu=cpu)
        fault = gpus.fault
        if "energy" in options.objectives and not hardware.gpus:
            raise EnvironmentFault(f"--objective energy: no power can be read: {fault}" if fault else NO_POWER)
        if gpus.unusable:
            raise EnvironmentFault(f"{fault}; or go on without GPUs: {CHOSEN}= tune …")
        if fault:
            say(f"GPUs are not measured: {fault}")
        arrivals(options.arrivals)  # a file that is none is told before anything is started
        return cls(options, hardware, gpus, stopwatch, say)

    def task(self) -> Task:
        """The model, found or built, and what is to be reached. Raises BadInputError."""
        with self.stopwatch.set_up():
            seen = replace(self.hardware, cpu_count=len(self.placement().server))
            found = task.prepare(self.options, seen, self.say)
            if "energy" in self.options.objectives and not found.on_gpu:
                raise EnvironmentFault(NO_POWER)
            runtime.ensure(self.say)
        return found

    def fingerprint(self, what: Task) -> Fingerprint:
        """What measurements depend on besides the configuration. Raises EnvironmentFault where the server does not
        tell."""
        backends = [backend_of(config) for config in what.source.models.values() if not is_ensemble(config)]
        return fingerprint(
            self.hardware,
            backends,
            target=self.options.target,
            server=choose.server_of(self.options, self.say),
            own_backends=self.options.target == "embedded",
            at=choose.elsewhere(self.options),
        )

    def target(self, what: Task, folder: RunFolder) -> ServerTarget:
        return choose.target_of(
            what.source,
            what.problem.space,
            self.options,
            log=folder.server_log,
            cpus=self.placement(what).server,
            gpus=self._needs_gpus(what),
            metrics=self.gpus.metrics,
            stopwatch=self.stopwatch,
            say=self.say,
        )

    @property
    def _is_remote(self) -> bool:
        return self.options.target == "remote"

    def where(self) -> str:
        """That the figures are those of a server which tune did not start."""
        if not self._is_remote:
            return ""
        where = address(self.options.url).where
        return f"measured on the server at {where}: the model was loaded afresh, the server ran on"

    def measuring(self, what: Task, folder: RunFolder, table: Record, watcher: Watcher) -> Measuring:
        placement = self.placement(what)
        client = placement.server | placement.client if self._is_remote else placement.client
        load_generator: LoadGenerator = self._load_generator(what, folder, client)
        if what.source.concurrent:
            assert isinstance(load_generator, PerfAnalyzer)
            load_generator = _concurrent(load_generator, what)
        load_generator = HintingLoad(load_generator, what.unbounded)
        used = placement.server | placement.client
        gpus = self.gpus.here if self._needs_gpus(what) or self._is_remote else ()
        telemetry: Telemetry = GpuTelemetry(ProcessTelemetry(used), gpus)
        if self.options.target == "docker":
            telemetry = ContainerTelemetry(telemetry)
        scorer = read_scorer(what.score) if what.score else None
        guard = self._guard(what, folder)
        return Measuring(load_generator, telemetry, table, watcher, guard, scorer, self.stopwatch)

    def _load_generator(self, what: Task, folder: RunFolder, on: frozenset[int]) -> LoadGenerator:
        usual_ms = RATE_WINDOW_MS if what.problem.open_loop else FIRST_WINDOW_MS
        window_ms = round(self.options.measurement_interval_ms or usual_ms)
        if what.problem.open_loop:
            for left in folder.perf_analyzer_log.parent.glob(f"{SCRATCH}*"):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            return OpenLoop(
                folder.perf_analyzer_log.with_name("open_loop.log"),
                arrivals(self.options.arrivals),
                input_data=what.input_data,
                shapes=what.shapes,
                request_mix=what.problem.request_mix,
                latency_bound_ms=min((one.bound for one in latency_bounds(what.problem.constraints)), default=0.0),
                seed=self.options.seed,
                cpus=on,
                stopwatch=self.stopwatch,
                window_ms=window_ms,
            )
        installed, image = runtime.ensure(self.say), self.options.perf_analyzer_image
        return PerfAnalyzer(
            installed.perf_analyzer if image is None else Path(SDK_COMMAND),
            installed.perf_analyzer_libraries,
            folder.perf_analyzer_log,
            protocol=self.options.protocol,
            input_data=what.input_data,
            shapes=what.shapes,
            stopwatch=self.stopwatch,
            window_ms=window_ms,
            cpus=on,
            launcher=ForEveryServer(installed.perf_analyzer_libraries, partial(runtime.older_perf_analyzer, self.say))
            if image is None
            else SdkImage(image),
        )

    def _guard(self, what: Task, folder: RunFolder) -> Guard:
        if not self.options.output_check:
            return Unguarded("answers were not compared with the baseline's (--no-output-check)")

        def guard(file: Path, input_data: str, shapes: tuple[str, ...]) -> OutputGuard:
            size = what.problem.space.request_batch_size
            return OutputGuard(
                file, input_data=input_data, shapes=shapes, request_batch_size=size, tolerance=what.tolerance
            )

        own = guard(folder.reference, what.input_data, what.shapes)
        beside = {
            name: guard(folder.reference_of(name), one.input_data, one.shapes)
            for name, one in what.concurrent.items()
        }
        return Guards({what.source.name: own, **beside}) if beside else own

    def placement(self, what: Task | None = None) -> Placement:
        """``what`` may list CPUs of the server to choose from: the load generator gets none of them."""
        if self.placed is not None:
            return self.placed
        choices = what.problem.space.fields.get(SERVER_CPUS, ()) if what else ()
        texts = [self.options.server_cpus] if self.options.server_cpus else [str(choice) for choice in choices]
        server = frozenset[int]().union(*map(cpus.parse, texts)) or None
        client = cpus.parse(self.options.client_cpus) if self.options.client_cpus else None
        return cpus.place(cpus.topology(cpus.available()), cpus.quota(), server=server, client=client)

    def notes(self, what: Task) -> tuple[str, ...]:
        """What whoever reads the figures should know of how they came about."""
        backend = backend_of(what.source.config)
        own = f"served by tritune's own Python-based {backend} backend: a production build's native one is faster"
        notes = [
            own if backend in ("onnxruntime", "pytorch") and self.options.target == "embedded" else "",
            "" if self._is_remote else self.placement(what).note,
            self.where(),
            what.request_note,
        ]
        if what.source.batcher:
            notes.append(f"settings without a model's name are those of {what.source.batcher}")
        if self.hardware.gpus and not self._is_remote and not self._needs_gpus(what):
            notes.append(serving.note(what.source.batched))
        if self._needs_gpus(what) and any(gpu.mig for gpu in self.gpus.here):
            notes.append("under MIG a GPU tells utilisation, power and clocks of no one instance: they stay unknown")
        notes.append(self.gpus.fault)
        return tuple(note for note in notes if note)

    def _needs_gpus(self, what: Task) -> bool:
        return what.on_gpu or (bool(self.hardware.gpus) and serving.asks_for_gpu(what.problem.space.fields))


def _concurrent(own: PerfAnalyzer, what: Task) -> ConcurrentModels:
    """Each writes files of its own, and none goes on when the others have ended."""
    own = replace(own, patience=False)
    generators = {what.source.name: own}
    for name, sent in what.concurrent.items():
        log = own.log.parent / name / own.log.name
        log.parent.mkdir(exist_ok=True)
        generators[name] = replace(own, log=log, input_data=sent.input_data, shapes=sent.shapes)
    return ConcurrentModels(generators)
