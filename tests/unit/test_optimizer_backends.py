"""Every back end of AdamW and SGD makes the same updates; apex by a stand-in that counts steps as apex does."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from megalite.config import parse_arguments
from megalite.config.model import ModelConfig
from megalite.config.optimizer import RULE_FLAGS, OptimizerConfig
from megalite.errors import ConfigurationError
from megalite.model.gpt import GPT
from megalite.optim import elementwise
from megalite.optim.buckets import DataParallel
from megalite.optim.elementwise import require_backend
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.optim.update_rule import RULE_STATE
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient
from megalite.training.builder import data_parallel, make_stages
from megalite_kernels import launch

MODEL = ModelConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, make_vocab_size_divisible_by=1,
    max_position_embeddings=5,
)  # fmt: skip
CONFIGS = {
    "adam": OptimizerConfig(lr=0.0),
    "sgd": OptimizerConfig(lr=0.0, optimizer="sgd"),
    "sgd without momentum": OptimizerConfig(lr=0.0, optimizer="sgd", sgd_momentum=0.0),
    "muon": OptimizerConfig(lr=0.0, optimizer="muon"),
}


def stepped(config: OptimizerConfig, steps: int = 4, gradients: torch.dtype = torch.float64) -> list[Tensor]:
    """Return masters and state after steps with drawn gradients, in float64; the second step is skipped."""
    network = GPT(MODEL, ParallelMesh(), dtype=torch.float64)
    initialize(network, seed=1)
    optimizer = make_optimizer([network], ParallelMesh(), config, DataParallel(gradients))
    generator = torch.Generator().manual_seed(0)
    for number in range(steps):
        step(optimizer, generator, Rates(0.1 / (1 + number), 0.05, weight_decay=0.1), infinite=number == 1)
    return [tensor for shard in optimizer.shards for tensor in shard.tensors()]


def step(optimizer: Optimizer, generator: torch.Generator, rates: Rates, *, infinite: bool = False) -> None:
    optimizer.begin_step(1)
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            gradient = torch.randn(slot.parameter.shape, generator=generator)
            for use in range(len(slot.parameter.sharding.uses)):
                bucket.accumulate(slot.parameter, DenseGradient(gradient / (0.0 if infinite else 1.0)), use)
    optimizer.reduce(0, 1)
    assert optimizer.step(rates).skipped is infinite


def sums(optimizer: Optimizer) -> list[float]:
    return [tensor.sum().item() for shard in optimizer.shards for tensor in shard.tensors()]


@pytest.mark.parametrize("backend", ["torch", "megalite"])
@pytest.mark.parametrize("limit", [0.0, 0.25, 4.0])
def test_gradients_are_clipped_by_their_norm_and_only_down(limit: float, backend: str) -> None:
    """`limit` is in norms of the gradient; 0: no limit. A skipped step changes nothing and is not counted."""
    flags: dict[str, Any] = {"lr": 0.0, "optimizer": "sgd", "sgd_momentum": 0.0, "optimizer_backend": backend}

    def changed(clip_grad: float) -> tuple[float, Tensor]:
        network = GPT(MODEL, ParallelMesh(), dtype=torch.float64)
        initialize(network, seed=1)
        config = OptimizerConfig(**flags, clip_grad=clip_grad)
        optimizer = make_optimizer([network], ParallelMesh(), config, DataParallel(torch.float64))
        before, kept = torch.cat([bucket.parameters.clone() for bucket in optimizer.buckets]), sums(optimizer)
        step(optimizer, torch.Generator().manual_seed(0), Rates(0.5, 0.5, 0.0), infinite=True)
        assert (optimizer.steps, sums(optimizer)) == (0, kept)
        step(optimizer, torch.Generator().manual_seed(0), Rates(0.5, 0.5, 0.0))
        assert optimizer.steps == 1
        change = torch.cat([bucket.parameters for bucket in optimizer.buckets]) - before
        return change.norm().item() / 0.5, change

    norm, whole = changed(0.0)
    _, found = changed(limit * norm)
    factor = 0.25 * norm / (norm + 1e-6) if limit == 0.25 else 1.0
    torch.testing.assert_close(found, factor * whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["torch", "megalite"])
def test_a_loss_scale_leaves_norm_and_clipped_update_alone(backend: str) -> None:
    """A power of two changes no bit."""
    config = OptimizerConfig(lr=0.0, optimizer_backend=backend, clip_grad=0.5)  # type: ignore[arg-type]
    found = []
    for scale in (1.0, 1024.0):
        network = GPT(MODEL, ParallelMesh(), dtype=torch.float64)
        initialize(network, seed=1)
        optimizer = make_optimizer([network], ParallelMesh(), config, DataParallel(torch.float64))
        optimizer.begin_step(1)
        for number, parameter in enumerate(network.parameters()):
            gradient = torch.full_like(parameter, 0.01 * (1 + number)) * scale
            for use in range(len(parameter.sharding.uses)):  # type: ignore[attr-defined]
                parameter.gradient_buffer.accumulate(parameter, DenseGradient(gradient), use)  # type: ignore[attr-defined]
        optimizer.reduce(0, 1)
        norm = optimizer.step(Rates(0.1, 0.1, 0.1), scale).gradient_norm
        assert norm > 0.5
        found.append((norm, [tensor.tolist() for shard in optimizer.shards for tensor in shard.tensors()]))
    assert found[1] == found[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_torch_and_megalite_agree_to_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "chunk_elements", lambda _: 50)  # no divisor of the sizes
    wanted = stepped(replace(CONFIGS[name], optimizer_backend="torch"))
    actual = stepped(replace(CONFIGS[name], optimizer_backend="megalite"))
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.wide
@pytest.mark.parametrize("name", CONFIGS)
def test_narrow_gradients_are_widened_a_piece_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "WIDENED_ELEMENTS", 50)  # no divisor of the sizes
    wanted = stepped(replace(CONFIGS[name], optimizer_backend="megalite"), gradients=torch.float32)
    actual = stepped(replace(CONFIGS[name], optimizer_backend="torch"), gradients=torch.float32)
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["adam", "sgd", "sgd without momentum"])
def test_the_torch_back_end_is_torchs_optimizer_to_the_bit(name: str) -> None:
    config = replace(CONFIGS[name], optimizer_backend="torch", clip_grad=0.0)
    network = GPT(MODEL, ParallelMesh())
    initialize(network, seed=1)
    optimizer = make_optimizer([network], ParallelMesh(), config, DataParallel(torch.float32))
    runs = [run for shard in optimizer.shards for run in shard.segments]
    masters = [run.master.clone() for run in runs]
    rates = Rates(0.01, 0.02, weight_decay=0.1)
    groups = []
    for master, run in zip(masters, runs, strict=True):
        rate, decay = rates.of(run.group)
        groups.append({"params": [master], "lr": rate, "weight_decay": decay})
    torchs: torch.optim.Optimizer
    if name == "adam":
        torchs = torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), fused=True)
    else:
        torchs = torch.optim.SGD(groups, momentum=config.sgd_momentum, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        step(optimizer, generator, rates)
        for run, master in zip(runs, masters, strict=True):
            master.grad = run.gradients.clone()
        torchs.step()
        for run, master in zip(runs, masters, strict=True):
            assert torch.equal(run.master, master)


NARROW = {
    "bf16 moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "fp16 average": {"exp_avg_dtype": "fp16"},
    "fp16 masters": {"main_params_dtype": "fp16"},
}
BITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


@pytest.mark.parametrize("name", NARROW)
def test_lower_precision_rounds_what_is_kept_and_no_more(name: str) -> None:
    """Each step is torch's in fp32 from the stored values, then rounded."""
    config = OptimizerConfig(lr=0.0, use_precision_aware_optimizer=True, clip_grad=0.0, **NARROW[name])  # type: ignore[arg-type]
    network = GPT(MODEL, ParallelMesh(), dtype=torch.bfloat16)
    initialize(network, seed=1)
    optimizer = make_optimizer([network], ParallelMesh(), config, DataParallel(torch.float32))
    generator = torch.Generator().manual_seed(0)
    runs = [run for shard in optimizer.shards for run in shard.segments]
    for number in range(3):
        before = [[tensor.clone().float() for tensor in (run.master, *run.state.values())] for run in runs]
        step(optimizer, generator, Rates(0.01, 0.02, weight_decay=0.1))
        for run, (master, average, squares) in zip(runs, before, strict=True):
            rate = 0.02 if run.group.is_embedding_or_output else 0.01
            torchs = torch.optim.AdamW([master], lr=rate, weight_decay=0.1 if run.group.weight_decay else 0.0)
            torchs.state[master] = {"step": torch.tensor(float(number)), "exp_avg": average, "exp_avg_sq": squares}
            master.grad = run.gradients
            torchs.step()
            for kept, wide in zip((run.master, *run.state.values()), (master, average, squares), strict=True):
                spacing = 2.0 ** -BITS[kept.dtype]
                torch.testing.assert_close(kept.float(), wide, rtol=0.51 * spacing + 1e-6, atol=1e-7)
    asked = {torch.float32, *(dtype for dtype in BITS if dtype_name(dtype) in NARROW[name].values())}
    assert {tensor.dtype for shard in optimizer.shards for tensor in shard.tensors()} == asked


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("--bf16", torch.float32),
        ("--bf16 --grad-reduce-in-bf16", torch.bfloat16),
        ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16", torch.bfloat16),
        ("--fp16 --use-precision-aware-optimizer --main-grads-dtype bf16", torch.bfloat16),
        ("--fp64", torch.float64),
    ],
)
def test_gradients_are_gathered_in_the_dtype_asked_for(flags: str, dtype: torch.dtype) -> None:
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 1 --lr 1"
    config = parse_arguments(f"{sizes} {flags}".split()).config
    assert data_parallel(config, ParallelMesh(), make_stages(config)).gradient_dtype == dtype


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32")


