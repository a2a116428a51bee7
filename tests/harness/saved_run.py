"""Small run whose values all follow from one number: saved, loaded and identified, under any layout.

Only this file of the fault tests depends on the ways to save and load.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint  # takes a second, which a forked process need not spend in each torch_dist save
from torch import Tensor

from megalite import checkpoint, storage
from megalite.checkpoint import FORMATS, Contents, Plan, Saver, TrainingState
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.initialization import initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import LogicalTensor, Normal, Piece
from megalite.storage import AnyPath

KINDS = ("synchronous", "asynchronous", "torch_dist")
"""Ways to save."""

MODEL = ModelConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=130, make_vocab_size_divisible_by=1,
    ffn_hidden_size=20, position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
)  # fmt: skip
CONFIG = {"model": {}, "notes": {"text": "x" * 600}}

Saved = tuple[int, int]
"""Iteration of a checkpoint, and the number that its values follow from."""


class SavedRun:
    """Model and optimizer of a rank."""

    def __init__(self, mesh: ParallelMesh | None = None) -> None:
        self.mesh = mesh or ParallelMesh()
        self.network = GPT(MODEL, self.mesh, dtype=torch.float32)
        settings, options = OptimizerConfig(lr=0.1), DataParallel(gradient_dtype=torch.float32)
        self.optimizer = make_optimizer([self.network], self.mesh, settings, options)

        def contents_at(mesh: ParallelMesh) -> Contents:
            return Contents.of([GPT(MODEL, mesh, dtype=torch.float32)], mesh, options)

        self.plan = Plan(self.mesh, contents_at, settings, zero_stage=options.zero_stage, instances=options.instances)
        self._values: dict[int, list[Tensor]] = {}

    def save(self, directory: AnyPath, iteration: int, number: int, kind: str = "synchronous") -> None:
        """Save the values of `number`; when it returns, everything is on disk."""
        self.fill(number)
        state = TrainingState(iteration, consumed_samples=number, optimizer_steps=number)
        file_format = FORMATS["torch_dist" if kind == "torch_dist" else "megalite"]
        asynchronous = kind == "asynchronous"
        saver = Saver(directory, self.optimizer, self.plan, file_format=file_format, asynchronous=asynchronous)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "BUFFER", 8192)  # makes even these small files take many writes
            saver.begin(state, CONFIG)
            if asynchronous:
                self.fill(number + 1000)  # changes by training during the save must not be saved
            while saver.under_way:
                saver.advance()

    def load(self, path: AnyPath) -> Saved:
        """Load the checkpoint in folder `path`, as a starting run does; its values must be those of one save."""
        checkpoint.check_whole(path, self.mesh)
        for values, _, _ in self._held():
            values.fill_(torch.nan)
        state = checkpoint.load(path, self.network, self.optimizer, self.mesh, plan=self.plan)
        number = state.consumed_samples
        for (values, _, name), right in zip(self._held(), self._values_of(number), strict=True):
            same = torch.equal(values.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
            assert same, f"WRONG LOAD: {name} from {path} is not that of number {number}"
        assert self.optimizer.steps == number, "WRONG LOAD: the count of steps"
        return state.iteration, number

    def newest(self, directory: Path) -> tuple[Saved | None, tuple[str, ...]]:
        """Return the checkpoint that a run started from `directory` loads, and the problems of newer ones."""
        paths = checkpoint.find_candidates(directory, self.mesh).paths
        if not paths:
            return None, ()
        _, saved, passed_over = checkpoint.newest_whole(paths, self.load)
        return saved, passed_over

    def fill(self, number: int) -> None:
        for (values, _, _), right in zip(self._held(), self._values_of(number), strict=True):
            values.copy_(right)

    def _values_of(self, number: int) -> list[Tensor]:
        if number not in self._values:
            self._values[number] = [_drawn(piece, name, number) for _, piece, name in self._held()]
        return self._values[number]

    def _held(self) -> Iterator[tuple[Tensor, Piece, str]]:
        """Yield views of all values, each with its place in the logical tensor and its name."""
        for parameter, piece in named_pieces(self.network):
            yield piece.view(parameter.detach()), piece, f"model/{piece.tensor.name}"
        for part in self.optimizer.slices():
            for kind, values in part.state.items():
                for piece in part.parameter.sharding.pieces:
                    yield piece.view(values.view(part.parameter.shape)), piece, f"{kind}/{piece.tensor.name}"


def _drawn(piece: Piece, name: str, number: int) -> Tensor:
    tensor = LogicalTensor(name, piece.tensor.shape, Normal(1.0), False)
    return initial_values(tensor, piece.box, seed=number)


def litter(directory: Path) -> set[str]:
    """Return names in a run directory that belong neither to a checkpoint nor to the tracker."""
    known = {"latest_checkpointed_iteration.txt"}
    return {path.name for path in directory.iterdir() if not path.name[5:].isdecimal()} - known


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder; a folder has none."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b""
        for path in sorted(directory.rglob("*"))
    }


def copied(directory: Path, copy: Path) -> Path:
    return Path(shutil.copytree(directory, copy))
