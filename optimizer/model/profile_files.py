"""The files that ``tune init`` writes: a profile as YAML with comments, and the JSON Schema of profiles.

The YAML has every key with its description, and an example for each key that is not set. With the JSON Schema editors
complete and check profiles. ``python -m optimizer.cli.reference`` writes it to ``SCHEMA_FILE``; ``tune init`` copies
that file next to a profile.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from optimizer.core.safe_text import one_line
from optimizer.model.profile import GPU_DESCRIPTION, MAY_BE_EMPTY, SECTIONS, Profile
from optimizer.model.profile_schema import model_type

_COMMENT_WIDTH: Final = 100
_UNLIMITED: Final = 1 << 30  # characters of a line for YAML's writer
_GPU_EXAMPLE: Final = {"sla": {"p95": "5ms"}, "space": {"max_batch_size": [8, 16, 32]}}
# texts that need no quotes; off is a text for tune and in YAML 1.2
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*|[0-9]+(\.[0-9]+)?(us|ms|s)")
_NO_TEXT: Final = ("true", "false", "null", "yes", "no", "on", "y", "n")


def render_profile(
    tree: Mapping[str, Any], header: Iterable[str] = (), remarks: Mapping[str, Iterable[str]] | None = None
) -> str:
    """Return a profile with the keys of ``tree``, which holds plain values as ``Profile.tree`` returns them.

    A key that is not in ``tree`` is commented out. ``header`` are comments at the top of the file, and ``remarks``
    additional comments for the keys of the top level.
    """
    remarks = remarks or {}
    blocks = [_comments(header)]
    for name, field in Profile.model_fields.items():
        blocks.append(_key_lines(name, field, tree, remarks.get(name, ())))
    gpu = tree.get("gpu")
    entry = _entry("gpu", gpu, None) if gpu else _comment_out(_entry("gpu", _GPU_EXAMPLE, None))
    blocks.append([*_comments([GPU_DESCRIPTION]), *entry])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def flow(value: object) -> str:
    """Return ``value`` in YAML on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{flow(key)}: {flow(child)}' for key, child in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT:
            return value
        return str(yaml.safe_dump(value, default_style='"', allow_unicode=True, width=_UNLIMITED)).strip()
    return str(yaml.safe_dump(value)).partition("\n")[0]


def _key_lines(name: str, field: FieldInfo, values: Mapping[str, Any], remarks: Iterable[str] = ()) -> list[str]:
    """Return a key of a section with its description, commented out with an example if ``values`` lacks it."""
    value = values.get(name)
    if value is None and name in MAY_BE_EMPTY:
        value = {}
    section = SECTIONS.get(str(model_type(value)) if name == "model" else name)
    comments = _comments([field.description or "", *remarks])
    if value is not None and (value or section is None or name in MAY_BE_EMPTY):
        return [*comments, *_entry(name, value, section)]
    if section is not None:
        examples = {key: _example(inner) for key, inner in section.model_fields.items()}
        return [*comments, *_comment_out(_entry(name, examples, section))]
    return [*comments, f"# {name}: {flow(_example(field))}"]


def _entry(name: str, value: Any, section: type[BaseModel] | None) -> list[str]:
    """Return the lines of a key that is set; those of a ``section`` have descriptions."""
    if section is not None:
        lines = [line for key, field in section.model_fields.items() for line in _key_lines(key, field, value)]
        lines += [f"{flow(key)}: {flow(child)}" for key, child in value.items() if key not in section.model_fields]
    elif isinstance(value, Mapping) and value:
        lines = [line for key, child in value.items() for line in _entry(key, child, None)]
    else:
        return [f"{flow(name)}: {flow(value)}"]
    return [f"{flow(name)}:", *(f"  {line}" for line in lines)]


def _example(field: FieldInfo) -> object:
    assert field.examples, field
    return field.examples[0]


def _comments(texts: Iterable[str]) -> list[str]:
    lines = (line for text in texts for line in textwrap.wrap(one_line(text), _COMMENT_WIDTH))
    return [f"# {line}" for line in lines]


def _comment_out(lines: Iterable[str]) -> list[str]:
    return [f"# {line}" for line in lines]


SCHEMA_FILE: Final = Path(__file__).with_name("profile.schema.json")
COPY_NAME: Final = "tritune-profile.schema.json"
MODELINE: Final = f"yaml-language-server: $schema={COPY_NAME}"  # comment that names the schema to editors
_DIALECT: Final = "http://json-schema.org/draft-07/schema#"  # the newest one that YAML's language server knows well
_REFERENCE: Final = "#/definitions/"

Schema: TypeAlias = dict[str, Any]


def schema_text() -> str:
    """Return the JSON Schema of profiles as the content of ``SCHEMA_FILE``."""
    return json.dumps(profile_json_schema(), indent=2, ensure_ascii=False) + "\n"


def profile_json_schema() -> Schema:
    """Return the JSON Schema of profiles, from the pydantic models and the descriptions of their fields."""
    schema = _rewritten(Profile.model_json_schema(ref_template=f"{_REFERENCE}{{model}}"), _simplified)
    definitions: dict[str, Schema] = schema["$defs"]
    for definition in definitions.values():
        definition.pop("description", None)  # the docstring of the class is for developers
    properties: dict[str, Schema] = schema["properties"]
    for name in MAY_BE_EMPTY:
        properties[name] = _or_null(properties[name])
    incomplete = sorted(name for name, definition in definitions.items() if "required" in definition)
    for name in incomplete:  # the keys of the gpu section are added to those above
        definitions[f"Partial{name}"] = {key: value for key, value in definitions[name].items() if key != "required"}
    gpu = {
        "description": GPU_DESCRIPTION,
        "type": ["object", "null"],
        "properties": _rewritten(properties, partial(_with_partial_sections, names=incomplete)),
        "additionalProperties": False,
    }
    return {
        "$schema": _DIALECT,
        "title": "Profile of tune",
        "type": "object",
        "properties": {**properties, "gpu": gpu},
        "required": schema["required"],
        "additionalProperties": False,
        "definitions": definitions,
    }


def _rewritten(node: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    """Return a copy of ``node`` in which ``rewrite`` has replaced each object, the inner ones first."""
    if isinstance(node, list):
        return [_rewritten(element, rewrite) for element in node]
    if isinstance(node, dict):
        return rewrite({key: _rewritten(value, rewrite) for key, value in node.items()})
    return node


def _simplified(schema: Schema) -> Schema:
    """Return ``schema`` without pydantic's titles and empty defaults."""
    if len(schema.get("allOf", ())) == 1:  # pydantic before 2.9 wraps a reference that has a description
        schema = {**schema["allOf"][0], **{key: value for key, value in schema.items() if key != "allOf"}}
    return {
        key: value
        for key, value in schema.items()
        # a default that is a mapping is a section without values
        if not (key == "title" and isinstance(value, str))
        and not (key == "default" and (not value or isinstance(value, dict)))
    }


def _with_partial_sections(schema: Schema, names: Collection[str]) -> Schema:
    """Return ``schema`` with references to the sections ``names`` replaced by those without required keys."""
    schema = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
    name = str(schema.get("$ref", "")).removeprefix(_REFERENCE)
    return {**schema, "$ref": f"{_REFERENCE}Partial{name}"} if name in names else schema


def _or_null(schema: Schema) -> Schema:
    if "$ref" not in schema:  # an optional section, which may be null already
        return schema
    described = {key: value for key, value in schema.items() if key != "$ref"}
    return {"anyOf": [{"$ref": schema["$ref"]}, {"type": "null"}], **described}
