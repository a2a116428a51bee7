"""Compressors: what is sent plus the residual is the gradient, and each method is its oracle's few lines of numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.extras.synchronization import power
from megalite.extras.synchronization.compressor import Compressor
from megalite.extras.synchronization.hashing import mixed, positions
from megalite.extras.synchronization.methods import make_compressor
from megalite.optim.layout import BucketLayout, Slot
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import replicated
from megalite.parallel.sharding import LogicalTensor, Normal

TO_THE_NEAREST = ("fp16", "bf16", "int8", "fp8")
SPARSE = ("topk", "threshold", "dgc", "randomk")
ROUGH = ("signsgd", "onebit-adam", "count-sketch")
ALL = TO_THE_NEAREST + SPARSE + ROUGH
LENGTHS = (1, 7, 8, 255, 256, 257, 2049, 3000)
KEY = 12345678901234567890


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def there_and_back(method: Compressor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Restored values and residual."""
    packed, residual = method.pack_with_residual(values, KEY)
    assert torch.equal(packed, method.pack(values, KEY))
    assert packed.dtype == torch.uint8
    assert packed.shape == (len(values), method.packed_bytes(values.shape[1]))
    restored = method.restore(packed, values.shape[1], values.dtype, KEY)
    assert restored.shape == values.shape
    assert restored.dtype == values.dtype
    return restored, residual


@st.composite
def gradients(draw: st.DrawFn, dtype: torch.dtype, largest: float = 127 * 2.0**121) -> Tensor:
    """Normal numbers of any scale, with zeros and extreme values among them."""
    length = draw(st.sampled_from(LENGTHS))
    scale = 10.0 ** draw(st.integers(-44, 36))
    values = numbers(2, length, seed=draw(st.integers(0, 1000)), dtype=torch.float64) * scale
    extreme = st.floats(-largest, largest, width=64 if dtype == torch.float64 else 32)
    for value in draw(st.lists(extreme, max_size=6)):
        values[draw(st.integers(0, 1)), draw(st.integers(0, length - 1))] = value
    return values.clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("name", TO_THE_NEAREST + SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@given(data=st.data(), ratio=st.sampled_from([0.01, 0.3, 1.0]))
@settings(max_examples=30, deadline=None)
def test_restored_plus_residual_is_the_gradient(
    name: str, dtype: torch.dtype, data: st.DataObject, ratio: float
) -> None:
    """Bit for bit: a value and its nearest number differ by at most a factor of two, unless the number is zero."""
    values = data.draw(gradients(dtype))
    restored, residual = there_and_back(make_compressor(name, ratio, dtype), values)
    assert torch.equal(restored + residual, values)
    assert torch.equal(values - restored, residual)


@pytest.mark.parametrize("name", ROUGH)
@given(data=st.data(), ratio=st.sampled_from([0.01, 0.3, 1.0]))
@settings(max_examples=30, deadline=None)
def test_restored_plus_residual_is_the_gradient_up_to_rounding(name: str, data: st.DataObject, ratio: float) -> None:
    """Up to one rounding of the larger: a restored value may be far from the value, so their difference is rounded."""
    values = data.draw(gradients(torch.float32, largest=2.0**120))
    restored, residual = there_and_back(make_compressor(name, ratio), values)
    error = (restored.double() + residual.double() - values.double()).abs()
    assert (error <= 2.0**-23 * torch.maximum(values.abs(), restored.abs())).all()


@pytest.mark.parametrize("name", [*SPARSE, "count-sketch"])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_ratio_of_one_loses_nothing(name: str, data: st.DataObject) -> None:
    values = data.draw(gradients(torch.float64, largest=1e300))
    restored, residual = there_and_back(make_compressor(name, 1.0, torch.float64), values)
    assert torch.equal(restored, values)
    assert not residual.any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("length", LENGTHS)
def test_parts_are_packed_as_if_alone(name: str, length: int) -> None:
    values = numbers(3, length) * torch.tensor([[1.0], [1e-9], [1e9]])
    method = make_compressor(name, 0.05)
    together = method.pack(values, KEY)
    assert torch.equal(together, torch.cat([method.pack(part[None], KEY) for part in values]))
    restored = method.restore(together, length, torch.float32, KEY)
    assert restored.is_contiguous()
    for part in range(3):
        assert torch.equal(
            restored[part : part + 1], method.restore(together[part : part + 1], length, torch.float32, KEY)
        )


@pytest.mark.parametrize("name", ALL)
def test_zeros_are_zeros(name: str) -> None:
    restored, residual = there_and_back(make_compressor(name, 0.05), torch.zeros(2, 300))
    assert not restored.any()
    assert not residual.any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 100, 299])