class StandIn(torch.optim.Optimizer):
    """AdamW with apex's interface: it uses existing state, and counts updates in the group."""

    def __init__(self, params: Any, *, lr: float, betas: Any, eps: float, adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                m.copy_(beta1 * m + (1 - beta1) * p.grad)
                v.copy_(beta2 * v + (1 - beta2) * p.grad**2)
                update = m / (1 - beta1 ** group["step"])
                update /= (v / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))


def plant_apex(monkeypatch: pytest.MonkeyPatch, *, available: bool = True) -> None:
    optimizers, applier, apex = ModuleType("apex.optimizers"), ModuleType("apex.multi_tensor_apply"), ModuleType("apex")
    optimizers.FusedAdam, optimizers.FusedSGD = StandIn, torch.optim.SGD  # type: ignore[attr-defined]
    applier.multi_tensor_applier = SimpleNamespace(available=available)  # type: ignore[attr-defined]
    for module in (apex, optimizers, applier):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("name", CONFIGS)
def test_apex_is_given_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_apex(monkeypatch)
    config = replace(CONFIGS[name], optimizer_backend="apex")
    require_backend(config)
    for ours, theirs in zip(stepped(config), stepped(CONFIGS[name]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_apex_that_cannot_be_used_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIGS["adam"], optimizer_backend="apex")
    way_out = r"--optimizer-backend apex needs .*CUDA extensions .*; --optimizer-backend auto needs nothing\. "
    with pytest.raises(ConfigurationError, match=way_out + "Here: No module named 'apex'"):
        require_backend(config)
    plant_apex(monkeypatch, available=False)
    with pytest.raises(ConfigurationError, match=way_out + "Here apex has none of them"):
        require_backend(config)
    require_backend(CONFIGS["adam"])


@pytest.mark.parametrize("name", [name for name, row in RULE_FLAGS.items() if row.plain])
def test_masters_of_plain_rules_are_what_fp32_weights_are(name: str) -> None:
    """The parameters of lower precision are their masters, rounded."""
    config = OptimizerConfig(lr=0.0, optimizer=name)  # type: ignore[arg-type]
    networks = [GPT(MODEL, ParallelMesh(), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    optimizers = []
    for network in networks:
        initialize(network, seed=1)
        optimizers.append(make_optimizer([network], ParallelMesh(), config, DataParallel(torch.float32)))
    narrow, wide = (list(optimizer.shards) for optimizer in optimizers)
    for ours, theirs in zip(narrow, wide, strict=True):
        theirs.master.copy_(ours.master)
    for optimizer in optimizers:
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            step(optimizer, generator, Rates(0.1, 0.05, weight_decay=0.1))
    for ours, theirs in zip(narrow, wide, strict=True):
        for ours_kept, theirs_kept in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(ours_kept, theirs_kept)
        assert torch.equal(ours.parameters, ours.master.bfloat16())
        assert not torch.equal(ours.parameters.float(), ours.master)


def test_every_choice_has_its_row_in_each_table() -> None:
    choices = {*get_args(get_type_hints(OptimizerConfig)["optimizer"])}
    assert choices == RULE_FLAGS.keys() == RULE_STATE.keys()
