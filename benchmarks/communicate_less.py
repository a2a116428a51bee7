"""CPU time of compressing gradients, against one copy of the bucket, and of PowerSGD against its own matrix products.

    python -m benchmarks.communicate_less [--rounds 9] [--only int8 threshold topk powersgd]

A bucket of 2^24 fp32 elements in one part is packed and restored, without the residual and with it. PowerSGD of rank 4
reduces eight matrices of 2048 x 1024 as one of two ranks, without the messages: error feedback, both factors, the
restored sum of its slice and then of all, and the residual. It is compared with four products in their fastest form:
two with the matrices, the restored sum, and the one that subtracts it. One thread, CPU time; all run in turn, round by
round; a figure is the median of the ratios, with quartiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks.cpu_step import measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.extras.synchronization import power
from megalite.extras.synchronization.low_rank import LowRankReduction
from megalite.extras.synchronization.methods import make_compressor
from megalite.optim.layout import BucketLayout, BucketShardSpec, Slot
from megalite.optim.reduction import ReductionGroups
from megalite.parallel.mesh import Group, ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import replicated
from megalite.parallel.sharding import LogicalTensor, Normal

ELEMENTS, RATIO = 2**24, 0.01
MATRICES, ROWS, COLUMNS, RANK = 8, 2048, 1024, 4
TARGETS = {"int8": 20.0, "threshold": 20.0, "powersgd": 1.3}
METHODS = ("int8", "fp8", "bf16", "fp16", "threshold", "topk", "randomk", "signsgd", "powersgd")
Step = Callable[[], object]


def bucket_steps(name: str, values: torch.Tensor) -> dict[str, Step]:
    """Packing and restoring, and packing with the residual."""
    method = make_compressor(name, RATIO)

    def pack_and_restore() -> None:
        method.restore(method.pack(values, 1), ELEMENTS, values.dtype, 1)

    return {name: pack_and_restore, f"{name} and residual": lambda: method.pack_with_residual(values, 1)}


def power_steps() -> dict[str, Step]:
    """PowerSGD as the reduction of a bucket, and its matrix products alone."""
    matrices = torch.randn(MATRICES, ROWS, COLUMNS)
    target = torch.empty_like(matrices)
    start = power.first_factor(MATRICES, COLUMNS, RANK, 1, torch.float32, matrices.device)
    columns = torch.randn(MATRICES, ROWS, RANK)

    def multiply() -> None:
        torch.bmm(start.mT, matrices.mT)
        torch.bmm(columns.mT, matrices)
        torch.bmm(columns, start.mT, out=target)
        target.baddbmm_(columns, start.mT, alpha=-1)

    reduction, gradients = reduction_of_two(), torch.randn(ELEMENTS)
    own = torch.empty(ELEMENTS // 2)

    def reduce() -> None:
        reduction.begin_step(1, 1.0)
        reduction.begin(gradients, own).wait()
        reduction.apply()
        reduction.begin_gather(own, gradients).wait()

    return {"powersgd": reduce, "its products": multiply}


def reduction_of_two() -> LowRankReduction:
    """Return the reduction of a bucket of these matrices on one of two ranks, of which the other has no process."""
    mesh = UnconnectedMesh(rank=0, world_size=2)
    slots = []
    for number in range(MATRICES):
        tensor = LogicalTensor(f"{number}", (ROWS, COLUMNS), Normal(1.0), weight_decay=False)
        parameter = Parameter(replicated(mesh, tensor, grad_is_partial=False), torch.float32, mesh.device)
        slots.append(Slot(parameter, number * ROWS * COLUMNS, (number + 1) * ROWS * COLUMNS))
    spec = BucketShardSpec.of(BucketLayout(tuple(slots), ELEMENTS), 0, peers=2, position=0)
    alone = Group((0,), 0)
    return LowRankReduction(RANK, 0, torch.float32, True, spec, ReductionGroups(mesh.group("dp"), alone, alone))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    values = torch.randn(1, ELEMENTS)
    target = torch.empty_like(values)
    steps: dict[str, Step] = {"copy": lambda: target.copy_(values), "new": lambda: torch.zeros_like(values)}
    for name in arguments.only:
        steps |= power_steps() if name == "powersgd" else bucket_steps(name, values)
    times = measure(steps, arguments.rounds, ParallelMesh())
    names = [name for name in times if name not in ("copy", "its products")]
    found = {name: ratios(times, name, "its products" if name.startswith("powersgd") else "copy") for name in names}
    print(f"torch {torch.__version__}, {ELEMENTS:,} elements, ratio {RATIO}, {arguments.rounds} rounds, CPU time")
    for name in names:
        of = "its products" if name.startswith("powersgd") else "copies"
        target_words = f"  (target {TARGETS[name]})" if name in TARGETS else ""
        print(f"  {name:24} {quartiles(found[name])} {of}{target_words}")
    print("written to", write_results("communicate_less", {"ratios": found}))


if __name__ == "__main__":
    main()
