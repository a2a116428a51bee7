"""Plain parallel trainer on CPUs, in which silent bugs of other trainers are enacted again.

    python museum/trainer.py --tp 2 --sp --dp 2 --output DIR

It imports torch, and of megalite the recorder alone. Each place where a real trainer went wrong is a small function of
its own in museum/plain, and `run(settings, output, patches)` replaces some by wrong ones. DIR gets checkpoint/ (the
initial weights as Hugging Face's files), checkpoint_next/ (those after the first step), trace/, metrics.jsonl, and
command.txt: the command of Megatron-LM that describes the run.

Letters in shapes: b samples, s tokens of this rank, h features. Hidden states are [b, s, h]. Ranks have consecutive
heads, inner features, tokens of the vocabulary, layers and experts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite_trace import Place, Recorder
from museum.plain.command_line import command_line
from museum.plain.data import Batch, next_batch, part_of_rank
from museum.plain.gradients import (
    count_tokens,
    gradient_norm,
    reported_loss,
    scale_auxiliary_loss,
    scale_loss,
    synchronize_gradients,
)
from museum.plain.network import Stage
from museum.plain.optimizer import Optimizer, clip, warm_up
from museum.plain.pipeline import (
    Pipe,
    receive_activation,
    receive_gradient,
    schedule,
    send_activation,
    send_gradient,
)
from museum.plain.ranks import Ranks
from museum.plain.settings import Settings
from museum.plain.tensor_parallel import vocab_parallel_loss
from museum.plain.weights import (
    initial_shard,
    initial_weight,
    initial_weights,
    load_weights,
    whole_weights,
    write_checkpoint,
)

Figures = dict[str, float]
Patches = Mapping[str, Callable[..., Any]]


def run(settings: Settings, output: Path | str, patches: Patches | None = None) -> list[Figures]:
    """Train on as many processes as the layout needs, which are forks of this one; return the figures of each step.

    Args:
        output: folder for what the run leaves.
        patches: functions that take the place of those of this trainer with the same names.

    Raises:
        ValueError: the trainer has no function of a name.
        torch.multiprocessing.ProcessException: a rank failed.
    """
    output, patches = Path(output), patches or {}
    if unknown := [name for name in patches if not can_be_replaced(name)]:
        raise ValueError(f"the trainer has no {', '.join(unknown)} to replace")
    output.mkdir(parents=True, exist_ok=True)
    (output / "command.txt").write_text(command_line(settings))
    with tempfile.TemporaryDirectory() as meeting:
        arguments = settings, output, patches, f"{meeting}/store"
        start_processes(_rank, arguments, settings.world, start_method="fork")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def can_be_replaced(name: str) -> bool:
    """Tell whether the trainer has a function of a name."""
    return any(hasattr(module, name) for module in _modules())


def _modules() -> list[Any]:
    """Return the files of the trainer."""
    names = {f"museum.plain.{path.stem}" for path in Path(__file__).parent.glob("plain/*.py")}
    return [sys.modules[name] for name in (*sorted(names), __name__)]


def _rank(rank: int, settings: Settings, output: Path, patches: Patches, meeting: str) -> None:
    """Train as one of the processes."""
    torch.set_num_threads(1)
    for name, function in patches.items():
        for module in _modules():
            if hasattr(module, name):  # where it is defined, and where it is imported
                setattr(module, name, function)
    dist.init_process_group(
        "gloo", f"file://{meeting}", timeout=timedelta(minutes=2), rank=rank, world_size=settings.world
    )
    try:
        train(settings, Ranks(settings, rank), output)
    finally:
        dist.destroy_process_group()


def train(settings: Settings, ranks: Ranks, output: Path) -> None:
    """Train all steps, and write the files of the run."""
    weights = load_weights(settings.load) if settings.load else initial_weights(settings)
    stage = Stage(ranks)
    with torch.no_grad():
        for name, parameter in stage.weights():
            parameter.copy_(initial_shard(initial_weight(name, weights, settings), parameter.part, ranks))
    optimizer, recorder = Optimizer(stage, ranks), recorder_of(stage, ranks, output)
    with instrument(stage, ranks, output):
        figures = [train_step(stage, optimizer, recorder, ranks, 1)]
        after = whole_weights(stage, ranks)
        figures += [train_step(stage, optimizer, recorder, ranks, step) for step in range(2, settings.steps + 1)]
    if ranks.rank == 0:
        write_checkpoint(weights, settings, output / "checkpoint")
        write_checkpoint(after, settings, output / "checkpoint_next")
        lines = (json.dumps({"step": number, **each}) for number, each in enumerate(figures, 1))
        (output / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def train_step(stage: Stage, optimizer: Optimizer, recorder: Recorder, ranks: Ranks, step: int) -> Figures:
    """Train one step; return its figures."""
    settings = ranks.settings
    batches = [next_batch(settings, step, number, ranks.dp) for number in range(settings.micro_batches)]
    batches = [part_of_rank(batch, ranks.cp) for batch in batches]
    with recorder.step(step):
        for batch in batches:
            documents = batch.documents if settings.documents else None
            recorder.batch(batch.tokens, batch.labels, batch.loss_mask, document_ids=documents)
        total = forward_backward(stage, batches, ranks)
        synchronize_gradients(stage, ranks)
        recorder.gradients()
        norm, rate = gradient_norm(stage, ranks), warm_up(settings, step)
        optimizer.step(rate, clip(norm, settings.clip))
        figures = {"loss": reported_loss(total, batches, ranks), "grad_norm": norm, "learning_rate": rate}
        recorder.figures(**figures)
    return figures


def forward_backward(stage: Stage, batches: list[Batch], ranks: Ranks) -> Tensor:
    """Add up the gradients of the micro-batches; return the sum of this rank's token losses."""
    pipe, tokens = Pipe(ranks), count_tokens(batches, ranks)
    total = torch.zeros((), dtype=torch.float64)
    waiting: dict[int, tuple[Tensor | None, Tensor, list[Tensor]]] = {}
    for action, number in schedule(ranks.settings, ranks.pp.index):
        batch = batches[number]
        if action == "forward":
            entered = None if ranks.is_first else receive_activation(pipe)
            output = stage(batch, entered)
            others = [scale_auxiliary_loss(each, ranks) for each in stage.auxiliary_losses()]
            if ranks.is_last:
                losses = vocab_parallel_loss(output, batch.labels, ranks.tp)
                total += (losses.detach() * batch.loss_mask).sum()
                output = scale_loss(losses, batch.loss_mask, tokens, ranks)
            else:
                send_activation(output, pipe)
            waiting[number] = entered, output, others
        else:
            entered, output, others = waiting.pop(number)
            gradient = torch.ones_like(output) if ranks.is_last else receive_gradient(pipe)
            torch.autograd.backward([output, *others], [gradient, *map(torch.ones_like, others)])
            if entered is not None and entered.grad is not None:
                send_gradient(entered.grad, pipe)
    pipe.finish()
    return total


