"""Several optimizers of one run: who updates what, what is refused, and what a checkpoint has of each."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megalite
from megalite.errors import CheckpointError, ConfigurationError
from megalite.library import configuration
from tests.distributed.several_run import (
    FEATURES,
    MIXED,
    OPTIMIZERS,
    STEPS,
    Mixed,
    ended,
    losses,
    run_steps,
    samples,
    saved_manifest,
    trainer,
)
from tests.harness.tool import run_tool

ADAMW, SGD = megalite.AdamW(lr=0.01), megalite.SGD(lr=0.01)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ({}, "optimizer=dict of 0: give one optimizer for all parameters or, by patterns"),
        ({"generator": SGD}, "the parameter critic.0.weight is matched by none of 'generator'"),
        ({"generator": SGD, "*": ADAMW}, "generator.0.weight is matched by 'generator' and '\\*'"),
        ({"*": SGD, "discriminator": ADAMW}, "'discriminator' matches no parameter that is trained"),
        ({"generator": SGD, "critic": torch.optim.SGD}, "torch.optim.sgd.SGD is no optimizer of megalite"),
        ({"generator": SGD, "critic": megalite.AdamW(lr=-1.0)}, r"AdamW\(lr=-1.0\): must be at least 0"),
        ({"generator": SGD, 1: ADAMW}, "give patterns of names"),
        ({"*.weight": SGD, "*.bias": megalite.Muon(lr=1.0)}, r"'\*.bias' has no matrix that Muon could update"),
    ],
)
def test_patterns_that_do_not_divide_the_parameters_are_refused(optimizer: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        trainer(1, optimizer=optimizer)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"clip_grad": 1.0}, "clip_grad=... is of a single optimizer: give it to each of several"),
        ({"gradient_compression": ("powersgd",)}, "leave out what compresses them"),
    ],
)
def test_what_several_optimizers_cannot_have_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        trainer(1, **options)


def test_several_optimizers_are_for_one_stage() -> None:
    sections = configuration.sections_of(
        OPTIMIZERS,
        megalite.Layout(pp=2),
        precision="fp32",
        micro_batch_size=1,
        global_batch_size=None,
        seed=1,
        save=None,
        world_size=2,
    )
    with pytest.raises(ConfigurationError, match=r"models of one stage: leave out Layout\(pp=...\)"):
        configuration.configured(
            sections, {}, None, world_size=2, optimizers=configuration.several_optimizers(OPTIMIZERS)
        )


def test_a_gpt_has_one_optimizer() -> None:
    gpt = megalite.GPTConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8, max_position_embeddings=4
    )
    with pytest.raises(ConfigurationError, match="several optimizers are for modules"):
        megalite.Trainer(gpt, seq_length=4, micro_batch_size=1, optimizer={"*": SGD}, quiet=True)


@pytest.mark.wide
def test_only_names_optimizers_of_the_run() -> None:
    run = trainer(1)
    for only in ("discriminator", [], ["critic", "x"]):
        with pytest.raises(ConfigurationError, match="the optimizers are generator, critic"):
            run.step(only=only)
    run.close()
    run = trainer(1, optimizer=SGD)
    with pytest.raises(ConfigurationError, match="the run has a single optimizer"):
        run.step(only="critic")
    run.close()


def test_a_step_without_a_term_of_the_loss_is_refused() -> None:
    run = trainer(1, model=Mixed, optimizer=MIXED)
    with pytest.raises(megalite.MegaliteError, match="updates only norm has no term of the loss"):
        run.step(only="norm")
    assert run.step(only="critic")["critic"] > 0
    run.close()


def test_patterns_of_names_divide_a_module_anywhere() -> None:
    muon = megalite.Muon(lr=0.01)
    run = trainer(
        1, optimizer={"*.weight": muon, "*.bias": SGD}, loss=lambda outputs, batch: outputs[1].mean(), count=None
    )
    optimizer = run._trainer.optimizer
    assert {name: len(rules) for name, rules in optimizer._rules_of.items()} == {"*.weight": 1, "*.bias": 1}  # type: ignore[attr-defined]
    assert len({slot.parameter for bucket in optimizer.buckets for slot in bucket.slots}) == 8
    run.close()


def test_a_step_leaves_parameters_of_other_optimizers_and_what_they_need_alone() -> None:
    run = trainer(1)
    before = {name: each.detach().clone() for name, each in run._trainer.network.named_parameters()}
    assert "generator" not in run.step(only="critic")
    for name, each in run._trainer.network.named_parameters():
        assert torch.equal(each, before[name]) == ("generator" in name), name
        assert each.requires_grad
    run.close()


def test_an_evaluation_has_the_terms_of_all_optimizers() -> None:
    run = trainer(1, valid_dataset=samples(8))
    run.step(only="critic")
    assert run.evaluate().keys() == {"generator", "critic"}
    run.close()


def test_a_checkpoint_names_each_optimizer_with_its_steps(tmp_path: Path) -> None:
    run_steps(1, STEPS[:4], save=tmp_path)
    found = saved_manifest(tmp_path)
    assert found["training"]["optimizers"] == {
        "generator": {"steps": 1, "updates": 1, "loss_scale": None},
        "critic": {"steps": 3, "updates": 3, "loss_scale": None},
    }
    assert {name: each["optimizer"] for name, each in found["config"]["optimizers"].items()} == {
        "generator": "adam",
        "critic": "sgd",
    }


@pytest.mark.wide_except("optimizer0-the state of other optimizers: critic, generator, and this run has a single one")
@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (SGD, "the state of other optimizers: critic, generator, and this run has a single one"),
        ({"gen*": OPTIMIZERS["generator"], "critic": OPTIMIZERS["critic"]}, "and this run has critic, gen"),
        ({"generator": OPTIMIZERS["critic"], "critic": OPTIMIZERS["generator"]}, "the state of adam as .* generator"),
    ],
)
def test_a_checkpoint_of_other_optimizers_is_refused(optimizer: Any, told: str, tmp_path: Path) -> None:
    run_steps(1, STEPS[:1], save=tmp_path)
    with pytest.raises(CheckpointError, match=told):
        trainer(1, save=tmp_path, optimizer=optimizer)


@pytest.mark.wide
def test_new_optimizers_begin_with_loaded_weights(tmp_path: Path) -> None:
    before = run_steps(1, STEPS[:2], save=tmp_path).parameters
    run = trainer(1, load=str(tmp_path), load_optim=False, optimizer=SGD)
    assert [each.digest for each in ended(run)] == [each.digest for each in before]


def of_large_critic(outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Return losses whose scaled gradients are beyond fp16 for the critic."""
    found = losses(outputs, batch)
    return {"generator": found["generator"], "critic": 1e4 * found["critic"]}


