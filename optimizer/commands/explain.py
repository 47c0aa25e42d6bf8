"""``tune explain RUN``: what bounds a run's throughput, what would help, why the runner-up lost."""

from __future__ import annotations

import json
import math

from optimizer.arguments.values import Parser, parsed


def main(arguments: list[str]) -> int:
    """Exit code 0. Raises BadInputError where there is no such run, or nothing was measured in it."""
    parser = Parser(
        prog="tune explain",
        description="What bounds the throughput of a run, which constraint binds, what would help, and why the "
        "runner-up lost. Reads the run's folder; starts no server.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or <model>/<run> in --out")
    parser.add_argument("--out", default="results", metavar="DIR", help="folder of the results (results)")
    parser.add_argument(
        "--fp16-factor", metavar="SHARE", help="of its time that an inference is assumed to take in FP16 (0.5)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args(arguments)
    from optimizer.explaining.document import document
    from optimizer.explaining.explanation import explain
    from optimizer.explaining.remedies import FP16_FACTOR
    from optimizer.explaining.told import print_explanation
    from optimizer.store.finished import read_run

    factor = FP16_FACTOR if given.fp16_factor is None else parsed("--fp16-factor", given.fp16_factor, _share)
    told = explain(read_run(given.run, given.out), factor)
    if given.json:
        print(json.dumps(document(told), indent=2, allow_nan=False))
    else:
        from rich.console import Console

        print_explanation(Console(), told)
    return 0


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ValueError("write a share above 0 and up to 1, such as 0.5")
    return value
