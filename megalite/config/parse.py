"""Conversion of flags to a `RunConfig`: Megatron-LM's spellings are translated, then `tyro` builds the dataclasses."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from megalite.config import megatron_flags
from megalite.config.activations import has_exact_form
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.command_line import flag_groups, refuse_blank
from megalite.config.run import RunConfig, fields_by_name, section_types
from megalite.config.validate import check_numbers, without_idle_flags
from megalite.config.warnings import config_warnings, masked_loss_warnings
from megalite.config.yaml_file import Sections, missing_fields, nearest, read_file, read_sections
from megalite.errors import ConfigurationError
from megalite.small_files import shown

_DESCRIPTION = (
    "Pre-train a GPT. The flags are Megatron-LM's: those not listed here are accepted with a note if they change "
    "nothing, and refused with the reason otherwise. --config FILE reads a YAML file of the same fields by section "
    "(model, parallel, ...), which flags override. Short names: --tp, --pp, --cp, --ep, --etp."
)


@dataclass(frozen=True)
class ParsedArguments:
    """Configuration that a command line describes, and lines to show at the start, such as for unused flags."""

    config: RunConfig
    notes: tuple[str, ...]


SavedFields = Callable[[CheckpointConfig, str | None], Sections]
"""Function that returns the fields of the model and of the tokenizer in the checkpoint that a run starts from. Its
second argument is the tokenizer type that the run names, if any: the checkpoint may have another one."""


def parse_arguments(argv: Sequence[str], saved_fields: SavedFields | None = None) -> ParsedArguments:
    """Return the configuration of a command line; relations between fields are checked later, by `validate`.

    Args:
        argv: the command line without the program's name.
        saved_fields: function that returns the fields of a checkpoint. It is called with --use-checkpoint-args, or if
            --load is a Hugging Face folder, for fields that are not given.

    Raises:
        ConfigurationError: a flag is unknown, refused, missing or has a value of the wrong type; one line per flag.
        SystemExit: 0 after --help.
    """
    sections: Sections = {name: {} for name in section_types()}
    if "-h" in argv or "--help" in argv:
        _run_tyro(["--help"], sections)
    tokens: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    given: dict[str, list[str]] = {}
    for flag, values in flag_groups(argv):
        try:
            refuse_blank(flag, values)
            if flag == "config":
                path = _single(flag, values)
                for name, fields in read_sections(read_file(path), path).items():
                    sections[name] |= fields
                continue
            given[megatron_flags.tables()["aliases"].get(flag, flag)] = values
            arguments, note = _settle(flag, values)
            tokens += arguments
            notes += [note] if note else []
        except ConfigurationError as error:
            problems.append(str(error))
    if saved_fields is not None and not problems and _takes_saved_fields(sections, given):
        kind = given.get("tokenizer-type", [sections["data"].get("tokenizer_type")])[0]
        for section, saved in saved_fields(_loading(sections, given), kind).items():
            sections[section] = saved | sections[section]
    fields_given = {flag.replace("-", "_") for flag in given}
    missing = ["--" + name.replace("_", "-") for name in missing_fields(sections) if name not in fields_given]
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
        load = next(iter(given.get("load", ())), sections["checkpoint"].get("load"))
        if load not in (None, "None") and not CheckpointConfig(load=load).loads_huggingface:
            problems.append(f"(--load {load} has no config.json, which describes the network in a Hugging Face folder)")
    if problems:
        raise ConfigurationError("\n".join(problems))
    config = _build(tokens, sections)
    check_numbers(config)
    config, idle = without_idle_flags(_applied_last(config, given))
    told = () if megatron_flags.CALCULATE_PER_TOKEN_LOSS in given else masked_loss_warnings(config)
    return ParsedArguments(config, (*notes, *idle, *config_warnings(config), *told))


def _applied_last(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Return `config` after the flags whose effect depends on all other flags."""
    parallel, model = config.parallel, config.model
    if megatron_flags.USE_MEGATRON_FSDP in given and parallel.data_parallel_sharding_strategy is None:
        parallel = replace(parallel, data_parallel_sharding_strategy="optim_grads_params")
    if megatron_flags.NO_POSITION_EMBEDDING in given and model.position_embedding_type == "learned_absolute":
        model = replace(model, position_embedding_type="none")
    by_tanh = has_exact_form(model.activation) and not {"openai-gelu", "no-exact-gelu"} & set(given)
    if megatron_flags.NO_BIAS_GELU_FUSION in given and by_tanh:
        model = replace(model, exact_gelu=True)
    return replace(config, parallel=parallel, model=model)


def _takes_saved_fields(sections: Sections, given: Mapping[str, Sequence[str]]) -> bool:
    if _loading(sections, given).loads_huggingface:  # its network cannot have been given by the flags of an earlier run
        return True
    flags = [flag for flag in given if flag.endswith("use-checkpoint-args")]
    return flags[-1] == "use-checkpoint-args" if flags else sections["checkpoint"].get("use_checkpoint_args", False)


def _loading(sections: Sections, given: Mapping[str, Sequence[str]]) -> CheckpointConfig:
    """Return the options that decide which checkpoint a run starts from, before the other options are known."""
    names = [name for name in ("save", "load", "resume", "ckpt-step") if name in given]
    fields: dict[str, Any] = {name.replace("-", "_"): given[name][0] for name in names}
    fields = {name: None if value == "None" else value for name, value in fields.items()}
    if fields.get("ckpt_step") is not None:
        fields["ckpt_step"] = int(fields["ckpt_step"])
    return CheckpointConfig(**sections["checkpoint"] | fields)


