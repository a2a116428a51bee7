"""Cost of the pipeline engine itself, against torch.distributed.pipelining's with the same stages.

    python -m benchmarks.pipeline_engine [--rounds 9] [--ranks 4] [--micro-batches 16]

Stages that compute next to nothing, on gloo ranks with one thread each: what is left is the engine, autograd's part and
the messages. Counted is the CPU time of each rank's main thread (`time.thread_time`), so that waiting and other
processes do not count, divided by the rank's forwards and backwards; messages and their waits are in it. Below stands
what the messages alone cost, as many sent and received with nothing between. The engines step in turn, round by round;
figures are medians over rounds of the mean over ranks, with quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.results import write_results
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import StageOutput, TensorSpec
from megalite.pipeline.engine import PipelineEngine, Stage
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages

SHAPE = 16, 4, 64  # [sequence, batch, hidden]: 16 KiB of fp32
STEPS_A_ROUND = 20
HIDDEN, LOSS = "hidden", "loss"
Step = Callable[[], object]


class Nearly(nn.Module):
    """A stage that does the least that autograd sees."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last

    def forward(self, hidden: Tensor) -> Tensor:
        return -hidden


def our_step(mesh: ParallelMesh, stages: Stages, schedule: str, micro_batches: int) -> Step:
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(micro_batches)]
    modules = [Nearly(stage == stages.count - 1) for stage in stages.of_rank(mesh.rank)]

    def as_stage(module: Nearly) -> Stage[Tensor]:
        def stage(inputs: Mapping[str, Tensor], micro_batch: Tensor) -> StageOutput:
            output: Tensor = module(inputs.get(HIDDEN, micro_batch))
            return StageOutput({}, {LOSS: output.sum()}) if module.last else StageOutput({HIDDEN: output})

        return stage

    engine = PipelineEngine([as_stage(m) for m in modules], stages, mesh.rank, make_links(mesh, stages), mesh.device)
    actions = ProvedSchedules(stages, mesh.rank, schedule=schedule).prove([micro_batches]).training(micro_batches)
    return lambda: engine.run(actions, inputs, {LOSS: 1.0})


def torch_step(mesh: ParallelMesh, stages: Stages, schedule: str, micro_batches: int) -> Step:
    inputs = torch.randn(micro_batches * SHAPE[0], *SHAPE[1:], requires_grad=True)
    parts = [
        pipelining.PipelineStage(
            Nearly(stage == stages.count - 1),
            stage,
            stages.count,
            torch.device("cpu"),
            input_args=torch.empty(SHAPE, requires_grad=True),
            output_args=torch.empty(SHAPE, requires_grad=True),
        )
        for stage in stages.of_rank(mesh.rank)
    ]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    if schedule == "1f1b":
        runner = pipelining.Schedule1F1B(parts[0], micro_batches, loss_fn=loss, scale_grads=False)
    else:
        runner = pipelining.ScheduleInterleaved1F1B(parts, micro_batches, loss_fn=loss, scale_grads=False)
    arguments = (inputs,) if mesh.rank == 0 else ()
    target = inputs.detach() if stages.ranks - 1 == mesh.rank else None
    return lambda: runner.step(*arguments, target=target)


def messages_step(mesh: ParallelMesh, stages: Stages, schedule: str, micro_batches: int) -> Step:
    """The messages of the step alone, in the same order."""
    links = make_links(mesh, stages)
    steps = ProvedSchedules(stages, mesh.rank, schedule=schedule).prove([micro_batches])
    actions = [action for action in steps.training(micro_batches) if action.peer is not None]
    tensor = torch.zeros(SHAPE)

    def step() -> None:
        pending = []
        for action in actions:
            assert action.peer is not None
            if action.kind.startswith("receive"):
                pending.append(links.receive(torch.empty(SHAPE), action.peer))
            elif action.kind.startswith("send"):
                pending.append(links.send(tensor, action.peer))
        for message in pending:
            message.wait()

    return step


def measure(rank: int, port: int, world_size: int, micro_batches: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = ParallelMesh(rank=rank, world_size=world_size, pipeline_parallel_size=world_size)
    figures: dict[str, dict[str, list[float]]] = {}
    for schedule, chunks in (("1f1b", 1), ("interleaved-1f1b", 2)):
        borders = world_size * chunks - 1
        stages = Stages(world_size, chunks, messages=((TensorSpec(HIDDEN, SHAPE, torch.float32),),) * borders)
        makers = {"megalite": our_step, "torch.distributed.pipelining": torch_step, "messages alone": messages_step}
        steps = {name: make(mesh, stages, schedule, micro_batches) for name, make in makers.items()}
        computations = 2 * micro_batches * chunks
        times: dict[str, list[float]] = {name: [] for name in steps}
        for round_number in range(rounds + 1):
            for name, step in steps.items():
                dist.barrier()
                began = time.thread_time()
                for _ in range(STEPS_A_ROUND):
                    step()
                spent = torch.tensor([time.thread_time() - began], dtype=torch.float64)
                dist.all_reduce(spent)
                if round_number > 0:
                    times[name].append(1e6 * spent.item() / (world_size * STEPS_A_ROUND * computations))
        ratio = [a / b for a, b in zip(times["megalite"], times["torch.distributed.pipelining"], strict=True)]
        figures[schedule] = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
        figures[schedule]["megalite / torch.distributed.pipelining"] = statistics.quantiles(ratio, n=4)
        if rank == 0:
            print(f"{schedule}, {world_size} ranks, {micro_batches} micro-batches; µs of the main thread an action:")
            for name, (low, median, high) in figures[schedule].items():
                unit = "" if "/" in name else " µs"
                print(f"  {name:42} {median:7.2f} [{low:.2f}, {high:.2f}]{unit}")
    if rank == 0:
        write_results("pipeline_engine", {"quartiles": figures, "target_microseconds": 150})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"torch {torch.__version__}, {arguments.rounds} rounds of {STEPS_A_ROUND} steps, median [quartiles]")
    multiprocessing.spawn(
        measure, (29530, arguments.ranks, arguments.micro_batches, arguments.rounds), nprocs=arguments.ranks
    )


if __name__ == "__main__":
    main()
