"""The line before the first measurement, which names the model, the server, the time, the goal and the folder."""

from __future__ import annotations

from pathlib import Path

from optimizer.config.search_space import Problem
from optimizer.core.budget import RunMode
from optimizer.options.addresses import server_address
from optimizer.options.run_options import RunOptions
from optimizer.results import formatting


def action_of(mode: RunMode, spent_seconds: float) -> str:
    """Return the action of a session in words. Earlier sessions of the run have measured for ``spent_seconds``."""
    if mode is RunMode.CONFIRM:
        return "testing the recommendation for"
    return "continuing" if spent_seconds else "tuning"


def start_line(action: str, problem: Problem, options: RunOptions, seconds: float, folder: Path) -> str:
    """Return the line for ``action``, such as ``tuning``, which takes at most ``seconds`` and fills ``folder``."""
    limit = f"for at most {formatting.clock(seconds)} minutes"
    if options.max_trials is not None:
        limit += f" and {formatting.count(options.max_trials, 'trial')}"
    return f"{action} {problem.model} on {describe_server(options)}, {limit}: {goal(problem)}; results in {folder}"


def describe_server(options: RunOptions) -> str:
    """Return the server that is measured, in words."""
    if options.cluster is not None:
        return f"{options.target} servers of a cluster"
    return {
        "embedded": "the embedded server",
        "local": "the tritonserver of this machine",
        "docker": "a server in Docker",
        "remote": f"the server at {server_address(options.url).host_port}",
    }[options.target]


def goal(problem: Problem) -> str:
    """Return the objectives and the bounds, in words."""
    best = ", then ".join(
        f"{'highest' if metric.better == 'higher' else 'lowest'} {formatting.metric_label(metric.name)}"
        for metric in problem.objectives
    )
    bounds = formatting.bounds(problem.sla)
    return f"{best} within {bounds}" if bounds else f"{best}, without a bound"
