"""The commands in the README and examples/ work as written: each is run by a shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megalite.commands.evaluate import Arguments as Evaluation
from megalite.config.parse import parse_arguments
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.config.validate import resolve
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.parallel.mesh import ParallelMesh
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from megalite.training.builder import count_parameters, make_chunks, make_stages
from tests.end_to_end.runs import PRETRAIN, ROOT, ended, iterations, latest_iteration, words
from tests.harness.job import Job, run_script
from tests.harness.token_files import add_document

TINY = words(
    "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 3 --eval-iters 1 --log-interval 1 --lr-warmup-iters 0"
)


def shell(command: str, directory: Path, expected: int = 0, **environment: str) -> str:
    """Run a command with this interpreter's `python` and `torchrun`; return its output."""
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=directory,
        env=os.environ
        | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
            "OMP_NUM_THREADS": "1",
        }
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == expected, f"{command}\n{result.stdout}"
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like a checkout, so that nothing is written into the real one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pretrain_gpt.py", "tools", "examples", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def corpus_there(checkout: Path) -> Path:
    """Return the folder with a corpus in it."""
    folder = checkout
    # A small part of the corpus that `make train` builds; what already exists is kept.
    shell("mkdir run && python examples/standard_library_corpus.py --output run/whole.jsonl", folder)
    lines = (folder / "run/whole.jsonl").read_text().splitlines(keepends=True)
    (folder / "run/whole.jsonl").unlink()
    (folder / "run/corpus.jsonl").write_text("".join(lines[::20]))
    return folder


@pytest.fixture(scope="module")
def first_run(corpus_there: Path) -> str:
    """Return the output of `make train STEPS=2`."""
    return shell("examples/train_small_llama.sh", corpus_there, STEPS="2")


@pytest.mark.wide
def test_the_first_run_trains_and_writes(first_run: str, checkout: Path) -> None:
    assert "step 2/2" in first_run
    assert "def __init__(self" in first_run
    assert (checkout / "run/small-llama/DONE").exists()


@pytest.mark.slow
def test_the_first_run_goes_on_with_more_steps(first_run: str, checkout: Path) -> None:
    out = shell("examples/train_small_llama.sh", checkout, STEPS="3")
    assert "step 3/3" in out
    assert iterations(checkout / "run/small-llama") == [1, 2, 3]


