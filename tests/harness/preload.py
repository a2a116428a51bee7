"""Modules that the fork server imports once, so that the ranks forked from it start in milliseconds.

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
    "einops",
    "safetensors.torch",
    "sentencepiece",
    "rich.progress",
    "rich._emoji_codes",
    "encodings.idna",
    "yaml",
    "pytest",
    "hypothesis",
    "megalite.lifecycle.failure",
    "megalite.commands.generate",
    "megalite.commands.pretrain",
    "megalite.config.single_rank",
    "megalite.conversion.upcycling",
    "megalite.training.data",
    "megalite.tasks.experts",
    "megalite.tasks.flops",
    "megalite.tasks.gpt_network",
    "megalite.tasks.gpt_task",
    "megalite.tasks.routing_recorder",
    "megalite.run.run",
    "megalite.watchdog.monitor",
    "megalite.tasks.summary",
    "megalite.extras.doctor.examination",
    "megalite.inference.generation",
    "megalite.inference.loading",
    "megalite.config.tool_arguments",
    "tests.harness.object_store",
    "tests.harness.rank_pool",
    "tests.distributed.layout_run",
    "tests.oracle",
)

for module in MODULES:
    # An import that fails here fails again, visibly, in the rank that needs it.
    with contextlib.suppress(Exception):
        importlib.import_module(module)

# Tables of flags and ranges, which each rank would make again from the same annotations.
with contextlib.suppress(Exception):
    resolve, parse_arguments = (
        getattr(importlib.import_module(f"megalite.config.{module}"), name)
        for module, name in (("validate", "resolve"), ("parse", "parse_arguments"))
    )
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --lr 0.1"
    data = "--micro-batch-size 1 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 8"
    resolve(parse_arguments([*flags.split(), *data.split()]).config, 1)

# A garbage collection in a rank would visit all these objects and so copy their pages: 0.2 s.
gc.collect()
gc.freeze()
