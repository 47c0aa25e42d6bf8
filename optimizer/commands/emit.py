"""``tune emit RUN``: what a run recommends, as files that production takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.arguments.emit import read_emit_arguments, serving_of
from optimizer.errors import BadInputError
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from optimizer.emitting.serving import Serving
    from optimizer.emitting.winner import Winner


def main(arguments: list[str]) -> int:
    """Raises BadInputError."""
    given = read_emit_arguments(arguments)
    from optimizer.emitting.pbtxt import with_warm_up
    from optimizer.emitting.winner import read_winner
    from optimizer.store.finished import read_run

    winners = [read_winner(read_run(run, given.out)) for run in given.runs]
    if given.warm_up:
        winners = [with_warm_up(winner) for winner in winners]
    files = _files(given, winners)
    if given.output is None and len(files) > 1:
        raise BadInputError(f"--format {given.format} makes {len(files)} files here: give --output DIR")
    for winner in winners:
        if not winner.is_confirmed:
            verdict = one_line(winner.verdict)
            print(f"tune: {winner.run}: {verdict}; `tune verify` it before production", file=sys.stderr)
    if given.output is None:
        print(*files.values(), end="")
    else:
        _write(Path(given.output), files, force=given.force)
    return 0


def _files(given: argparse.Namespace, winners: list[Winner]) -> dict[str, str]:
    from optimizer.emitting import compose, docker, helm, kserve, kubernetes, pbtxt

    if given.format == "per-device":
        return pbtxt.emit_per_device(winners, given.device or [])
    (winner,) = winners
    if given.format == "pbtxt":
        return pbtxt.emit_pbtxt(winner)
    made: Mapping[str, Callable[[Winner, Serving], dict[str, str]]] = {
        "docker": docker.emit_docker,
        "compose": compose.emit_compose,
        "kubernetes": kubernetes.emit_kubernetes,
        "helm-values": helm.emit_values,
        "kserve": kserve.emit_kserve,
    }
    files = made[given.format](winner, serving_of(given, winner))
    return {**files, **helm.chart()} if given.format == "helm-values" and given.output is not None else files


def _write(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """All of ``files`` or, where one is there already, none."""
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise BadInputError(f"{one_line(str(folder / there[0]))} is there already; give another --output, or --force")
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                path.chmod(0o755)
        except OSError as error:
            raise BadInputError(f"--output: cannot write {one_line(str(path))}: {error.strerror}") from None
        print(one_line(str(path)))
