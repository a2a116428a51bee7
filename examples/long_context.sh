#!/usr/bin/env bash
# From a context of 4k tokens to one of 128k, in one run: train on short samples, then on longer ones in steps, with YaRN
# and context parallelism, and count after each step what the model finds in long texts (docs/long_context.md).
#
#   DATA=data/web_text_document LONG_DATA=data/books_text_document TOKENIZER_MODEL=tokenizer PROCESSES=8 \
#       examples/long_context.sh
#
# DATA and LONG_DATA are prefixes of token files. Lists have a value for each phase. What is added to the command stands
# behind the flags of the training: examples/long_context.sh --lr 1e-4. Stopped, the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # so that a restart of torchrun's has a store of its own

: "${DATA:?give the prefix of token files, DATA=data/web_text_document}"
: "${LONG_DATA:?give the prefix of token files with long documents, LONG_DATA=data/books_text_document}"
TOKENIZER_TYPE=${TOKENIZER_TYPE:-HuggingFaceTokenizer}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-}
RUN=${RUN:-run}
PROCESSES=${PROCESSES:-8}
NEEDLES=${NEEDLES:-20} # texts of each length and depth
read -ra lengths <<<"${LENGTHS:-4096 32768 131072}"
read -ra steps <<<"${STEPS:-25000 500 250}"      # how many with each length
read -ra context <<<"${CONTEXT_PARALLEL:-1 2 8}" # ranks that share a sample
TOKENS=${TOKENS:-4194304}                        # of a step, always: so the learning rate has one course

tokenizer=(--tokenizer-type "$TOKENIZER_TYPE")
if [ -n "$TOKENIZER_MODEL" ]; then tokenizer+=(--tokenizer-model "$TOKENIZER_MODEL"); fi
SAVE=$RUN/long-context
mkdir -p "$SAVE"

all=0
for count in "${steps[@]}"; do all=$((all + count)); done
first=$((steps[0] * TOKENS))
cat >"$SAVE/mix.yaml" <<END
sources:
  short: {path: $DATA}
  long: {path: $LONG_DATA}
phases:
  - weights: {short: 95, long: 5}
  - from: $first
    weights: {short: 60, long: 40}
END

end=0
for phase in "${!lengths[@]}"; do
    length=${lengths[$phase]}
    end=$((end + steps[phase]))
    needles=$SAVE/needles_$length.json
    if [ -e "$needles" ]; then continue; fi # this phase is finished
    positions=(--position-embedding-type rope)
    if ((phase > 0)); then
        positions=(
            --position-embedding-type yarn --yarn-original-max-position-embeddings "${lengths[0]}"
            --rotary-scaling-factor "$((length / lengths[0]))" --allow-changed-rotary
        )
    fi
    torchrun --standalone --nproc-per-node "$PROCESSES" pretrain_gpt.py \
        --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 \
        --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear \
        --rotary-base 10000 --hidden-dropout 0 --attention-dropout 0 --bf16 \
        "${positions[@]}" --seq-length "$length" --max-position-embeddings "$length" \
        --context-parallel-size "${context[$phase]}" --micro-batch-size 1 --global-batch-size "$((TOKENS / length))" \
        --data-mix-schedule "$SAVE/mix.yaml" --split 100,0,0 --reset-attention-mask "${tokenizer[@]}" \
        --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.02 --lr-decay-iters "$all" \
        --train-iters "$end" --eval-iters 0 --log-interval 10 --use-distributed-optimizer --recompute-activations \
        --save "$SAVE" --save-interval 250 --resume auto "$@"
    torchrun --standalone --nproc-per-node "$PROCESSES" tools/evaluate.py --load "$SAVE" \
        --context-parallel-size "${context[$phase]}" --micro-batch-size 1 --needle-trials "$NEEDLES" \
        --needle-lengths "${lengths[@]:0:phase+1}" --output "$needles"
done