@pytest.mark.wide
@pytest.mark.usefixtures("first_run")
def test_every_command_of_the_readme_runs_in_its_order(checkout: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        shell(block, checkout)
    assert latest_iteration(checkout / "run/mine-llama") == 20


def test_every_training_of_the_readme_is_configured() -> None:
    """Check the commands' configurations, without the seconds that each start takes."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    trainings = [c for c in commands if "pretrain_gpt.py" in c and "--load" not in c]  # that folder does not exist here
    assert len(trainings) >= 3
    for command in trainings:
        ranks = int(command[command.index("--nproc-per-node") + 1]) if "torchrun" in command else 1
        resolve(parse_arguments(command[command.index("pretrain_gpt.py") + 1 :]).config, ranks)


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux alone")
def test_every_command_on_kernels_runs(tmp_path: Path) -> None:
    """Run the commands that need no GPU."""
    (tmp_path / "run").mkdir()
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/kernels.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        shell(block, tmp_path)
    assert (tmp_path / "run/kernels/kernels_cpu.svg").exists()


@pytest.mark.wide
@pytest.mark.usefixtures("corpus_there")
def test_every_command_on_the_doctor_runs(checkout: Path) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (section,) = re.findall(r"^## Checks before a run\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert "well" in shell(block, checkout)


@pytest.mark.wide
@pytest.mark.usefixtures("corpus_there")
def test_the_training_under_context_parallelism_runs(checkout: Path) -> None:
    (block,) = re.findall(
        r"^```bash\n(.*?)^```", (ROOT / "docs/context_parallel.md").read_text(), re.MULTILINE | re.DOTALL
    )
    out = shell(block, checkout)
    assert "128 of 256 tokens per rank in 2 chunks, by p2p" in out
    assert "step 5/5" in out
    assert "busiest_context_parallel_rank" in (checkout / "run/context/metrics.jsonl").read_text()


def test_every_flag_that_the_readme_names_is_one(tmp_path: Path) -> None:
    """Check flags in the text around the commands, too."""
    helped = run_script([PRETRAIN, "--help", "all"], tmp_path)
    assert helped.code == 0
    files = (*(ROOT / "megalite").rglob("commands/*.py"), *(ROOT / "examples").glob("*.*"))
    known = "".join((helped.stdout, *(path.read_text() for path in files))).replace("_", "-")
    for flag in set(re.findall(r"`(?:[^`]* )?--([a-z][a-z-]+)", (ROOT / "README.md").read_text())):
        assert flag in known, flag


# ---------------------------------------------------------------------------------------------------- recipes


def recipe_flags(name: str, tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    """Return the arguments that a recipe gives to the program: torchrun is replaced by a script that prints them."""
    if name.endswith(".yaml"):
        return ["--config", str(ROOT / "examples" / name), *arguments]
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    command = [ROOT / "examples" / name, *arguments]
    path = f"{tmp_path}:{os.environ['PATH']}"
    out = subprocess.run(command, env=os.environ | {"PATH": path} | environment, capture_output=True, check=True)
    printed = out.stdout.decode().splitlines()
    return printed[printed.index("pretrain_gpt.py") + 1 :]


@pytest.fixture
def train(spawn: Callable[..., Job], tmp_path: Path) -> Callable[..., str]:
    """Train with a recipe's flags on 2 ranks; return the output."""

    def run(name: str, *arguments: str, **environment: str) -> str:
        flags = recipe_flags(name, tmp_path, *arguments, **environment)
        return ended(spawn([PRETRAIN, *flags], 2)).stdout

    return run


MOCK_LLAMA = words("--mock-data --tokenizer-type NullTokenizer --vocab-size 31999")


@pytest.mark.wide
def test_gpt2_124m(train: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    save = str(tmp_path / "run")
    out = train("gpt2_124m.sh", *TINY, "--vocab-size", "60", SAVE=save)
    assert "step 3/3" in out
    assert latest_iteration(tmp_path / "run") == 3
    data = {"DATA": str(corpus / "corpus_text_document"), "TOKENIZER": str(corpus / "tokenizer.model")}
    assert "step 3/3" in train("gpt2_124m.sh", *TINY, "--split", "90,10,0", SAVE=f"{save}-data", **data)


@pytest.mark.wide
def test_llama_160m(train: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    assert "step 3/3" in train("llama_160m.yaml", *MOCK_LLAMA, *TINY)
    data = ["--data-path", str(corpus / "corpus_text_document"), "--save", str(tmp_path / "run")]
    data += ["--tokenizer-model", str(corpus / "tokenizer.model"), "--split", "90,10,0"]
    assert "step 3/3" in train("llama_160m.yaml", *data, *TINY)


@pytest.mark.wide
def test_megatron_style(train: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    save, extra = str(tmp_path / "run"), shlex.join([*TINY, *words("--num-query-groups 2 --kv-channels 8")])
    out = train("megatron_style.sh", save, EXTRA_FLAGS=extra)
    assert "step 3/3" in out
    (line,) = re.findall("^.* flags change nothing here .*$", out, re.MULTILINE)
    assert {"--use-mcore-models", "--transformer-impl", "--attention-backend"} <= set(line.split())
    again = train("megatron_style.sh", save, EXTRA_FLAGS=f"{extra} --train-iters 4")
    assert f"continues from {save}/iter_0000003" in again
    data = [str(corpus / "corpus_text_document"), str(corpus / "tokenizer.model")]
    assert "step 3/3" in train("megatron_style.sh", f"{save}-data", *data, EXTRA_FLAGS=f"{extra} --split 90,10,0")


@pytest.mark.wide
def test_large_batch(train: Callable[..., str], tmp_path: Path) -> None:
    """The rate is that of a batch of 8, times 2."""
    with IndexedDatasetWriter(str(tmp_path / "bytes_text_document"), np.uint16, ByteTokenizer().identity()) as writer:
        for line in Path(__file__).read_bytes().splitlines():
            add_document(writer, [*line, 256])
        writer.finish()
    out = train("large_batch.sh", *TINY, "--lr-warmup-fraction", "0", "--global-batch-size", "16", RUN=str(tmp_path))
    assert "step 3/3" in out
    assert "2.000e-03" in out
    assert latest_iteration(tmp_path / "large-batch-lamb") == 3


LONG = {"DATA": "short", "LONG_DATA": "long", "TOKENIZER_MODEL": "mine"}


def long_context_commands(folder: Path, **environment: str) -> list[list[str]]:
    """Return the commands that the recipe gives to torchrun, in its order; no evaluation leaves its file."""
    (folder / "torchrun").write_text(f'#!/bin/sh\n(printf "%s\\n" "$@"; echo) >> {folder}/commands\n')
    (folder / "torchrun").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**os.environ, **LONG, "PATH": path, "RUN": str(folder), **environment}
    subprocess.run([ROOT / "examples/long_context.sh"], env=environment, check=True)
    return [command.splitlines() for command in (folder / "commands").read_text().split("\n\n")[:-1]]


def test_the_recipe_for_long_context_is_configured(tmp_path: Path) -> None:
    """Each step has the same tokens, and what a phase needs: YaRN by the lengths, ranks for a sample, its sources."""
    (tmp_path / "long-context").mkdir()
    commands = long_context_commands(tmp_path, PROCESSES="64")
    programs = [command[3] for command in commands]
    assert programs == ["pretrain_gpt.py", "tools/evaluate.py"] * 3
    runs = [resolve(parse_arguments(command[4:]).config, 64) for command in commands[::2]]
    assert [run.data.seq_length for run in runs] == [4096, 32768, 131072]
    assert [run.training.train_iters for run in runs] == [25000, 25500, 25750]
    assert {run.data.seq_length * (run.training.global_batch_size or 0) for run in runs} == {2**22}
    assert {(run.optimizer.lr_decay_iters, run.optimizer.lr) for run in runs} == {(25750, 3e-4)}
    assert [run.parallel.context_parallel_size for run in runs] == [1, 2, 8]
    models = [run.model for run in runs]
    assert [model.position_embedding_type for model in models] == ["rope", "yarn", "yarn"]
    assert [model.rotary_scaling_factor for model in models] == [1.0, 8.0, 32.0]
    assert [model.yarn_original_max_position_embeddings for model in models] == [None, 4096, 4096]
    assert [run.checkpoint.allow_changed_rotary for run in runs] == [False, True, True]
    first, second = yaml.safe_load((tmp_path / "long-context/mix.yaml").read_text())["phases"]
    assert "from" not in first
    assert second["from"] == 25000 * 2**22
    searches = [parse_tool_arguments(Evaluation, "", command[4:]) for command in commands[1::2]]
    assert [search.needle_lengths for search in searches] == [(4096,), (4096, 32768), (4096, 32768, 131072)]
    assert [search.context_parallel_size for search in searches] == [1, 2, 8]
    for search, length in zip(searches[:2], (4096, 32768), strict=True):
        assert search.output == str(tmp_path / f"long-context/needles_{length}.json")
        Path(search.output).write_text("{}")
    again = long_context_commands(tmp_path, PROCESSES="64")
    assert again[len(commands) :] == commands[4:], "phases that are finished are passed over"


@pytest.mark.wide
def test_long_context(checkout: Path, tmp_path: Path) -> None:
    """A run goes through two lengths, of which no token is lost or read twice."""
    texts = {"short": Path(__file__).read_bytes().splitlines(), "long": [(ROOT / "README.md").read_bytes()]}
    for name, documents in texts.items():
        with IndexedDatasetWriter(str(tmp_path / name), np.uint16, ByteTokenizer().identity()) as writer:
            for document in documents:
                add_document(writer, [*document, 256])
            writer.finish()
    sizes = {"LENGTHS": "256 1024", "STEPS": "4 2", "CONTEXT_PARALLEL": "1 2", "TOKENS": "2048", "NEEDLES": "1"}
    where = {"DATA": str(tmp_path / "short"), "LONG_DATA": str(tmp_path / "long"), "RUN": str(tmp_path)}
    small = (
        "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --num-query-groups 1 --no-bf16"
    )
    command = f"examples/long_context.sh {small} --log-interval 1"
    out = shell(command, checkout, PROCESSES="2", TOKENIZER_TYPE="ByteTokenizer", **sizes, **where)
    run = tmp_path / "long-context"
    assert [f"step {step}/{end}" in out for step, end in ((4, 4), (6, 6))] == [True] * 2
    assert "position_embedding_type rope -> yarn, rotary_scaling_factor 1.0 -> 4.0" in out
    assert "note: data mix: sample 8 is the first of a phase: short 60 %, long 40 %" in out
    assert "note: learning rate" not in out
    found = json.loads((run / "needles_1024.json").read_text())["needle"]
    assert [each["length"] for each in found] == [length for length in (256, 1024) for _ in range(5)]
    said = shell(f"python tools/inspect_dataset.py --ledger {run}", checkout)
    assert "no token of a pass is missing before the next one, or comes twice" in said


WITH_EXPERTS = {
    "mixtral_8x7b.yaml": (32000, 46702.8),
    "qwen1.5_moe_a2.7b.yaml": (151936, 14315.8),
    "qwen3_30b_a3b.yaml": (151936, 30532.1),
    "glm4.5_air.yaml": (151552, 106852.2),
    "gpt_oss_20b.yaml": (201088, 20914.8),
    "switch_base_8.yaml": (32128, 307.8),
}
"""Vocabulary and millions of parameters of each recipe with experts, counted by transformers if it has the model."""


def tokens(vocabulary: int) -> list[str]:
    """Return flags for random tokens of a vocabulary, which includes the end of document."""
    return words(f"--mock-data --tokenizer-type NullTokenizer --vocab-size {vocabulary - 1}")


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "qwen1.5_moe_a2.7b.yaml" else pytest.mark.wide) for name in WITH_EXPERTS],
)
def test_recipes_with_experts(train: Callable[..., str], tmp_path: Path, name: str) -> None:
    small = words(
        "--num-layers 2 --kv-channels 8 --num-experts 4 --moe-layer-freq 1 --moe-ffn-hidden-size 16 --ep 2 --pp 1"
    )
    fields = parse_arguments(recipe_flags(name, tmp_path, *tokens(60))).config.model
    if fields.group_query_attention:
        small += words("--num-query-groups 1")
    if fields.moe_router_topk > 2:
        small += words("--moe-router-topk 2")
    if fields.moe_shared_expert_intermediate_size is not None:
        small += words("--moe-shared-expert-intermediate-size 16")
    out = train(name, *tokens(60), *TINY, *small)
    assert "step 3/3" in out
    assert "2 layers have 4 experts" in out


