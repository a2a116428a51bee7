"""State in fewer bits: it trains as documented, and checkpoints do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import TrainingState
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.optim.packed import View
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient
from megalite_kernels import launch
from megalite_kernels.master_weights import joined, split_
from megalite_kernels.moments import Quantized
from tests.harness.wide import wide_except

MESH = ParallelMesh()
MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=59, make_vocab_size_divisible_by=1,
    max_position_embeddings=5,
)  # fmt: skip
WIDE = OptimizerConfig(lr=0.0, optimizer_backend="megalite")
REMAINDERS = OptimizerConfig(lr=0.0, store_param_remainders=True)


class Run:
    """bf16 network whose gradients are drawn by the number of the step."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.network = GPT(MODEL, MESH, dtype=torch.bfloat16)
        initialize(self.network, seed=1)
        self.optimizer = make_optimizer([self.network], MESH, config, DataParallel(torch.float32, bucket_size=1000))

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            self.optimizer.begin_step(1)
            for bucket in self.optimizer.buckets:
                for slot in bucket.slots:
                    for use in range(len(slot.parameter.sharding.uses)):
                        gradient = torch.randn(slot.parameter.shape, generator=generator)
                        bucket.accumulate(slot.parameter, DenseGradient(gradient), use)
            self.optimizer.reduce(0, 1)
            assert not self.optimizer.step(Rates(0.03, 0.02, weight_decay=0.1)).skipped

    def save(self, directory: Path, iteration: int) -> Path:
        state = TrainingState(iteration, consumed_samples=iteration, optimizer_steps=self.optimizer.steps)
        path = checkpoint.Saver(directory, self.optimizer, checkpoint.Plan.alone(self.optimizer)).save(state, {})
        assert isinstance(path, Path)
        return path

    def load(self, path: Path) -> Run:
        checkpoint.load(path, self.network, self.optimizer, MESH)
        return self

    def values(self) -> list[Tensor]:
        return values(self.optimizer)


