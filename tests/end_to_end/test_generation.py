"""Texts from a checkpoint: many prompts, on any split over ranks, to the terminal or a file."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import GENERATE, LLAMA, NO_DROPOUT, PRETRAIN, ended, words
from tests.harness.job import Job
from tests.harness.tool import Ended, run_tool

Spawn = Callable[..., Job]
PROMPTS = ["one", "number two is longer", "3"]
MODEL = [
    *LLAMA, *NO_DROPOUT, "--fp64", "--num-layers", 3, "--window-size", "5,0", "--window-attn-skip-freq", 2,
    "--lr", 1e-3, "--init-method-std", 0.5,
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory of a Llama with windows, trained very little: each prompt continues differently."""
    folder = tmp_path_factory.mktemp("trained")
    data = words("--mock-data --tokenizer-type ByteTokenizer")
    with Job([PRETRAIN, *data, *MODEL, "--train-iters", 1, "--save", folder / "run"], 1, folder / "job") as job:
        assert job.wait() == [0], job.stderr(0)
    return folder / "run"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of prompts, with lines that are not prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*PROMPTS, "", " \n"]))
    return path


def generate(*flags: Any) -> Ended:
    return run_tool("generate", *flags, "--max-new-tokens", 12)


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_texts_are_the_same_on_every_split_and_in_every_batch(trained: Path, file: Path, spawn: Spawn) -> None:
    flags = ["--load", trained, "--prompts", file, "--max-new-tokens", 12, "--top-p", 0.9]
    expected = generate(*flags, "--batch-size", 1)
    assert expected.code == 0
    for index, prompt in enumerate(PROMPTS, start=1):
        assert f"==> {index} of 3 <==\n{prompt}" in expected.stdout
    for world_size, split in ((2, ""), (2, "--pp 2"), (4, "--tp 2 --pp 2 --batch-size 2")):
        assert ended(spawn([GENERATE, *flags, *words(split)], world_size)).stdout == expected.stdout, split


def test_a_file_gets_a_line_for_each_text(trained: Path, file: Path, tmp_path: Path) -> None:
    flags = ["--load", trained, "--temperature", 0]
    assert generate(*flags, "--prompts", file, "--output", tmp_path / "out.jsonl").stdout.endswith("3 texts\n")
    lines = records(tmp_path / "out.jsonl")
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [line["finish_reason"] for line in lines] == ["stop", "length", "length"]
    assert len(lines[0]["text"]) < 12
    for line in lines:
        assert generate(*flags, "--prompt", line["prompt"]).stdout == f"{line['prompt']}{line['text']}\n"
    # Such a file is one of prompts, too.
    again = ["--prompts", tmp_path / "out.jsonl", "--output", tmp_path / "again.jsonl"]
    assert generate(*flags, *again).code == 0
    assert records(tmp_path / "again.jsonl") == lines
    refused = generate(*flags, *again)
    assert refused.code == 64
    assert "again.jsonl already exists" in refused.stderr


def test_a_killed_generation_leaves_what_is_complete_and_blocks_no_other(
    trained: Path, tmp_path: Path, spawn: Spawn
) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    flags = ["--load", trained, "--prompt", "one", "--prompt", "e", "--temperature", 0, "--output", output]
    job = spawn([GENERATE, *flags, "--batch-size", 1, "--max-new-tokens", 4000], 1)
    while not (partial.exists() and partial.read_text()):
        assert job.ranks[0].exit_code is None, job.stderr(0)
        time.sleep(0.01)
    job.kill(0, signal.SIGKILL)
    job.wait()
    assert [line["prompt"] for line in records(partial)] == ["one"]
    assert not output.exists()
    assert generate(*flags).code == 0
    assert [line["prompt"] for line in records(output)] == ["one", "e"]
    assert not partial.exists()


