from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import LATENTS, SIZES, SP

FLAGS = f"{SIZES} {LATENTS} {SP} --global-batch-size 4"
RANKS = 2


@contextlib.contextmanager
def right() -> Iterator[None]:
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
    from megatron.core.transformer import multi_latent_attention

    rotate = multi_latent_attention.apply_rotary_pos_emb

    def summed(heads: Any, *arguments: Any, **named: Any) -> Any:
        if heads.shape[-2] == 1:  # the key, which all heads share
            heads = copy_to_tensor_model_parallel_region(heads)
        return rotate(heads, *arguments, **named)

    with mock.patch.object(multi_latent_attention, "apply_rotary_pos_emb", summed):
        yield
