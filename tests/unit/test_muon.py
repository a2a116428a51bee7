"""Muon against torch.optim.Muon on the matrices that the mathematics names, and against their singular values."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from megalite.optim.muon import Muon, _elements
from megalite.optim.newton_schulz import coefficients, orthogonalized
from megalite.optim.optimizer import make_optimizer
from megalite.parallel import placement
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import DenseGradient, Parameter, accumulate_grad, named_pieces
from megalite.parallel.sharding import LogicalTensor, Normal
from tests import muon as oracle
from tests.harness.close import assert_bits_equal

MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, group_query_attention=True, num_query_groups=1,
    ffn_hidden_size=64, vocab_size=11, max_position_embeddings=5, swiglu=True,
)  # fmt: skip
MUON = OptimizerConfig(
    lr=0.0, optimizer="muon", clip_grad=0.0, muon_momentum=0.95, muon_nesterov=True, muon_coefficient_type="simple",
    muon_scale_mode="shape_scaling",
)  # fmt: skip
RATES = Rates(0.1, 0.1, weight_decay=0.3)


def trained(
    config: OptimizerConfig, steps: int = 3
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return initial weights, gradients of each step, and final weights, by logical name, on one process in fp32."""
    mesh = ParallelMesh()
    network = GPT(MODEL, mesh, dtype=torch.float32)
    initialize(network, seed=1)
    optimizer = make_optimizer([network], mesh, config, DataParallel(torch.float32))
    generator = torch.Generator().manual_seed(0)
    before = weights(network)
    gradients: list[dict[str, Tensor]] = []
    for _ in range(steps):
        optimizer.begin_step(1)
        gradients.append({})
        for parameter in {id(p): p for p, _ in named_pieces(network)}.values():
            drawn = torch.zeros(parameter.shape)
            for piece in parameter.sharding.pieces:
                values = torch.randn(piece.box.size, generator=generator)
                gradients[-1][piece.tensor.name] = values * len(parameter.sharding.uses)
                piece.view(drawn).copy_(values)
            for use in range(len(parameter.sharding.uses)):
                accumulate_grad(parameter, DenseGradient(drawn), use)
        optimizer.reduce(0, 1)
        optimizer.step(RATES)
    return before, gradients, weights(network)


def weights(network: GPT) -> dict[str, Tensor]:
    return {piece.tensor.name: piece.view(parameter).detach().clone() for parameter, piece in named_pieces(network)}


def expected(
    before: dict[str, Tensor], gradients: list[dict[str, Tensor]], adjust: str, nesterov: bool
) -> dict[str, Tensor]:
    """Compute the same with torch.optim on matrices written out by hand."""
    after = {}
    for name, value in before.items():
        matrices = oracle.matrices(name, value)
        parts = [value.clone()] if matrices is None else [matrix.clone() for matrix in matrices]
        made: torch.optim.Optimizer
        decay = 0.0 if name.endswith("bias") or "norm" in name else RATES.weight_decay
        if matrices is None:
            made = torch.optim.AdamW(parts, lr=0.1, weight_decay=decay, fused=True)
        else:
            made = torch.optim.Muon(parts, lr=0.1, weight_decay=decay, nesterov=nesterov, adjust_lr_fn=adjust)
        for step in gradients:
            whole = oracle.matrices(name, step[name])
            for part, gradient in zip(parts, [step[name]] if whole is None else whole, strict=True):
                part.grad = gradient.clone()
            made.step()
        after[name] = parts[0] if matrices is None else oracle.from_matrices(name, torch.stack(parts), value.shape)
    return after


@pytest.mark.parametrize("nesterov", [False, True])
def test_one_process_in_fp32_gives_torchs_bits(nesterov: bool) -> None:
    """Use shapes whose scale is 1 or 2, so that it does not matter whether rate or update is multiplied by it."""
    before, gradients, after = trained(replace(MUON, muon_nesterov=nesterov))
    for name, value in expected(before, gradients, "original", nesterov).items():
        assert_bits_equal(after[name], value.contiguous(), name)
        assert not torch.equal(value, before[name])


def test_spectral_at_a_fifth_is_torchs_match_rms_adamw() -> None:
    """To fp32's rounding: torch multiplies the rate by the scale, which is no power of two here, we the update."""
    before, gradients, after = trained(replace(MUON, muon_scale_mode="spectral", muon_extra_scale_factor=0.2))
    for name, value in expected(before, gradients, "match_rms_adamw", True).items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-7)


def test_unit_rms_norm_scales_by_the_root_of_rows_over_columns() -> None:
    """Compare with torch's `original`, which is the same for more rows than columns."""
    before, gradients, after = trained(replace(MUON, muon_scale_mode="unit_rms_norm"))
    wanted = expected(before, gradients, "original", True)
    for layer in range(MODEL.num_layers):
        name = f"layers.{layer}.mlp.gate_up"
        assert_bits_equal(after[name], wanted[name], name)
    one = trained(replace(MUON, muon_scale_mode="unit_rms_norm"), steps=1)
    other = trained(MUON, steps=1)
    name = "layers.0.mlp.down"  # [16, 64]
    start = one[0][name] * (1 - RATES.learning_rate * RATES.weight_decay)
    torch.testing.assert_close(one[2][name] - start, (other[2][name] - start) / 2, rtol=1e-5, atol=1e-6)


