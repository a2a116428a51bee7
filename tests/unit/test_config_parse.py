"""Command lines to configurations: spellings, precedence over YAML, and one clear line for each mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from megalite.commands import generate, train_tokenizer
from megalite.config import megatron_flags, parse_arguments, resolve
from megalite.config.run import fields_by_name, section_types
from megalite.config.tool_arguments import ALSO_POSITIONAL, POSITIONAL, parse_tool_arguments
from megalite.errors import ConfigurationError

MINIMAL = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--seq-length", "8", "--micro-batch-size", "1", "--lr", "0.1"),
]
MINIMAL_YAML = """
model: {num_layers: 3, hidden_size: 32, num_attention_heads: 2}
data: {seq_length: 16, data_path: [a, b]}
optimizer:
  lr: 1e-4
training: {micro_batch_size: 4}
"""


def texts() -> set[str]:
    """Return the flags that take any text."""
    kinds = {name.replace("_", "-"): place.kind for name, place in fields_by_name().items()}
    return {flag for flag, kind in kinds.items() if str in (kind, *get_args(kind))}


def failure(argv: list[str]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        parse_arguments(argv)
    assert raised.value.exit_code == 64
    return str(raised.value)


def test_field_names_are_unique_over_the_sections() -> None:
    assert len(fields_by_name()) == sum(len(section.__dataclass_fields__) for section in section_types().values())


def test_hyphens_underscores_equals_and_repetition() -> None:
    config = parse_arguments([*MINIMAL, "--ffn_hidden_size=24", "--lr=1e-3", "--lr", "2e-3", "--save=a=b"]).config
    assert (config.model.ffn_hidden_size, config.optimizer.lr, config.checkpoint.save) == (24, 2e-3, "a=b")


def test_switches_go_on_and_off_and_the_last_wins() -> None:
    assert parse_arguments([*MINIMAL, "--swiglu"]).config.model.swiglu
    assert not parse_arguments([*MINIMAL, "--swiglu", "--no-swiglu"]).config.model.swiglu
    assert not parse_arguments([*MINIMAL, "--no_add_bias_linear"]).config.model.add_bias_linear


def test_negative_numbers_and_lists_are_values() -> None:
    config = parse_arguments(
        [*MINIMAL, "--profile-ranks", "-1", "--data-path", "0.3", "a", "0.7", "b", "--bf16"]
    ).config
    assert (config.profiling.profile_ranks, config.training.bf16) == ((-1,), True)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")


def test_none_gives_an_optional_field_back() -> None:
    assert parse_arguments([*MINIMAL, "--kv-channels", "8", "--kv-channels", "None"]).config.model.kv_channels is None


def test_every_mistake_is_named_at_once_in_a_line_of_its_own() -> None:
    flags = [
        "--hiden-sise",
        "3",
        "--swiglu",
        "true",
        "--save",
        "--num-layers",
        "1",
        "2",
        "--mask-prob",
        "--qqqqqqqq",
    ]
    assert failure([*MINIMAL, *flags]).splitlines() == [
        "unknown flag --hiden-sise, did you mean --hidden-size?",
        "--swiglu takes no value, got 'true' (--no-... turns a flag off)",
        "--save needs one value, got none",
        "--num-layers needs one value, got 1 2",
        "--mask-prob is not for pre-training a GPT (vision, BERT, T5, retrieval, distillation, reinforcement learning)",
        "unknown flag --qqqqqqqq (--help all describes all flags)",
    ]


def test_missing_flags_are_listed_and_a_misspelt_value_is_not_missing() -> None:
    assert failure(["--hidden-size"]).splitlines() == [
        "--hidden-size needs one value, got none",
        "missing: --num-layers, --num-attention-heads, --seq-length, --lr, --micro-batch-size "
        "(--help all describes all flags)",
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-layers", "x"], ["--num-layers", "'x'"]),
        (["--min-lr", "1e400"], ["--min-lr '1e400': expected a finite number"]),
        (["--min-lr", "nan"], ["--min-lr 'nan': expected a finite number"]),
        (["--rampup-batch-size", "1", "2"], ["--rampup-batch-size needs 3 values, got 1 2"]),
        (["--rampup-batch-size", "1", "b", "3"], ["--rampup-batch-size 'b': expected a whole number"]),
        (["--profile-ranks", "0", "1.5"], ["--profile-ranks '1.5': expected a whole number"]),
        (["--local-rank", "x"], ["--local-rank takes a whole number, got 'x'"]),
        (["--local-rank"], ["--local-rank takes one value, got none"]),
        (["--ffn-hidden-size", "3.5"], ["--ffn-hidden-size", "3.5"]),
        (["--normalization", "Layernorm"], ["--normalization", "'Layernorm'", "LayerNorm", "RMSNorm"]),
        (["stray"], ["--lr needs one value", "0.1 stray"]),
        (["--config"], ["--config needs one value"]),
        (["--config", "/does/not/exist.yaml"], ["--config /does/not/exist.yaml", "No such file"]),
    ],
)
def test_bad_values_are_one_line_without_frames(flags: list[str], words: list[str]) -> None:
    message = failure([*MINIMAL, *flags])
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert "│" not in message


@pytest.mark.parametrize("flag", ["lr", "config", "timing-log-level", *sorted(texts())])
@pytest.mark.parametrize("value", ["", " \t"])
def test_a_blank_value_is_a_variable_that_is_not_set(flag: str, value: str) -> None:
    arguments = [*MINIMAL, f"--{flag}", *(["a"] if flag.endswith("data-path") else []), value]
    if value and flag in ("fim-no-prefix", "fim-split-sample"):  # white space is text
        assert parse_arguments(arguments)
    else:
        blank = f"--{flag} {value!r}: is blank: if this was a shell variable, it may not be set"
        assert failure(arguments) == failure([*MINIMAL, f"--{flag}={value}"]) == blank


def test_a_tool_refuses_a_blank_value_but_for_a_prompt_of_spaces() -> None:
    for flag, *values in (["--output", ""], ["--output", "a", ""], ["--prompt", ""], ["--prompts", " "]):
        arguments = [flag, *values]
        with pytest.raises(ConfigurationError, match=f"{flag} '.*': is blank"):
            parse_tool_arguments(generate.Arguments, "", ["--load", "x", *arguments], repeated=True)
    spaces = parse_tool_arguments(generate.Arguments, "", ["--load", "x", "--prompt", " "], repeated=True)
    assert spaces.prompt == (" ",)


@pytest.mark.parametrize(
    ("arguments", "flags", "most"),
    [
        (generate.Arguments, ["--load", "x", "--seed", "9" * 50], r"at most 2\^53"),
        (generate.Arguments, ["--load", "x", "--top-k=-" + "9" * 50], r"at most 2\^53"),
        (generate.Arguments, ["--load", "x", "--temperature", "nan"], "expected a finite number"),
        (
            train_tokenizer.Arguments,
            ["--input", "x", "--output-prefix", "y", "--vocab-size", "9", "--num-threads", "1025"],
            "1,024",
        ),
    ],
)
def test_a_tool_takes_no_number_beyond_all_bounds(arguments: Any, flags: list[str], most: str) -> None:
    with pytest.raises(ConfigurationError, match=most) as refused:
        parse_tool_arguments(arguments, "", flags)
    assert len(str(refused.value)) < 200


@dataclass(frozen=True)
class Tool:
    file: str = field(metadata=POSITIONAL)
    steps: tuple[int, ...] = ()
    pair: tuple[str, str] | None = None
    verify: bool = True


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("a", Tool("a")),
        ("a --steps 1 --no_verify", Tool("a", (1,), verify=False)),
        ("--no-verify a --steps=1 --steps 2", Tool("a", (1, 2), verify=False)),
        ("--steps 1 a", Tool("a", (1,))),
        ("--pair b c a", Tool("a", pair=("b", "c"))),
        ("--verify", "missing: FILE (--help describes all flags)"),
        ("a b", "FILE is one word, got 'a b'"),
        ("a --verify=false", "--verify takes no value"),
        ("a --steps", "--steps needs a value"),
        ("a --step 1", "there is no flag --step: did you mean --steps?"),
        ("a --no-steps 1", "there is no flag --no-steps: did you mean --steps?"),
        ("a --steps x", "--steps 'x': expected a whole number"),
        ("--pair b", "--pair needs 2 values, got b"),
    ],
)
def test_a_tool_takes_flags_and_a_value_without_one(flags: str, expected: Tool | str) -> None:
    if isinstance(expected, Tool):
        assert parse_tool_arguments(Tool, "", flags.split(), repeated=True) == expected
    else:
        with pytest.raises(ConfigurationError) as refused:
            parse_tool_arguments(Tool, "", flags.split(), repeated=True)
        assert str(refused.value) == expected


@dataclass(frozen=True)
class Inspection:
    load: str | None = field(default=None, metadata=ALSO_POSITIONAL)
    verify: bool = False


def test_a_flag_of_a_tool_may_be_left_out_where_its_value_can_mean_nothing_else() -> None:
    for flags in ("run --verify", "--verify run", "--load run --verify"):
        assert parse_tool_arguments(Inspection, "", flags.split()) == Inspection("run", verify=True)
    assert parse_tool_arguments(Inspection, "", []) == Inspection()
    for flags, told in {"run --load run": "--load is given, and 'run'", "run other": "LOAD is one word"}.items():
        with pytest.raises(ConfigurationError, match=told):
            parse_tool_arguments(Inspection, "", flags.split())


def test_a_tool_refuses_values_that_no_flag_takes() -> None:
    for flags, message in (("x", "no flag takes 'x'"), ("--load x y", "--load takes 1 value, got 'x y'")):
        with pytest.raises(ConfigurationError, match=f"^{message}$"):
            parse_tool_arguments(generate.Arguments, "", flags.split())


def test_no_flag_that_is_refused_is_suggested() -> None:
    refused = [name for name in megatron_flags.names() if megatron_flags.refusal(name)]
    assert len(refused) > 300
    for name in refused[::10]:
        suggested = failure([*MINIMAL, f"--{name}x"]).partition("did you mean --")[2].rstrip("?")
        assert not suggested or megatron_flags.refusal(suggested) is None
    assert (
        failure([*MINIMAL, "--moe-apply-probs-on-inpu"])
        == "unknown flag --moe-apply-probs-on-inpu (--help all describes all flags)"
    )
    assert failure([*MINIMAL, "--no-rope-fusio"]) == "unknown flag --no-rope-fusio, did you mean --no-rope-fusion?"


def test_a_value_before_any_flag_is_an_error() -> None:
    assert failure(["stray", *MINIMAL]) == "'stray' comes before the first flag"


def test_yaml_gives_fields_and_flags_override_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL_YAML)
    config = parse_arguments(["--num-layers", "5", "--config", str(path), "--data-path", "c"]).config
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (5, 32, 1e-4)
    assert config.data.data_path == ("c",)


def test_mistakes_in_the_yaml_of_a_command_line_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL_YAML + "parallel:\n  tensor_parallel_size: 2\n")
    expected = "unknown key 'tensor_parallel_size', did you mean tensor_model_parallel_size?"
    assert failure(["--config", str(path)]).startswith(f"{path}, line 8: {expected}")


def test_sequence_parallel_alone_is_switched_off_with_a_note() -> None:
    parsed = parse_arguments([*MINIMAL, "--sequence-parallel"])
    assert not parsed.config.parallel.sequence_parallel
    assert parsed.notes == ("--sequence-parallel: changes nothing, since --tensor-model-parallel-size is 1",)
    split = parse_arguments([*MINIMAL, "--sequence-parallel", "--tp", "2"])
    assert split.config.parallel.sequence_parallel
    assert split.notes == ()


def shown_help(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ending:
        parse_arguments(words.split())
    assert ending.value.code == 0
    return capsys.readouterr().out


def test_help_all_lists_every_field_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_help("--help all", capsys)
    assert all(f"--{name.replace('_', '-')} " in shown.replace(",", " ") for name in fields_by_name())
    assert all(f"{section} options" in shown for section in section_types())


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_help_begins_with_a_page_that_fits(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    lines = shown_help("--help", capsys).splitlines()
    assert max(map(len, lines)) <= min(columns, 112)
    assert columns < 80 or len(lines) <= 50
    assert max(map(len, shown_help("--help data parallel", capsys).splitlines())) <= min(columns, 112)
    listed = {line.split()[0] for line in lines if re.match(r"  [\w-]+ +\S", line)}
    required = {f"--{name.replace('_', '-')}" for name, place in fields_by_name().items() if place.required}
    assert listed >= {*required, *section_types(), "all", "--train-iters", "--data-path", "--save"}


def test_help_of_a_topic_has_its_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("--help model", "--help=model", "-h model", "--num-layers 2 --help model --lr 1"):
        shown = shown_help(words, capsys)
        assert "model options:" in shown
        assert "optimizer options:" not in shown
    assert "--num-layers whole number\n      Transformer layers. (must be given)\n" in shown
    both = shown_help("--help optimizer model", capsys)
    assert both.index("optimizer options:") < both.index("model options:")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--help optimiser", "there is no such topic, did you mean optimizer?; there are model, parallel, data, "),
        ("--help=lr", "this flag is in --help optimizer"),
        ("-h all 7", "there is no such topic; there are model, "),
    ],
)
def test_help_of_no_topic_says_which_there_are(words: str, says: str) -> None:
    assert failure(words.split()).startswith(f"--help {words.replace('=', ' ').split()[-1]}: {says}")


def test_configuration_needs_neither_torch_nor_a_thread() -> None:
    program = (
        "import sys, threading; from megalite.config import parse_arguments, resolve;"
        f"resolve(parse_arguments({MINIMAL!r} + '--train-iters 1 --mock-data --tokenizer-type ByteTokenizer "
        "--position-embedding-type rope'.split()).config, 1);"
        "assert 'torch' not in sys.modules and threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_a_precision_aware_optimizer_in_fp32_is_off_with_a_note() -> None:
    parsed = parse_arguments([*MINIMAL, "--use-precision-aware-optimizer"])
    assert not parsed.config.optimizer.use_precision_aware_optimizer
    assert parsed.notes == ("--use-precision-aware-optimizer: changes nothing, since its dtypes are all fp32",)
    assert parse_arguments([*MINIMAL, "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"]).notes == ()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--exp-avg-sq-dtype bf16", "--exp-avg-sq-dtype bf16 with --adam-beta2 0.999: a step lowers"),
        ("--exp-avg-sq-dtype bf16 --adam-beta2 0.99", None),
        ("--exp-avg-dtype fp16", "--exp-avg-dtype fp16: averages of gradients below 6e-8"),
        ("--exp-avg-dtype int8", "--exp-avg-dtype int8 with --exp-avg-sq-dtype fp32: weights whose gradients"),
        ("--exp-avg-dtype int8 --exp-avg-sq-dtype int8", None),
        ("--main-params-dtype fp16", "--main-params-dtype fp16: a step that changes a weight by less"),
    ],
)
def test_a_precision_that_may_disappoint_is_noted(flags: str, expected: str | None) -> None:
    notes = parse_arguments([*MINIMAL, "--use-precision-aware-optimizer", *flags.split()]).notes
    assert len(notes) == (expected is not None)
    assert expected is None or notes[0].startswith(expected)


def test_layers_that_zero_3_has_whole_together_are_noted() -> None:
    flags = "--data-parallel-sharding-strategy optim_grads_params --recompute-granularity full"
    for method, layers, noted in (("uniform", 4, True), ("uniform", 1, False), ("block", 4, False)):
        recompute = ["--recompute-method", method, "--recompute-num-layers", str(layers)]
        notes = parse_arguments([*MINIMAL, *flags.split(), *recompute]).notes
        assert any("all of their parameters at once" in note for note in notes) == noted


def test_bf16_squares_stop_falling_where_the_note_says() -> None:
    """This is the reason for the note; the gradient is zero."""
    squares = torch.linspace(1.0, 2.0, 129).bfloat16()  # every bf16 between
    falls = {beta2: (squares.float() * beta2).bfloat16() < squares for beta2 in (0.999, 0.99)}
    assert falls[0.999].sum() <= 1
    assert falls[0.99].all()


def test_nothing_at_all_is_answered_in_two_lines() -> None:
    missing, hint = failure([]).splitlines()
    assert missing.startswith("missing: --num-layers, --hidden-size, ")
    assert hint == "--help shows what a run needs, and one to try on made-up data; --help all describes all flags"


def test_the_first_run_of_the_help_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    command, *_ = re.findall(r"pretrain_gpt\.py (--num-layers.*?)\n\n", shown_help("--help", capsys), re.DOTALL)
    resolve(parse_arguments(command.replace("\\\n", " ").split()).config, 1)
