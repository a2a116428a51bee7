"""Losses of one's own by `run.forward_backward` on any layout, with dropout, entropies and several terms."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import megalite
from tests.distributed.layout_expected import on_ranks
from tests.dropout_rule import Dropout
from tests.harness.close import assert_number_close
from tests.harness.covering_array import Factors, Row, covering_array, every_value_once
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except
from tests.initial_weights import Network
from tests.oracle import Oracle

STEPS, SAMPLES, LENGTH, VOCABULARY, SEED, RATE = 2, 8, 8, 13, 77, 0.02
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "instances": {"dp": 4, "instances": 2},
    "tp2": {"dp": 2, "tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "1f1b": {"pp": 2, "dp": 2},
    "interleaved": {"pp": 2, "stages_per_rank": 2},
    "zb-v": {"pp": 2, "dp": 2, "stages_per_rank": 2, "schedule": "zb-v"},
}
FACTORS: Factors = {
    "layout": tuple(LAYOUTS),
    "zero": (0, 1, 2, 3),
    "overlap": (False, True),
    "loss": ("masked", "counted", "named"),
    "entropies": (False, True),
    "dropout": (0.0, 0.3),
    "micro_batch_size": (1, 2),
    "tied": (True, False),
    "recompute": (None, "selective"),
    "scored": (False, True),
    "clip": (0.0, 0.5),
}
"""`scored`: log-probabilities are asked for between gradients and their update."""


def possible(row: Row) -> bool:
    """Tell whether there is something to shard and to overlap."""
    ranks = LAYOUTS[row["layout"]].get("dp", 1)
    if ranks == 1 and (row["zero"] or row["overlap"]):
        return False
    return not (row["layout"] == "instances" and not row["zero"])


@dataclass
class Outcome:
    """Records of the steps on one rank, and log-probabilities of all samples before the update of each step."""

    records: list[dict[str, Any]]
    scores: list[Tensor]


def samples(step: int) -> dict[str, Tensor]:
    """Return the samples of a step; those of each half are alike, so that only their numbers tell them apart."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (SAMPLES // 2, LENGTH), generator=generator).repeat(2, 1)
    mask = (torch.rand(SAMPLES // 2, LENGTH, generator=generator) < 0.7).float().repeat(2, 1)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": mask, "advantage": tokens[:, 0].double() - 6.0}


def sums_of(log_probabilities: Tensor, entropies: Tensor | None, batch: Mapping[str, Any], kind: str) -> Any:
    """Return the sums of a loss."""
    mask = batch["loss_mask"]
    total = -(log_probabilities * batch["advantage"][:, None] * mask).sum()
    if entropies is not None:
        total = total - 0.1 * (entropies * mask).sum()
    if kind == "named":
        return {"loss": total, "drift": log_probabilities.square().sum()}
    return {"loss": total}


def count_of(kind: str, batch: Mapping[str, Any]) -> dict[str, float]:
    """Return what the sums are divided by: the tokens that count, the samples, or numbers by name."""
    if kind == "masked":
        return {"loss": float(batch["loss_mask"].sum())}
    return {"loss": len(batch["tokens"]), **({"drift": 3.0 * batch["tokens"].numel()} if kind == "named" else {})}


def steps(row: Row) -> Outcome:
    """Take the steps of a row on this rank."""
    kind, layout = row["loss"], LAYOUTS[row["layout"]]
    config = megalite.GPTConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=24,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=4,
        max_position_embeddings=LENGTH,
        init_method_std=0.2,
        hidden_dropout=row["dropout"],
        attention_dropout=row["dropout"],
        untie_embeddings_and_output_weights=not row["tied"],
    )
    found = Outcome([], [])
    with megalite.Trainer(
        config,
        seq_length=LENGTH,
        micro_batch_size=row["micro_batch_size"],
        global_batch_size=SAMPLES,
        optimizer=megalite.SGD(lr=RATE, momentum=0.9, weight_decay=0.0, clip_grad=row["clip"]),
        layout=megalite.Layout(**layout, zero=row["zero"], overlap=row["overlap"]),
        precision="fp64",
        seed=SEED,
        recompute_granularity=row["recompute"],
        quiet=True,
        watchdog=False,
    ) as run:
        number, ranks = run.mesh.coordinate("dp"), run.mesh.size("dp")
        part = slice(number * SAMPLES // ranks, (number + 1) * SAMPLES // ranks)
        for step in range(STEPS):
            batch = {name: values[part] for name, values in samples(step).items()}
            if not row["scored"]:
                found.scores.append(run.logprobs(batch))
            run.forward_backward(
                batch,
                lambda outputs, fields: sums_of(outputs.log_probabilities, outputs.entropies, fields, kind),
                count=None if kind == "masked" else lambda fields: count_of(kind, fields),
                entropies=row["entropies"],
            )
            if row["scored"]:
                found.scores.append(run.logprobs(batch))
            found.records.append(run.optimizer_step(reward=float(number)))
    return found


@functools.cache
def by_hand(
    kind: str, entropies: bool, dropout: float, tied: bool, clip: float
) -> tuple[list[dict[str, float]], list[Tensor]]:
    """Return the loss, its terms and the gradient norm of each step, and the log-probabilities before it."""
    network = Network(
        layers=4, hidden=16, heads=2, groups=2, head_dim=8, ffn=24, vocabulary=VOCABULARY, std=0.2, positions=LENGTH,
        tied=tied,
    )  # fmt: skip
    weights = {name: value.requires_grad_() for name, value in network.weights(SEED, torch.float64).items()}
    optimizer = torch.optim.SGD(weights.values(), RATE, momentum=0.9)
    records, scores = [], []

    def score(batch: Mapping[str, Tensor], numbers: Sequence[int], rate: float) -> tuple[Tensor, Tensor]:
        positions, dropped = torch.arange(LENGTH).expand_as(batch["tokens"]), Dropout(SEED, numbers, rate, rate)
        logits = Oracle().logits(weights, batch["tokens"], positions, dropout=dropped)[..., :VOCABULARY]
        every = logits.log_softmax(-1)
        return every.gather(-1, batch["labels"][..., None])[..., 0], -(every.exp() * every).sum(-1)

    for step in range(STEPS):
        batch, numbers = samples(step), range(step * SAMPLES, (step + 1) * SAMPLES)
        scores.append(score(batch, numbers, 0.0)[0].detach())
        optimizer.zero_grad()
        found, spread = score(batch, numbers, dropout)
        sums, counts = sums_of(found, spread if entropies else None, batch, kind), count_of(kind, batch)
        means = {name: each / counts[name] for name, each in sums.items()}
        torch.stack(list(means.values())).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), clip or float("inf"))
        optimizer.step()
        records.append({**{name: each.item() for name, each in means.items()}, "grad_norm": norm.item()})
    return records, scores


