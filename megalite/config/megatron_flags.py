"""Treatment of Megatron-LM's flags that are not fields here; `megatron_flags.toml` lists them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megalite.errors import ConfigurationError

NO_POSITION_EMBEDDING = "no-position-embedding"
"""Flag that turns off the learned table and does not change rotary embeddings, nor those of latent attention beside a
table. It is therefore applied last."""

USE_FSDP = ("use-megatron-fsdp", "use-torch-fsdp2", "use-custom-fsdp")
"""Flags for ZeRO 3, unless another flag or the YAML names a sharding strategy. They are therefore applied last."""

NO_BIAS_GELU_FUSION = "no-bias-gelu-fusion"
"""Flag of a field that also makes GELU exact, because Megatron-LM's GELU is exact if it is not fused with a bias. So do
flags that turn biases off. They change no other activation, and are therefore applied last."""

MASKS_ARE_NOT_BUILT = {"reset-attention-mask", "no-create-attention-mask-in-dataloader"}
"""Flags that together leave documents unmasked, as the second one builds no mask for the first one to change."""

ONE_LAYER_BY_DEFAULT = ("checkpoint-activations", "activations-checkpoint-method")
"""Flags of earlier releases that recompute layers one by one, unless another flag says how many form a chunk."""

ROPE_TYPE = "rope-type"
"""Flag of latent attention, whose effect depends on other flags (`megatron_latents.py`)."""

CALCULATE_PER_TOKEN_LOSS = "calculate-per-token-loss"
"""Flag that is always on here. If it is given, the warning about the average of masked losses is not needed."""


APPLIED_LAST = (NO_POSITION_EMBEDDING, *USE_FSDP)
"""Flags without a value that set no field when they are read."""

ACCEPTED = {"already_so": "already so", "no_effect": "changes nothing", "not_done": "not done"}
"""Tables of accepted flags, and what the note about one of them begins with."""

_MOST_NOTES = 4
"""Most accepted flags with lines of their own."""


@cache
def tables() -> dict[str, Any]:
    """Read the file, whose comments explain each table, when it is first needed: only a command line needs it."""
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


def reason(name: str) -> str:
    """Return the reason for refusal that has this name, or `name` itself if it is not such a name but a reason."""
    refused = tables()["refused"]
    return refused[name]["why"] if name in refused else name


@dataclass(frozen=True)
class Note:
    """Line to show at the start about a flag that has no effect, or is another one here."""

    flag: str
    why: str


def settled(flag: str, values: Sequence[str]) -> Note | None:
    """Decide on a flag (without dashes) that is not a field.

    Returns:
        The note to show at the start if the flag is accepted; None if Megatron-LM does not have this flag either.

    Raises:
        ConfigurationError: the flag or its value is refused; the message has the reason.
    """
    if flag in accepted():
        count, why = accepted()[flag]
        if count != "*" and len(values) != bool(count):
            takes = "one value" if count else "no value"
            raise ConfigurationError(f"--{flag} takes {takes}, got {' '.join(values) or 'none'}")
        if count == "1" and not values[0].removeprefix("-").isdigit():
            raise ConfigurationError(f"--{flag} takes a whole number, got {values[0]!r}")
        return Note(f"--{flag}", why)
    row = tables()["accepted_values"].get(flag)
    if row is not None:
        taken = " or ".join([*row["values"].split(), *tables()["value_shorthands"].get(flag, ())])
        if not values:
            raise ConfigurationError(f"--{flag} needs a value: {taken}")
        others = [value for value in values if value not in row["values"].split()]
        for value in others:
            if (reason_of_value := refused_value(flag, value)) is not None:
                raise ConfigurationError(f"--{flag} {value} {reason_of_value}")
        if others:
            raise ConfigurationError(f"--{flag} {' '.join(others)}: {reason(row['why'])}; it takes {taken}")
        return Note(f"--{flag} {' '.join(values)}", "already so")
    why_refused = refusal(flag)
    if why_refused:
        raise ConfigurationError(f"--{flag} {why_refused}")
    return None


def note_lines(notes: Sequence[Note]) -> tuple[str, ...]:
    """Return the lines to show about accepted flags: one per reason, and a single one for many without an effect."""
    idle = [note for note in notes if note.why.startswith(("already so", "changes nothing"))]
    flags_of = {note.why: [each.flag for each in notes if each.why == note.why] for note in notes}
    if len(idle) <= _MOST_NOTES:
        return tuple(f"{', '.join(flags)}: {why}" for why, flags in flags_of.items())
    flags = " ".join(note.flag for note in idle)
    folded = f"{len(idle)} flags change nothing here (docs/flags.md says why): {flags}"
    return (folded, *note_lines([note for note in notes if note not in idle]))


def refusal(flag: str) -> str | None:
    """Return why `flag` is refused with every value, or None."""
    for table, why in (("removed", "was removed"), ("forks", "is of a fork of Megatron-LM")):
        if flag in tables()[table]:
            return f"{why}, use {tables()[table][flag]}"
    return _refused().get(flag)


def refused_value(flag: str, value: str) -> str | None:
    """Return why a value that Megatron-LM gives to a flag is refused here, or None."""
    reasons = tables()["refused_values"].get(flag, {})
    return reason(reasons[value]) if value in reasons else None


def names() -> list[str]:
    """Return every flag of the tables."""
    found = [*APPLIED_LAST, ROPE_TYPE, *accepted(), *_refused()]
    for table in ("aliases", "shorthands", "accepted_values", "removed", "forks"):
        found += tables()[table]
    return found


@cache
def accepted() -> dict[str, tuple[str, str]]:
    """Return the flags that are accepted with any value, each with its kind of values and the reason.

    The kinds are "" (no value), "1" (a whole number), "text" (one value) and "*" (any number of values).
    """
    found = {}
    for table, effect in ACCEPTED.items():
        for why, flags in tables()[table].items():
            for name, _, count in (entry.partition("=") for entry in flags.split()):
                found[name] = (count, f"{effect}, {why}")
    return found


@cache
def _refused() -> dict[str, str]:
    """Return the reason for each flag that is refused."""
    return {flag: row["why"] for row in tables()["refused"].values() for flag in row["flags"].split()}
