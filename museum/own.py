"""Cases of megalite's own pre-training program, in which bugs of other programs are patches.

    python -m museum.own BUG.py FOLDER [--right]

bug.py has FLAGS, those of pretrain_gpt.py for the network, the data and the training; LAYOUT, those of the layout,
which the reference on one rank lacks; and RANKS. Besides it may have

- STEPS_BEFORE: steps that the right program has trained, on these ranks, into the checkpoint that the run resumes from.
- DATA, a function that writes data files into a folder, which FLAGS calls {data}.
- HUGGINGFACE: flags of a network, if the run begins with a Hugging Face folder of it; FLAGS lack them then.

In FOLDER/run and FOLDER/reference, checkpoint/ has the weights that the step should begin with, also where the program
has drawn or read others.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.spawn import start_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands import convert, pretrain
from megalite.errors import EXIT_FINISHED, EXIT_RESUMABLE
from megalite.run import run as runs
from megalite.run.run import Run
from megalite.torch_internals import TCPStore
from megalite.training.display import Display

_ALWAYS = "--log-interval 1 --no-report --num-workers 0 --no-watchdog"
Context = Callable[[], AbstractContextManager[Any]]


def make(bug: dict[str, Any], folder: Path, *, wrong: bool) -> None:
    """Run the program of a bug, and the reference, into folder/run and folder/reference."""
    flags = " ".join(bug["FLAGS"].split())
    if "DATA" in bug:
        (folder / "data").mkdir()
        bug["DATA"](folder / "data")
    flags = flags.format(data=folder / "data")
    before, ranks = bug.get("STEPS_BEFORE", 0), bug["RANKS"]
    layout = " ".join(bug.get("LAYOUT", "").split())
    of_run = f"{flags} {layout}"
    with tempfile.TemporaryDirectory() as place:
        saved = Path(place) / "before"
        drawn = f"{bug['HUGGINGFACE']} {flags.replace('--use-checkpoint-args', '')}" if "HUGGINGFACE" in bug else flags
        train(of_run if before else drawn, ranks if before else 1, saved, before)
        start = saved / f"iter_{before:07d}"
        if "HUGGINGFACE" in bug:
            start = _exported(start, Path(place) / "huggingface")
        loads = before > 0 or "HUGGINGFACE" in bug
        context = bug["wrong"] if wrong and "wrong" in bug else nullcontext
        if not wrong:
            of_run = f"{bug.get('RIGHT', flags)} {layout}"
        for name, of_case, size, around in (
            ("run", of_run, ranks, context),
            ("reference", bug.get("REFERENCE", flags), 1, nullcontext),
        ):
            case = folder / name
            load = f"--load {saved if before else start}" if loads else ""
            trace = f"--trace-steps {before + 1} --trace-dir {case / 'trace'}"
            train(f"{of_case} {load} {trace}", size, Path(place) / name, before + 1, around)
            shutil.copytree(start, case / "checkpoint")
            shutil.copytree(Path(place) / name / f"iter_{before + 1:07d}", case / "checkpoint_next")
            shutil.copy(Path(place) / name / "metrics.jsonl", case)
            (case / "command.txt").write_text(f"torchrun --nproc-per-node {size} megalite-pretrain {of_case}\n")


def train(flags: str, ranks: int, save: Path, last: int, around: Context = nullcontext) -> None:
    """Train up to a step on as many processes, which are forks of this one, and save it; at 0 the initial weights.

    Raises:
        torch.multiprocessing.ProcessException: a rank failed.
    """
    ends = f"--save {save} --exit-interval {last}" if last else f"--save {save}"
    argv = ["megalite-pretrain", *shlex.split(flags), *_ALWAYS.split(), *ends.split()]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start_processes(
        partial(_rank, around=around if last else initial), (ranks, store.port, argv), ranks, start_method="fork"
    )


def _rank(rank: int, ranks: int, port: int, argv: list[str], *, around: Context) -> None:
    """Run the program as one of the processes that torchrun starts."""
    torch.set_num_threads(1)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "museum"}
    agent = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in {**own, **meeting, **agent}.items()})
    sys.argv = argv
    with around():
        code = pretrain.main()
    if code not in (EXIT_FINISHED, EXIT_RESUMABLE):
        sys.exit(code)


class _Initial(Run):
    """Run that saves its initial weights, and ends."""

    def train(self) -> int:
        assert self.trainer is not None  # there is no checkpoint that has the end
        self.trainer.save(Display(1, 1, enabled=False), last=True)
        return EXIT_FINISHED


def initial() -> AbstractContextManager[Any]:
    """Have the program save its initial weights in place of training."""
    return mock.patch.object(runs, "Run", _Initial)


def _exported(checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint as Hugging Face's files. Returns their folder."""
    argv = ["megalite-convert", *f"--loader megalite --saver hf --load-dir {checkpoint} --save-dir {folder}".split()]
    with mock.patch.object(sys, "argv", argv):
        convert.main()
    return folder


def main() -> None:
    """Make the case that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bug", type=Path, help="bug.py of an entry of this program")
    parser.add_argument("folder", type=Path, help="for run/ and reference/")
    parser.add_argument("--right", action="store_true", help="run the program as it is")
    given = parser.parse_args()
    bug = runpy.run_path(str(given.bug), run_name=f"museum.bugs.{given.bug.parent.name}")
    make(bug, given.folder.resolve(), wrong=not given.right)


if __name__ == "__main__":
    main()
