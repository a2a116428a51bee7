#!/usr/bin/env bash
# GPT-2 124M with the settings that nanoGPT and llm.c reproduce it with (300 billion tokens, validation loss about 2.85
# on OpenWebText). Without DATA it trains on generated tokens, to see how fast a machine is.
#
#   DATA=data/openwebtext_text_document TOKENIZER=data/tokenizer.model PROCESSES=8 examples/gpt2_124m.sh
#
# What is added to the command overrides what stands here: examples/gpt2_124m.sh --train-iters 20 --micro-batch-size 1
set -euo pipefail
cd "$(dirname "$0")/.."
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # so that a restart of torchrun's has a store of its own

PROCESSES=${PROCESSES:-1}
SAVE=${SAVE:-run/gpt2-124m}

data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50256)
if [ -n "${DATA:-}" ]; then
    data=(--data-path "$DATA" --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER" --split "999,1,0")
fi
model=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024
    --hidden-dropout 0 --attention-dropout 0
)
course=(
    --micro-batch-size 16 --global-batch-size 512 --train-iters 600000 --bf16
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
)
layout=(--tensor-model-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
report=(--log-interval 10 --eval-interval 1000 --eval-iters 20)

torchrun --standalone --nproc-per-node "$PROCESSES" pretrain_gpt.py "${data[@]}" "${model[@]}" "${course[@]}" \
    "${layout[@]}" "${report[@]}" --save "$SAVE" --save-interval 1000 --resume auto "$@"
