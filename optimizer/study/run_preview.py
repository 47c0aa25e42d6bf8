"""The preview of a run: its search space, its first trials and its time. Nothing is measured or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from optimizer.config.problem import Problem
from optimizer.core.budget import CONFIRM_SHARE
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.safe_text import one_line, scalar_text
from optimizer.core.trial import Trial, TrialRole
from optimizer.deploy import runtime, target_factory
from optimizer.machine.hardware import Hardware
from optimizer.options.command_line import command_line
from optimizer.options.run_options import EXHAUSTIVE_SEARCHES, PROGRAM_TARGETS, RunOptions, is_distribution
from optimizer.results import configuration_text, formatting
from optimizer.results.finished_run import candidate_document
from optimizer.results.terminal_output import plain_table, print_indented, print_line, print_table
from optimizer.search import MIN_GAIN, make_searcher
from optimizer.search.transfer import TransferredStudy
from optimizer.simulator.performance_model import model_type
from optimizer.store.run_folder import RunFolder
from optimizer.study.environment import Environment, ServerResources
from optimizer.study.load_generators import choose_clients
from optimizer.study.model_finder import find_model, undeclared_models
from optimizer.study.run_messages import goal
from optimizer.study.run_record import problem_document
from optimizer.study.task import Task
from optimizer.study.warm_start import load_warm_start

DYNAMIC_BATCHING = ("max_queue_delay_us", "preferred_batch_sizes")  # parameters that a stateful model does not have
CHOICES_WIDTH = 24  # columns of a terminal that are left for the choices next to a long name
PROPOSALS = 2  # further ones of tpe depend on the measurements
SERVER_MB = 100  # size of the download
REASONS = {
    "baseline": "the configuration as given; gains are relative to it",
    "dynamic_batching": "plain dynamic_batching {}, the usual advice; gains are relative to it too",
}


class FirstTrial(NamedTuple):
    """A configuration that is tried first, and why."""

    role: TrialRole
    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class RunPreview:
    """The preview of a run.

    Attributes:
        options: The options of the run.
        task: The model, the problem and the requests.
        hardware: The machine of the server.
        resources: The CPUs and GPUs of the server.
        first: The first trials in their order.
        notes: Notes for the user.
        has_server: Whether the embedded server and perf_analyzer are installed.
        started_server: Whether a server was started for a model that declares no inputs or outputs.
    """

    options: RunOptions
    task: Task
    hardware: Hardware
    resources: ServerResources
    first: tuple[FirstTrial, ...]
    notes: tuple[str, ...]
    has_server: bool
    started_server: bool

    @property
    def confirmation_seconds(self) -> float:
        """The part of the budget that is reserved for the confirmation."""
        return CONFIRM_SHARE * self.options.budget_seconds if self.options.confirmation else 0.0

    @property
    def search_seconds(self) -> float:
        """The part of the budget for the search."""
        return self.options.budget_seconds - self.confirmation_seconds

    def document(self) -> dict[str, Any]:
        """Return the document of ``--dry-run --json``, with the names of run.json."""
        problem, options = self.task.problem, self.options
        clients = choose_clients(options, self.task)
        return {
            "command": command_line(options),
            "problem": problem_document(self.task),
            "target": options.target,
            "hardware": str(self.hardware),
            **asdict(self.resources),
            "load": {
                "generator": "tune" if clients.own_client_searches else "perf_analyzer",
                "confirmation_generator": "perf_analyzer" if clients.perf_analyzer_reason else "tune",
                "protocol": options.protocol,
                "shared_memory": options.shared_memory,
                "kind": options.load,
                "max_concurrency": None if problem.open_loop else problem.max_concurrency,
                "request_distribution": options.request_times if problem.open_loop else None,
            },
            "search": options.search,
            "first": [
                {"role": trial.role, "configuration": candidate_document(trial.candidate), "reason": trial.reason}
                for trial in self.first
            ],
            "max_trials": options.max_trials,
            "budget_seconds": options.budget_seconds,
            "search_seconds": self.search_seconds,
            "confirmation_seconds": self.confirmation_seconds,
            "server_is_installed": self.has_server,
            "server_was_started": self.started_server,
            "notes": list(self.notes),
        }


def preview(options: RunOptions, on_progress: Callable[[str], None]) -> RunPreview:
    """Return the preview of a run with ``options``.

    ``on_progress`` gets one line for each slow preparation: a model may be built in the cache. The server is not
    downloaded, and is started only for a model that declares no inputs or outputs. Raises BadInputError and
    EnvironmentFault.
    """
    if options.cluster is not None:
        raise BadInputError(
            "--dry-run: it describes a run on this machine, but --cluster measures on other nodes; leave one out"
        )
    RunFolder.check(options.out)
    environment = Environment.detect(options, _without_repeats(on_progress))
    has_server = runtime.installed() is not None
    undeclared = _undeclared(environment)
    if undeclared and options.target == "embedded" and not has_server:
        models = one_line(", ".join(undeclared))
        raise EnvironmentFault(
            f"--dry-run: no config.pbtxt declares the inputs and outputs of {models}, and the "
            "server that knows them is not installed; install it (`tune setup`), or declare them"
        )
    task = environment.make_task(fetch_server=False)
    if has_server or options.target != "embedded":
        target_factory.check_server_options(task.problem.space, options, on_progress)
    transferred, transfer_notes = load_warm_start(options, task, None)
    return RunPreview(
        options=options,
        task=task,
        hardware=environment.hardware,
        resources=environment.server_resources(task),
        first=_first_trials(options, task, transferred),
        notes=(*task.notes, *map(str, (*environment.notes(task), *transfer_notes))),
        has_server=has_server,
        started_server=bool(undeclared),
    )


def _without_repeats(on_progress: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``on_progress``, called once for each line: the model is read twice, with the same remarks."""
    shown = set[str]()

    def show(line: str) -> None:
        if line not in shown:
            shown.add(line)
            on_progress(line)

    return show


