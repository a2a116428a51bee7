"""Reading of a file of another program, whatever its kind, and its translation into flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from megalite.config.run import fields_by_name
from megalite.config.yaml_file import LimitedLoader
from megalite.errors import ConfigurationError
from megalite.extras.translation import deepspeed
from megalite.extras.translation.environment import KEPT
from megalite.extras.translation.report import Report
from megalite.extras.translation.script import TORCHTITAN, Launch, read_script
from megalite.extras.translation.shell_expansion import LARGEST
from megalite.small_files import parse_json, read_small_file, reason, shown

_OTHER_MODELS = re.compile(r"pretrain_(bert|t5|ict|retro|vlm|vision\w*|mamba|hybrid|mimo)\.py")

_READ = "a launch script of Megatron-LM, the YAML of one of its tests (MODEL_ARGS: flags), or a JSON of DeepSpeed"
_TORCHTITAN = (
    f"settings of torchtitan are not translated: give {_READ}; megalite-pretrain answers each key that it knows, "
    "such as --training.local_batch_size, with the flag to use"
)
_ACCELERATE = f"settings of Accelerate are not translated: give {_READ}; docs/migration.md has their flags"


def translate(name: str, variables: Mapping[str, str], ranks: int | None = None) -> Report:
    """Return the translation of a file.

    Args:
        variables: values that take precedence over those of a launch script.
        ranks: number of ranks, if the file does not say it; data-parallel ones for DeepSpeed's.

    Raises:
        ConfigurationError: the file cannot be read, is none of those that can be translated, or does not mention one of
            the variables.
    """
    try:
        text = _text(name)
        if unknown := [each for each in variables if not _mentions(text, each)]:
            raise ConfigurationError(f"--set {unknown[0]}={variables[unknown[0]]}: there is no such variable in it")
        return _translate(text, Path(name).suffix, variables, ranks)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _mentions(text: str, variable: str) -> bool:
    """Tell whether a text may use a variable, or any argument if it is a number."""
    uses = r"\$\{?[\d@*#]" if variable.isdecimal() else "HOME|~" if variable == "HOME" else rf"\b{variable}\b"
    return bool(re.search(uses, text))


def _text(name: str) -> str:
    try:
        text = read_small_file(Path(name), largest=LARGEST).decode()
    except UnicodeDecodeError:
        raise ConfigurationError("is not a text") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(reason(error)) from error
    if not text.strip():
        raise ConfigurationError("is empty")
    return text


def _translate(text: str, suffix: str, variables: Mapping[str, str], ranks: int | None) -> Report:
    """Translate a text by its kind. Raises ConfigurationError for kinds that are not read."""
    if suffix == ".json" or text.lstrip().startswith("{\n"):
        try:
            settings = parse_json(text)
        except ValueError as error:
            raise ConfigurationError(f"not a DeepSpeed configuration: {reason(error)}") from error
        if not isinstance(settings, dict) or not settings:
            raise ConfigurationError("not a DeepSpeed configuration: expected a JSON object with keys")
        return deepspeed.translate(settings, ranks)
    if suffix in (".yaml", ".yml") or re.search(r"^(MODEL_ARGS|fsdp_config|distributed_type):", text, re.MULTILINE):
        return _from_yaml(_read_yaml(text), variables)
    if suffix == ".toml":
        raise ConfigurationError(_TORCHTITAN)
    own = {"HOME": str(Path.home())} | ({} if re.search(r"\b(cd|pushd)\b", text) else {"PWD": str(Path.cwd())})
    return _from_launch(read_script(text, own | dict(variables)), ranks)


def _from_launch(launch: Launch, ranks: int | None) -> Report:
    """Translate the last launch that a script has made, with its program and its flags."""
    report = Report(
        notes=list(launch.notes),
        missing=list(launch.problems),
        nodes=launch.nodes,
        per_node=launch.processes_per_node,
        whole=True,
        launcher=launch.launcher,
        shell=launch.shell,
    )
    if launch.uncounted and ranks and "--ranks" in launch.uncounted and ranks % (launch.nodes or 1) == 0:
        report.per_node = ranks // (launch.nodes or 1)
    elif launch.uncounted:
        report.missing.insert(0, launch.uncounted)
    program = PurePath(launch.program).name
    if program == TORCHTITAN:
        report.refused.append(_TORCHTITAN)
        return report
    if _OTHER_MODELS.fullmatch(program):
        report.refused.append(f"{program}: megalite pre-trains GPT-like models (pretrain_gpt.py)")
    elif program not in ("pretrain_gpt.py", "megalite-pretrain"):
        report.notes.append(f"the flags of {program} are taken to be those of pretrain_gpt.py")
    _add_environment(launch.environment, report, launch.unclear)
    report.add_megatron(launch.argv)
    return report


def _add_environment(environment: Mapping[str, str], report: Report, unclear: Mapping[str, str] | None = None) -> None:
    left = [name for name in environment if name not in KEPT]
    if left:
        report.notes.append(f"not kept: {', '.join(left)}; set what your machine needs of them yourself")
    for name, value in environment.items():
        if name in KEPT:
            if unclear and name in unclear:
                report.missing.append(unclear[name])
            else:
                report.environment[name] = value


def _read_yaml(text: str) -> dict[str, Any]:
    """Return a mapping of texts, numbers and mappings of these; a key twice in a mapping is an error."""
    try:
        loader = LimitedLoader(text)
        node = loader.get_single_node()
        value = _value(loader, node) if isinstance(node, yaml.MappingNode) else None
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"not YAML that can be translated: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"not a mapping of keys: expected {_READ}")
    return value


def _value(loader: LimitedLoader, node: yaml.Node) -> Any:
    """Return a node as Python values. Raises ConfigurationError for a key that is given twice."""
    if not isinstance(node, yaml.MappingNode):
        try:
            return loader.value_of(node)
        except TypeError:  # such as a list of mappings, in a part that is not read
            return None
    found: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value in found:
            raise ConfigurationError(f"line {key.start_mark.line + 1}: {shown(key.value)} is given twice or is no name")
        found[key.value] = _value(loader, value)
    return found


def _from_yaml(settings: Mapping[str, Any], variables: Mapping[str, str]) -> Report:
    """Translate the YAML of one of Megatron-LM's tests. Raises ConfigurationError for any other."""
    flags = settings.get("MODEL_ARGS")
    if isinstance(flags, Mapping) and flags:
        environment = settings.get("ENV_VARS")
        given = {name: str(value) for name, value in (environment if isinstance(environment, Mapping) else {}).items()}
        report = Report(whole=True)
        _add_environment(given, report)
        words = [word for name, value in flags.items() for word in _words(name, value, variables, report)]
        report.add_megatron(words)
        return report
    if "fsdp_config" in settings or "distributed_type" in settings:
        raise ConfigurationError(_ACCELERATE)
    raise ConfigurationError(f"no YAML that is translated: expected {_READ}")


def _words(flag: str, value: Any, variables: Mapping[str, str], report: Report) -> list[str]:
    """Return a flag of a test with its values: true means none, false no flag; lists are also written as "[a b]"."""
    if not flag.startswith("--"):
        raise ConfigurationError(f"MODEL_ARGS: expected a flag such as --num-layers, got {shown(flag)}")
    if value is True or value is None:
        return [flag]
    if value is False:
        return []
    if isinstance(value, Mapping):
        raise ConfigurationError(f"MODEL_ARGS: {flag} has a mapping as its value")
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    names = re.findall(r"\$\{?(\w+)\}?", text)
    report.missing += [f"{flag} needs ${name}: give --set {name}=VALUE" for name in names if name not in variables]
    text = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: variables.get(found[1] or found[2], found[0]), text)
    place = fields_by_name().get(flag[2:].replace("-", "_"))
    listed = re.fullmatch(r"\[(.*)\]", text)
    if listed or "tuple" in str(place.kind if place else ""):
        return [flag, *(listed[1] if listed else text).replace(",", " ").split()]
    return [flag, text]
