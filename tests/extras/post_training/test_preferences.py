"""DPO and IPO equal plain loops, on every layout, whenever they stop, and with log-probabilities from a file."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.manifest import read_manifest
from megalite.config import DataConfig
from megalite.data.datasets import Samples
from megalite.data.loader import MicroBatchArrays
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.extras.post_training.pairs import build_pair_datasets
from megalite.extras.post_training.preferences import of_responses, pair_batch
from megalite.parallel.mesh import ParallelMesh
from megalite.training.batches import to_micro_batches
from tests.end_to_end.bytes_by_oracle import LLAMA as ORACLE
from tests.end_to_end.runs import (
    LLAMA,
    NO_DROPOUT,
    PRETRAIN,
    ROOT,
    Ended,
    assert_same_checkpoint,
    ended,
    metrics,
    saved_weights,
    words,
)
from tests.harness import huggingface
from tests.harness.job import Job

FINETUNE = ROOT / "finetune_gpt.py"
LENGTH, BATCH, STEPS, RATE = 64, 4, 3, 0.5
NETWORK = (
    *LLAMA,
    *NO_DROPOUT,
    *words(f"--tokenizer-type ByteTokenizer --no-report --seq-length {LENGTH} --fp64"),
    "--max-position-embeddings",
    LENGTH,
)
PLAIN = words(
    f"--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --lr {RATE} --lr-decay-style constant "
    f"--global-batch-size {BATCH} --train-iters {STEPS} --split 80,20,0 --seed 7"
)
LOSSES = {
    "dpo": (0.0, 0.1),
    "smoothed": (0.2, 0.4),
    "ipo": (0.0, 0.3),
}
EVALUATED = words("--eval-iters 1 --eval-interval 2 --save-interval 1")
RECORDED = ("chosen", "rejected", "margins", "accuracies")
Score = Callable[[str, str], Tensor]
"""Function from a prompt and a response to the log-probabilities of the response's tokens."""


