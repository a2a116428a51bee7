"""The command of Megatron-LM that describes a run."""

from __future__ import annotations

from typing import Any

from museum.plain.settings import EPSILON, ROTARY_BASE, Settings


def command_line(settings: Settings) -> str:
    """Return the command of Megatron-LM that describes the run."""
    flags: dict[str, Any] = {
        "num-layers": settings.layers,
        "hidden-size": settings.hidden,
        "ffn-hidden-size": settings.ffn,
        "num-attention-heads": settings.heads,
        "kv-channels": settings.head,
        "group-query-attention": True,
        "num-query-groups": settings.key_value_heads,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm-epsilon": EPSILON,
        "position-embedding-type": "rope",
        "rotary-base": int(ROTARY_BASE),
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": not settings.tied,
        "qk-layernorm": settings.qk_norm,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": settings.vocabulary - 1,  # the tokenizer adds one for the end of a document
        "tensor-model-parallel-size": settings.tp,
        "sequence-parallel": settings.sp,
        "context-parallel-size": settings.cp,
        "pipeline-model-parallel-size": settings.pp,
        "use-distributed-optimizer": settings.zero,
        "seq-length": settings.sequence,
        "max-position-embeddings": settings.sequence,
        "reset-attention-mask": settings.documents,
        "micro-batch-size": settings.micro_batch,
        "global-batch-size": settings.batch,
        "train-iters": settings.steps,
        "lr": settings.rate,
        "min-lr": settings.least_rate,
        "lr-warmup-iters": settings.warm_up,
        "lr-decay-iters": settings.decay_steps,
        "lr-decay-style": "cosine",
        "weight-decay": settings.decay,
        "adam-beta1": settings.beta1,
        "adam-beta2": settings.beta2,
        "adam-eps": settings.adam_epsilon,
        "clip-grad": settings.clip,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "calculate-per-token-loss": True,
        "mock-data": True,
    }
    if settings.experts:
        flags |= {
            "num-experts": settings.experts,
            "moe-router-topk": settings.top_k,
            "moe-router-load-balancing-type": "aux_loss",
            "moe-aux-loss-coeff": settings.auxiliary,
            "expert-model-parallel-size": settings.ep,
        }
    if settings.dtype != "fp32":
        flags[settings.dtype] = True
    words = (
        f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items() if value is not False
    )
    return f"torchrun --nproc-per-node {settings.world} pretrain_gpt.py {' '.join(words)}\n"
