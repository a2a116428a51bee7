"""Runs that train a part of a network: adapters beside a base that a checkpoint names, and frozen weights."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.fingerprint import fingerprint_of
from megalite.checkpoint.manifest import read_manifest
from megalite.conversion.adapters import InMemory
from tests.end_to_end.runs import (
    LLAMA,
    MOCK,
    PRETRAIN,
    Run,
    assert_same_checkpoint,
    losses,
    metrics,
    saved_tensors,
    saved_weights,
    words,
)
from tests.harness.close import assert_bits_equal
from tests.harness.job import Job
from tests.harness.tool import run_tool

CONSTANT = (*LLAMA, *words("--lr-decay-style constant"))
LORA = words("--lora-rank 4 --lora-alpha 8")
RESUMED = words("--resume auto")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of two steps of all weights."""
    folder = tmp_path_factory.mktemp("base")
    argv: list[Any] = [PRETRAIN, *MOCK, *CONSTANT, "--train-iters", 2, "--save", folder / "run"]
    with Job(argv, 1, folder / "job") as job:
        assert job.wait() == [0], job.stderr(0)
    return folder / "run"


def step(directory: Path, number: int) -> Path:
    return directory / f"iter_{number:07d}"


def test_adapters_alone_are_saved_and_continue_bit_for_bit(run: Run, base: Path, tmp_path: Path) -> None:
    flags = (*CONSTANT, *LORA, "--load", base, "--use-dora")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(*flags, "--train-iters", 4, "--save", whole)
    run(*flags, "--train-iters", 2, "--save", parts)
    run(*flags, "--train-iters", 4, "--save", parts, *RESUMED)
    assert_same_checkpoint(step(parts, 4), step(whole, 4))
    saved = saved_tensors(step(whole, 4))
    assert all(".lora_" in name for name in saved)
    assert {name.split("/")[0] for name in saved} == {"model", "optimizer"}
    named = json.loads((step(whole, 4) / "manifest.json").read_text())["config"]["base"]
    assert named["path"] == str(step(base, 2))
    of_ranks = words("--tensor-model-parallel-size 2 --load")
    run_tool("reshard", *of_ranks, parts, "--save", tmp_path / "of ranks")
    assert_same_checkpoint(step(tmp_path / "of ranks", 4), step(whole, 4))
    shutil.rmtree(parts)
    shutil.move(tmp_path / "of ranks", parts)
    run(*flags, *words("--tp 2 --sequence-parallel"), "--train-iters", 5, "--save", parts, *RESUMED, world_size=2)
    run(*CONSTANT, *LORA, "--use-dora", "--train-iters", 5, "--save", whole, *RESUMED)
    assert abs(losses(parts)[-1] - losses(whole)[-1]) < 1e-5


@pytest.mark.wide
def test_adapters_of_tables_are_saved_and_merged_as_others(run: Run, base: Path, tmp_path: Path) -> None:
    """Resume under another layout, whose ranks have other rows of the vocabulary, and read a folder of PEFT."""
    names = words("--lora-target-modules query lm_head embed_tokens")
    flags = (*CONSTANT, *LORA, *names)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(*flags, "--train-iters", 4, "--save", whole)
    split = words("--tp 2 --sequence-parallel --fused-linear-cross-entropy --use-distributed-optimizer")
    run(*flags, *split, "--train-iters", 2, "--save", parts, world_size=2)
    run(*flags, *words("--pp 2"), "--train-iters", 4, "--save", parts, *RESUMED, world_size=2)
    assert max(abs(a - b) for a, b in zip(losses(parts), losses(whole), strict=True)) < 1e-5
    assert {"model/output_layer.lora_a", "model/embedding.word_embeddings.lora_b"} <= saved_tensors(
        step(parts, 4)
    ).keys()
    run(*flags, "--load", base, "--train-iters", 2, "--save", tmp_path / "own")
    convert = words("--loader megalite --load-dir")
    run_tool("convert", *convert, tmp_path / "own", *words("--saver peft --save-dir"), tmp_path / "peft")
    run_tool("convert", *convert, tmp_path / "own", *words("--saver megalite --save-dir"), tmp_path / "merged")
    short = words("--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 0 --eval-iters 0 --train-iters 1")
    run(*short, "--load", tmp_path / "peft", "--save", tmp_path / "of peft")
    run(*CONSTANT, "--train-iters", 1, "--load", tmp_path / "merged", "--finetune", "--save", tmp_path / "of merged")
    assert abs(losses(tmp_path / "of peft")[0] - losses(tmp_path / "of merged")[0]) < 1e-5


