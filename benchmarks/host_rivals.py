"""Layers of plain torch and of megatron-core on the meta device, for `benchmarks.host_budget`.

They launch what they launch on a GPU: a norm of torch is one kernel there and two in backward, and a function that
megatron-core gives to torch.compile is one, but for the gradients that autograd derives.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks import plain_pytorch
from megalite.config import ModelConfig

META = torch.device("meta")
PORT = 29540
Stack = tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]
"""Layers one after another, from hidden states to hidden states, and their parameters."""


def hidden_states(model: ModelConfig, sequence: int, *, batch_first: bool = False) -> Tensor:
    """Return the states of one sequence, [batch, sequence, hidden] or [sequence, batch, hidden]."""
    shape = (1, sequence, model.hidden_size) if batch_first else (sequence, 1, model.hidden_size)
    return torch.empty(shape, dtype=torch.bfloat16, device=META, requires_grad=True)


class _Norm(torch.autograd.Function):
    """Launches of torch's RMSNorm on a GPU, in place of the plain operations of the meta device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mul(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mul(gradients[0], x), torch.neg(weight)


@contextmanager
def norms_of_a_gpu() -> Iterator[None]:
    """Let torch's RMSNorm launch what it launches on a GPU, within the block."""
    with patch.object(F, "rms_norm", lambda x, shape, weight, eps: _Norm.apply(x, weight)):
        yield


class _Hidden(TorchDispatchMode):
    """Operators that no recorder sees."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with _disable_current_modes():
            return func(*args, **kwargs or {})


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as torch.compile makes it: one launch. It runs as it is where nothing is recorded."""

    def call(*args: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args)
        with _Hidden():
            found = function(*args)
        torch.zeros(1, device=META)
        return found

    return call


class BiasedLayer(nn.Module):
    """Layer of GPT-2: norms and products with biases, GELU, no rotation."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, sequence, hidden = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        found: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return found


def plain_torch(model: ModelConfig, layers: int, sequence: int) -> Stack:
    """Return the layers in plain torch, as benchmarks/plain_pytorch.py writes them."""
    kind = plain_pytorch.Layer if model.swiglu else BiasedLayer
    sizes = model.hidden_size, model.num_attention_heads, model.ffn_size
    network = nn.ModuleList(kind(*sizes) for _ in range(layers)).to(META, torch.bfloat16)
    angles = (torch.empty(sequence, model.head_dim // 2, dtype=torch.bfloat16, device=META),) * 2
    tables = angles if model.swiglu else ()

    def forward(hidden: Tensor) -> Tensor:
        for layer in network:
            hidden = layer(hidden, *tables)
        return hidden

    return forward, list(network.parameters())


class FlashAttention(nn.Module):
    """Attention of the layers of megatron-core, by the operator that the others call."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[sequence, batch, heads, width] each, to [sequence, batch, heads * width]."""
        heads_first = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def megatron_core(model: ModelConfig, layers: int, sequence: int) -> Stack:
    """Return megatron-core's layers: its modules without Transformer Engine, which needs a GPU.

    Its attention without Transformer Engine keeps all scores, so it is replaced by torch's flash attention. Raises
    ImportError if megatron-core is not installed.
    """
    warnings.simplefilter("ignore")  # one for each library that it lacks
    with patch.object(torch, "compile", _fused):
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
    gated, norm = model.swiglu, model.normalization
    options: dict[str, Any] = dict.fromkeys(("bf16", "use_cpu_initialization", "bias_dropout_fusion"), True)
    options |= dict.fromkeys(("perform_initialization", "masked_softmax_fusion"), False)
    options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_size,
        add_bias_linear=not gated,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        bias_activation_fusion=True,
        normalization=norm,
        **options,
    )
    spec = get_gpt_layer_local_spec(normalization=norm)
    spec.submodules.self_attention.submodules.core_attention = FlashAttention
    with META:
        network = nn.ModuleList(build_module(spec, config=config, layer_number=1 + each) for each in range(layers))
    network.to(torch.bfloat16).train()
    rotary = torch.empty(sequence, 1, 1, model.head_dim, device=META) if gated else None

    def forward(hidden: Tensor) -> Tensor:
        for layer in network:
            hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=rotary)
        return hidden

    return forward, list(network.parameters())
