"""Dry run: one step of any rank of any layout, on the meta device, through the code of a real run.

The other ranks do not exist (`UnconnectedMesh`), and nothing is computed. Tokens are taken to be spread evenly over
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config import RunConfig
from megalite.model.batch import MicroBatch
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.randomness import RandomKey
from megalite.training import builder
from megalite.training.batches import Cutting
from megalite.training.gpt_task import GPTTask

META = torch.device("meta")


class DryTask(GPTTask):
    """Pre-training of a GPT on samples without values."""

    @property
    def set_values(self) -> Callable[[Parameter], None]:
        return lambda parameter: None

    def train_loader(self) -> Any:
        return _Loader(self)


@dataclass
class _Loader:
    """Loader of micro-batches whose tensors have no values."""

    task: DryTask

    def micro_batches(self, consumed_samples: int, num_micro_batches: int) -> Sequence[MicroBatch]:
        task = self.task
        return [dry_micro_batch(task.config, task.mesh, task.cutting) for _ in range(num_micro_batches)]

    def __enter__(self) -> _Loader:
        return self

    def __exit__(self, *error: object) -> None:
        return


def dry_micro_batch(config: RunConfig, mesh: ParallelMesh, cutting: Cutting) -> MicroBatch:
    """Return a micro-batch of this rank, on the mesh's device."""
    count, length, device = config.training.micro_batch_size, config.data.seq_length, mesh.device
    layout = cutting.layout(length, FirstKeys())
    shape = count, sum(map(len, layout.runs))
    tokens, positions, labels = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(3))
    wide = torch.promote_types(builder.model_dtype(config), torch.float32)
    key = RandomKey(config.training.seed, tuple(range(count)))
    return MicroBatch(tokens, positions, None, labels, torch.ones(shape, dtype=wide, device=device), key, layout)
