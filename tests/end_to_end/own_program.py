"""A program of one's own that trains a small network through `import megalite`: tests start, stop and break it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import megalite
from megalite.lifecycle import common_end


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points and their classes, with noise that is drawn when a point is read."""

    def __init__(self, broken: int | None) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number == self._broken:
            raise OSError(f"point {number} cannot be read")
        point = torch.randn(6, generator=torch.Generator().manual_seed(number))
        return point + 0.1 * torch.randn(6), point[:3].argmax()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--save-interval", type=int)
    parser.add_argument("--loop", action="store_true", help="call run.step for each batch")
    parser.add_argument("--broken-point", type=int)
    parser.add_argument("--broken-loss", type=int, nargs=2, metavar=("RANK", "STEP"))
    parser.add_argument("--end", type=int, nargs="+", metavar=("STEP", "RANK"), help="end after a step on these ranks")
    parser.add_argument("--wait", type=float, default=common_end.WAIT_SECONDS, help="for other ranks at the end")
    parser.add_argument("--unlike", action="store_true", help="build other values on each rank")
    parser.add_argument("--warm", action="store_true", help="restart ranks within the job")
    arguments = parser.parse_args()
    common_end.WAIT_SECONDS = arguments.wait

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        if arguments.broken_loss is not None and arguments.broken_loss == [run.rank, run.iteration + 1]:
            raise ZeroDivisionError("the loss is broken")
        return cross_entropy(outputs, batch[1], reduction="sum")

    model = network()
    if arguments.unlike:
        torch.seed()
        nn.init.normal_(model[4].weight)
    run: megalite.Trainer
    run = megalite.Trainer(
        model,
        loss=loss,
        count=lambda batch: len(batch[1]),
        dataset=Points(arguments.broken_point),
        shuffle=True,
        optimizer=megalite.AdamW(lr=0.01, clip_grad=1.0),
        layout=megalite.Layout(pp=arguments.pp, zero=arguments.zero),
        micro_batch_size=4,
        global_batch_size=16,
        save=arguments.save,
        log_interval=1,
        **({} if arguments.save_interval is None else {"save_interval": arguments.save_interval}),
        **({"warm_restart": True} if arguments.warm else {}),
    )
    if arguments.loop:
        for batch in run.batches(steps=arguments.steps):
            run.step(batch)
            if arguments.end and run.iteration == arguments.end[0] and run.rank in arguments.end[1:]:
                sys.exit("the program has seen enough")
    else:
        run.train(steps=arguments.steps)
    print("the program goes on", flush=True) if run.rank == 0 else None


main()
