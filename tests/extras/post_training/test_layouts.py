"""Training with a loss function, generation with the trained weights, and their export, on layouts that split them."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.checkpoint.plan import Region
from megalite.checkpoint.tensors import Kind, TensorBox
from megalite.conversion.huggingface import write_huggingface
from megalite.conversion.native import open_megalite
from megalite.errors import ConfigurationError
from megalite.extras.post_training.export import Collected
from megalite.extras.post_training.reference import Reference
from megalite.inference.sampling import Sampling
from megalite.parallel.sharding import Box
from tests.distributed.layout_cell import VOCABULARIES, Cell, batch, network, oracle
from tests.distributed.layout_expected import assemble, on_ranks
from tests.distributed.layout_run import SEED
from tests.distributed.post_training_run import (
    EOD,
    LOSS,
    PROMPTS,
    exported,
    exports,
    failing_export,
    loss_of,
    policy_steps,
    references,
    rollouts,
    teachers,
)
from tests.harness.close import assert_gradient_close
from tests.harness.rank_pool import RankPools

BASE = Cell("llama", key_values="gqa", tied=False, vocabulary="odd", loss_mask="random", loss_terms=True)
GEMMA = Cell("gemma", key_values="few", vocabulary="empty")
BIASED = Cell("deepseek", key_values="gqa", tied=False)
"""Its experts have biases, which each step changes."""


@functools.cache
def expected(alone: Cell) -> tuple[dict[str, Tensor], dict[str, float], Tensor, Tensor]:
    """Return the oracle's gradients, sums, log-probabilities and entropies [samples, sequence]."""
    weights = network(alone).weights(SEED, alone.torch_dtype, noise=0.2)
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    whole = batch(alone, 0)
    logits = oracle(alone).logits(weights, whole.tokens, whole.positions, whole.document_ids)
    scores = logits[..., : VOCABULARIES[alone.vocabulary][0]].log_softmax(-1)
    log_probabilities = scores.gather(-1, whole.labels.unsqueeze(-1)).squeeze(-1)
    entropies = -(scores.exp() * scores).sum(-1)
    sums = loss_of(log_probabilities, entropies, whole.tokens, whole.loss_mask)
    (0.1 * sums[LOSS]).backward()
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    figures = {name: value.item() for name, value in sums.items()}
    return gradients, figures, log_probabilities.detach(), entropies.detach()


LAYOUTS = {
    "alone": {},
    "tp2": {"tp": 2},
    "tp2-sequence": {"tp": 2, "sequence_parallel": True, "fused_loss": True},
    "pp2": {"pp": 2},
    "dp2-zero3": {"dp": 2, "zero": 3, "overlap": "reduce"},
    "tp2-pp2": {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "interleaved-2"},
}


@pytest.mark.wide_except("tp2-sequence", "pp2", "dp2-zero3")
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.wide] * (name == "tp2-pp2")) for name in LAYOUTS]
)
def test_a_loss_function_has_the_oracles_gradients(layout: str, rank_pools: RankPools) -> None:
    cells = [replace(cell, **LAYOUTS[layout]) for cell in (BASE, GEMMA)]
    by_rank = on_ranks(rank_pools, cells[0].world_size, policy_steps, cells)
    for cell, ranks in zip(cells, zip(*by_rank, strict=True), strict=True):
        gradients, figures, log_probabilities, entropies = expected(cell.alone())
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        found = assemble(rank.gradients for rank in ranks)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert_gradient_close(found[name], gradient, norm, f"gradient of {name}")
        for rank in ranks:
            assert rank.figures == pytest.approx(figures, rel=1e-10)
            for sample, (scores, spread) in rank.outputs.items():
                torch.testing.assert_close(scores, log_probabilities[sample], rtol=1e-10, atol=1e-10)
                torch.testing.assert_close(spread, entropies[sample], rtol=1e-10, atol=1e-10)
        assert {sample for rank in ranks for sample in rank.outputs} == set(range(cell.samples))