def pairs() -> list[dict[str, str]]:
    draw = random.Random(3)

    def text(least: int, most: int) -> str:
        return "".join(draw.choice("abcdef ") for _ in range(draw.randint(least, most)))

    return [{"prompt": text(2, 8), "chosen": text(1, 12), "rejected": text(1, 12)} for _ in range(40)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of `write_base`."""
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder


def write_base(folder: Path, *flags: Any) -> None:
    """Write pairs, a run of two steps, and another, which is the reference."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in pairs()))
    for name, seed in (("begun", 1), ("reference", 2)):
        argv: list[Any] = [PRETRAIN, *NETWORK, *flags, "--mock-data", "--train-iters", 2, "--seed", seed]
        with Job([*argv, "--save", folder / name], 1, folder / f"job of {name}") as job:
            ended(job)


Spawn = Callable[..., Job]


def finetuned(
    spawn: Spawn, base: Path, save: Path, *flags: Any, ranks: int = 1, reference: bool = True, expected: int = 0
) -> Ended:
    """Run the program on the pairs; of flags that are given twice, the last one counts."""
    data = ("--preference-data", base / "pairs.jsonl", "--data-cache-path", base / "cache")
    begin = ("--load", base / "begun", "--finetune", "--save", save)
    model = ("--reference-model", base / "reference" / "iter_0000002") if reference else ()
    return ended(spawn([FINETUNE, *NETWORK, *PLAIN, *data, *begin, *model, *flags], ranks), expected)


def records(directory: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(directory) if "grad_norm" in line]


def batches(path: Path) -> list[list[int]]:
    """Return the numbers of the pairs of each step."""
    data = DataConfig(seq_length=LENGTH, tokenizer_type="ByteTokenizer", preference_data=(str(path),), split="80,20,0")
    train = build_pair_datasets(data, Samples(BATCH * STEPS, 0, 0), 7, ByteTokenizer(), None).train
    assert train is not None
    of_samples = [sorted({int(n) // 2 for n in train[k]["responses"] if n >= 0}) for k in range(BATCH * STEPS)]
    return [[pair for each in of_samples[k : k + BATCH] for pair in each] for k in range(0, BATCH * STEPS, BATCH)]


def figures(kind: str, of_pairs: Sequence[int], trained: Score, reference: Score) -> dict[str, Tensor]:
    """Return the loss of pairs and what is recorded, by a plain loop."""
    smoothing, beta = LOSSES[kind]
    rows = []
    for pair in of_pairs:
        record, gains = pairs()[pair], []
        for name in ("chosen", "rejected"):
            scores = trained(record["prompt"], record[name])
            with torch.no_grad():
                before = reference(record["prompt"], record[name])
            gain = (scores - before).mean() if kind == "ipo" else scores.sum() - before.sum()
            gains.append(gain)
        margin = gains[0] - gains[1]
        if kind == "ipo":
            loss = (margin - 0.5 / beta) ** 2
        else:
            loss = -(1 - smoothing) * F.logsigmoid(beta * margin) - smoothing * F.logsigmoid(-beta * margin)
        rows.append(torch.stack([loss, beta * gains[0], beta * gains[1], beta * margin, (margin > 0).to(loss.dtype)]))
    return dict(zip(("loss", *RECORDED), torch.stack(rows).mean(0), strict=True))


def ids_of(prompt: str, response: str) -> Tensor:
    return torch.tensor([[*(prompt + response).encode(), ByteTokenizer().eod]])


def by_oracle(weights: Mapping[str, Tensor]) -> Score:
    def score(prompt: str, response: str) -> Tensor:
        ids = ids_of(prompt, response)
        places = torch.arange(ids.shape[1] - 1)[None]
        logits = ORACLE.logits(dict(weights), ids[:, :-1], places)[..., : ByteTokenizer().vocab_size]
        scores = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        return scores[len(prompt) - 1 :]

    return score


def flags_of(kind: str) -> tuple[Any, ...]:
    smoothing, beta = LOSSES[kind]
    name = "ipo" if kind == "ipo" else "dpo"
    return "--preference-loss", name, "--preference-beta", beta, "--preference-label-smoothing", smoothing


@pytest.mark.parametrize("kind", LOSSES)
def test_steps_equal_an_independent_loop_in_float64(kind: str, base: Path, spawn: Spawn, tmp_path: Path) -> None:
    finetuned(spawn, base, tmp_path / "run", *flags_of(kind), "--eval-iters", 0)
    weights = saved_weights(base / "begun" / "iter_0000002")
    reference = by_oracle(saved_weights(base / "reference" / "iter_0000002"))
    found = records(tmp_path / "run")
    for line, of_pairs in zip(found, batches(base / "pairs.jsonl"), strict=True):
        weights = {name: each.detach().requires_grad_() for name, each in weights.items()}
        expected = figures(kind, of_pairs, by_oracle(weights), reference)
        name = "ipo_loss" if kind == "ipo" else "dpo_loss"
        assert line[name] == pytest.approx(expected["loss"].item(), rel=1e-10)
        for each in RECORDED:
            assert line[f"rewards/{each}"] == pytest.approx(expected[each].item(), rel=1e-10, abs=1e-12)
        gradients = torch.autograd.grad(expected["loss"], list(weights.values()))
        weights = {
            name: each - RATE * gradient for (name, each), gradient in zip(weights.items(), gradients, strict=True)
        }
    for name, each in saved_weights(tmp_path / "run" / f"iter_{STEPS:07}").items():
        rows = ByteTokenizer().vocab_size  # those behind it are padding
        torch.testing.assert_close(each[:rows], weights[name][:rows].detach(), rtol=1e-10, atol=1e-12)


def test_a_step_equals_a_plain_loop_with_transformers(base: Path, spawn: Spawn, tmp_path: Path) -> None:
    changes = {"vocab_size": ByteTokenizer().vocab_size}
    model = huggingface.save(tmp_path / "model", "llama", changes)
    other = huggingface.make_model(huggingface.make_config("llama", changes), seed=5)
    other.save_pretrained(tmp_path / "other")
    data = ("--preference-data", base / "pairs.jsonl", "--data-cache-path", base / "cache")
    network = words(f"--tokenizer-type ByteTokenizer --no-report --seq-length {LENGTH} --micro-batch-size 2")
    begin = ("--load", tmp_path / "model", "--reference-model", tmp_path / "other", "--save", tmp_path / "run")
    ended(spawn([FINETUNE, *network, *PLAIN, *data, *begin, "--train-iters", 1, "--eval-iters", 0], 1))

    def by(network: Any) -> Score:
        def score(prompt: str, response: str) -> Tensor:
            ids = ids_of(prompt, response)
            logits = network(ids[:, :-1]).logits
            return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, len(prompt) - 1 :, 0]

        return score

    expected = figures("dpo", batches(base / "pairs.jsonl")[0], by(model.eval()), by(other.eval()))
    expected["loss"].backward()
    (line,) = records(tmp_path / "run")
    assert line["dpo_loss"] == pytest.approx(expected["loss"].item(), abs=1e-5)
    assert line["rewards/margins"] == pytest.approx(expected["margins"].item(), abs=1e-5)
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    norm = torch.stack([each.norm() for each in gradients.values()]).norm().item()
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
    found = saved_weights(tmp_path / "run" / "iter_0000001")
    for theirs, ours in (("lm_head", "output"), ("model.embed_tokens", "embedding.word")):
        before, gradient = model.state_dict()[f"{theirs}.weight"], gradients[f"{theirs}.weight"]
        torch.testing.assert_close((before - found[ours][: len(before)]) / RATE, gradient, rtol=1e-5, atol=1e-5)


def test_notes_on_the_files_of_the_reference_are_shown(base: Path, spawn: Spawn, tmp_path: Path) -> None:
    huggingface.save(tmp_path / "other", "qwen3-next", {"vocab_size": ByteTokenizer().vocab_size})
    weights = load_file(tmp_path / "other" / "model.safetensors")
    further = {"mtp.norm.weight": torch.zeros(24)}
    save_file({**weights, **further}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    data = ("--preference-data", base / "pairs.jsonl", "--data-cache-path", base / "cache")
    reference = ("--reference-model", tmp_path / "other", "--train-iters", 1, "--save", tmp_path / "run")
    told = ended(spawn([FINETUNE, *NETWORK, *PLAIN, *data, *reference], 1)).stdout
    assert f"note: {tmp_path / 'other'} has 1 tensors of layers that predict further tokens (MTP)" in told


LAYOUTS: Mapping[str, tuple[int, str]] = {
    "tp2-sequence": (2, "--tp 2 --sequence-parallel --fused-linear-cross-entropy"),
    "pp2": (2, "--pp 2"),
    "cp2": (2, "--cp 2"),
    "dp2-zero1": (2, "--use-distributed-optimizer --micro-batch-size 1"),
    "dp2-zero3": (2, "--data-parallel-sharding-strategy optim_grads_params"),
    "cp2-pp2": (4, "--cp 2 --pp 2"),
}


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the run on one rank, with validations and a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("alone")

    def spawn(argv: list[Any], ranks: int) -> Job:
        return jobs.enter_context(Job(argv, ranks, folder / "job"))

    with ExitStack() as jobs:
        finetuned(spawn, base, folder / "run", *EVALUATED)
    return folder / "run"


EXPERTS = words(
    "--num-layers 4 --micro-batch-size 1 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 "
    "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.2 0.1 0.1 --moe-z-loss-coeff 0.05"
)
INTERLEAVED = "--pp 2 --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS_OF_EXPERTS: Mapping[str, tuple[int, str]] = {
    "interleaved": (2, INTERLEAVED),
    "zb-v": (2, "--pp 2 --pipeline-schedule zb-v"),
    "ep2": (2, "--ep 2"),
    "ep2-zero3": (2, "--ep 2 --data-parallel-sharding-strategy optim_grads_params"),
    "ep2-tp2-sequence": (4, "--ep 2 --tp 2 --sequence-parallel"),
    "ep2-interleaved-zero1": (4, f"{INTERLEAVED} --ep 2 --use-distributed-optimizer"),
    "cp2-recompute": (2, "--cp 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "ep2-cp2-recompute": (4, "--ep 2 --cp 2 --recompute-granularity selective --recompute-modules core_attn moe"),
}


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of `write_base` with a network of experts and balancing losses, and its run on one rank."""
    folder = tmp_path_factory.mktemp("experts")
    write_base(folder, *EXPERTS)

    def spawn(argv: list[Any], ranks: int) -> Job:
        return jobs.enter_context(Job(argv, ranks, folder / "job"))

    with ExitStack() as jobs:
        finetuned(spawn, folder, folder / "alone", *EXPERTS, *EVALUATED)
    return folder


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS_OF_EXPERTS)
def test_experts_and_more_schedules_train_the_same(layout: str, of_experts: Path, spawn: Spawn, tmp_path: Path) -> None:
    """Beside the loss of pairs the network has its balancing losses, which the reference does not."""
    ranks, flags = LAYOUTS_OF_EXPERTS[layout]
    kept = ("--reference-log-probabilities", tmp_path / "kept") if layout.startswith("ep2-") else ()
    finetuned(spawn, of_experts, tmp_path / "run", *EXPERTS, *EVALUATED, *words(flags), *kept, ranks=ranks)
    assert {"dpo_loss", "load_balancing_loss", "global_load_balancing_loss"} <= records(of_experts / "alone")[0].keys()
    assert_close(tmp_path / "run", of_experts / "alone")
    if kept:
        finetuned(spawn, of_experts, tmp_path / "again", *EXPERTS, *EVALUATED, *kept)
        assert_close(tmp_path / "again", of_experts / "alone")


@pytest.mark.wide
def test_a_reference_trained_with_deep_ep_runs_without_it(of_experts: Path, spawn: Spawn, tmp_path: Path) -> None:
    shutil.copytree(of_experts / "reference" / "iter_0000002", tmp_path / "flex")
    saved = read_manifest(tmp_path / "flex")
    model = {**saved.config["model"], "moe_token_dispatcher_type": "flex"}
    (tmp_path / "flex" / "manifest.json").write_text(replace(saved, config={**saved.config, "model": model}).to_json())
    flags = (*EXPERTS, *EVALUATED, "--ep", 2, "--reference-model", tmp_path / "flex")
    finetuned(spawn, of_experts, tmp_path / "run", *flags, ranks=2)
    assert_close(tmp_path / "run", of_experts / "alone")


def assert_close(directory: Path, other: Path) -> None:
    """Assert that two runs have the same records but for rounding, those of validations included."""
    lines = [metrics(each) for each in (directory, other)]
    assert len(lines[0]) == len(lines[1])
    compared = 0
    for ours, theirs in zip(*lines, strict=True):
        for name in theirs:
            if name.endswith("loss") or "rewards" in name or name == "grad_norm":
                assert ours[name] == pytest.approx(theirs[name], rel=1e-10, abs=1e-12), name
                compared += 1
    assert compared >= 6 * STEPS + 5


@pytest.mark.wide_except("cp2-pp2", "tp2-sequence", "dp2-zero3")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same(layout: str, base: Path, alone: Path, spawn: Spawn, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    finetuned(spawn, base, tmp_path / "run", *EVALUATED, *words(flags), ranks=ranks)
    assert_close(tmp_path / "run", alone)


def test_a_run_that_stops_goes_on_with_the_same_bits(base: Path, spawn: Spawn, tmp_path: Path, alone: Path) -> None:
    finetuned(spawn, base, tmp_path / "run", *EVALUATED, "--exit-interval", 2, expected=85)
    continued = ("--resume", "auto", "--reference-model", base / "reference" / "iter_0000002")
    data = ("--preference-data", base / "pairs.jsonl", "--data-cache-path", base / "cache")
    save = ("--save", tmp_path / "run")
    ended(spawn([FINETUNE, *NETWORK, *PLAIN, *data, *EVALUATED, *continued, *save], 1))
    assert metrics(tmp_path / "run") == metrics(alone)
    assert_same_checkpoint(tmp_path / "run" / f"iter_{STEPS:07}", alone / f"iter_{STEPS:07}")


def test_log_probabilities_from_a_file_are_those_of_the_reference(
    base: Path, alone: Path, spawn: Spawn, tmp_path: Path
) -> None:
    """They are computed on two ranks, and read on one without the model; then nothing computes them again."""
    kept = ("--reference-log-probabilities", tmp_path / "kept")
    finetuned(spawn, base, tmp_path / "first", *EVALUATED, *kept, ranks=2)
    content = (tmp_path / "kept" / "reference_log_probabilities").read_bytes()
    finetuned(spawn, base, tmp_path / "second", *EVALUATED, *kept, reference=False)
    assert_close(tmp_path / "first", alone)
    assert_close(tmp_path / "second", alone)
    assert (tmp_path / "kept" / "reference_log_probabilities").read_bytes() == content

    def refused(*flags: Any) -> str:
        data = ("--preference-data", base / "pairs.jsonl", "--data-cache-path", base / "cache")
        return ended(spawn([FINETUNE, *NETWORK, *PLAIN, *data, *flags], 1), None).stderr

    def model(run: str) -> tuple[Any, ...]:
        """Copy the last checkpoint of a run to one path for all. Returns the flags that make it the reference."""
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(base / run / "iter_0000002", tmp_path / "model")
        return (*kept, "--reference-model", tmp_path / "model")

    assert "is of another model than --reference-model" in refused(*model("begun"))
    finetuned(spawn, base, tmp_path / "third", *EVALUATED, *model("reference"), "--tp", 2, ranks=2)
    assert_close(tmp_path / "third", alone)
    longer = ("--seq-length", 2 * LENGTH, "--max-position-embeddings", 2 * LENGTH)
    assert "chat template or --seq-length" in refused(*kept, *longer)
    (tmp_path / "kept" / "reference_log_probabilities").write_bytes(content[:-1])
    assert "is damaged: remove it, and it is computed again" in refused(*kept)
    assert "is no model: give one checkpoint" in refused("--reference-model", base / "begun")
    assert f"--reference-model {base / 'gone'} is no folder" in refused("--reference-model", base / "gone")
    missing = refused("--reference-log-probabilities", tmp_path / "none")
    assert "has no file reference_log_probabilities: give --reference-model" in missing


DISTURBED = """
import sys
sys.path.insert(0, ROOT)
from functools import partial
from megalite.commands.pretrain import main
from megalite.extras.post_training import preference_task
from megalite.lifecycle.failure import run_main
score, batches = preference_task.PreferenceTask._score, []
def disturbed(task, *arguments):
    if task._known is None:
        batches.append([each.name for each in task._trainer.sections.open()])
        if task.mesh.rank == 0:
            print("scores in", *batches[-1], flush=True)
        if len(batches) == LAST:
            raise KeyboardInterrupt
    return score(task, *arguments)
preference_task.PreferenceTask._score = disturbed
preference_task._KEPT_SECONDS = 0.0
run_main(partial(main, finetunes=True))
"""


def test_scoring_that_ends_early_goes_on_where_it_was(base: Path, spawn: Spawn, tmp_path: Path) -> None:
    """Each batch is in a section of its own, so that the watchdog finds one that hangs, and no long file is a hang."""
    lines = [json.dumps(record) + "\n" for record in pairs()]
    for name, part in (("a", slice(6)), ("b", slice(6, 40))):
        (tmp_path / name).write_text("".join(lines[part]))
    entry = tmp_path / "entry.py"

    def run(kept: str, *flags: Any, last: int = 0, expected: int | None = 0) -> tuple[int, bytes]:
        entry.write_text(DISTURBED.replace("ROOT", repr(str(ROOT))).replace("LAST", str(last)))
        data = ("--preference-data", 1, tmp_path / "a", 1, tmp_path / "b", "--data-cache-path", tmp_path / "cache")
        model = ("--reference-model", base / "reference" / "iter_0000002", "--micro-batch-size", 1)
        keep = ("--reference-log-probabilities", tmp_path / kept, "--load", base / "begun", "--finetune")
        short = words("--train-iters 1 --eval-iters 0")
        out = ended(spawn([entry, *NETWORK, *PLAIN, *short, *data, *model, *keep, *flags], 2), expected).stdout
        scored = [line for line in out.splitlines() if line.startswith("scores in")]
        assert set(scored) <= {"scores in scoring of pairs"}
        return len(scored), (tmp_path / kept / "reference_log_probabilities").read_bytes()

    batches, content = run("whole")
    parts = [run("parts", last=last, expected=None)[0] - 1 for last in (3, 4)]  # the first scores a file of 3 samples
    path = tmp_path / "parts" / "reference_log_probabilities"
    unfinished = path.read_bytes()
    path.write_bytes(re.sub(rb'"scored": \d+', b'"scored": null', unfinished, count=1))
    with pytest.raises(AssertionError, match="is damaged: remove it"):
        run("parts")
    path.write_bytes(unfinished)
    number, found = run("parts", "--seed", 8)  # which makes other samples for training
    assert sum(parts) + number == batches > 4
    assert found == content


IN_8_BITS: Mapping[str, tuple[int, str]] = {
    "alone": (1, "--fp8-recipe mxfp8"),
    "dp2-zero3": (2, "--fp8-recipe blockwise --fp8-param-gather --data-parallel-sharding-strategy optim_grads_params"),
}


@pytest.mark.parametrize("layout", IN_8_BITS)
def test_a_network_that_is_its_reference_has_margins_of_0_in_8_bits(
    layout: str, base: Path, spawn: Spawn, tmp_path: Path
) -> None:
    ranks, given = IN_8_BITS[layout]
    flags = (*words(given), "--fp8-format", "e4m3", "--eval-iters", 0)
    own = ("--reference-model", base / "begun" / "iter_0000002")
    finetuned(spawn, base, tmp_path / "live", *flags, *own, ranks=ranks)
    first, *others = records(tmp_path / "live")
    assert [first[f"rewards/{name}"] for name in RECORDED] == [0.0] * len(RECORDED)
    assert all(line["rewards/margins"] for line in others)
    kept = ("--reference-log-probabilities", tmp_path / "kept")
    finetuned(spawn, base, tmp_path / "file", *flags, *own, *kept, ranks=ranks)
    for line, expected in zip(records(tmp_path / "file"), (first, *others), strict=True):
        assert line["rewards/margins"] == pytest.approx(expected["rewards/margins"], rel=1e-10, abs=1e-12)
    data = ("--preference-data", base / "pairs.jsonl", "--data-cache-path", base / "cache")
    refused = ended(spawn([FINETUNE, *NETWORK, *PLAIN, *data, *own, *kept], 1), None).stderr
    assert "is of another model than --reference-model" in refused


def test_a_pair_in_two_samples_counts_twice() -> None:
    """The end of an epoch and the beginning of the next can be in one micro-batch."""
    responses = np.array([[-1, 4, 4, 5], [4, -1, 5, -1]])
    zeros = np.zeros_like(responses)
    arrays = MicroBatchArrays(
        tokens=zeros,
        labels=zeros,
        loss_mask=(responses >= 0).astype(np.float32),
        positions=zeros,
        document_ids=zeros,
        padding=None,
        sample_ids=range(2),
        replayed=None,
        responses=responses,
    )
    (micro_batch,) = to_micro_batches([arrays], 1, torch.float64, torch.device("cpu"))
    batch = pair_batch(micro_batch, arrays)
    scores = torch.arange(1.0, 9.0, dtype=torch.float64).view(2, 4)
    assert batch.responses is not None
    assert batch.responses.tolist() == [4, 5, 4, 5]
    assert of_responses(scores, batch, ParallelMesh().group("cp")).tolist() == [5.0, 4.0, 5.0, 7.0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mock-data",), "there is nothing to fine-tune on: give --preference-data, or --sft"),
        (("--preference-data", "x"), "--preference-data needs a reference: give --reference-model"),
        (("--data-path", "x", "--sft", "--preference-beta", 1), "--preference-beta needs --preference-data"),
        (("--preference-data", "x", "--reference-model", "y", "--dry-run"), "does not count the reference"),
        (("--preference-data", "x", "--reference-model", "y", "--data-path", "z"), "given in more than one way"),
        (
            (
                "--preference-data",
                "x",
                "--reference-log-probabilities",
                "y",
                *words("--fp8-format e4m3 --fp8-recipe tensorwise"),
            ),
            "--fp8-recipe tensorwise with --reference-log-probabilities: a scale is that of a micro-batch",
        ),
        (
            ("--preference-data", "x", "--reference-model", "y", "--preference-label-smoothing", 0.5),
            "--preference-label-smoothing 0.5 says that the rejected responses are the better ones",
        ),
        (
            ("--preference-data", "x", "--reference-model", "y", "--label-smoothing", 0.1),
            "--label-smoothing 0.1 does not go with --preference-data: leave it out",
        ),
    ],
)
def test_flags_that_contradict_are_one_line(flags: Sequence[Any], message: str, spawn: Spawn) -> None:
    stderr = ended(spawn([FINETUNE, *NETWORK, *PLAIN, *flags], 1), None).stderr
    (line,) = [line for line in stderr.splitlines() if "-- " not in line and message in line]
    assert line