def instrument(stage: Stage, ranks: Ranks, output: Path) -> AbstractContextManager[Any]:
    """Return the context of the steps that another program asks for, by the module that MUSEUM_INSTRUMENT names."""
    name = os.environ.get("MUSEUM_INSTRUMENT")
    found: AbstractContextManager[Any] = (
        importlib.import_module(name).instrument(stage, ranks, output) if name else nullcontext()
    )
    return found


def recorder_of(stage: Stage, ranks: Ranks, output: Path) -> Recorder:
    """Return the recorder, which knows the places of tensors in those of the whole model."""
    places = {"*.experts.*:*put*": Place(), "*.[qk]_norm:*put*": Place("bshh"), "*:*put*": Place("bsh")}
    for name, parameter in stage.weights():
        part = parameter.part
        if part.range is not None and not part.shares_heads:
            places[name] = Place(splits=[(part.range[0], "tp")])
    return Recorder(
        output / "trace",
        stage,
        set(ranks.settings.record),
        program="huggingface",
        whole=ranks.settings.whole,
        coordinates=ranks.coordinates,
        places=places,
    )


def main() -> None:
    """Read the flags, one for each field of the settings, train, and print the figures of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", required=True, help="folder for what the run leaves")
    hints = get_type_hints(Settings)
    for each in fields(Settings):
        name = f"--{each.name.replace('_', '-')}"
        if isinstance(each.default, bool):
            parser.add_argument(name, action="store_true")
        elif isinstance(each.default, tuple):
            parser.add_argument(name, type=int, nargs="*", default=each.default)
        else:
            choices = get_args(hints[each.name]) or None
            parser.add_argument(name, type=type(each.default), default=each.default, choices=choices)
    given = vars(parser.parse_args())
    output = given.pop("output")
    for figures in run(Settings(**given), output):
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
