"""Conversion of flags to a `RunConfig`: Megatron-LM's spellings are translated, and values converted to their types."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megalite.config import foreign_flags, megatron_flags
from megalite.config.activations import has_exact_form
from megalite.config.checkpoint import CheckpointConfig, checkpoints_in, is_url
from megalite.config.command_line import asked_help, flag_groups, refuse_blank
from megalite.config.fields import flag_of
from megalite.config.idle_flags import without_idle_flags
from megalite.config.layer_specs import NEXT_STAGE, PATTERN_FLAG, SPARSE_LETTER, count_of_pattern
from megalite.config.megatron_flags import Note
from megalite.config.megatron_latents import RopeType, latent_notes, with_megatrons_rotation
from megalite.config.near_checkpoints import folders_near
from megalite.config.pipeline_layout import STAGE_FIELDS, with_stages_of_pattern
from megalite.config.prediction import with_depths_of_pattern
from megalite.config.run import RunConfig, fields_by_name, section_types
from megalite.config.validate import check_numbers
from megalite.config.warnings import config_warnings
from megalite.config.yaml_file import Sections, from_sections, missing_fields, nearest, read_file, read_sections
from megalite.errors import ConfigurationError
from megalite.process.names import as_installed
from megalite.small_files import shown

_HELP = " (--help all describes all flags)"
_SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
_FIRST = "\n--help shows what a run needs, and one to try on made-up data; --help all describes all flags"


@dataclass(frozen=True)
class ParsedArguments:
    """Configuration that a command line describes, and lines to show at the start, such as for unused flags."""

    config: RunConfig
    notes: tuple[str, ...]


SavedFields = Callable[[CheckpointConfig, str | None], Sections]
"""Function that returns the fields of the model, tokenizer and schedules in the checkpoint that a run starts from. Its
second argument is the tokenizer type that the run names, if any: the checkpoint may have another one."""


def parse_arguments(
    argv: Sequence[str], saved_fields: SavedFields | None = None, *, hybrid: bool = False
) -> ParsedArguments:
    """Return the configuration of a command line; relations between fields are checked later, by `validate`.

    Args:
        argv: the command line without the program's name.
        hybrid: require what Megatron-LM's pretrain_hybrid.py does: a pattern of layers, and --spec.
        saved_fields: function that returns the fields of a checkpoint. It is called with --use-checkpoint-args, or if
            --load is a Hugging Face folder, for fields that are not given; and for the fields of the schedules, given
            or not, with --use-checkpoint-opt-param-scheduler.

    Raises:
        ConfigurationError: a flag is unknown, refused, missing or has a value of the wrong type; one line per flag. Or
            --help has a topic that is none.
        SystemExit: 0 after --help.
    """
    if (topics := asked_help(argv)) is not None:
        from megalite.config.run_help import show_run_help  # imported here: few programs show their help

        show_run_help(topics)
    sections: Sections = {name: {} for name in section_types()}
    fields: dict[str, Any] = {}
    shorthands: dict[str, tuple[str, Any]] = {}  # the shorthand and the value, by field
    notes: list[Note] = []
    problems: list[str] = []
    given: set[str] = set()
    rope_type: str | None = None
    for flag, values in flag_groups(argv):
        try:
            refuse_blank(flag, values)
            if flag == "config":
                path = _single(flag, values)
                for name, read in read_sections(read_file(path), path).items():
                    sections[name] |= read
                continue
            given.add(megatron_flags.tables()["aliases"].get(flag, flag))
            found, note = _settle(flag, values)
            rope_type = values[0] if flag == megatron_flags.ROPE_TYPE else rope_type
            if flag in megatron_flags.tables()["shorthands"]:
                for name, value in found.items():
                    former, before = shorthands.get(name, (flag, value))
                    if before != value:
                        notes.append(Note(f"--{former}", f"changes nothing, since --{flag} comes after it"))
                    shorthands[name] = flag, value
            else:
                fields |= found
            notes += [note] if note else []
        except ConfigurationError as error:
            problems.append(str(error))
    # Flags override YAML, wherever --config stands; a shorthand such as --recompute-activations decides in any order.
    for name, (flag, value) in shorthands.items():
        if fields.get(name, value) != value:
            positive = fields[name] is not False
            notes.append(Note(flag_of(name if positive else f"no_{name}"), f"changes nothing, since --{flag} decides"))
        fields[name] = value
    for name, value in fields.items():
        sections[fields_by_name()[name].section][name] = value
    if (pattern := sections["model"].get("hybrid_layer_pattern")) is not None:
        sections["model"].setdefault("num_layers", max(count_of_pattern(pattern), 1))
    if NEXT_STAGE in (fields.get("hybrid_layer_pattern") or ""):  # a flag, which overrides the stages of YAML
        for name in STAGE_FIELDS:
            if name not in fields:
                sections["parallel"].pop(name, None)
    loading = CheckpointConfig(**sections["checkpoint"])
    # The network of a Hugging Face folder cannot have been given by the flags of an earlier run.
    takes_saved = loading.loads_huggingface or loading.use_checkpoint_args or loading.use_checkpoint_opt_param_scheduler
    if saved_fields is not None and not problems and takes_saved:
        for section, saved in saved_fields(loading, sections["data"].get("tokenizer_type")).items():
            if section == "model":
                saved = _without_other_layers(saved, sections["model"])
            over = section == "optimizer"  # the schedules, with --use-checkpoint-opt-param-scheduler
            sections[section] = sections[section] | saved if over else saved | sections[section]
    missing = [flag_of(name) for name in missing_fields(sections) if name.replace("_", "-") not in given]
    if hybrid:
        if sections["model"].get("hybrid_layer_pattern") is None:
            missing = [PATTERN_FLAG, *(flag for flag in missing if flag != "--num-layers")]
        missing += [_SPEC] if "spec" not in given else []
    if missing:
        problems.append(f"missing: {', '.join(missing)}{_HELP if argv else _FIRST}")
        if loading.load is not None and not (loading.loads_huggingface or loading.use_checkpoint_args):
            problems.append(f"(--load {loading.load} {_lacks_network(loading.load)})")
    if loading.use_checkpoint_opt_param_scheduler and "override-opt-param-scheduler" in given:
        problems.append("--override-opt-param-scheduler contradicts --use-checkpoint-opt-param-scheduler: drop one")
    if problems:
        raise ConfigurationError("\n".join(problems))
    config = from_sections(sections)
    check_numbers(config)
    model = with_depths_of_pattern(config.model)
    for name in ("mtp_num_layers", "mtp_hybrid_override_pattern"):
        if getattr(config.model, name) not in (None, getattr(model, name)) and model.depths:
            notes.append(Note(flag_of(name), f"changes nothing, since {PATTERN_FLAG} has its depths"))
    model, parallel = with_stages_of_pattern(model, config.parallel)
    config = replace(config, model=model, parallel=parallel)
    if given >= megatron_flags.MASKS_ARE_NOT_BUILT:
        why = "changes nothing, since --no-create-attention-mask-in-dataloader builds no mask (leave that one out)"
        notes.append(Note("--reset-attention-mask", why))
        config = replace(config, data=replace(config.data, reset_attention_mask=False))
    config = _applied_last(config, given)
    rotated = with_megatrons_rotation(config.model, rope_type)
    notes += latent_notes(config.model, rotated, rope_type, given)
    config, idle = without_idle_flags(replace(config, model=rotated))
    warnings = config_warnings(config, per_token_loss=megatron_flags.CALCULATE_PER_TOKEN_LOSS in given)
    of_flags = map(as_installed, megatron_flags.note_lines(notes))
    return ParsedArguments(config, (*of_flags, *idle, *warnings))


def _without_other_layers(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved fields of a network without those that say which layers it has, if flags say it otherwise."""
    of_depths = "mtp_num_layers mtp_hybrid_override_pattern"
    layers = {
        "hybrid_layer_pattern": f"moe_layer_freq {of_depths}",
        "num_layers": "hybrid_layer_pattern mtp_hybrid_override_pattern",
    }
    others = (other for name, names in layers.items() if name in given for other in names.split())
    dropped = {other for other in others if other not in given}
    pattern, variant = given.get("hybrid_layer_pattern"), given.get("experimental_attention_variant", "dsa")
    if variant != "dsa" or (pattern is not None and SPARSE_LETTER not in pattern):
        dropped |= {name for name in saved if name.startswith("dsa_") and name not in given}
    return {name: value for name, value in saved.items() if name not in dropped}


