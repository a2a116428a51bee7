"""What only a GPU can show: that it trains the same model as the CPU, on every layout, and how fast.

    benchmarks/gpu_check.sh

In float64 the losses and gradient norms of ten steps on the GPUs equal the CPU's, and after a resume they are the same
bits; attention in blocks is the dense one; Triton's kernels compute what float64 does, and their bandwidth is printed;
in bf16 a model of about 1.3 billion parameters is timed. Prints a table, writes it as JSON under benchmarks/results/,
and fails where numbers differ.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.kernel_check import check_norms, time_norms
from megalite.parallel.parameter import ProductGradient
from megalite_kernels.attention import attention, block_mask, dense_mask

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-9  # relative; ten steps of float64 sums in another order
WEIGHT_GRADIENT_TOLERANCE = 1e-5  # fp32 sums of 512 products that are exact; bf16 sums would be off by 1e-3
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # norm of the error; bf16 rounds each factor by 4e-3
ATTENTION = {"documents": (None, None), "and a window": (512, None), "and capped scores": (512, 30.0)}  # window, cap
FAMILIES = {
    "gpt2": "--max-position-embeddings 64",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --qk-layernorm",
}
COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --fp64"
)
SPEED = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5504 --seq-length 2048 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 8 --lr 1e-4 --train-iters 20 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50000 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --bf16 "
    "--log-interval 5 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)


def train(flags: str, processes: int, *, gpu: bool) -> list[dict[str, float]]:
    """Run the program; returns its metrics by step."""
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics.jsonl"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *launcher, "pretrain_gpt.py", *flags.split(), "--metrics-path", str(metrics)]
        environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL if not gpu else None)
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def layouts(gpus: int) -> list[tuple[str, str]]:
    """Flags of the layouts that so many GPUs allow."""
    found = [("1 GPU", "")] if gpus == 1 else [(f"DP {gpus}", ""), (f"DP {gpus} ZeRO 1", "--use-distributed-optimizer")]
    if gpus > 1:
        strategies = ("optim_grads", "optim_grads_params")
        found += [(f"DP {gpus} {s}", f"--data-parallel-sharding-strategy {s}") for s in strategies]
        overlapped = "--overlap-grad-reduce --overlap-param-gather --data-parallel-sharding-strategy optim_grads_params"
        found += [(f"DP {gpus} ZeRO 3 overlapped", overlapped)]
    if gpus % 2 == 0:
        found += [("TP 2", "--tp 2"), ("TP 2 SP", "--tp 2 --sequence-parallel --use-distributed-optimizer")]
        interleaved = "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"
        found += [("PP 2", "--pp 2"), ("PP 2 interleaved", interleaved)]
    ranks = "--pp 2 " if gpus % 2 == 0 else ""
    found += [(f"{ranks}{name}", f"{ranks}--pipeline-schedule {name}") for name in ("gpipe", "zb-h1", "zb-v")]
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    return [*found, ("full recompute", recompute), ("deterministic", "--deterministic-mode")]


def compare() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    gpus = min(torch.cuda.device_count(), 4)
    for family, optimizer in itertools.product(FAMILIES, ("adam", "muon")):
        flags = f"{FAMILIES[family]} --optimizer {optimizer}"
        expected = train(f"{COMMON} {flags}", 1, gpu=False)
        for name, layout in layouts(gpus):
            found = train(f"{COMMON} {flags} {layout}", gpus, gpu=True)
            worst = max(
                abs(ours[key] - theirs[key]) / abs(theirs[key])
                for ours, theirs in zip(found, expected, strict=True)
                for key in ("lm_loss", "grad_norm")
            )
            rows.append(
                {"family": family, "optimizer": optimizer, "layout": name, "largest relative difference": worst}
            )
            print(
                f"{family:6} {optimizer:5} {name:16} largest relative difference from the CPU {worst:.1e}", flush=True
            )
    return rows


def check_weight_gradients() -> float:
    """The largest error, relative to the largest element, of bf16 weight gradients added to fp32 on the GPU."""
    generator = torch.Generator().manual_seed(1)
    output, inputs = (torch.randn(512, width, generator=generator).bfloat16() for width in (384, 256))
    exact = output.double().t() @ inputs.double()
    worst = 0.0
    for overwrite, start in ((True, math.nan), (False, 1.0)):
        target = torch.full((384, 256), start, device="cuda")
        ProductGradient(output.cuda(), inputs.cuda()).add_to(target, overwrite=overwrite)
        error = target.cpu().double() - exact - (0.0 if overwrite else start)
        worst = max(worst, (error.abs().max() / exact.abs().max()).item())
    print(f"bf16 weight gradients added in fp32: error {worst:.1e} of the largest", flush=True)
    return worst


def first_keys(batch: int, sequence: int, window: int | None, seed: int = 1) -> Tensor:
    """The first key that each query sees, of documents of about a thousand tokens."""
    tokens = torch.arange(sequence)
    begins = torch.rand(batch, sequence, generator=torch.Generator().manual_seed(seed)) < 1 / 1000
    near = torch.zeros_like(tokens) if window is None else (tokens - window).clamp(min=0)
    return torch.maximum((tokens * begins).cummax(dim=1).values, near).cuda()


def heads(batch: int, sequence: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries of 16 heads, keys and values of 4, as a layer has them."""
    shapes = ((sequence, batch, count, 128) for count in (16, 4, 4))
    return [torch.randn(shape, device="cuda", dtype=dtype).permute(1, 2, 0, 3).requires_grad_() for shape in shapes]


