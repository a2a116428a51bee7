"""Wrong flags of the planner's command, and the parts of its report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from megalite.config.pipeline_layout import stages_of_letters
from megalite.config.run import fields_by_name
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.commands import plan
from megalite.extras.planner.flags import layout_flags, without_layout
from megalite.extras.planner.layouts import AXES
from megalite.extras.planner.plan import Planner
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.simulator import simulate
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import TimeLine
from megalite.pipeline.trace import to_trace

RUN = shlex.split("""--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000
    --bf16 --position-embedding-type rope --global-batch-size 8""")


def test_products_of_few_bits_are_planned_and_said() -> None:
    flags = [*RUN, "--micro-batch-size", "1", "--hidden-dropout", "0"]
    of_bf16, of_fp8 = (
        list(plan.report(Planner(plan.completed(argv), find_cluster("H100-SXM"), 4), plan.Options(), argv, AXES))
        for argv in (flags, [*flags, "--fp8-format", "e4m3"])
    )
    assert [lines[1].split()[1] for lines in (of_bf16, of_fp8)] == ["BF16", "FP8"]
    said = [line for line in of_fp8 if "--fp8-recipe blockwise are taken to reach the share of FP8's peak" in line]
    assert len(said) == 1
    assert any("--fp8-format e4m3" in line for line in of_fp8[-12:])
    assert not any("--fp8" in line for line in of_bf16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 7", "^no layout of 7 GPUs splits this run: "),
        ("", "^--gpus is missing"),
        ("--gpus 4 --cluster nowhere", "^--cluster 'nowhere': neither a file nor one of "),
        ("--gpus 4 --keep speed", "^--keep speed: give layout, or some of tensor, "),
        ("--gpus 4 --output plan.pdf", "^--output plan.pdf: the name must end in .json, .csv, .html$"),
        ("--gpus 4 --scaling 8-16", "^--scaling 8-16: give two numbers of GPUs"),
        ("--gpus 4 --scaling 16..8", "^--scaling 16..8: give two numbers of GPUs"),
        ("--gpus 4 --tokens many", "^--tokens many: give a number, as in 300B or 15T$"),
        ("--gpus 4 --keep layout --top 3", "^--top 3: nothing is searched"),
        ("--translate train.sh --top 3", "^--top 3: nothing is searched"),
        ("--translate train.sh --keep speed", "^--keep speed: give layout, or some of tensor, "),
        ("--translate train.sh --set NOPE=3", "^train.sh: --set NOPE=3: there is no such variable in it$"),
        ("--gpus 4 --output small.toml/plan.json", "small.toml is no folder: choose another path$"),
        ("--gpus 4 --failures-per-gpu-hour 1e308", "hour 1e[+]308: must be 0, or from 1e-12 to 1000$"),
        ("--gpus 4 --node-mtbf-hours 1e-300", "^--node-mtbf-hours 1e-300: must be from 0.001 to 1e12$"),
        ("--gpus 4 --failures-per-gpu-hour 1 --node-mtbf-hours 1", "both give the failures: drop one$"),
        ("--gpus 4 --no-such-flag", "^unknown flag --no-such-flag"),
        ("--gpus 4 --cluster small.toml", "^small.toml: network.beta is missing"),
        ("--gpus 0", "^--gpus 0: must be at least 1$"),
        ("--gpus 64 --cluster one_node.toml", "^--gpus 64: --cluster one_node.toml has 8 GPUs$"),
        ("--gpus 4 --set A=1", "^--set is for --translate"),
        ("--gpus 4 --gradient-compression int8", "^--gradient-compression: plans do not know its memory and time; "),
        ("--gpus 4 --data-parallel-shares 3:1", "^--data-parallel-shares: plans count equal shares. Leave it out$"),
        ("--gpus 4 --local-update diloco --local-update-period 9", "^--local-update: plans do not know"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text('gpu = "H100-SXM"\nnetwork = { alpha = 1e-6 }\n')
    (tmp_path / "train.sh").write_text("torchrun --nproc-per-node 4 pretrain_gpt.py --micro-batch-size 1\n")
    (tmp_path / "one_node.toml").write_text('gpu = "H100-SXM"\nnodes = 1\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plan.py", *RUN, *flags.split()])
    with pytest.raises(ConfigurationError, match=message) as raised:
        plan.main()
    assert "\n" not in str(raised.value)


def shown(flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints for the layout of the flags."""
    monkeypatch.setattr(sys, "argv", ["plan.py", *RUN, "--keep", "layout", *flags.split()])
    plan.main()
    return capsys.readouterr().out


