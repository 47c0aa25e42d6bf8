"""``tune models``: what can be tuned by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import DataType

from optimizer import model_config
from optimizer.errors import BadInputError
from optimizer.models import describe
from optimizer.models.builder import Tensor
from optimizer.profile.find import Listed, list_profiles
from optimizer.profile.reader import Profile, load_profile
from optimizer.profile.schema import BuiltModel
from optimizer.untrusted import one_line


@dataclass(frozen=True, slots=True)
class ListedModel:
    """What a profile's model takes (dims without the batch), the document that it is from, its bounds by default.

    ``fault`` is what is wrong with the profile, empty where nothing is; then the rest is known.
    """

    name: str
    profile: Path
    description: str
    inputs: tuple[Tensor, ...] = ()
    slas: tuple[str, ...] = ()
    source: str = ""
    fault: str = ""

    def document(self) -> dict[str, object]:
        """As ``tune models --json`` has it."""
        document: dict[str, object] = {"name": self.name, "profile": str(self.profile.absolute())}
        if self.fault:
            return document | {"fault": self.fault}
        inputs = [{"name": one.name, "datatype": one.dtype, "dims": list(one.dims)} for one in self.inputs]
        return document | {
            "description": self.description,
            "inputs": inputs,
            "sla": list(self.slas),
            "source": self.source,
        }


def list_models() -> list[ListedModel]:
    """By name. Builds nothing."""
    return [_model(listed) for listed in list_profiles()]


def print_models(*, as_json: bool) -> None:
    models = list_models()
    if as_json:
        print(json.dumps([model.document() for model in models], indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("model, SLA", "what it is, what it takes, and where it is from", box=None, pad_edge=False)
    for model in models:
        name = Text(model.name, "bold").append(f"\n{', '.join(model.slas) or 'no default SLA'}", "not bold")
        about = Text(model.description)
        for line, style in ((_shown(model.inputs), "cyan"), (model.source, "dim"), (model.fault, "red")):
            about.append(f"\n{line}" if line else "", style)
        table.add_row(name, about)
        table.add_row()
    console = Console()
    console.print(table)
    print("tune MODEL tunes one, within another bound: tune --sla-p95 20ms MODEL")
    print("a profile of your own: tune ./my_model.yaml; these lie in")
    for folder in dict.fromkeys(str(model.profile.parent.absolute()) for model in models):
        print(f"  {one_line(folder)}")


def _model(listed: Listed) -> ListedModel:
    try:
        profile = load_profile(listed.path)
        inputs, source = _origin(profile)
    except BadInputError as error:
        fault = one_line(str(error).partition("\n")[0])
        return ListedModel(listed.name, listed.path, "", fault=fault)
    slas = tuple(map(str, profile.sla.constraints()))
    return ListedModel(listed.name, listed.path, one_line(profile.description), inputs, slas, source)


def _origin(profile: Profile) -> tuple[tuple[Tensor, ...], str]:
    """The model's inputs, as far as they are known without looking into it, and where it is from."""
    model = profile.model
    if isinstance(model, BuiltModel):
        interface, source = describe(model.builder, model.settings)
        return interface.inputs, source
    config = model_config.read(model.repository / model.name / "config.pbtxt")
    inputs = (
        Tensor(one_line(one.name), DataType.Name(one.data_type).removeprefix("TYPE_"), tuple(one.dims))
        for one in config.input
    )
    return tuple(inputs), one_line(str(model.repository / model.name))


def _shown(inputs: Sequence[Tensor]) -> str:
    """``a, b INT32 [16] · c FP32 [-1]``."""
    kinds = groupby(inputs, key=lambda one: f"{one.dtype} {list(one.dims)}")
    return " · ".join(f"{', '.join(one.name for one in same)} {kind}" for kind, same in kinds)
