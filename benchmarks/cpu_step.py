"""CPU time of a training step, as ratios: against plain PyTorch, and against the same work without communication.

    python -m benchmarks.cpu_step [--vocabulary 1024 32000] [--rounds 9] [--layouts DP2 TP2 PP2]

Llama-style, 4 layers, hidden 256, 4 heads, ffn 688, sequence 256, 4 micro-batches of 4, fp32, AdamW, one thread a rank.
Rivals step in turn in one process, round by round; a figure is the median over rounds, with quartiles. Counted is the
processes' CPU time, all threads: on a busy machine it is steadier than the clock.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks import plain_pytorch
from megalite.config import ModelConfig, OptimizerConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, messages
from megalite.model.head import LM_LOSS
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.optim.statistics import sums_over_ranks
from megalite.parallel import collectives
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages
from megalite_kernels.exact_sum import sums_of_squares

LAYERS, HIDDEN, HEADS, FFN, SEQUENCE, BATCH, MICRO_BATCHES = 4, 256, 4, 688, 256, 4, 4
TOKENS = SEQUENCE * BATCH * MICRO_BATCHES
LAYOUTS = ("DP2", "TP2", "PP2")
Step = Callable[[], object]


def llama(layers: int, hidden: int, heads: int, ffn: int, vocabulary: int) -> ModelConfig:
    """The model that benchmarks/plain_pytorch.py writes out."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        vocab_size=vocabulary,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def megalite_step(vocabulary: int, mesh: ParallelMesh, *, sequence_parallel: bool = False, stage: int = 0) -> Step:
    config = llama(LAYERS, HIDDEN, HEADS, FFN, vocabulary)
    stages, rank, each = make_stages(config, mesh.size("pp")), mesh.coordinate("pp"), LAYERS // mesh.size("pp")
    part = StageLayers(rank * each, each, embedding=rank == 0, loss=rank == stages.ranks - 1)
    model = GPT(config, mesh, stage_layers=part, sequence_parallel=sequence_parallel)
    initialize(model, seed=1)
    options = DataParallel(torch.float32, stage)
    optimizer = make_optimizer([model], mesh, OptimizerConfig(lr=1e-3), options, blocks=[model.blocks()])
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    ones = torch.ones(BATCH, SEQUENCE)
    micro_batches = [
        MicroBatch(tokens, positions, None, labels, ones, RandomKey(1, tuple(range(first, first + BATCH))))
        for first, (tokens, labels) in zip(itertools.count(0, BATCH), batches(vocabulary), strict=False)
    ]
    engine = PipelineEngine([model], stages, rank, make_links(mesh, stages), mesh.device)
    reductions = Reductions(optimizer.reduces_each_micro_batch)
    actions = ProvedSchedules(stages, rank, reductions=reductions).prove([MICRO_BATCHES]).training(MICRO_BATCHES)

    def step() -> None:
        optimizer.begin_step(MICRO_BATCHES)
        engine.run(actions, micro_batches, {LM_LOSS.name: 1.0 / TOKENS}, optimizer)
        optimizer.step(Rates(1e-3, 1e-3, 0.01))

    return step


def make_stages(config: ModelConfig, count: int) -> Stages:
    return Stages(count, messages=messages(config, count, sequence=SEQUENCE, batch=BATCH, dtype=torch.float32))


def plain_step(vocabulary: int) -> Step:
    model = plain_pytorch.PlainLlama(vocabulary, LAYERS, HIDDEN, HEADS, FFN, SEQUENCE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = batches(vocabulary)
    return lambda: plain_pytorch.step(model, optimizer, data)


def products_step(vocabulary: int) -> Step:
    """The matrix products of a step alone, forward, input gradient and weight gradient: what no step can go below."""
    shapes = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)] * LAYERS
    weights = [torch.randn(shape) for shape in [*shapes, (vocabulary, HIDDEN)]]
    inputs = {width: torch.randn(SEQUENCE * BATCH, width) for width in (HIDDEN, FFN)}

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            for weight in weights:
                output = inputs[weight.shape[1]] @ weight.t()
                output @ weight
                output.t() @ inputs[weight.shape[1]]

    return step


def norm_step(vocabulary: int, mesh: ParallelMesh, *, exact: bool) -> Step:
    """The gradient's norm alone: by blocks that no layout cuts, added exactly, or as torch adds up a flat tensor."""
    model = plain_pytorch.PlainLlama(vocabulary, LAYERS, HIDDEN, HEADS, FFN, SEQUENCE)
    gradient = torch.randn(sum(parameter.numel() for parameter in model.parameters()))
    if exact:
        return lambda: sums_over_ranks([sums_of_squares(gradient)], mesh.world())
    return lambda: torch.linalg.vector_norm(gradient, dtype=torch.float64).item()


