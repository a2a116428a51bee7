"""Small networks, as flags of Megatron-LM: for the entries and for tests."""

from __future__ import annotations

WIDTHS = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--vocab-size 60 --make-vocab-size-divisible-by 8 --micro-batch-size 2 "
)
SIZES = f"--num-layers 2 {WIDTHS}"
ROTARY = "--position-embedding-type rope "
LLAMA = (
    f"--swiglu --normalization RMSNorm {ROTARY} --disable-bias-linear --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 2 "
)
EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
LATENTS = (
    f"--swiglu --normalization RMSNorm {ROTARY} --rope-type rope --disable-bias-linear --qk-layernorm "
    "--untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 "
)
PATTERN = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hybrid-layer-pattern "
DELTA_NETS = (
    f"{PATTERN} 'G*-' {ROTARY} --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 "
)
TP, PP, CP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 ", "--context-parallel-size 2 "
SP = f"{TP} --sequence-parallel "
