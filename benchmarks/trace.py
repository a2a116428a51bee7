"""Recording a step with sketches (`megalite_trace.py`) beside the same step without: CPU time of one thread.

    python -m benchmarks.trace [--rounds 9] [--vocabulary 8192] [--dtypes float32 bfloat16] [--micro-batches 1 4]

A plain GPT of 4 layers, hidden 1,024, AdamW, micro-batches of one sample of 512 tokens. Recorded are all modules,
gradients, and parameters before and after. These are read three times a step, so that with one micro-batch, of fewer
tokens than any training has, they are most of the cost. Beside it: sketches of tensors of the same shapes alone, and
only reading these once, which no record of whole tensors can go below. All in turn, round by round; a figure is the
median over rounds of the ratio of CPU times, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cpu_step import Step, measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.parallel.mesh import ParallelMesh
from megalite_trace import Recorder, sketch

LAYERS, HIDDEN, HEADS, TOKENS = 4, 1024, 16, 512
GOAL = 1.05
"""The most that a recorded step should take of one that is not recorded."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.mlp_norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU("tanh"), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Model(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight
        return self.head(self.norm(self.blocks(hidden)))


def training_step(model: Model, recorder: Recorder, number: int, micro_batches: int) -> Step:
    """Return a step, which is recorded if its number is chosen."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = torch.randint(model.head.out_features, (micro_batches, 1, TOKENS + 1))

    def step() -> None:
        optimizer.zero_grad()
        with recorder.step(number):
            for each in data:
                tokens, labels = each[:, :-1], each[:, 1:]
                recorder.batch(tokens=tokens, labels=labels)
                loss = F.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())
                loss.backward()
            recorder.gradients()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recorder.figures(loss=loss, grad_norm=norm)

    return step


def recorded_shapes(folder: Path) -> list[list[int]]:
    """Return the shapes of the tensors that were sketched."""
    (index,) = folder.glob("step_*/rank_*.json")
    entries = json.loads(index.read_text())["entries"]
    return list({entry["sketch"]: entry["shape"] for entry in entries}.values())


def over_all(tensors: Sequence[Tensor], *, sketched: bool) -> Step:
    """Return sketches of all tensors, or their sums."""

    def step() -> None:
        for tensor in tensors:
            if sketched:
                sketch(tensor)
            else:
                tensor.sum()

    return step


def compare(dtype: torch.dtype, vocabulary: int, micro_batches: int, rounds: int) -> dict[str, list[float]]:
    """Print and return the ratios for a dtype and a number of micro-batches."""
    model = Model(vocabulary).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder, model, {1})
        steps = {
            name: training_step(model, recorder, number, micro_batches)
            for name, number in (("plain", 2), ("recorded", 1))
        }
        steps["recorded"]()
        shapes = recorded_shapes(Path(folder))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.*"))
        values = torch.randn(4 * HIDDEN * max(vocabulary, HIDDEN)).to(dtype)
        tensors, start = [], 0
        for shape in shapes:  # each elsewhere in memory, as those of a step
            count = torch.Size(shape).numel()
            start = start if start + count <= values.numel() else 0
            tensors.append(values[start : start + count].view(shape))
            start += count
        steps |= {"sketches": over_all(tensors, sketched=True), "reading": over_all(tensors, sketched=False)}
        times = measure(steps, rounds, ParallelMesh())
    elements = sum(tensor.numel() for tensor in tensors)
    recorded = f"{len(shapes)} tensors of {elements / 1e6:.0f} million elements, {size / 2**20:.1f} MiB of files"
    print(f"{dtype}, {TOKENS * micro_batches:,} tokens a step: {recorded}")
    found = {name: ratios(times, name, "plain") for name in ("recorded", "sketches", "reading")}
    for name, each in found.items():
        print(f"  {name:10} / plain  {quartiles(each)}" + (f"  (goal {GOAL})" if name == "recorded" else ""))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {arguments.rounds} rounds, median [quartiles] of ratios of CPU time")
    found = {
        f"{name}, {count} micro-batches": compare(getattr(torch, name), arguments.vocabulary, count, arguments.rounds)
        for name in arguments.dtypes
        for count in arguments.micro_batches
    }
    write_results("trace", {"load": os.getloadavg(), "found": found})


if __name__ == "__main__":
    main()
