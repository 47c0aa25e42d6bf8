"""``tune setup``: fetch, unpack and compile now rather than at the first run."""

from __future__ import annotations

from functools import partial

from optimizer.arguments.values import Parser


def main(arguments: list[str]) -> int:
    what = "Fetch and unpack the embedded server and perf_analyzer, compile the simulator, once."
    Parser(prog="tune setup", description=what).parse_args(arguments)
    from optimizer import runtime
    from optimizer.batcher.ahead import compile_ahead

    say = partial(print, flush=True)  # into a pipe too
    ready = runtime.ensure(say)
    compile_ahead(say)
    print(f"ready: {ready.root}")
    return 0
