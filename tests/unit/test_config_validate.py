"""Every violated relation between fields is reported with its numbers and the flag to change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megalite.config import RunConfig, parse_arguments, resolve, validate
from megalite.config.validate_model import relation_problems
from megalite.errors import ConfigurationError

VALID = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 100 --data-path text_document --tokenizer-type ByteTokenizer --max-position-embeddings 32"
)
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
WITHOUT_LENGTH = VALID.replace("--train-iters 100", "")
TWO_WAYS = (
    "the data is given in more than one way: keep one of --data-path, --data-args-path, --train-data-path (with "
    "--valid-data-path and --test-data-path), --per-split-data-args-path, --data-mix-schedule (with --valid-data-path "
    "and --test-data-path), --preference-data and --mock-data"
)
WITHOUT_DATA = VALID.replace("--data-path text_document", "")


def config_of(flags: str, base: str = VALID) -> RunConfig:
    return parse_arguments(f"{base} {flags}".split()).config


def problems(flags: str, world_size: int = 1, base: str = VALID) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        resolve(config_of(flags, base), world_size)
    return str(raised.value).splitlines()


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("", 3),
        ("--tp 4 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 8),
        ("--tp 12 --group-query-attention --num-query-groups 4", 12),
        ("--tp 3 --group-query-attention --num-query-groups 2", 3),
        ("--pp 4 --tp 2 --sequence-parallel", 16),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2", 2),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule interleaved-1f1b", 2),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 2 --pipeline-schedule gpipe", 2),
        ("--pp 2 --pipeline-schedule zb-v --use-distributed-optimizer --overlap-grad-reduce", 4),
        ("--pp 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|t|tL", 2),
        ("--pp 2 --pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 1", 2),
        ("--pipeline-schedule zb-v", 1),
        ("--pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 1", 1),
        ("--pp 2 --pipeline-model-parallel-layout E(t|)*3tL --microbatch-group-size-per-virtual-pipeline-stage 3", 2),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication --no-align-grad-reduce", 2),
        ("--pp 3 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", 3),
        ("--pp 3 --decoder-first-pipeline-num-layers 2 --untie-embeddings-and-output-weights", 3),
        ("--profile-pipeline 100 --save d", 1),
        ("--profile --use-pytorch-profiler --profile-step-start 0 --profile-step-end 100 --tensorboard-dir d", 1),
        ("--profile --profile-ranks 2 0 --record-shapes", 3),
        ("--save d --profile-ranks 1 --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack", 2),
        ("--record-memory-history --memory-snapshot-path d/m.pickle --profile-ranks 1", 2),
        ("--group-query-attention", 1),
        ("--num-attention-heads 5 --kv-channels 7", 1),
        ("--position-embedding-type rope --rotary-percent 0.5 --use-rope-scaling --rope-scaling-factor 4", 1),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-low-freq-factor 2 "
            "--rope-scaling-high-freq-factor 3 --rope-scaling-original-max-position-embeddings 16",
            1,
        ),
        ("--geglu --exact-gelu", 1),
        ("--window-size (5,0) --window-attn-skip-freq ([1]*1+[0])*2", 1),
        (f"{YARN} --window-size 5,0 --window-rotary-base 1e4 --max-position-embeddings None", 1),
        ("--exact-gelu --openai-gelu --apply-layernorm-1p --scale-embeddings --attn-logit-softcapping 50", 1),
        ("--position-embedding-type rope --rotary-seq-len-interpolation-factor 2.5", 1),
        (f"{YARN} --rotary-percent 0.5 --yarn-attention-factor 1.5 --max-position-embeddings None", 1),
        ("--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved", 1),
        ("--position-embedding-type none --max-position-embeddings None", 1),
        ("--bf16 --grad-reduce-in-bf16 --swiglu", 1),
        ("--fp64 --recompute-granularity full --recompute-method block --recompute-num-layers 4", 1),
        ("--recompute-activations --manual-gc --manual-gc-interval 5", 1),
        ("--mlp-chunks-for-training 32 --recompute-activations", 1),
        ("--mlp-chunks-for-training 4 --tp 4 --cp 2 --sequence-parallel", 8),
        ("--mlp-chunks-for-training 5 --num-experts 4 --moe-layer-freq 2 --compile", 1),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 90 --lr-warmup-iters 10", 1),
        ("--lr-decay-style constant --lr-warmup-iters 500", 1),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype fp16 --bf16", 1),
        ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --optimizer-backend apex", 1),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype int8 --exp-avg-sq-dtype fp8 --adam-eps 1e-12", 1),
        ("--bf16 --store-param-remainders --optimizer sgd --optimizer-backend megalite", 1),
        ("--optimizer muon --muon-nesterov --muon-coefficient-type simple --muon-num-ns-steps 6", 1),
        ("--lr-warmup-fraction 0.1 --min-lr 1e-3 --lr-decay-iters 50", 1),
        ("--train-iters None --train-samples 2000 --lr-warmup-samples 100 --lr-decay-samples 1000", 2),
        ("--decoupled-lr 0 --lr-warmup-iters 2 --lr-warmup-init 1e-3", 1),
        ("--min-lr 1e-4 --decoupled-lr 1e-5 --decoupled-min-lr 0", 1),
        ("--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1", 1),
        ("--lr-scaling-rule linear --lr-scaling-base-batch-size 1 --lr-warmup-iters 5 --lr-warmup-init 2e-3", 1),
        ("--lr-decay-style noam --lr 2 --lr-warmup-iters 4000 --min-lr 4e-3 --decoupled-lr 3", 1),
        ("--lr-decay-style noam --lr-warmup-fraction 1", 1),
        ("--split 100,0,0 --eval-iters 0", 1),
        ("--split 1 --mock-data --data-path", 1),
        ("--data-path --train-data-path 1 a 2 b --valid-data-path c --data-cache-path d", 1),
        ("--data-path --train-data-path a --eval-iters 0", 1),
        ("--data-path a.jsonl --sft --chat-template {{messages}}", 1),
        ("--fim-data --fim-rate 1 --fim-spm-rate 0 --fim-split-sample <file> --fim-fragment-rate 0.2", 1),
        ("--data-path --data-args-path a --split 90,10", 1),
        ("--data-path --per-split-data-args-path a", 1),
        ("--rampup-batch-size 4 4 100 --global-batch-size 12 --train-iters None --train-samples 200", 2),
        ("--rampup-batch-size 12 6 100 --global-batch-size 12 --train-iters None --train-samples 200", 1),
        ("--tokenizer-type NullTokenizer --vocab-size 100", 1),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model m.model", 1),
        ("--save d --save-interval 5 --resume auto --load e", 1),
        ("--global-batch-size 24", 6),
        (
            "--num-layers 1 --hidden-size 1 --num-attention-heads 1 --seq-length 1 --micro-batch-size 1 --num-workers 0"
            " --train-iters 1 --make-vocab-size-divisible-by 1 --ddp-bucket-size 1 --seed 0 --lr 0 --clip-grad 0",
            1,
        ),
    ],
)
def test_what_fits_passes(flags: str, world_size: int) -> None:
    resolve(config_of(flags), world_size)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--num-layers 0", "--num-layers 0: must be at least 1"),
        ("--num-layers 99999999999999999999", "--num-layers 99999999999999999999: must be at most 10,000"),
        ("--train-iters 10000000000000000000000", "--train-iters 10000000000000000000000: must be at most 2^53"),
        ("--exit-interval 9007199254740993", "--exit-interval 9007199254740993: must be at most 2^53"),
        ("--pp 1000000000", "--pipeline-model-parallel-size 1000000000: must be at most 10,000"),
        ("--num-workers 1000000", "--num-workers 1000000: must be at most 1,000"),
        ("--tp 0", "--tensor-model-parallel-size 0: must be at least 1"),
        ("--micro-batch-size -2", "--micro-batch-size -2: must be at least 1"),
        ("--pp 0", "--pipeline-model-parallel-size 0: must be at least 1"),
        ("--profile-pipeline 0", "--profile-pipeline 0: must be at least 1"),
        ("--profile-pipeline 3", "--profile-pipeline 3 needs --save, the run directory"),
        ("--profile-pipeline 101 --save d", "--profile-pipeline 101 is beyond --train-iters 100"),
        (
            "--save s3://b/r --profile-pipeline 1",
            "--profile-pipeline 1 writes files into --save, which must be a folder, not s3://b/r",
        ),
        ("--profile --profile-step-start -1", "--profile-step-start -1: must be at least 0"),
        ("--profile --profile-step-start 12", "--profile-step-end 12 is not after --profile-step-start 12"),
        ("--profile --profile-step-end 101", "--profile-step-end 101 is beyond --train-iters 100"),
        ("--profile --profile-ranks 1", "--profile-ranks 1: there are only ranks 0 to 0"),
        ("--profile --profile-ranks", "--profile-ranks is empty: give at least one rank"),
        (
            "--profile --use-pytorch-profiler",
            "--use-pytorch-profiler needs --save or --tensorboard-dir, where the traces go",
        ),
        ("--save d --use-pytorch-profiler", "--use-pytorch-profiler needs --profile"),
        ("--save d --profile-step-start 3", "--profile-step-start needs --profile"),
        ("--save d --profile-step-end 30", "--profile-step-end needs --profile"),
        (
            "--pytorch-profiler-collect-shapes",
            "--pytorch-profiler-collect-shapes needs --profile --use-pytorch-profiler, or --save",
        ),
        (
            "--save d --profile --use-pytorch-profiler --record-shapes",
            "--record-shapes needs --profile without --use-pytorch-profiler: it is for nsys",
        ),
        ("--memory-snapshot-path d", "--memory-snapshot-path needs --record-memory-history"),
        ("--log-progress", "--log-progress needs --save, the run directory"),
        (
            "--log-progress --save s3://b/r",
            "--log-progress appends to a file in --save, which must be a folder, not s3://b/r",
        ),
        ("--tensorboard-log-interval 0", "--tensorboard-log-interval 0: must be at least 1"),
        ("--seed -1", "--seed -1: must be at least 0"),
        ("--seed 4294967296", "--seed 4294967296: must be below 2^32"),
        ("--hidden-dropout 1", "--hidden-dropout 1.0: must be at least 0 and below 1"),
        ("--rotary-percent 0", "--rotary-percent 0.0: must be above 0, at most 1"),
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5: must be from 0 to 1"),
        ("--exit-duration-in-mins 0", "--exit-duration-in-mins 0.0: must be above 0"),
        ("--hidden-size 50", "--hidden-size 50 is not a multiple of --num-attention-heads 12 (or --kv-channels)"),
        (
            "--group-query-attention --num-query-groups 5",
            "--num-attention-heads 12 is not a multiple of --num-query-groups 5",
        ),
        ("--num-query-groups 4", "--num-query-groups 4 needs --group-query-attention"),
        ("--swiglu --squared-relu", "--squared-relu and --swiglu are different activations: choose one"),
        ("--position-embedding-type rope --window-rotary-base 1e4", "--window-rotary-base needs --window-size"),
        ("--window-size 5,0 --window-rotary-base 1e4", "--window-rotary-base needs --position-embedding-type rope"),
        ("--window-rotary-base 0", "--window-rotary-base 0.0: must be above 0"),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq needs --window-size"),
        (
            "--window-size 5",
            "--window-size '5': expected LEFT,0: how many keys before and after its own a token sees",
        ),
        (
            "--window-size 5,1",
            "--window-size '5,1': expected LEFT,0: how many keys before and after its own a token sees",
        ),
        *(
            (
                f"--window-size 5,0 --window-attn-skip-freq {wrong}",
                f"--window-attn-skip-freq '{wrong}': expected N, for one layer of N without the window, or a 1 (with) "
                "or a 0 for each layer, like [1,1,0] or ([1]*2+[0])*4",
            )
            for wrong in ("1", "0", "[1,2]", "[]", "exit()", "[1]*[2]", "[1]*99999999", "4**9")
        ),
        (
            "--window-size 5,0 --window-attn-skip-freq [1,0]",
            "--window-attn-skip-freq '[1,0]' is for 2 layers, and the network has 4",
        ),
        ("--qk-layernorm-over-heads", "--qk-layernorm-over-heads needs --qk-layernorm"),
        ("--qk-layernorm --qk-layernorm-over-heads", "--qk-layernorm-over-heads needs --normalization RMSNorm"),
        ("--qk-clip --qk-clip-alpha 1", "--qk-clip-alpha 1.0: must be above 0 and below 1"),
        ("--qk-clip --qk-clip-alpha 0", "--qk-clip-alpha 0.0: must be above 0 and below 1"),
        ("--ema-decay 1", "--ema-decay 1.0: must be above 0 and below 1"),
        (
            "--ema-decay 0.9 --no-save-optim --save d",
            "--ema-decay 0.9 with --no-save-optim: the mean would not be saved; drop one of them",
        ),
        ("--qk-clip --qk-clip-threshold 0", "--qk-clip-threshold 0.0: must be above 0"),
        ("--glu-linear-offset 1", "--glu-linear-offset needs --swiglu, --geglu or --quick-geglu"),
        ("--swiglu --activation-func-clamp-value 0", "--activation-func-clamp-value 0.0: must be above 0"),
        ("--moe-router-bias", "--moe-router-bias needs --num-experts"),
        ("--softmax-type sink", "--softmax-type 'sink': expected one of vanilla, off-by-one, learnable"),
        ("--no-rope-freq 2", "--no-rope-freq needs --position-embedding-type rope"),
        (
            "--position-embedding-type rope --no-rope-freq 3",
            "--no-rope-freq 3 does not divide --num-layers 4: give a list",
        ),
        (
            "--position-embedding-type rope --no-rope-freq [1,0]",
            "--no-rope-freq '[1,0]' is for 2 layers, and the network has 4",
        ),
        *(
            (
                f"--position-embedding-type rope --no-rope-freq {wrong}",
                f"--no-rope-freq '{wrong}': expected N, for every N-th layer without rotation, or a 1 (without) or a 0 "
                "for each layer, like [1,1,0] or ([1]*2+[0])*4",
            )
            for wrong in ("0", "[2]", "x()")
        ),
        (
            "--output-norm-freq [1,0]",
            "--output-norm-freq '[1,0]' is for 2 layers, and the network has 4",
        ),
        (
            "--output-norm-freq x",
            "--output-norm-freq 'x': expected N, for every N-th layer with norms behind, or a 1 (behind) or a 0 for "
            "each layer, like [1,1,0] or ([1]*2+[0])*4",
        ),
        *(
            (
                f"--output-norm-freq 4 {flag}",
                f"{flag} needs layers with norms before both halves: leave --output-norm-freq out",
            )
            for flag in ("--sandwich-norm", "--use-parallel-residual")
        ),
        ("--linear-norm-epsilon 1e-5", "--linear-norm-epsilon needs a gated delta net, G in --hybrid-layer-pattern"),
        ("--swiglu --geglu", "--geglu and --swiglu are different activations: choose one"),
        ("--swiglu --exact-gelu", "--exact-gelu and --swiglu are different activations: choose one"),
        ("--squared-relu --exact-gelu", "--exact-gelu and --squared-relu are different activations: choose one"),
        ("--attn-logit-softcapping 0", "--attn-logit-softcapping 0.0: must be above 0"),
        ("--final-logit-softcapping -1", "--final-logit-softcapping -1.0: must be above 0"),
        ("--label-smoothing 1", "--label-smoothing 1.0: must be at least 0 and below 1"),
        ("--label-smoothing -0.1", "--label-smoothing -0.1: must be at least 0 and below 1"),
        ("--z-loss-coeff -1", "--z-loss-coeff -1.0: must be at least 0"),
        ("--query-pre-attn-scalar 0", "--query-pre-attn-scalar 0.0: must be above 0"),
        (
            "--max-position-embeddings None",
            "--position-embedding-type learned_absolute needs --max-position-embeddings, at least --seq-length",
        ),
        ("--seq-length 33", "--max-position-embeddings 32 is less than --seq-length 33"),
        ("--rotary-base 500000", "--rotary-base needs --position-embedding-type rope"),
        ("--rotary-interleaved", "--rotary-interleaved needs --position-embedding-type rope"),
        ("--use-rope-scaling", "--use-rope-scaling needs --position-embedding-type rope"),
        (
            "--rotary-seq-len-interpolation-factor 2",
            "--rotary-seq-len-interpolation-factor needs --position-embedding-type rope",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            "--use-rope-scaling and --rotary-seq-len-interpolation-factor are two scalings: choose one",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-low-freq-factor 4",
            "--rope-scaling-high-freq-factor 4.0 is not above --rope-scaling-low-freq-factor 4.0",
        ),
        (
            f"{YARN} --use-rope-scaling",
            "--use-rope-scaling needs --position-embedding-type rope: YaRN is a scaling of its own",
        ),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4",
            "--position-embedding-type yarn needs --yarn-original-max-position-embeddings",
        ),
        (
            "--position-embedding-type yarn --yarn-original-max-position-embeddings 16",
            "--position-embedding-type yarn needs a --rotary-scaling-factor above 1, not 1.0",
        ),
        ("--mscale 0.5", "--mscale needs --position-embedding-type yarn"),
        (f"{YARN} --rotary-base 1", "--position-embedding-type yarn needs a --rotary-base above 1, not 1.0"),
        (f"{YARN} --yarn-beta-fast 0.5", "--yarn-beta-fast 0.5 is below --yarn-beta-slow 1.0"),
        (
            f"{YARN} --yarn-beta-slow 3",
            "nothing turns --yarn-beta-slow 3.0 times over --yarn-original-max-position-embeddings 16",
        ),
        ("--yarn-beta-fast 16", "--yarn-beta-fast needs --position-embedding-type yarn"),
        ("--rope-scaling-factor 4", "--rope-scaling-factor needs --use-rope-scaling"),
        (
            "--position-embedding-type rope --rotary-percent 0.3",
            "--rotary-percent 0.3 of 4 channels per head leaves no pair to rotate",
        ),
        (
            "--allow-mixed-groups",
            "--allow-mixed-groups needs --device-classes",
        ),
        (
            "--overlap-param-gather --use-distributed-optimizer",
            "--overlap-param-gather needs --overlap-grad-reduce",
        ),
        ("--train-samples 100", "give the length as --train-iters or as --train-samples, not both"),
        ("--lr-decay-samples 9", "--lr-decay-samples does not go with --train-iters: use --lr-decay-iters"),
        ("--lr-warmup-samples 9", "--lr-warmup-samples does not go with --train-iters: use --lr-warmup-iters"),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 1",
            "give the warm-up as --lr-warmup-fraction or as --lr-warmup-iters, not both",
        ),
        ("--min-lr 1", "--min-lr 1.0 is above --lr 0.001"),
        ("--lr-warmup-iters 2 --lr-warmup-init 1", "--lr-warmup-init 1.0 is above --lr 0.001"),
        (
            "--lr-warmup-iters 2 --lr-warmup-init 1e-4 --decoupled-lr 1e-5",
            "--lr-warmup-init 0.0001 is above --decoupled-lr 1e-05",
        ),
        (
            "--lr-warmup-init 1e-4",
            "--lr-warmup-init 0.0001 needs a warm-up: --lr-warmup-iters or --lr-warmup-fraction",
        ),
        ("--lr-decay-style constant --min-lr 1e-4", "--min-lr: leave it out, --lr-decay-style constant has no decay"),
        (
            "--lr-decay-style constant --lr-decay-iters 7",
            "--lr-decay-iters: leave it out, --lr-decay-style constant has no decay",
        ),
        ("--adam-eps 0", "--adam-eps 0.0: must be above 0"),
        ("--sgd-momentum 0.3", "--sgd-momentum needs --optimizer sgd"),
        ("--optimizer sgd --adam-beta2 0.95", "--adam-beta2 needs --optimizer adam or muon or lamb"),
        (
            "--optimizer sgd --sgd-momentum 0 --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16",
            "--exp-avg-dtype bf16: --sgd-momentum 0 has no average",
        ),
        (
            "--lr-warmup-iters 100",
            "a warm-up of 100 iters is not shorter than the whole schedule of 100 (--lr-decay-iters)",
        ),
        ("--lr-decay-style WSD", "--lr-decay-style WSD and --lr-wsd-decay-iters need each other"),
        ("--lr-wsd-decay-iters 5", "--lr-decay-style WSD and --lr-wsd-decay-iters need each other"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 95 --lr-warmup-iters 10",
            "warm-up 10 and --lr-wsd-decay-iters 95 do not fit into the decay's 100 iters",
        ),
        ("--decoupled-min-lr 0", "--decoupled-min-lr 0.0 needs --decoupled-lr"),
        ("--decoupled-lr -1", "--decoupled-lr -1.0: must be at least 0"),
        ("--decoupled-lr 1e-3 --decoupled-min-lr 1", "--decoupled-min-lr 1.0 is above --decoupled-lr 0.001"),
        ("--min-lr 1e-4 --decoupled-lr 0", "--min-lr 0.0001 is above --decoupled-lr 0.0 (or give --decoupled-min-lr)"),
        ("--lr-decay-style noam", "--lr-decay-style noam needs a warm-up: --lr-warmup-iters or --lr-warmup-fraction"),
        (
            "--lr-decay-style noam --lr-warmup-iters 3 --lr-warmup-init 1e-4",
            "--lr-warmup-init 0.0001: leave it out, noam's formula says where the warm-up starts",
        ),
        (
            "--lr-decay-style noam --lr-warmup-iters 3 --lr-decay-iters 50",
            "--lr-decay-iters: leave it out, noam decays without an end, down to --min-lr",
        ),
        (
            "--lr-decay-style noam --lr-warmup-iters 3 --min-lr 1e-4",
            "--min-lr 0.0001 is above noam's highest learning rate: --lr 0.001 / sqrt(--hidden-size 48 x 3 warm-up "
            "steps) = 8.33e-05",
        ),
        (
            "--lr-decay-style noam --lr-warmup-iters 3 --decoupled-lr 1 --decoupled-min-lr 0.5",
            "--decoupled-min-lr 0.5 is above noam's highest learning rate: --decoupled-lr 1.0 / sqrt(--hidden-size 48 "
            "x 3 warm-up steps) = 0.0833",
        ),
        ("--lr-scaling-rule sqrt", "--lr-scaling-rule and --lr-scaling-base-batch-size need each other"),
        ("--lr-scaling-base-batch-size 8", "--lr-scaling-rule and --lr-scaling-base-batch-size need each other"),
        (
            "--lr-scaling-rule linear --lr-scaling-base-batch-size 0",
            "--lr-scaling-base-batch-size 0: must be at least 1",
        ),
        (
            "--lr-scaling-rule linear --lr-scaling-base-batch-size 4 --lr-warmup-iters 2 --lr-warmup-init 1e-3",
            "--lr-warmup-init 0.001 is above --lr 0.001 x 0.5 of --lr-scaling-rule",
        ),
        ("--start-weight-decay 0.1", "--start-weight-decay needs --weight-decay-incr-style linear or cosine"),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.1",
            "--weight-decay-incr-style linear needs --start-weight-decay and --end-weight-decay",
        ),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.05",
            "--start-weight-decay 0.1 is above --end-weight-decay 0.05: weight decay can only rise",
        ),
        (
            "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1 --weight-decay 0.1",
            "--weight-decay 0.1: leave it out, --weight-decay-incr-style cosine ignores it",
        ),
        ("--optimizer-backend apex --fp64", "--optimizer-backend apex does not support --fp64: leave one out"),
        ("--exp-avg-dtype bf16 --bf16", "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer"),
        (
            "--use-precision-aware-optimizer --main-grads-dtype bf16",
            "--main-grads-dtype bf16 needs --bf16 or --fp16",
        ),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --bf16 --optimizer-backend torch",
            "--exp-avg-dtype bf16 needs --optimizer-backend megalite (or auto), not torch",
        ),
        (
            "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16 --bf16 --optimizer sgd",
            "--exp-avg-sq-dtype bf16: --optimizer sgd has no average of squares",
        ),
        (
            "--use-precision-aware-optimizer --main-params-dtype fp16 --fp16",
            "--main-params-dtype fp16 with --fp16 has no more precise weights: use --bf16, or keep fp32",
        ),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype int8 --optimizer muon",
            "--exp-avg-dtype int8 is for adam and sgd only: muon's momentum cannot have 8 bits",
        ),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-sq-dtype fp8 --adam-eps 1e-13",
            "--adam-eps 1e-13 is too small for --exp-avg-sq-dtype fp8, which rounds averages with a root below 3e-14 "
            "to zero: give 1e-12 or more",
        ),
        (
            "--store-param-remainders",
            "--store-param-remainders needs --bf16: it stores the bits of fp32 masters that bf16 parameters do not "
            "have",
        ),
        (
            "--bf16 --store-param-remainders --use-precision-aware-optimizer --main-params-dtype fp16",
            "--store-param-remainders stores fp32 masters, not --main-params-dtype fp16: drop one",
        ),
        (
            "--bf16 --store-param-remainders --optimizer muon",
            "--store-param-remainders needs --optimizer adam or sgd",
        ),
        (
            "--bf16 --store-param-remainders --optimizer-backend torch",
            "--store-param-remainders needs --optimizer-backend megalite (or auto), not torch",
        ),
        ("--lion-beta1 0.9", "--lion-beta1 needs --optimizer lion"),
        ("--optimizer lamb --lars-momentum 0", "--lars-momentum needs --optimizer lars"),
        ("--optimizer lars --lars-coefficient 0", "--lars-coefficient 0.0: must be above 0"),
        ("--adafactor-eps 1e-8", "--adafactor-eps needs --optimizer adafactor"),
        (
            "--optimizer lion --optimizer-backend apex",
            "--optimizer-backend apex is for adam, sgd and muon: leave it out with --optimizer lion",
        ),
        (
            "--optimizer lamb --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16",
            "--use-precision-aware-optimizer, --exp-avg-dtype: --optimizer lamb keeps everything in fp32; use adam, "
            "sgd or muon, or drop it",
        ),
        (
            "--optimizer adafactor --bf16 --store-param-remainders",
            "--store-param-remainders: --optimizer adafactor keeps everything in fp32; use adam, sgd or muon, or drop "
            "it",
        ),
        ("--muon-nesterov", "--muon-nesterov needs --optimizer muon"),
        ("--muon-momentum 0.95", "--muon-momentum needs --optimizer muon"),
        ("--muon-momentum 1", "--muon-momentum 1.0: must be at least 0 and below 1"),
        (
            "--optimizer muon --muon-num-ns-steps 6",
            "--muon-num-ns-steps 6 does not fit --muon-coefficient-type quintic: give a multiple of 5",
        ),
        (
            "--optimizer muon --muon-coefficient-type polar_express",
            "--muon-num-ns-steps 5 does not fit --muon-coefficient-type polar_express: give at least 8",
        ),
        ("--mock-data", TWO_WAYS),
        ("--data-path --mock-data --sft", "--sft reads conversations: leave --mock-data out"),
        ("--fim-data --sft", "--sft reads conversations: leave --fim-data out"),
        (
            "--eod-mask-loss --sft",
            "--eod-mask-loss is for token files: with --sft only answers have a loss",
        ),
        ("--chat-template a", "--chat-template needs --sft or --preference-data"),
        (
            "--data-path --preference-data a --reference-model b --distill-from c",
            "--distill-from c does not go with --preference-data: leave it out",
        ),
        ("--fim-rate 0.3", "--fim-rate needs --fim-data"),
        ("--fim-pad-token <pad>", "--fim-pad-token needs --fim-data"),
        ("--fim-data --fim-spm-rate 1.5", "--fim-spm-rate 1.5: must be from 0 to 1"),
        (
            "--train-data-path a --valid-data-path b",
            TWO_WAYS,
        ),
        (
            "--data-path --train-data-path a",
            "there is nothing to validate on: give --valid-data-path, or --eval-iters 0",
        ),
        ("--data-path --valid-data-path a", "--valid-data-path and --test-data-path need --train-data-path"),
        (
            "--data-path --per-split-data-args-path a --split 9,1",
            "--split '9,1' divides --data-path, --data-args-path, or --data-mix-schedule without --valid-data-path: "
            "leave it out",
        ),
        (
            "--data-path --data-args-path a --split 9",
            "--split '9' leaves nothing to validate on: give a second share, or --eval-iters 0",
        ),
        ("--data-mix-schedule a", TWO_WAYS),
        ("--allow-changed-sources", "--allow-changed-sources needs --data-mix-schedule"),
        (
            "--phase-transition-iterations 5",
            "--phase-transition-iterations needs --data-mix-schedule",
        ),
        ("--mid-level-dataset-surplus -1", "--mid-level-dataset-surplus -1.0: must be at least 0"),
        (
            "--rampup-batch-size 2 2 100 --global-batch-size 8",
            "--rampup-batch-size 2 2 100 needs --train-samples: steps of different sizes do not say how much is "
            "trained on",
        ),
        ("--split 1,x", "--split '1,x': give the shares of training, validation and test, as in 969,30,1"),
        ("--split 0,1", "--split '0,1': give the shares of training, validation and test, as in 969,30,1"),
        (
            "--split 100,0",
            "--split '100,0' leaves nothing to validate on: give a second share, or --eval-iters 0",
        ),
        (
            "--tokenizer-type None",
            "give --tokenizer-type: SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, "
            "HuggingFaceTokenizer, GPT2BPETokenizer, TikTokenizer, ByteTokenizer, NullTokenizer",
        ),
        (
            "--tokenizer-type Llama2Tokenizer",
            "--tokenizer-type Llama2Tokenizer needs --tokenizer-model, its file",
        ),
        ("--tokenizer-model m", "--tokenizer-type ByteTokenizer does not use --tokenizer-model (m): leave it out"),
        (
            "--tokenizer-type GPT2BPETokenizer --vocab-file v",
            "--tokenizer-type GPT2BPETokenizer needs --merge-file, its file",
        ),
        (
            "--tokenizer-type GPT2BPETokenizer --vocab-file bert/vocab.txt",
            "--vocab-file bert/vocab.txt is named as a WordPiece vocabulary, which is BERT's: megalite pre-trains "
            "GPTs, whose GPT2BPETokenizer has a vocab.json and a merges.txt",
        ),
        ("--tiktoken-pattern v1", "--tokenizer-type ByteTokenizer does not use --tiktoken-pattern (v1): leave it out"),
        (
            "--tokenizer-type NullTokenizer",
            "--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens in the data",
        ),
        ("--bf16 --fp64", "--bf16 and --fp64 are 2 precisions: choose one"),
        ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16 needs --bf16"),
        (
            "--recompute-granularity full --recompute-num-layers 1",
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 5",
            "--recompute-num-layers 5 is more than --num-layers 4",
        ),
        (
            "--recompute-activations --recompute-method block",
            "--recompute-method and --recompute-num-layers need --recompute-granularity full",
        ),
        (
            "--num-experts 4 --recompute-modules moe",
            "--recompute-modules needs --recompute-granularity selective",
        ),
        ("--recompute-activations --recompute-modules core_attn moe", "--recompute-modules moe needs --num-experts"),
        ("--mlp-chunks-for-training 0", "--mlp-chunks-for-training 0: must be at least 1"),
        (
            "--mlp-chunks-for-training 33",
            "--mlp-chunks-for-training 33 is more than the 32 tokens of a sample that a rank has between products "
            "(--seq-length 32 / 1 ranks): give at most 32",
        ),
        (
            "--mlp-chunks-for-training 2 --num-experts 4",
            "--mlp-chunks-for-training 2 changes nothing where no layer is dense (--num-experts): leave it out; "
            "--recompute-granularity selective --recompute-modules moe saves their memory",
        ),
        ("--manual-gc-interval 5", "--manual-gc-interval 5 needs --manual-gc"),
        ("--no-watchdog --watchdog-min-seconds 5", "--watchdog-min-seconds 5 needs the watchdog: drop --no-watchdog"),
        ("--async-save", "--async-save needs --save, the run directory"),
        ("--resume auto", "--resume auto needs --save, the run directory"),
    ],
)
def test_what_does_not_fit_is_the_one_problem(flags: str, problem: str) -> None:
    assert problems(flags) == [problem]


LATENTS = (
    "--q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 2 --v-head-dim 4 "
    "--position-embedding-type rope"
)
SWITCH = f"--multi-latent-attention {LATENTS}"
WITHOUT_LATENTS = "attention without latents: drop it, or drop --multi-latent-attention (+ or D in a pattern)"


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        (
            LATENTS,
            1,
            [
                f"--{name} needs --multi-latent-attention"
                for name in ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
            ],
        ),
        (
            "--hybrid-layer-pattern *-*- --kv-lora-rank 8",
            1,
            ["--kv-lora-rank needs latent attention, + in --hybrid-layer-pattern"],
        ),
        (
            f"{SWITCH} --group-query-attention --num-query-groups 2",
            1,
            [f"--{name} needs {WITHOUT_LATENTS}" for name in ("group-query-attention", "num-query-groups")],
        ),
        (
            f"{SWITCH} --qk-pos-emb-head-dim 3",
            1,
            ["--qk-pos-emb-head-dim 3 is odd, and channels are rotated in pairs"],
        ),
        (
            f"--hybrid-layer-pattern *-+- {LATENTS}",
            1,
            ["a network has attention (*) or attention over latents (+, D), not both: choose one"],
        ),
        (
            f"--hybrid-layer-pattern +-+- {LATENTS} --tp 8",
            8,
            ["--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 8"],
        ),
        (f"{SWITCH} --window-size 4,0", 1, [f"--window-size needs {WITHOUT_LATENTS}"]),
        (f"{SWITCH} --rotary-percent 0.5", 1, [f"--rotary-percent needs {WITHOUT_LATENTS}"]),
        (
            f"{SWITCH} --latent-norm-epsilon 1e-6",
            1,
            ["--latent-norm-epsilon needs --qk-layernorm, which normalises latents"],
        ),
    ],
)
def test_latent_attention_that_does_not_fit(flags: str, world_size: int, expected: list[str]) -> None:
    assert problems(flags, world_size) == expected


SPARSE = f"{SWITCH} --experimental-attention-variant dsa"
INDEXER = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8"


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        (
            SPARSE,
            1,
            [f"sparse attention needs --dsa-indexer-{name}" for name in ("n-heads", "head-dim", "topk")],
        ),
        (
            f"{SWITCH} --dsa-indexer-topk 8",
            1,
            ["--dsa-indexer-topk needs --multi-latent-attention and --experimental-attention-variant dsa"],
        ),
        (
            f"--hybrid-layer-pattern +-+- {LATENTS} --dsa-indexer-topk 8",
            1,
            ["--dsa-indexer-topk needs sparse attention, D in --hybrid-layer-pattern"],
        ),
        (
            "--experimental-attention-variant dsa",
            1,
            ["--experimental-attention-variant dsa needs --multi-latent-attention"],
        ),
        (
            f"{SPARSE} {INDEXER} --linear-attention-freq 2",
            1,
            ["--linear-attention-freq needs --experimental-attention-variant gated_delta_net"],
        ),
        (
            f"--experimental-attention-variant dsa {INDEXER}",
            1,
            ["--experimental-attention-variant dsa needs --multi-latent-attention"],
        ),
        (
            f"{SPARSE} {INDEXER} --dsa-indexer-loss-coeff 1 --dsa-stage indexer --qk-clip",
            1,
            ["--qk-clip scales the weights of queries and keys, which --dsa-stage indexer freezes: drop it"],
        ),
        (f"{SPARSE} {INDEXER} --window-size 4,0", 1, [f"--window-size needs {WITHOUT_LATENTS}"]),
        (
            f"{SPARSE} {INDEXER} --dsa-indexer-head-dim 1",
            1,
            ["--dsa-indexer-head-dim 1 is less than --qk-pos-emb-head-dim 2, its rotated channels"],
        ),
        (
            f"{SPARSE} {INDEXER} --dsa-stage warmup",
            1,
            ["--dsa-stage needs --dsa-indexer-loss-coeff above 0: without it indexers are not trained"],
        ),
        (
            f"{SPARSE} {INDEXER} --dsa-indexer-use-sparse-loss --dsa-indexer-loss-coeff 0",
            1,
            [
                "--dsa-indexer-use-sparse-loss needs --dsa-indexer-loss-coeff above 0: without it indexers are not "
                "trained"
            ],
        ),
        (
            f"{SPARSE} {INDEXER} --dsa-indexer-use-sparse-loss --dsa-indexer-loss-coeff 1 --dsa-stage warmup",
            1,
            [
                "--dsa-indexer-use-sparse-loss needs --dsa-stage sparse or indexer: in the warm-up attention is to all "
                "keys, and so is the loss"
            ],
        ),
        (
            f"{SPARSE} {INDEXER} --dsa-indexer-skip-topk-offset 2",
            1,
            ["--dsa-indexer-skip-topk-offset needs --dsa-indexer-topk-freq above 1"],
        ),
        (
            f"--hybrid-layer-pattern *-D- {LATENTS} {INDEXER}",
            1,
            ["a network has attention (*) or attention over latents (+, D), not both: choose one"],
        ),
        (
            f"{SPARSE} {INDEXER} --dsa-indexer-topk-freq 4 --pp 2",
            2,
            [
                "the first layer of sparse attention of stage 1 has no indexer (--dsa-indexer-topk-freq 4 and "
                "--dsa-indexer-skip-topk-offset 0, which count layers of all kinds), and what another stage has chosen "
                "does not reach it: change them, or divide the layers otherwise"
            ],
        ),
        (
            f"{SPARSE} {INDEXER} --tp 8",
            8,
            ["--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 8"],
        ),
    ],
)
def test_sparse_attention_that_does_not_fit(flags: str, world_size: int, expected: list[str]) -> None:
    assert problems(flags, world_size) == expected


def test_ways_of_context_parallelism_change_nothing_where_all_attention_is_sparse() -> None:
    flags = f"{VALID} --cp 2 --cp-comm-type a2a {LATENTS} {INDEXER} --hybrid-layer-pattern"
    why = "--cp-comm-type a2a: changes nothing, since sparse attention gathers the latents of a sample"
    assert why in parse_arguments(f"{flags} D-D-".split()).notes
    assert why not in parse_arguments(f"{flags} +-D-".split()).notes


def test_a_width_of_heads_changes_nothing_beside_latents() -> None:
    """Megatron-LM takes it so; a network that is described otherwise than by flags must not have it."""
    parsed = parse_arguments(f"{VALID} {SWITCH} --kv-channels 8".split())
    assert parsed.config == config_of(SWITCH)
    why = ": changes nothing, since attention is over latents (--qk-head-dim and others are its widths)"
    assert f"--kv-channels 8{why}" in parsed.notes
    described = replace(parsed.config.model, kv_channels=8)
    assert list(relation_problems(described)) == [f"--kv-channels needs {WITHOUT_LATENTS}"]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_in_yaml_is_refused(value: float) -> None:
    config = config_of("")
    config = replace(config, optimizer=replace(config.optimizer, clip_grad=value))
    with pytest.raises(ConfigurationError, match=f"^--clip-grad {value}: must be a finite number$"):
        resolve(config, 1)


@pytest.mark.parametrize(
    ("flags", "world_size", "problem"),
    [
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 3",
            4,
            "--num-distributed-optimizer-instances 3 does not divide 4 data-parallel ranks",
        ),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 4",
            4,
            "--num-distributed-optimizer-instances 4: with one rank in each nothing is sharded",
        ),
        ("--tp 3", 4, "4 ranks cannot be divided into groups of --tensor-model-parallel-size 3"),
        (
            "--tp 2",
            1,
            "1 ranks cannot be divided into groups of --tensor-model-parallel-size 2: start 2 processes, as by "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2",
        ),
        (
            "--tp 2 --pp 4",
            4,
            "4 ranks cannot be divided into groups of --tensor-model-parallel-size 2 x --pipeline-model-parallel-size "
            "4",
        ),
        (
            "--pp 2 --global-batch-size 6",
            4,
            "--global-batch-size 6 is not a multiple of --micro-batch-size 2 x 2 data-parallel ranks",
        ),
        (
            "--pp 2 --use-distributed-optimizer --num-distributed-optimizer-instances 4",
            4,
            "--num-distributed-optimizer-instances 4 does not divide 2 data-parallel ranks",
        ),
        (
            "--tp 2 --global-batch-size 6",
            4,
            "--global-batch-size 6 is not a multiple of --micro-batch-size 2 x 2 data-parallel ranks",
        ),
        ("--tp 8", 8, "--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 8"),
        (
            "--tp 4 --ffn-hidden-size 6",
            4,
            "--ffn-hidden-size 6 is not divisible by --tensor-model-parallel-size 4",
        ),
        (
            "--tp 3 --sequence-parallel",
            3,
            "--seq-length 32 is not divisible by --tensor-model-parallel-size 3",
        ),
        ("--train-iters None --train-samples 7", 4, "--train-samples 7 is less than one --global-batch-size 8"),
    ],
)
def test_layouts_that_do_not_fit_the_ranks(flags: str, world_size: int, problem: str) -> None:
    assert problems(flags, world_size) == [problem]


EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
EXPERTS = "--num-experts 8"
ALONE = "none, sinkhorn or quantile_balancing alone"
QUANTILES = "--moe-router-load-balancing-type quantile_balancing"
SINKHORN = "--moe-router-load-balancing-type sinkhorn"
INSTANCES = "--use-distributed-optimizer --num-distributed-optimizer-instances"


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("--ep 2", 2, [f"{EP} needs --num-experts"]),
        (f"--tp 2 {EXPERTS}", 2, ["--num-experts with --tensor-model-parallel-size 2 needs --sequence-parallel"]),
        (f"--ep 3 {EXPERTS}", 3, [f"--num-experts 8 is not divisible by {EP} 3"]),
        (f"--etp 4 --ffn-hidden-size 6 {EXPERTS}", 4, [f"--ffn-hidden-size 6 is not divisible by {ETP} 4"]),
        (
            f"--etp 4 --moe-ffn-hidden-size 6 {EXPERTS}",
            4,
            [f"--moe-ffn-hidden-size 6 is not divisible by {ETP} 4"],
        ),
        (
            f"--tp 4 --sequence-parallel --moe-ffn-hidden-size 6 {EXPERTS}",
            4,
            [
                "--moe-ffn-hidden-size 6 is not divisible by --tensor-model-parallel-size 4: "
                "--expert-tensor-parallel-size 1 does not split experts"
            ],
        ),
        (
            f"--tp 4 --sequence-parallel --ffn-hidden-size 6 {EXPERTS}",
            4,
            [
                "--ffn-hidden-size 6 is not divisible by --tensor-model-parallel-size 4: "
                "--expert-tensor-parallel-size 1 does not split experts"
            ],
        ),
        (
            f"--tp 4 --sequence-parallel --ffn-hidden-size 6 --moe-layer-freq 2 {EXPERTS}",
            4,
            ["--ffn-hidden-size 6 is not divisible by --tensor-model-parallel-size 4"],
        ),
        (
            f"--tp 2 --sequence-parallel --moe-shared-expert-intermediate-size 5 {EXPERTS}",
            2,
            ["--moe-shared-expert-intermediate-size 5 is not divisible by --tensor-model-parallel-size 2"],
        ),
        (
            f"--tp 2 --sequence-parallel --ep 4 {EXPERTS}",
            4,
            [f"4 ranks cannot be divided into groups of --tensor-model-parallel-size 2 x {EP} 4"],
        ),
        (f"--ep 2 --etp 4 {EXPERTS}", 4, [f"4 ranks cannot be divided into groups of {ETP} 4 x {EP} 2"]),
        (
            f"--ep 4 {INSTANCES} 2 {EXPERTS}",
            4,
            ["--num-distributed-optimizer-instances 2 does not divide the experts' data-parallel size, 1"],
        ),
    ],
)
def test_layouts_of_experts_fit_the_ranks(flags: str, world_size: int, expected: list[str]) -> None:
    assert problems(flags, world_size) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8"),
        (
            "--moe-router-topk 1",
            "--moe-router-topk 1 with softmax gives every token the weight 1: add --moe-router-pre-softmax",
        ),
        (
            "--moe-router-enable-expert-bias",
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid or sqrtsoftplus",
        ),
        ("--moe-router-bias-update-rate 0.1", "--moe-router-bias-update-rate needs --moe-router-enable-expert-bias"),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 1",
            "--num-experts 8 is not divisible by --moe-router-num-groups 3",
        ),
        ("--moe-router-num-groups 4", "--moe-router-num-groups 4 needs --moe-router-group-topk"),
        ("--moe-router-group-topk 4", "--moe-router-group-topk needs --moe-router-num-groups"),
        (
            "--moe-router-num-groups 2 --moe-router-group-topk 3",
            "--moe-router-group-topk 3 is more than --moe-router-num-groups 2",
        ),
        (
            "--moe-router-num-groups 8 --moe-router-group-topk 1",
            "--moe-router-topk 2 is more than the only expert of the chosen groups",
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 3",
            "--moe-router-topk 3 is more than the 2 experts of the chosen groups",
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 3 --moe-router-topk 4",
            "--moe-router-topk 4 is not a multiple of --moe-router-group-topk 3",
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 3 --moe-router-group-scores 3",
            "--moe-router-group-scores 3 is more than the 2 experts of a group",
        ),
        (
            "--moe-aux-loss-coeff 0.1 0.2",
            "--moe-aux-loss-coeff has 2 numbers for 1 of --moe-router-load-balancing-type",
        ),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss",
            "--moe-aux-loss-coeff has 1 number for 2 of --moe-router-load-balancing-type",
        ),
        (
            "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0",
            "--moe-router-load-balancing-type global_aux_loss does nothing with --moe-aux-loss-coeff 0: drop it",
        ),
        ("--moe-layer-freq [0]*4", "--moe-layer-freq [0]*4 gives no layer experts: drop --num-experts"),
        (
            "--moe-expert-capacity-factor -1",
            "--moe-expert-capacity-factor -1.0: must be above 0 (leave it out to drop nothing)",
        ),
        (
            "--moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 0.1 0",
            f"--moe-router-load-balancing-type aux_loss none: give each kind once, and {ALONE}",
        ),
        (
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff 0.1 needs another --moe-router-load-balancing-type than none",
        ),
        (
            f"{SINKHORN} aux_loss --moe-aux-loss-coeff 0 0.1 --moe-router-pre-softmax",
            f"{SINKHORN} aux_loss: give each kind once, and {ALONE}",
        ),
        (
            f"{SINKHORN} --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff 0.1 needs another --moe-router-load-balancing-type than sinkhorn",
        ),
        (
            f"{SINKHORN} --moe-router-score-function sigmoid",
            f"{SINKHORN} with --moe-router-topk 2 needs --moe-router-pre-softmax, and no other score",
        ),
        (
            f"{SINKHORN} --moe-router-topk 1 --moe-router-pre-softmax",
            f"{SINKHORN} with --moe-router-topk 1 needs --moe-router-score-function sigmoid, and no other score",
        ),
        (
            f"{SINKHORN} --moe-router-topk 1 --moe-router-enable-expert-bias",
            "--moe-router-enable-expert-bias needs another --moe-router-load-balancing-type than sinkhorn",
        ),
        (
            f"{SINKHORN} --moe-router-num-groups 2 --moe-router-group-topk 1",
            "--moe-router-num-groups needs another --moe-router-load-balancing-type than sinkhorn",
        ),
        (
            f"{SINKHORN} --moe-router-topk-scaling-factor 2",
            "--moe-router-topk-scaling-factor needs another --moe-router-load-balancing-type than sinkhorn",
        ),
        (
            f"{QUANTILES} --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff 0.1 needs another --moe-router-load-balancing-type than quantile_balancing",
        ),
        (
            f"{QUANTILES} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            "--moe-router-enable-expert-bias needs another --moe-router-load-balancing-type than quantile_balancing",
        ),
        (
            f"{QUANTILES} --moe-router-num-groups 2 --moe-router-group-topk 1",
            "--moe-router-num-groups needs another --moe-router-load-balancing-type than quantile_balancing",
        ),
        (f"{QUANTILES} --moe-router-topk 8", f"{QUANTILES} needs --num-experts above --moe-router-topk 8"),
        (
            f"{QUANTILES} --moe-router-quantile-balancing-ema 1",
            "--moe-router-quantile-balancing-ema 1.0: must be at least 0 and below 1",
        ),
        ("--moe-router-quantile-balancing-ema 0.5", f"--moe-router-quantile-balancing-ema needs {QUANTILES}"),
        ("--moe-latent-size 0", "--moe-latent-size 0: must be at least 1"),
        ("--moe-aux-loss-coeff -1", "--moe-aux-loss-coeff -1.0: must be at least 0"),
        (
            "--moe-pad-expert-input-to-capacity",
            "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor",
        ),
        ("--moe-token-drop-policy position", "--moe-token-drop-policy needs --moe-expert-capacity-factor"),
        ("--moe-shared-expert-gate", "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"),
        ("--moe-layer-freq [1]", "--moe-layer-freq '[1]' is for 1 layers, and the network has 4"),
        (
            "--moe-layer-freq 0",
            "--moe-layer-freq '0': expected N, for the layers 0, N, 2N, ... with experts, or a 1 (with) or a 0 for "
            "each layer, like [1,1,0] or ([1]*2+[0])*4",
        ),
    ],
)
def test_options_of_experts_fit_each_other(flags: str, expected: str) -> None:
    assert problems(f"{EXPERTS} {flags}", 1) == [expected]


@pytest.mark.parametrize(
    "flags", ["", "--etp 2", "--etp 1", "--ffn-hidden-size 5 --etp 1", "--ffn-hidden-size 5 --moe-ffn-hidden-size 6"]
)
def test_layouts_of_experts_are_taken(flags: str) -> None:
    """The width of dense layers matters only if there are some."""
    resolve(config_of(f"--tp 2 --sequence-parallel --ep 2 {flags} {EXPERTS}"), 4)


@pytest.mark.parametrize(("topk", "score", "pre_softmax"), [(1, "sigmoid", False), (2, "softmax", True)])
def test_even_choices_have_weights_of_their_own(topk: int, score: str, pre_softmax: bool) -> None:
    """A run that resumes has them among its flags already."""
    config = resolve(config_of(f"{EXPERTS} {SINKHORN} --moe-router-topk {topk}"), 1)
    assert (config.model.moe_router_score_function, config.model.moe_router_pre_softmax) == (score, pre_softmax)
    assert resolve(config, 1) == config


def test_coefficients_of_zero_are_noted() -> None:
    flags = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    given = f"{VALID} {EXPERTS} {flags} --moe-router-bias-update-rate 0 --moe-z-loss-coeff 0"
    assert parse_arguments(given.split()).notes == (
        "--moe-router-bias-update-rate 0: the bias of the experts stays as it is at the start",
        "--moe-z-loss-coeff 0: there is no z-loss, and none is recorded",
    )


def test_indexers_that_change_nothing_are_noted() -> None:
    given = f"{VALID} {SPARSE} {INDEXER} --dsa-indexer-topk 1024".split()
    all_keys = "--dsa-indexer-topk 1024 with --seq-length 32: attention is to all keys"
    frozen = "indexers are frozen: --dsa-indexer-loss-coeff above 0 trains them"
    trained = ["--dsa-indexer-loss-coeff", "1"]
    assert parse_arguments(given).notes == (frozen, all_keys)
    assert parse_arguments([*given, *trained]).notes == (all_keys,)
    assert parse_arguments([*given, *trained, "--dsa-stage", "warmup"]).notes == ()


def test_options_of_experts_need_experts() -> None:
    assert problems("--moe-router-topk 4 --moe-z-loss-coeff 0.1", 1) == [
        "--moe-router-topk needs --num-experts",
        "--moe-z-loss-coeff needs --num-experts",
    ]


@pytest.mark.parametrize(("etp", "given"), [("", None), ("--etp 2", 2)])
def test_axes_of_one_rank_say_nothing(etp: str, given: int | None) -> None:
    """The experts' tensor axis where it is as long as the other, as it is where it is not given."""
    config = resolve(config_of(f"--tp 2 --sequence-parallel --cp 1 --ep 1 {etp} {EXPERTS}"), 4)
    assert config.parallel.expert_tensor_parallel_size == given
    assert config.parallel.layout(4) == "TP 2 with SP x DP 2"


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ("--tp 2 --cp 2", "TP 2 x CP 2 x DP 2"),
        ("--tp 2 --ep 2", "TP 2 x DP 4 (experts: EP 2 x ETP 2)"),
        ("--pp 2 --ep 4 --etp 1", "TP 1 x PP 2 x DP 4 (experts: EP 4 x ETP 1)"),
        ("--tp 2 --etp 1", "TP 2 x DP 4 (experts: EP 1 x ETP 1)"),
        ("--tp 2 --etp 4", "TP 2 x DP 4 (experts: EP 1 x ETP 4)"),
    ],
)
def test_a_layout_names_each_axis_that_splits(sizes: str, layout: str) -> None:
    assert config_of(f"{sizes} {EXPERTS}").parallel.layout(8) == layout