def check_attention() -> dict[str, float]:
    """The largest error of attention in blocks, forward and backward, over what is tolerated, against float64; how much
    faster it is than with a dense mask; and how often it was compiled for what differs in nothing but its documents.
    """
    worst: dict[str, float] = {"error over tolerance": 0.0}
    for (name, (window, cap)), dtype in itertools.product(ATTENTION.items(), ATTENTION_TOLERANCE):
        parts = heads(2, 2048, dtype)
        wide = [part.detach().double().requires_grad_() for part in parts]
        first, found = first_keys(2, 2048, window), []
        for inputs, mask in ((parts, block_mask(first)), (wide, dense_mask(first))):
            mixed = attention(*inputs, mask, scale=None, cap=cap, dropout=0.0)
            found.append([mixed, *torch.autograd.grad(mixed.square().sum(), inputs)])
        errors = [((ours - exact).norm() / exact.norm()).item() for ours, exact in zip(*found, strict=True)]
        error = max(errors) if all(map(math.isfinite, errors)) else math.inf
        worst["error over tolerance"] = max(worst["error over tolerance"], error / ATTENTION_TOLERANCE[dtype])
        print(f"attention in blocks, {name}, {dtype}: error {error:.1e} of the norm", flush=True)
    parts = heads(2, 4096, torch.bfloat16)
    for name, (window, cap) in ATTENTION.items():
        first = first_keys(2, 4096, window)
        times = [time_attention(parts, mask, cap) for mask in (block_mask(first), dense_mask(first))]
        worst[f"times faster: {name}"] = times[1] / times[0]
        print(f"attention in blocks, {name}, 4096 tokens: {times[0] * 1e3:.1f} ms, dense {times[1] * 1e3:.1f} ms")
    before = counters["stats"]["unique_graphs"]
    for seed in range(2, 5):
        attention(*parts, block_mask(first_keys(2, 4096, None, seed)), scale=None, cap=None, dropout=0.0)
    return worst | {"compiled anew": counters["stats"]["unique_graphs"] - before}


def time_attention(parts: list[Tensor], mask: Tensor | BlockMask, cap: float | None) -> float:
    """Median seconds of forward and backward."""

    def once() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(attention(*parts, mask, scale=None, cap=cap, dropout=0.0).sum(), parts)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    return statistics.median([once() for _ in range(13)][3:])


def check_checkpoints(processes: int, *, gpu: bool = True) -> int:
    """Steps that differ by a bit after a resume from what was saved in the background, in either format."""
    flags = f"{COMMON} {FAMILIES['llama']} --deterministic-mode"
    different = 0
    for ckpt_format in ("megalite", "torch_dist"):
        with tempfile.TemporaryDirectory() as directory:
            saving = f"--save {directory}/saved --save-interval 5 --async-save --ckpt-format {ckpt_format}"
            whole = train(f"{flags} {saving}", processes, gpu=gpu)
            resumed = train(f"{flags} --load {directory}/saved --ckpt-step 5", processes, gpu=gpu)
        kept = [{key: step[key] for key in ("iteration", "lm_loss", "grad_norm")} for step in whole[5:]]
        found = [{key: step[key] for key in ("iteration", "lm_loss", "grad_norm")} for step in resumed]
        different += sum(ours != theirs for ours, theirs in zip(found, kept, strict=True))
    print(f"resumed from checkpoints saved in the background: {different} of 10 steps differ", flush=True)
    return different


def time_training() -> dict[str, object]:
    gpus = torch.cuda.device_count()
    steps = train(f"{SPEED} --global-batch-size {16 * gpus}", gpus, gpu=True)[10:]
    middle = sorted(steps, key=lambda step: step["iteration_time_s"])[len(steps) // 2]
    return {
        key: middle[key]
        for key in ("tokens_per_second_per_device", "model_tflops_per_device", "mfu", "peak_memory_bytes", "lm_loss")
    }


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 1
    norms, norm_times = check_norms(), time_norms()
    weight_gradients = check_weight_gradients()
    in_blocks = check_attention()
    different = check_checkpoints(min(torch.cuda.device_count(), 4))
    rows = compare()
    speed = time_training()
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "command": "benchmarks/gpu_check.sh",
        "norms in Triton, error over tolerance": norms,
        "norms in Triton, bf16": norm_times,
        "error of weight gradients": weight_gradients,
        "attention in blocks": in_blocks,
        "steps that differ after a resume": different,
        "equality": rows,
        "bf16 1.3B training, median of steps 11 to 20": speed,
    }
    text = json.dumps(result, indent=1)
    print(text)
    target = ROOT / "benchmarks" / "results" / f"gpu_check_{result['date']}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text + "\n")
    differences = [float(str(row["largest relative difference"])) for row in rows]
    if norms > 1 or weight_gradients > WEIGHT_GRADIENT_TOLERANCE or different:
        return 1
    if in_blocks["error over tolerance"] > 1 or in_blocks["compiled anew"]:
        return 1
    return 0 if max(differences) <= TOLERANCE and math.isfinite(float(str(speed["lm_loss"]))) else 1


if __name__ == "__main__":
    sys.exit(main())
