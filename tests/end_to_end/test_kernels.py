"""The complete program with its Triton kernels, in Triton's interpreter: the same training as in plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import LLAMA, MOCK, NO_DROPOUT, PRETRAIN, ROOT, Run, metrics, words

FLAGS = (
    *LLAMA,
    *NO_DROPOUT,
    *words("--train-iters 2 --eval-iters 1 --eval-interval 2"),
    *words("--seq-length 8 --micro-batch-size 1 --global-batch-size 2"),  # Triton's interpreter is slow
)
LAYOUTS = {
    "zero 3, recomputed": "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
    "--overlap-param-gather --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--optimizer-backend megalite --label-smoothing 0.1",
    "weight gradients put off": "--pp 2 --pipeline-schedule zb-h1 --fused-linear-cross-entropy",
}


@pytest.mark.wide  # tests/kernels compare each kernel; Triton is imported by two new interpreters
@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux alone")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_train_the_same_model(run: Run, tmp_path: Path, layout: str) -> None:
    """In fp32, the losses and norms of two steps differ by a few roundings."""
    flags = (*FLAGS, *words(LAYOUTS[layout]))
    run(*flags, "--save", tmp_path / "plain", "--kernels", "reference", world_size=2)
    told = in_interpreter(*map(str, flags), "--save", str(tmp_path / "triton"), "--kernels", "triton")
    assert "kernels        Triton 3." in told
    for ours, theirs in zip(metrics(tmp_path / "triton"), metrics(tmp_path / "plain"), strict=True):
        assert ours == pytest.approx(theirs, rel=5e-6)


def in_interpreter(*flags: str) -> str:
    """Return the output of a training on two ranks, in new processes: Triton reads its mode when it is imported."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*launcher, str(PRETRAIN), *MOCK, *flags],
        env=os.environ | environment | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