@pytest.mark.parametrize(
    ("flags", "idle", "why"),
    [
        ("", "--ckpt-format torch_dist", "without --save"),
        ("", "--save-interval 10", "without --save"),
        ("", "--lr-wsd-decay-style minus_sqrt", "without --lr-decay-style WSD"),
        (
            "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid",
            "--moe-router-pre-softmax",
            ", since --moe-router-score-function is sigmoid",
        ),
        (
            "--lora-rank 2 --fp8-format e4m3 --fp8-recipe mxfp8",
            "--fp8-wgrad",
            ", since --lora-rank trains none of the weights whose gradients it rounds",
        ),
        (
            "--lora-rank 2 --lora-target-modules q_proj down_proj --fp8-format e4m3 --fp8-recipe mxfp8",
            "--activation-func-fp8-input-store",
            ", since --lora-rank adapts the second matrices of all layers, whose inputs are kept as values",
        ),
    ],
)
def test_flags_that_megatron_takes_without_an_effect_are_turned_off_and_told(flags: str, idle: str, why: str) -> None:
    parsed = parse_arguments(f"{VALID} {flags} {idle}".split())
    assert parsed.config == parse_arguments(f"{VALID} {flags}".split()).config
    (note,) = set(parsed.notes) - set(parse_arguments(f"{VALID} {flags}".split()).notes)
    assert note == f"{idle}: changes nothing{' ' if why[0] != ',' else ''}{why}"