def collectives_step(vocabulary: int, mesh: ParallelMesh, *, sequence_parallel: bool) -> Step:
    """The collectives of a tensor-parallel step alone, of the same kinds and sizes."""
    group = mesh.group("tp")
    # As many buffers as a step has activations, so that they are as far from the processor as there.
    many = 2 * (2 * LAYERS + 1)
    whole = [torch.randn(SEQUENCE, BATCH, HIDDEN) for _ in range(many)]
    part = [tensor[: SEQUENCE // group.size].clone() for tensor in whole]
    statistics_of_tokens = torch.randn(1, 2, SEQUENCE * BATCH)

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            collectives.all_gather(statistics_of_tokens, group)
            if sequence_parallel:
                # Forward: embedding and two layers' ends scatter, two starts and the output gather. Backward: the
                # transposes, and a second gather of each start.
                for index in range(many):
                    collectives.reduce_scatter(whole[index], group)
                for index in range(many * 3 // 2):
                    collectives.all_gather(part[index % many], group)
            else:
                for index in range(many):
                    collectives.all_reduce_(whole[index], group)

    return step


def batches(vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (MICRO_BATCHES, BATCH, SEQUENCE + 1), generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


def measure(steps: dict[str, Step], rounds: int, mesh: ParallelMesh) -> dict[str, list[float]]:
    """CPU seconds of all ranks together for each step in each round, the steps in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            collectives.all_reduce_(torch.zeros(1), mesh.world())
            began = time.process_time()
            step()
            spent = torch.tensor([time.process_time() - began], dtype=torch.float64)
            if round_number > 0:  # the first warms up
                seconds[name].append(collectives.all_reduce_(spent, mesh.world()).item())
    return seconds


def quartiles(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.3f} [{low:.3f}, {high:.3f}]"


def compare_one_rank(vocabulary: int, rounds: int) -> None:
    mesh = ParallelMesh()
    ours = megalite_step(vocabulary, mesh)
    steps = {"megalite": ours, "plain": plain_step(vocabulary), "products": products_step(vocabulary)}
    steps |= {
        "norm": norm_step(vocabulary, mesh, exact=True),
        "norm of torch": norm_step(vocabulary, mesh, exact=False),
    }
    times = measure(steps, rounds, mesh)
    times["with torch's norm"] = [
        step - norm + torchs
        for step, norm, torchs in zip(times["megalite"], times["norm"], times["norm of torch"], strict=True)
    ]
    per_token = 1e6 * statistics.median(times["megalite"]) / TOKENS
    print(f"vocabulary {vocabulary}, one rank: {per_token:.0f} µs a token")
    print(f"  megalite / plain PyTorch        {quartiles(ratios(times, 'megalite', 'plain'))}  (target 1.02)")
    print(f"  plain PyTorch / bare products   {quartiles(ratios(times, 'plain', 'products'))}")
    with_torchs = quartiles(ratios(times, "megalite", "with torch's norm"))
    print(f"  with our norm / with torch's    {with_torchs}  (target 1.01)")


def ratios(times: dict[str, list[float]], above: str, *below: str) -> list[float]:
    return [value / sum(times[name][i] for name in below) for i, value in enumerate(times[above])]


def compare_two_ranks(rank: int, port: int, vocabulary: int, rounds: int, chosen: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    data_parallel = ParallelMesh(rank=rank, world_size=2)
    steps = {"one rank": megalite_step(vocabulary, ParallelMesh())}
    if "DP2" in chosen:
        steps["DP2"] = megalite_step(vocabulary, data_parallel)
        steps["DP2 ZeRO 1"] = megalite_step(vocabulary, data_parallel, stage=1)
    if "TP2" in chosen:
        tensor_parallel = ParallelMesh(rank=rank, world_size=2, tensor_parallel_size=2)
        for name, split in (("TP2", False), ("TP2 SP", True)):
            steps[name] = megalite_step(vocabulary, tensor_parallel, sequence_parallel=split)
            steps[f"{name} floor"] = collectives_step(vocabulary, tensor_parallel, sequence_parallel=split)
    if "PP2" in chosen:
        pipeline = ParallelMesh(rank=rank, world_size=2, pipeline_parallel_size=2)
        steps["PP2 1F1B"] = megalite_step(vocabulary, pipeline)
    times = measure(steps, rounds, data_parallel)
    times["one rank"] = [seconds / 2 for seconds in times["one rank"]]  # both ranks ran one
    times["two copies"] = [seconds * 2 for seconds in times["one rank"]]
    if rank == 0:
        print(f"vocabulary {vocabulary}, two ranks, CPU time of both:")
        if "DP2" in chosen:
            for name in ("DP2", "DP2 ZeRO 1"):
                tell(times, name, 2 * TOKENS, "two copies of one rank", "two copies", target=1.04)
        if "TP2" in chosen:
            for name in ("TP2", "TP2 SP"):
                tell(times, name, TOKENS, "one rank + collectives", "one rank", f"{name} floor", target=1.06)
                tell(times, name, TOKENS, "one rank alone", "one rank")
        if "PP2" in chosen:
            tell(times, "PP2 1F1B", TOKENS, "one rank", "one rank", target=1.03)
    dist.destroy_process_group()


def tell(
    times: dict[str, list[float]], name: str, tokens: int, words: str, *below: str, target: float | None = None
) -> None:
    """Print what a layout costs a token, and its ratio to what is named."""
    cost = 1e6 * statistics.median(times[name]) / tokens
    wanted = "" if target is None else f"  (target {target})"
    print(f"  {name:10} {cost:5.0f} µs a token   / {words:24} {quartiles(ratios(times, name, *below))}{wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[1024, 32000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {arguments.rounds} rounds, median [quartiles] of CPU time")
    for number, vocabulary in enumerate(arguments.vocabulary):
        compare_one_rank(vocabulary, arguments.rounds)
        settings = 29510 + number, vocabulary, arguments.rounds, arguments.layouts
        multiprocessing.spawn(compare_two_ranks, settings, nprocs=2)


if __name__ == "__main__":
    main()
