"""Verification of one micro-batch of a model of 1.1 billion parameters from sketches: seconds, and peak memory.

    python -m benchmarks.verify [--layers 20]

A Llama of 20 layers, hidden 2,048, vocabulary 32,000, one sample of 512 tokens, weights in bf16 in a file that is read
layer by layer. The replay runs forward and backward in fp64, and beside it three times in bf16, as `megalite-verify`
does, and compares each input, output and gradient of a module, and the gradient of each weight, with a sketch. The
sketches are those of one of the runs in bf16: what they are of changes no cost.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.results import write_results
from megalite.checkpoint.tensors import Kind
from megalite.config import ModelConfig
from megalite.conversion.opened import logical_tensors
from megalite.data.loader import MicroBatchArrays
from megalite.extras.verify.evidence import Sketched
from megalite.extras.verify.judgement import compare
from megalite.extras.verify.replay import Gradients, Replay, keep_freed_memory
from megalite.extras.verify.rounding import TRUTH, emulations
from megalite.parallel.sharding import Box
from megalite_trace import sketch

HIDDEN, FFN, HEADS, GROUPS, VOCABULARY, TOKENS = 2048, 5632, 16, 8, 32_000, 512
MOST_SECONDS, MOST_BYTES = 300, 12 * 10**9


class Weights:
    """Weights in a file (a `Source`)."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(0)
        save_file({name: _drawn(shape, generator) for name, shape in shapes.items()}, path)
        self._file = safe_open(path, "pt")
        self.tensors = {name: Kind(shape, torch.bfloat16) for name, shape in shapes.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        values.copy_(self._file.get_tensor(name)[box.slices()])


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, generator=generator).mul_(0.02).bfloat16()


def compared(values: list[Tensor]) -> float:
    """Compare the sketch of one of the runs in bf16 with the truth. Returns its distance as a multiple of rounding."""
    kept = sketch(values[1])
    evidence = Sketched(*(kept[name] for name in ("shape", "dtype", "norm", "finite", "projections", "samples")))
    distance, rounding, _, _ = compare(evidence, values)
    return distance / rounding if rounding else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    layers = parser.parse_args().layers
    keep_freed_memory()
    model = ModelConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    shapes = dict(logical_tensors(model))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, TOKENS + 1))
    batch = MicroBatchArrays(
        tokens=tokens[:, :-1].copy(),
        labels=tokens[:, 1:].copy(),
        loss_mask=np.ones((1, TOKENS)),
        positions=np.arange(TOKENS)[None],
        document_ids=None,
        padding=None,
        sample_ids=[0],
        replayed=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        weights = Weights(Path(folder) / "weights.safetensors", shapes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        replay = Replay(model, weights, "the benchmark", [batch], (TRUTH, *emulations(torch.bfloat16, 1)))
        ratios: list[float] = []
        began, began_computing = time.perf_counter(), time.process_time()
        for seen in replay.forward():
            ratios += [compared([values[point] for values in seen.values]) for point in seen.values[0]]
        forward = time.perf_counter() - began
        for found in replay.backward([{"lm_loss": 1 / TOKENS}]):
            names = found.values[0]
            chosen = [name for name in names if isinstance(found, Gradients) or name.role.endswith("gradient")]  # type: ignore[union-attr]
            ratios += [compared([values[name] for values in found.values]) for name in chosen]  # type: ignore[index]
        seconds, computing = time.perf_counter() - began, time.process_time() - began_computing
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parameters = sum(int(np.prod(shape)) for shape in shapes.values())
    count = f"{parameters / 1e9:.2f} billion parameters, {len(ratios):,} tensors compared"
    print(f"{count}, on {torch.get_num_threads()} threads")
    load = os.getloadavg()
    print(f"{seconds:.0f} s (forward {forward:.0f} s); goal: {MOST_SECONDS} s")
    print(f"{computing:.0f} s of CPU time, beside a load of {load[1]:.1f}")
    print(
        f"peak memory {peak / 1e9:.1f} GB ({before * 1024 / 1e9:.1f} before it began); goal: {MOST_BYTES / 1e9:.0f} GB"
    )
    results = {"parameters": parameters, "seconds": seconds, "forward": forward, "cpu_seconds": computing}
    write_results("verify", {**results, "peak_bytes": peak, "tensors": len(ratios), "load": load})


if __name__ == "__main__":
    main()
