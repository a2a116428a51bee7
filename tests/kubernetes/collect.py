"""Pinning of the schemas: writes schemas/*.json anew, with the keys that the manifests in examples/kubernetes use.

    python -m tests.kubernetes.collect JOBSET TRAINER DEFINITIONS

JOBSET and TRAINER are clones of the repositories, and DEFINITIONS is the file of the package, which schemas/README.md
names with their versions.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.pods import documents
from tests.kubernetes.schemas import FOLDER

MANIFESTS = FOLDER.parents[2] / "examples" / "kubernetes"
CUSTOM = {
    "jobset": ["config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"],
    "trainer": [f"manifests/base/crds/trainer.kubeflow.org_{kind}.yaml" for kind in ("trainjobs", "trainingruntimes")],
}
_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_PLACE = "#/$defs/"
_COPIED = {"enum", "pattern", "required", "x-kubernetes-int-or-string"} | {
    f"{bound}{of}" for bound in ("min", "max") for of in ("imum", "Length", "Items", "Properties")
}

Schema = dict[str, Any]


class Pins:
    """Pinned copies of schemas, of what manifests use of them.

    Args:
        definitions: the schemas that others refer to.
    """

    def __init__(self, definitions: dict[str, Schema]) -> None:
        self._definitions = definitions
        self._values: defaultdict[str, list[Any]] = defaultdict(list)
        """The parts of manifests that each definition has been used for."""

    def use(self, schema: Schema, value: Any) -> None:
        """Note which definitions a schema needs for a part of a manifest."""
        if "$ref" in schema:
            name = schema["$ref"].removeprefix(_PLACE)
            self._values[name].append(value)
            self.use(self._definitions[name], value)
        for each in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
            self.use(each, value)
        for each in value if isinstance(value, list) else ():
            self.use(schema.get("items", {}), each)
        for key, each in value.items() if isinstance(value, dict) else ():
            self.use(schema.get("properties", {}).get(key) or schema.get("additionalProperties", {}), each)

    def pinned(self, schema: Schema, values: Sequence[Any]) -> Schema:
        """Return the copy of a schema that these parts of manifests use."""
        if "$ref" in schema:
            return {"$ref": schema["$ref"].removeprefix(_PLACE)}
        maps = [value for value in values if isinstance(value, dict)]
        lists = [value for value in values if isinstance(value, list)]
        copy: Schema = {}
        for keyword, meant in schema.items():
            match keyword:
                case "type":
                    copy[keyword] = meant if isinstance(meant, str) else next(each for each in meant if each != "null")
                case "properties":
                    parts = {key: [each[key] for each in maps if key in each] for key in meant}
                    copy[keyword] = {
                        key: self.pinned(meant[key], of_key) if of_key else {"not pinned": True}
                        for key, of_key in parts.items()
                    }
                case "additionalProperties" if isinstance(meant, dict):
                    copy[keyword] = self.pinned(meant, [each for value in maps for each in value.values()])
                case "items":
                    copy[keyword] = self.pinned(meant, [each for value in lists for each in value])
                case "oneOf" | "anyOf":
                    copy[keyword] = [self.pinned(each, values) for each in meant]
                case _ if keyword in _COPIED:
                    copy[keyword] = meant
        return copy

    def definitions(self, kinds: Mapping[str, str]) -> dict[str, Schema]:
        """Return the copies of all definitions that have been used; `kinds` has the names of those that are kinds."""
        return {
            kinds.get(name, name): self.pinned(self._definitions[name], self._values[name]) for name in self._values
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("jobset", "trainer", "definitions"):
        parser.add_argument(name, type=Path)
    sources = vars(parser.parse_args())
    definitions = json.loads(sources["definitions"].read_text())["$defs"]
    pins = Pins(definitions)
    used: defaultdict[str, list[Any]] = defaultdict(list)
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for kind, manifest in documents(path).items():
            used[f"{manifest['apiVersion']} {kind}"].append(manifest)
    for file, paths in CUSTOM.items():
        pinned = {}
        for path in paths:
            custom = yaml.safe_load((sources[file] / path).read_text())["spec"]
            (version,) = custom["versions"]
            schema = version["schema"]["openAPIV3Schema"]
            schema["properties"]["metadata"] = {"$ref": _META}
            name = f"{custom['group']}/{version['name']} {custom['names']['kind']}"
            for manifest in used[name]:
                pins.use(schema, manifest)
            pinned[name] = pins.pinned(schema, used.pop(name))
        write(file, pinned)
    kinds = {_definition_of(name, definitions): name for name in used}
    for definition, name in kinds.items():
        for manifest in used[name]:
            pins.use({"$ref": definition}, manifest)
    write("kubernetes", pins.definitions(kinds))


def _definition_of(kind: str, definitions: dict[str, Schema]) -> str:
    """Return the name of the definition of a kind, such as `batch/v1 Job`."""
    version, _, name = kind.partition(" ")
    group = version.rpartition("/")[0]
    meant = {"group": group, "kind": name, "version": version.rpartition("/")[2]}
    (found,) = (key for key, each in definitions.items() if meant in each.get("x-kubernetes-group-version-kind", ()))
    return found


def write(file: str, schemas: dict[str, Schema]) -> None:
    """Write the pinned schemas of a source."""
    (FOLDER / f"{file}.json").write_text(json.dumps(schemas, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