WITH_PATTERNS = {"nemotron_h_8b.yaml": (131072, 8100.9), "qwen3_next_80b_a3b.yaml": (151936, 79674.4)}
"""The same of recipes of layers as letters."""
_LARGE = WITH_EXPERTS | WITH_PATTERNS
SMALLER = {
    "nemotron_h_8b.yaml": "--hybrid-layer-pattern M*- --mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 8 "
    "--mamba-num-groups 2",
    "qwen3_next_80b_a3b.yaml": "--hybrid-layer-pattern GE*E --linear-num-key-heads 2 --linear-num-value-heads 4 "
    "--linear-key-head-dim 8 --linear-value-head-dim 8 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-shared-expert-intermediate-size 16 --ep 2 --pp 1",
}


@pytest.mark.wide
@pytest.mark.parametrize("name", WITH_PATTERNS)
def test_recipes_with_patterns(train: Callable[..., str], name: str) -> None:
    small = words(f"{SMALLER[name]} --num-query-groups 2 --kv-channels 8 --lr-wsd-decay-iters 1")
    small = small[:-2] if name == "qwen3_next_80b_a3b.yaml" else small
    assert "step 3/3" in train(name, *tokens(60), *TINY[2:], *small)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "changed"), [("tiny_hybrid", "32 --lr 2e-2"), ("deepseek_tiny", "64 --lr 7e-3")])
