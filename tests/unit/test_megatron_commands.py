"""Commands of Megatron-LM's tests and examples, and of its forks, are taken as they stand, or refused for a reason.

`tests/megatron_commands/collect.py` made the list of them.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from megalite.config import megatron_flags, parse_arguments, resolve
from megalite.errors import ConfigurationError

COMMANDS = json.loads((Path(__file__).parents[1] / "megatron_commands" / "commands.json").read_text())
FATES_OF_LAYERS = tomllib.loads((Path(__file__).parents[1] / "megatron_commands" / "layers.toml").read_text())
LACKING = (
    *("multi-token", "linear-attention", "architecture", "transformer-engine", "mup"),
    *("offload", "recompute", "experts", "fp4-param-gather", "fp8-history"),
)
"""Capabilities that some commands use and megalite lacks, by their names in megatron_flags.toml."""
REFUSED_THERE_TOO = (
    "--rampup-batch-size 16 16 5859375 needs --train-samples",  # "expected no batch-size rampup ..."
    "--step-batch-size-schedule",  # given with --global-batch-size, which raises ValueError
)
WITHOUT_EFFECT = (
    "--fp8-param-gather needs --data-parallel-sharding-strategy optim_grads_params",  # no number follows from it
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
        if "--hybrid-" in flags:  # FATES_OF_LAYERS has each one's
            continue
        for line in problem.splitlines():
            shared = line.startswith(REFUSED_THERE_TOO) and "--train-iters" in flags
            assert shared or names_a_lack(line) or line.startswith(WITHOUT_EFFECT), f"{line}\n{flags}"


def test_most_commands_are_taken(refusals: dict[str, str]) -> None:
    """Each source counts; those that Megatron-LM refuses do not."""
    taken: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for command in COMMANDS:
        problem = refusals[command["flags"]]
        if problem.startswith(REFUSED_THERE_TOO):
            continue
        of_a_test = "test_cases/gpt/" in command["sources"][0] and "--num-experts" not in command["flags"]
        if "--hybrid-" in command["flags"]:  # FATES_OF_LAYERS has each one's
            continue
        kind = "dense tests" if of_a_test else "experts" if "--num-experts" in command["flags"] else "examples"
        total[kind] += len(command["sources"])
        taken[kind] += len(command["sources"]) * (not problem)
    shares = {kind: taken[kind] / total[kind] for kind in total}
    assert total["dense tests"] == 154
    assert shares["dense tests"] >= 0.95, (taken, total)
    assert shares["examples"] >= 0.75, (taken, total)
    assert shares["experts"] >= 0.70, (taken, total)


def test_each_test_of_other_layers_has_the_fate_that_is_told(refusals: dict[str, str]) -> None:
    """Tests of patterns, gated delta nets, latent attention and prediction: run, refused by a flag, or no training."""
    problems = {
        source.split("test_cases/")[1].removesuffix("/model_config.yaml"): refusals[command["flags"]]
        for command in COMMANDS
        for source in command["sources"]
        if "test_cases/" in source
    }
    told = FATES_OF_LAYERS["run"].split() + FATES_OF_LAYERS["taken"].split()
    assert {name: problems[name] for name in told} == dict.fromkeys(told, "")
    for flag, names in FATES_OF_LAYERS["refused"].items():
        for name in names.split():
            assert any(
                line.partition(f"--{flag}")[0] in ("", "unknown flag ") for line in problems[name].splitlines()
            ), name
        told += names.split()
    others = [name for names in FATES_OF_LAYERS["other"].values() for name in names.split()]
    assert not problems.keys() & set(others)
    assert len({*told, *others}) == len(told) + len(others) == 43