def test_sizes_without_experts_or_recomputation_are_turned_off_and_told() -> None:
    parsed = parse_arguments(f"{VALID} --tp 2 --etp 4 --recompute-num-layers 1 --recompute-method block".split())
    assert parsed.config == parse_arguments(f"{VALID} --tp 2".split()).config
    assert parsed.notes == (
        "--expert-tensor-parallel-size 4: changes nothing without --num-experts",
        "--recompute-method block: changes nothing without --recompute-granularity full",
        "--recompute-num-layers 1: changes nothing without --recompute-granularity full",
    )


SEVERAL = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--pp 3", "--num-layers 4 cannot be divided evenly among 3 stages (--pipeline-model-parallel-size 3)"),
        ("--pp 6", "6 stages (--pipeline-model-parallel-size 6) are more than --num-layers 4: use fewer"),
        ("--pp 2 --pipeline-model-parallel-layout Ett|ttt|L", "3 stages of --pipeline-model-parallel-layout 'Ett|ttt"),
        ("--pp 2 --pipeline-model-parallel-layout Ett|tL", "--pipeline-model-parallel-layout 'Ett|tL' has 3 layers"),
        (
            f"--pp 2 {SEVERAL} --num-layers-per-virtual-pipeline-stage 1",
            f"--num-layers-per-virtual-pipeline-stage 1 and {SEVERAL} each set the stages per rank: keep one",
        ),
        (
            f"--pp 2 {SEVERAL} --pipeline-model-parallel-layout Et|t|t|tL",
            f"{SEVERAL} and --pipeline-model-parallel-layout Et|t|t|tL each set the stages per rank: keep one",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Ett|ttL --decoder-first-pipeline-num-layers 2",
            "--pipeline-model-parallel-layout says what each stage contains: leave --decoder-first-pipeline-num-layers "
            "2 out",
        ),
        (
            "--pp 2 --pipeline-model-parallel-layout Ett|ttL --account-for-loss-in-pipeline-split",
            "--pipeline-model-parallel-layout says what each stage contains: leave "
            "--account-for-loss-in-pipeline-split out",
        ),
        (
            "--pp 2 --decoder-last-pipeline-num-layers 2 --account-for-loss-in-pipeline-split",
            "--decoder-last-pipeline-num-layers 2 and --account-for-loss-in-pipeline-split are two ways to make stages "
            "uneven: choose one",
        ),
        (
            "--pp 2 --decoder-last-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 1",
            "--decoder-last-pipeline-num-layers 2 needs --num-virtual-stages-per-pipeline-rank in place of "
            "--num-layers-per-virtual-pipeline-stage 1",
        ),
        (
            "--decoder-last-pipeline-num-layers 4",
            "--decoder-last-pipeline-num-layers 4: --pipeline-model-parallel-size is 1, so there is one rank: leave it "
            "out",
        ),
        (SEVERAL, "2 stages per rank need --pipeline-model-parallel-size 2 or more"),
        (
            f"{SEVERAL} --pipeline-schedule interleaved-1f1b",
            "2 stages per rank need --pipeline-model-parallel-size 2 or more",
        ),
        (
            "--pp 2 --pipeline-schedule interleaved-1f1b",
            "--pipeline-schedule interleaved-1f1b needs several stages per rank: "
            "--num-virtual-stages-per-pipeline-rank",
        ),
        *(
            (
                f"--pp 2 --pipeline-schedule {schedule} {SEVERAL}",
                f"--pipeline-schedule {schedule} needs one stage per rank, not 2: interleaved-1f1b is for several",
            )
            for schedule in ("gpipe", "1f1b", "zb-h1")
        ),
        (
            "--pp 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Ett|ttL",
            "--pipeline-schedule zb-v needs 2 stages per rank, not 1",
        ),
        (
            "--pp 2 --num-layers 6 --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 3",
            "--pipeline-schedule zb-v needs 2 stages per rank, not 3",
        ),
        *(
            (
                f"{flags} --microbatch-group-size-per-virtual-pipeline-stage 4",
                "--microbatch-group-size-per-virtual-pipeline-stage 4 needs several stages per rank, and the schedule "
                "interleaved-1f1b",
            )
            for flags in ("", "--pp 2", "--pp 2 --pipeline-schedule zb-v")
        ),
        (
            f"--pp 2 {SEVERAL} --microbatch-group-size-per-virtual-pipeline-stage 1",
            "--microbatch-group-size-per-virtual-pipeline-stage 1 is less than --pipeline-model-parallel-size 2: each "
            "group must keep all ranks busy",
        ),
    ],
)
def test_pipelines_that_do_not_fit(flags: str, problem: str) -> None:
    (found,) = problems(flags, 12)
    assert found.startswith(problem)