def _undeclared(environment: Environment) -> list[str]:
    """Return the models for which a server is started on this machine."""
    if environment.options.target not in PROGRAM_TARGETS:
        return []
    hardware = environment.server_hardware()
    named = find_model(environment.options, hardware, environment.on_progress, start_server=False)
    return undeclared_models(named.source)


def _first_trials(options: RunOptions, task: Task, transferred: TransferredStudy | None) -> tuple[FirstTrial, ...]:
    """Return the comparisons, then the proposals that no measurement changes, at most ``options.max_trials``."""
    compared = [FirstTrial(role, candidate, REASONS[role]) for role, candidate in task.comparisons()]
    max_proposals = PROPOSALS if options.max_trials is None else options.max_trials - len(compared)
    proposals = first_proposals(
        options.search, task.problem, options.seed, [trial.candidate for trial in compared], transferred
    )
    reason = f"a first proposal of {options.search} with the seed {options.seed}"
    searched = [FirstTrial("search", candidate, reason) for candidate in proposals]
    return (*compared[: options.max_trials], *searched[: max(max_proposals, 0)])


def first_proposals(
    method: str,
    problem: Problem,
    seed: int,
    compared: Sequence[Candidate],
    transferred: TransferredStudy | None = None,
) -> list[Candidate]:
    """Return the first candidates that a search proposes after those ``compared``, if no measurement changes them.

    The list is empty for `simulated`, all of whose proposals depend on measurements.
    """
    if method == "simulated":
        return []
    searcher = make_searcher(method, problem, seed, transferred=transferred)
    for number, candidate in enumerate(compared):
        searcher.observe(Trial(number, candidate, status="failed", reason="not measured"))
    proposals = (searcher.suggest() for _ in range(PROPOSALS))
    return [candidate for candidate in proposals if candidate is not None]