GENERATING = {
    "alone": {},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2-zero3": {"dp": 2, "zero": 3, "overlap": "reduce and gather"},
    "tp2-pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "interleaved": {"pp": 2, "schedule": "interleaved-2"},
    "zb-v": {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zb-v"},
}


@functools.cache
def texts_alone(cell: Cell, sampling: Sampling) -> dict[int, tuple[int, ...]]:
    """Return the new tokens for each prompt from a single process."""
    ((result,),) = on_ranks(RankPools(), 1, rollouts, [cell], sampling)
    return {number: rollout.tokens for number, rollout in result.rollouts.items()}


def generating(layout: str, dtype: str) -> list[Cell]:
    """Return cells of a layout: learned and rotary positions, experts, and recurrent layers."""
    cells = [
        Cell("gpt2", tied=True, vocabulary="odd", samples=8, dtype=dtype),
        Cell("llama", key_values="few", tied=False, samples=8, dtype=dtype),
        Cell("mixtral", key_values="gqa", samples=8, dtype=dtype),
        Cell("llama", pattern="LM*-", samples=8, dtype=dtype),
    ]
    changes = GENERATING[layout]
    return [replace(cell, etp=changes.get("tp", 1), **changes) for cell in cells]


@pytest.mark.wide_except("dp2-zero3")
@pytest.mark.parametrize("layout", GENERATING)
def test_generation_and_training_agree_on_log_probabilities(layout: str, rank_pools: RankPools) -> None:
    cells = generating(layout, "float32")
    sampling = Sampling(temperature=1.5, top_k=12)
    by_rank = on_ranks(rank_pools, cells[0].world_size, rollouts, cells, sampling)
    for cell, ranks in zip(cells, zip(*by_rank, strict=True), strict=True):
        found = {}
        for rank in ranks:
            # Steps of a recurrence, which generation takes, round otherwise than its chunks.
            assert rank.figures["log_probability_difference_max"] <= (1e-6 if cell.pattern is None else 4e-6), cell
            assert (
                0.0 < rank.figures["log_probability_difference_mean"] <= rank.figures["log_probability_difference_max"]
            )
            assert 0.0 <= rank.figures["log_probability_kl"] <= 1e-12
            assert rank.whole_weights == 0
            for number, rollout in rank.rollouts.items():
                first = found.setdefault(number, rollout)
                assert (first.tokens, first.finish) == (rollout.tokens, rollout.finish)
                assert torch.equal(first.log_probabilities, rollout.log_probabilities)
                assert (first.sampling_log_probabilities > first.log_probabilities - 2.0).all()
                assert EOD not in first.tokens[:-1]
                assert (first.tokens[-1] == EOD) == (first.finish == "stop")
        assert found.keys() == set(range(len(PROMPTS)))
        alone = texts_alone(replace(cell.alone(), etp=1), sampling)
        assert {number: rollout.tokens[:5] for number, rollout in found.items()} == alone


EXPORTING = {
    "alone": {},
    "tp2-zero3": {"tp": 2, "dp": 2, "zero": 3, "overlap": "reduce"},
    "tp2-pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "pp2-zero1": {"pp": 2, "dp": 2, "zero": 1, "overlap": "reduce and gather", "schedule": "zb-v"},
}


@pytest.mark.wide_except("alone", "tp2-zero3")
@pytest.mark.parametrize("layout", EXPORTING)
def test_an_export_has_the_bits_of_the_converter(layout: str, tmp_path: Path, rank_pools: RankPools) -> None:
    changes = EXPORTING[layout]
    cells = [
        Cell("gpt2", vocabulary="odd", dtype="float32", **changes),
        Cell("llama", key_values="few", tied=False, dtype="bfloat16", **changes),
        Cell("mixtral", key_values="gqa", tied=False, dtype="float32", etp=changes.get("tp", 1), **changes),
    ]
    cells = cells[: 2 if layout == "tp2-zero3" else 3]  # which has no sequence parallelism
    (root, *others) = on_ranks(rank_pools, cells[0].world_size, exports, cells, tmp_path, 200)
    for number, (path, kept) in enumerate(root):
        folder = tmp_path / f"converted{number}"
        write_huggingface(open_megalite(path), folder, dtype=None, shard=10**9, workers=1, advance=lambda _: None)
        expected = load_file(folder / "model.safetensors")
        assert kept.tensors.keys() == expected.keys()
        for name, values in expected.items():
            assert kept.tensors[name].dtype == values.dtype
            assert torch.equal(kept.tensors[name], values), name
        written = json.loads((folder / "config.json").read_text())
        assert kept.config == {name: value for name, value in written.items() if name in kept.config}
        assert kept.finished
        assert kept.largest_box <= 100  # a box of 200 bytes, or one row
    assert all(not kept.tensors for rank in others for _, kept in rank)


def test_a_failing_receiver_ends_the_export_on_every_rank(rank_pools: RankPools) -> None:
    found = rank_pools(2).run(failing_export, Cell("llama", tp=2))
    assert [abandoned for _, abandoned in found] == [True, False]
    assert {message for message, _ in found} == {"exporting the weights failed on rank 0: no space left"}


@pytest.mark.wide_except("alone", "tp2-pp2")
@pytest.mark.parametrize("layout", ["alone", "dp2-zero3", "tp2-pp2"])
def test_a_reference_keeps_the_weights_of_its_time(layout: str, rank_pools: RankPools) -> None:
    cells = [replace(cell, **LAYOUTS[layout]) for cell in (BASE, GEMMA, BIASED)]
    for rank in on_ranks(rank_pools, cells[0].world_size, references, cells):
        for at_once, later, refreshed, gathered in rank:
            assert at_once == later == refreshed == 0.0
            assert (gathered == 0) == (layout == "dp2-zero3")


ROUNDED = {
    "alone": Cell("llama", recipe="mxfp8", wide=2, plain_layers=(0,)),
    "tp2-pp2": Cell("llama", recipe="tensorwise", wide=2, tied=False),
    "dp2-zero3": Cell("llama", recipe="blockwise", wide=4, gathers_codes=True),
}


@pytest.mark.parametrize("layout", ROUNDED)
def test_a_reference_rounds_as_the_network_does(layout: str, rank_pools: RankPools) -> None:
    cell = replace(ROUNDED[layout], **LAYOUTS[layout])
    for ((at_once, later, refreshed, _),) in on_ranks(rank_pools, cell.world_size, references, [cell]):
        assert at_once == later == refreshed == 0.0


def test_a_reference_takes_slices_of_the_host_after_its_last_forward_has_read_its_own() -> None:
    own, trained, copied = Mock(zero_stage=3, parameter_shard=torch.zeros(3)), Mock(), []
    trained.parameter_shard = torch.ones(3)
    own.release_slice.side_effect = lambda: copied.append(bool(own.parameter_shard.any()))
    reference = Reference.__new__(Reference)
    reference.optimizer = Mock(frozen=[own], module_states=[])
    reference._trained = Mock(buckets=[trained], module_states=[])
    reference.refresh()
    assert copied == [False]
    assert own.parameter_shard.all()


def test_slices_of_the_host_are_sent_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sends nothing from the host. Here the meta device stands for the device."""
    box, sent = Box((0,), (3,)), []
    collected = Collected.__new__(Collected)
    collected._mesh = Mock(rank=1, device=torch.device("meta"))
    collected.tensors = {"weight": Kind((3,), torch.float32)}
    collected._boxes = {"weight": {1: [box]}}
    collected._own = {"weight": [Region(TensorBox("weight", (3,), torch.float32, box), torch.ones(3))]}
    monkeypatch.setattr(Collected, "_message", lambda self, _, tensor, peer: sent.append((tensor.device.type, peer)))
    collected.fill("weight", box, torch.empty(3, device="meta"))
    assert sent == [("meta", 0)]


@pytest.mark.parametrize("layout", ["alone", "dp2-zero3", "tp2-pp2"])
def test_a_teacher_of_another_size_scores_the_samples(layout: str, tmp_path: Path, rank_pools: RankPools) -> None:
    teacher = Cell("llama", key_values="gqa", tied=False, vocabulary="odd")
    log_probabilities = exported(teacher, tmp_path / "teacher")
    student = Cell("gpt2", vocabulary="odd", **LAYOUTS[layout])
    for ((samples, found, gathered),) in on_ranks(
        rank_pools, student.world_size, teachers, [student], tmp_path / "teacher"
    ):
        torch.testing.assert_close(found, log_probabilities[samples], rtol=1e-10, atol=1e-10)
        assert (gathered == 0) == (layout == "dp2-zero3")
    with pytest.raises(ConfigurationError, match="has 29 tokens, but the network that is trained has 32"):
        teachers([Cell("gpt2", vocabulary="even")], tmp_path / "teacher")
