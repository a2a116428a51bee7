"""A checkpoint of any program is opened by what is there, and only as the network that the command describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalite.config import ModelConfig
from megalite.conversion.huggingface import write_huggingface
from megalite.conversion.megatron import write_megatron
from megalite.conversion.native import write_megalite
from megalite.conversion.opened import OpenedModel
from megalite.errors import CheckpointError
from megalite.extras.verify.checkpoints import open_weights
from tests.unit.test_conversion_dcp import LLAMA, check_same, random_weights, titan_state
from tests.unit.test_conversion_megatron import Weights

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # it says so even where that is asked
]

WEIGHTS = random_weights(LLAMA)
MODEL = OpenedModel("random", LLAMA, Weights(WEIGHTS), {}, 32)


def no_progress(_: int) -> None:
    pass


def of_megalite(folder: Path) -> Path:
    write_megalite(MODEL, folder, dtype=None, layout=None, workers=1, advance=no_progress)
    return folder


def of_megatron(folder: Path) -> Path:
    write_megatron(MODEL, folder, dtype=None, tensor_parallel_size=1, workers=1, advance=no_progress)
    return folder


def of_huggingface(folder: Path) -> Path:
    write_huggingface(MODEL, folder, dtype=None, shard=10**9, workers=1, advance=no_progress)
    return folder


def of_dcp(folder: Path) -> Path:
    dcp.save({"model": titan_state(LLAMA, WEIGHTS), "step": 3}, checkpoint_id=folder, no_dist=True)
    return folder


def of_torch(folder: Path) -> Path:
    folder.mkdir()
    torch.save(titan_state(LLAMA, WEIGHTS), folder / "model.pt")
    return folder / "model.pt"


DESCRIBED = [of_megalite, of_huggingface]
NAMED = [of_dcp, of_torch]
Write = Callable[[Path], Path]


@pytest.mark.parametrize("write", [*DESCRIBED, *NAMED])
def test_each_format_is_opened(write: Write, tmp_path: Path) -> None:
    check_same(open_weights(str(write(tmp_path / "saved")), LLAMA), WEIGHTS)


@pytest.mark.parametrize("write", DESCRIBED)
def test_a_folder_that_describes_its_network_needs_no_other_description(write: Write, tmp_path: Path) -> None:
    check_same(open_weights(str(write(tmp_path / "saved"))), WEIGHTS)


@pytest.mark.parametrize("write", NAMED)
def test_tensors_by_name_need_one(write: Write, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not say which network it is of: give the flags of the network"):
        open_weights(str(write(tmp_path / "saved")))


def test_the_vocabulary_of_megatron_may_be_padded(tmp_path: Path) -> None:
    """Its softmax has the rows of the padding, too, so they belong to the network."""
    path = str(of_megatron(tmp_path / "saved"))
    rows = LLAMA.padded_vocab_size(1)
    for model in (LLAMA, replace(LLAMA, vocab_size=None)):
        opened = open_weights(path, model)
        assert opened.config.vocab_size == rows > 53
        word = torch.empty(rows, 24)
        opened.source.fill("embedding.word", opened.source.tensors["embedding.word"].whole, word)
        assert torch.equal(word[:53], WEIGHTS["embedding.word"])
        assert not word[53:].any()
    with pytest.raises(CheckpointError, match=f"vocab_size: {rows} in the checkpoint, 500 in this run"):
        open_weights(path, replace(LLAMA, vocab_size=500))


@pytest.mark.parametrize("write", [*DESCRIBED, of_megatron])
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (replace(LLAMA, norm_epsilon=1e-6), "norm_epsilon: 1e-05 in the checkpoint, 1e-06 in this run"),
        (replace(LLAMA, rotary_base=10000.0), "rotary_base: 500.0 in the checkpoint, 10000.0 in this run"),
    ],
)
def test_another_network_is_refused_with_the_difference(
    write: Write, other: ModelConfig, difference: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=difference):
        open_weights(str(write(tmp_path / "saved")), other)


@pytest.mark.parametrize("write", NAMED)
def test_names_of_another_network_are_refused_with_the_names(write: Write, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not there: layers.2.attention.wk.weight, .* and 5 more"):
        open_weights(str(write(tmp_path / "saved")), replace(LLAMA, num_layers=3))


def test_the_folder_of_several_checkpoints_names_them(tmp_path: Path) -> None:
    for step in (10, 20):
        of_dcp(tmp_path / f"step-{step}")
    with pytest.raises(CheckpointError, match="is the folder of several checkpoints: give one of step-10, step-20"):
        open_weights(str(tmp_path), LLAMA)


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        open_weights(str(tmp_path), LLAMA)
    with pytest.raises(CheckpointError, match="is no folder"):
        open_weights(str(tmp_path / "other"), LLAMA)