@pytest.mark.wide
def test_each_optimizer_has_a_loss_scale_of_its_own(tmp_path: Path) -> None:
    options = {"precision": "fp16", "initial_loss_scale": 2.0**12, "hysteresis": 1, "save": tmp_path}
    run = trainer(1, loss=of_large_critic, **options)
    records = [run.step(only=name) for name in ("generator", "critic", "critic", "generator")]
    assert [record["skipped"] for record in records] == [False, True, True, False]
    assert [record["loss_scale"] for record in records] == [2.0**12, 2.0**12, 2.0**11, 2.0**12]
    run.close()
    run = trainer(1, loss=of_large_critic, **options)
    both = run.step()
    assert (both["loss_scale"], both["skipped"]) == (2.0**10, True)
    assert run.step(only="generator")["loss_scale"] == 2.0**11
    assert saved_manifest(tmp_path)["training"]["optimizers"]["critic"]["updates"] == 0
    run.close()


def test_a_step_that_is_not_finite_is_skipped_by_those_that_it_would_update() -> None:
    data = samples()
    data[8]["real"][0] = torch.nan
    run = trainer(1, dataset=data)
    skipped = [run.step(only=name)["skipped"] for name in ("generator", "critic", "critic", "generator")]
    assert skipped == [False, True, False, False]
    optimizer, rates = run._trainer.optimizer, run._trainer.rates
    assert optimizer.updates == {"generator": 2, "critic": 1}  # type: ignore[attr-defined]
    assert rates.steps == {"generator": 2, "critic": 2}  # type: ignore[attr-defined]
    run.close()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("layer", "optimizer"),
    [(nn.LayerNorm(FEATURES), megalite.Adafactor(lr=0.1)), (nn.Linear(FEATURES, 1, bias=False), megalite.Muon(lr=0.1))],
)
def test_a_model_without_matrices_or_vectors_resumes(layer: nn.Module, optimizer: Any, tmp_path: Path) -> None:
    for iteration in (0, 1):
        run = megalite.Trainer(
            deepcopy(layer),
            loss=lambda outputs, batch: outputs.square().mean(),
            dataset=[torch.ones(FEATURES)] * 2,
            micro_batch_size=1,
            optimizer=optimizer,
            save=tmp_path,
            quiet=True,
            watchdog=False,
        )
        assert run.iteration == iteration
        run.step()
        run.close()


@pytest.mark.wide
def test_a_resume_compares_each_optimizer_with_its_own_of_before(tmp_path: Path) -> None:
    run_steps(1, STEPS[:2], save=tmp_path)
    swapped = {"critic": megalite.SGD(lr=0.03, momentum=0.9, weight_decay=0.0), "generator": OPTIMIZERS["generator"]}
    run = trainer(1, save=tmp_path, optimizer=swapped)
    _, *notes = run._trainer.loaded.notes
    assert notes == ["note: lr of critic is 0.03 here, and was 0.02 in the run that saved the checkpoint"]
    run.close()
    shown = run_tool("inspect-checkpoint", str(tmp_path))
    assert (shown.code, "unknown" in shown.stdout) == (0, False)
    assert "optimizers\n  used     generator critic: of a program's run" in shown.stdout
