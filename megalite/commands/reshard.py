"""Rewrite a checkpoint into other files, for another number of ranks. The values stay, bit for bit.

    python tools/checkpoint/reshard.py --load run/small-llama --save run/resharded --files 8
    python tools/checkpoint/reshard.py --load run/small-llama --save run/resharded \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4

Any checkpoint loads under any layout without this: it is for reading fewer files, or for extracting the weights. The
second command writes one file per rank of one copy of the model, which all data-parallel copies read, whatever the ZeRO
stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from megalite.config import ParallelConfig
from megalite.config.adapters import AdaptersConfig
from megalite.config.fields import CORES, PositiveInt, Workers
from megalite.config.near_checkpoints import require_checkpoint
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    load: str
    """The run directory, whose latest checkpoint is taken, or one checkpoint in it (iter_0000100)."""
    save: str
    """The run directory to write to, which must not have a checkpoint of this iteration."""
    files: PositiveInt | None = None
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
    workers: Workers = CORES
    """Threads that copy tensors; by default one per core."""


def main() -> None:
    """Parse the flags, copy the tensors, and print a summary."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    require_checkpoint(arguments.load)
    from megalite.checkpoint import FORMATS, directory, model_config, saved_section
    from megalite.checkpoint.file_writer import cut_by_weights, cut_evenly, write_checkpoint
    from megalite.checkpoint.manifest import is_optimizer_state
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.conversion.native import weights_of_ranks
    from megalite.errors import ConfigurationError
    from megalite.process.progress import show_progress
    from megalite.storage import open_directory

    given = {name: value for name, value in vars(arguments).items() if "parallel" in name and value is not None}
    layout = ParallelConfig(**given) if given else None
    if (arguments.files is None) == (layout is None):
        raise ConfigurationError("give --files, or --tensor-model-parallel-size and --pipeline-model-parallel-size")
    reader = CheckpointReader(directory.resolve(open_directory(arguments.load)))
    config = reader.manifest.config
    adapters = saved_section(reader.path, config, AdaptersConfig)
    tensors = {
        name: kind for name, kind in reader.tensors.items() if arguments.optimizer or not is_optimizer_state(name)
    }
    cut = (
        cut_evenly(tensors, arguments.files or 1)
        if layout is None
        else cut_by_weights(tensors, weights_of_ranks(model_config(reader.path, config), layout, adapters))
    )
    size = sum(kind.size for kind in tensors.values())
    with show_progress("resharding", size) as advance:
        saved, file_format = reader.manifest, FORMATS[arguments.ckpt_format]
        written = write_checkpoint(
            reader, saved.training, saved.config, Path(arguments.save), cut, arguments.workers, advance, file_format
        )
    say(f"{written}: {len(tensors):,} tensors, {size:,} bytes in {len(cut):,} files")
    if not arguments.optimizer:
        say("without the optimizer's state: a run that continues from it is refused")


command = partial(run_tool, main)