def test_unequal_numbers_of_experts_leave_peers_of_another_view_in_step() -> None:
    """Tensor-parallel ranks that have two experts and one add up the same matrices in the same turns."""
    experts = LogicalTensor("experts", (3, 8, 8), Normal(1.0), True, "experts out in_ -> experts out in_")
    dense = [LogicalTensor(f"dense.{i}", (4, 4), Normal(1.0), True, "out in_ -> 1 out in_") for i in range(3)]
    added = []
    for rank in range(4):
        mesh = UnconnectedMesh(
            rank=rank,
            world_size=4,
            tensor_parallel_size=2,
            expert_parallel_size=2,
            expert_tensor_parallel_size=1,
        )
        places = [placement.split(mesh, experts, {0: ("ep",)}, padded=4)]
        places += [placement.split(mesh, tensor, {0: ("tp",)}) for tensor in dense]
        network = nn.Module()
        network.weights = nn.ParameterList(Parameter(place, torch.float32, mesh.device) for place in places)
        optimizer = make_optimizer([network], mesh, MUON, DataParallel(torch.float32, zero_stage=1))
        (rule,) = (rule for rule in optimizer.rules if isinstance(rule, Muon))
        turns = [matrices[mesh.coordinate("dp")] for matrices in rule._rounds if len(matrices) > mesh.coordinate("dp")]
        added.append([matrix.slabs[0].tensor.name for matrix in turns if matrix.split_group.size > 1])
    assert added == [["dense.0", "dense.2"]] * 2 + [["dense.1"]] * 2


@given(
    lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=8),
    window=st.tuples(st.integers(0, 20), st.integers(1, 30)),
)
@example(lengths=[(1, 0), (1, 1), (1, 0)], window=(0, 9))
def test_elements_of_a_run_are_those_of_its_rows(lengths: list[tuple[int, int]], window: tuple[int, int]) -> None:
    """They are in order, for any lengths and distances, and are views."""
    runs, end = [], 0
    for length, gap in lengths:
        runs.append((end, end + length))
        end += length + gap
    start, stop = window[0], window[0] + window[1]
    values = torch.arange(start, stop)
    run: Any = SimpleNamespace(
        start=start, stop=stop, master=values, gradients=values + 100, tensors={"momentum_buffer": values + 200}
    )
    group = ParameterGroup(weight_decay=True, is_embedding_or_output=False, matrices=True)
    found = list(_elements(runs, run, group))
    wanted = [place for first, last in runs for place in range(first, last) if start <= place < stop]
    assert [value for elements in found for value in elements.master.flatten().tolist()] == wanted
    assert [value - 200 for elements in found for value in elements.momentum.flatten().tolist()] == wanted
    for elements in found:
        elements.gradients.zero_()
    assert int((run.gradients == 0).sum()) == len(wanted)


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (3, 8), (8, 3), (1, 5)])
@pytest.mark.parametrize(("kind", "steps"), [("simple", 5), ("quintic", 5), ("quintic", 10), ("polar_express", 9)])
@pytest.mark.parametrize("rank", [None, 1, 0])
def test_steps_are_a_polynomial_of_the_singular_values(
    kind: str, steps: int, rows: int, columns: int, rank: int | None
) -> None:
    """Whatever the rank: rounding grows by the polynomial's steepest slope, the product of the a, at the most."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if rank is not None:
        matrix = matrix[:, :rank] @ torch.randn(rank, columns, generator=generator, dtype=torch.float64)
    chosen = tuple(coefficients(kind, steps))
    wanted = oracle.orthogonalized(matrix, chosen)
    actual = orthogonalized(matrix, kind, steps, torch.float64)
    torch.testing.assert_close(actual, wanted, rtol=0.0, atol=1e-15 * math.prod(a for a, _, _ in chosen))
    if rank is None:
        values = torch.linalg.svdvals(actual)
        assert values.max() < 1.3
        assert values.max() > 0.6


def test_coefficients_repeat_as_their_kind_says() -> None:
    quintic = list(coefficients("quintic", 10))
    assert quintic[:5] == quintic[5:] == list(oracle.QUINTIC)
    assert list(coefficients("simple", 5)) == list(oracle.JORDAN)
    express = list(coefficients("polar_express", 10))
    assert len(set(express[:8])) == 8
    assert express[8] == express[9] == express[7] == (1.875, -1.25, 0.375)


def test_the_oracle_is_torchs_muon_at_the_precision_of_bf16() -> None:
    """torch computes in bf16, of 8 bits, which five steps multiply."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.ones(8, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
    by_hand = oracle.Muon([{"params": [ours], "name": "up"}], momentum=0.95, nesterov=True)
    torchs = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    by_hand.param_groups[0].update(lr=0.1, weight_decay=0.1)
    by_hand.steps = oracle.JORDAN
    for _ in range(3):
        gradient = torch.randn(8, 24, generator=generator, dtype=torch.float64)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        by_hand.step()
        torchs.step()
    moved = (theirs.detach() - 0.99**3).norm()
    assert (ours.detach() - theirs.detach()).norm() < 0.02 * moved
    assert moved > 0.2 * 0.1 * math.sqrt(8 * 24)
