"""--compile in the whole program, by Inductor: the same training, evaluation included."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.runs import LLAMA, Run, metrics, words

FLAGS = (
    *LLAMA,
    *words("--num-layers 1 --train-iters 3 --eval-iters 1 --eval-interval 2"),
    *words("--fp64 --hidden-dropout 0.1 --attention-dropout 0.1"),
)


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for CPUs")
def test_compiled_layers_train_the_same_model(run: Run, tmp_path: Path) -> None:
    inductor = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # otherwise a pool of processes starts for these few
    }
    plain = run(*FLAGS, "--save", tmp_path / "plain")
    compiled = run(*FLAGS, "--save", tmp_path / "compiled", "--compile", **inductor)
    assert "layers compiled" in compiled.stdout
    assert "layers compiled" not in plain.stdout
    assert list((tmp_path / "inductor").rglob("*.cpp"))
    for ours, theirs in zip(metrics(tmp_path / "compiled"), metrics(tmp_path / "plain"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
