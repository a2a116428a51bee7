"""Megatron-LM's flags that are no field here: what becomes of each, in one place.

A flag of Megatron-LM is a field of the dataclasses, another spelling of one (`ALIASES`, `SHORTHANDS`,
`VALUE_SHORTHANDS`), accepted because it is already so (`ALREADY_SO`, and `ACCEPTED_VALUES` at the values given there),
or refused with a reason. None is ignored. Names are those of Megatron-LM d98e8a64 (2026-08-22), without the leading
dashes and with hyphens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from megalite.config.activations import MEGATRON_ALONE
from megalite.errors import ConfigurationError

ALIASES: Mapping[str, str] = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "encoder-num-layers": "num-layers",
    "encoder-seq-length": "seq-length",
    "persistent-save-interval": "save-interval",
}
"""Other names of a flag; its values follow."""

SHORTHANDS: Mapping[str, Sequence[str]] = {
    "disable-bias-linear": ("--no-add-bias-linear",),
    "dataloader-inter-document-masking": ("--reset-attention-mask",),
    "disable-manual-gc-eval": ("--no-manual-gc-eval",),
    "disable-log-loss-scale-to-tensorboard": ("--no-log-loss-scale-to-tensorboard",),
    "disable-align-grad-reduce": ("--no-align-grad-reduce",),
    "use-torch-fsdp2": ("--data-parallel-sharding-strategy", "optim_grads_params"),
    "recompute-activations": ("--recompute-granularity", "selective"),
    "use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
}
"""Flags without a value that stand for another flag and its value."""

VALUE_SHORTHANDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "cross-entropy-fusion-impl": {"linear": ("--fused-linear-cross-entropy",)},
}
"""Values at which a flag stands for another."""

NO_POSITION_EMBEDDING = "no-position-embedding"
"""Turns the learned table off and leaves rotary embeddings alone: so it is applied after all other flags."""

USE_MEGATRON_FSDP = "use-megatron-fsdp"
"""ZeRO 3, unless another flag or the YAML names a sharding strategy: applied last, too."""

NO_BIAS_GELU_FUSION = "no-bias-gelu-fusion"
"""A field, which also makes GELU exact, as Megatron-LM's is unless fused, and leaves other activations alone: applied
last, too."""

CALCULATE_PER_TOKEN_LOSS = "calculate-per-token-loss"
"""Already so; who gives it expects no other average of masked losses."""

ALREADY_SO: Mapping[str, str] = {
    "attention runs through torch's fused kernels, with its softmax in fp32": """
    use-flash-attn attention-softmax-in-fp32 apply-query-key-layer-scaling""",
    "the model has one implementation": "use-mcore-models",
    "the softmax is part of attention, and has no kernel of its own": "no-masked-softmax-fusion",
    "torch's own matrix products add weight gradients up": "no-gradient-accumulation-fusion",
    "layers are compiled by --compile alone": "disable-jit-fuser",
    "a residual is added in the norm's kernel, unless --no-bias-dropout-fusion": "fused-residual-rmsnorm",
    "GELU is in its tanh form, unless --exact-gelu": "openai-gelu",
    "a rank posts every receive from its neighbours ahead, also while a pipeline fills and drains": """
    overlap-p2p-communication-warmup-flush""",
    "each module waits for the gather of its own parameters, whatever other pipeline ranks do": "no-align-param-gather",
    "the loss is the sum over the tokens of the global batch over their count": CALCULATE_PER_TOKEN_LOSS,
    "initial weights are drawn on the CPU, the same for every layout": "use-cpu-initialization",
    "gradients are accumulated and reduced in fp32 unless --grad-reduce-in-bf16": "accumulate-allreduce-grads-in-fp32",
    "a gradient that is not finite makes every rank skip the step, and the run ends after ten in a row": """
    no-check-for-nan-in-loss-and-grad""",
    "SIGTERM, SIGINT and SIGUSR1 always save and exit": "exit-signal-handler exit-signal-handler-for-training",
    "data are read by threads, which have no signals of their own": "exit-signal-handler-for-dataloader",
    "in a profile for nsys all operations, actions and sections are NVTX ranges": "nvtx-ranges",
    "what is recorded is written at once, through no queue": "tensorboard-queue-size=1",
    "ranks are read from the environment that torchrun sets": "local-rank=1",
    "masks are made from document ids where attention needs them": "no-create-attention-mask-in-dataloader",
    "sample indices are computed at once, found by content and mapped into memory": """
    num-dataset-builder-threads=1 dataloader-fast-cache-load dataloader-defer-npy-index-mmap""",
    "tools/preprocess_data.py turns text into tokens, and takes this flag (--fast-encoding)": "use-gigatoken",
    "tools/preprocess_data.py turns text into tokens, and takes this flag": "tokenizer-hf-no-include-special-tokens",
    "a SentencePiece model treats spaces as it was trained to": """
    no-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tokenizer-sentencepiece-ignore-extra-whitespaces""",
    "the tokenizer is always the one of --tokenizer-model": """
    no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args""",
    "learning rate and weight decay follow the flags and the samples consumed: no checkpoint holds a schedule": """
    override-opt-param-scheduler""",
    "dropout and the order of the data follow from the seed and the sample's number: there is no random state": """
    no-load-rng no-save-rng""",
    "what is loaded is compared with its checksums": "verify-integrity",
    "ranks that hold the same share the writing and the reading of it": """
    ckpt-fully-parallel-save ckpt-fully-parallel-load""",
    "what a rank saves follows from the layout alone, and no rank is asked for it": "ckpt-assume-constant-structure",
    "with --async-save one thread of each rank writes, for as long as the run lasts": "use-persistent-ckpt-worker",
    "a checkpoint has no layout, and nothing is gathered to save it": """
    dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient""",
    "a checkpoint holds weights and optimizer state alone": """
    ckpt-drop-redundant-extra-state no-save-tokenizer-assets disable-save-tokenizer-assets""",
    "a checkpoint of either --ckpt-format is loaded, and says itself which it is": "auto-detect-ckpt-format",
    "every step records its throughput and its peak memory": """
    log-throughput log-memory-to-tensorboard log-memory-interval=1""",
    "the sections of a step are timed on every rank, without barriers, and told by --timing-interval": """
    no-barrier-with-level-1-timing log-timers-to-tensorboard log-straggler""",
    "torch's flight recorder keeps the stack of each collective, and of each group the last ones are dumped": """
    flight-recorder-include-stack-trace no-flight-recorder-include-only-active
    disable-flight-recorder-include-only-active""",
    "nothing is reported to other services, and object stores are reached by URLs": "no-one-logger disable-msc",
}
"""Facts that hold anyway -> flags that ask for them, with =1 where the flag takes a value."""

CONTEXT = "arrives with context parallelism"
EXPERTS = "arrives with mixture of experts"
MESSAGES = "is not there: stages send to each other point to point, through --distributed-backend"
PUT_OFF = "is not there: --pipeline-schedule zb-h1 puts off the weight gradients of all layers to where a rank waits"
GATHER = "is not there: gathers begin behind the whole update; --overlap-param-gather hides them behind forward"
MATRICES = "is not there: Muon acts on queries, keys, values, gates and ups each as a whole matrix, on any layout"
SHARDING = "is not there: shard by --data-parallel-sharding-strategy and --num-distributed-optimizer-instances"
WEIGHT_DECAY = "is not there: matrices and token tables decay, biases and norms do not"
WIDE_LOSS = "is not there: the loss is computed in fp32 or wider"
TOKENIZERS = "is not there: a tokenizer is its files, and encodes as its own library does"
ORDER = "is not there: the order of samples is fixed when the run starts, and one number resumes it"
EVALUATION = "is not there: every evaluation reads --eval-iters batches of one set"
SCHEDULE = "is not there: the schedule is this run's flags; where they differ from the checkpoint's a note says so"
PRETRAINED = "is --load DIR --finetune here; with --resume auto a restart continues what it saved"
LAYOUT = "is not there: a checkpoint has no layout; give the one that this run is to have"
STRICT = "is not there: a missing or an unexpected tensor is an error"
LOCAL = "is not there: save often by --save-interval, hide it by --async-save, keep few by --save-retain-interval"
BACKGROUND = "is not there: each rank writes one file, with --async-save from a thread of its own"
SHARED = "is not there: ranks that hold the same always share the writing of it"
WHOLE = "is not there: each save and each load checks that every element is there once, which asks no rank"
POSITION = "is not there: what is loaded goes on where it was saved, or at step 0 by --finetune"
CONVERSION = "is not there: tools/checkpoint/reshard.py --ckpt-format writes a checkpoint anew in the other format"
FAMILIES = "arrives with the model families and their conversion"
SYMMETRIC = "is not there: Newton-Schulz multiplies by torch's own matrix products"
CHAKRA = (
    "is not there: --pytorch-profiler-collect-shapes and -callstack write what torch's profiler knows into its trace"
)
COMPARISON = "is not there: nothing compares replicas while a run lasts; they are computed alike, bit for bit"
SKIPPING = "is not there: every batch is trained on"
DEVICE_FIGURES = "is not there: nvidia-smi and DCGM measure the device; every step records its peak of allocated memory"
WANDB = "is not there: figures go to metrics.jsonl and to TensorBoard's files, from where other services take them"
LEVELS = "is not there: one rank tells what a person is to know, and --log-interval says how often"
INJECTION = "is not there: a run plants no faults in itself"
LARGE = "is not there: what is large and finite is clipped by --clip-grad; metrics.jsonl has loss and grad_norm a step"
TIMING = "is not there: --timing-interval always tells the median of the ranks, and the slowest one"
RECORDER = "is not there: torch's recorder is on, TORCH_FR_BUFFER_SIZE says for how many collectives"
DUMPS = "is not there: when a run hangs the watchdog has each rank write into DIR/hangs, unless --no-watchdog"
WATCHDOG = "is not there: a section may take five times the longest so far, and at least --watchdog-min-seconds"
TRANSFORMER_ENGINE = "needs Transformer Engine, which megalite does without"
NOT_GPT = "is not for pre-training a GPT (vision, BERT, T5, retrieval, distillation, reinforcement learning)"
INFERENCE = "is for an inference server; tools/generate.py samples from a checkpoint"
ARCHITECTURE = "is for an architecture that megalite does not have"
MACHINERY = "steers machinery of Megatron-LM that has no counterpart in megalite"

REMOVED: Mapping[str, str] = {
    "model-parallel-size": "--tensor-model-parallel-size",
    "batch-size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
    "checkpoint-activations": "--recompute-activations",
    "use-dist-ckpt": "--ckpt-format",
    "dist-ckpt-format": "--ckpt-format",
    "sft-tokenizer-prompt-format": "--chat-template",
    "padded-vocab-size": "--make-vocab-size-divisible-by",
    "no-pad-vocab-size": "--make-vocab-size-divisible-by 1",
    "disable-pad-vocab-size": "--make-vocab-size-divisible-by 1",
    "yaml-cfg": "--config",
}
"""Flags that are gone -> what to use."""

ACCEPTED_VALUES: Mapping[str, tuple[str, str]] = {
    "muon-tp-mode": ("duplicated", MATRICES),
    "muon-scalar-optimizer": ("adam", MACHINERY),
    "attention-backend": ("auto flash fused unfused local", "is none of Megatron-LM's; torch chooses the kernel"),
    "outer-dp-sharding-strategy": ("no_shard", SHARDING),
    "dataloader-type": ("single", ORDER),
    "dist-ckpt-strictness": ("raise_all", STRICT),
    "dist-ckpt-workers": ("1", BACKGROUND),
    "timing-log-level": ("0 1", TIMING),
    "timing-log-option": ("minmax max", TIMING),
    "flight-recorder-trace-buffer-size": ("2000", RECORDER),
    "cross-entropy-fusion-impl": ("native", TRANSFORMER_ENGINE),
    "transformer-impl": ("local transformer_engine", INFERENCE),
    "softmax-type": ("vanilla", ARCHITECTURE),
    "vocab-extra-ids": ("0", NOT_GPT),
    "recompute-modules": ("core_attn", MACHINERY),
    "cpu-offloading-num-layers": ("0", MACHINERY),
    "cuda-graph-impl": ("none", MACHINERY),
    "empty-unused-memory-level": ("0", MACHINERY),
    "exit-signal": ("SIGTERM SIGINT SIGUSR1", "is not there: these three always save and exit"),
    "error-injection-rate": ("0", INJECTION),
}
"""Flags that are already so at these values -> why others are refused."""

REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "dist_muon": "is --optimizer muon: with --use-distributed-optimizer its state is sharded like any other",
        **dict.fromkeys(("lion", "soap", "adaptive_muon"), MACHINERY),
    },
    "muon-coefficient-type": {"aol": "is not there: they go with another normalization of the matrix"},
    "muon-fp32-matmul-prec": {"low": "is no precision that torch knows (medium: bf16; high)"},
    "ckpt-format": {
        "torch": "is not written: it fits one layout; megalite, the default, and torch_dist fit any",
        "torch_dcp": "is --ckpt-format torch_dist here: files that torch.distributed.checkpoint reads",
        "fsdp_dtensor": "is --ckpt-format torch_dist here, whatever --data-parallel-sharding-strategy says",
        "zarr": "was removed, use torch_dist",
    },
    "exp-avg-sq-dtype": {
        "fp16": "is not there: squares below 6e-8, of gradients below 2e-4, would be zero (bf16 has fp32's range)",
    },
    "rerun-mode": {
        "report_stats": "is not there: a step is run again only where its gradient is not finite (validate_results)",
    },
    "position-embedding-type": dict.fromkeys(("mrope", "relative"), NOT_GPT),
    "tokenizer-type": {
        "SFTTokenizer": "is not there: --sft works with every tokenizer, and its chat template or --chat-template",
        **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), NOT_GPT),
        **dict.fromkeys(("MultimodalTokenizer", "NullMultimodalTokenizer"), NOT_GPT),
    },
}
"""Values of Megatron-LM that a field here does not take, and why."""

REFUSED: Mapping[str, str] = {
    MESSAGES: "pipeline-model-parallel-comm-backend use-ring-exchange-p2p",
    PUT_OFF: "defer-embedding-wgrad-compute wgrad-deferral-limit",
    GATHER: "overlap-param-gather-with-optimizer-step",
    CONTEXT: """
    hierarchical-context-parallel-sizes max-seqlen-per-dp-cp-rank hybrid-context-parallel cp-comm-type
    """,
    EXPERTS: """
    expert-tensor-parallel-num-weight-shards overlap-moe-expert-parallel-comm delay-wgrad-compute
    overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release use-fused-weighted-squared-relu
    high-priority-a2a-comm-stream moe-shared-expert-intermediate-size moe-shared-expert-gate moe-shared-expert-overlap
    use-grouped-gemm-for-shared-expert moe-shared-expert-glu-interleave-size moe-ffn-hidden-size moe-router-topk
    moe-enable-routing-replay moe-router-padding-for-quantization moe-router-padding-for-fp8 moe-router-num-groups
    moe-router-group-topk moe-router-pre-softmax moe-router-topk-scaling-factor moe-router-score-function
    moe-router-dtype moe-router-enable-expert-bias moe-router-bias-update-rate moe-router-quantile-balancing-ema
    moe-router-force-load-balancing moe-router-force-biased moe-grouped-gemm moe-use-grouped-tensor
    moe-single-grouped-weight moe-single-grouped-bias moe-z-loss-coeff moe-input-jitter-eps moe-token-dispatcher-type
    moe-enable-deepep moe-flex-dispatcher-backend moe-permute-fusion-into-hybridep
    moe-hybridep-pad-uneven-dispatch-inputs moe-per-layer-logging moe-expert-capacity-factor
    moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference moe-token-drop-policy moe-layer-recompute
    moe-permute-fusion moe-router-fusion moe-apply-probs-on-input moe-latent-size moe-flex-dispatcher-num-sms
    moe-deepep-num-sms moe-hybridep-num-sms moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute
    moe-hybridep-num-sms-preprocessing moe-ncclep-zero-copy moe-dispatch-fwd-dtype moe-combine-bwd-dtype
    moe-mlp-glu-interleave-size moe-expert-rank-capacity-factor moe-paged-stash moe-paged-stash-page-size
    moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu num-experts moe-layer-freq
    moe-use-upcycling moe-router-load-balancing-type moe-aux-loss-coeff moe-upcycling-granularity moe-routing-trace-path
    moe-routing-trace-max-training-iters moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states
    moe-routing-trace-dump-weights
    """,
    SHARDING: "ddp-num-buckets enable-full-sharding-in-hsdp torch-fsdp2-no-reshard-after-forward",
    WEIGHT_DECAY: "apply-wd-to-qk-layernorm no-weight-decay-cond-type",
    WIDE_LOSS: "fp16-lm-cross-entropy",
    MATRICES: "muon-no-split-qkv",
    TOKENIZERS: """
    tokenizer-metadata tokenizer-sentencepiece-legacy null-tokenizer-eod-id null-tokenizer-pad-id
    tokenizer-hf-no-use-fast
    """,
    EVALUATION: """
    full-validation multiple-validation-sets validation-set-names
    """,
    SCHEDULE: "use-checkpoint-opt-param-scheduler",
    PRETRAINED: "pretrained-checkpoint",
    LAYOUT: "use-mp-args-from-checkpoint-args",
    LOCAL: """
    non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir
    non-persistent-local-ckpt-algo replication replication-jump replication-factor
    """,
    BACKGROUND: "async-strategy async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm",
    SHARED: "no-ckpt-fully-parallel-save",
    WHOLE: "no-ckpt-load-validate-sharding-integrity disable-ckpt-load-validate-sharding-integrity",
    POSITION: "override-ckpt-iteration",
    CONVERSION: "ckpt-convert-format ckpt-convert-save",
    FAMILIES: """
    load-main-params-from-ckpt skip-train
    """,
    SYMMETRIC: "muon-use-syrk",
    CHAKRA: "pytorch-profiler-collect-chakra",
    COMPARISON: "check-weight-hash-across-dp-replicas-interval",
    SKIPPING: "iterations-to-skip",
    DEVICE_FIGURES: "log-device-memory-used log-energy",
    WANDB: "wandb-project wandb-exp-name wandb-save-dir wandb-entity",
    LEVELS: "logging-level",
    INJECTION: "error-injection-type",
    LARGE: "check-for-large-grads check-for-spiky-loss",
    WATCHDOG: "distributed-timeout-seconds-after-init",
    DUMPS: """
    flight-recorder-dump-path no-flight-recorder-dump-on-timeout disable-flight-recorder-dump-on-timeout
    no-flight-recorder-extra-dump-on-exec disable-flight-recorder-extra-dump-on-exec
    """,
    TIMING: "straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup",
    TRANSFORMER_ENGINE: """
    tp-comm-overlap no-tp-comm-bulk-wgrad disable-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad disable-tp-comm-bulk-dgrad
    no-tp-comm-overlap-ag disable-tp-comm-overlap-ag no-tp-comm-overlap-rs disable-tp-comm-overlap-rs
    tp-comm-overlap-rs-dgrad no-tp-comm-split-ag disable-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-split-rs
    tp-comm-bootstrap-backend use-transformer-engine-op-fuser fp8-format fp8-recipe fp8-quantizer-factory fp8-margin
    fp8-interval fp8-amax-history-len fp8-amax-compute-algo no-fp8-wgrad disable-fp8-wgrad fp8-output-proj
    first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 use-kitchen-attention
    kitchen-attention-backend fp4-format fp4-recipe fp4-quantizer-factory use-grouped-gemm-for-dense-mlp
    use-te-activation-func tp-comm-overlap-cfg te-rng-tracker reuse-grad-buf-for-mxfp8-param-ag keep-fp8-transpose-cache
    fp4-param-gather fp8-param-gather te-precision-config-file
    """,
    NOT_GPT: """
    mrope-section decoder-num-layers relative-attention-num-buckets relative-attention-max-distance onnx-safe
    bert-no-binary-head perform-rl-step rl-prompts-per-eval grpo-prompts-per-step grpo-group-size rl-generation-lag
    rl-max-inflight-requests rl-submission-granularity rl-consumption-granularity rl-durable-rollout-bank
    rl-rollout-bank-dir rl-rollout-bank-max-bytes grpo-iterations grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta
    grpo-entropy-term-weight grpo-filter-groups-with-same-reward langrl-env-config rl-default-temperature
    rl-default-top-p rl-default-top-k rl-offload-optimizer-during-inference rl-kv-cache-management-mode
    rl-persist-cuda-graphs no-rl-persist-cuda-graphs rl-partial-rollouts no-rl-partial-rollouts
    rl-inference-logprobs-is-correction no-rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef
    rl-use-sequence-packing no-rl-use-sequence-packing rl-sequence-packing-max-sequences-per-bin
    rl-sequence-packing-algo rl-training-cuda-graphs no-rl-training-cuda-graphs rl-inference-tensor-model-parallel-size
    rl-inference-pipeline-model-parallel-size rl-inference-expert-model-parallel-size
    rl-inference-expert-tensor-model-parallel-size rl-inference-model-unified-memory-level
    rl-offload-inference-model-weights-when-idle no-rl-offload-inference-model-weights-when-idle refit-method
    rl-verify-model-weights-swap no-rl-verify-model-weights-swap rl-skip-bos-token no-rl-skip-bos-token rl-profile
    rl-profile-dir rl-inference-parsers decoder-seq-length sample-rate mask-prob short-seq-prob ict-head-size
    biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load titles-data-path
    query-in-block-prob use-one-sent-docs evidence-data-path retriever-report-topk-accuracies retriever-score-scaling
    block-data-path embedding-path indexer-batch-size indexer-log-interval num-classes img-h img-w num-channels
    patch-dim classes-fraction data-per-class-fraction no-data-sharding head-lr-mult vision-pretraining
    vision-pretraining-type vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch
    dino-local-img-size dino-local-crops-number dino-head-hidden-size dino-bottleneck-size dino-freeze-last-layer
    dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp dino-warmup-teacher-temp-epochs logits-save-top-k
    logits-save-top-p logits-save-top-p-min-k logits-save-dir logits-save-dtype logits-load-dir
    logits-load-decode-threads logits-load-prefetch-factor logits-load-msc-prefetch-depth logits-load-kd-loss-alpha
    logits-load-ignore-errors output-bert-embeddings bert-embedder-type
    """,
    INFERENCE: """
    inference-cuda-graph-scope flash-decode symmetric-ar-type nccl-all-reduce-for-prefill
    inference-fuse-tp-communication inference-disable-triton-nvls-kernels inference-grouped-gemm-backend
    inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type mlp-chunks-for-prefill
    inference-rng-tracker inference-batch-times-seqlen-threshold max-tokens-to-oom use-legacy-static-engine
    inference-max-requests inference-max-seq-length inference-dynamic-batching inference-dynamic-batching-buffer-size-gb
    inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-mamba-memory-ratio
    inference-dynamic-batching-block-size inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens
    inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-track-paused-request-events
    inference-dynamic-batching-track-generated-token-events decode-only-cuda-graphs inference-cuda-graph-all-prefills
    inference-cuda-graph-max-tokens inference-dynamic-batching-unified-memory-level enable-chunked-prefill
    num-speculative-tokens inference-dynamic-batching-prefix-caching no-inference-dynamic-batching-prefix-caching
    inference-dynamic-batching-prefix-caching-eviction-policy
    inference-dynamic-batching-prefix-caching-coordinator-policy inference-dynamic-batching-prefix-caching-routing-alpha
    inference-dynamic-batching-prefix-caching-mamba-gb inference-dynamic-batching-cuda-graph-mixed-prefill-count
    inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-sampling-backend
    use-same-sampling-seed-across-dp-ranks inference-dynamic-batching-async-sched-mode
    inference-dynamic-batching-logprobs-mode inference-logging-step-interval inference-text-gen-server-logging
    no-inference-text-gen-server-logging inference-wandb-logging no-inference-wandb-logging inference-coordinator-port
    mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype inference-use-synchronous-zmq-collectives
    no-inference-use-synchronous-zmq-collectives inference-disable-ep-consensus no-inference-disable-ep-consensus
    inference-shards
    """,
    ARCHITECTURE: f"""
    {" ".join(MEGATRON_ALONE).replace("_", "-")}
    mtp-standalone mtp-num-layers mtp-loss-scaling-factor mtp-use-repeated-layer mtp-detach-heads mtp-hsm
    mtp-hybrid-override-pattern fp32-residual-connection apply-residual-connection-post-layernorm glu-linear-offset
    activation-func-clamp-value qk-l2-norm qk-clip qk-clip-alpha qk-clip-threshold attention-output-gate
    multi-latent-attention experimental-attention-variant dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk
    dsa-indexer-topk-freq dsa-indexer-skip-topk-offset dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss
    dsa-kernel-backend dsa-indexer-rope-interleaved no-dsa-indexer-rotate-activation
    disable-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu disable-dsa-indexer-scoring-relu
    dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32 linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim
    linear-num-key-heads linear-num-value-heads enable-mhc-connections mhc-num-residual-streams mhc-sinkhorn-iterations
    mhc-init-gating-factor mhc-recompute-layer-num is-hybrid-model mamba-state-dim mamba-head-dim mamba-num-groups
    mamba-num-heads gdp-num-householder disable-mamba-mem-eff-path gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute
    no-rope-freq rope-type mamba-training-ssm-states-dtype q-lora-rank kv-lora-rank qk-head-dim
    qk-pos-emb-head-dim v-head-dim cache-mla-latents mla-down-proj-fusion linear-attention-freq
    heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
    log-max-attention-logit hybrid-layer-pattern hybrid-override-pattern
    """,
    MACHINERY: """
    ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
    ckpt-fully-parallel-save-process-group ckpt-fully-parallel-load-process-group ckpt-pg-tensors-cache-path
    ckpt-pg-tensors-cache-create ckpt-convert-update-legacy-dist-opt-format no-strict-fsdp-dtensor-load
    disable-strict-fsdp-dtensor-load dist-ckpt-save-pre-mcore-014
    step-batch-size-schedule decrease-batch-size-if-needed phase-transition-iterations per-dataset-sequences-path
    allow-ambiguous-pad-tokens tensor-parallel-num-weight-shards no-initialization
    cpu-offloading-retain-pinned-cpu-buffers flash-attention-version embedding-init-method-std
    init-model-with-meta-device use-mup mup-width-mult mup-base-hidden-size mup-embedding-mult mup-output-mult
    mup-base-head-dim mup-attn-scale-power disable-bf16-reduced-precision-matmul distribute-saved-activations
    gtp-remat-opt-in-modules enable-cuda-graph cuda-graph-warmup-steps external-cuda-graph
    no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding config-logger-dir
    batch-invariant-mode batch-invariant-backend mlp-chunks-for-training fine-grained-activation-offloading
    offload-modules min-offloaded-tensor-size delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks
    activation-offload-fraction fine-grained-offloading-max-inflight-offloads lion-beta1 lion-beta2
    gpu-sniff-test-interval train-sync-interval result-rejected-tracker-filename optimizer-cpu-offload
    optimizer-cuda-graph optimizer-offload-fraction use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d
    dump-param-to-param-group-map no-pin-cpu-grads no-pin-cpu-params data-parallel-random-init
    init-method-xavier-uniform freeze-all-layers save-params-interval save-activations-interval
    save-tokens-per-expert-interval save-wgrads-interval save-dgrads-interval output-logit-dtype lazy-mpu-init
    nccl-communicator-config-path use-tp-pp-dp-mapping disable-gloo-process-groups use-sharp sharp-enabled-group
    high-priority-stream-groups ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation
    gtp-remat-reduce-scatter-with-fp32-accumulation ddp-param-name-patterns-for-fp32-local-accumulation
    ddp-average-in-collective megatron-fsdp-version no-use-layer-wise-param-layout use-nccl-ub
    disable-symmetric-registration gtp-remat-nccl-ub gtp-expert-remat-nccl-ub fsdp-manual-registration
    create-all-gather-group no-gradient-reduce-div-fusion fsdp-double-buffer suggested-communication-unit-size
    fake-process-group start-eval-at-iter eval-global-batch-size eval-micro-batch-size test-mode
    object-storage-cache-path trust-remote-code adlr-autoresume adlr-autoresume-interval otel-enabled otel-service-name
    otel-span-groups run-workload-inspector-server cuda-graph-scope cuda-graph-modules enable-experimental spec
    megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype
    megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer
    fsdp-db-use-persist-buf-on-alloc-fail one-logger-project one-logger-run-name one-logger-async app-tag-run-name
    app-tag-run-version inprocess-restart inprocess-max-iterations inprocess-monitor-thread-interval
    inprocess-monitor-process-interval inprocess-progress-watchdog-interval inprocess-heartbeat-interval
    inprocess-soft-timeout inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout
    inprocess-completion-timeout inprocess-last-call-wait inprocess-termination-grace-time inprocess-granularity
    inprocess-active-world-size inprocess-empty-cuda-cache enable-ft-package calc-ft-timeouts ft-num-warmup-iters
    enable-msc fault-injector-ranks
    fault-injector-num-ranks fault-injector-fault-types fault-injector-fault-probabilities fault-injector-fault-delay
    fault-injector-delay-start-iteration fault-injector-mtti-seconds fault-injector-offset-seconds fault-injector-seed
    """,
}
"""Reason -> flags refused for it."""


def settled(flag: str, values: Sequence[str]) -> str | None:
    """Decide on `flag` (without dashes) that is no field: the start-up line if it is already so, or None for a
    flag unknown to Megatron-LM too. Raises ConfigurationError, saying why, if it is refused."""
    if flag in _already_so():
        count, why = _already_so()[flag]
        if len(values) != count:
            takes = "one value" if count else "no value"
            raise ConfigurationError(f"--{flag} takes {takes}, got {' '.join(values) or 'none'}")
        if not all(value.removeprefix("-").isdigit() for value in values):
            raise ConfigurationError(f"--{flag} takes a whole number, got {values[0]!r}")
        return f"--{flag}: already so, {why}"
    if flag in ACCEPTED_VALUES:
        accepted, why = ACCEPTED_VALUES[flag]
        taken = " ".join([accepted, *VALUE_SHORTHANDS.get(flag, ())])
        if not values:
            raise ConfigurationError(f"--{flag} needs a value: {_one_of(taken)}")
        others = [value for value in values if value not in accepted.split()]
        if others:
            raise ConfigurationError(f"--{flag} {' '.join(others)}: {why}; it takes {_one_of(taken)}")
        return f"--{flag} {' '.join(values)}: already so"
    reason = refusal(flag)
    if reason:
        raise ConfigurationError(f"--{flag} {reason}")
    return None


def refusal(flag: str) -> str | None:
    """Return why `flag` is refused whatever its value, or None."""
    return f"was removed, use {REMOVED[flag]}" if flag in REMOVED else _refused().get(flag)


def refused_value(flag: str, value: str) -> str | None:
    """Return why a value that Megatron-LM gives to a field's flag is refused here, or None."""
    return REFUSED_VALUES.get(flag, {}).get(value)


def names() -> list[str]:
    """Every flag of the tables."""
    applied_last = (NO_POSITION_EMBEDDING, USE_MEGATRON_FSDP)
    return [*ALIASES, *SHORTHANDS, *applied_last, *_already_so(), *ACCEPTED_VALUES, *REMOVED, *_refused()]


@cache
def _already_so() -> dict[str, tuple[int, str]]:
    entries = ((entry.partition("="), why) for why, flags in ALREADY_SO.items() for entry in flags.split())
    return {name: (int(count or 0), why) for (name, _, count), why in entries}


@cache
def _refused() -> dict[str, str]:
    return {flag: reason for reason, flags in REFUSED.items() for flag in flags.split()}


def _one_of(accepted: str) -> str:
    return " or ".join(accepted.split())
