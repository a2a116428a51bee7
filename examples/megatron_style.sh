#!/usr/bin/env bash
# A launch script as one has it for Megatron-LM: its variables, its arrays, its flags. What megalite does anyway
# (--use-mcore-models, --attention-backend, ...) is accepted, and a line at the start says why.
#
#   GPUS_PER_NODE=8 NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=a_free_port_of_node0 \
#       examples/megatron_style.sh SAVE DATA_PREFIX TOKENIZER_MODEL
#
# Without arguments it trains on generated tokens. EXTRA_FLAGS stand behind the others and override them.
set -euo pipefail
cd "$(dirname "$0")/.."
export CUDA_DEVICE_MAX_CONNECTIONS=1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # so that a restart of torchrun's has a store of its own

GPUS_PER_NODE=${GPUS_PER_NODE:-2}
NUM_NODES=${NUM_NODES:-1}

CHECKPOINT_PATH=${1:-run/megatron-style}
DATA_PREFIX=${2:-}
TOKENIZER_MODEL=${3:-}

DISTRIBUTED_ARGS=(--nproc_per_node "$GPUS_PER_NODE")
if ((NUM_NODES == 1)); then
    DISTRIBUTED_ARGS+=(--standalone)
else
    DISTRIBUTED_ARGS+=(
        --nnodes "$NUM_NODES"
        --node_rank "${NODE_RANK:?}"
        --master_addr "${MASTER_ADDR:?}"
        --master_port "${MASTER_PORT:?}"
    )
fi

MODEL_ARGS=(
    --use-mcore-models
    --transformer-impl transformer_engine
    --attention-backend auto
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.0134
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 100000
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 1000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --exit-duration-in-mins 235
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-timeout-minutes 60
)

DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128000)
if [ -n "$DATA_PREFIX" ]; then
    DATA_ARGS=(--data-path "$DATA_PREFIX" --tokenizer-type Llama2Tokenizer --tokenizer-model "$TOKENIZER_MODEL" --split "99,1,0")
fi
DATA_ARGS+=(--no-create-attention-mask-in-dataloader --num-workers 1)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 100
    --eval-iters 10
    --save-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

read -ra EXTRA <<<"${EXTRA_FLAGS:-}"

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${EXTRA[@]}"
