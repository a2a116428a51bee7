"""Rewrite a checkpoint into other files, for another number of ranks. The values stay, bit for bit.

    python tools/checkpoint/reshard.py --load run/small-llama --save run/resharded --files 8
    python tools/checkpoint/reshard.py --load run/small-llama --save run/resharded \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4

Any checkpoint loads under any layout without this: it is for reading fewer files, or for extracting the weights. The
second command writes one file per rank of one copy of the model, which all data-parallel copies read, whatever the ZeRO
stage.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

from megalite.config import ParallelConfig
from megalite.config.tool_arguments import parse_tool_arguments, run_tool


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    load: str
    """The run directory, whose latest checkpoint is taken, or one checkpoint in it (iter_0000100)."""
    save: str
    """The run directory to write to, which must not have a checkpoint of this iteration."""
    files: int | None = None
    """Write this many files, of equal size."""
    tensor_model_parallel_size: int | None = None
    """Write one file per rank of a copy of the model that is split over this many ranks ..."""
    pipeline_model_parallel_size: int | None = None
    """... in each of this many groups, the pipeline's stages."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage, as for pretrain_gpt.py; a rank may have several stages. Unset: the same number each."""
    ckpt_format: Literal["megalite", "torch_dist"] = "megalite"
    """Format to write: safetensors files, or files that torch.distributed.checkpoint can read, too."""
    optimizer: bool = True
    """Keep the optimizer's state; with --no-optimizer only the weights are written."""
    workers: int = len(os.sched_getaffinity(0))
    """Threads that copy tensors; by default one per core."""


def main() -> None:
    """Parse the flags, copy the tensors, and print a summary."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.checkpoint import FORMATS, directory, open_directory, read_model_config
    from megalite.checkpoint.manifest import OPTIMIZER
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.checkpoint.resharding import cut_by_weights, cut_evenly, reshard
    from megalite.conversion.layout import weights_of_ranks
    from megalite.errors import ConfigurationError
    from megalite.process.progress import show_progress

    layout = parallel_config(arguments)
    if (arguments.files is None) == (layout is None):
        raise ConfigurationError("give --files, or --tensor-model-parallel-size and --pipeline-model-parallel-size")
    if arguments.workers < 1 or (arguments.files is not None and arguments.files < 1):
        raise ConfigurationError("--files and --workers must be at least 1")
    reader = CheckpointReader(directory.resolve(open_directory(arguments.load)))
    tensors = {
        name: kind for name, kind in reader.tensors.items() if arguments.optimizer or not name.startswith(OPTIMIZER)
    }
    cut = (
        cut_evenly(tensors, arguments.files or 1)
        if layout is None
        else cut_by_weights(tensors, weights_of_ranks(read_model_config(reader.path), layout))
    )
    size = sum(kind.size for kind in tensors.values())
    with show_progress("resharding", size) as advance:
        file_format = FORMATS[arguments.ckpt_format]
        written = reshard(reader, Path(arguments.save), cut, arguments.workers, advance, file_format)
    print(f"{written}: {len(tensors):,} tensors, {size:,} bytes in {len(cut):,} files")
    if not arguments.optimizer:
        print("without the optimizer's state: a run that continues from it is refused")


def parallel_config(arguments: Arguments) -> ParallelConfig | None:
    """Return the layout that the flags describe, or None if none of them is given."""
    given = {each.name: getattr(arguments, each.name) for each in fields(Arguments) if "parallel" in each.name}
    given = {name: value for name, value in given.items() if value is not None}
    return ParallelConfig(**given) if given else None


command = partial(run_tool, main)
