"""Launches, waits and the host's own time of a layer and of the optimizer, beside megatron-core and plain torch.

    python -m benchmarks.host_budget [--rounds 15]

All run on the meta device, which computes nothing, so the time is the host's: Python, autograd and torch's dispatch,
CPU time in microseconds. The figures lack what a driver takes for a launch and what Triton takes to start a kernel, so
the numbers of launches stand beside them. They are counted by the recorder of --dry-run; a launch is an operator or a
kernel, and a `_foreach` operator of torch is one, however many tensors it has. megatron-core's functions for
torch.compile are one launch each; their time is that of their operators.

A figure of a layer is a stack of 12 layers less one of 4, over 8: forward and backward of one micro-batch, whose
gradients are added to those of another. Width 2048, 16 heads, 2048 tokens, bf16, no dropout, torch's flash attention
in all. The optimizer's step clips by the gradient's norm and runs AdamW over the 12 layers: megalite's in fp32 with
masters and a decision to skip, torch's with foreach in bf16. The rivals run in turn, round by round; a figure is the
median, with quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from benchmarks.host_rivals import META, Stack, hidden_states, megatron_core, norms_of_a_gpu, plain_torch
from benchmarks.quick_meta import describe_quickly
from benchmarks.results import write_results
from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import StageLayers
from megalite.config.validate import resolve
from megalite.extras.planner.dry_run import dry_micro_batch, planned_kernels
from megalite.extras.planner.host_time import host_speed
from megalite.extras.planner.recording import Recorder
from megalite.model.gpt import HIDDEN_STATES, make_chunks
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer
from megalite.parallel.mesh import UnconnectedMesh
from megalite.training import builder

SHORT, LONG, SEQUENCE = 4, 12, 2048
MANY = 1 << 20
"""Micro-batches of a step that never ends."""
COMMON = (
    f"--num-layers {LONG + 1} --hidden-size 2048 --num-attention-heads 16 --seq-length {SEQUENCE} --vocab-size 32000 "
    f"--max-position-embeddings {SEQUENCE} --bf16 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--tokenizer-type NullTokenizer --mock-data --train-iters 1 --lr 1e-4"
)
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --ffn-hidden-size 5632"
FAMILIES = {
    "llama": LLAMA,
    "gpt2": "--ffn-hidden-size 8192",
    "experts": f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm",
}
WHY_NOT = {
    "experts of megatron-core": "its layer splits tokens by numbers that a tensor on the meta device does not have",
    "experts of plain torch": "there is no layer of this kind in torch",
    "optimizer of megatron-core": "it puts its buffers on torch.cuda.current_device(), so it needs a GPU",
}


@dataclass(frozen=True)
class Budget:
    """Demands of a piece of code on the host."""

    launches: float
    waits: float
    microseconds: Sequence[float]
    """In each round."""

    def __str__(self) -> str:
        low, median, high = quantiles(self.microseconds, n=4)
        return f"{self.launches:6.0f} launches {self.waits:3.0f} waits {median:7.0f} [{low:.0f}, {high:.0f}] µs"


@dataclass(frozen=True)
class Pass:
    """Code to measure."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    """Function that runs before it each time, and is not measured."""


def configuration(family: str) -> RunConfig:
    """Return the configuration of a family, with the size of its vocabulary."""
    config = resolve(parse_arguments(f"{COMMON} {FAMILIES[family]}".split(), lambda *_: {}).config, 1)
    return replace(config, model=replace(config.model, vocab_size=32000))


def own_layers(config: RunConfig, layers: int) -> tuple[Pass, Optimizer]:
    """Return forward and backward of megalite's layers, and their optimizer."""
    mesh = UnconnectedMesh(rank=0, world_size=1, device=META, **config.parallel.mesh_sizes)
    part = StageLayers(1, layers, embedding=False, loss=False)  # not the first layer: a stage's input is another's
    dtype = builder.model_dtype(config)
    (chunk,) = make_chunks(config.model, mesh, [part], (0,), dtype=dtype, roundings=builder.roundings(config))
    optimizer = builder.make_optimizer(config, [chunk], mesh, builder.make_stages(config), lambda parameter: None)
    optimizer.begin_step(MANY)
    batch = dry_micro_batch(config, mesh, builder.make_cutting(config, mesh))
    hidden = hidden_states(config.model, SEQUENCE)
    gradient = torch.empty_like(hidden)

    def run() -> None:
        found = chunk({HIDDEN_STATES: hidden}, batch)
        (output,) = found.tensors.values()
        terms = [each for each in found.terms.values() if each.requires_grad]
        torch.autograd.backward([output, *terms], [gradient, *map(torch.empty_like, terms)])

    return Pass(run), optimizer


