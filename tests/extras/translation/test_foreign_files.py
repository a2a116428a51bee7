"""Programs that speak Megatron-LM's flags with words of their own; nothing that a file says is left out in silence."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config.parse import parse_arguments
from megalite.errors import ConfigurationError
from megalite.extras.translation.dialects import MEGATRON_DEEPSPEED, NEOX, PRIMUS, words_of
from megalite.extras.translation.megatron_deepspeed import add_megatron_deepspeed
from megalite.extras.translation.report import Report
from megalite.extras.translation.source import translate

NETWORK = "--num-layers 6 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
BATCH = "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3"
PYTHIA: dict[str, Any] = {
    "pipe_parallel_size": 0,
    "model-parallel-size": 2,
    "num_layers": 6,
    "hidden_size": 640,
    "num_attention_heads": 8,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-6,
    "pos_emb": "rotary",
    "rotary_pct": 0.25,
    "no_weight_tying": True,
    "gpt_j_residual": True,
    "output_layer_parallelism": "column",
    "attention_config": [[["flash"], 6]],
    "bias_gelu_fusion": False,
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8}},
    "min_lr": 0.0001,
    "weight_decay": 0.05,
    "zero_optimization": {"stage": 1, "overlap_comm": True, "cpu_offload": False},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "checkpoint_activations": True,
    "checkpoint_num_layers": 1,
    "partition_activations": True,
    "hidden_dropout": 0,
    "fp16": {"fp16": True, "enabled": True, "loss_scale": 0, "initial_scale_power": 12},
    "train_iters": 1000,
    "lr_decay_iters": 1000,
    "lr_decay_style": "cosine",
    "warmup": 0.01,
    "save": "run/pythia",
    "checkpoint_factor": 100,
    "extra_save_iters": [0, 1, 2],
    "train_data_paths": ["a", "b"],
    "train_data_weights": [1, 2.5],
    "valid_data_paths": ["c"],
    "tokenizer_type": "HFTokenizer",
    "vocab_file": "tokenizer.json",
    "hostfile": "/mock",
}
OVERRIDES: dict[str, Any] = {
    "stderr_sink_level": "DEBUG",
    "train_iters": 50,
    "micro_batch_size": 4,
    "lr": 1.0e-5,
    "lr_decay_iters": None,
    "eod_mask_loss": True,
    "sequence_parallel": 1,
    "gradient_accumulation_fusion": False,
    "add_position_embedding": False,
    "auto_continue_train": True,
    "save": "${SAVE:run/7b}",
    "train_data_path": ["1", "x"],
    "tokenizer_type": "Llama3Tokenizer",
    "swiglu": False,
    "use_turbo_attention": True,
}
PRIMUS_FILE = {
    "work_group": "amd",
    "modules": {"pre_trainer": {"framework": "megatron", "model": "llama2_7B.yaml", "overrides": OVERRIDES}},
}
TEST_OF_MEGATRON = {
    "ENV_VARS": {"NVTE_FUSED_ATTN": 1, "CUDA_DEVICE_MAX_CONNECTIONS": 1},
    "MODEL_ARGS": {"--num-layers": 2, "--lr": 1e-4, "--data-path": "${DATA}/a", "--use-mcore-models": True},
    "TEST_TYPE": "regular",
}
DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "last_batch_iteration": 7}},
    "wandb": {"enabled": True},
}
WHOLE = [("wandb",)]
"""Sections that are refused as one."""
FILES = {"neox.yml": PYTHIA, "primus.yaml": PRIMUS_FILE, "test.yaml": TEST_OF_MEGATRON, "ds.json": DEEPSPEED}


def report_of(folder: Path, name: str, settings: Mapping[str, Any]) -> Report:
    path = folder / name
    path.write_text(json.dumps(settings) if name.endswith("json") else yaml.safe_dump(settings, sort_keys=False))
    return translate(str(path), {}, 8)


def said(report: Report) -> list[str]:
    return [*report.lines(), *report.flags, *map(str, report.environment.items())]


def places(settings: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each mapping in a file."""
    yield path
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from places(value, (*path, name))


