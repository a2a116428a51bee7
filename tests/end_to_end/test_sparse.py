"""Sparse attention from the command line: runs that add or leave out indexers, share them, or train another stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end.runs import COURSE, MOCK, Run, iterations, losses, saved_tensors, words

FLAGS = [
    *MOCK,
    *COURSE,
    *words("--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --save-interval 2"),
    *words("--multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4"),
    *words("--v-head-dim 4 --qk-layernorm --position-embedding-type rope --normalization RMSNorm --swiglu"),
    *words("--disable-bias-linear --untie-embeddings-and-output-weights --train-iters 2"),
]
LONGER = words("--train-iters 4")
SIZES = words("--dsa-indexer-n-heads 8 --dsa-indexer-head-dim 6 --dsa-indexer-topk 5")
FROZEN = words("--experimental-attention-variant dsa") + SIZES
TRAINED = (*FROZEN, *words("--dsa-indexer-loss-coeff 1.0"))
ASKS = "(--finetune leaves out indexers that the run lacks, and begins those that it adds anew)"


@pytest.mark.wide
def test_indexers_begin_anew_and_are_left_out_where_it_is_asked(run: Run, tmp_path: Path) -> None:
    """The warm-up begins with the loss of the dense model, since it attends to all keys."""
    dense, sparse = ["--load", tmp_path / "dense"], ["--load", tmp_path / "sparse"]
    run(*FLAGS, "--save", tmp_path / "dense")
    refused = run(*FLAGS, *LONGER, *TRAINED, *dense, "--save", tmp_path / "sparse", expected=93).stderr
    assert "hybrid_layer_pattern: +-+- in the checkpoint, D-D- in this run" in refused
    assert "dsa_indexer_topk: None in the checkpoint, 5 in this run" in refused
    assert ASKS in refused
    warm = [*FLAGS, *TRAINED, *words("--dsa-stage warmup --finetune"), *dense]
    out = run(*warm, "--save", tmp_path / "sparse").stdout
    assert " parameters: those of the indexers\n" in out
    assert " | indexer loss " in out
    assert "has other indexers: --finetune begins those of this run anew (2)\n" in out
    run(*FLAGS, *words("--finetune"), *dense, "--save", tmp_path / "again")
    assert losses(tmp_path / "sparse")[0] == losses(tmp_path / "again")[0]
    assert ASKS in run(*FLAGS, *LONGER, *sparse, "--save", tmp_path / "none", expected=93).stderr
    out = run(*FLAGS, "--finetune", *sparse, "--save", tmp_path / "none").stdout
    assert "has other indexers: --finetune leaves out its indexers (2)\n" in out
    assert losses(tmp_path / "none")[0] == losses(tmp_path / "again")[0]
    by_checkpoint = words("--finetune --use-checkpoint-args --experimental-attention-variant None")
    run(*MOCK, *COURSE, *words("--seq-length 16 --train-iters 2"), *by_checkpoint, *sparse, "--save", tmp_path / "args")
    assert losses(tmp_path / "args") == losses(tmp_path / "none")


@pytest.mark.wide
def test_layers_that_share_choices_leave_out_their_indexers_alone(run: Run, tmp_path: Path) -> None:
    run(*FLAGS, *TRAINED, "--save", tmp_path / "all")
    finetune = ["--finetune", "--load", tmp_path / "all"]
    shared = [*FLAGS, *FROZEN, *words("--dsa-indexer-topk-freq 2")]
    out = run(*shared, *finetune, "--save", tmp_path / "shared").stdout
    assert "has other indexers: --finetune leaves out its indexers (1)\n" in out
    before, after = (saved_tensors(tmp_path / name / "iter_0000002") for name in ("all", "shared"))
    kept = "model/layers.0.latent_attention.indexer.query"
    assert torch.equal(before[kept], after[kept])  # which is frozen there
    assert not any(name.startswith("model/layers.1.latent_attention.indexer") for name in after)
    fewer = run(*shared, *words("--dsa-indexer-topk 4"), *finetune, "--save", tmp_path / "fewer").stdout
    assert "indexers choose 4 keys, and chose 5 in " in fewer
    assert losses(tmp_path / "fewer") != losses(tmp_path / "shared")
    assert "sparse attention  2 layers, 1 with an indexer, to 4 keys of a token\n" in fewer
    assert "all but those of the indexers" in fewer
    other = [*FLAGS, *FROZEN, *words("--dsa-indexer-topk-freq 2 --dsa-indexer-head-dim 8")]
    assert "dsa_indexer_head_dim: 6 in" in run(*other, *finetune, "--save", tmp_path / "other", expected=93).stderr


def test_another_stage_needs_new_optimizer_state(run: Run, tmp_path: Path) -> None:
    flags = [
        *FLAGS,
        *words("--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"),
    ]
    run(*flags, *TRAINED, *words("--dsa-stage warmup"), "--save", tmp_path / "warm")
    saved = saved_tensors(tmp_path / "warm" / "iter_0000002")
    loads = [values.tolist() for name, values in saved.items() if name.endswith("previous_load")]
    assert loads == [[0.25] * 4] * 2  # as at the start: routers are frozen, too
    further = [*flags, *TRAINED, *LONGER, "--load", tmp_path / "warm", "--save", tmp_path / "sparse"]
    refused = run(*further, expected=93).stderr
    assert "is of a run that trained other weights, and its optimizer state is not of those of this one" in refused
    assert "--dsa-stage warmup with --dsa-indexer-loss-coeff 1, here --dsa-stage sparse with" in refused
    run(*further, "--no-load-optim")
    assert iterations(tmp_path / "sparse") == [3, 4]
    same = words("--dsa-stage indexer --dsa-indexer-use-sparse-loss")  # trains what the warm-up does
    out = run(*further[:-1], tmp_path / "indexer", *same).stdout
    assert "restored: weights, optimizer state (2 updates)" in out