def test_an_unknown_schedule_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError) as raised:
        config_of("--pipeline-schedule 1f1bb")
    expected = "expected one of gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v, did you mean 1f1b?"
    assert str(raised.value) == f"--pipeline-schedule '1f1bb': {expected}"


@pytest.mark.parametrize(
    "flag",
    [
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--no-overlap-p2p-communication",
        "--no-align-grad-reduce",
    ],
)
def test_without_a_pipeline_what_steers_it_changes_nothing_and_is_told(flag: str) -> None:
    parsed = parse_arguments(f"{VALID} {flag}".split())
    assert parsed.config == config_of("")
    assert parsed.notes == (f"{flag}: changes nothing, since --pipeline-model-parallel-size is 1",)
    with_it = "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"
    assert parse_arguments(f"{VALID} {flag} {with_it}".split()).notes == ()
    assert config_of(f"{flag} {with_it}") != config_of(with_it)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", "without --overlap-grad-reduce"),
        ("--overlap-grad-reduce", "with one stage per rank"),
        ("--overlap-grad-reduce --pipeline-schedule zb-v", "with zb-v, whose chunks end in another order"),
        (
            "--overlap-grad-reduce --pipeline-schedule zb-v --data-parallel-sharding-strategy optim_grads",
            "since gradients are reduced after every micro-batch (ZeRO 2 and 3)",
        ),
    ],
)
def test_where_nothing_is_aligned_it_is_told(flags: str, why: str) -> None:
    parsed = parse_arguments(f"{VALID} --pp 2 {flags} --no-align-grad-reduce".split())
    assert parsed.config == config_of(f"--pp 2 {flags}")
    assert parsed.notes == (f"--no-align-grad-reduce: changes nothing {why}",)


