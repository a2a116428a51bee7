"""Translation of settings: DeepSpeed's JSON, and tests of Megatron-LM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.config.parse import parse_arguments
from megalite.errors import ConfigurationError
from megalite.extras.translation import deepspeed
from megalite.extras.translation.report import Report
from megalite.extras.translation.source import translate

NETWORK = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4", "--seq-length", "8"]
PLAIN: dict[str, Any] = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 1000, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
}


LOGARITHMIC = {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}


def settings(**changes: Any) -> Report:
    return deepspeed.translate(PLAIN | changes, None)


def offloaded(stage: int, **parts: dict[str, Any]) -> dict[str, Any]:
    """Return a section with parts on the host, each with further keys."""
    return {
        "zero_optimization": {"stage": stage}
        | {f"offload_{part}": {"device": "cpu", **keys} for part, keys in parts.items()}
    }


def test_a_configuration_of_deepspeed_sets_the_same_run() -> None:
    report = settings()
    assert (report.refused, report.missing) == ([], [])
    config = parse_arguments([*NETWORK, *report.flags]).config
    training, optimizer, parallel = config.training, config.optimizer, config.parallel
    assert (training.micro_batch_size, training.global_batch_size, training.bf16) == (4, 256, True)
    assert (parallel.data_parallel_sharding_strategy, parallel.overlap_grad_reduce) == ("optim_grads", True)
    assert parallel.ddp_bucket_size == 500_000_000
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_decay_style) == (1e-4, pytest.approx(1e-5), "cosine")
    assert (optimizer.lr_warmup_iters, optimizer.lr_decay_iters, optimizer.clip_grad) == (100, 1000, 1.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-8)
    assert report.notes[0] == "the batch is for 8 data-parallel ranks"


@pytest.mark.parametrize(
    ("stage", "strategy"), [(0, None), (1, "optim"), (2, "optim_grads"), (3, "optim_grads_params")]
)
def test_each_stage_of_zero(stage: int, strategy: str | None) -> None:
    report = settings(zero_optimization={"stage": stage})
    assert parse_arguments([*NETWORK, *report.flags]).config.parallel.data_parallel_sharding_strategy == strategy


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"bf16": {}, "fp16": {"enabled": True, "loss_scale": 0}}, ["--fp16", "--initial-loss-scale", "65536"]),
        (
            {"bf16": {}, "fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 3}},
            ["--fp16", "--loss-scale", "128"],
        ),
        ({"communication_data_type": "bf16"}, ["--grad-reduce-in-bf16"]),
        (offloaded(2, optimizer={}), ["--optimizer-cpu-offload"]),
        (offloaded(3, optimizer={"ratio": 0.3}), ["--optimizer-offload-fraction", "0.3"]),
        (offloaded(1, optimizer={"pin_memory": False}), ["--no-pin-cpu-grads", "--no-pin-cpu-params"]),
        (offloaded(3, param={}), ["--parameter-offload", "--optimizer-cpu-offload"]),
        (offloaded(3, param={}, optimizer={"ratio": 0.5}), ["--optimizer-cpu-offload", "--parameter-offload"]),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, ["--optimizer-cpu-offload"]),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}}, ["--sgd-momentum", "0.9"]),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1}}}, ["--optimizer", "muon"]),
        ({"wall_clock_breakdown": True, "steps_per_print": 7}, ["--timing-interval", "7"]),
        ({"tensorboard": {"enabled": True, "output_path": "a/", "job_name": "b"}}, ["--tensorboard-dir", "a/b"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}, ["--lr-decay-style", "constant"]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_min_lr": 1e-6}}},
            ["--lr-warmup-init", "1e-06"],
        ),
    ],
)
def test_settings_of_deepspeed_that_have_a_flag(changes: dict[str, Any], flags: list[str]) -> None:
    report = settings(**changes)
    assert report.refused == []
    assert " ".join(flags) in " ".join(report.flags)
    parse_arguments([*NETWORK, *report.flags])


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "'nvme': only the host's memory",
        ),
        (offloaded(2, optimizer={"ratio": 1.5}), "offload_optimizer.ratio is 1.5"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "--overlap-cpu-optimizer-d2h-h2d"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "--num-distributed-optimizer-instances"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "are not quantized"),
        ({"optimizer": {"type": "Lamb", "params": {}}}, "SGD and Muon are translated"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "not available"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "always corrected"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "does not enter the gradient"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "use --lr-decay-style"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "--recompute-granularity full"),
        ({"wandb": {"enabled": True}}, "metrics.jsonl"),
        ({"communication_data_type": "fp16"}, "reduced in fp32 or bf16"),
        ({"gradient_cliping": 1}, "unknown key, did you mean gradient_clipping"),
        ({"zero_optimization": {"stag": 2}}, "unknown key, did you mean zero_optimization.stage"),
    ],
)
def test_what_megalite_lacks_is_refused_with_what_to_do(changes: dict[str, Any], refusal: str) -> None:
    (line,) = settings(**changes).refused
    assert refusal in line


def test_whoever_offloads_parameters_only_is_told_that_the_optimizer_goes_along() -> None:
    (note,) = [line for line in settings(**offloaded(3, param={})).notes if "host" in line]
    assert "the optimizer's state is there as well" in note
    (note,) = [line for line in settings(**offloaded(3, param={}, optimizer={"ratio": 0.5})).notes if "host" in line]
    assert "ratio 0.5" in note


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", "pin_memory": True}}},
        offloaded(0, optimizer={}),
        offloaded(2, param={}),
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}},
        {"wandb": {"enabled": False}, "flops_profiler": {"enabled": True}, "zero_allow_untested_optimizer": True},
    ],
)
def test_what_changes_nothing_is_left_out(changes: dict[str, Any]) -> None:
    report = settings(**changes)
    assert report.refused == []
    assert report.idle


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        (
            {"train_batch_size": 250},
            None,
            "250 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 8",
        ),
        ({}, 4, "256 is not .* 4 x .* 8 x 4 data-parallel ranks: change one of the three"),
        ({"train_batch_size": "many"}, None, "train_batch_size is 'many': expected a number"),
        ({"train_batch_size": 0}, None, "train_batch_size is 0: expected a number"),
        ({"fp16": {"enabled": True}}, None, "contradict each other"),
        ({"zero_optimization": {"stage": 4}}, None, "expected 0, 1, 2 or 3"),
        ({"gradient_clipping": float("nan")}, None, "gradient_clipping is nan"),
        ({"bf16": {"enabled": "false"}}, None, "bf16.enabled is 'false': expected true or false"),
        ({"zero_optimization": {"overlap_comm": "no"}}, None, "overlap_comm is 'no': expected true or false"),
    ],
)
def test_contradictions_are_errors(changes: dict[str, Any], ranks: int | None, message: str) -> None:
    report = deepspeed.translate(PLAIN | changes, ranks)
    assert any(re.search(message, line) for line in report.refused)
    assert "--adam-beta1" in report.flags  # a bad value does not hide the rest


@pytest.mark.parametrize(
    ("given", "ranks", "micro", "batch"),
    [((256, None, 8), 8, 4, 256), ((256, 4, None), 8, 4, 256), ((None, 4, 8), 8, 4, 256), ((256, 4, 8), None, 4, 256)],
)
def test_the_third_number_of_the_batch_follows(
    given: tuple[int | None, ...], ranks: int | None, micro: int, batch: int
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    config = parse_arguments([*NETWORK, "--lr", "1", *deepspeed.translate(values, ranks).flags]).config
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (micro, batch)


@pytest.mark.parametrize(
    ("optimizer", "flags"),
    [
        ({"type": "Adam"}, "--weight-decay 0 --lr 0.001"),
        ({"type": "AdamW", "params": {"lr": 1}}, "--weight-decay 0"),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "--weight-decay 0.01 --lr 0.001"),
        ({"type": "SGD", "params": {"lr": 1}}, "--weight-decay 0 --sgd-momentum 0"),
        ({"type": "Muon"}, "--weight-decay 0 --adam-eps 1e-10 --muon-momentum 0.95 --adam-beta1 0.9 --adam-beta2 0.95"),
    ],
)
def test_what_deepspeed_takes_for_absent_keys_is_said(optimizer: dict[str, Any], flags: str) -> None:
    report = deepspeed.translate({"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}, None)
    assert flags in " ".join(report.flags)
    assert " ".join(report.flags).endswith("--clip-grad 1 --lr-decay-style constant")


def test_the_code_that_makes_an_optimizer_sets_its_values() -> None:
    values = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": "auto"}
    assert deepspeed.translate(values, None).flags == ["--micro-batch-size", "1"]


def test_the_norm_of_an_optimizer_clips_gradients() -> None:
    values = {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}}
    report = deepspeed.translate(values, None)
    assert report.refused == []
    assert report.flags[report.flags.index("--clip-grad") + 1] == "0.5"


@pytest.mark.parametrize(
    ("scheduler", "flags"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 0}}, "--lr 0.5 --lr-warmup-iters 2"),
        (
            {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.5, "total_num_steps": 9, "warmup_min_lr": 0.1}},
            "--lr 0.5 --lr-warmup-iters 1000 --lr-decay-iters 9 --min-lr 0.1 --lr-warmup-init 0.1",
        ),
    ],
)
def test_the_rate_of_the_scheduler_trains(scheduler: dict[str, Any], flags: str) -> None:
    report = settings(scheduler=scheduler)
    assert report.refused == []
    assert report.flags.count("--lr") == 1
    assert flags in " ".join(report.flags)
    assert "optimizer.params.lr 0.0001: warmup_max_lr is what trains" in report.idle


@pytest.mark.parametrize(("highest", "rate"), [({}, "0.001"), ({"warmup_max_lr": None}, "0.0001")])
def test_a_scheduler_that_decays_has_a_rate_of_its_own(highest: dict[str, Any], rate: str) -> None:
    """DeepSpeed's rates for the optimizer's rate 1e-4 (https://github.com/deepspeedai/DeepSpeed/issues/7303)."""
    params = {"total_num_steps": 9, "warmup_num_steps": 2, "last_batch_iteration": -1}
    report = settings(scheduler={"type": "WarmupDecayLR", "params": params | highest})
    assert report.refused == []
    assert [report.flags[place + 1] for place, flag in enumerate(report.flags) if flag == "--lr"] == [rate]
    assert any("WarmupDecayLR then trains at 0.001" in note for note in report.notes) == (rate == "0.001")
    (line,) = settings(scheduler={"type": "WarmupLR", "params": {"last_batch_iteration": 3}}).refused
    assert line == "scheduler.params.last_batch_iteration 3: a run begins at step 0; drop it"


@pytest.mark.parametrize("decay", [0.1, 0])
def test_the_decay_of_norms_is_told(decay: float) -> None:
    report = settings(optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": decay}})
    assert any("decays norms and biases, too, which are not" in note for note in report.notes) == bool(decay)


def test_the_rates_of_a_logarithmic_warm_up_are_told() -> None:
    (line,) = [line for line in settings(scheduler=LOGARITHMIC).changed if "warmup_type" in line]
    assert line.endswith("other rates until step 100, such as 50 % of --lr in the middle instead of 85 %")


def test_a_batch_without_a_micro_batch() -> None:
    need = "--micro-batch-size: 64 / 1 / data-parallel ranks; give --ranks"
    assert deepspeed.translate({"train_batch_size": 64}, None).missing == [need]
    assert deepspeed.translate({"train_batch_size": 64}, 8).flags[:4] == [
        "--micro-batch-size",
        "8",
        "--global-batch-size",
        "64",
    ]


def test_each_automatic_value_names_its_flag() -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto"}
    missing = settings(
        scheduler=scheduler, zero_optimization=zero, train_batch_size="auto", bf16={"enabled": "auto"}
    ).missing
    named = ("--global-batch-size", "--bf16 or --no-bf16", "--lr-warmup-iters", "--lr-decay-iters")
    assert [line.partition("give ")[2] for line in missing[:4]] == list(named)


def test_what_another_program_fills_in_is_asked_for() -> None:
    report = settings(train_micro_batch_size_per_gpu="auto")
    assert report.missing == [
        'train_micro_batch_size_per_gpu is "auto", which another program fills in: give --micro-batch-size'
    ]


# ---------------------------------------------------------------------------------------------------- tests of Megatron

TEST = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  NVTE_FUSED_ATTN: 1
  LD_PRELOAD: evil.so
  PYTORCH_NVCC: evil.sh
  NCCL_NET_PLUGIN: evil.so
  NCCL_CONF_FILE: evil.conf
MODEL_ARGS:
  --num-layers: 2
  --use-mcore-models: true
  --swiglu: false
  --data-path: ${DATA_PATH}/a ${DATA_PATH}/b
  --recompute-modules: "[core_attn moe]"
  --moe-layer-freq: ([0]*1+[1]*1)
  --lr: 4.5e-4
METRICS:
  - lm loss
"""


def test_a_test_of_megatron(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(TEST)
    report = translate(str(path), {"DATA_PATH": "/data"})
    assert (report.refused, report.missing, report.environment) == ([], [], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    text = " ".join(report.flags)
    assert "--data-path /data/a /data/b" in text
    assert "--recompute-modules core_attn moe" in text
    assert report.flags[report.flags.index("--moe-layer-freq") + 1] == "([0]*1+[1]*1)"
    assert "--swiglu" not in text
    assert report.idle == ["--use-mcore-models: already so, the model has one implementation"]
    left = "NVTE_FUSED_ATTN, LD_PRELOAD, PYTORCH_NVCC, NCCL_NET_PLUGIN, NCCL_CONF_FILE"
    assert report.notes == [
        f"not kept: {left}; set what your machine needs of them yourself",
        "not read, as no flags of Megatron-LM: METRICS",
    ]
    assert translate(str(path), {}).missing == ["--data-path needs $DATA_PATH: give --set DATA_PATH=VALUE"] * 2


BOMB = b"MODEL_ARGS: &a0\n  --lr: 1\n" + b"".join(
    b"a%d: &a%d {x: *a%d, y: *a%d}\n" % (level, level, level - 1, level - 1) for level in range(1, 40)
)
"""Aliases of aliases: 120 nodes of YAML that stand for 2 ** 40 values."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.sh", b" \n", "is empty"),
        ("binary.sh", b"\x7fELF\xff\x00", "is not a text"),
        ("large.sh", b"#" * (2**18 + 1), "larger than its limit of 0.25 MiB"),
        ("twice.json", b'{"a": 1, "a": 2}', "the key 'a' is twice in one object"),
        ("list.json", b"[1]", "expected a JSON object"),
        ("broken.json", b"{", "not a DeepSpeed configuration"),
        ("other.yaml", b"a: 1", "no program that is known (what is read: a launch script (of Megatron-LM"),
        ("names.yaml", b"MODEL_ARGS:\n  ? [a]\n  : 1\n", "line 2: [ScalarNode"),
        ("many.yaml", BOMB, "has more than 25,000 values, with those that aliases repeat"),
        ("itself.yaml", b"MODEL_ARGS: &a\n  --lr: *a\n", "not YAML that can be translated"),
        ("tag.yaml", b"MODEL_ARGS:\n  --lr: !!python/object/apply:os.system ['touch x']\n", "--lr"),
        ("deep.yaml", b"[" * 5000, "not YAML that can be translated"),
        ("nul.yaml", b"MODEL_ARGS:\n  --lr: \0\n", "not YAML that can be translated"),
        ("flag.yaml", b"MODEL_ARGS:\n  learned: 1\n", "unknown flag --learned"),
        ("config.py", b"from torchtitan.config import JobConfig\n", "is Python, which is not executed (what is read"),
        (
            "recipe.txt",
            b"import torch\n\ndef pretrain(): ...\n",
            "keep configurations in Python: give megalite-pretrain",
        ),
        (
            "fsdp2.json",
            b'{"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}',
            "docs/migration.md has their flags",
        ),
        ("other.json", b'{"architectures": ["LlamaForCausalLM"]}', "no program that is known (what is read"),
        (
            "titan.sh",
            b"torchrun --nproc-per-node 8 -m torchtitan.train --module llama3\n",
            "settings of torchtitan are not translated",
        ),
        (
            "llama3_8b.toml",
            b"[training]\nsteps = 10\n",
            "torchtitan are not translated (what is read: a launch script",
        ),
        ("accelerate.yaml", b"distributed_type: FSDP\n", "docs/migration.md has their flags"),
        ("train.hcl", b"model = Foo ((", "line 1: not a shell script from 'model = Foo ((' on (what is read: a launch"),
        ("none.sh", b"ls\n", "starts a training program"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    try:
        lines = translate(str(path), {}).refused
    except ConfigurationError as error:
        lines = str(error).splitlines()
        assert lines[0].startswith(f"{path}: ")
    assert len(lines) == 1
    assert message in lines[0]


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Is a directory"):
        translate(str(tmp_path), {})
    with pytest.raises(ConfigurationError, match="No such file"):
        translate(str(tmp_path / "no.sh"), {})


def test_a_number_that_is_no_count_is_refused() -> None:
    assert "train_batch_size is 1e+308: expected a number" in settings(train_batch_size=1e308).refused


def test_json_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PLAIN))
    assert translate(str(path), {}).flags == settings().flags
