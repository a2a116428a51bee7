"""Translation of torchtitan's job configurations and commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import stages_of_letters
from megalite.errors import ConfigurationError
from megalite.extras.planner.commands import plan
from megalite.extras.translation.report import Report
from megalite.extras.translation.source import translate

JOB = """
[job]
dump_folder = "./runs/llama"
description = "a job as people write it"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/llama"

[optimizer]
name = "AdamW"
lr = 3e-4

[lr_scheduler]
warmup_steps = 100
decay_ratio = 0.2
decay_type = "cosine"
min_lr_factor = 0.1

[training]
local_batch_size = 2
seq_len = 4096
steps = 1000

[parallelism]
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"

[checkpoint]
enable = true
interval = 250
async_mode = "async"

[compile]
enable = true
"""
PIPELINE = """
[model]
flavor = "70B"
converters = ["float8"]

[training]
local_batch_size = 8
global_batch_size = 64
seq_len = 8192

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 2
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 2
enable_async_tensor_parallel = true

[activation_checkpoint]
mode = "full"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def of(text: str, ranks: int | None = None, name: str = "job.toml") -> Report:
    Path(name).write_text(text)
    return translate(name, {}, ranks)


def run_of(report: Report) -> RunConfig:
    return parse_arguments(report.flags).config


def test_a_job_sets_the_same_run() -> None:
    report = of(JOB, 16)
    assert (report.refused, report.missing) == ([], [])
    config = run_of(report)
    model, training, optimizer = config.model, config.training, config.optimizer
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (32, 4096, 14336)
    assert (model.num_attention_heads, model.num_query_groups, model.vocab_size) == (32, 8, 128256)
    assert (training.micro_batch_size, training.global_batch_size, training.train_iters) == (2, 32, 1000)
    assert (config.data.seq_length, training.bf16, config.kernels.compile) == (4096, True, True)
    assert (training.recompute_method, training.recompute_num_layers) == ("block", 16)
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    assert (optimizer.lr, optimizer.min_lr, optimizer.adam_beta2) == (3e-4, pytest.approx(3e-5), 0.95)
    assert (optimizer.lr_decay_style, optimizer.lr_wsd_decay_style, optimizer.lr_wsd_decay_iters) == (
        "WSD",
        "cosine",
        200,
    )
    assert "optimizer.beta2, torchtitan's default -> --adam-beta2 0.95" in report.changed
    text = " ".join(report.flags)
    assert "--save ./runs/llama/checkpoint --save-interval 250 --async-save" in text
    assert of(JOB).missing == ["--global-batch-size: 2 x data-parallel ranks; give --ranks, or --gpus of a plan"]


def test_a_pipeline_has_torchtitans_stages_and_micro_batches() -> None:
    report = of(PIPELINE)
    assert [line.partition(":")[0] for line in report.refused] == [
        "model.converters",
        "parallelism.enable_async_tensor_parallel",
    ]
    config = run_of(report)
    parallel, training = config.parallel, config.training
    assert (training.micro_batch_size, training.global_batch_size) == (1, 64)
    assert (parallel.tensor_model_parallel_size, parallel.sequence_parallel) == (8, True)
    assert (parallel.context_parallel_size, parallel.cp_comm_type) == (2, ("all_gather",))
    assert (parallel.pipeline_model_parallel_size, parallel.pipeline_schedule) == (4, "interleaved-1f1b")
    assert parallel.data_parallel_sharding_strategy == "optim_grads"
    assert parallel.num_distributed_optimizer_instances == 2
    assert parallel.pipeline_model_parallel_layout is not None
    stages = stages_of_letters(parallel.pipeline_model_parallel_layout)
    assert [stage.count("t") for stage in stages] == [10, 11, 10, 10, 10, 10, 10, 9]
    assert training.recompute_method == "uniform"


@pytest.mark.parametrize(
    "script",
    [
        "export X=1\nCONFIG_FILE=job.toml NGPU=4 ./run_train.sh {flags}\n",
        "torchrun --nproc_per_node=4 -m torchtitan.train --job.config_file job.toml {flags}\n",
        "torchrun --nproc_per_node=4 train.py --job.config_file=job.toml {flags}\n",
    ],
)
def test_a_command_stands_above_its_file(script: str) -> None:
    Path("job.toml").write_text(JOB)
    flags = "--training.seq_len 512 --parallelism.tensor-parallel-degree=2 --compile.no-enable --training.seed 7"
    report = of(script.format(flags=flags), name="train.sh")
    assert (report.refused, report.missing, report.world_size) == ([], [], 4)
    config = run_of(report)
    assert (config.data.seq_length, config.kernels.compile, config.training.seed) == (512, False, 7)
    assert (config.parallel.tensor_model_parallel_size, config.training.global_batch_size) == (2, 4)