def test_neither_length_nor_data_is_a_problem_each() -> None:
    assert problems("", base=WITHOUT_LENGTH) == ["give the length as --train-iters or as --train-samples"]
    assert problems("", base=WITHOUT_DATA) == [
        "there is no data: give --data-path, --data-mix-schedule, --preference-data or --mock-data"
    ]


@pytest.mark.parametrize(
    ("ramp", "problem"),
    [
        ("4 4 0", "--rampup-batch-size 4 4 0: the start, the increment and the samples must be at least 1"),
        (
            "4 6 10",
            "--rampup-batch-size: the increment 6 is not a multiple of --micro-batch-size 2 x 2 data-parallel ranks",
        ),
        (
            "2 4 10",
            "--rampup-batch-size: the start 2 is not a multiple of --micro-batch-size 2 x 2 data-parallel ranks",
        ),
        ("4 8 10", "--rampup-batch-size 4 8 10 does not go from 4 in steps of 8 to --global-batch-size 16"),
        ("20 4 10", "--rampup-batch-size 20 4 10 does not go from 20 in steps of 4 to --global-batch-size 16"),
    ],
)
def test_ramps_that_do_not_fit(ramp: str, problem: str) -> None:
    flags = f"--rampup-batch-size {ramp} --global-batch-size 16 --train-samples 100"
    assert problem in problems(flags, 2, WITHOUT_LENGTH)


