"""Reading of a file of another program, whatever its kind, and its translation into flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from megalite.errors import ConfigurationError
from megalite.extras.translation import deepspeed, frameworks, neox
from megalite.extras.translation.environment import add_environment
from megalite.extras.translation.keys import is_deepspeeds
from megalite.extras.translation.megatron_deepspeed import add_megatron_deepspeed
from megalite.extras.translation.report import Report
from megalite.extras.translation.script import TORCHTITAN, Launch, read_script
from megalite.extras.translation.shell_expansion import LARGEST
from megalite.extras.translation.yaml_settings import from_section, read_yaml
from megalite.small_files import parse_json, read_small_file, reason

_OWN = (
    *("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "finetune_gpt.py"),
    *("megalite-pretrain", "megalite-pretrain-hybrid", "megalite-finetune"),
)
_OTHER_MODELS = re.compile(r"pretrain_(bert|t5|ict|retro|vlm|vision\w*|mimo)\.py")

_READ = (
    "what is read: a launch script (of Megatron-LM, Megatron-DeepSpeed, or another that has Megatron-LM's flags), the "
    "YAML of one of Megatron-LM's tests (MODEL_ARGS: flags), of GPT-NeoX or of Primus, and a JSON of DeepSpeed"
)
_TORCHTITAN = (
    f"settings of torchtitan are not translated ({_READ}); megalite-pretrain answers each key that it knows, such as "
    "--training.local_batch_size, with the flag to use"
)
_ACCELERATE = f"settings of Accelerate are not translated ({_READ}); docs/migration.md has their flags"
_OF_SHELLS = ("", ".sh", ".bash", ".ksh", ".slurm", ".sbatch", ".lsf", ".pbs")
"""Suffixes of files that are launch scripts by their names."""
_IN_PYTHON = re.compile(r"^(?:from [\w.]+ import |import \w[\w., ]*$|class \w+|def \w+\()", re.MULTILINE)
_PYTHON = (
    f"is Python, which is not executed ({_READ}); torchtitan and Megatron-Bridge keep configurations in Python: give "
    "megalite-pretrain the flags that they stand for, which docs/migration.md has"
)


def translate(name: str, variables: Mapping[str, str], ranks: int | None = None) -> Report:
    """Return the translation of a file.

    Args:
        variables: values that take precedence over those of a launch script.
        ranks: number of ranks, if the file does not say it; data-parallel ones for DeepSpeed's JSON.

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


def translate_command(text: str, variables: Mapping[str, str], ranks: int | None = None) -> Report:
    """Return the translation of a command as it is typed into a shell. The arguments are those of `translate`.

    Raises:
        ConfigurationError: it starts no training program.
    """
    return _translate(text, ".sh", variables, ranks)


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
    of_yaml = suffix in (".yaml", ".yml")
    if suffix == ".json" or (text.lstrip().startswith("{\n") and not of_yaml):
        try:
            settings = parse_json(text)
        except ValueError as error:
            raise ConfigurationError(f"not a DeepSpeed configuration: {reason(error)}") from error
        if not isinstance(settings, dict) or not settings:
            raise ConfigurationError("not a DeepSpeed configuration: expected a JSON object with keys")
        return _from_settings(settings, variables, ranks)
    if of_yaml or re.search(r"^(MODEL_ARGS|fsdp_config|distributed_type):", text, re.MULTILINE):
        settings, notes = read_yaml(text)
        found = _from_settings(settings, variables, ranks)
        found.notes[:0] = notes
        return found
    if suffix == ".toml":
        raise ConfigurationError(_TORCHTITAN)
    if suffix == ".py" or (_IN_PYTHON.search(text) and not text.startswith("#!/bin/")):
        if report := frameworks.translate(text):
            return report
        raise ConfigurationError(_PYTHON)
    own = {"HOME": str(Path.home())} | ({} if re.search(r"\b(cd|pushd)\b", text) else {"PWD": str(Path.cwd())})
    try:
        return _from_launch(read_script(text, own | dict(variables)), ranks)
    except ConfigurationError as error:
        if suffix in _OF_SHELLS or text.startswith("#!"):
            raise
        raise ConfigurationError(f"{error} ({_READ})") from error


def _from_settings(settings: Mapping[str, Any], variables: Mapping[str, str], ranks: int | None) -> Report:
    """Translate a mapping by the program whose keys it has. Raises ConfigurationError if none is known."""
    if "MODEL_ARGS" not in settings:
        if "fsdp_config" in settings or "distributed_type" in settings:
            raise ConfigurationError(_ACCELERATE)
        if neox.has_keys_of_neox(settings):
            return neox.translate(settings, ranks)
        if 2 * sum(map(is_deepspeeds, settings)) >= len(settings):
            return deepspeed.translate(settings, ranks)
    report = from_section(settings, variables)
    if report is None:
        raise ConfigurationError(f"its keys are of no program that is known ({_READ})")
    return report


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
        program=launch.program,
    )
    if launch.uncounted and ranks and "--ranks" in launch.uncounted and ranks % (launch.nodes or 1) == 0:
        report.per_node = ranks // (launch.nodes or 1)
    elif launch.uncounted:
        report.missing.insert(0, launch.uncounted)
    if re.search(r"horovodrun\b.* --?(min-n|max-n|host-discovery)", " ".join(launch.launcher)):
        report.refused.append(
            "horovodrun --min-np, --max-np, --host-discovery-script: elastic runs are torchrun's --nnodes "
            "MIN:MAX and --max-restarts N, with --save DIR --resume auto (docs/launchers.md)"
        )
    program = PurePath(launch.program).name
    if program == TORCHTITAN:
        report.refused.append(_TORCHTITAN)
        return report
    if _OTHER_MODELS.fullmatch(program):
        report.refused.append(f"{program}: megalite pre-trains GPT-like models (pretrain_gpt.py)")
    elif program not in _OWN:
        report.notes.append(f"the flags of {program} are taken to be those of pretrain_gpt.py")
    add_environment(launch.environment, report, launch.unclear)
    report.add_megatron(add_megatron_deepspeed(launch.argv, report))
    return report