def _lacks_network(load: str) -> str:
    """Return why the network is not taken from --load, and what takes it from there."""
    takes = "--use-checkpoint-args takes the flags of the network and the tokenizer from its checkpoint"
    if is_url(load):
        return f"is no Hugging Face folder; if it is a run directory, {takes}"
    if not os.path.isdir(load):
        near = folders_near(Path(load))
        return f"is not a folder; there are checkpoints in {', '.join(near)}" if near else "is not a folder"
    found = checkpoints_in(Path(load))
    if found == "megalite":
        return f"is a run directory: {takes}"
    if found == "megatron":
        return (
            "has a checkpoint of Megatron-LM: import it with megalite-convert --loader megatron --saver megalite; "
            "--use-checkpoint-args takes the flags of the network and the tokenizer from what that writes"
        )
    return "has no config.json, which describes the network in a Hugging Face folder, and no checkpoint"


def _applied_last(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Return `config` after the flags whose effect depends on all other flags."""
    parallel, model = config.parallel, config.model
    if set(given).intersection(megatron_flags.USE_FSDP) and parallel.data_parallel_sharding_strategy is None:
        parallel = replace(parallel, data_parallel_sharding_strategy="optim_grads_params")
    if megatron_flags.NO_POSITION_EMBEDDING in given and model.position_embedding_type == "learned_absolute":
        model = replace(model, position_embedding_type="rope" if model.has_latents else "none")
    by_tanh = has_exact_form(model.activation) and not {"openai-gelu", "no-exact-gelu"} & set(given)
    without_bias = not {"disable-bias-linear", "no-add-bias-linear"}.isdisjoint(given) and not model.geglu
    if by_tanh and (megatron_flags.NO_BIAS_GELU_FUSION in given or without_bias):
        model = replace(model, exact_gelu=True)
    data, training = config.data, config.training
    if data.tokenizer_type is None and data.vocab_file is not None:  # Megatron-LM's default of pretrain_gpt.py
        data = replace(data, tokenizer_type="GPT2BPETokenizer")
    if training.recompute_num_layers is None and set(given).intersection(megatron_flags.ONE_LAYER_BY_DEFAULT):
        training = replace(training, recompute_num_layers=1)
    return replace(config, data=data, training=training, parallel=parallel, model=model)


def settle(flag: str, values: list[str]) -> tuple[dict[str, Any], str]:
    """Return the fields that a single flag sets; or no field, and a note if it changes nothing.

    Raises:
        ConfigurationError: the flag is unknown, refused, or has a value of the wrong type.
    """
    refuse_blank(flag, values)
    fields, note = _settle(flag, values)
    return fields, "" if note is None else f"{note.flag}: {note.why}"


def _settle(flag: str, values: list[str]) -> tuple[dict[str, Any], Note | None]:
    """Translate a flag. Returns the fields that it sets, or no field and a note that the flag changes nothing."""
    if not flag:
        raise ConfigurationError(f"{shown(' '.join(values))} comes before the first flag")
    tables = megatron_flags.tables()
    meant = tables["value_shorthands"].get(flag, {}).get(" ".join(values))
    if flag in tables["shorthands"]:
        _refuse_values(flag, values)
        meant = tables["shorthands"][flag]
    if meant is not None:
        fields: dict[str, Any] = {}
        for name, its_values in flag_groups(meant.split()):
            fields |= _settle(name, its_values)[0]
        return fields, Note(f"--{flag} {values[0]}", f"is {meant} here") if values else None
    flag = tables["aliases"].get(flag, flag)
    if flag in megatron_flags.APPLIED_LAST:
        _refuse_values(flag, values)
        return {}, None
    if flag == megatron_flags.ROPE_TYPE:
        field_value(flag, RopeType, values)
        return {}, None
    name, places = flag.replace("-", "_"), fields_by_name()
    if name in places:
        return {name: field_value(flag, places[name].kind, values)}, None
    positive = name.removeprefix("no_")
    if positive in places and places[positive].kind is bool:
        _refuse_values(flag, values)
        return {positive: False}, None
    note = megatron_flags.settled(flag, values)
    if note is None:
        if foreign := foreign_flags.answer(flag):
            raise ConfigurationError(f"--{flag} {foreign}")
        known = [name.replace("_", "-") for name in places] + megatron_flags.names()
        known += ["no-" + name.replace("_", "-") for name, place in places.items() if place.kind is bool]
        near = nearest(flag, known, "--", megatron_flags.refusal) or _HELP
        raise ConfigurationError(f"unknown flag --{flag}{near}")
    return {}, note


def field_value(flag: str, kind: Any, values: list[str]) -> Any:
    """Convert the values of a flag to the type of its field. Raises ConfigurationError if they cannot be."""
    if kind is bool:
        _refuse_values(flag, values)
        return True
    optional = type(None) in get_args(kind)
    if optional and values == ["None"]:
        return None
    wanted = get_args(kind)[0] if optional else kind
    if get_origin(wanted) is tuple:
        kinds = get_args(wanted)
        values = [word for value in values for word in value.split()] if kinds[0] in (int, float) else values
        if kinds[-1] is not Ellipsis and len(values) != len(kinds):
            raise ConfigurationError(f"--{flag} needs {len(kinds)} values, got {' '.join(values)[:100] or 'none'}")
        return tuple(_converted(flag, kinds[0], value) for value in values)
    return _converted(flag, wanted, _single(flag, values))


def _converted(flag: str, kind: Any, text: str) -> Any:
    """Return a word as a value of this type. Raises ConfigurationError with what was expected."""
    for number, wanted in ((int, "a whole number"), (float, "a finite number")):
        if kind is number:
            with suppress(ValueError, OverflowError):
                if math.isfinite(value := number(text)):
                    return value
            raise ConfigurationError(f"--{flag} {shown(text)}: expected {wanted}")
    choices = get_args(kind) if get_origin(kind) is Literal else (text,)
    if text not in choices:
        if reason := megatron_flags.refused_value(flag, text):
            raise ConfigurationError(f"--{flag} {text} {reason}")
        raise ConfigurationError(
            f"--{flag} {shown(text)}: expected one of {', '.join(choices)}{nearest(text, choices)}"
        )
    return text


def _refuse_values(flag: str, values: list[str]) -> None:
    if values:
        raise ConfigurationError(f"--{flag} takes no value, got {shown(' '.join(values))} (--no-... turns a flag off)")


def _single(flag: str, values: list[str]) -> str:
    if len(values) != 1:
        raise ConfigurationError(f"--{flag} needs one value, got {' '.join(values)[:100] or 'none'}")
    return values[0]