SCHEDULE = "--step-batch-size-schedule"


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("0:4 1K", 'write TOKENS:SIZE, as in "0:384 200B:768"'),
        ("0:4 -1:8", 'write TOKENS:SIZE, as in "0:384 200B:768"'),
        (" ", "is blank"),
        ("1K:4", "the first size must begin at 0 tokens"),
        ("0:4 1K:8 1001:16", "others at least a sample later each"),  # both are 125 samples of 8 tokens
        ("0:4 1K:6", "the size 6 is not a multiple of --micro-batch-size 2 x 2 data-parallel ranks"),
        ("0:.5 1K:4", "a batch has at least one sample"),
        ("0:4 1K:8 --global-batch-size 4", "leave --global-batch-size 4 out (Megatron-LM refuses both together, too"),
        ("0:4 --rampup-batch-size 4 4 8", "--rampup-batch-size both give the sizes"),
    ],
)
def test_schedules_of_batch_sizes_that_do_not_fit(schedule: str, problem: str) -> None:
    values, *others = schedule.split(" --")
    flags = [word for other in others for word in f"--{other}".split()]
    argv = [*WITHOUT_LENGTH.split(), "--train-samples", "100", SCHEDULE, values, *flags]
    with pytest.raises(ConfigurationError) as raised:
        resolve(parse_arguments(argv).config, 2)
    assert any(problem in line for line in str(raised.value).splitlines())