@pytest.mark.wide
def test_another_base_and_other_flags_are_refused(run: Run, base: Path, tmp_path: Path) -> None:
    own, save = Path(shutil.copytree(base, tmp_path / "own")), tmp_path / "run"
    flags = (*CONSTANT, *LORA, "--load", own)
    run(*flags, "--train-iters", 1, "--save", save)
    more = (*CONSTANT, "--train-iters", 2, "--save", save, *RESUMED)
    assert "has adapters alone: give --lora-rank 4" in run(*more, expected=93).stderr
    other = run(*more, *words("--lora-rank 4 --lora-alpha 4"), expected=93).stderr
    assert "--lora-alpha: 8.0 in the checkpoint, 4.0 in this run" in other
    target = run(*flags, "--lora-target-modules", "w1", "--train-iters", 1, expected=64).stderr
    assert "--lora-target-modules w1: no matrix of this network has this name; it has query, key, value" in target
    shutil.rmtree(own)
    assert "has adapters of a base that cannot be opened" in run(*more, *LORA, expected=93).stderr
    run(*CONSTANT, "--train-iters", 2, "--save", own)
    shutil.rmtree(step(own, 2))
    shutil.copytree(step(base, 2), step(own, 2))
    told = read_manifest(step(save, 1))
    weights = saved_weights(step(base, 2))
    first = fingerprint_of(InMemory(weights), weights, lambda name: weights[name].dtype, places=False)
    aged = replace(told, config={**told.config, "base": {**told.config["base"], "fingerprint": first}})
    (step(save, 1) / "manifest.json").write_text(aged.to_json())
    run(*more, *LORA)  # the same weights in another copy, and a fingerprint of the first version
    assert read_manifest(step(save, 2)).config["base"] == told.config["base"]
    run(*CONSTANT, "--train-iters", 3, "--save", own, *RESUMED)
    shutil.rmtree(step(own, 2))
    step(own, 3).rename(step(own, 2))
    changed = run(*more[:-2], *LORA, *RESUMED, "--train-iters", 3, expected=93).stderr
    assert f"has adapters of other weights than {step(own, 2)} gives now" in changed
    whole = (*more[:-2], *LORA, *RESUMED, "--train-iters", 3, "--load")
    assert "has adapters itself" in run_tool("generate", "--load", save, "--base", save, "--prompt", "1").stderr
    run(*whole, base)  # where the weights are that the named place had
    assert read_manifest(step(save, 3)).config["base"] == {**told.config["base"], "path": str(step(base, 2))}
    run(*whole, own, "--train-iters", 4)  # which the run began with
    for damaged in (3, "a\0b"):
        odd = replace(told, config={**told.config, "base": {**told.config["base"], "path": damaged}})
        (step(save, 4) / "manifest.json").write_text(odd.to_json())
        said = run_tool("generate", "--load", step(save, 4), "--prompt", "1").stderr
        assert said.startswith("error: ")
        assert "which is no folder" in said


def test_frozen_weights_stay_and_have_no_state(run: Run, base: Path, tmp_path: Path) -> None:
    frozen = words("--freeze embedding.* layers.0.*")
    flags = (*CONSTANT, "--load", base, "--finetune", *frozen, "--save", tmp_path / "run")
    run(*flags, *words("--pp 2 --use-distributed-optimizer"), "--train-iters", 2, world_size=2)
    before, after = saved_weights(step(base, 2)), saved_weights(step(tmp_path / "run", 2))
    for name, values in after.items():
        if name.startswith(("embedding.", "layers.0.")):
            assert_bits_equal(values, before[name], name)
        else:
            assert not values.equal(before[name]), name
    state = {name for name in saved_tensors(step(tmp_path / "run", 2)) if name.startswith("optimizer/")}
    assert state
    assert not any("embedding" in name or "layers.0" in name for name in state)
    other = run(*CONSTANT, "--train-iters", 3, "--save", tmp_path / "run", *RESUMED, expected=93).stderr
    assert "is of a run that trained other weights" in other


@pytest.mark.wide
def test_adapters_are_merged_and_read_as_a_folder_of_peft(run: Run, base: Path, tmp_path: Path) -> None:
    """A run that continues with the adapters in such a folder begins with the loss that the first one would have."""
    own = tmp_path / "run"
    run(*CONSTANT, *LORA, "--load", base, "--train-iters", 2, "--save", own)
    run_tool("convert", *words("--loader megalite --saver peft --load-dir"), own, "--save-dir", tmp_path / "peft")
    merge = words("--loader megalite --saver megalite --load-dir")
    run_tool("convert", *merge, own, "--save-dir", tmp_path / "merged")
    assert saved_weights(step(tmp_path / "merged", 0)).keys() == saved_weights(step(base, 2)).keys()
    short = words("--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 0 --eval-iters 0 --train-iters 1")
    run(*short, "--load", tmp_path / "peft", "--save", tmp_path / "of peft")
    run(*CONSTANT, "--train-iters", 1, "--load", tmp_path / "merged", "--finetune", "--save", tmp_path / "of merged")
    assert abs(losses(tmp_path / "of peft")[0] - losses(tmp_path / "of merged")[0]) < 1e-5
    assert all(".lora_" in name for name in saved_tensors(step(tmp_path / "of peft", 1)))
    run(*CONSTANT, "--train-iters", 1, "--load", base, "--finetune", "--save", tmp_path / "of base")
    assert abs(losses(tmp_path / "of peft")[0] - losses(tmp_path / "of base")[0]) > 1e-4
    # As a teacher, too, the folder is the model that its adapters make.
    for name in ("peft", "merged"):
        run(*CONSTANT, "--train-iters", 1, "--distill-from", tmp_path / name, "--save", tmp_path / f"taught by {name}")
    taught = [metrics(tmp_path / f"taught by {name}")[0]["distill_loss"] for name in ("peft", "merged")]
    assert abs(taught[0] - taught[1]) < 1e-5 < taught[0]