def at(settings: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        settings = settings[name]
    return settings


@pytest.mark.parametrize("name", FILES)
def test_nothing_that_a_file_says_is_left_out_in_silence(name: str, tmp_path: Path) -> None:
    """An unheard-of key is named wherever it stands; and without any of its keys a file has another translation."""
    usual = said(report_of(tmp_path, name, FILES[name]))
    for path in places(FILES[name]):
        for value in ("text", True, [[1]], {"inner": 1}):
            changed = copy.deepcopy(FILES[name])
            at(changed, path)["unheard_of"] = value
            named = "unheard" in " ".join(said(report_of(tmp_path, name, changed)))
            assert named or path in WHOLE, (path, value)
        for key in at(FILES[name], path) if path not in WHOLE else ():
            changed = copy.deepcopy(FILES[name])
            del at(changed, path)[key]
            try:
                others = said(report_of(tmp_path, name, changed))
            except ConfigurationError:  # of a file that is of no program without it
                continue
            assert others != usual, (path, key)


def test_settings_of_gpt_neox_are_the_same_network_and_run(tmp_path: Path) -> None:
    report = report_of(tmp_path, "neox.yml", PYTHIA)
    assert (report.refused, report.missing) == ([], [])
    config = parse_arguments(report.flags).config
    model, training, parallel, optimizer = config.model, config.training, config.parallel, config.optimizer
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.exact_gelu) == (6, 640, 2560, True)
    assert (model.normalization, model.norm_epsilon, model.use_parallel_residual) == ("RMSNorm", 1e-6, True)
    assert (model.position_embedding_type, model.rotary_percent) == ("rope", 0.25)
    assert (model.untie_embeddings_and_output_weights, model.init_method_std) == (True, pytest.approx(1 / 40))
    assert (parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size) == (1, 2)
    assert (training.micro_batch_size, training.global_batch_size, training.fp16) == (4, 32, True)
    assert (training.recompute_granularity, training.recompute_num_layers) == ("full", 1)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.adam_beta2, optimizer.min_lr) == (1e-3, 0.05, 0.95, 1e-4)
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_fraction) == ("cosine", 0.01)
    assert (config.data.train_data_path, config.data.valid_data_path) == (("1", "a", "2.5", "b"), ("c",))
    assert (config.data.tokenizer_type, config.checkpoint.save_interval) == ("HuggingFaceTokenizer", 100)
    assert (config.data.tokenizer_model, config.data.vocab_file) == ("tokenizer.json", None)
    assert any("output_layer_init_method 'wang_init'" in note for note in report.notes)
    assert not any("norms and biases" in note for note in report.notes)  # it groups the parameters


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256}, "--ffn-hidden-size 11008"),
        ({"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}, "--disable-bias-linear"),
        ({"use_bias_in_mlp": False}, "refused: use_bias_in_attn_linear, use_bias_in_mlp: attention and MLP both"),
        ({"fp16": {"type": "bfloat16", "enabled": True, "loss_scale_window": 9}}, "--bf16"),
        ({"attention_config": [[["local", "global"], "all"]]}, "refused: attention_config"),
        ({"activation": "mish"}, "refused: activation: mish: not available: one of gelu, geglu, swiglu"),
        ({"init_method": "orthogonal"}, "refused: init_method 'orthogonal': not available"),
        ({"train_data_weights": [1]}, "refused: train_data_weights is [1]: expected one weight for each path"),
        ({"scheduler": {"type": "OneCycle"}}, "refused: scheduler: lr_decay_style"),
        ({"lr_decay_style": "linear"}, "note: min_lr: GPT-NeoX decays to 0"),
        ({"train_impl": "dpo"}, "refused: train_impl: dpo: samples for preferences"),
        ({"mlp_multiple_of": "many"}, "refused: mlp_multiple_of is 'many': expected a number"),
        ({"moe_num_experts": 8}, "refused: moe_num_experts: 8: Sinkhorn's router"),
    ],
)
def test_words_of_gpt_neox(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    report = report_of(tmp_path, "neox.yml", PYTHIA | changes)
    text = "\n".join(said(report))
    assert line in text or line in " ".join(report.flags), text
    assert len(report.refused) == line.startswith("refused")


def test_ranks_of_gpt_neox_are_divided_among_copies_of_the_model(tmp_path: Path) -> None:
    report = report_of(tmp_path, "neox.yml", PYTHIA)
    assert "train_batch_size = 4 x 2 x 4 ranks -> --global-batch-size 32" in report.changed
    with pytest.raises(ConfigurationError, match="--ranks 7: not a multiple of 2, the ranks of one model"):
        translate(str(tmp_path / "neox.yml"), {}, 7)


def test_text_of_gpt_neox_between_braces_with_comments_is_read(tmp_path: Path) -> None:
    path = tmp_path / "125M.yml"
    path.write_text(
        '# GPT-2\n{\n  # parallel\n  "pipe_parallel_size": 1,\n  "num-layers": 12, # layers\n'
        '  "fp16": {"enabled": True,},\n}\n'
    )
    report = translate(str(path), {})
    assert (report.refused, report.missing) == ([], [])
    assert "--fp16 --initial-loss-scale 65536" in " ".join(report.flags)


def test_flags_under_a_section_of_primus(tmp_path: Path) -> None:
    report = report_of(tmp_path, "primus.yaml", PRIMUS_FILE)
    assert report.refused == []
    assert report.missing == [
        "modules.pre_trainer.model: 'llama2_7B.yaml' has flags, too, which are not read here: copy them into it"
    ]
    assert report.notes == [
        "not read, as no flags of Megatron-LM: work_group 'amd', modules.pre_trainer.framework 'megatron'"
    ]
    assert " ".join(report.flags) == (
        "--no-position-embedding --resume auto --tokenizer-type HuggingFaceTokenizer --train-iters 50 "
        "--micro-batch-size 4 --lr 1e-05 --eod-mask-loss --sequence-parallel --no-gradient-accumulation-fusion "
        "--save run/7b --train-data-path 1 x --no-swiglu"
    )
    given = tmp_path / "primus.yaml"
    assert "--save x/7b" in " ".join(translate(str(given), {"SAVE": "x/7b"}).flags)
    flat = report_of(tmp_path, "model.yaml", {"extends": ["base.yaml"], "num_layers": 2, "hidden_size": 16, "lr": 1})
    assert (flat.flags[:4], len(flat.missing)) == (["--num-layers", "2", "--hidden-size", "16"], 1)


def test_keys_of_a_mapping_that_are_merged_or_given_again(tmp_path: Path) -> None:
    path = tmp_path / "test.yaml"
    path.write_text("BASE: &base\n  --lr: 1\n  --seed: 5\nMODEL_ARGS:\n  <<: *base\n  --lr: 2\n  --lr: 3\n")
    report = translate(str(path), {})
    assert report.flags == ["--lr", "3", "--seed", "5"]
    assert report.notes == [
        "line 7: '--lr' is given again: this value is taken",
        "not read, as no flags of Megatron-LM: BASE",
    ]


# -------------------------------------------------------------------------------------------------- Megatron-DeepSpeed


def megatron_deepspeed(flags: str) -> Report:
    report = Report()
    report.add_megatron(add_megatron_deepspeed(f"{NETWORK} {BATCH} {flags}".split(), report))
    return report


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        ("--zero-stage 3 --deepspeed", "--data-parallel-sharding-strategy optim_grads_params"),
        ("--zero-stage 0", "--data-parallel-sharding-strategy no_shard"),
        ("--no-pipeline-parallel", "--pipeline-model-parallel-size 1"),
        ("--train-tokens 6500", "--train-samples 102"),
        ("--train-tokens 6500 --train-iters 3", "--train-iters 3"),
        ("--train-tokens 2049 --train-iters 9 --lr-decay-tokens 1024", "--lr-decay-iters 1"),
        ("--train-tokens 6400 --train-samples 300 --lr-warmup-tokens 640", "--lr-warmup-samples 10"),
        ("--ds-sequence-parallel-size 2 --deepspeed", "--cp-comm-type a2a --context-parallel-size 2"),
        ("--deepspeed --num-key-value-heads 2", "--group-query-attention --num-query-groups 2"),
        ("--deepspeed --normalization rmsnorm", "--normalization RMSNorm"),
        ("--deepspeed --cpu-optimizer", "--optimizer-cpu-offload"),
        ("--zero-stage 3 --remote-device cpu", "--parameter-offload --optimizer-cpu-offload"),
        ("--zero-stage 1 --zero-stage 2", "--data-parallel-sharding-strategy optim_grads"),
    ],
)
def test_flags_of_megatron_deepspeed_become_what_they_mean(flags: str, meant: str) -> None:
    report = megatron_deepspeed(flags)
    assert report.refused == []
    assert meant in " ".join(report.flags)
    assert any(line.endswith(meant) for line in report.changed)
    parse_arguments(report.flags)


