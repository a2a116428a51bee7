"""Commands of Megatron-LM's tests and examples, and of its forks, are taken as they stand, or refused for a reason.

`tests/megatron_commands/collect.py` made the list of them.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path

import pytest

from megalite.config import megatron_flags, parse_arguments, resolve
from megalite.errors import ConfigurationError

COMMANDS = json.loads((Path(__file__).parents[1] / "megatron_commands" / "commands.json").read_text())
LACKING = (
    *("latent-attention", "multi-token", "linear-attention", "architecture", "transformer-engine", "mup"),
    *("offload", "recompute", "experts"),
)
"""Capabilities that some commands use and megalite lacks, by their names in megatron_flags.toml."""
REFUSED_THERE_TOO = (
    "--rampup-batch-size 16 16 5859375 needs --train-samples",  # "expected no batch-size rampup ..."
    "--step-batch-size-schedule",  # given with --global-batch-size, which raises ValueError
)


def refusal(flags: str) -> str:
    """Return why a command is refused on every number of ranks; empty if it is taken on some number."""
    try:
        config = parse_arguments(shlex.split(flags)).config
    except ConfigurationError as error:
        return str(error)
    parallel, problem = config.parallel, ""
    for copies in (1, 2, 4, 8, 16):
        try:
            resolve(config, parallel.ranks_needed * copies)
        except ConfigurationError as error:
            problem = problem or str(error)
        else:
            return ""
    return problem


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    """Return why each command is refused, by its flags."""
    return {command["flags"]: refusal(command["flags"]) for command in COMMANDS}


def names_a_lack(line: str) -> bool:
    flag = line.split()[0].removeprefix("--").rstrip(":")
    tables = megatron_flags.tables()
    whys = [tables["refused"][name]["why"] for name in LACKING]
    of_a_fork = flag in megatron_flags.tables()["forks"] or "is a fork's" in line
    return of_a_fork or any(line.endswith(why) for why in whys) or megatron_flags.refusal(flag) in whys


def test_every_refusal_is_megatrons_or_names_what_is_missing(refusals: dict[str, str]) -> None:
    for flags, problem in refusals.items():
        for line in problem.splitlines():
            shared = line.startswith(REFUSED_THERE_TOO) and "--train-iters" in flags
            assert shared or names_a_lack(line), f"{line}\n{flags}"


def test_most_commands_are_taken(refusals: dict[str, str]) -> None:
    """Each source counts; those that Megatron-LM refuses do not."""
    taken: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for command in COMMANDS:
        problem = refusals[command["flags"]]
        if problem.startswith(REFUSED_THERE_TOO):
            continue
        of_a_test = "test_cases/gpt/" in command["sources"][0] and "--num-experts" not in command["flags"]
        if "test_cases/hybrid/" in command["sources"][0] or "test_cases/nemotron/" in command["sources"][0]:
            continue  # tests/megatron_commands/layers.toml has each one's fate
        kind = "dense tests" if of_a_test else "experts" if "--num-experts" in command["flags"] else "examples"
        total[kind] += len(command["sources"])
        taken[kind] += len(command["sources"]) * (not problem)
    shares = {kind: taken[kind] / total[kind] for kind in total}
    assert total["dense tests"] == 154
    assert shares["dense tests"] >= 0.95, (taken, total)
    assert shares["examples"] >= 0.75, (taken, total)
    assert shares["experts"] >= 0.70, (taken, total)