def test_the_base_of_adapters_is_named_to_tools_after_it_has_moved(run: Run, base: Path, tmp_path: Path) -> None:
    """The rotary embeddings of the run are others than those of the base, and its choice of matrices is said anew."""
    own, save, moved = Path(shutil.copytree(base, tmp_path / "own")), tmp_path / "run", tmp_path / "moved"
    longer = (*CONSTANT, *words("--lora-rank 4 --allow-changed-rotary --rotary-base 500000"), "--save", save)
    run(*longer, "--load", own, "--train-iters", 1)
    own.rename(moved)
    every = words("--lora-alpha 4 --lora-target-modules query key value attention.output gate up down")
    run(*longer, *every, "--load", moved, "--train-iters", 2, *RESUMED)
    moved.rename(tmp_path / "again")
    said = words("--prompt '1 2' --max-new-tokens 4 --temperature 0")
    merge = (*words("--loader megalite --saver megalite --load-dir"), save, "--save-dir", tmp_path / "merged")
    for tool, flags in (("generate", ("--load", save, *said)), ("convert", merge)):
        assert "(--base of generate, evaluate and convert names another)" in run_tool(tool, *flags).stderr
    where = ("--base", tmp_path / "again")
    assert run_tool("convert", *merge, *where).code == 0
    assert run_tool("generate", "--load", save, *said, *where).code == 0
    (tmp_path / "text.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8"}\n')
    figures = [
        run_tool("evaluate", "--load", folder, "--text", tmp_path / "text.jsonl", *more).stdout
        for folder, more in ((save, where), (tmp_path / "merged", ()), (base, ()))
    ]
    assert figures[0] == figures[1] != figures[2]
    whole = run_tool("generate", "--load", base, *said, *where)
    assert whole.code == 93
    assert "has no adapters, and all of its weights" in whole.stderr
    peft = words("--loader megalite --saver peft --load-dir")
    refused = run_tool("convert", *peft, save, "--save-dir", tmp_path / "peft", *where)
    assert "has other rotary embeddings than its base, which a folder of PEFT cannot say" in refused.stderr
    run(*CONSTANT, *words("--lora-rank 4 --lr 1e39 --train-iters 1 --save"), tmp_path / "wild", "--load", base)
    wild = run_tool("generate", "--load", tmp_path / "wild", *said).stderr
    assert re.search(r"iter_0000001: layers\.\S+\.lora_[ab] has NaN or infinities: take an earlier checkpoint", wild)


def test_depths_that_would_never_be_trained_are_refused(run: Run, base: Path) -> None:
    anew = words("--lora-rank 4 --finetune --mtp-num-layers 1 --train-iters 1")
    refused = run(*CONSTANT, *anew, "--load", base, expected=93).stderr
    assert "does not have the depths of multi-token prediction of this run (1), and --lora-rank would never" in refused


@pytest.mark.wide
def test_adapters_know_a_base_whose_depths_they_leave_out(run: Run, tmp_path: Path) -> None:
    """A base with experts, too, whose routers have biases."""
    experts = words("--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --swiglu")
    network = (*CONSTANT, *experts, "--moe-router-enable-expert-bias")
    run(*network, *words("--mtp-num-layers 1 --train-iters 2 --save"), tmp_path / "base")
    flags = (*network, *words("--moe-router-bias-update-rate 0 --finetune --lora-rank 4 --load"), tmp_path / "base")
    run(*flags, "--train-iters", 1, "--save", tmp_path / "run")
    run(*flags, "--train-iters", 2, "--save", tmp_path / "run", *RESUMED)
    merge = words("--loader megalite --saver megalite --load-dir")
    assert run_tool("convert", *merge, tmp_path / "run", "--save-dir", tmp_path / "merged").stderr == ""
    merged, whole = (saved_tensors(path) for path in (step(tmp_path / "merged", 0), step(tmp_path / "base", 2)))
    assert {name for name in whole if name.startswith(("model/", "state/"))} - merged.keys() == {
        name for name in whole if name.startswith(("model/mtp.", "state/mtp."))
    }
    for name in merged:
        if name.startswith("state/"):
            assert_bits_equal(merged[name], whole[name], name)
