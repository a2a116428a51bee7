"""Converted models on layouts that split them: their logits, their training, and their export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from megalite.conversion.huggingface import write_huggingface
from megalite.conversion.native import open_megalite
from tests.distributed import conversion_run
from tests.harness import huggingface as theirs
from tests.harness.huggingface import CONFIGS
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

LOGITS = 1e-5
"""Tolerance: both sides compute logits of about 1 in fp32, in different orders."""
STEPS, BATCH, RATE = 20, 4, 1e-3
SLOW = 1e-4
"""Learning rate where a choice of experts, or writes twice as strong, make rounding grow from step to step."""
TRAINED = ["llama", "gpt2", "nemotron-h-dense", "bamba", "granite-dense", "qwen3.5", "lfm2", "olmo-hybrid"]
TRAINED += ["deepseek-v2", "deepseek-v3", "deepseek-v32", "glm-moe-dsa", "kimi-linear"]
TRAINED += ["qwen3-next", "qwen3.5-moe", "nemotron-h", "nemotron-3", "granite", "gpt-oss", "minimax-m2", "olmoe"]

WITH_BIAS = ["nemotron-h", "nemotron-3", "minimax-m2", "deepseek-v3", "kimi-linear"]
WITH_BIAS += ["deepseek-v32", "glm-moe-dsa"]
"""Models with a bias of the choice of experts, which transformers leaves as it is."""


def flags(folder: Path, save: Path, steps: int, rate: float = RATE) -> list[str]:
    """Return the flags of a run that begins with a folder's weights."""
    given = (
        f"--load {folder} --save {save} --mock-data --tokenizer-type NullTokenizer --seq-length 32 --eval-iters 0 "
        f"--micro-batch-size 2 --global-batch-size {BATCH} --train-iters {steps} --lr {rate} --lr-decay-style constant "
        "--hidden-dropout 0 --attention-dropout 0 --weight-decay 0.1"
    )
    return given.split()


def export(run: Path, folder: Path) -> PreTrainedModel:
    """Export a run's checkpoint to the folder, and return it as read by transformers."""
    write_huggingface(open_megalite(run), folder, dtype=None, shard=10**9, workers=1, advance=lambda _: None)
    model, info = theirs.load(folder)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("name", wide_except(CONFIGS, ["nemotron-h"]))
def test_from_hugging_face_onto_ranks_and_back(name: str, tmp_path: Path, rank_pools: RankPools) -> None:
    tokens = theirs.tokens()
    expected = theirs.logits(theirs.save(tmp_path / "theirs", name), tokens)
    for found in rank_pools(4).run(conversion_run.logits_of, tmp_path / "theirs", tokens, tp=2, pp=2):
        assert (found - expected).abs().max() <= LOGITS
    arguments = flags(tmp_path / "theirs", tmp_path / "run", steps=1)
    arguments = [*arguments, "--sequence-parallel"]  # which experts need
    rank_pools(4).run(conversion_run.train, arguments, tp=2, pp=2, steps=0)
    model = export(tmp_path / "run", tmp_path / "ours")
    assert (theirs.logits(model, tokens) - expected).abs().max() <= LOGITS
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def plain_losses(model: PreTrainedModel, batches: Sequence[tuple[Tensor, Tensor]], rate: float) -> list[float]:
    """Train with torch alone."""
    weights = {
        name for name, each in model.named_parameters() if each.dim() > 1 and not name.endswith(("bias", "A_log"))
    }
    decayed = [parameter for name, parameter in model.named_parameters() if name in weights]
    others = [parameter for name, parameter in model.named_parameters() if name not in weights]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for tokens, labels in batches:
        loss = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(1, 1, marks=pytest.mark.wide), (2, 2)])
@pytest.mark.parametrize("name", wide_except(TRAINED, ["gpt2"]))
def test_training_goes_as_with_transformers(name: str, tp: int, pp: int, tmp_path: Path, rank_pools: RankPools) -> None:
    model = theirs.save(tmp_path / "theirs", name)
    rate = SLOW if name in ("olmo-hybrid", "qwen3-next", "gpt-oss") else RATE
    arguments = [*flags(tmp_path / "theirs", tmp_path / "run", STEPS, rate), "--sequence-parallel"]  # for experts
    if name in WITH_BIAS:
        arguments += ["--moe-router-bias-update-rate", "0"]
    expected = plain_losses(model, conversion_run.batches(arguments, BATCH), rate)
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.02  # otherwise the weights would not matter
    for losses in rank_pools(tp * pp).run(conversion_run.train, arguments, tp=tp, pp=pp, steps=STEPS):
        assert max(abs(ours - other) for ours, other in zip(losses, expected, strict=True)) <= 1e-5
    trained = export(tmp_path / "run", tmp_path / "ours")
    # AdamW's first steps have the same size for any gradient: if it is nearly 0, rounding decides the sign.
    assert (theirs.logits(trained, theirs.tokens()) - theirs.logits(model, theirs.tokens())).abs().max() <= 1e-3


def test_a_dense_model_warms_indexers_up(tmp_path: Path, rank_pools: RankPools) -> None:
    """They begin anew, and its own weights, to which the warm-up does nothing, are written as they were."""
    model = theirs.save(tmp_path / "dense", "deepseek-v3")
    sparse = (
        "--experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 6 --dsa-indexer-topk 5"
    )
    stage = "--dsa-indexer-k-norm-epsilon 1e-6 --dsa-indexer-loss-coeff 1.0 --dsa-stage warmup --finetune"
    given = [*flags(tmp_path / "dense", tmp_path / "run", 2), *sparse.split(), *stage.split(), "--sequence-parallel"]
    ((tokens, labels), _) = conversion_run.batches(given, BATCH)
    expected = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), labels.flatten()).item()
    for losses in rank_pools(2).run(conversion_run.train, given, tp=2, pp=1, steps=2):
        assert abs(losses[0] - expected) <= 1e-5
    assert export(tmp_path / "run", tmp_path / "ours").config.model_type == "deepseek_v32"
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("dense", "ours"))
    assert all(torch.equal(values, after[name]) for name, values in before.items() if "correction_bias" not in name)
    assert len({*after} - {*before}) == 4 * 5
