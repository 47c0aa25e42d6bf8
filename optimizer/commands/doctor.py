"""``tune doctor``: what this machine has and lacks."""

from __future__ import annotations

from optimizer.arguments.values import Parser


def main(arguments: list[str]) -> int:
    what = "Check what tune needs on this machine, with the mend for what is missing."
    Parser(prog="tune doctor", description=what).parse_args(arguments)
    from optimizer.doctor import diagnose

    return diagnose()