def test_a_command_needs_its_file_and_its_variables() -> None:
    with pytest.raises(ConfigurationError, match=r"train.sh: line 1: --job.config_file needs \$JOB"):
        of("torchrun --nproc_per_node 2 -m torchtitan.train --job.config_file $JOB\n", name="train.sh")
    with pytest.raises(ConfigurationError, match=r"give CONFIG_FILE=FILE\.toml"):
        of("NGPU=2 ./run_train.sh\n", name="train.sh")
    with pytest.raises(ConfigurationError, match=r"job\.config_file 'none\.toml': No such file"):
        of("CONFIG_FILE=none.toml ./run_train.sh\n", name="train.sh")
    Path("job.toml").write_text(JOB)
    needs = of("torchrun --nproc_per_node 2 -m torchtitan.train --job.config_file job.toml --optimizer.lr $RATE\n",
               name="train.sh")  # fmt: skip
    assert needs.missing == ["line 1: --optimizer.lr needs $RATE, which the script does not set: give --set RATE=VALUE"]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("[model]\nflavor = '9B'\n", "model.flavor '9B': llama3 is known, as debugmodel, 8B, 70B, 405B"),
        ("[model]\nname = 'deepseek_v3'\n", "model.name 'deepseek_v3'"),
        ("[trainning]\nsteps = 1\n", "'trainning' is no section of a job configuration of torchtitan"),
        ("steps = 1\n", "'steps' is no section"),
        ("[training\n", "not TOML: "),
        ("[training]\nsteps = 1\nsteps = 2\n", "not TOML: "),
        (f"[job]\na = {'[' * 30000}", "not TOML: "),
        ("[job.a.b.c.d.e.f.g.h]\n", "nested deeper"),
        (f"[training]\nsteps = 1{'0' * 400}\n", "over 64 bits"),
        ("[training]\n" + "".join(f"a{i} = 1\n" for i in range(1001)), "over 1000 keys"),
        (
            "[parallelism]\ntensor_parallel_degree = 3\n",
            "8 ranks are not tensor 3 x pipeline 1 x context 1 x replicate",
        ),
        ("[parallelism]\ntensor_parallel_degree = 0\n", "tensor_parallel_degree is 0: expected a number"),
    ],
)
def test_a_bad_job_is_an_error_in_a_line(job: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        of(job, 8)
    assert str(raised.value).startswith("job.toml: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("job", "line"),
    [
        ("[training]\nsteps = 'many'\n", "training.steps is 'many': expected a number"),
        ("[training]\ngc_freq = 1e308\n", "training.gc_freq is 1e+308: expected a number"),
        ("[training]\nstep = 5\n", "training.step: unknown key"),
        ("[training]\nglobal_batch_size = 60\n", "is not a multiple of local_batch_size 8 x 8"),
        ("[training]\ndtype = 'bfloat16'\n", "training.dtype 'bfloat16': expected float32"),
        ("[optimizer]\nname = 'Adam'\n", "optimizer.name 'Adam': only AdamW"),
        ("[lr_scheduler]\ndecay_type = ['linear']\n", "expected linear, cosine, sqrt"),
        ("[activation_checkpoint]\nselective_ac_option = 'op'\n", "operations are not chosen one by one"),
        ("[parallelism]\npipeline_parallel_degree = 8\n", "6 layers do not divide among 8 stages"),
        ("[parallelism]\nfsdp_reshard_after_forward = 1\n", "expected default, always or never"),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'DualPipeV'\n",
            "pipeline_parallel_schedule 'DualPipeV': 1F1B",
        ),
        ("[fault_tolerance]\nenable = true\n", "fault_tolerance: not available"),
        ("[training]\n'a\\nb' = 5\n".replace("'", '"'), "unknown key"),
    ],
)
def test_what_cannot_be_translated_is_refused_in_a_line(job: str, line: str) -> None:
    report = of(job, 8)
    assert len(report.refused) == 1
    assert line in report.refused[0]
    assert "\n" not in report.refused[0]


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("decay_ratio = 0.0", "--lr-decay-style constant"),
        ("decay_type = 'sqrt'", "--lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 9800"),
        ("decay_ratio = 1.0", "--lr-wsd-decay-style linear --lr-wsd-decay-iters 9800"),
        ("decay_type = 'cosine'\nlr_min = 0.5", "--lr-decay-style cosine --min-lr 0.0004"),
    ],
)
def test_the_learning_rate(schedule: str, flags: str) -> None:
    assert flags in " ".join(of(f"[lr_scheduler]\n{schedule}\n", 1).flags)


def test_one_rank_or_copies_shard_nothing() -> None:
    assert "--data-parallel-sharding-strategy" not in of("[training]\nsteps = 1\n", 1).flags
    report = of("[parallelism]\ndata_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n", 8)
    assert "--data-parallel-sharding-strategy" not in report.flags
    assert "--num-distributed-optimizer-instances" not in report.flags


def test_a_job_is_planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text("[training]\nsteps = 10\n[parallelism]\ntensor_parallel_degree = 2\n")
    monkeypatch.setattr(sys, "argv", ["plan.py", "--translate", "job.toml", "--gpus", "8"])
    plan.main()
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:8] == ["8", "BF16", "32", "8", "2048", "4", "2", "1"]
