"""``tune setup``: install the embedded server and compile the simulators."""

from __future__ import annotations

from functools import partial

from optimizer.deploy import runtime
from optimizer.deploy.perf_analyzer_release import ensure_newer
from optimizer.options.command_line import Parser


def build_parser() -> Parser:
    """Return the parser of the command line."""
    description = "Download and unpack the embedded server and perf_analyzer, and compile the\nsimulators."
    epilog = "exit codes: 0 done, 2 bad input, 3 environment, such as no package index,\n130 interrupted"
    parser = Parser("tune setup", "[options]", description, epilog)
    parser.add_argument(
        "--openvino",
        action="store_true",
        help="Download ONNX Runtime with OpenVINO too; otherwise the first run that needs it does so",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run ``tune setup`` and return its exit code. Raises EnvironmentFault."""
    arguments = build_parser().read(argv)
    from optimizer.simulator.continuous_batching import compile_continuous_batching
    from optimizer.simulator.simulate import compile_simulator

    on_progress = partial(print, flush=True)  # immediately, also into a pipe
    installation = runtime.ensure(on_progress)
    ensure_newer(on_progress)
    if arguments.openvino:
        runtime.ensure_openvino(on_progress)
    compile_simulator(on_progress)
    compile_continuous_batching(on_progress)
    print(f"ready: {installation.root}")
    return 0
