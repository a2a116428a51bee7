"""Speed and memory of converting a model of 1 GiB from Hugging Face to megalite and back, against copying it.

    python -m benchmarks.conversion [--pairs 7] [--directory DIR]

A Llama-style model in bf16, its files in the page cache. The rival copies the files and syncs them to disk, as both
directions do with what they write. Figures are medians of the pairs' ratios with quartiles (below 1: faster than the
copy). Memory is the peak of the command itself, beside that of the same command with a model of next to nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.results import write_results
from megalite.config import ModelConfig
from megalite.conversion.families import LLAMA
from megalite.conversion.huggingface import open_huggingface, write_huggingface
from megalite.conversion.mapping import FileTensor, file_tensors
from megalite.conversion.native import open_megalite, write_megalite
from megalite.conversion.opened import logical_tensors

MODEL = ModelConfig(
    num_layers=8, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=5632, vocab_size=32000,
    max_position_embeddings=4096, position_embedding_type="rope", normalization="RMSNorm", swiglu=True,
    add_bias_linear=False, untie_embeddings_and_output_weights=True,
)  # fmt: skip
SMALL = replace(MODEL, num_layers=1, hidden_size=64, num_attention_heads=2, ffn_hidden_size=64, vocab_size=64)
WORKERS = len(os.sched_getaffinity(0))


def made(folder: Path, model: ModelConfig) -> list[FileTensor]:
    """A folder as others write it, in two files."""
    folder.mkdir()
    tensors = file_tensors(LLAMA.rules, model, logical_tensors(model))
    generator = torch.Generator().manual_seed(1)
    placed = {}
    for number in range(2):
        name = f"model-{number + 1:05d}-of-00002.safetensors"
        part = {tensor.name: torch.randn(tensor.shape, generator=generator).bfloat16() for tensor in tensors[number::2]}
        save_file(part, folder / name, {"format": "pt"})
        placed |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(LLAMA.config(model)))
    return tensors


def copy(folder: Path, into: Path) -> None:
    into.mkdir()
    for file in folder.iterdir():
        shutil.copyfile(file, into / file.name)
        with (into / file.name).open("r+b") as copied:
            os.fsync(copied.fileno())


def no_progress(_: int) -> None:
    pass


def inward(folder: Path, run: Path) -> None:
    opened = open_huggingface(folder)
    write_megalite(opened, run, dtype=None, layout=None, workers=WORKERS, advance=no_progress)


def outward(run: Path, folder: Path) -> None:
    opened = open_megalite(run)
    write_huggingface(opened, folder, dtype=None, shard=5 * 10**9, workers=WORKERS, advance=no_progress)


def peak(*flags: object) -> int:
    """Bytes of memory that the command had at its peak."""
    command = [sys.executable, "tools/checkpoint/convert.py", *map(str, flags)]
    highest = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:  # what wait4 tells counts this process's memory, too, from before the command
            found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
            highest = max(highest, int(found[1]) if found else 0)
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return highest * 1024


def peaks(directory: Path, theirs: Path, name: str) -> tuple[int, int]:
    """Return the peaks of both directions."""
    run, back = directory / f"{name} run", directory / f"{name} back"
    found = (
        peak("--loader", "hf", "--saver", "megalite", "--load-dir", theirs, "--save-dir", run),
        peak("--loader", "megalite", "--saver", "hf", "--load-dir", run, "--save-dir", back),
    )
    shutil.rmtree(run)
    shutil.rmtree(back)
    return found


def compare(directory: Path, pairs: int) -> dict[str, object]:
    theirs, small = directory / "theirs", directory / "small"
    tensors = made(theirs, MODEL)
    made(small, SMALL)
    size = sum(2 * torch.Size(tensor.shape).numel() for tensor in tensors)
    largest = max(2 * torch.Size(tensor.shape).numel() for tensor in tensors)
    copied, run, back = directory / "copied", directory / "run", directory / "back"
    times: dict[str, list[float]] = {}

    def timed(name: str, into: Path, action: Callable[[], object]) -> None:
        shutil.rmtree(into, ignore_errors=True)  # now, so that each finds the memory that it had the last time
        os.sync()
        began = time.perf_counter()
        action()
        times.setdefault(name, []).append(time.perf_counter() - began)

    for _ in range(pairs + 1):
        timed("copy", copied, lambda: copy(theirs, copied))
        timed("to megalite", run, lambda: inward(theirs, run))
        copy(run / "iter_0000000", directory / "read")  # pages that were never read are slow the first time
        shutil.rmtree(directory / "read")
        timed("to Hugging Face", back, lambda: outward(run, back))
    times = {name: values[1:] for name, values in times.items()}  # the first warms up
    figures: dict[str, object] = {"bytes": size, "largest tensor": largest, "pairs": pairs}
    needed = dict(zip(("to megalite", "to Hugging Face"), peaks(directory, theirs, "whole"), strict=True))
    idle = dict(zip(needed, peaks(directory, small, "small"), strict=True))
    rate = size / statistics.median(times["copy"]) / 2**30
    print(f"copy: {rate:.2f} GiB/s; the largest tensor: {largest / 2**20:.0f} MiB")
    for name in needed:
        ratios = [own / rival for own, rival in zip(times[name], times["copy"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        print(
            f"{name}: {quartiles[1]:.2f} [{quartiles[0]:.2f}, {quartiles[2]:.2f}] of the copy's time; "
            f"{needed[name] / 2**20:.0f} MiB at the peak, {idle[name] / 2**20:.0f} MiB with next to nothing"
        )
        figures[f"{name}, of the copy's time"] = quartiles
        figures[f"{name}, peak memory and that of an empty model"] = [needed[name], idle[name]]
    return figures | {"seconds": {name: statistics.median(values) for name, values in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        write_results("conversion", compare(Path(directory), arguments.pairs))


if __name__ == "__main__":
    main()
