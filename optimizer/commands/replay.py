"""``tune replay TABLE``: the same search on a recorded table."""

from __future__ import annotations

import sys

from objectives.sla import Constraint
from optimizer.commands.terminal import fail
from optimizer.untrusted import one_line


def main(arguments: list[str]) -> int:
    from pathlib import Path

    from rich.console import Console

    from optimizer.arguments.replay import read_replay_arguments

    given = read_replay_arguments(arguments)
    from optimizer.replay.comparison import Comparison, compare, document
    from optimizer.replay.console import closest, print_comparison
    from optimizer.replay.recording import read_recordings
    from optimizer.replay.source import elsewhere_of

    constraints = [Constraint(f"latency-{name}", bound) for name, bound in given.sla_ms.items()]
    recordings, found = read_recordings(Path(given.table)), dict[str, Comparison]()
    if len(recordings) > 1:
        several = f"measured on {len(recordings)} devices or servers; each is ranked alone"
        print(f"{one_line(given.table)}: {several}", file=sys.stderr)
    for recording in recordings:
        problem = recording.problem(constraints)
        best = recording.best(problem)
        if best is None:
            fail(closest(recording, problem), 1)
            continue
        elsewhere, told = elsewhere_of(given.warm_start, problem)
        for line in told:
            print(line, file=sys.stderr)
        with Console(stderr=True).status("") as status:
            found[recording.fingerprint] = compare(
                recording,
                problem,
                best,
                given.methods,
                seeds=range(given.seeds),
                max_trials=given.max_trials,
                elsewhere=elsewhere,
                say=status.update,
            )
    if given.as_json and found:
        import json

        documents = {fingerprint: document(comparison) for fingerprint, comparison in found.items()}
        print(json.dumps(documents if len(recordings) > 1 else next(iter(documents.values())), indent=2))
    elif found:
        for comparison in found.values():
            print_comparison(Console(), comparison)
    return 0 if found else 1