@pytest.mark.wide
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_suspended_while_texts_are_written_is_named(
    stopped: int, trained: Path, spawn: Spawn, tmp_path: Path
) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(
        "from megalite.commands import generate\nfrom megalite.watchdog import sections, watchdog\n"
        "watchdog._SILENT_SECONDS = watchdog._LEAVING_SECONDS = 0.5\n"
        "sections.Limits.silence = lambda limits, name: 2.0\ngenerate.command()\n"
    )
    endless = ["--prompt", "e", "--temperature", 0, "--max-new-tokens", 100_000]
    job = spawn([entry, "--load", trained, *endless, "--pp", 2], 2)
    job.wait_for_output(0, "eeeeeeee", timeout=60)
    job.kill(stopped, signal.SIGSTOP)
    codes = job.wait(60)
    assert (codes[stopped], codes[1 - stopped]) == (-signal.SIGKILL, 85)
    assert f"rank {stopped} (process {job.ranks[stopped].process.pid} " in job.stderr(1 - stopped)
    assert "has not answered for " in job.stderr(1 - stopped)


def test_prompts_come_from_flags_standard_input_and_a_file(
    trained: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstandard input\n"))
    flags = ["--load", trained, "--prompt", "first", "--prompt", "-", "--prompts", file]
    assert generate(*flags, "--output", tmp_path / "out.jsonl").code == 0
    assert [line["prompt"] for line in records(tmp_path / "out.jsonl")] == ["first", "from\nstandard input", *PROMPTS]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "there is no prompt"),
        ("--prompt - --prompt -", "--prompt - can be given only once"),
        ("--prompts {}/none.txt", "none.txt cannot be read"),
        ("--prompts {}/bad.jsonl", "bad.jsonl, line 2: not of the form"),
        ("--prompts {}/number.jsonl", 'number.jsonl, line 1: its "prompt" is not a text'),
        ("--prompt one --prompts {}/empty.jsonl", "prompt 2 of 2 has no tokens"),
        ("--prompt one --batch-size 0", "--batch-size 0"),
        ("--prompt one --tp 2", "start 2 (torchrun"),
        ("--prompt one --pp 0", "--pipeline-model-parallel-size 0"),
    ],
)
def test_what_is_wrong_is_said(flags: str, message: str, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "good"}\n{"text": "bad"}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": 1}\n')
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    refused = generate("--load", trained, *words(flags.format(tmp_path)))
    assert refused.code == 64
    assert message in refused.stderr


@pytest.mark.parametrize(("world_size", "split"), [(1, ""), (2, "--pp 2")])
def test_ctrl_c_ends_in_good_order(world_size: int, split: str, trained: Path, spawn: Spawn) -> None:
    endless = ["--prompt", "e", "--temperature", 0, "--max-new-tokens", 100_000]
    job = spawn([GENERATE, "--load", trained, *endless, *words(split)], world_size)
    job.wait_for_output(0, "eeeeeeee", timeout=60)
    job.kill_all(signal.SIGINT)
    assert job.wait(60) == [85] * world_size
    stderr = "".join(job.stderr(rank) for rank in range(world_size))
    assert re.fullmatch(r"error( on rank 1)?: interrupted\n", stderr)  # once, by the first rank that is heard
    assert job.stdout(0).endswith("e\n")


def test_a_hugging_face_folder_is_as_good(tmp_path: Path) -> None:
    """Use a vocabulary larger than the tokenizer's, as many models have; the additional tokens are never chosen, even
    with scores far above all others."""
    import tokenizers
    from safetensors.torch import load_file, save_file

    from tests.harness import huggingface

    huggingface.save(tmp_path, "llama")  # with 67 tokens
    vocabulary = {f"w{number}": number for number in range(20)} | {"<end>": 20}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][len(vocabulary) :] *= 1e3
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    text = run_tool("generate", "--load", tmp_path, "--prompt", "w3 w4", "--max-new-tokens", 200, "--seed", 3)
    assert text.code == 0, text.stderr
    assert len(text.stdout.split()) > 10
    assert set(text.stdout.split()) <= set(vocabulary)
    (tmp_path / "tokenizer.json").unlink()
    refused = run_tool("generate", "--load", tmp_path, "--prompt", "w3 w4")
    assert refused.code == 64
    assert "has no tokenizer" in refused.stderr
