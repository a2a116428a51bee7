"""The command that translates: what it prints, when it refuses, and the sizes that it checks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megalite.commands import translate
from megalite.config.parse import parse_arguments
from megalite.errors import ConfigurationError
from megalite.translation.report import Report
from megalite.translation.sizes import sizes

SIZES = "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8"
COURSE = "--micro-batch-size 2 --global-batch-size 16 --lr 0.1 --train-iters 5"
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 60"
SCRIPT = f"""
export CUDA_DEVICE_MAX_CONNECTIONS=1
export LD_PRELOAD=evil.so
torchrun --nproc_per_node $GPUS --nnodes 2 --master_addr $MASTER_ADDR --node_rank=$RANK pretrain_gpt.py \\
    {SIZES} {COURSE} {DATA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
    --use-mcore-models --disable-bias-linear "$MORE"
"""


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *flags: str
) -> tuple[str, str]:
    """Return the output of the command on a script, and its error message or its exit code."""
    path = tmp_path / "train.sh"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["translate.py", str(path), *flags])
    try:
        translate.main()
    except ConfigurationError as error:
        return capsys.readouterr().out, str(error)
    return capsys.readouterr().out, ""


def test_the_command_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--set", "GPUS=4", "--set", "MORE=--swiglu", "--check"]
    out, error = run(tmp_path, monkeypatch, capsys, SCRIPT, *given)
    assert error == ""
    report, _, command = out.partition("# the command, complete:\n")
    assert report.splitlines()[:4] == [
        "accepted: 15 flags as given",
        "changed: --disable-bias-linear -> --no-add-bias-linear",
        "no effect: LD_PRELOAD: a variable that no part of megalite reads",
        "no effect: --use-mcore-models: already so, the model has one implementation",
    ]
    assert "check: ranks: 8, as the file says; the layout needs 4 or a multiple" in report
    assert "check: global batch: 16 = micro-batch 2 x 4 x 2 data-parallel ranks" in report
    assert "check: tokens per step: 128" in report
    assert command.startswith(
        "env CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 2 --nproc-per-node 4 --master-addr '$MASTER_ADDR' "
        "--node-rank '$RANK' --no-python megalite-pretrain \\\n    --num-layers 4 \\\n"
    )
    assert command.endswith("    --disable-bias-linear \\\n    --swiglu\n")


def test_yaml_for_config_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, error = run(tmp_path, monkeypatch, capsys, SCRIPT, "--set", "GPUS=4", "--set", "MORE=--swiglu", "--yaml")
    assert error == ""
    (tmp_path / "run.yaml").write_text(out[out.index("model:") :])
    flags = f"{SIZES} {COURSE} {DATA} --disable-bias-linear --swiglu --tp 2 --pp 2".split()
    assert parse_arguments(["--config", str(tmp_path / "run.yaml")]).config == parse_arguments(flags).config


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            "--data-path $DATA",
            "needed: line 1: --data-path needs $DATA, which the script does not set: give --set DATA=",
        ),
        ("--fp8-format hybrid", "refused: --fp8-format needs Transformer Engine"),
        (
            "--per_device_train_batch_size 1",
            "refused: --per-device-train-batch-size is a flag of Hugging Face's Trainer",
        ),
        ("--tensor-model-parallel-size 3", "refused: 1 ranks cannot be divided into groups of --tensor-model"),
        ("--num-attention-heads 5", "refused: --hidden-size 16"),
    ],
)
def test_what_is_refused_or_needed_is_not_run(
    more: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(translate, "_run", lambda *_: pytest.fail("it was run"))
    text = f"torchrun --nproc-per-node 1 pretrain_gpt.py {SIZES} {COURSE} {DATA} {more}"
    out, error = run(tmp_path, monkeypatch, capsys, text)
    assert out.count("\n" + line) + out.startswith(line) == 1, out
    assert re.search(r"train.sh: (\d refused and 0|0 refused and 1) needed, as above$", error)
    _, error = run(tmp_path, monkeypatch, capsys, text, "--run")
    assert error.endswith("; nothing is run")


def test_a_need_of_what_is_left_out_is_no_need() -> None:
    report = Report(missing=["line 1: --wandb-project needs $W: give --set W=VALUE", "line 2: --save needs $S: ..."])
    report.add_megatron(["--use-mcore-models", "--wandb-project", "$W", "--save", "$S"])
    assert report.missing == ["line 2: --save needs $S: ..."]
    assert report.flags == ["--use-mcore-models", "--save", "$S"]


def test_flags_that_act_on_each_other_stay() -> None:
    """Keep a flag that changes nothing by itself, but decides what another one does."""
    flags = f"{SIZES} {COURSE} {DATA} --no-bias-gelu-fusion --openai-gelu".split()
    report = Report()
    report.add_megatron(flags)
    assert parse_arguments(report.flags) == parse_arguments(flags)


def test_quotes_that_a_shell_would_pass_on_are_dropped() -> None:
    report = Report()
    report.add_megatron(["--split", "'99,1,0'"])
    assert report.flags == ["--split", "99,1,0"]
    assert report.changed == ["--split '99,1,0' -> --split 99,1,0"]


def test_many_flags_without_effect_share_a_line() -> None:
    report = Report(idle=[f"--{letter}: why" for letter in "abcde"])
    assert list(report.lines()) == ["no effect: 5 that change nothing here: --a --b --c --d --e"]


@pytest.mark.parametrize(
    ("launcher", "nodes", "per_node", "expected"),
    [
        (
            ("srun", "-N", "2", "--ntasks-per-node=8", "python", "-u"),
            2,
            8,
            "srun -N 2 --ntasks-per-node=8 megalite-pretrain",
        ),
        (
            ("srun", "torchrun", "--nproc_per_node", "8"),
            2,
            8,
            "srun torchrun --nnodes 2 --nproc-per-node 8 --no-python megalite-pretrain",
        ),
        (("deepspeed", "--num_gpus", "4"), None, 4, "torchrun --nproc-per-node 4 --no-python megalite-pretrain"),
        (("python",), None, None, "megalite-pretrain"),
    ],
)
def test_the_launcher_is_kept(
    launcher: tuple[str, ...], nodes: int | None, per_node: int | None, expected: str
) -> None:
    report = Report(launcher=launcher, nodes=nodes, per_node=per_node)
    assert [" ".join(part) for part in translate._command(report)] == [expected]


def test_a_variable_needs_a_name() -> None:
    assert translate._variables(["A=b=c", "1=x"])["A"] == "b=c"
    with pytest.raises(ConfigurationError, match="expected NAME=VALUE"):
        translate._variables(["A"])


def test_sizes_of_each_rank_and_of_all() -> None:
    flags = f"{SIZES} {COURSE} {DATA} --disable-bias-linear --position-embedding-type rope --tp 2 --pp 2".split()
    config = parse_arguments([*flags, "--untie-embeddings-and-output-weights"]).config
    lines = dict(line.split(": ", 1) for line in sizes(config, 8))
    layer = 4 * 16 * 16 + 2 * 16 * 64 + 4 * 16
    assert lines["model"].startswith(f"{2 * 61 * 16 + 4 * layer + 2 * 16:,} parameters, with 61 tokens")
    half = 2 * (2 * 16 * 16 + 16 * 64 + 4 * 16) + 256 * 16 // 2  # the vocabulary is padded to 256
    assert lines["parameters per rank"] == f"{half:,} to {half + 2 * 16:,}, of TP 2 x PP 2 x DP 2"
    wrong = dict(line.split(": ", 1) for line in sizes(config, 3))
    assert wrong["ranks"].startswith("the file starts 3, but the layout needs 4 or a multiple")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("--mock-data --tokenizer-type NullTokenizer --vocab-size 60", "61 tokens (of the tokenizer)"),
        ("--data-path x --vocab-file v.json --merge-file m.txt", "50,257 tokens (of GPT-2)"),
        ("--data-path x --tokenizer-type Llama2Tokenizer --tokenizer-model none", "1,000 tokens (a guess: "),
        (
            "--data-path x --tokenizer-type Llama2Tokenizer --tokenizer-model none --vocab-size 32000",
            "32,000 tokens (of --vocab-size)",
        ),
    ],
)
def test_the_vocabulary_and_where_it_comes_from(data: str, words: str) -> None:
    config = parse_arguments(f"{SIZES} {COURSE} {data}".split()).config
    assert words in next(sizes(config, 1))