def shown(row: Row) -> str:
    return "-".join(value if isinstance(value, str) else f"{name}{value}" for name, value in row.items() if value)


ROWS = covering_array(FACTORS, possible, candidates=4)


@pytest.mark.wide_except(
    "dp4-zero3-named-dropout0.3-micro_batch_size1-tiedTrue-scoredTrue",
    "instances-zero1-overlapTrue-named-entropiesTrue-micro_batch_size2-tiedTrue-selective-scoredTrue",
    "1f1b-zero1-masked-entropiesTrue-dropout0.3-micro_batch_size1-tiedTrue-selective-scoredTrue-clip0.5",
    "sequence-named-entropiesTrue-micro_batch_size1-selective-clip0.5",
)
@pytest.mark.parametrize("row", wide_except(ROWS, every_value_once(ROWS)), ids=shown)
def test_a_loss_of_ones_own_is_the_same_on_any_layout(row: Row, rank_pools: RankPools) -> None:
    layout = LAYOUTS[row["layout"]]
    ranks = layout.get("dp", 1)
    world = ranks * layout.get("tp", 1) * layout.get("pp", 1)
    records, scores = by_hand(row["loss"], row["entropies"], row["dropout"], row["tied"], row["clip"])
    for number, found in enumerate(on_ranks(rank_pools, world, steps, row)):
        for step, expected in enumerate(records):
            for name, value in expected.items():
                assert_number_close(found.records[step][name], value, f"{name} of step {step} on rank {number}", 1e-9)
            assert found.records[step]["reward"] == (ranks - 1) / 2
        size = SAMPLES // ranks
        for step, expected_scores in enumerate(scores):
            parts = [expected_scores[begin : begin + size] for begin in range(0, SAMPLES, size)]
            assert any(torch.allclose(found.scores[step], part, rtol=1e-10, atol=1e-10) for part in parts)


def test_samples_of_different_ranks_drop_different_elements(rank_pools: RankPools) -> None:
    row = {name: values[0] for name, values in FACTORS.items()} | {"layout": "dp2", "dropout": 0.3}
    records, _ = by_hand(row["loss"], row["entropies"], row["dropout"], row["tied"], row["clip"])
    for found in rank_pools(2).run(steps, row):
        assert_number_close(found.records[0]["loss"], records[0]["loss"], "loss", 1e-9)
