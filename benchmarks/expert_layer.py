"""Tokens per second of a layer with 8 and with 128 experts: products of all experts at once against one after another.

    python -m benchmarks.expert_layer [--tokens 16384] [--repeats 15]
    python -m benchmarks.expert_layer --device cpu

Forward and backward of one feed-forward layer in bf16 on one GPU, whose weight gradients are added to fp32 sums. Both
layers use experts of the same width in sum for each token, so they compute the same number of products. Variants: the
layer as it trains, and with one product per expert ("loop"). Beside them is the time of the permutation alone: sorting
the choices, bringing rows to their experts and back, forward and backward. The variants take turns; a figure is the
median. Writes benchmarks/results/expert_layer_DEVICE.json.

Exit code 0; 1: the gradients of the variants differ by more than rounding; 2: there is no GPU. `--device cpu` tries it
at small sizes, where the figures mean nothing and both variants are loops.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.errors import largest, relative
from benchmarks.results import RESULTS, write_results
from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.model.layer_kinds import make_moe
from megalite.model.moe import MoE
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Gradient, Parameter
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite_kernels.implementation import Kernels, use
from megalite_kernels.measure import REPEATS, Step, time_interleaved

HIDDEN = {"cuda": 2048, "cpu": 32}
WIDTH = {"cuda": 6144, "cpu": 64}
"""Width of a token's experts in sum."""
EXPERTS = ((8, 2), (128, 8))
"""Number of experts, and how many of them a token uses."""
VARIANTS = {"grouped": Kernels("auto"), "loop": Kernels("auto", to_reference=("grouped",))}
TOLERANCE = 1e-2
"""Largest relative difference of two gradients: on the way, results are rounded to bf16 several times."""


class Sums:
    """Sums of gradients in fp32, in place of those of an optimizer."""

    deferred, frees_parameters = None, False

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.of = {id(parameter): torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}

    def accumulate(self, parameter: Parameter, gradient: Gradient, use: int = 0) -> None:
        gradient.add_to(self.of[id(parameter)], overwrite=False)


@dataclass(frozen=True)
class Layer:
    """A layer with experts and its input."""

    module: MoE
    sums: Sums
    hidden: Tensor
    gradient: Tensor
    context: LayerContext

    def step(self, kernels: Kernels) -> Step:
        """Return forward and backward by these kernels."""

        def run(mark: Callable[[], None]) -> None:
            use(kernels)
            self.hidden.grad = self.module.router.weight.grad = None
            output, _ = self.module(self.hidden, self.context)
            mark()
            output.backward(self.gradient)

        return run

    def permutation(self) -> Step:
        """Return the permutation alone, by the router's choices."""
        use(VARIANTS["grouped"])
        with torch.no_grad():
            chosen, weights, *_ = self.module.router(self.hidden, self.context)
        tokens = self.hidden.detach().flatten(0, 1).requires_grad_()
        weights.requires_grad_()

        def run(mark: Callable[[], None]) -> None:
            use(VARIANTS["grouped"])
            arrived = self.module.dispatcher.dispatch(tokens, chosen, weights)()
            output = arrived.combine(arrived.rows)
            mark()
            ends = [output, arrived.weights]
            torch.autograd.grad(ends, [tokens, weights], [output.detach(), arrived.weights.detach()])

        return run

    def gradients(self, kernels: Kernels) -> list[Tensor]:
        """Return the gradients of the input, the router and the experts after one step from zero."""
        for total in self.sums.of.values():
            total.zero_()
        self.step(kernels)(lambda: None)
        assert self.hidden.grad is not None
        assert self.module.router.weight.grad is not None
        found = [self.hidden.grad, self.module.router.weight.grad, *self.sums.of.values()]
        return [each.double() for each in found]


def make_layer(experts: int, topk: int, tokens: int, device: str) -> Layer:
    model = ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN[device],
        num_attention_heads=1,
        ffn_hidden_size=WIDTH[device] // topk,
        swiglu=True,
        add_bias_linear=False,
        num_experts=experts,
        moe_router_topk=topk,
    )
    mesh = ParallelMesh(device=torch.device(device))
    module = make_moe(model, ParallelContext(mesh, dtype=torch.bfloat16), 0)
    initialize(module, 1)
    weights = [module.experts.up, module.experts.down]
    sums = Sums(weights)
    for weight in weights:
        weight.gradient_buffer = sums
    layout = SequenceLayout.whole(tokens)
    generator = torch.Generator().manual_seed(1)
    hidden, gradient = (
        torch.randn(tokens, 1, HIDDEN[device], generator=generator).bfloat16().to(device) for _ in range(2)
    )
    context = LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs)
    return Layer(module, sums, hidden.requires_grad_(), gradient, context)


def compare(layer: Layer) -> float:
    """Return the largest difference between the variants' gradients, relative to their norms; infinity for NaN."""
    ours, theirs = (layer.gradients(kernels) for kernels in VARIANTS.values())
    pairs = zip(ours, theirs, strict=True)
    return largest(relative(one, other) for one, other in pairs)


def measure(experts: int, topk: int, tokens: int, device: str, repeats: int) -> dict[str, object]:
    """Return the figures of one layer."""
    layer = make_layer(experts, topk, tokens, device)
    difference = compare(layer)
    steps = [*(layer.step(kernels) for kernels in VARIANTS.values()), layer.permutation()]
    *variants, permutation = time_interleaved(steps, torch.device(device), repeats)
    flops = 18 * tokens * HIDDEN[device] * WIDTH[device]  # three matrices, each with three products
    found: dict[str, object] = {"experts": experts, "topk": topk, "tokens": tokens, "difference": difference}
    for name, seconds in zip(VARIANTS, variants, strict=True):
        total = sum(seconds)
        found[name] = {
            "seconds of forward and backward": seconds,
            "tokens per second": tokens / total,
            "TFLOP/s of products": flops / total / 1e12,
            "share of permutation": sum(permutation) / total,
        }
    return found | {"seconds of permutation": permutation, "loop / grouped": sum(variants[1]) / sum(variants[0])}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="of the layer's input (16384; on a CPU 64)")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    flags = parser.parse_args(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured", file=sys.stderr)
        return 2
    tokens = flags.tokens or (16384 if flags.device == "cuda" else 64)
    where = torch.cuda.get_device_name() if flags.device == "cuda" else "CPU, where figures mean nothing"
    print(f"torch {torch.__version__}, {where}, {tokens} tokens, hidden size {HIDDEN[flags.device]}, bf16")
    rows, right = [], True
    for experts, topk in EXPERTS:
        row = measure(experts, topk, tokens, flags.device, flags.repeats)
        rows.append(row)
        print(f"{experts} experts, top-{topk}: the variants' gradients differ by {row['difference']:.1e}")
        for name in VARIANTS:
            of = row[name]
            assert isinstance(of, dict)
            print("  " + ", ".join([f"{name:7}", *(f"{key} {_short(value)}" for key, value in of.items())]), flush=True)
        right = right and isinstance(row["difference"], float) and row["difference"] <= TOLERANCE
    path = write_results(f"expert_layer_{flags.device}", {"device": where, "layers": rows}, flags.results)
    print(f"written to {path}" if right else "WRONG: the gradients of the variants differ")
    return 0 if right else 1


def _short(value: object) -> str:
    if isinstance(value, list):
        return " + ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