def test_a_rack_is_many_hosts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("--gpus 8 --cluster GB200 --node-mtbf-hours 1000", monkeypatch, capsys)
    assert "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $NODE0:$PORT --nproc-per-node 4 " in text
    assert "sbatch --nodes=2 --gpus-per-node=4 " in text
    assert "a failure every 500.0 hours: " in text


def test_what_is_not_known_of_a_class_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new, known = (shown(f"--gpus 8 --bf16 --cluster {each}", monkeypatch, capsys) for each in ("GB200", "H100-SXM"))
    words = "nothing is known of runs of its class (dense, 16 bits, on Blackwell): the interval is the widest of all\n"
    assert words in new
    assert "nothing is known" not in known


def test_with_too_many_failures_there_is_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown("--gpus 8 --failures-per-gpu-hour 1000 --tokens 1T", monkeypatch, capsys)
    assert "a failure every 0.5 seconds: the run makes no progress" in text


def test_its_flags_are_not_those_of_a_run() -> None:
    own = {name for name in vars(plan.Options) if not name.startswith("_")} | {"set", "output"}
    assert not own & fields_by_name().keys()


def test_a_layout_replaces_the_flags_of_another() -> None:
    argv = [*RUN, *shlex.split("--tp 4 --sequence-parallel --recompute-activations --micro-batch-size 4")]
    rest = without_layout(argv)
    assert rest == RUN
    before, after = plan.completed([*RUN, "--tp", "2"]), plan.completed(argv)
    flags = {flag: values for flag, *values in layout_flags(after, before)}
    assert flags["--tensor-model-parallel-size"] == ["4"]
    assert flags["--sequence-parallel"] == []
    assert plan.completed([*rest, *(word for flag, values in flags.items() for word in (flag, *values))]) == after
    assert ["--no-sequence-parallel"] in list(layout_flags(before, after))


def test_what_a_plan_can_do_without_is_filled_in(tmp_path: Path) -> None:
    config = plan.completed(RUN)
    assert (config.data.mock_data, config.data.tokenizer_type, config.training.train_iters) == (
        True,
        "NullTokenizer",
        1,
    )
    (tmp_path / "run.yaml").write_text("training: {micro_batch_size: 8}\noptimizer: {lr: 0.5}\n")
    config = plan.completed([*RUN, "--config", str(tmp_path / "run.yaml")])
    assert (config.training.micro_batch_size, config.optimizer.lr) == (8, 0.5)


@pytest.mark.parametrize("stages", ["auto", "auto:trace.json"])
def test_automatic_stages_are_planned(stages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide six layers by the times of a step of three ranks, whose last one takes twice as long as the others."""
    monkeypatch.chdir(tmp_path)
    orders = orders_of(SCHEDULES["1f1b"], Stages(3, 1), 4, None)
    spans = simulate(Stages(3, 1), orders, lambda stage, kind: [2.0, 2.0, 4.0][stage], 0.0)
    (tmp_path / "trace.json").write_text(to_trace(TimeLine("", Stages(3, 1), spans, in_seconds=True)))
    layers = ["--num-layers", "6", "--pp", "3", "--pipeline-model-parallel-layout", stages]
    config = plan.completed([*RUN, *layers])
    written = plan.with_letters(config, 3, AXES).parallel.pipeline_model_parallel_layout
    assert written is not None
    counts = [stage.count("t") for stage in stages_of_letters(written)]
    assert counts == ([3, 2, 1] if ":" in stages else [2, 2, 2])
    planner = Planner(plan.with_letters(config, 3, AXES), find_cluster("H100-SXM"), 3)
    assert planner.plan(planner.config).config.parallel.pipeline_model_parallel_layout == written
    assert plan.with_letters(config, 3, ()).parallel.pipeline_model_parallel_layout is None


@pytest.mark.parametrize(("text", "number"), [("15T", 15e12), ("300b", 3e11), ("1e9", 1e9), ("2.5M", 2.5e6)])
def test_numbers_of_tokens(text: str, number: float) -> None:
    assert plan.count(text) == number
