"""The generated files: reference pages, the types of the Python keywords, and the JSON Schema of profiles.

``python -m optimizer.cli.reference`` writes all of them. Run it in the repository root after a change to one of their
sources: a command's parser, the table of options, the pydantic models of profiles, the columns of trials.csv, the
keys of run.json, or those of Model Analyzer.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from objectives.metrics import Forecast, Measurement
from optimizer.cli.commands import COMMANDS
from optimizer.config.queue_policy import QUEUE_PATHS
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.core.budget import SpentTime
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint
from optimizer.machine.hardware import Fingerprint, Hardware
from optimizer.model.model_analyzer import keys as model_analyzer
from optimizer.model.profile import GPU_DESCRIPTION, SECTIONS, Profile
from optimizer.model.profile_files import SCHEMA_FILE, flow, schema_text
from optimizer.model.profile_schema import BUILT, ONNX, STORED, ModelSpaceSection, OnnxRuntimeSection
from optimizer.options.command_line import Parser
from optimizer.options.option import Option
from optimizer.options.table import GROUPS, OPTIONS
from optimizer.store.trials_reader import COLUMNS, DESCRIPTIONS, FORECAST_COLUMNS
from optimizer.study import run_record
from optimizer.study.environment import ServerResources

_COMMANDS = """\
# Commands

