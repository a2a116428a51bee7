"""The command that translates: what it prints, when it refuses, and the sizes that it checks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megalite.config.parse import parse_arguments
from megalite.errors import ConfigurationError
from megalite.extras.translation.commands import translate
from megalite.extras.translation.report import Report
from megalite.extras.translation.sizes import sizes

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
        "no effect: --use-mcore-models: already so, the model has one implementation",
        "note: not kept: LD_PRELOAD; set what your machine needs of them yourself",
    ]
    assert "check: ranks: 8, as the file says; the layout needs 4 or a multiple" in report
    assert "check: global batch: 16 = micro-batch 2 x 4 x 2 data-parallel ranks" in report
    assert "check: tokens per step: 128" in report
    assert command.startswith(
        'env CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 2 --nproc-per-node 4 --master-addr "$MASTER_ADDR" '
        '--node-rank "$RANK" --no-python megalite-pretrain \\\n    --num-layers 4 \\\n'
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
        ("--kitchen-recipe-number 1", "refused: --kitchen-recipe-number needs Transformer Engine"),
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


def test_what_is_not_right_together_is_told_beside_what_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "--bf16 --fp8-format e4m3 --fp8-amax-history-len 16 --fp8-param-gather"
    text = f"torchrun --nproc-per-node 1 pretrain_gpt.py {SIZES} {COURSE} {DATA} {more}"
    out, error = run(tmp_path, monkeypatch, capsys, text)
    assert "refused: --fp8-amax-history-len is of delayed scaling" in out
    assert "refused: --fp8-param-gather needs --data-parallel-sharding-strategy optim_grads_params" in out
    assert error.endswith("2 refused and 0 needed, as above")


def test_a_need_of_what_is_left_out_is_no_need() -> None:
    report = Report(
        missing=["line 1: --one-logger-project needs $W: give --set W=VALUE", "line 2: --save needs $S: ..."]
    )
    report.add_megatron(["--use-mcore-models", "--one-logger-project", "$W", "--save", "$S"])
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


@pytest.mark.parametrize(
    ("launcher", "line", "command"),
    [
        ("torchrun --nproc_per_node gpu", "--nproc-per-node gpu is not a", "torchrun --nproc-per-node gpu --no-python"),
        (
            "torchrun --nproc_per_node=$GPUS",
            "--nproc-per-node $GPUS in line 1 is",
            'torchrun --nproc-per-node "$GPUS" --no',
        ),
        (
            "torchrun --nproc_per_node=$(nvidia-smi -L|wc -l)",
            "--nproc-per-node $(nvidia-smi -L|wc -l) in line 1",
            'torchrun --nproc-per-node "$(nvidia-smi -L|wc -l)" --no-python',
        ),
        ("deepspeed --include localhost:0,1,2,3", "--nproc-per-node: deepspeed is not told", "megalite-pretrain"),
        ("accelerate launch", "--nproc-per-node: accelerate is not told", "megalite-pretrain"),
        ("mpirun --hostfile hosts python", "--nproc-per-node: mpirun is not told", "mpirun --hostfile hosts megalite"),
    ],
)
def test_an_unknown_number_of_ranks_is_asked_for(
    launcher: str,
    line: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = f"{launcher} pretrain_gpt.py {SIZES} {COURSE} {DATA}"
    out, error = run(tmp_path, monkeypatch, capsys, text)
    assert f"needed: {line}" in out
    assert f"or needed:\n{command}" in out
    assert error.endswith("0 refused and 1 needed, as above")
    out, error = run(tmp_path, monkeypatch, capsys, text, "--ranks", "8")
    assert error == ""
    ranks = "" if "mpirun" in launcher else "torchrun --nproc-per-node 8 --no-python megalite-pretrain"
    assert f"complete:\n{ranks}" in out


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        (
            "torchrun --standalone --rdzv-conf a=1,b=2 --nnodes 2:4 --nproc_per_node 2",
            "torchrun --nnodes 2:4 --nproc-per-node 2 --standalone --rdzv-conf a=1,b=2 --no-python",
        ),
        ("numactl -N 3 torchrun --nproc_per_node=2", "numactl -N 3 torchrun --nproc-per-node 2 --no-python"),
        (
            "srun accelerate launch --num_machines 2 --num_processes 4 --machine_rank 1",
            "srun torchrun --nnodes 2 --nproc-per-node 2 --node-rank 1 --no-python",
        ),
        (
            "torchrun --nproc-per-node 2 --node-rank $NODE_RANK --rdzv-endpoint $(head -1 hosts):29500",
            'torchrun --nproc-per-node 2 --node-rank "$NODE_RANK" --rdzv-endpoint "$(head -1 hosts):29500" --no-python',
        ),
        (
            "export MASTER_ADDR=$(hostname -I | awk '{print $1}')\ntorchrun --nproc-per-node 2",
            "env \"MASTER_ADDR=$(hostname -I | awk '{print $1}')\" torchrun --nproc-per-node 2 --no-python",
        ),
        (
            "export CUDA_VISIBLE_DEVICES=1,2 GLOO_SOCKET_IFNAME=e0\ntorchrun --nproc-per-node 2",
            "env CUDA_VISIBLE_DEVICES=1,2 GLOO_SOCKET_IFNAME=e0 torchrun --nproc-per-node 2 --no-python",
        ),
    ],
)
def test_what_the_launcher_says_is_kept_for_the_shell(
    launcher: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = f"{launcher} pretrain_gpt.py {SIZES} {COURSE} {DATA}"
    out, error = run(tmp_path, monkeypatch, capsys, text)
    assert error == ""
    assert f"complete:\n{command} megalite-pretrain" in out
    if "$" in launcher:
        _, error = run(tmp_path, monkeypatch, capsys, text, "--run")
        assert error.startswith("--run: only a shell can tell ")


def test_a_shell_on_each_node_expands_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"torchrun --nproc-per-node 2 --node-rank $SLURM_NODEID pretrain_gpt.py {SIZES} {COURSE} {DATA}"
    out, error = run(tmp_path, monkeypatch, capsys, f"srun -N 2 bash -c '{line}'")
    assert error == ""
    assert 'srun -N 2 bash -c \'torchrun --nnodes 2 --nproc-per-node 2 --node-rank "$SLURM_NODEID" --no-' in out


@pytest.mark.parametrize(
    ("launcher", "need"),
    [
        ("torchrun --nproc-per-node 2 --node-rank $1", "line 1: --node-rank needs $1, which the script does not set"),
        ("torchrun $DISTRIBUTED", "line 1: the launcher needs $DISTRIBUTED, which the script does not set"),
        ("A=$(date)\nB=$(host $A)\ntorchrun --rdzv-id $B", "line 2: --rdzv-id needs $(host $A): give --set B="),
    ],
)
def test_what_no_other_shell_can_expand_is_asked_for(
    launcher: str,
    need: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, error = run(tmp_path, monkeypatch, capsys, f"{launcher} pretrain_gpt.py {SIZES} {COURSE} {DATA}")
    assert f"needed: {need}" in out
    assert error.endswith("0 refused and 1 needed, as above")


@pytest.mark.parametrize("flag", ["--num-layers", "--micro-batch-size", "--optimizer", "--lr", "--bf16"])
def test_an_unknown_value_is_needed_by_any_flag(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"torchrun pretrain_gpt.py {SIZES} {COURSE} {DATA} {flag} $V"
    out, error = run(tmp_path, monkeypatch, capsys, text)
    assert f"needed: line 1: {flag} needs $V, which the script does not set: give --set V=VALUE" in out
    assert error.endswith("0 refused and 1 needed, as above")


def test_a_variable_needs_a_name() -> None:
    assert translate.variables(["A=b=c", "1=x"])["A"] == "b=c"
    with pytest.raises(ConfigurationError, match="expected NAME=VALUE"):
        translate.variables(["A"])


def test_several_variables_may_follow_one_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, error = run(tmp_path, monkeypatch, capsys, SCRIPT, "--set", "GPUS=4", "MORE=--swiglu", "--check")
    assert error == ""
    assert "check: ranks: 8, as the file says" in out
    assert translate.one_by_one(["--set", "A=1", "B=2", "x.sh", "--set=C=3"]) == [
        *("--set", "A=1", "--set", "B=2", "x.sh", "--set=C=3")
    ]


def test_variables_that_conditions_take_as_empty_share_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conditions = "".join(f'[ -z "${{{name}}}" ] && {name}=1\n' for name in ("A", "B", "C"))
    text = f"{conditions}torchrun --nproc-per-node 1 pretrain_gpt.py {SIZES} {COURSE} {DATA}"
    out, error = run(tmp_path, monkeypatch, capsys, text)
    assert error == ""
    assert out.count("note: ") == 1
    assert "note: lines 1, 2, 3: $A, $B, $C are not set, and taken as empty in conditions" in out


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
