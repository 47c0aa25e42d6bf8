"""``tune models``: the models that can be tuned by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from objectives.sla import Sla
from optimizer.cli.output import open_console, print_json
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line
from optimizer.model.input_data import TensorSpec
from optimizer.model.profile import inputs_and_source, load_profile
from optimizer.model.profile_lookup import list_profiles
from optimizer.options.command_line import Parser, add_json


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model with a profile: its inputs (dims without the batch), default SLA and source document.

    ``fault`` is the first error of the profile, or empty; the other fields are known only without an error.
    """

    name: str
    profile: Path
    description: str
    inputs: tuple[TensorSpec, ...] = ()
    slas: tuple[str, ...] = ()
    source: str = ""
    fault: str = ""

    def document(self) -> dict[str, object]:
        """Return the entry of ``tune models --json``."""
        document: dict[str, object] = {"name": self.name, "profile": str(self.profile.absolute())}
        if self.fault:
            return document | {"fault": self.fault}
        inputs = [
            {"name": tensor.name, "datatype": tensor.datatype, "dims": list(tensor.dims)} for tensor in self.inputs
        ]
        return document | {
            "description": self.description,
            "inputs": inputs,
            "sla": list(self.slas),
            "source": self.source,
        }


def list_models() -> list[ListedModel]:
    """Return the models ordered by name, without building any."""
    return [_describe(name, path) for name, path in list_profiles().items()]


def print_models(*, as_json: bool) -> None:
    """Print the models as a table or as one JSON document."""
    models = list_models()
    if as_json:
        print_json([model.document() for model in models])
        return
    from rich.text import Text

    from optimizer.results.terminal_output import plain_table, print_table

    table = plain_table("model, SLA", "description, inputs and source")
    for model in models:
        name = Text(model.name, "bold").append("\n" + ("\n".join(model.slas) or "no default SLA"), "not bold")
        about = Text(model.description)
        for line, style in ((_show_inputs(model.inputs), "cyan"), (model.source, "dim"), (model.fault, "red")):
            about.append(f"\n{line}" if line else "", style)
        table.add_row(name, about)
        table.add_row()
    print_table(open_console(), table)
    print("tune MODEL tunes one; with another bound: tune --sla-p95 20ms MODEL")
    print("for a profile of your own: tune init MODEL; the built-in ones are in")
    for folder in dict.fromkeys(str(model.profile.parent.absolute()) for model in models):
        print(f"  {one_line(folder)}")


def _describe(name: str, path: Path) -> ListedModel:
    try:
        profile = load_profile(path)
        inputs, source = inputs_and_source(profile)
    except BadInputError as error:
        fault = one_line(str(error).partition("\n")[0])
        return ListedModel(name, path, "", fault=fault)
    slas = tuple(map(str, Sla.from_bounds(profile.sla.latency_bounds_ms())))
    return ListedModel(name, path, one_line(profile.description), inputs, slas, source)


def _show_inputs(inputs: Sequence[TensorSpec]) -> str:
    """Return the inputs as ``a, b INT32 [16] · c FP32 [-1]``."""
    groups = groupby(inputs, key=lambda tensor: f"{tensor.datatype} {list(tensor.dims)}")
    return " · ".join(f"{', '.join(tensor.name for tensor in same)} {kind}" for kind, same in groups)


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune models",
        usage="[options]",
        description="List the built-in models and those with a profile in ./configs.",
    )
    add_json(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run ``tune models`` and return its exit code."""
    arguments = build_parser().read(argv)
    print_models(as_json=arguments.json)
    return 0