This page is generated: `python -m optimizer.cli.reference` writes it from the parsers that print
`tune COMMAND --help`; `tune --help` lists the commands. The options of `tune run` have a [page of their
own](reference-options.md). Every command takes `--help`, and `--no-color` to disable colors. [Exit
codes](running.md#exit-codes) explains the exit codes. The [list of tasks](README.md) has a page for each command.
"""
_TEXT = "<!-- not run: it is the text of a help -->\n```text\n{}\n```\n"
_PROFILE = """\
# Keys of a profile

This page is generated: `python -m optimizer.cli.reference` writes it from the pydantic models in
`optimizer/model/profile_schema.py`, which check profiles. [Write a profile](profile.md) explains how to use them.
`tune init MODEL` writes a profile with all keys, and its JSON Schema completes them in an editor.

Only `model` is required. A key with `MODEL` in its name stands for one key for each model.
"""
_FILES = """\
# Columns of trials.csv and keys of run.json

This page is generated: `python -m optimizer.cli.reference` writes it from the classes that write these files. See
[the folder of a run](reading-results.md#the-folder-of-a-run) for the other files.

## Columns of trials.csv

Each row is one measurement, or a deployment that failed (then without a load). An empty cell is a value that is
unknown or does not apply. A list is separated by spaces. Names contain the unit. Latencies are those of a request.
Any other column is a further setting of the configuration, by its path in `config.pbtxt`. `None` stands for an empty
cell, or for null in run.json.

`pareto.csv` has the same columns, `confirmed` (whether the point was measured on fresh servers) and
`energy_joules_per_1000_infer`.
"""
_MODEL_ANALYZER = """\
# Keys of a Model Analyzer configuration

This page is generated: `python -m optimizer.cli.reference` writes it from `optimizer/model/model_analyzer/keys.py`.
[From a configuration of Model Analyzer](from-model-analyzer.md) explains how to use such a file.

A key that Model Analyzer 1.58 does not know is an error, which names the nearest known key. "Ignored" means that the
key makes no difference to the result, and "not supported" that tune has no setting for it.
"""
_RUN = """\
## Keys of run.json

`options` has the fields of `RunOptions` in `optimizer/options/run_options.py`, which the
[options](reference-options.md) set. An interval is a list `[low, high]`, with null for an end that is unknown.
"""
GUIDES: Final = {  # key of a profile -> the page that explains it
    "model.repository": "onnx-file.md",
    "model.bls_composing_models": "several-models.md#a-model-in-python-that-calls-others",
    "model.concurrent_models": "several-models.md#models-that-share-a-device",
    "model.variants": "several-models.md",
    "model.batcher": "several-models.md#say-which-step-and-what-may-vary",
    "model.onnx": "onnx-file.md",
    "model.builder": "reference-models.md",
    "sla": "bounds.md",
    "request.batch_size": "input-data.md#requests-of-different-sizes",
    "request.priorities": "queues.md#requests-of-several-priorities",
    "request.sequence_length": "stateful.md#the-load",
    "request.input_data": "input-data.md#recorded-requests",
    "request.shapes": "input-data.md#sizes",
    "request.ranges": "input-data.md#generated-requests",
    "tokens": "streaming.md#lengths",
    "space": "search-space.md",
    "space.instance_group_gpus": "gpu.md#several-gpus",
    "space.server_cpus": "running.md#cpus",
    "space.server_processes": "server-processes.md",
    "space.server": "targets.md#options-of-the-server-itself",
    "space.model_json": "llm-backends.md#a-vllm-model",
    **dict.fromkeys(
        (f"space.{key}" for key in (*QUEUE_PATHS, "priority_queue_policy")),
        "queues.md#settings-that-can-be-searched",
    ),
    "space.onnxruntime": "execution.md",
    "space.models": "several-models.md#say-which-step-and-what-may-vary",
    "score": "output-check.md#score",
    "tolerance": "output-check.md#tolerance",
    "gpu": "gpu.md",
}
_INTRODUCTION = """\
# Options of `tune run`

This page is generated: `python -m optimizer.cli.reference` writes it from `optimizer/options/table.py`.

The options are the same on the command line, as keywords of `optimizer.tune` (with `_` for `-`), and in the
entries of a suite. The last column says what else takes an option: *python* is `optimizer.tune`, *batch* an entry of
`tune batch`, *sweep* `tune sweep`, and *resume* `tune run --resume`. `tune verify --fresh` takes the options of the
group *Server*, except `--server-cpus`. `tune run --help` shows the options in bold, and `tune run --help-all` shows
all. In Python and YAML an option that may be repeated takes a list, and one without a value takes `true`.
"""
_MODULE = '''\
"""The types of the keywords of ``optimizer.tune``; generated by ``python -m optimizer.cli.reference``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict


class RunKeywords(TypedDict, total=False):
    """The options of ``tune run`` by name, with ``_`` for ``-``; a repeatable option takes a list.

    Durations, sizes and rates are text with a unit: ``sla_p95="20ms"``, ``max_memory="4GiB"``.
    """

'''


def reference_page() -> str:
    """Return the reference page of the options in Markdown."""
    sections = [_INTRODUCTION]
    for group in GROUPS:
        rows = (_option_cells(option) for option in OPTIONS if option.group == group)
        sections.append(f"## {group}\n\n{_table(('option', 'value', 'meaning', 'taken by'), rows)}")
    return "\n".join(sections)


def commands_page() -> str:
    """Return the reference page of the commands in Markdown."""
    return "\n".join([_COMMANDS, *map(_command_section, COMMANDS)])


def profile_page() -> str:
    """Return the reference page of the keys of profiles in Markdown."""
    parts = [_PROFILE]
    for name, field in Profile.model_fields.items():
        kinds = (STORED, ONNX, BUILT) if name == "model" else (name,)
        sections = [SECTIONS[kind] for kind in kinds if kind in SECTIONS]
        keys = [pair for section in sections for pair in _keys_of(name, section)]
        parts.append(_profile_table(name, field.description or "", keys or [(name, field)]))
    parts.append(f"## gpu\n\n{_guide('gpu', GPU_DESCRIPTION)}. The keys are the same.\n")
    return "\n".join(parts)


def files_page() -> str:
    """Return the reference page of the columns of trials.csv and the keys of run.json in Markdown."""
    columns = {**_attributes(Measurement), **_attributes(LoadPoint), **_attributes(Candidate), **DESCRIPTIONS}
    columns |= {column: _attributes(Forecast)[name] for column, name in FORECAST_COLUMNS.items()}
    keys: dict[str, str] = {}
    inner = {
        "hardware": _attributes(Hardware),
        "fingerprint": _attributes(Fingerprint),
        "confirmation_plan": _attributes(ConfirmationPlan),
        "spent": _attributes(SpentTime),
    }
    for key, text in run_record.KEYS.items():
        if key == "search_ended":
            keys |= _attributes(ServerResources)
        keys[key] = text
        keys |= {f"{key}.{name}": description for name, description in inner.get(key, {}).items()}
    return "\n".join(
        [
            _FILES,
            _table(("column", "meaning"), ((f"`{name}`", columns[name]) for name in COLUMNS)),
            _RUN,
            _table(("key", "meaning"), ((f"`{name}`", text) for name, text in keys.items())),
        ]
    )


def model_analyzer_page() -> str:
    """Return the reference page of the keys of Model Analyzer in Markdown; keys with one description share a row."""
    parts = [_MODEL_ANALYZER]
    for title, keys in model_analyzer.SECTIONS.items():
        rows: dict[str, list[str]] = {}
        for name, key in keys.items():
            rows.setdefault(str(key), []).append(f"`{name}`" if " " not in name else name)
        cells = ((", ".join(names), text) for text, names in rows.items())
        parts.append(f"## {title}\n\n{_table(('key', 'how tune imports it'), cells)}")
    return "\n".join(parts)


def keywords_module() -> str:
    """Return the source of the module that types the keywords of ``optimizer.tune``."""
    keywords = [option for option in OPTIONS if "python" in option.taken_by]
    return _MODULE + "".join(f"    {option.keyword}: {_annotation(option)}\n" for option in keywords)


def _option_cells(option: Option) -> tuple[str, ...]:
    value = ""
    if option.type is not None:
        value = ", ".join(f"`{choice}`" for choice in option.type.choices) or option.type.metavar
    flag = ", ".join(f"**`{flag}`**" if option.is_common else f"`{flag}`" for flag in option.flags)
    return flag, value, _plain(option.help_text()), ", ".join(option.taken_by)


def _command_section(command: str) -> str:
    """Return what ``tune COMMAND --help`` shows, with a link for options of ``tune run``."""
    parser: Parser = import_module(f"optimizer.cli.{command}").build_parser()
    description = " ".join((parser.description or "").split())
    parts = [f"## {parser.prog}\n", f"`{parser.usage}`\n", f"{_plain(description)}\n"]
    for title, actions in parser.shown_arguments().items():
        parts.append(_table((title, "meaning"), _argument_rows(actions)))
    if parser.epilog:
        parts.append(_TEXT.format(parser.epilog.rstrip()))
    return "\n".join(parts)


def _argument_rows(actions: Sequence[argparse.Action]) -> list[tuple[str, ...]]:
    """Return a row for each argument, and one for all options of ``tune run`` with the same help if they are many."""
    helps = {option.flag: _plain(option.help_text()) for option in OPTIONS}
    rows = [(action.option_strings, _argument_cells(action)) for action in actions]
    same = [flag for flags, (_, text) in rows for flag in flags if helps.get(flag) == text]
    if len(same) < 4:
        return [cells for _, cells in rows]
    own = [cells for flags, cells in rows if not set(flags) & set(same)]
    return [*own, (", ".join(f"`{flag}`" for flag in same), "As in [`tune run`](reference-options.md)")]


def _argument_cells(action: argparse.Action) -> tuple[str, ...]:
    """Return an argument as its help shows it, such as ``--clean [KIND ...]``, and the help text."""
    name = str(action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper()))
    values = {None: name, 0: "", "?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}
    words = filter(None, (", ".join(action.option_strings), values[action.nargs]))
    return f"`{' '.join(words)}`", _plain((action.help or "") % vars(action))


def _annotation(option: Option) -> str:
    if option.type is None:
        return "bool"
    annotation = f"{option.type.annotation} | Path" if option.type.is_path else option.type.annotation
    return f"list[{annotation}]" if option.repeatable else annotation


def _keys_of(name: str, section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of a section and of the sections in it, such as ``space.onnxruntime.graph_level``."""
    for key, field in section.model_fields.items():
        yield f"{name}.{key}", field
        if key == "onnxruntime":
            yield from _keys_of(f"{name}.{key}", OnnxRuntimeSection)
        elif key == "models":
            yield from _keys_of(f"{name}.{key}.MODEL", ModelSpaceSection)


def _profile_table(name: str, description: str, keys: Sequence[tuple[str, FieldInfo]]) -> str:
    rows = []
    for key, field in keys:
        text = field.description or ""
        if isinstance(field.default, int) and field.default:
            text += f" (default: {field.default})"
        example = f"`{flow(field.examples[0])}`" if field.examples else ""
        rows.append((f"`{key}`", _guide(key, _plain(text)), example))
    introduction = "" if [key for key, _ in keys] == [name] else f"{_guide(name, description)}.\n\n"
    return f"## {name}\n\n{introduction}{_table(('key', 'meaning', 'example'), rows)}"


def _guide(key: str, text: str) -> str:
    """Return ``text`` with a link to the page that explains the key, if there is one."""
    return f"{text} ([more]({GUIDES[key]}))" if key in GUIDES else text


def _plain(text: str) -> str:
    """Return ``text`` with a backslash before characters that Markdown takes for markup."""
    return re.sub("[*<]", r"\\\g<0>", text)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, (":--",) * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _attributes(documented: type) -> dict[str, str]:
    """Return the descriptions in the section Attributes of a docstring, by name, in Markdown."""
    section = inspect.cleandoc(documented.__doc__ or "").partition("\nAttributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", re.split(r"\n(?=\S)", section)[0], re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}


FILES: Final = {  # each generated file, below the root of the repository, and the function that returns its content
    Path("docs/reference-commands.md"): commands_page,
    Path("docs/reference-options.md"): reference_page,
    Path("docs/reference-profile.md"): profile_page,
    Path("docs/reference-files.md"): files_page,
    Path("docs/reference-model-analyzer.md"): model_analyzer_page,
    Path("optimizer/api/keywords.py"): keywords_module,
    Path("optimizer/model", SCHEMA_FILE.name): schema_text,
}


def main() -> None:
    """Write the files below the current folder."""
    for path, content in FILES.items():
        path.write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    main()