def test_a_tiny_network_learns(train: Callable[..., str], name: str, changed: str, tmp_path: Path) -> None:
    """Its first steps, on shorter samples."""
    save = ("--save", str(tmp_path / "run"))
    train(f"{name}.yaml", "--mock-data", "--train-iters", "30", "--seq-length", *words(changed), *save)
    losses = [json.loads(line).get("lm_loss") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [loss for loss in losses if loss is not None]
    assert len(steps) == 30
    assert steps[-1] < 0.6 * steps[0]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "arguments", "millions"),
    [
        ("gpt2_124m.sh", (), 124.4),
        ("llama_160m.yaml", MOCK_LLAMA, 162.4),
        ("megatron_style.sh", (), 8030),
        *((name, tuple(tokens(vocabulary)), millions) for name, (vocabulary, millions) in _LARGE.items()),
    ],
)
def test_recipes_are_of_the_size_they_name(
    name: str, arguments: tuple[str, ...], millions: float, tmp_path: Path
) -> None:
    config = resolve(parse_arguments(recipe_flags(name, tmp_path, *arguments)).config, 64 if name in _LARGE else 2)
    assert config.model.vocab_size is not None
    model = replace(config.model, vocab_size=config.model.vocab_size + 1)  # the end of document is added
    mesh = ParallelMesh(rank=0, world_size=1, tensor_parallel_size=1, device=torch.device("meta"))
    config = replace(config, parallel=replace(config.parallel, pipeline_model_parallel_size=1))
    chunks = make_chunks(config, model, mesh, make_stages(config))
    assert abs(count_parameters(chunks, mesh) / 1e6 - millions) < 0.001 * millions


