"""Grouped products in half precision against float64, and that their launches do not grow with the number of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.extras.planner.recording import Recorder
from megalite.model.batch import LayerContext
from megalite.model.layer_kinds import make_moe
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite_kernels import grouped
from megalite_kernels.grouped import add_grouped_products, grouped_product, scale_gradients_
from megalite_kernels.implementation import Kernels, use
from tests.harness.close import assert_bits_equal, assert_rounded_once

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SHAPES = {
    "tiles that end inside groups": ([3, 0, 1, 130, 7], 40, 24),
    "several tiles, none full": ([0, 0, 5], 200, 136),
    "one row of one group": ([1], 16, 300),
    "narrower than a tile": ([2, 1], 3, 1),
}
"""Rows of each group, and both widths."""
SUM_TOLERANCE = 3e-7
"""Relative norm of the error of a sum of products in fp32, whose order is the kernel's."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends_of(counts: Sequence[int]) -> tuple[list[int], Tensor]:
    offsets = [0, *accumulate(counts)]
    return offsets, torch.tensor(offsets[1:], dtype=torch.int32)


def refuse(*arguments: Any, **options: Any) -> None:
    raise AssertionError("one product per group")


@pytest.fixture
def _no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "add_product", refuse)
    monkeypatch.setattr(torch, "mm", refuse)