def values(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters and all optimizer state, in the dtypes of a checkpoint."""
    found = [bucket.parameters.clone() for bucket in optimizer.buckets]
    for part in optimizer.slices():
        found += [kept.read() if isinstance(kept, View) else kept.clone() for kept in part.state.values()]
    return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "chunk_elements", lambda _: 512)


# ------------------------------------------------------------------------------------------------ remainders


def test_a_master_is_its_parameter_and_a_remainder() -> None:
    """Ties, carries into the exponent, both zeros, subnormal numbers, infinities; a NaN stays one."""
    parts = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    upper = [0x0000, 0x0001, 0x3F80, 0x3F81, 0x3FFF, 0x7F7F, 0x7F80]
    bits = [sign << 31 | high << 16 | low for sign in (0, 1) for high in upper for low in parts]
    bits = [number for number in bits if number & 0x7FFFFFFF <= 0x7F800000]
    masters = torch.tensor([number - (number >> 31 << 32) for number in bits], dtype=torch.int32).view(torch.float32)
    parameters, remainders = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split_(masters, parameters, remainders)
    assert torch.equal(joined(parameters, remainders).view(torch.int32), masters.view(torch.int32))
    finite = masters.isfinite()
    distance = (parameters.double() - masters.double())[finite].abs()
    nearest = (masters.bfloat16().double() - masters.double())[finite].abs()
    assert torch.equal(distance, nearest)
    not_numbers = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    split_(not_numbers, parameters[:4], remainders[:4])
    assert parameters[:4].isnan().all()
    assert joined(parameters[:4], remainders[:4]).isnan().all()


@pytest.mark.wide_except("adam")
@pytest.mark.bits
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_remainders_change_no_bit_and_no_checkpoint(optimizer: str, tmp_path: Path) -> None:
    """The training has the same bits, also after a save with remainders and a resume without, and the reverse."""
    wide, packed = (
        Run(OptimizerConfig(lr=0.0, optimizer=optimizer, **given))  # type: ignore[arg-type]
        for given in ({"optimizer_backend": "megalite"}, {"store_param_remainders": True})
    )
    for run in (wide, packed):
        run.train(0, 3)
    assert same(packed.values(), wide.values())
    assert packed.optimizer.parameter_norms() == pytest.approx(wide.optimizer.parameter_norms(), rel=1e-12)
    paths = [run.save(tmp_path / name, 3) for run, name in ((wide, "wide"), (packed, "packed"))]
    names = [checkpoint.read_manifest(path).tensors for path in paths]
    assert {name: tensor.dtype for name, tensor in names[0].items()} == {n: t.dtype for n, t in names[1].items()}
    for run in (wide, packed):
        run.train(3, 5)
    assert same(packed.values(), wide.values())
    for config, path in ((wide.optimizer.config, paths[1]), (packed.optimizer.config, paths[0])):
        resumed = Run(config).load(path)
        resumed.train(3, 5)
        assert same(resumed.values(), wide.values())


def test_remainders_take_16_bits_less() -> None:
    wide, packed = (
        sum(tensor.nbytes for shard in Run(config).optimizer.shards for tensor in shard.tensors())
        for config in (WIDE, REMAINDERS)
    )
    elements = sum(bucket.length for bucket in Run(WIDE).optimizer.buckets)
    assert (wide, packed) == (12 * elements, 10 * elements)


def test_a_load_that_fails_leaves_what_is_packed(tmp_path: Path) -> None:
    run = Run(REMAINDERS)
    run.train(0, 2)
    path, before = run.save(tmp_path, 2), run.values()
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError):
        run.load(path)
    assert same(run.values(), before)


# ------------------------------------------------------------------------------------------------ 8 bits

EIGHT_BITS = {
    "int8": {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"},
    "fp8": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    "int8 and remainders": {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "fp8", "store_param_remainders": True},
    "sgd": {"optimizer": "sgd", "exp_avg_dtype": "int8"},
}


def eight_bits(name: str) -> OptimizerConfig:
    return OptimizerConfig(lr=0.0, use_precision_aware_optimizer=True, **EIGHT_BITS[name])  # type: ignore[arg-type]


@pytest.mark.wide_except("int8 and remainders", "fp8")
@pytest.mark.bits
@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.wide), *[*EIGHT_BITS][1:]])
def test_moments_in_8_bits_go_on_to_the_bit_where_they_were_saved(name: str, tmp_path: Path) -> None:
    """A checkpoint has their values in fp32, which come back as the same codes; saved anew it is the same."""
    run = Run(eight_bits(name))
    run.train(0, 3)
    path = run.save(tmp_path / "first", 3)
    dtypes = {name.split("/")[1]: kept.dtype for name, kept in checkpoint.read_manifest(path).tensors.items()}
    assert {dtypes[name] for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in dtypes} == {torch.float32}
    resumed = Run(run.optimizer.config).load(path)
    assert same(resumed.values(), run.values())
    assert resumed.save(tmp_path / "again", 3).joinpath("rank_00000.safetensors").read_bytes() == (
        path.joinpath("rank_00000.safetensors").read_bytes()
    )
    for each in (run, resumed):
        each.train(3, 5)
    assert same(resumed.values(), run.values())


@pytest.mark.wide
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_a_checkpoint_without_8_bits_begins_and_ends_them(name: str, tmp_path: Path) -> None:
    """Loaded values are rounded by at most half a step of a block's codes."""
    config = eight_bits(name)
    wide, packed = Run(replace(config, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")), Run(config)
    wide.train(0, 3)
    packed.load(wide.save(tmp_path / "wide", 3))
    for found, exact in zip(packed.optimizer.slices(), wide.optimizer.slices(), strict=True):
        for state in found.state.keys() - {"master"}:
            ours, theirs = (part.state[state] for part in (found, exact))
            assert isinstance(ours, View)
            values, wanted = (tensor.sqrt() if state == "exp_avg_sq" else tensor for tensor in (ours.read(), theirs))
            block = max(exact.state[state].abs().max() for exact in wide.optimizer.slices())  # type: ignore[union-attr]
            step = block.sqrt() if state == "exp_avg_sq" else block
            assert (values - wanted).abs().max() <= 0.04 * step
    back = Run(wide.optimizer.config).load(packed.save(tmp_path / "packed", 3))
    assert same(back.values(), packed.values())


@pytest.mark.wide
@pytest.mark.parametrize("name", wide_except(EIGHT_BITS, ["int8 and remainders"]))
def test_moments_in_8_bits_train_nearly_the_same(name: str) -> None:
    """Compare two runs with the same gradients. They are noise, which is the worst case for a weight."""
    config = eight_bits(name)
    wide, packed = Run(replace(config, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")), Run(config)
    start = values(wide.optimizer)[0].double()
    for run in (wide, packed):
        run.train(0, 20)
    ours, theirs = (values(run.optimizer)[0].double() - start for run in (packed, wide))
    assert (ours - theirs).norm() <= 0.1 * theirs.norm()


def test_an_update_draws_by_step_and_place() -> None:
    """Equal runs have the same bits; runs with another step count, or place in the bucket, do not.

    Otherwise the shards of a bucket would draw the same.
    """
    runs = [Run(eight_bits("int8")) for _ in range(4)]
    runs[2].optimizer.steps = 7
    for part in (part for shard in runs[3].optimizer.shards for part in shard.segments):
        object.__setattr__(part, "start", part.start + 1024)
    for run in runs:
        run.train(0, 1)
    found = [
        [
            kept.codes
            for shard in run.optimizer.shards
            for part in shard.segments
            for kept in part.state.values()
            if isinstance(kept, Quantized)
        ]
        for run in runs
    ]
    assert found[0]
    assert same(found[0], found[1])
    assert not same(found[0], found[2])
    assert not same(found[0], found[3])


def test_moments_in_8_bits_take_a_byte_and_a_scale() -> None:
    run = Run(eight_bits("int8 and remainders"))
    measured = sum(tensor.nbytes for shard in run.optimizer.shards for tensor in shard.tensors())
    elements = sum(bucket.length for bucket in run.optimizer.buckets)
    runs = sum(len(shard.segments) for shard in run.optimizer.shards)
    assert 0 <= measured - elements * (2 + 2 * (1 + 4 / 256)) <= 2 * 4 * runs


@pytest.mark.wide
def test_an_optimizer_that_begins_anew_is_packed_anew(tmp_path: Path) -> None:
    """Start from weights only: masters are the weights, moments are zero."""
    config = eight_bits("int8 and remainders")
    run, other = Run(config), Run(config)
    run.train(0, 2)
    other.train(2, 4)
    checkpoint.load(run.save(tmp_path, 2), other.network, other.optimizer, MESH, state=False)
    for ours, theirs in zip(other.optimizer.slices(), run.optimizer.slices(), strict=True):
        kept = {name: state.read() for name, state in ours.state.items() if isinstance(state, View)}
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(kept.pop("master"), theirs.values.float())
        assert len(kept) == 2
        assert not any(values.any() for values in kept.values())
