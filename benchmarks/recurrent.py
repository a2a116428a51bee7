"""CPU time and memory of the recurrences of Mamba-2 and the gated delta rule, beside attention of the same width.

    python -m benchmarks.recurrent [--rounds 9]

The cores alone, one sample of 4,096 tokens, 4 heads of 64 channels, fp32, one thread: forward and backward, beside
causal attention by torch's scaled_dot_product_attention; what is kept for backward, beside the formula of
`docs/kernels.md`; and one token of generation, beside attention to 4,096 earlier ones. All step in turn, round by
round; a figure is the median over rounds of the ratio, with quartiles.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cpu_step import Step, measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.parallel.mesh import ParallelMesh
from megalite_kernels.recurrence import recurrence, step_once

TOKENS, HEADS, WIDTH = 4096, 4, 64
CHUNKS = {"gated delta rule": 64, "Mamba-2": 128}
"""Tokens in a chunk of each recurrence."""
GOALS = {"gated delta rule": 0.70, "Mamba-2": 0.33, "kept": 1.1, "one token": 0.3}
"""The most that each figure should be."""
REPEATS = 100
"""Tokens of generation in a round."""


def inputs() -> list[Tensor]:
    """Return query, key, value, decay and step."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(TOKENS, 1, HEADS, WIDTH, generator=generator) for _ in range(3))
    decay, step = (torch.rand(TOKENS, 1, HEADS, generator=generator) for _ in range(2))
    return [each.requires_grad_() for each in (query, F.normalize(key, dim=-1), value, -0.3 * decay, step)]


def compute(name: str, given: list[Tensor]) -> Tensor:
    """Return the outputs of a recurrence, or of attention."""
    if name in CHUNKS:
        return recurrence(*given, delta=name == "gated delta rule", chunk=CHUNKS[name])[0]
    query, key, value = (each.permute(1, 2, 0, 3) for each in given[:3])
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3)


def training(name: str) -> Step:
    """Return forward and backward."""
    given = inputs()
    used = given if name in CHUNKS else given[:3]
    gradient = torch.randn(TOKENS, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(2))
    return lambda: torch.autograd.grad(compute(name, given), used, gradient)


def kept(name: str) -> int:
    """Return how many numbers forward keeps for backward."""
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute(name, inputs())
    return sum(found.values())


def repeated(function: Callable[[], object]) -> Step:
    """Return a round of generation."""

    def step() -> None:
        for _ in range(REPEATS):
            function()

    return step


def generation(name: str) -> Step:
    """Return the computation of one token after 4,096 others, many times."""
    given = [each.detach() for each in inputs()]
    if name in CHUNKS:
        state, last = torch.randn(1, HEADS, WIDTH, WIDTH), [each[-1:] for each in given]
        return repeated(lambda: step_once(*last, delta=name == "gated delta rule", state=state))
    query, key, value = (each.permute(1, 2, 0, 3).contiguous() for each in given[:3])
    return repeated(lambda: F.scaled_dot_product_attention(query[:, :, -1:], key, value))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    count = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {count} rounds, median [quartiles] of CPU time over that of attention")
    names, found = ["attention", *CHUNKS], {}
    for kind, make in {"training": training, "one token": generation}.items():
        times = measure({name: make(name) for name in names}, count, ParallelMesh())
        found[f"{kind}, seconds"] = times
        for name in CHUNKS:
            found[f"{kind}, {name}"] = ratios(times, name, "attention")
            goal = GOALS[name if kind == "training" else kind]
            print(f"  {f'{kind}, {name}':32} {quartiles(found[f'{kind}, {name}'])}  (goal {goal})", flush=True)
    for name, chunk in CHUNKS.items():
        formula = 5 * TOKENS * HEADS * WIDTH + TOKENS // chunk * HEADS * WIDTH**2
        found[f"kept, {name}"] = kept(name) / formula
        beside = kept(name) / kept("attention")
        print(
            f"  {f'kept, {name}':32} {found[f'kept, {name}']:.3f} of the formula, {beside:.2f} of attention's"
            f"  (goal {GOALS['kept']})"
        )
    write_results("recurrent", {"load": os.getloadavg(), "found": found, "goals": GOALS})


if __name__ == "__main__":
    main()
