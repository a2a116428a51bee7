"""Steps on this machine's CPU beside what the planner expects after a calibration of a minute.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.cpu_runs

None of the networks is one of those that the calibration runs. Times are those of the process, since other programs may
use the machine, and the median of ten steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from benchmarks.results import write_results
from megalite.config.parse import parse_arguments
from megalite.extras.comparison.scaling import predict
from megalite.extras.planner.as_rank import run_as_rank
from megalite.extras.planner.calibration import calibrate
from megalite.extras.planner.cluster import find_cluster

STEPS = 11
_LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
_GROUPED = "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
RUNS = {
    "GPT-2, 3 layers of 192": "--num-layers 3 --hidden-size 192 --num-attention-heads 6 --seq-length 200 "
    "--micro-batch-size 3 --global-batch-size 6",
    "Llama, 6 layers of 320": f"{_LLAMA} --num-layers 6 --hidden-size 320 --num-attention-heads 10 --seq-length 256 "
    "--micro-batch-size 1 --global-batch-size 4",
    "Llama with shared keys, 2 of 384": f"{_LLAMA} {_GROUPED} --num-layers 2 --hidden-size 384 "
    "--num-attention-heads 8 --seq-length 64 --micro-batch-size 8 --global-batch-size 16",
    "GPT-2, 8 layers of 64": "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 4 --global-batch-size 16",
    "GPT-2, 4 layers of 256, recomputed": "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 "
    "--micro-batch-size 2 --global-batch-size 4 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "Llama, 2 layers of 512, long": f"{_LLAMA} --num-layers 2 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 512 --micro-batch-size 1 --global-batch-size 2",
}


@dataclass(frozen=True)
class Result:
    predicted: float
    measured: float
    error: float


def main() -> None:
    cluster = calibrate(find_cluster("cpu"))
    found = {}
    for name, flags in RUNS.items():
        config = parse_arguments(
            f"{flags} --max-position-embeddings 512 --vocab-size 999 --lr 1e-4 --train-iters 9 --hidden-dropout 0 "
            "--attention-dropout 0 --tokenizer-type NullTokenizer --mock-data".split()
        ).config
        predicted, measured = predict(config, 1, cluster), run_as_rank(config, 1, 0, STEPS).seconds
        found[name] = Result(predicted, measured, predicted / measured - 1)
        print(f"{name:36} predicted {predicted:.4f} s, measured {measured:.4f} s: {found[name].error:+.1%}")
    errors = [abs(each.error) for each in found.values()]
    print(f"mean error {sum(errors) / len(errors):.1%}, most {max(errors):.1%}")
    write_results("planner_cpu_runs", {name: asdict(each) for name, each in found.items()})


if __name__ == "__main__":
    main()