def test_a_run_that_continues_may_be_past_the_sizes_that_do_not_fit() -> None:
    flags = f"{WITHOUT_LENGTH} --train-samples 100 {SCHEDULE} 0:2 1K:4".split()
    with pytest.raises(ConfigurationError, match="the size 2 is not a multiple"):
        resolve(parse_arguments(flags).config, 2)
    resolve(parse_arguments([*flags, "--load", "l"]).config, 2)
    with pytest.raises(ConfigurationError, match="the size 6 is not a multiple"):
        resolve(parse_arguments([*flags, "2K:6", "--load", "l"]).config, 2)


def test_a_schedule_of_batch_sizes_needs_a_length_in_samples() -> None:
    assert problems(f"{SCHEDULE} 0:4 1K:8", 2) == [
        f'{SCHEDULE} "0:4 1K:8" needs --train-samples: steps of different sizes do not say how much is trained on'
    ]


def test_batches_of_an_evaluation_are_whole() -> None:
    assert problems("--eval-global-batch-size 6", 2) == [
        "--eval-global-batch-size 6 is not a multiple of --micro-batch-size 2 x 2 data-parallel ranks"
    ]


def test_lengths_in_samples_refuse_lengths_in_iterations() -> None:
    flags = "--train-samples 100 --lr-decay-iters 5 --lr-warmup-iters 1"
    assert problems(flags, base=WITHOUT_LENGTH) == [
        "--lr-decay-iters does not go with --train-samples: use --lr-decay-samples",
        "--lr-warmup-iters does not go with --train-samples: use --lr-warmup-samples",
    ]


