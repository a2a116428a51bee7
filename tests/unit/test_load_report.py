"""Report of a run about the checkpoint that it has loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint import TrainingState
from megalite.config import RunConfig, parse_arguments
from megalite.optim.learning_rate import LearningRateSchedule, rate_schedules
from megalite.training.load_report import differences, load_notes, rate_change
from tests.unit.test_config_megatron_flags import MINIMAL

CONFIG = parse_arguments([*MINIMAL, "--data-path", "a", "b", "--train-iters", "9"]).config
STATE = TrainingState(iteration=7, consumed_samples=28, optimizer_steps=6)


def saved(config: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return found


def test_equal_flags_need_no_word() -> None:
    assert differences(saved(CONFIG), CONFIG) == ()


def test_the_state_of_a_run_is_no_option() -> None:
    state = {"left_out_samples": {"ranges": [[0, 3]]}, "alarm_history": {"losses": [1.0], "norms": []}}
    assert differences({**saved(CONFIG), **state, "data_parallel_shares": {"micro_batches": [1]}}, CONFIG) == ()


def test_what_changes_the_data_or_a_step_is_told_with_both_values() -> None:
    before = saved(CONFIG)
    before["data"] |= {"data_path": ["c"], "seq_length": 16, "split": "1", "num_workers": 9, "reset_position_ids": True}
    before["training"] |= {"seed": 5, "global_batch_size": 2, "eval_iters": 3, "micro_batch_size": 2}
    before["optimizer"] |= {"lr": 1.0, "lr_decay_iters": 5, "optimizer_backend": "apex"}
    before["model"] |= {"hidden_dropout": 0.5, "init_method_std": 1.0}
    before["parallel"] |= {"tensor_model_parallel_size": 8}
    before["alarms"] |= {"spiky_loss_policy": "skip"}
    before["synchronization"] |= {"gradient_compression": ["int8"], "all_reduce_algorithm": "ring"}
    lines = {line.removeprefix("note: --").partition(" in the run")[0] for line in differences(before, CONFIG)}
    assert lines == {
        "hidden-dropout is 0.1 here, and was 0.5",
        "data-path is a b here, and was c",
        "seq-length is 8 here, and was 16",
        "split is 969, 30, 1 here, and was 1",
        "reset-position-ids is off here, and was on",
        "seed is 1234 here, and was 5",
        "global-batch-size is unset here, and was 2",
        "lr is 0.1 here, and was 1.0",
        "lr-decay-iters is unset here, and was 5",
        "gradient-compression is none here, and was int8",
        "spiky-loss-policy is log here, and was skip",
    }


def test_fields_of_a_later_version_are_told_and_those_of_an_earlier_one_lack() -> None:
    before = saved(CONFIG)
    before["training"] |= {"a_field_of_the_future": 1}
    del before["optimizer"]["lr"]
    assert differences(before, CONFIG) == (
        "note: the checkpoint's options training.a_field_of_the_future are unknown to this version of megalite, and "
        "not read",
    )


def test_every_part_is_restored_or_ignored_with_the_reason() -> None:
    def line(config: RunConfig, state: TrainingState, position: bool, optimizer: bool) -> str:
        return load_notes(saved(config), config, state, position=position, optimizer=optimizer)[0]

    where, metrics = "position (step 7, 28 samples)", "metrics (cut off after that step)"
    assert line(CONFIG, STATE, True, True) == f"restored: weights, optimizer state (6 updates), {where}, {metrics}"
    new = "optimizer state (6 updates): a new one by --no-load-optim"
    assert line(CONFIG, STATE, True, False) == f"restored: weights, {where}, {metrics}; ignored: {new}"
    fp16 = replace(CONFIG, training=replace(CONFIG.training, fp16=True))
    scaled = replace(STATE, loss_scale={"value": 1024.0})
    assert line(fp16, scaled, True, True).endswith(", loss scale (1024)")
    assert line(fp16, STATE, True, True).endswith("ignored: loss scale: the checkpoint has none")
    assert line(CONFIG, scaled, True, True).endswith("ignored: loss scale (1024): none is dynamic here")
    assert line(fp16, scaled, False, False).endswith(
        "ignored: optimizer state (6 updates): a new one by --finetune, position (step 7, 28 samples): a new run by "
        "--finetune, metrics (cut off after that step): a new run by --finetune, loss scale (1024): a new one by "
        "--finetune"
    )


def test_a_longer_run_is_told_what_the_learning_rate_becomes() -> None:
    def change(
        before: RunConfig, here: LearningRateSchedule, consumed_samples: int = 36, saved_samples: int = 36
    ) -> tuple[str, ...]:
        return rate_change(Path("iter_0000009"), saved(before), here, consumed_samples, saved_samples, 1)

    def schedule(config: RunConfig) -> LearningRateSchedule:
        return rate_schedules(config.optimizer, config.training, hidden_size=1, global_batch_size=4).learning_rate

    config = replace(CONFIG, training=replace(CONFIG.training, global_batch_size=4))
    longer = replace(config, training=replace(config.training, train_iters=18))
    assert schedule(config).style == "linear"
    wanted = "note: learning rate 0.0111 -> 0.05: the schedule differs from that of the last step"
    assert change(config, schedule(longer)) == (wanted,)
    assert change(config, schedule(config)) == ()
    steady = LearningRateSchedule(0.1, style="constant")
    assert change(replace(config, optimizer=replace(config.optimizer, lr_decay_style="constant")), steady) == ()
    assert change(CONFIG, steady) == (), "it says no batch size"
    assert rate_change(Path("iter_0000009"), {"training": {}}, steady, 36, 36, 1) == ()
    halves = rate_schedules(config.optimizer, config.training, hidden_size=1, global_batch_size=8).learning_rate
    assert change(config, halves, 40, 20) == (), "samples of half the length, twice as many a step"
    assert change(config, halves, 20, 20) != ()
