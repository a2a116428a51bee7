"""Imports of a run before its first step ends, and its output before that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ROOT

HEAVY = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.utils.tensorboard", "sympy"} | {
    "numba", "pandas", "tensorboard", "fsspec", "sentencepiece", "tokenizers", "tiktoken", "transformers", "pyarrow"
}  # fmt: skip
WATCHED = """
import atexit, runpy, sys

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("torch is imported", flush=True)

sys.meta_path.insert(0, Watch())
atexit.register(lambda: print(*sys.modules))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_says_what_starts_before_torch_and_imports_nothing_heavy(tmp_path: Path) -> None:
    flags = [*MOCK, *GPT2, "--train-iters", "1", "--metrics-path", str(tmp_path / "metrics.jsonl")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", WATCHED, str(PRETRAIN), *flags]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    first, second, *between, modules = run.stdout.splitlines()
    assert first == "starting: 2 layers, hidden 16, on TP 1 x DP 1"
    assert second == "torch is imported"
    assert any(line.startswith("step 1/1 ") for line in between)
    assert HEAVY & set(modules.split()) == set()
    apart = "megalite.extras", "megalite.conversion.native"
    assert not [name for name in modules.split() if name.startswith(apart)]