def _settle(flag: str, values: list[str]) -> tuple[list[str], str | None]:
    """Translate a flag. Returns arguments for tyro, or no arguments and a note that the flag changes nothing."""
    if not flag:
        raise ConfigurationError(f"{shown(' '.join(values))} comes before the first flag")
    tables = megatron_flags.tables()
    if flag in (*tables["shorthands"], megatron_flags.NO_POSITION_EMBEDDING, megatron_flags.USE_MEGATRON_FSDP):
        return [*tables["shorthands"].get(flag, ()), *_none(flag, values)], None
    meant = tables["value_shorthands"].get(flag, {}).get(" ".join(values))
    if meant is not None:
        return list(meant), None
    flag = tables["aliases"].get(flag, flag)
    places = fields_by_name()
    if flag.replace("-", "_") in places:
        return _field_arguments(flag, places[flag.replace("-", "_")].kind, values), None
    positive = places.get(flag.removeprefix("no-").replace("-", "_"))
    if positive is not None and positive.kind is bool:
        return [f"--{flag}", *_none(flag, values)], None
    note = megatron_flags.settled(flag, values)
    if note is None:
        known = [name.replace("_", "-") for name in places] + megatron_flags.names()
        known += ["no-" + name.replace("_", "-") for name, place in places.items() if place.kind is bool]
        raise ConfigurationError(f"unknown flag --{flag}{nearest(flag, known, '--', megatron_flags.refusal)}")
    return [], note


def _field_arguments(flag: str, kind: Any, values: list[str]) -> list[str]:
    if kind is bool:
        return [f"--{flag}", *_none(flag, values)]
    for option in (kind, *get_args(kind)):
        if get_origin(option) is tuple:
            _check_several(flag, get_args(option), values)
            return [f"--{flag}", *values]
    value = _single(flag, values)
    reason = megatron_flags.refused_value(flag, value)
    if reason:
        raise ConfigurationError(f"--{flag} {value} {reason}")
    _check_number(flag, kind, value)
    _check_choice(flag, kind, value)
    return [f"--{flag}={value}"]


def _check_several(flag: str, kinds: tuple[Any, ...], values: Sequence[str]) -> None:
    """Check the number of values and each value: tyro's own message would be about types."""
    any_number = kinds[-1] is Ellipsis
    if not any_number and len(values) != len(kinds) and list(values) != ["None"]:
        raise ConfigurationError(f"--{flag} needs {len(kinds)} values, got {' '.join(values)[:100] or 'none'}")
    for value in values:
        _check_number(flag, kinds[0], value)


def _check_number(flag: str, kind: Any, value: str) -> None:
    """Check a number: tyro's own message would be about types, and would show a too large float as inf."""
    for number, wanted in ((int, "a whole number"), (float, "a finite number")):
        if number is kind or (number in get_args(kind) and value != "None"):
            try:
                if math.isfinite(number(value)):
                    continue
            except (ValueError, OverflowError):
                pass
            raise ConfigurationError(f"--{flag} {shown(value)}: expected {wanted}")


def _check_choice(flag: str, kind: Any, value: str) -> None:
    """Check a choice: tyro's own message would list the choices in any order, with None among them."""
    for option in (kind, *get_args(kind)):
        choices = list(get_args(option)) if get_origin(option) is Literal else []
        if choices and value not in (*choices, *(["None"] * (option is not kind))):
            raise ConfigurationError(
                f"--{flag} {shown(value)}: expected one of {', '.join(choices)}{nearest(value, choices)}"
            )


def _none(flag: str, values: list[str]) -> list[str]:
    if values:
        raise ConfigurationError(f"--{flag} takes no value, got {shown(' '.join(values))} (--no-... turns a flag off)")
    return []


def _single(flag: str, values: list[str]) -> str:
    if len(values) != 1:
        raise ConfigurationError(f"--{flag} needs one value, got {' '.join(values)[:100] or 'none'}")
    return values[0]


def _build(tokens: list[str], sections: Sections) -> RunConfig:
    """Return tyro's result; convert its exit to a ConfigurationError of one line."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return _run_tyro(tokens, sections)
    except SystemExit as ending:
        if ending.code != 2:  # not an exit of tyro: the launcher is ending this rank
            raise
        raise ConfigurationError(_first_paragraph(message.getvalue())) from None


def _run_tyro(tokens: list[str], sections: Sections) -> RunConfig:
    """Return the configuration of flags that override the fields of YAML. Fields that are required and not in YAML must
    be given by flags."""
    import tyro  # imported here: all of megalite imports this package, but few programs parse a configuration

    given = {name: dict(values) for name, values in sections.items()}
    for name in missing_fields(sections):
        given[fields_by_name()[name].section][name] = tyro.MISSING
    defaults = RunConfig(**{name: kind(**given[name]) for name, kind in section_types().items()})
    style = (tyro.conf.OmitArgPrefixes,)
    return tyro.cli(RunConfig, args=tokens, default=defaults, description=_DESCRIPTION, config=style)


def _first_paragraph(box: str) -> str:
    """Return the text of tyro's error box up to its first blank line or rule: the error without the advice."""
    lines = []
    for line in box.splitlines()[1:]:
        text = line.strip("│ ")
        if not text or text.startswith("─"):
            break
        lines.append(text)
    return " ".join(lines)
