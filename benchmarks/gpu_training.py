"""Training on this machine's GPUs: the losses are the CPU's, and a resume changes no bit."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.errors import largest

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-9  # relative; ten steps of float64 sums in another order
FAMILIES = {
    "gpt2": "--max-position-embeddings 64",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --qk-layernorm",
    "experts": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --num-experts 8 "
    "--moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    "sparse": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm "
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 "
    "--dsa-indexer-topk 16 --dsa-indexer-loss-coeff 1 --qk-clip --qk-clip-threshold 0.05",
}
COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --fp64"
)


def train(flags: str, processes: int, *, gpu: bool, deadline: float = math.inf) -> list[dict[str, float]]:
    """Run the program; returns its metrics by step. Raises as `metrics_of`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, "pretrain_gpt.py", *flags.split()]
    return metrics_of(command, gpu=gpu, deadline=deadline)


def metrics_of(command: Sequence[str], *, gpu: bool, deadline: float = math.inf) -> list[dict[str, float]]:
    """Run a program that takes `--metrics-path`; returns what it writes there.

    Raises CalledProcessError, or TimeoutExpired where it has not ended by the deadline, of the monotonic clock.
    """
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics.jsonl"
        command = [*command, "--metrics-path", str(metrics)]
        environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
            try:
                code = process.wait(None if deadline == math.inf else max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.terminate()  # the launcher ends the ranks, which takes it half a minute where they hang
                raise
        if code:
            raise subprocess.CalledProcessError(code, command)
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def layouts(gpus: int, family: str) -> list[tuple[str, str]]:
    """Flags of the layouts that so many GPUs allow a network of this family."""
    found = [("1 GPU", "")] if gpus == 1 else [(f"DP {gpus}", ""), (f"DP {gpus} ZeRO 1", "--use-distributed-optimizer")]
    if gpus > 1:
        strategies = ("optim_grads", "optim_grads_params")
        found += [(f"DP {gpus} {s}", f"--data-parallel-sharding-strategy {s}") for s in strategies]
        overlapped = "--overlap-grad-reduce --overlap-param-gather --data-parallel-sharding-strategy optim_grads_params"
        found += [(f"DP {gpus} ZeRO 3 overlapped", overlapped)]
    if gpus % 2 == 0:
        found += [("TP 2 SP", "--tp 2 --sequence-parallel --use-distributed-optimizer")]
        if family == "experts":  # with tensor parallelism only together with sequence parallelism
            found += [(f"EP 2 {way}", f"--ep 2 --moe-token-dispatcher-type {way}") for way in ("alltoall", "allgather")]
        else:
            found += [("TP 2", "--tp 2")]
        interleaved = "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"
        found += [("PP 2", "--pp 2"), ("PP 2 interleaved", interleaved)]
        found += [(f"CP 2 {way}", f"--cp 2 --cp-comm-type {way}") for way in ("p2p", "a2a")]
    ranks = "--pp 2 " if gpus % 2 == 0 else ""
    found += [(f"{ranks}{name}", f"{ranks}--pipeline-schedule {name}") for name in ("gpipe", "zb-h1", "zb-v")]
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    return [*found, ("full recompute", recompute), ("deterministic", "--deterministic-mode")]


def compare(deadline: float) -> Iterator[dict[str, object]]:
    """One layout after the other, as long as there is time."""
    gpus = min(torch.cuda.device_count(), 4)
    for optimizer, family in itertools.product(("adam", "muon"), FAMILIES):
        flags = f"{FAMILIES[family]} --optimizer {optimizer}"
        expected: list[dict[str, float]] = []
        for name, layout in layouts(gpus, family):
            row: dict[str, object] = {"family": family, "optimizer": optimizer, "layout": name}
            if time.monotonic() > deadline:
                yield row | {"left out": "no time was left"}
                continue
            expected = expected or train(f"{COMMON} {flags}", 1, gpu=False, deadline=deadline)
            try:
                found = train(f"{COMMON} {flags} {layout}", gpus, gpu=True, deadline=deadline)
            except subprocess.CalledProcessError as error:
                yield row | {"failed": f"exit code {error.returncode}"}
                continue
            worst = largest(
                abs(float(ours[key]) / float(theirs[key]) - 1)  # NaN is a word in the metrics
                for ours, theirs in zip(found, expected, strict=True)
                for key in ("lm_loss", "grad_norm")
            )
            yield row | {"largest relative difference": worst}


def check_checkpoints(processes: int, *, gpu: bool = True, deadline: float = math.inf) -> int:
    """Steps that differ by a bit after a resume from what was saved in the background, in either format."""
    flags = f"{COMMON} {FAMILIES['llama']} --deterministic-mode"
    different = 0
    for ckpt_format in ("megalite", "torch_dist"):
        with tempfile.TemporaryDirectory() as directory:
            saving = f"--save {directory}/saved --save-interval 5 --async-save --ckpt-format {ckpt_format}"
            whole = train(f"{flags} {saving}", processes, gpu=gpu, deadline=deadline)
            load = f"--load {directory}/saved --ckpt-step 5"
            resumed = train(f"{flags} {load}", processes, gpu=gpu, deadline=deadline)
        kept = [{key: step[key] for key in ("iteration", "lm_loss", "grad_norm")} for step in whole[5:]]
        found = [{key: step[key] for key in ("iteration", "lm_loss", "grad_norm")} for step in resumed]
        different += sum(ours != theirs for ours, theirs in zip(found, kept, strict=True))
    return different
