#!/usr/bin/env bash
# From nothing but an installed megalite to a small Llama-style model and a sample of its text; `make train` calls it.
#
#   STEPS=300 PROCESSES=2 RUN=run examples/train_small_llama.sh
#
# On GPUs it takes as many processes as there are GPUs, else 2 on CPUs, and splits the model over pairs of them.
# What exists already is kept, and training continues from the last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # so that a restart of torchrun's has a store of its own

STEPS=${STEPS:-300}
RUN=${RUN:-run}
SAVE=$RUN/small-llama
CORPUS=$RUN/corpus.jsonl
TOKENIZER=$RUN/tokenizer.model
DATA=$RUN/corpus_text_document

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

read -r gpus cpus < <(python -c 'import os, torch; print(torch.cuda.device_count(), os.cpu_count())')
PROCESSES=${PROCESSES:-$((gpus > 0 ? gpus : 2))}
tensor_parallel=$((PROCESSES % 2 == 0 ? 2 : 1))
data_parallel=$((PROCESSES / tensor_parallel))
global_batch=$((4 * data_parallel * (data_parallel < 4 ? 4 / data_parallel : 1)))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > PROCESSES ? cpus / PROCESSES : 1))}
layout=(--tensor-model-parallel-size "$tensor_parallel")
if ((tensor_parallel > 1)); then layout+=(--sequence-parallel); fi
if ((gpus > 0)); then layout+=(--bf16); fi

mkdir -p "$RUN"
if [ ! -e "$CORPUS" ]; then
    say "A corpus: the sources and docstrings of Python's standard library"
    python examples/standard_library_corpus.py --output "$CORPUS"
fi
if [ ! -e "$TOKENIZER" ]; then
    say "A tokenizer of 4096 pieces, learnt from the corpus"
    python tools/train_tokenizer.py --input "$CORPUS" --output-prefix "${TOKENIZER%.model}" --vocab-size 4096
fi
if [ ! -e "$DATA.idx" ]; then
    say "The corpus as tokens"
    python tools/preprocess_data.py --input "$CORPUS" --output-prefix "${DATA%_text_document}" --append-eod \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER" --workers 2
fi

say "Training on $PROCESSES processes: tensor parallel $tensor_parallel, data parallel $data_parallel"
trap : INT # Ctrl-C is the trainer's: it saves a checkpoint
torchrun --standalone --nproc-per-node "$PROCESSES" pretrain_gpt.py "${layout[@]}" --use-distributed-optimizer \
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 \
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size "$global_batch" \
    --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --adam-beta2 0.95 --weight-decay 0.1 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER" --data-path "$DATA" --split 950,50,0 \
    --train-iters "$STEPS" --eval-interval 100 --eval-iters 4 --log-interval 10 \
    --save "$SAVE" --save-interval 100 --resume auto --tensorboard-dir "$SAVE/tensorboard" || true
trap - INT

if [ ! -e "$SAVE/DONE" ]; then
    say "Training did not finish; why stands above. The same command goes on from the last checkpoint, if there is one."
    exit 85
fi

say "A sample of what it writes"
sample=(python tools/generate.py --load "$SAVE" --max-new-tokens 60 --temperature 0.8 --top-p 0.9 --prompt)
"${sample[@]}" "def __init__(self"

say "Where everything is"
cat <<END
  checkpoints   $SAVE/iter_*
  loss by step  $SAVE/metrics.jsonl
  TensorBoard   $SAVE/tensorboard
  tokenizer     $TOKENIZER
  tokens        $DATA.bin, $DATA.idx

Next:
  .venv/bin/${sample[*]} "class Error"
  .venv/bin/tensorboard --logdir $SAVE/tensorboard
  make train STEPS=$((3 * STEPS))     trains on from here
END
