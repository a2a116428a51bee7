"""Process that has imported torch, from which runs of pytest are forked: most tests take less time than the import.

A line of its input is a run, as JSON: the `tree` in which it takes place, the `arguments` of pytest, and the file for
its `output`. A line of its output is the exit code of that run. Nothing of a tree is imported before the fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch._dynamo does; tests/kernels needs it
for module in (
    "hypothesis",
    "numpy",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",  # imported by the first optimizer that a process constructs
    "torch.distributed.device_mesh",
    "torch.utils.checkpoint",
):
    importlib.import_module(module)


def main() -> None:
    gc.freeze()  # a collection in a run would visit all of these objects, and so copy their pages
    for line in sys.stdin:
        run = json.loads(line)
        process = os.fork()
        if not process:
            _run(**run)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _run(tree: str, arguments: list[str], output: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    if not any(argument.startswith("tests/kernels/") for argument in arguments):
        del os.environ["TRITON_INTERPRET"]
    os.chdir(tree)
    sys.path[0] = tree
    sys.exit(importlib.import_module("pytest").main(arguments))


if __name__ == "__main__":
    main()