# ---------------------------------------------------------------------------------------------------- torchrun


TORCHRUN = "torchrun --standalone --nproc-per-node 2 pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer "
TORCHRUN += f"--vocab-size 9 --max-position-embeddings 16 --lr 1e-3 {shlex.join(TINY)}"


def test_under_torchrun_our_message_stands_once_before_its_block(checkout: Path) -> None:
    out = shell(f"{TORCHRUN} --hiden-size 16", checkout, expected=1)
    message = "error: unknown flag --hiden-size, did you mean --hidden-size?\n"
    assert out.startswith(message) or f"\n{message}" in out
    assert len(re.findall(r"^error", out, re.MULTILINE)) == 1
    assert out.index(message) < out.index("ChildFailedError")
    assert re.search(r"exitcode *: 64", out)


def last_words_of_torchrun(out: str) -> str:
    """Return what a person sees last: the root cause, down to the end of torchrun's block."""
    found = re.search(r"Root Cause.*?\n  traceback : (.*)\n=+\s*\Z", out, re.DOTALL)
    assert found is not None, out
    return found[1]


FAULTY = """
import os, signal
from megalite.commands.pretrain import command
from megalite.training.trainer import Trainer

step, steps = Trainer.step, 0

def faulty(trainer, *values):
    global steps
    steps += 1
    if steps == 3 and os.environ["RANK"] == "{rank}":
        {fault}
    return step(trainer, *values)

Trainer.step = faulty
command()
"""


@pytest.mark.wide  # each starts a real torchrun, which takes seconds
@pytest.mark.parametrize(
    ("rank", "fault", "begins", "ends"),
    [
        (0, "--mock-data=--data-path nowhere", "error: nowhere.idx does not exist", "megalite-preprocess prints it."),
        (1, "raise IndexError('off by one')", "error on rank 1: a defect in megalite", "IndexError: off by one"),
        (0, "os.kill(os.getpid(), signal.SIGKILL)", "error: rank 0 (process ", "from its last checkpoint"),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", "error: rank 1 (process ", "from its last checkpoint"),
    ],
    ids=["data path", "exception", "killed rank 0", "killed rank 1"],
)
def test_under_torchrun_our_message_stands_last(
    rank: int, fault: str, begins: str, ends: str, checkout: Path, tmp_path: Path
) -> None:
    command = f"{TORCHRUN} --train-iters 9"
    if fault.startswith("--"):
        command = command.replace(*fault.split("=", 1))
    else:
        (tmp_path / "faulty.py").write_text(FAULTY.format(rank=rank, fault=fault))
        command = command.replace("pretrain_gpt.py", str(tmp_path / "faulty.py"))
    out = shell(command, checkout, expected=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    last = last_words_of_torchrun(out)
    assert last.startswith(begins)
    assert last.rstrip().endswith(ends)


@pytest.mark.wide  # test_stop.py stops ranks in every way; tests/kubernetes have a real torchrun
def test_under_torchrun_a_stop_saves(checkout: Path, tmp_path: Path) -> None:
    out = shell(f"{TORCHRUN} --save {tmp_path} --exit-interval 2", checkout, expected=1)  # its exit code for all errors
    assert re.search(r"exitcode *: 85", out)
    assert not re.search("^error", out, re.MULTILINE)
    assert not (tmp_path / "DONE").exists()
    assert iterations(tmp_path) == [1, 2]
    assert latest_iteration(tmp_path) == 2


@pytest.mark.wide
@pytest.mark.parametrize("program", ["training", "generation"])
def test_a_reader_that_goes_away_ends_the_program_without_a_traceback(
    program: str, checkout: Path, request: pytest.FixtureRequest
) -> None:
    if program == "training":
        command = TORCHRUN.replace("torchrun --standalone --nproc-per-node 2", "python") + " --train-iters 9999"
    else:
        command = f"python tools/generate.py --load {request.getfixturevalue('byte_llama')} --prompt def"
    out = shell(f"set +o pipefail; {command} | head -c 3", checkout)
    assert "Traceback" not in out
    assert "interrupted: nobody reads the output any more" in out
