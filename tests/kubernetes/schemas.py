"""Strict validation of manifests of Kubernetes against its published schemas, of which this folder has pinned copies.

A key that a schema does not have is an error. So is a keyword of the schemas that is not implemented here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "schemas"
_KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
_IGNORED = {"format", "default", "description"}


@cache
def kinds() -> dict[str, dict[str, Any]]:
    """Return the schema of each kind of manifest: `batch/v1 Job`, and of the definitions that they refer to."""
    return {name: schema for path in FOLDER.glob("*.json") for name, schema in json.loads(path.read_text()).items()}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with a manifest, an entry for each place; empty if it is valid."""
    name = f"{manifest.get('apiVersion')} {manifest.get('kind')}"
    if name not in kinds():
        return [f"{name} is no known kind"]
    return list(_problems(manifest, kinds()[name], name.split()[1]))


def _problems(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    if "not pinned" in schema:
        yield f"{where}: the schema of this key is not among the pinned ones ({FOLDER}/README.md)"
    kind = schema.get("type")
    if kind and (not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{where}: {value!r} is not of type {kind}"
        return
    for keyword, meant in schema.items():
        match keyword:
            case "$ref":
                yield from _problems(value, kinds()[meant], where)
            case "x-kubernetes-int-or-string":
                if isinstance(value, bool) or not isinstance(value, int | str):
                    yield f"{where}: {value!r} is neither a number nor a text"
            case "oneOf" | "anyOf":
                if all(list(_problems(value, each, where)) for each in meant):
                    yield f"{where}: {value!r} is none of {meant}"
            case "enum":
                if value not in meant:
                    yield f"{where}: {value!r} is not one of {meant}"
            case "pattern":
                if isinstance(value, str) and not re.search(meant, value):
                    yield f"{where}: {value!r} does not match {meant}"
            case "minimum" | "minLength" | "minItems" | "minProperties":
                if _size(value) < meant:
                    yield f"{where}: {value!r} is below {meant}"
            case "maximum" | "maxLength" | "maxItems" | "maxProperties":
                if _size(value) > meant:
                    yield f"{where}: {value!r} is above {meant}"
            case "required":
                yield from (f"{where}: {key} is missing" for key in meant if key not in value)
            case "items":
                for number, each in enumerate(value if isinstance(value, list) else []):
                    yield from _problems(each, meant, f"{where}[{number}]")
            case "type" | "properties" | "additionalProperties" | "not pinned":
                pass
            case _:
                assert keyword in _IGNORED, f"{where}: the keyword {keyword} of schemas is not implemented"
    if isinstance(value, dict) and "$ref" not in schema and ("properties" in schema or schema.get("type") == "object"):
        yield from _keys(value, schema, where)


def _keys(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", False)
    for key, each in value.items():
        if key in known:
            yield from _problems(each, known[key], f"{where}.{key}")
        elif others:
            yield from _problems(each, others, f"{where}.{key}")
        else:
            yield f"{where}: there is no key {key!r}"


def _size(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else len(value)