def test_what_is_not_finite_is_never_hidden(name: str, bad: float, place: int) -> None:
    values = numbers(3, 300)
    values[1, place] = bad
    method = make_compressor(name, 0.01)
    restored, _ = there_and_back(method, values)
    assert restored.isfinite().all(1).tolist() == [True, False, True]
    assert not method.sum(method.pack(values, KEY), 300, torch.float32, KEY).isfinite().all()


WHOLE = {"int8": 127.0, "fp8": 448.0}
"""The largest value of blocks that lose nothing: their scale is 1."""


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_integers_are_exact(name: str, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    values = 2.0 ** torch.randint(0, 7, (ranks, 700), generator=generator)
    values *= torch.randint(-1, 2, (ranks, 700), generator=generator)
    values[:, ::50] = WHOLE.get(name, 128.0)
    if name in ("signsgd", "onebit-adam"):
        values = torch.where(values < 0, -4.0, 4.0)
    method = make_compressor(name, 1.0)
    assert torch.equal(method.sum(method.pack(values, KEY), 700, torch.float32, KEY), values.sum(0))


@pytest.mark.parametrize("name", ALL)
def test_sums_are_of_what_is_restored_in_the_order_of_ranks(name: str) -> None:
    values, method = numbers(3, 1000), make_compressor(name, 0.2)
    packed = method.pack(values, KEY)
    first, second, third = method.restore(packed, 1000, torch.float32, KEY)
    assert torch.equal(method.sum(packed, 1000, torch.float32, KEY), first + second + third)


@pytest.mark.parametrize(
    ("name", "ratio", "promised"),
    [
        ("bf16", 0.01, 2.0),
        ("fp16", 0.01, 2.0 + 4 / 256),
        ("int8", 0.01, 1.0 + 4 / 256),
        ("fp8", 0.01, 1.0 + 4 / 256),
        ("signsgd", 0.01, 1 / 8 + 4 / 2048),
        ("topk", 0.01, 0.08),
        ("threshold", 0.01, 0.08),
        ("randomk", 0.01, 0.04),
        ("count-sketch", 0.01, 0.04),
    ],
)
def test_bytes_are_as_promised(name: str, ratio: float, promised: float) -> None:
    assert make_compressor(name, ratio).packed_bytes(2**20) / 2**20 == pytest.approx(promised, rel=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_the_host_never_waits_for_values(name: str) -> None:
    """Tensors on the meta device have none, so a size or a branch that depends on values would raise."""
    method, values = make_compressor(name, 0.1), torch.empty(2, 1000, device="meta")
    packed, residual = method.pack_with_residual(values, KEY)
    assert residual.shape == values.shape
    assert method.sum(packed, 1000, torch.float32, KEY).shape == (1000,)


def test_names_and_ratios_are_checked() -> None:
    for name, ratio in (("powersgd", 0.1), ("none", 0.1), ("topk", 0.0), ("topk", 1.5)):
        with pytest.raises(ValueError, match="compress"):
            make_compressor(name, ratio)


# ------------------------------------------------------------------------------------------------- oracles


def blocks_of(values: np.ndarray, size: int) -> list[np.ndarray]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def oracle_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + (bits >> 16 & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def oracle_fp16(values: np.ndarray) -> np.ndarray:
    found = []
    for block in blocks_of(values, 256):
        scale = 2.0 ** (np.floor(np.log2(np.abs(block).max())) - 14)
        found.append((block.astype(np.float64) / scale).astype(np.float16) * scale)
    return np.concatenate(found)


def oracle_codes(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The nearest of the codes times the block's scale, which may be up to 2^-16 smaller than the exact one."""
    found = []
    for block in blocks_of(values, 256):
        scale = np.abs(block).max() / codes.max()
        distance = np.abs(block[:, None] / scale - codes)
        found.append(codes[distance.argmin(1)] * scale)
    return np.concatenate(found)


def oracle_int8(values: np.ndarray) -> np.ndarray:
    return oracle_codes(values, np.arange(-127.0, 128.0))


def oracle_fp8(values: np.ndarray) -> np.ndarray:
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
    positive = np.array([m / 8 * 2.0**-6 for m in range(8)] + normal)
    return oracle_codes(values, np.concatenate((-positive, positive)))


def oracle_sign(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.where(block < 0, -1, 1) * np.abs(block).mean() for block in blocks_of(values, 2048)])


def oracle_topk(values: np.ndarray) -> np.ndarray:
    found = np.zeros_like(values)
    largest = np.argsort(-np.abs(values))[: math.ceil(0.1 * len(values))]
    found[largest] = values[largest]
    return found


def oracle_hash(index: int, key: int) -> int:
    word, words = 0, 2**64
    for state in (key % words, index):
        word = (state + 1) * 0x9E3779B97F4A7C15 + word if state == index else state + 0x9E3779B97F4A7C15
        word %= words
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % words
        word = (word ^ word >> 27) * 0x94D049BB133111EB % words
        word ^= word >> 31
    return word >> 1


def oracle_positions(length: int, count: int) -> list[int]:
    found = []
    for stratum in range(count):
        first, last = stratum * length // count, (stratum + 1) * length // count
        found.append(first + oracle_hash(stratum, KEY) % (last - first))
    return found


def oracle_randomk(values: np.ndarray) -> np.ndarray:
    found, places = np.zeros_like(values), oracle_positions(len(values), math.ceil(0.1 * len(values)))
    found[places] = values[places]
    return found


def oracle_threshold(values: np.ndarray) -> np.ndarray:
    found, size = np.zeros_like(values), min(4000, len(values))
    sample = np.sort(np.abs(values[oracle_positions(len(values), size)]))
    passed = np.flatnonzero(np.abs(values) >= sample[-round(0.1 * size)])[: math.ceil(0.1 * len(values))]
    found[passed] = values[passed]
    return found


def oracle_sketch(values: np.ndarray) -> np.ndarray:
    length, columns = len(values), math.ceil(0.1 * len(values) / 5)
    rounds, estimates, energy = -(-length // columns), np.zeros((5, length)), 0.0
    for row in range(5):
        draws = [oracle_hash(index, KEY * 8 + row) for index in range(rounds + columns)]
        signs = [1 - 2 * (draw & 1) for draw in draws]
        sign = np.array([signs[i // columns] * signs[rounds + i % columns] for i in range(length)])
        column = np.array([(i - (draws[i // columns] >> 1) % columns) % columns for i in range(length)])
        table = np.zeros(columns)
        np.add.at(table, column, sign * values)
        estimates[row], energy = sign * table[column], energy + (table**2).mean() / 5
    estimate = np.median(estimates, axis=0)
    noise = energy * math.pi / 10 * (1 - columns / length)
    share = 1 / (1 + math.pi / 10 * (length / columns - 1))
    return estimate * np.where(estimate**2 > 2 * math.log(length) * noise, 1.0, share)


ORACLES = {
    "bf16": (oracle_bf16, 0.0),
    "fp16": (oracle_fp16, 0.0),
    "int8": (oracle_int8, 2.0**-16),
    "fp8": (oracle_fp8, 2.0**-16),
    "signsgd": (oracle_sign, 1e-6),
    "topk": (oracle_topk, 0.0),
    "randomk": (oracle_randomk, 0.0),
    "threshold": (oracle_threshold, 0.0),
    "count-sketch": (oracle_sketch, 1e-10),
}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("length", [300, 4500])
def test_methods_are_their_oracles(name: str, length: int) -> None:
    oracle, tolerance = ORACLES[name]
    dtype = torch.float64 if name in (*SPARSE, "count-sketch") else torch.float32
    values = numbers(1, length, dtype=dtype) ** 3
    restored, _ = there_and_back(make_compressor(name, 0.1, dtype), values)
    expected = oracle(values[0].numpy())
    assert np.count_nonzero(expected) == restored.count_nonzero()
    np.testing.assert_allclose(restored[0].numpy(), expected, rtol=tolerance, atol=0.0)


def test_draws_are_the_oracles() -> None:
    assert mixed(torch.arange(50), KEY).tolist() == [oracle_hash(index, KEY) for index in range(50)]
    for length, count in ((1, 1), (10, 10), (1000, 7)):
        found = positions(length, count, KEY, torch.device("cpu")).tolist()
        assert found == oracle_positions(length, count)
        assert sorted(set(found)) == found
        assert 0 <= found[0] <= found[-1] < length


def test_other_keys_draw_other_positions() -> None:
    found = torch.stack([positions(10000, 100, key, torch.device("cpu")) for key in range(1000)])
    assert found.double().mean() == pytest.approx(5000, rel=0.01)
    assert found.unique().numel() > 9900


def test_a_sketch_finds_the_large_values_of_a_sum() -> None:
    values = 0.001 * numbers(3, 20000)
    values[0, 17], values[1, 17], values[2, 15000] = 5.0, 3.0, -4.0
    method = make_compressor("count-sketch", 0.05)
    found = method.sum(method.pack(values, KEY), 20000, torch.float32, KEY)
    assert found[17] == pytest.approx(8.0, rel=0.1)
    assert found[15000] == pytest.approx(-4.0, rel=0.1)


@pytest.mark.parametrize("name", [name for name in ALL if name != "onebit-adam"])
def test_residuals_stay_bounded(name: str) -> None:
    """Error feedback sends, sooner or later, all of a gradient that stays the same, without a large element."""
    gradient, method = numbers(1, 3000), make_compressor(name, 0.05)
    residual, sent = torch.zeros(1, 3000), torch.zeros(1, 3000)
    for step in range(300):
        packed, following = method.pack_with_residual(gradient + residual, step)
        sent += method.restore(packed, 3000, torch.float32, step)
        residual = following
    assert (sent / 300 - gradient).norm() < 0.3 * gradient.norm()


def test_a_threshold_lets_about_its_ratio_pass() -> None:
    values = numbers(4, 100000)
    restored, _ = there_and_back(make_compressor("threshold", 0.01), values)
    for part in restored:
        assert 700 < part.count_nonzero() <= 1000


def test_zeros_do_not_pass_a_threshold() -> None:
    values = torch.zeros(1, 10000)
    values[0, 9990:] = numbers(10)
    restored, _ = there_and_back(make_compressor("threshold", 0.01), values)
    assert torch.equal(restored, values)


# ------------------------------------------------------------------------------------------------- PowerSGD


@pytest.mark.parametrize(("rows", "columns"), [(12, 20), (20, 12), (5, 5)])
def test_power_is_its_oracle(rows: int, columns: int) -> None:
    matrices = numbers(3, rows, columns, dtype=torch.float64)
    q = power.first_factor(3, columns, 2, KEY, torch.float64, torch.device("cpu"))
    p = power.orthogonalize(power.project(matrices, q))
    back = power.restore(p, power.project_back(matrices, p), out=torch.empty_like(matrices))
    for matrix, start, found in zip(matrices.numpy(), q.numpy(), back.numpy(), strict=True):
        basis = np.linalg.qr(matrix @ start)[0]
        np.testing.assert_allclose(found, basis @ (basis.T @ matrix), atol=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(6, 9), (9, 6), (1, 4), (4, 1)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_full_rank_loses_nothing(rows: int, columns: int, scale: float) -> None:
    matrices = numbers(2, rows, columns, dtype=torch.float64) * scale
    matrices[1, 0] = 0.0
    matrices[1, :, 0] = matrices[1, :, -1]
    q = power.first_factor(2, columns, min(rows, columns), KEY, torch.float64, torch.device("cpu"))
    p = power.orthogonalize(power.project(matrices, q))
    q = power.project_back(matrices, p)
    back = power.restore(p, q, out=torch.empty_like(matrices))
    torch.testing.assert_close(back, matrices, rtol=0.0, atol=1e-10 * scale)


@given(seed=st.integers(0, 1000), exponent=st.integers(-15, 15))
@settings(max_examples=20, deadline=None)
def test_power_and_residual_are_the_gradient_up_to_rounding(seed: int, exponent: int) -> None:
    """Up to roundings of the largest: p q^T is a sum that is rounded, and may be far from a small element."""
    matrices = numbers(2, 30, 20, seed=seed) * 10.0**exponent
    p = power.orthogonalize(power.project(matrices, power.first_factor(2, 20, 3, seed, torch.float32, matrices.device)))
    q = power.project_back(matrices, p)
    sent = power.restore(p, q, out=torch.empty_like(matrices))
    residual = matrices - sent
    error = (sent.double() + residual.double() - matrices.double()).abs().max()
    assert error <= 4 * 2.0**-24 * matrices.abs().max()


def test_power_of_zeros_can_start_again() -> None:
    p = power.orthogonalize(torch.zeros(1, 6, 2))
    assert torch.equal(p.mT @ p, torch.eye(2)[None])
    assert not power.project_back(torch.zeros(1, 6, 4), p).any()
    assert power.project_back(numbers(1, 6, 4), p).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_power_hides_nothing(bad: float) -> None:
    matrices = numbers(2, 6, 4)
    matrices[1, 2, 3] = bad
    p = power.orthogonalize(power.project(matrices, power.first_factor(2, 4, 2, KEY, torch.float32, matrices.device)))
    back = power.restore(p, power.project_back(matrices, p), out=torch.empty_like(matrices))
    assert back.isfinite().all((1, 2)).tolist() == [True, False]


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_part_of_a_product_is_restored(rows: int, columns: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, rows * columns - 1))
    end = data.draw(st.integers(begin + 1, rows * columns))
    p, q = numbers(rows, 3, dtype=torch.float64), numbers(columns, 3, dtype=torch.float64, seed=1)
    found = torch.full((end - begin,), math.nan, dtype=torch.float64)
    power.restore_from(begin, p, q, out=found)
    torch.testing.assert_close(found, (p @ q.T).reshape(-1)[begin:end], rtol=0.0, atol=1e-14)


@given(gaps=st.lists(st.sampled_from([0, 0, 64, 100]), min_size=1, max_size=8))
@settings(deadline=None)
def test_matrices_at_any_distances_are_found(gaps: list[int]) -> None:
    mesh, slots, end = ParallelMesh(), [], 0
    for number, gap in enumerate(gaps):
        tensor = LogicalTensor(f"{number}", (5, 7), Normal(1.0), weight_decay=False)
        parameter = Parameter(replicated(mesh, tensor, grad_is_partial=False), torch.float32, mesh.device)
        slots.append(Slot(parameter, end + gap, end + gap + 35))
        end = slots[-1].stop
    bucket = torch.arange(3 + end)[3:]
    found = [matrix for each in power.matrices_of(BucketLayout(tuple(slots), end), 2) for matrix in each.of(bucket)]
    for slot, matrix in zip(slots, found, strict=True):
        assert torch.equal(matrix.reshape(-1), bucket[slot.start : slot.stop])


def test_views_as_matrices() -> None:
    assert power.matrix_shape((512, 256), 4) == (512, 256)
    assert power.matrix_shape((64, 3, 5, 5), 4) == (64, 75)
    assert power.matrix_shape((512,), 1) is None
    assert power.matrix_shape((), 1) is None
    assert power.matrix_shape((4, 512), 4) is None
