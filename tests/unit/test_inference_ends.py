"""Texts of a Hugging Face folder end before the tokens at which transformers' `generate` ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from megalite.config import CheckpointConfig
from megalite.conversion.huggingface import end_tokens, open_huggingface, write_huggingface
from megalite.conversion.native import open_megalite, write_megalite
from megalite.errors import CheckpointError
from megalite.inference.generation import generate
from megalite.inference.loading import load_for_generation
from megalite.inference.sampling import Sampling
from megalite.parallel.mesh import ParallelMesh
from megalite.training.resume import saved_fields
from tests.harness import huggingface

PROMPT, NEW, EOD = [31, 41, 59], 12, 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a Llama with 67 tokens, whose tokenizer ends documents with token 20."""
    huggingface.save(tmp_path / "folder", "llama")
    vocabulary = {f"w{number}": number for number in range(67) if number != EOD} | {"<end>": EOD}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "folder" / "tokenizer.json"))
    (tmp_path / "folder" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return tmp_path / "folder"


def declare(folder: Path, config: Any = None, generation: Any = None) -> None:
    """Write the `eos_token_id` of both files; without one, generation_config.json is removed."""
    fields = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))


def theirs(folder: Path) -> list[int]:
    """Return the greedy text of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([PROMPT])
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    text: list[int] = found[0, len(PROMPT) :].tolist()
    return text


def ours(path: Path) -> list[int]:
    """Return the greedy text of megalite."""
    network, _, ends = load_for_generation(path, ParallelMesh())
    events = generate(network, [PROMPT], max_new_tokens=NEW, ends=ends, sampling=Sampling(temperature=0.0))
    return [event for _, event in events if isinstance(event, int)]


def test_a_text_ends_before_each_token_that_a_folder_names(folder: Path) -> None:
    declare(folder)
    whole = theirs(folder)
    assert ours(folder) == whole
    assert EOD not in whole
    early, late = whole[3], next(token for token in whole[4:] if token not in whole[:4])
    for named in (
        {"config": late},
        {"config": [EOD, late, early]},
        {"generation": late},
        {"config": early, "generation": late},  # generation_config.json has precedence
        {"generation": [late, EOD, early]},
        {"generation": -1},
    ):
        declare(folder, **named)
        expected = theirs(folder)
        ended = len(expected) < NEW or expected[-1] in (early, late)
        assert ended == (named != {"generation": -1})
        assert ours(folder) == (expected[:-1] if ended else expected), named


def test_a_named_token_takes_the_place_of_the_tokenizers(folder: Path) -> None:
    declare(folder)
    assert load_for_generation(folder, ParallelMesh())[2] == {EOD}
    declare(folder, generation=[7, 9])
    assert load_for_generation(folder, ParallelMesh())[2] == {7, 9}


def test_a_conversion_keeps_all_tokens_there_and_back(folder: Path, tmp_path: Path) -> None:
    declare(folder, config=[7, 9], generation=[7, 9, 11])
    (tmp_path / "run").mkdir()
    usual: dict[str, Any] = {"dtype": None, "workers": 1, "advance": lambda done: None}
    write_megalite(open_huggingface(folder), tmp_path / "run", layout=None, **usual)
    assert load_for_generation(tmp_path / "run", ParallelMesh())[2] == {7, 9, 11, EOD}

    write_huggingface(open_megalite(tmp_path / "run"), tmp_path / "back", shard=10**9, **usual)
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((place / name).read_text()) for place in (folder, tmp_path / "back"))
        assert after["eos_token_id"] == before["eos_token_id"]


def test_a_folder_without_a_tokenizer_keeps_its_tokens_there_and_back(folder: Path, tmp_path: Path) -> None:
    declare(folder, config=5, generation=[7, 9])
    (tmp_path / "other").mkdir()
    for path in folder.glob("tokenizer*"):
        path.rename(tmp_path / "other" / path.name)
    (tmp_path / "run").mkdir()
    usual: dict[str, Any] = {"dtype": None, "workers": 1, "advance": lambda done: None}
    write_megalite(open_huggingface(folder), tmp_path / "run", layout=None, **usual)
    assert load_for_generation(tmp_path / "run", ParallelMesh())[2] == {7, 9}
    other = str(tmp_path / "other")
    assert load_for_generation(tmp_path / "run", ParallelMesh(), other)[2] == {7, 9, EOD}

    write_huggingface(open_megalite(tmp_path / "run"), tmp_path / "back", shard=10**9, **usual)
    assert load_for_generation(tmp_path / "back", ParallelMesh(), other)[2] == {7, 9}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text())["eos_token_id"] == [7, 9]


def test_a_run_keeps_the_tokens_of_the_folder_that_it_begins_with(folder: Path, tmp_path: Path) -> None:
    declare(folder, generation=[9, 7])
    (tmp_path / "run").mkdir()
    write_megalite(
        open_huggingface(folder), tmp_path / "run", layout=None, dtype=None, workers=1, advance=lambda done: None
    )
    for settings in (
        CheckpointConfig(load=str(folder)),
        CheckpointConfig(load=str(tmp_path / "run"), use_checkpoint_args=True),
        CheckpointConfig(load=str(folder), save=str(tmp_path / "run"), resume="auto"),
    ):
        for tokenizer_type in (None, "HuggingFaceTokenizer"):
            assert saved_fields(settings, tokenizer_type)["data"]["eos_token_ids"] == (7, 9)


@pytest.mark.parametrize("value", [[], [[5]], "5", True, 5.0, {"5": 5}, [5, None]])
@pytest.mark.parametrize("file", ["config", "generation"])
def test_what_is_no_token_is_refused_by_its_key(folder: Path, file: str, value: Any) -> None:
    declare(folder, **{"generation": [7], file: value})
    name = "config.json" if file == "config" else "generation_config.json"
    with pytest.raises(CheckpointError, match=f"/{name}: eos_token_id is "):
        open_huggingface(folder)


def test_a_folder_may_name_none(tmp_path: Path) -> None:
    assert end_tokens(tmp_path) == frozenset()