@pytest.mark.usefixtures("_no_loop")
@HALVES
@pytest.mark.parametrize("name", SHAPES)
def test_products_are_those_of_float64_rounded_once(name: str, dtype: torch.dtype) -> None:
    """Compare with matrices as in forward, whose rows are columns in memory, and as in backward."""
    counts, width, out = SHAPES[name]
    offsets, ends = ends_of(counts)
    rows, matrices = random(sum(counts), width, seed=1, dtype=dtype), random(len(counts), width, out, seed=2)
    matrices = matrices.to(dtype)
    exact = [
        rows[start:stop].double() @ matrix.double()
        for matrix, (start, stop) in zip(matrices, pairwise(offsets), strict=True)
    ]
    for given in (matrices, matrices.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_rounded_once(grouped_product(rows, given, offsets, ends), torch.cat(exact))


@pytest.mark.usefixtures("_no_loop")
@HALVES
@pytest.mark.parametrize("name", SHAPES)
def test_sums_of_products_are_in_fp32_and_groups_without_rows_keep_theirs(name: str, dtype: torch.dtype) -> None:
    counts, width, out = SHAPES[name]
    offsets, ends = ends_of(counts)
    gradients, rows = random(sum(counts), out, seed=1, dtype=dtype), random(sum(counts), 2 * width, seed=2, dtype=dtype)
    rows = rows[:, width:]  # rows stand apart
    before = random(len(counts), out, width, seed=3)
    before[0, 0, 0] = -0.0
    added, written = before.clone(), torch.full_like(before, torch.nan)
    add_grouped_products(added, gradients, rows, offsets, ends, overwrite=False)
    add_grouped_products(written, gradients, rows, offsets, ends, overwrite=True)
    for group, (start, stop) in enumerate(pairwise(offsets)):
        product = gradients[start:stop].double().t() @ rows[start:stop].double()
        for found, first in ((added[group], before[group]), (written[group], torch.zeros_like(before[group]))):
            if start == stop:
                assert_bits_equal(found, first)
            else:
                exact = first.double() + product
                assert (found.double() - exact).norm() <= SUM_TOLERANCE * exact.norm()


def test_the_order_of_a_sum_is_that_of_the_rows_in_parts() -> None:
    """64 rows at a time, and the earlier sum last. The bits of each part are those of one product."""
    counts, width, out = [200, 70], 32, 16
    offsets, ends = ends_of(counts)
    gradients, rows = (random(sum(counts), size, seed=size, dtype=torch.bfloat16) for size in (out, width))
    before = random(len(counts), out, width, seed=3)
    found = before.clone()
    add_grouped_products(found, gradients, rows, offsets, ends, overwrite=False)
    for group, (start, stop) in enumerate(pairwise(offsets)):
        total = torch.zeros(out, width)
        for first in range(start, stop, 64):
            part = torch.zeros(64, out), torch.zeros(64, width)
            for padded, whole in zip(part, (gradients, rows), strict=True):
                own = whole[first : min(first + 64, stop)]
                padded[: len(own)] = own
            total = torch.from_numpy(part[0].numpy().T @ part[1].numpy()) + total
        assert_bits_equal(found[group], before[group] + total)


def test_groups_without_any_rows() -> None:
    offsets, ends = ends_of([0, 0])
    nothing = random(0, 8, seed=1, dtype=torch.bfloat16)
    assert grouped_product(nothing, random(2, 8, 16, seed=2, dtype=torch.bfloat16), offsets, ends).shape == (0, 16)
    sums = random(2, 8, 8, seed=3)
    before = sums.clone()
    add_grouped_products(sums, nothing, nothing, offsets, ends, overwrite=False)
    assert_bits_equal(sums, before)
    add_grouped_products(sums, nothing, nothing, offsets, ends, overwrite=True)
    assert_bits_equal(sums, torch.zeros_like(sums))


@pytest.mark.parametrize("choice", ["triton", "reference"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 40), (3, 5000), (0, 8)])
def test_gradients_are_scaled_after_the_scales_gradient_is_taken(rows: int, width: int, choice: str) -> None:
    use(Kernels(choice))  # type: ignore[arg-type]
    values, gradients = (random(rows, width, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    scale, given = random(rows, seed=3), gradients.clone()
    dots = scale_gradients_(gradients, values, scale)
    assert_bits_equal(gradients, (given.float() * scale[:, None]).bfloat16())
    exact = (given.double() * values.double()).sum(1)
    assert dots.dtype == torch.float32
    torch.testing.assert_close(dots.double(), exact, rtol=1e-4, atol=1e-5)


def test_other_dtypes_have_a_product_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too: tensor cores would round fp32."""
    monkeypatch.setattr(torch, "mm", refuse)
    offsets, ends = ends_of([2])
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(AssertionError, match="one product per group"):
            grouped_product(random(2, 4, seed=1, dtype=dtype), random(1, 4, 4, seed=2, dtype=dtype), offsets, ends)


# ------------------------------------------------------------------------------------------------- launches of a layer

SEQUENCE = 8
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}


class Operators(TorchDispatchMode):
    """Counts the operators of torch that a GPU would launch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **kwargs or {})
        if isinstance(result, Tensor | tuple) and not (func.is_view or name in NO_LAUNCH):
            self.launches[name] += 1
        return result


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what really runs: the operators, and the kernels in the interpreter."""
    run = InterpretedFunction.run
    with Operators() as operators, monkeypatch.context() as patch:

        def launch(kernel: Any, *arguments: Any, **options: Any) -> Any:
            operators.launches[kernel.__name__] += 1
            with _disable_current_modes():
                return run(kernel, *arguments, **options)

        patch.setattr(InterpretedFunction, "run", launch)
        yield operators.launches


def layer_with_experts(device: torch.device, **options: Any) -> Callable[[], None]:
    """Return forward and backward of a layer, whose gradients are added to those of the call before."""
    model = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, swiglu=True, moe_router_topk=2,
        init_method_std=0.2, **options,
    )  # fmt: skip
    mesh = ParallelMesh(device=device)
    layer = make_moe(model, ParallelContext(mesh, dtype=torch.bfloat16), 0)
    buffers = DataParallel(torch.float32, 0)
    optimizer = make_optimizer([layer], mesh, OptimizerConfig(lr=0.1), buffers, blocks=[[layer]])
    if device.type == "cpu":
        initialize(layer, 1)
    optimizer.begin_step(2)
    layout = SequenceLayout.whole(SEQUENCE)
    context = LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs)
    hidden = torch.ones(SEQUENCE, 1, 16, dtype=torch.bfloat16, device=device)
    if device.type == "cpu":
        hidden = random(SEQUENCE, 1, 16, seed=1, dtype=torch.bfloat16)
    hidden.requires_grad_()
    gradient = torch.ones_like(hidden)

    def run() -> None:
        hidden.grad = None
        output, terms = layer(hidden, context)
        ends = [each for each in terms.values() if each.requires_grad]
        torch.autograd.backward([output, *ends], [gradient, *map(torch.ones_like, ends)])

    return run


@pytest.mark.wide
@pytest.mark.parametrize(
    "options", [{"add_bias_linear": False}, {"add_bias_linear": True, "moe_aux_loss_coeff": (0.01,)}]
)
def test_a_dry_run_counts_the_launches_that_are_made(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare those of a layer with experts and a micro-batch, which are as many for more experts."""
    totals = []
    for experts in (4, 9):
        run, dry = (layer_with_experts(torch.device(kind), num_experts=experts, **options) for kind in ("cpu", "meta"))
        run()
        with counted(monkeypatch) as found:
            run()
        recorder = Recorder()
        with recorder:
            dry()
            recorder.forget()
            dry()
        expected: Counter[str] = Counter()
        for operation, count in recorder.total.operations.items():
            expected[operation.name] += count
        assert found == expected
        totals.append(found)
    assert totals[0] == totals[1]
    assert {"multiply_groups": 4, "add_products": 4 if options["add_bias_linear"] else 2}.items() <= totals[0].items()
