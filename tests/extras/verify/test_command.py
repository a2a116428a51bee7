"""A user's command becomes the run that it describes, for its ranks and for one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.errors import CheckpointError, ConfigurationError
from megalite.extras.verify.command import named_factors, one_process, read_command
from tests.extras.verify.recorded_run import DATA, FLAGS, NETWORK, TRAINING, saved, train

pytestmark = pytest.mark.extra

LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce"
FILES = "--save $CHECKPOINTS/run --load $CHECKPOINTS/run --tensorboard-dir $LOGS --log-interval 1 --finetune"
MEGATRON = f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS} {LAYOUT} {FILES} --bf16 --use-mcore-models"


def test_a_command_of_megatron_is_read_for_its_ranks() -> None:
    """Paths that only its shell knows do not matter: they decide no number."""
    command = read_command(MEGATRON)
    assert command.sizes == {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "etp": 2, "dp": 4, "edp": 4}
    assert (command.program, command.world_size, command.precision) == ("megatron", 8, "bf16")
    assert command.config.training.global_batch_size == 8
    assert command.micro_batches == 4
    assert command.config.checkpoint.load is None
    assert command.settings["finetune"] is True
    assert command.settings["log_interval"] == 1


def test_a_script_and_a_text_are_the_same_run(tmp_path: Path) -> None:
    script = tmp_path / "train it.sh"
    script.write_text(f"#!/bin/bash\nCHECKPOINTS=/data\nLOGS=/logs\nGPUS=8\n{MEGATRON.replace(' 8 ', ' $GPUS ', 1)}\n")
    assert read_command(str(script)).config == read_command(MEGATRON).config
    lines = MEGATRON.replace(" --", "\n  --").replace("\n  --nproc", " --nproc")
    assert read_command(lines).config == read_command(MEGATRON).config


def test_flags_alone_are_a_command() -> None:
    assert read_command(FLAGS).config == read_command(f"python pretrain_gpt.py {FLAGS}").config


def test_the_program_decides_the_mean_of_the_loss() -> None:
    assert not read_command(MEGATRON).per_token_loss
    assert read_command(f"{MEGATRON} --calculate-per-token-loss").per_token_loss
    assert read_command(f"megalite-pretrain {FLAGS}").per_token_loss
    weighted = f"{FLAGS} --no-mock-data --data-path a b --loss-weights a=2"
    assert read_command(f"python pretrain_gpt.py {weighted}").per_token_loss  # no other program has weights


def test_what_a_shell_must_tell_is_asked_for() -> None:
    with pytest.raises(ConfigurationError, match="--set RATE=VALUE"):
        read_command(f"torchrun --nproc-per-node 1 pretrain_gpt.py {NETWORK} {DATA} {TRAINING} --lr $RATE")
    text = f"torchrun --nproc-per-node $GPUS pretrain_gpt.py {FLAGS}"
    with pytest.raises(ConfigurationError, match="--set GPUS=VALUE"):
        read_command(text)
    assert read_command(text, ranks=2).world_size == 2
    assert read_command(text, variables={"GPUS": "4"}).world_size == 4


def test_features_that_are_not_computed_are_said() -> None:
    command = read_command(f"pretrain_gpt.py {FLAGS} --fp8-format hybrid")
    assert any("--fp8-format" in note for note in command.notes)


@pytest.mark.parametrize("flags", ["--lora-rank 2", "--freeze output", "--distill-from x"])
def test_steps_that_are_not_computed_are_refused(flags: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(flags)}: .*: verify a step without it$"):
        read_command(f"pretrain_gpt.py {FLAGS} {flags}")


def test_adapters_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", f"{FLAGS} --lora-rank 2", steps=1)
    with pytest.raises(CheckpointError, match="has adapters, which are not computed"):
        saved(tmp_path / "run", 1)


def test_the_network_may_come_from_the_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "run", FLAGS, steps=1)
    command = read_command(f"pretrain_gpt.py {DATA} {TRAINING}", checkpoint=tmp_path / "run")
    assert command.config.model.num_layers == saved(tmp_path / "run", 0).weights.config.num_layers == 2
    assert command.config.model.vocab_size == read_command(FLAGS).config.model.vocab_size


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_one_process_keeps_the_samples_and_the_rule(precision: str) -> None:
    flags = f"{LAYOUT} --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --grad-reduce-in-bf16 --save x"
    command = read_command(f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS} {flags} --recompute-activations")
    config, _ = one_process(command, precision)  # type: ignore[arg-type]
    assert config.parallel.ranks_needed == 1
    assert (
        config.training.dtype
        == {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
    )
    assert config.training.global_batch_size == 8
    assert config.training.micro_batch_size == 2
    assert (config.optimizer.lr, config.optimizer.lr_warmup_iters) == (0.01, 2)
    assert config.optimizer.exp_avg_dtype == ("bf16" if precision in ("bf16", "fp16") else "fp32")
    assert config.checkpoint.save is None


def test_dropout_of_other_programs_is_left_out() -> None:
    """Megalite's own is computed: its masks are a function of the samples."""
    flags = FLAGS.replace("dropout 0", "dropout 0.1")
    config, notes = one_process(read_command(f"pretrain_gpt.py {flags}"), "fp64")
    assert config.model.hidden_dropout == config.model.attention_dropout == 0
    assert any("dropout" in note for note in notes)
    config, notes = one_process(read_command(f"megalite-pretrain {flags}"), "fp64")
    assert config.model.hidden_dropout == 0.1
    assert not notes


def test_factors_name_all_that_they_may_be() -> None:
    factors = named_factors({"apples": 4, "pears": 4, "plums": 2})
    assert factors[4.0] == "times 4 (apples, pears)"
    assert factors[2.0] == "times 2 (plums)"  # rather than the root of 4
    assert factors[0.25] == "divided by 4 (apples, pears)"
    assert factors[round(2**0.5, 12)] == "times the root of 2 (plums)"
