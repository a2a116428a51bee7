"""Training in plain PyTorch, as one would write it for one GPU: what megalite's speed stands beside.

    python -m benchmarks.gpu_rival --shape '{"layers": 16, ...}' --metrics-path FILE [--operations liger] [--device cpu]

bf16 parameters with fp32 masters, gradients that are added in bf16, scaled_dot_product_attention, AdamW(fused=True),
and torch.compile over each layer and over the output layer with the loss, which compiles faster than the whole network;
with `--operations liger`, Liger-Kernel's RMSNorm, SwiGLU and loss fused with the output layer. Writes a line a step, as
pretrain_gpt.py does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.gpu_shapes import Shape
from benchmarks.plain_pytorch import PLAIN, Operations, PlainLlama
from megalite.data.mock_dataset import MockDataset


class Masters:
    """fp32 masters of bf16 parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01, fused=True)

    def step(self) -> Tensor:
        """Update by the parameters' gradients, clipped at norm 1; returns the norm."""
        gradients = [master.grad for master in self.masters]
        torch._foreach_copy_(gradients, [parameter.grad for parameter in self.parameters])
        norm = nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None
        return norm


def liger() -> Operations:
    """Liger-Kernel's operations. Raises ModuleNotFoundError where it is not installed."""
    functions = importlib.import_module("liger_kernel.transformers.functional")
    return Operations(
        lambda x, weight: functions.liger_rms_norm(x, weight, 1e-5),
        functions.liger_swiglu,
        functions.liger_fused_linear_cross_entropy,
    )


def micro_batches(shape: Shape, step: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels [micro-batch, sequence], copied while the device works."""
    data = MockDataset(shape.vocabulary, shape.sequence, 1234, shape.steps * shape.batch)
    rows = torch.stack([torch.from_numpy(data[step * shape.batch + each]) for each in range(shape.batch)])
    rows = rows.pin_memory() if device.type == "cuda" else rows
    parts = rows.to(device, non_blocking=True).split(shape.micro_batch)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


def train(shape: Shape, operations: Operations, device: torch.device, path: Path) -> None:
    torch.manual_seed(1234)
    if operations is PLAIN:
        operations = PLAIN._replace(loss=torch.compile(PLAIN.loss, dynamic=False))
    with device:
        model = PlainLlama(
            shape.vocabulary, shape.layers, shape.hidden, shape.heads, shape.ffn, shape.sequence,
            groups=shape.groups, tied=shape.tied, operations=operations,
        ).bfloat16()  # fmt: skip
    for layer in model.layers:
        layer.compile(dynamic=False)
    masters = Masters(model)
    data = micro_batches(shape, 0, device)
    with open(path, "w", encoding="utf-8") as file:
        for step in range(shape.steps):
            began = time.perf_counter()
            losses = []
            for tokens, labels in data:
                loss = model(tokens, labels) / len(data)
                loss.backward()
                losses.append(loss.detach())
            norm = masters.step()
            data = micro_batches(shape, min(step + 1, shape.steps - 1), device)
            record = {"iteration": step + 1, "lm_loss": torch.stack(losses).sum().item(), "grad_norm": norm.item()}
            record["iteration_time_s"] = time.perf_counter() - began
            record["wall_time"] = time.time()
            if device.type == "cuda":
                record["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
            print(json.dumps(record), file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=json.loads, required=True, help="fields of benchmarks.gpu_shapes.Shape, as JSON"
    )
    parser.add_argument("--operations", choices=("torch", "liger"), default="torch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--metrics-path", type=Path, required=True)
    flags = parser.parse_args()
    operations = liger() if flags.operations == "liger" else PLAIN
    train(Shape(**flags.shape), operations, torch.device(flags.device), flags.metrics_path)


if __name__ == "__main__":
    main()
