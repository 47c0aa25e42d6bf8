"""The JSON Schema of profiles, with which editors complete and check them.

``python -m optimizer.cli.reference`` writes it to ``SCHEMA_FILE``. ``tune init`` copies that file next to a profile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from optimizer.model.profile import GPU_DESCRIPTION, MAY_BE_EMPTY, Profile

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
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and _is_empty(value))
    }


def _is_empty(default: object) -> bool:
    """Return whether a default sets nothing: no value, or a section without values."""
    return not default or isinstance(default, dict)


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
