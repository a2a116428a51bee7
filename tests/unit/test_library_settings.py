"""Settings of `megalite.Trainer`: those that would change nothing are refused, with the name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megalite
from megalite.config import DataConfig, TrainingConfig
from megalite.config.run import fields_by_name
from megalite.library import arguments, configuration
from megalite.library.settings import SGD, AdamW, Layout, Optimizer

MODULES: dict[str, Any] = {"loss": lambda outputs, batch: outputs.sum(), "dataset": [torch.zeros(2)] * 8}
GPT = megalite.GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8, max_position_embeddings=4)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"context_parallel_size": 2}, r"context_parallel_size=2 is Layout\(cp=...\) here"),
        ({"recompute_granularity": "full"}, "recompute_granularity='full' is recompute=True here"),
        ({"recompute_num_layers": 1}, "recompute_num_layers=1 changes nothing here"),
        ({"fp8_format": "e4m3"}, "fp8_format='e4m3' changes nothing here"),
        ({"lora_rank": 4}, "lora_rank=4 changes nothing here"),
        ({"log_intervall": 3}, r"\(log_intervall=...\) is unknown, did you mean log_interval"),
        ({"micro_batchsize": 3}, "did you mean micro_batch_size"),
        ({"log_interval": "often"}, "log_interval='often': the type of this setting"),
        ({"seq_length": 8}, "seq_length=8 is for a GPTConfig"),
        ({"micro_batch_size": 3, "global_batch_size": 4}, "global_batch_size=4 is not a multiple"),
        ({"save_interval": 5}, r"^save_interval=5 needs Trainer\(save=...\), the run directory$"),
        ({"save_retain_interval": 5, "save": "unused"}, "^save_retain_interval=5 needs save_interval=...$"),
        ({"optimizer": AdamW(lr=-1.0)}, r"^AdamW\(lr=-1.0\): must be at least 0$"),
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
    ("name", "told"),
    [
        ("batch_size", r"is unknown, here micro_batch_size=..., the samples that a rank processes at once"),
        ("max_grad_norm", r"max_grad_norm is a setting of Hugging Face's Trainer, here AdamW\(clip_grad=...\)"),
        ("gradient_accumulation_steps", "here global_batch_size=...: micro-batch size x accumulation steps"),
        ("callbacks", r"here a loop of one's own: for batch in run.batches\(\)"),
        ("scheduler", r'here AdamW\(schedule="cosine", steps=..., warmup=...\)'),
        ("device", "here no argument: each rank has the GPU of its number"),
        ("one_logger_project", "not done, metrics go where report_to=... says"),
        ("fsdp", r"here Layout\(zero=...\) \(full_shard: 3; shard_grad_op: 2\)"),
        ("zero", r"here layout=megalite.Layout\(zero=...\)"),
    ],
)
def test_a_word_of_another_library_is_answered(name: str, told: str) -> None:
    settings = {"optimizer": AdamW(lr=1.0), "micro_batch_size": 1, **MODULES, name: object()}
    with pytest.raises(megalite.errors.ConfigurationError, match=told) as raised:
        megalite.Trainer(nn.Linear(2, 2), **settings)
    assert f"Trainer({name}=...)" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (torch.optim.AdamW([torch.ones(1)]), r"torch.optim.adamw.AdamW is no .* give megalite.AdamW\(lr=...\)"),
        (torch.optim.SGD, r"give megalite.SGD\(lr=...\) in place of it, without parameters"),
        ("adam", r"optimizer='adam' is no .* give megalite.AdamW"),
        (megalite.Lion, r"optimizer=Lion is a class: give megalite.Lion\(lr=...\)"),
        ([SGD(lr=1.0), SGD(lr=1.0)], "optimizer=list of 2"),
    ],
)
def test_what_is_no_optimizer_is_answered_with_one(optimizer: Any, told: str) -> None:
    with pytest.raises(megalite.errors.ConfigurationError, match=told):
        megalite.Trainer(nn.Linear(2, 2), optimizer=optimizer, micro_batch_size=1, **MODULES)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: AdamW([torch.ones(1)], lr=1.0), "takes options by their names only"),  # type: ignore[call-arg, misc]
        (lambda: AdamW(lr=1.0, beta1=0.9), r"AdamW\(beta1=...\) is unknown, here betas="),  # type: ignore[call-arg]
        (lambda: SGD(lr=1.0, warmup_steps=9), r"here SGD\(warmup=...\)"),  # type: ignore[call-arg]
        (lambda: SGD(lr=1.0, momentun=0.9), "did you mean momentum"),  # type: ignore[call-arg]
        (lambda: AdamW(lr=1.0, schedule="cosin").config(), "'cosin'.* did you mean cosine"),  # type: ignore[arg-type]
        (lambda: AdamW(lr="1").config(), r"AdamW\(lr='1'\): the type of this option is float"),  # type: ignore[arg-type]
        (lambda: AdamW(lr=1.0, betas=0.9).config(), "betas=0.9: give two numbers"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_option_of_an_optimizer_is_named(made: Callable[[], object], told: str) -> None:
    with pytest.raises(megalite.errors.ConfigurationError, match=told):
        made()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"num_layers": "1"}, r"GPTConfig\(num_layers='1'\): the type of this option is int$"),
        (
            {"moe_aux_loss_coeff": 0.5},
            r"\(moe_aux_loss_coeff=0.5\): the type of this option is tuple\[float, ...\]",
        ),
        ({"normalization": "rmsnorm"}, r"normalization='rmsnorm'\): .*Literal\['LayerNorm', 'RMSNorm'\]"),
    ],
)
def test_a_wrong_option_of_a_gpt_is_named(option: dict[str, Any], told: str) -> None:
    with pytest.raises(megalite.errors.ConfigurationError, match=told):
        megalite.Trainer(replace(GPT, **option), seq_length=4, micro_batch_size=1, optimizer=SGD(lr=1.0))


def test_a_folder_without_a_checkpoint_is_named_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "run" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "run" / "iter_0000003" / "manifest.json").touch()
    settings = {"optimizer": AdamW(lr=1.0), "micro_batch_size": 1, **MODULES}
    near = rf"^load='{tmp_path}/ruin' is no folder; there are some in {tmp_path}/run$"
    with pytest.raises(megalite.errors.ConfigurationError, match=near):
        megalite.Trainer(nn.Linear(2, 2), load=f"{tmp_path}/ruin", **settings)
    part = rf"^load='{tmp_path}/run/iter_0000003' is one .* {tmp_path}/run \(with ckpt_step=3\)$"
    with pytest.raises(megalite.errors.ConfigurationError, match=part):
        megalite.Trainer(nn.Linear(2, 2), load=f"{tmp_path}/run/iter_0000003", **settings)
    file = r"^preparing the run directory Trainer\(save='/dev/null/run'\) failed: .*\nGive another Trainer\(save=...\)$"
    with pytest.raises(megalite.errors.CheckpointError, match=file):
        megalite.Trainer(nn.Linear(2, 2), save="/dev/null/run", **settings)


@pytest.mark.parametrize("batch", [(torch.ones(1), torch.ones(1)), torch.ones(1), {}, []])
def test_a_step_on_bare_tensors_says_where_data_come_from(batch: Any) -> None:
    with pytest.raises(megalite.MegaliteError, match=r"run.step\(batch\) takes what run.batches\(\) yields"):
        configuration.check_numbered(batch)


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


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"attention_mask": torch.ones(3)}, "samples have attention_mask: a mean over the tokens that count"),
        ({"labels": torch.tensor([1, -100, 2])}, "samples have labels of -100: a mean over the tokens that count"),
        ({"target": torch.tensor([1.0, -100.0])}, ""),
    ],
)
@pytest.mark.parametrize("counted", [False, True])
def test_a_mean_over_padded_samples_is_warned_of(
    field: dict[str, torch.Tensor], told: str, counted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "loss": lambda outputs, batch: outputs.mean(),
        "dataset": [{"input": torch.ones(2), **field}],
    }
    if counted:
        options["count"] = len
    with megalite.Trainer(nn.Linear(2, 2), optimizer=SGD(lr=1.0), micro_batch_size=1, watchdog=False, **options) as run:
        run.step()
    printed = " ".join(capsys.readouterr().out.split())
    assert ("WARNING" in printed) == bool(told and not counted)
    assert told in printed or counted


def test_answers_are_of_settings_and_arguments_that_exist() -> None:
    assert {flag.replace("-", "_") for flag in arguments._PLACES} <= fields_by_name().keys()
    given = {f"{name}=" for kind in Optimizer.__subclasses__() for name in signature(kind).parameters}
    assert all(any(argument.startswith(each) for each in given) for argument in arguments._OF_OPTIMIZERS.values())
    assert not arguments._ANSWERS.keys() & {*signature(megalite.Trainer).parameters, *configuration._taken(of_gpt=True)}


def test_a_gpt_of_a_program_multiplies_in_few_bits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start says so, and a GPU without such products refuses them as that of a command does."""
    run: dict[str, Any] = {"dataset": [{"tokens": torch.zeros(4, dtype=torch.int64)}], "seq_length": 4}
    run |= {"optimizer": SGD(lr=1.0), "micro_batch_size": 1, "fp8_format": "e4m3", "fp8_recipe": "tensorwise"}
    trainer = megalite.Trainer(GPT, **run)
    trainer.train(steps=1)
    trainer.close()
    told = "".join(capsys.readouterr())
    assert "float32, products in tensorwise" in told
    assert "note: --fp8-recipe tensorwise: weight gradients are products of rounded inputs" in told
    monkeypatch.setattr("megalite.training.kernels.on_gpu", lambda device: True)
    with pytest.raises(megalite.errors.ConfigurationError, match="on a GPU, which has no such products"):
        megalite.Trainer(GPT, precision="fp64", **run)