def rival_layers(stack: Stack, hidden: Tensor) -> Pass:
    """Return forward and backward of a rival's layers."""
    gradient = torch.empty_like(hidden)
    return Pass(lambda: stack[0](hidden).backward(gradient))


def own_update(layers: Pass, optimizer: Optimizer) -> Pass:
    """Return a step of megalite's optimizer, after a micro-batch."""

    def before() -> None:
        optimizer.begin_step(1)
        layers.run()
        optimizer.reduce(0, 1)

    return Pass(lambda: optimizer.step(Rates(1e-4, 1e-4, 0.1)), before)


def torch_update(stack: Stack) -> Pass:
    """Return a step of torch's AdamW with clipping."""
    parameters = stack[1]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

    def run() -> None:  # clip_grad_norm_ does the same, but refuses tensors on the meta device
        norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(gradients))))
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()

    return Pass(run)


def count(of: Pass) -> tuple[int, int]:
    """Return the launches and the waits of a run that is not the first."""
    recorder = Recorder()
    with recorder:
        for _ in range(2):
            of.before()
            recorder.forget()
            of.run()
    return recorder.total.launches, recorder.waits.total()


def measure(passes: Mapping[str, Pass], rounds: int) -> dict[str, list[float]]:
    """Return the CPU microseconds of each pass in each round, the passes in turn."""
    found: dict[str, list[float]] = {name: [] for name in passes}
    with host_speed():
        for number in range(rounds + 2):
            for name, each in passes.items():
                each.before()
                began = time.process_time()
                each.run()
                if number > 1:  # the first rounds warm up
                    found[name].append(1e6 * (time.process_time() - began))
    return found


def per_layer(short: Mapping[str, Pass], long: Mapping[str, Pass], rounds: int) -> dict[str, Budget]:
    """Return what a layer takes: the difference of two stacks."""
    stacks = {f"{name} short": each for name, each in short.items()} | dict(long)
    times = measure(stacks, rounds)
    found = {}
    for name in long:
        launches, waits = (
            (more - fewer) / (LONG - SHORT) for fewer, more in zip(count(short[name]), count(long[name]), strict=True)
        )
        pairs = zip(times[f"{name} short"], times[name], strict=True)
        found[name] = Budget(launches, waits, [(more - fewer) / (LONG - SHORT) for fewer, more in pairs])
    return found


def budgets(family: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the budgets of a layer of the family, and of the optimizer of its layers."""
    config = configuration(family)
    rivals = {} if family == "experts" else {"megatron-core": megatron_core, "plain torch": plain_torch}
    with planned_kernels(config.kernels), norms_of_a_gpu():
        stacks: list[dict[str, Pass]] = []
        for layers in (SHORT, LONG):
            own, optimizer = own_layers(config, layers)
            stacks.append({"megalite": own})
            for name, make in rivals.items():
                hidden = hidden_states(config.model, SEQUENCE, batch_first=make is plain_torch)
                stacks[-1][name] = rival_layers(make(config.model, layers, SEQUENCE), hidden)
        of_layer = per_layer(*stacks, rounds)
        updates = {"megalite": own_update(own, optimizer)}
        if rivals:
            updates["plain torch"] = torch_update(plain_torch(config.model, LONG, SEQUENCE))
        times = measure(updates, rounds)
        of_update = {name: Budget(*count(each), times[name]) for name, each in updates.items()}
    buckets, groups = len(optimizer.buckets), sum(len(shard.segments) for shard in optimizer.shards)
    print(f"{family}: a layer, forward and backward of a micro-batch")
    tell(of_layer)
    print(f"{family}: the optimizer's step over {LONG} layers ({buckets} buckets, {groups} runs of a parameter group)")
    tell(of_update)
    return {
        f"{family}, layer": {name: asdict(each) for name, each in of_layer.items()},
        f"{family}, optimizer": {name: asdict(each) for name, each in of_update.items()}
        | {"buckets": buckets, "runs of a parameter group": groups},
    }


def tell(found: Mapping[str, Budget]) -> None:
    for name, budget in found.items():
        print(f"  {name:14} {budget}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {rounds} rounds, median [quartiles] of CPU time")
    described = describe_quickly()
    figures: dict[str, Any] = {}
    for family in FAMILIES:
        figures |= budgets(family, rounds)
    for what, why in WHY_NOT.items():
        print(f"not measured: {what}: {why}")
    del described
    print("written to", write_results("host_budget", {"budgets": figures, "not measured": WHY_NOT}))


if __name__ == "__main__":
    main()
