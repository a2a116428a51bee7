"""Import of everything that a rank imports until its first step, by a process from which ranks are forked.

Nothing here may start a thread: a fork keeps only one thread, and a lock held by another one is never released.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

MODULES = (
    "torch.distributed.device_mesh",
    "torch._dynamo",  # imported by the first optimizer that a process constructs
    "torch.utils.checkpoint",
    "torch.utils.tensorboard",
    "numpy",
    "safetensors.torch",
    "sentencepiece",
    "rich.progress",
    "rich._emoji_codes",
    "encodings.idna",
    "yaml",
    "megalite.commands.pretrain",
    "megalite.config.validate_synchronization",
    "megalite.lifecycle.rendezvous",
    "megalite.run.run",
    "megalite.tasks.gpt_task",
    "megalite.tasks.summary",
    "megalite.training.data",
    "megalite.training.kernels",
    "megalite.watchdog.monitor",
)


def preload() -> None:
    """Import the modules, make the tables of flags, and set all objects apart from garbage collection."""
    for module in MODULES:
        # An import that fails here fails again, visibly, in the rank that needs it.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    from megalite.config.parse import parse_arguments
    from megalite.config.validate import resolve

    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --lr 0.1"
    data = "--micro-batch-size 1 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 8"
    resolve(parse_arguments([*flags.split(), *data.split()]).config, 1)
    gc.collect()
    gc.freeze()  # a collection in a rank would visit all objects, and so copy their pages
