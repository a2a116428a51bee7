"""Largest logits of attention, from any mask and in blocks of rows; weights agree with their clipped masters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config import RunConfig, parse_arguments, resolve
from megalite.errors import ConfigurationError
from megalite.optim.packed import View
from megalite.parallel.largest_logits import largest_of_all
from megalite.parallel.mesh import UnconnectedMesh
from megalite_kernels.attention import Mask, as_addend, block_mask, dense_mask
from megalite_kernels.largest_logits import largest_logits
from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_expected import one_thread
from tests.distributed.layout_run import (
    Training,
    initialized_chunks,
    local_micro_batches,
    make_chunks,
    make_meshes,
    make_optimizer,
)

BATCH, HEADS, GROUPS, ROWS, WIDTH = 2, 6, 3, 256, 8
FIRST = torch.tensor([[row // 100 * 100 for row in range(ROWS)], [max(row - 7, 0) for row in range(ROWS)]])
"""The first key that each query sees: of its document, or of its window."""
MASKS: dict[str, Callable[[], Any]] = {
    "causal": lambda: None,
    "a part, causal": lambda: "causal",
    "a part, all": lambda: "all",
    "dense": lambda: dense_mask(FIRST),
    "an addend": lambda: as_addend(dense_mask(FIRST), torch.float64),
    "in blocks": lambda: block_mask(FIRST),
    "in blocks, of one sample": lambda: block_mask(FIRST[:1]),
}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(BATCH, HEADS, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return query.to(dtype), torch.randn(BATCH, GROUPS, ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def by_hand(query: Tensor, key: Tensor, visible: np.ndarray) -> np.ndarray:
    """The largest logit of each head, of queries and keys that see each other, [batch or 1, rows, keys]."""
    found = np.full(HEADS, -np.inf)
    for head in range(HEADS):
        for sample in range(BATCH):
            logits = query[sample, head].double().numpy() @ key[sample, head // 2].double().numpy().T * 0.3
            found[head] = max(found[head], logits[visible[sample % len(visible)]].max(initial=-np.inf))
    return found


@pytest.mark.wide_except(*(f"{mask}-7 rows" for mask in MASKS), "dense-all", "in blocks-all", "an addend-a row")
@pytest.mark.parametrize("at_once", [1, BATCH * HEADS * ROWS * 7, 2**25], ids=["a row", "7 rows", "all"])
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_the_largest_of_visible_pairs(mask: str, at_once: int) -> None:
    query, key = inputs()
    places = np.arange(ROWS)
    causal = (places <= places[:, None])[None]
    visible = causal & (places >= FIRST.numpy()[:, :, None])
    seen = {"causal": causal, "a part, causal": causal, "a part, all": np.ones_like(causal)}.get(mask, visible)
    if mask.endswith("of one sample"):
        seen = seen[:1]
    found = largest_logits(query, key, MASKS[mask](), 0.3, at_once=at_once)
    np.testing.assert_allclose(found.numpy(), by_hand(query, key, seen), rtol=1e-13)


def test_queries_that_fill_up_a_sample_do_not_count() -> None:
    query, key = inputs()
    query[0, :, 200:] *= 100.0
    counted = torch.arange(ROWS) < torch.tensor([[200], [0]])
    found = largest_logits(query, key, None, 0.3, counted, at_once=2**18)
    causal = np.tril(np.ones((ROWS, ROWS), dtype=bool))
    visible = np.stack([causal & (np.arange(ROWS) < 200)[:, None], np.zeros_like(causal)])
    np.testing.assert_allclose(found.numpy(), by_hand(query, key, visible), rtol=1e-13)


def test_logits_of_narrow_numbers_are_wide() -> None:
    query, key = inputs(torch.bfloat16)
    found = largest_logits(query, key, None, None)
    assert found.dtype == torch.float32
    exact = largest_logits(query.double(), key.double(), None, None)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0.0)


def test_parts_of_keys_in_turn_have_the_largest_of_all() -> None:
    query, key = inputs()
    mask: Mask = dense_mask(FIRST)
    assert isinstance(mask, Tensor)
    parts = [largest_logits(query, key[:, :, own], mask[..., own], 0.3) for own in (slice(0, 99), slice(99, ROWS))]
    whole = largest_logits(query, key, mask, 0.3)
    torch.testing.assert_close(torch.maximum(*parts), whole, rtol=1e-13, atol=0.0)


def trained(cell: Cell) -> list[tuple[str, Tensor, Tensor]]:
    """The names, values and masters of the parameters after a step."""
    with one_thread():
        mesh = make_meshes([cell])[cell.split]
        training = Training(mesh, cell, initialized_chunks(mesh, cell))
        training.step(0)
    found = []
    for each in training.optimizer.slices():
        master = each.state.get("master", each.values)
        wide = master.read() if isinstance(master, View) else master.clone()
        found.append((each.parameter.sharding.name, each.values.clone(), wide))
    return found


@pytest.mark.parametrize(("kept", "optimizer"), [("masters", "muon"), ("remainders", "adam"), ("16 bits", "adam")])
def test_weights_are_rounded_masters(kept: str, optimizer: str) -> None:
    options = {"masters": {}, "remainders": {"eight_bits": True}, "16 bits": {"narrow": True}}[kept]
    row = {"dp": 1, "key_values": "few", "family": "llama", "dtype": "bfloat16", "optimizer": optimizer}
    cell = make_cell(row, qk_clip=2.0, **options)
    moved = []
    for (name, values, master), (_, _, plain) in zip(trained(cell), trained(replace(cell, qk_clip=1e6)), strict=True):
        torch.testing.assert_close(values.float(), master.float(), rtol=2**-8, atol=0.0)
        assert torch.equal(values, master.to(torch.bfloat16)) or kept == "remainders"  # whose ties round up
        changed = (master != plain).float().mean().item()
        if "query" in name:
            moved.append(changed)
        else:
            assert changed == 0.0, name
    assert any(0.1 < share < 0.7 for share in moved)  # of queries, keys and values, the last of which stay


RUN = """--mock-data --tokenizer-type NullTokenizer --vocab-size 8 --num-layers 2 --hidden-size 8 --lr 1
    --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4 --micro-batch-size 1 --train-iters 1"""
LATENT = "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 4 --qk-head-dim 2 --v-head-dim 2"


def resolved(flags: str, world_size: int = 2) -> RunConfig:
    return resolve(parse_arguments([*RUN.split(), *flags.split()]).config, world_size)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--qk-clip --qk-layernorm",
            "--qk-layernorm normalises queries and keys behind them, which undoes it: drop one",
        ),
        ("--qk-clip --qk-layernorm --qk-layernorm-over-heads --normalization RMSNorm", "which undoes it: drop one"),
        (
            "--qk-clip --qk-layernorm --hybrid-layer-pattern *-",
            "--qk-layernorm normalises queries and keys behind them, which undoes it: drop one",
        ),
        (
            "--qk-clip --local-update local-sgd",
            "--local-update local-sgd: each replica has weights of its own; drop one",
        ),
        (
            "--log-max-attention-logit --asynchronous parameter-server --num-servers 1",
            "--log-max-attention-logit and --asynchronous parameter-server: workers have weights of different steps",
        ),
        ("--qk-clip --drop-stragglers-after 2", "a micro-batch that is left out has logits all the same; drop one"),
        (
            "--qk-clip --survivors-finish-step --memory-checkpoint-interval 1",
            "--qk-clip and --survivors-finish-step: logits of micro-batches that survivors keep are lost; drop one",
        ),
    ],
)
def test_where_it_would_be_wrong_it_is_refused(flags: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolved(flags)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--qk-clip --qk-clip-alpha 0.3 --qk-clip-threshold 20",
        f"--qk-clip --qk-layernorm {LATENT} --qk-pos-emb-head-dim 2",
        "--log-max-attention-logit --qk-layernorm",
        "--qk-clip --optimizer muon --sites 2",
    ],
)
def test_where_it_is_right_it_is_taken(flags: str) -> None:
    assert resolved(flags).model.measures_logits


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ("--qk-clip-alpha 0.3 --qk-clip-threshold 20", "--qk-clip-alpha 0.3: changes nothing without --qk-clip"),
        ("--qk-clip --hybrid-layer-pattern L-", "--qk-clip: changes nothing, since --hybrid-layer-pattern 'L-' has no"),
    ],
)
def test_where_it_changes_nothing_it_is_told(flags: str, idle: str) -> None:
    (told, *_) = [note for note in parse_arguments([*RUN.split(), *flags.split()]).notes if "qk-clip" in note]
    assert told.startswith(idle)
    assert resolved(flags).model == replace(resolved(flags).model, qk_clip=False, qk_clip_alpha=0.5)


@pytest.mark.parametrize("logs_alone", [False, True])
def test_the_proof_of_a_step_knows_the_sum_of_the_ranks_that_share_a_stage(logs_alone: bool) -> None:
    cell = make_cell({"dp": 2, "tp": 2, "pp": 2, "family": "llama"}, logs_logits=logs_alone)
    cell = cell if logs_alone else replace(cell, qk_clip=2.0)
    for rank in range(8):
        mesh = UnconnectedMesh(rank=rank, world_size=8, **cell.split._asdict())
        collectives = make_optimizer(make_chunks(mesh, cell), mesh, cell).collectives()
        found = [ranks for name, ranks in collectives if name == "largest logits"]
        assert found == ([] if logs_alone else [tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))])


def test_evaluation_measures_nothing() -> None:
    cell = make_cell({"dp": 1, "family": "llama", "recompute": "uniform"}, logs_logits=True)
    mesh = make_meshes([cell])[cell.split]
    (stage,) = initialized_chunks(mesh, cell)
    micro_batch = next(local_micro_batches(cell, 0, 0))
    stage.eval()({}, micro_batch)
    assert largest_of_all([stage], mesh) == -math.inf
    stage.train()({}, micro_batch)
    assert 0.0 < largest_of_all([stage], mesh) < math.inf


def test_frozen_weights_stay() -> None:
    cell = make_cell({"dp": 1, "key_values": "few", "family": "llama", "tp": 1}, qk_clip=0.5)
    with one_thread():
        mesh = make_meshes([cell])[cell.split]
        (stage,) = initialized_chunks(mesh, cell)
        frozen, other = (stage.layers[layer].attention.query_key_value.weights[0] for layer in (0, 1))
        frozen.requires_grad_(False)
        before = frozen.clone(), other.clone()
        Training(mesh, cell, [stage]).step(0)
    assert torch.equal(frozen, before[0])
    assert not torch.equal(other, before[1])
