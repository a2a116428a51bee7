"""Flags of other programs are answered with megalite's, which exist."""

from __future__ import annotations

import re

import pytest

from megalite.config import foreign_flags, megatron_flags, parse_arguments
from megalite.config.run import fields_by_name
from megalite.errors import ConfigurationError

TABLES = foreign_flags.tables()
ANSWERS = {flag: answer for flags in TABLES.values() for flag, answer in flags.items()}
OF_LAUNCHERS = {"--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-endpoint", "--workers"}


def own_flags() -> set[str]:
    names = {name.replace("_", "-") for name in fields_by_name()}
    return {*names, *(f"no-{name}" for name in names), *megatron_flags.names(), "config"}


def test_each_flag_stands_once_and_is_not_one_of_megalite() -> None:
    assert len(ANSWERS) == sum(map(len, TABLES.values())) >= 150
    assert not own_flags() & set(ANSWERS)
    assert all(flag == flag.lower() and "_" not in flag for flag in ANSWERS)


def test_answers_name_flags_that_exist() -> None:
    flags = {flag for answer in ANSWERS.values() for flag in re.findall(r"--[a-z0-9-]+", answer)}
    assert {flag for flag in flags - OF_LAUNCHERS if flag.removeprefix("--") not in own_flags()} == set()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--per_device_train_batch_size=4", "is a flag of Hugging Face's Trainer, here --micro-batch-size"),
        ("--training.local_batch_size", "is a flag of torchtitan, here --micro-batch-size, times"),
        ("--parallelism.tp", "is a flag of nanotron, here --tensor-model-parallel-size"),
        ("--find_unused_parameters", "is a flag of PyTorch, here not needed: each parameter"),
        ("--fsdp", r"here --data-parallel-sharding-strategy \(full_shard: optim_grads_params"),
        ("--deepspeed_config", "is a flag of DeepSpeed, here megalite-translate FILE.json"),
    ],
)
def test_a_foreign_flag_is_answered(given: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected) as raised:
        parse_arguments([given, "4"])
    assert raised.value.args[0].startswith(f"--{given[2:].partition('=')[0].replace('_', '-')} is a flag of ")


def test_a_misspelt_flag_is_still_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="unknown flag --num-layer, did you mean --num-layers"):
        parse_arguments(["--num-layer", "4"])