def test_the_limit_in_tokens_takes_the_place_of_the_other(tmp_path: Path) -> None:
    report = megatron_deepspeed("--train-tokens 2049 --train-iters 9")
    assert [value for flag, value in zip(report.flags, report.flags[1:], strict=False) if flag == "--train-iters"] == [
        "3"
    ]
    assert "--train-tokens 2049, --train-iters 9 -> --train-iters 3" in report.changed


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--deepspeed --deepspeed_config ds.json", "note: --deepspeed-config ds.json: a file of its own"),
        (
            "--deepspeed --deepspeed-activation-checkpointing",
            "no effect: --deepspeed-activation-checkpointing: it chooses",
        ),
        ("--deepspeed --remote-device nvme", "refused: --remote-device nvme: only the host's memory"),
        ("--zero-stage 4", "refused: --zero-stage is a flag of DeepSpeed"),
        ("--train-tokens many", "refused: --train-tokens many: a whole number above 0"),
        ("--deepspeed --mlp-type residual", "refused: --mlp-type residual: experts have no dense layer"),
        ("--deepspeed --moe-loss-coeff 0.1", "no effect: --moe-loss-coeff: no layer has experts"),
        ("--deepspeed --unheard-of 3", "refused: unknown flag --unheard-of"),
    ],
)
def test_what_megatron_deepspeed_has_besides_is_told(flags: str, line: str) -> None:
    text = "\n".join(megatron_deepspeed(flags).lines())
    assert line in text


