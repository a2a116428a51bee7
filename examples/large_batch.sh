#!/usr/bin/env bash
# LAMB at a batch of 256, 32 times as large as that of the README, on the bytes of the standard library's sources: the
# learning rate follows the linear rule after a warm-up (docs/optimizer.md, "Large batches").
#
#   OPTIMIZER=lamb STEPS=100 PROCESSES=1 RUN=run examples/large_batch.sh
#
# OPTIMIZER=lars is the other one for large batches; sgd shows what fails without them. The rates were chosen at 8.
# What is added to the command overrides what stands here: examples/large_batch.sh --global-batch-size 64
set -euo pipefail
cd "$(dirname "$0")/.."
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # so that a restart of torchrun's has a store of its own

OPTIMIZER=${OPTIMIZER:-lamb}
STEPS=${STEPS:-100}
PROCESSES=${PROCESSES:-1}
RUN=${RUN:-run}
DATA=$RUN/bytes_text_document
declare -A rates=([lamb]=1e-3 [lars]=0.3 [sgd]=0.1)

mkdir -p "$RUN"
if [ ! -e "$DATA.idx" ]; then
    [ -e "$RUN/corpus.jsonl" ] || python examples/standard_library_corpus.py --output "$RUN/corpus.jsonl"
    python tools/preprocess_data.py --input "$RUN/corpus.jsonl" --output-prefix "$RUN/bytes" --append-eod \
        --tokenizer-type ByteTokenizer --workers 2
fi

model=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --seq-length 64 --max-position-embeddings 64
)
course=(
    --optimizer "$OPTIMIZER" --lr "${rates[$OPTIMIZER]}" --lr-scaling-rule linear --lr-scaling-base-batch-size 8
    --lr-warmup-fraction 0.1 --lr-decay-style cosine --clip-grad 0 --train-iters "$STEPS"
    --micro-batch-size 32 --global-batch-size 256
)

torchrun --standalone --nproc-per-node "$PROCESSES" pretrain_gpt.py --data-path "$DATA" --split 950,50,0 \
    --tokenizer-type ByteTokenizer "${model[@]}" "${course[@]}" --use-distributed-optimizer \
    --eval-iters 0 --log-interval 10 --save "$RUN/large-batch-$OPTIMIZER" "$@"
