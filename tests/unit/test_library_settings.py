"""Settings of `megalite.Trainer`: those that would change nothing are refused, with the name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megalite
from megalite.config import DataConfig, TrainingConfig
from megalite.config.run import fields_by_name
from megalite.library import configuration
from megalite.library.settings import SGD, AdamW, Layout

MODULES: dict[str, Any] = {"loss": lambda outputs, batch: outputs.sum(), "dataset": [torch.zeros(2)] * 8}
GPT = megalite.GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8, max_position_embeddings=4)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size=2 changes nothing here"),
        ({"recompute_granularity": "full"}, "changes nothing here"),
        ({"log_intervall": 3}, "log_intervall=3 is unknown, did you mean log_interval"),
        ({"log_interval": "often"}, "log_interval='often': the type of this setting"),
        ({"seq_length": 8}, "seq_length=8 is for a GPTConfig"),
        ({"micro_batch_size": 3, "global_batch_size": 4}, "--global-batch-size 4 is not a multiple"),
        ({"precision": "int8"}, "precision='int8': choose one of fp32"),
        ({"layout": Layout(tp=2)}, "1 ranks cannot be divided into groups of 2"),
        ({"costs": "nonsense"}, "costs='nonsense': choose counted or measured, or give numbers"),
        ({"loss": None, "count": len}, "count is for a loss"),
        ({"stages": [nn.Linear(2, 2)]}, "give Trainer a model, or stages"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(megalite.MegaliteError, match=told):
        megalite.Trainer(nn.Linear(2, 2), **{"optimizer": AdamW(lr=1.0), "micro_batch_size": 1, **MODULES, **settings})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"recompute": True, "metrics": {"accuracy": lambda outputs, batch: outputs.sum()}},
            "metrics, recompute: these are for modules",
        ),
        ({"decays": lambda name, values: False}, "decays: these are for modules"),
        ({"costs": "measured"}, "costs: these are for modules"),
        ({"count": len}, "count is for a loss"),
    ],
)
def test_what_is_for_modules_is_refused_for_a_gpt(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(megalite.MegaliteError, match=told):
        megalite.Trainer(GPT, seq_length=4, micro_batch_size=1, optimizer=SGD(lr=1.0), quiet=True, **settings)


def test_options_that_count_steps_do_not_need_the_length_of_a_run() -> None:
    settings = {"gradient_compression": ("onebit-adam",), "compression_warmup_iters": 1000}
    data = DataConfig(mock_data=True, seq_length=4, tokenizer_type="NullTokenizer")
    optimizer = AdamW(lr=1.0, clip_grad=0.0).config()
    sections = {"model": GPT, "data": data, "optimizer": optimizer, "training": TrainingConfig(micro_batch_size=1)}
    config = configuration.configured(sections, settings, None, world_size=2)
    assert config.synchronization.compression_warmup_iters == 1000


def test_lists_of_settings_name_fields_of_their_sections() -> None:
    lists = (configuration._TAKEN, configuration._OF_A_GPT, configuration._REFUSED)
    for section, names in (pair for each in lists for pair in each.items()):
        assert all(fields_by_name()[name].section == section for name in names.split())
    assert "save_interval" in configuration._taken(of_gpt=False)
    assert "rampup_batch_size" not in configuration._taken(of_gpt=True)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Layout(zero=4), "ZeRO has the stages 0 to 3"),
        (Layout(pp=0), "pp=0"),
        (Layout(pp=2, schedule="zb-v"), "stages_per_rank=2"),
        (Layout(stages_per_rank=2), "needs pp of 2 or more"),
        (Layout(pp=2, schedule="1f2b"), "the schedules are gpipe"),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_layout_is_refused(layout: Layout, told: str) -> None:
    with pytest.raises(megalite.MegaliteError, match=told):
        layout.config(world_size=2)


def test_options_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(megalite.MegaliteError, match=r"betas=\(0.9, 0.95, 0.99\): give two numbers"):
        AdamW(lr=1.0, betas=(0.9, 0.95, 0.99)).config()  # type: ignore[arg-type]


def test_a_way_of_context_parallelism_needs_context_parallel_ranks() -> None:
    sections = configuration.sections_of(
        SGD(lr=1.0),
        Layout(),
        precision="fp32",
        micro_batch_size=1,
        global_batch_size=None,
        seed=1,
        save=None,
        world_size=1,
    )
    with pytest.raises(megalite.MegaliteError, match=r"cp_comm_type=.* changes nothing without Layout\(cp=...\)"):
        configuration.configured(sections, {"cp_comm_type": ("a2a",)}, None, world_size=1)
