"""What the fork server imports once, so that the ranks forked from it start in milliseconds.

Nothing here may start a thread: a fork keeps only one of them, and whatever lock another one held stays held.
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
    "megalite.training.pretrain",
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
    # What cannot be imported here fails again, where it can be seen, in the rank that needs it.
    with contextlib.suppress(Exception):
        importlib.import_module(module)

# A collection in a rank would go through all of this, and so copy it: 0.2 s.
gc.collect()
gc.freeze()