def print_preview(console: Console, run: RunPreview) -> None:
    """Print the preview ``run`` for people."""
    problem = run.task.problem
    table = plain_table("", "")
    table.show_header = False
    facts = formatting.facts_line(run.task.source.facts)
    for name, text in (
        ("model", " · ".join(filter(None, (problem.model, facts)))),
        ("goal", goal(problem)),
        ("server", f"{run.options.target}, on {run.hardware}"),
        ("load", _describe_load(run)),
        ("time", _describe_time(run)),
    ):
        table.add_row(Text(name), Text(one_line(text)))
    print_table(console, table)
    print_line(console)
    _print_space(console, problem)
    print_line(console)
    print_line(console, "tried first:")
    for number, trial in enumerate(run.first, 1):
        configuration = configuration_text.configuration(trial.candidate)
        print_indented(console, f"{number}. {configuration}", indent="   ")
        print_indented(console, trial.reason, first_indent="   ", indent="   ")
    for label, text in (("then", _describe_search(run)), *(("note", one_line(note)) for note in run.notes)):
        print_indented(console, f"{label}: {text}", indent="      ")
    started = "A server was started to read the inputs" if run.started_server else "No server was started"
    print_line(console, f"{started}, and nothing was measured.")


def _print_space(console: Console, problem: Problem) -> None:
    """Print the number of configurations and the choices of each parameter."""
    print_line(console, f"space: {formatting.count(len(problem.space), 'configuration')}")
    table = plain_table("parameter", "choices")
    hidden = DYNAMIC_BATCHING if problem.space.is_stateful else ()
    choices = {
        one_line(name): one_line(", ".join(map(scalar_text, values)))
        for name, values in problem.space.parameters().items()
        if name not in hidden
    }
    names = table.columns[0]
    names.overflow = "fold"
    # A name that is broken over two lines cannot be copied, so the choices are broken first.
    names.width = min(max(map(len, choices)), max(console.width - CHOICES_WIDTH, 1))
    for name, values in choices.items():
        table.add_row(Text(name), Text(values))
    print_table(console, table)


def _describe_load(run: RunPreview) -> str:
    """Return the load generators, the requests and their number or rate, in words."""
    problem, options = run.task.problem, run.options
    size = problem.request_batch_size
    each = f"requests of {formatting.exact(size)} sample{'' if size == 1 else 's'}"
    each += " on average" if problem.request_mix else ""
    each += f" of the priorities {problem.priorities}" if problem.priorities else ""
    data = f"{run.task.input_data.name} as input data"
    if options.shared_memory != "none":
        data += f", in {options.shared_memory} shared memory"
    if problem.open_loop:
        times = f"at {options.request_times} request rates"
        if not is_distribution(options.request_times):
            times = f"at request rates, as in {Path(options.request_times).name}"
        return f"tune's own client, {times}; {each}, {data}"
    if length := run.task.sequence_length:
        each = f"sequences of {length} {each}"
    generator, clients = "tune's own client over grpc", choose_clients(options, run.task)
    if not clients.own_client_searches:
        confirming = "" if clients.perf_analyzer_reason else ", and tune's own client on fresh servers"
        generator = f"perf_analyzer over {options.protocol}{confirming}"
    return f"{generator}; {each}, 1 to {problem.max_concurrency:,} in flight, {data}"


def _describe_time(run: RunPreview) -> str:
    """Return the parts of the budget, in words."""
    duration = formatting.duration
    text = f"at most {duration(run.options.budget_seconds)}"
    if run.confirmation_seconds:
        tests = duration(run.confirmation_seconds)
        text += f": {duration(run.search_seconds)} of search, {tests} of tests on fresh servers"
    if run.options.max_trials is not None:
        text += f"; at most {formatting.count(run.options.max_trials, 'trial')}"
    return text if run.has_server else f"{text}; before, the download of the server ({SERVER_MB} MB, once)"


def _describe_search(run: RunPreview) -> str:
    """Return how the search continues after the first trials, and when it ends, in words."""
    options = run.options
    if options.search == "simulated":
        problem = run.task.problem
        model = (
            "" if problem.is_simulated else f" with a {model_type(problem).name} that is fitted to the measurements"
        )
        gain = formatting.percent(MIN_GAIN)
        return f"simulated{model}, until the expected gain of another trial is below about {gain}"
    if options.search in EXHAUSTIVE_SEARCHES:
        return f"{options.search} tries each configuration"
    return f"{options.search} proposes one after another, until the time or the space is used up"
