"""Pre-train a GPT, with Megatron-LM's flags (`--help`): alone, or on many ranks under torchrun or SLURM."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.near_checkpoints import require_checkpoints
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import leaves_layout_open
from megalite.config.single_rank import take_single_rank
from megalite.config.validate import resolve
from megalite.config.yaml_file import Sections
from megalite.entry_points import entry_point
from megalite.errors import ConfigurationError
from megalite.lifecycle.failure import run_main
from megalite.lifecycle.startup import Startup
from megalite.process.launchers import GENERATION
from megalite.process.place import place_from_environment


def saved_fields(settings: CheckpointConfig, tokenizer_type: str | None) -> Sections:
    """Return the fields of a checkpoint that a run adopts, such as with --use-checkpoint-args.

    This imports torch early, so it is called only if it is needed.
    """
    from megalite.training.resume import saved_fields

    return saved_fields(settings, tokenizer_type)


def main(*, hybrid: bool = False, finetunes: bool = False) -> int:
    """Check the flags, then the data. Import torch and join the other ranks last: wrong flags fail at once.

    Args:
        hybrid: require what Megatron-LM's pretrain_hybrid.py does.
        finetunes: require conversations or pairs of responses.
    """
    place = place_from_environment(with_servers=True)
    single, argv = take_single_rank(sys.argv[1:], place.world_size)
    arguments = parse_arguments(argv, saved_fields, hybrid=hybrid)
    if finetunes and not (arguments.config.data.sft or arguments.config.data.preference_data):
        raise ConfigurationError(
            "there is nothing to fine-tune on: give --preference-data, or --sft with --data-path (pretrain_gpt.py "
            "trains on token files)"
        )
    starts_warm = arguments.config.recovery.warm_restart and single is None and GENERATION not in os.environ
    ranks = place.world_size if single is None else single.world_size
    if starts_warm:
        ranks = arguments.config.recovery.ranks_that_train(ranks, place.local_world_size)
    if leaves_layout_open(arguments.config.parallel):
        written, notes = entry_point("with_written_layout")(arguments.config, ranks)
        arguments = replace(arguments, config=written, notes=(*arguments.notes, *notes))
    if single is not None:
        code: int = entry_point("run_single_rank")(single, arguments.config)
        return code
    startup = Startup(place)
    config = resolve(arguments.config, ranks, place.local_world_size)
    require_checkpoints(config)
    place.require_servers(ranks - config.synchronization.workers(ranks))
    if starts_warm:
        return int(entry_point("run_warm")(config, place))
    startup.announce(config)
    startup.watch_stop_file(config.checkpoint.save)
    startup.open_store()

    from megalite.training.data import open_data

    data = open_data(config, place.local_rank)
    if config.distillation.distill_from is not None:
        entry_point("check_teacher")(config, data.tokenizer)

    from megalite.parallel.device import local_device
    from megalite.run.run import Run
    from megalite.tasks.gpt_task import GPTTask
    from megalite.training.kernels import require_equal_dropout, require_recipe

    require_equal_dropout(config, local_device(place.local_rank))
    require_recipe(config, local_device(place.local_rank))
    task = entry_point("preference_task") if config.data.preference_data else GPTTask
    with Run(config, partial(task, config, data), place, startup, (*arguments.notes, *data.notes)) as run:
        return run.train()


command = partial(run_main, main)
"""Run the program and exit with its code."""