def test_layers_with_experts_are_those_of_deepspeed() -> None:
    report = megatron_deepspeed("--deepspeed --num-experts 8 --moe-expert-parallel-size 2 --moe-loss-coeff 0.01")
    assert report.refused == []
    model = parse_arguments(report.flags).config.model
    assert [layer.feed_forward == "moe" for layer in model.layers] == [False, True] * 3
    assert (model.num_experts, model.moe_router_topk, model.moe_router_pre_softmax) == (8, 1, True)
    assert (model.moe_aux_loss_coeff, model.moe_expert_capacity_factor) == ((0.01,), 1.0)
    report = megatron_deepspeed("--deepspeed --num-experts 8 --topk 2 --expert-interval 1 --disable-moe-token-dropping")
    model = parse_arguments(report.flags).config.model
    assert (model.moe_router_topk, model.moe_router_pre_softmax, model.moe_expert_capacity_factor) == (2, False, None)
    assert all(layer.feed_forward == "moe" for layer in model.layers)
    assert any("draws the second expert at random" in note for note in report.notes)


def test_a_command_without_its_words_is_left_as_it_is() -> None:
    argv = f"{NETWORK} {BATCH} --num-experts 8 --moe-router-topk 2".split()
    report = Report()
    assert add_megatron_deepspeed(argv, report) == argv
    assert list(report.lines()) == []


def test_a_flag_given_again_counts_the_last_time() -> None:
    report = Report()
    report.add_megatron(["--lr", "1", "--bf16", "--lr", "2", "--bf16", "--split", "1,2"])
    assert report.flags == ["--lr", "2", "--bf16", "--split", "1,2"]
    assert report.notes == ["--lr is given more than once: the last, 2, is taken"]


@pytest.mark.parametrize("program", [MEGATRON_DEEPSPEED, NEOX, PRIMUS])
def test_tables_of_words_name_flags_that_exist(program: str) -> None:
    for name, (table, text) in words_of(program).items():
        assert name == name.lower().replace("_", "-")
        if table in ("flags", "values") and text:
            words = text.split()
            given = [*words, *(["2"] if table == "flags" and words[-1].startswith("--") else [])]
            report = Report()
            report.add_megatron(given)
            assert report.refused == [], (name, text)


# ------------------------------------------------------------------------------------------------- Horovod, TensorFlow


def test_words_of_horovod_and_tensorflow_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import horovod.torch as hvd\nhvd.init()  # hvd.size()\n"
        "optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)\n"
        "state = hvd.elastic.TorchState(model)\nhvd.unheard_of(1)\n"
        "strategy = tf.distribute.experimental.ParameterServerStrategy()\n"
    )
    report = translate(str(path), {})
    assert [line.partition(":")[0] for line in report.changed] == [
        "hvd.DistributedOptimizer (line 3)",
        "hvd.elastic.TorchState (line 4)",
        "tf.distribute.ParameterServerStrategy (line 6)",
    ]
    assert report.idle[0].startswith("hvd.init (line 2): nothing")
    assert report.refused[0].startswith("hvd.Adasum (line 3): not available: --optimizer lamb")
    assert report.refused[1].startswith("hvd.unheard_of (line 5): not translated")
    assert report.refused[2].startswith("the rest of the script")


@pytest.mark.parametrize(("more", "refused"), [("", 0), ("--min-np 2", 1), ("--host-discovery-script ./x", 1)])
def test_a_start_by_horovodrun(more: str, refused: int, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"horovodrun -np 8 -H a:4,b:4 {more} python train.py {NETWORK} {BATCH}\n")
    report = translate(str(path), {})
    assert (report.world_size, len(report.refused)) == (8, refused)