def test_all_problems_are_told_at_once() -> None:
    assert len(problems("--bf16 --fp64 --swiglu --squared-relu --tp 5 --resume auto", 4)) == 6


def test_resolve_fills_in_the_global_batch_and_turns_idle_flags_off() -> None:
    config = config_of("--tp 2 --sequence-parallel")
    resolved = resolve(config, 6)
    assert resolved.training.global_batch_size == 6
    assert resolved.parallel == config.parallel
    assert resolve(resolved, 6) == resolved
    validate(resolved, 6)
    assert resolve(config_of("--global-batch-size 24"), 3).training.global_batch_size == 24


def test_derived_sizes_are_megatrons() -> None:
    gpt, llama = config_of("").model, config_of("--swiglu --hidden-size 4096").model
    assert (gpt.head_dim, gpt.ffn_size, gpt.kv_groups) == (4, 192, 12)
    assert llama.ffn_size == int(4 * 4096 * 2 / 3 / 64) * 64 == 10880
    assert config_of("--swiglu --hidden-size 12").model.ffn_size == 64
    assert config_of("--ffn-hidden-size 7 --kv-channels 9").model.head_dim == 9
    assert config_of("--ffn-hidden-size 7").model.ffn_size == 7
    assert config_of("--group-query-attention --num-query-groups 3").model.kv_groups == 3
    assert [config_of(f"--vocab-size {size}").model.padded_vocab_size(2) for size in (1, 256, 257)] == [256, 256, 512]
    with pytest.raises(ConfigurationError, match="--vocab-size"):
        gpt.padded_vocab_size(1)


def test_a_balancing_loss_of_weight_0_is_idle() -> None:
    """Megatron-LM takes one, and its own commands give one."""
    given = "--moe-router-load-balancing-type global_aux_loss"
    parsed = parse_arguments(f"{VALID} --num-experts 4 {given}".split())
    assert parsed.config.model == config_of("--num-experts 4").model
    assert f"{given}: changes nothing, since --moe-aux-loss-coeff is 0" in parsed.notes
    (line,) = problems(given)
    assert line.startswith("--moe-router-load-balancing-type needs --num-experts")


def test_precision_is_a_dtype_by_name() -> None:
    names = [config_of(flags).training.dtype for flags in ("", "--bf16", "--fp64")]
    assert names == ["float32", "bfloat16", "float64"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden-size 120000000000", "--num-layers 4, --hidden-size 120000000000, --num-attention-heads 12, "),
        ("--vocab-size 99999999999999", "--vocab-size 99999999999999, --max-position-embeddings 32: a network of 4.8e"),
        ("--max-position-embeddings 99999999999999", "--max-position-embeddings 99999999999999: a network of 4.8e+15"),
        ("--ffn-hidden-size 99999999999999", "--ffn-hidden-size 99999999999999, --max-position-embeddings 32: a netw"),
        ("--micro-batch-size 99999999999999", "--micro-batch-size 99999999999999 x --seq-length 32 tokens of 192"),
        ("--global-batch-size 2000000", "--global-batch-size 2000000 on 1 ranks: more than 100,000 micro-batches of"),
        ("--train-iters 9000000000000000 --global-batch-size 2", "of --global-batch-size 2: more than 2^53 samples"),
        ("--window-size 8,0 --window-attn-skip-freq [1]*9999*9999*9999", "'[1]*9999*9999*9999': expected N"),
        ("--window-size 8,0 --window-attn-skip-freq " + "9" * 5000, "9': expected N, for one layer"),
        ("--window-size " + "9" * 5000 + ",0", "9,0': expected LEFT,0"),
        ("--pp 2 --pipeline-model-parallel-layout E(t*9999)*9999L", "is more layers than any model has"),
    ],
)
def test_what_no_machine_holds_is_refused_by_arithmetic(flags: str, message: str) -> None:
    lines = problems(flags)
    assert any(message in line for line in lines), lines
    assert max(map(len, lines)) < 400


@pytest.mark.parametrize(
    ("flags", "rotated"),
    [("--rotary-percent 0.75", "0.75 rotates 3 of 4"), ("--kv-channels 5", "1.0 rotates 5 of 5")],
)
def test_channels_are_rotated_in_pairs(flags: str, rotated: str) -> None:
    """One channel fewer would be another network than the flags say, and than other programs make of them."""
    expected = f"--rotary-percent {rotated} channels per head, which go in pairs: choose a share of an even number"
    assert problems(f"--position-embedding-type rope {flags}") == [expected]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--report-to prometheus",
            "--report-to prometheus needs --prometheus-textfile FILE, or a --save that is a folder",
        ),
        ("--report-to prometheus --save memory://run", "--report-to prometheus needs --prometheus-textfile FILE"),
        (
            "--prometheus-textfile megalite.txt",
            "--prometheus-textfile megalite.txt: give a file whose name ends in .prom",
        ),
        ("--prometheus-textfile s3://bucket/a.prom", "--prometheus-textfile s3://bucket/a.prom: give a file"),
        (
            "--wandb-project p --wandb-save-dir s3://bucket/w",
            "--wandb-save-dir s3://bucket/w: Weights & Biases appends",
        ),
    ],
)
def test_files_of_sinks_are_checked(flags: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(flags)), problems(flags)
