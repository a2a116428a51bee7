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
    "tyro",
    "rich.progress",
    "yaml",
    "pytest",
    "hypothesis",
    "megalite.lifecycle.failure",
    "megalite.training.data",
    "megalite.training.run",
    "megalite.doctor.examination",
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

# A garbage collection in a rank would visit all these objects and so copy their pages: 0.2 s.
gc.collect()
gc.freeze()
