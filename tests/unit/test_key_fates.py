"""Fates of a folder's keys: each has exactly one, the one by which the folder is read, and none vanishes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import RunConfig, parse_arguments
from megalite.conversion.families import FAMILIES
from megalite.conversion.folder_keys import Fates, KeyFate
from megalite.conversion.key_fates import fates_of_folder
from megalite.conversion.megatron import open_megatron
from megalite.conversion.megatron_arguments import (
    argument_fates,
    model_of,
    tokenizer_of,
    unknown_arguments,
    vocabulary_of,
)
from megalite.data.tokenizers.folder import is_name, refusal
from megalite.training.load_report import differences, option_fates
from tests.harness import checkpoints
from tests.harness import huggingface as theirs
from tests.harness.tool import run_tool
from tests.unit.test_config_megatron_flags import MINIMAL
from tests.unit.test_conversion_megatron import GPT2, random_model, write
from tests.unit.test_conversion_megatron_arguments import SMALL
from tests.unit.test_data_tokenizer_folder import write_folder

ROOT = Path(__file__).parents[2]
UNKNOWN = st.text(min_size=3, max_size=12).map(lambda text: f"of_tomorrow_{text}").filter(lambda key: not is_name(key))
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@cache
def of_a_run() -> tuple[RunConfig, dict[str, Any]]:
    """Return a configuration, and how a checkpoint has it."""
    config = parse_arguments([*MINIMAL, "--data-path", "a"]).config
    return config, json.loads(json.dumps(asdict(config)))


@settings(max_examples=12)
@given(UNKNOWN, st.sampled_from([1, 0, "a", True, [1], {"a": 1}]))
def test_a_key_that_no_table_knows_never_vanishes(key: str, value: Any) -> None:
    for family in FAMILIES:
        (fate,) = family.key_fates({key: value})
        assert (fate.key, fate.kind) == (key, "refused")
    for table in ("generation_config", "index"):
        (fate,) = Fates.of(table).of_keys({key: value})
        assert fate.kind == "refused"
        assert Fates.of(table).problems({key: value})
    assert refusal(key, value) is not None
    (fate,) = argument_fates({key: value})
    assert (fate.key, fate.kind) == (key, "noted")
    assert fate.why.startswith("unknown to megalite")
    assert len(unknown_arguments({key: value})) == bool(value)  # what is off says nothing
    config, saved = of_a_run()
    fates = option_fates({section: {key: value} for section in saved})
    for section in saved:
        (fate,) = fates[section]
        assert fate.kind == ("refused" if section == "model" else "noted")
        assert fate.why.startswith("unknown to this version")
        (line,) = differences(saved | {section: {**saved[section], key: value}}, config)
        assert f"{section}.{key}"[:80] in line


class Recorder(dict[str, Any]):
    """Arguments that remember which of them were read."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.read = set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def test_arguments_that_are_read_are_said_to_be_used() -> None:
    recorder = Recorder(SMALL | {"num_experts": 4, "add_bias_linear": False, "group_query_attention": True})
    recorder |= {"window_size": [4, 0], "max_position_embeddings": 8, "tokenizer_type": "TikTokenizer"}
    model_of(recorder)
    vocabulary_of(recorder)
    tokenizer_of(recorder)
    fates = {fate.key: fate for fate in argument_fates(dict.fromkeys(recorder.read, 1))}
    others = {name for name, fate in fates.items() if fate.why.startswith(("describes that run", "unknown"))}
    assert {"num_layers", "window_size", "moe_layer_freq", "tiktoken_pattern", "swiglu"} <= recorder.read
    assert others == set()


def keys_of(found: Mapping[str, list[KeyFate]]) -> Iterator[tuple[str, str]]:
    for place, fates in found.items():
        yield from ((place, fate.key) for fate in fates)


def huggingface_folder(folder: Path) -> Path:
    theirs.save(folder, "llama", {"vocab_size": 300}, max_shard_size="20KB")
    write_folder(folder, special_tokens_map={"pad_token": "</s>"}, added_tokens={"<a>": 258})
    (folder / "README.md").write_text("text")
    return folder


def test_each_key_of_a_huggingface_folder_is_in_the_table_once(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path / "llama")
    found = list(keys_of(fates_of_folder(folder)))
    with_keys = [path for path in folder.glob("*.json") if path.name != "tokenizer.json"]
    expected = [(path.name, key) for path in with_keys for key in json.loads(path.read_text())]
    assert sorted(each for each in found if each[0] != "files") == sorted(expected)
    names = {name for place, name in found if place == "files"}
    assert {"README.md", "tokenizer.json"} < names
    decoder = {"added_tokens_decoder": {"258": {"content": "<a>"}}, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "</s>"}))
    mapped = {fate.key: fate.kind for fate in fates_of_folder(folder)["special_tokens_map.json"]}
    assert mapped == {"eos_token": "used", "pad_token": "noted"}


def test_the_command_shows_the_table_of_a_huggingface_folder_and_what_refuses_it(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path / "llama")
    shown = run_tool("inspect_checkpoint", folder)
    assert (shown.code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert "  used     num_hidden_layers: --num-layers 4" in lines
    assert "  used     tie_word_embeddings: --untie-embeddings-and-output-weights" in lines
    assert "  noted    README.md: not a file of which the model or its tokenizer is read" in lines
    assert max(map(len, lines)) <= 110
    assert lines[-1] == f"{folder} can be loaded: layers *-*-*-*-"
    none = run_tool("inspect_checkpoint", folder / "config.json")
    assert (none.code, none.stderr) == (
        93,
        f"error: {folder}/config.json is no folder: give that of a model, or of a run\n",
    )
    as_json = json.loads(run_tool("inspect_checkpoint", folder, "--json").stdout)
    assert {"key": "hidden_size", "kind": "used", "why": "--hidden-size 24"} in as_json["config.json"]
    config = json.loads((folder / "config.json").read_text()) | {"of_tomorrow": 7, "hidden_act": "tomorrow"}
    (folder / "config.json").write_text(json.dumps(config))
    refused = run_tool("inspect_checkpoint", folder)
    assert refused.code != 0
    assert refused.stdout.splitlines()[1].startswith("  refused  hidden_act: hidden_act is 'tomorrow'")
    assert "  refused  of_tomorrow: is unknown: 7" in refused.stdout
    assert "config.json has a network unknown to megalite" in refused.stderr


def test_the_command_shows_the_arguments_of_megatron_and_a_conversion_names_unknown_ones(tmp_path: Path) -> None:
    folder = write(random_model(GPT2), tmp_path / "megatron")
    shown = run_tool("inspect_checkpoint", folder)
    assert shown.code == 0, shown.stderr
    assert "num_layers" in shown.stdout.partition("noted")[0]
    assert "describes that run" in shown.stdout
    assert open_megatron(folder).notes == ()
    arguments = fates_of_folder(folder)["arguments in release"]
    assert {fate.kind for fate in arguments} == {"used", "noted"}
    assert not [fate for fate in arguments if fate.why.startswith("unknown")]


def test_flags_of_megatron_are_known_as_arguments() -> None:
    flags = (ROOT / "tests/unit/megatron_flags.txt").read_text().split("\n")
    names = {line.split()[0].lstrip("-").replace("-", "_") for line in flags if line.startswith("--")}
    unknown = [fate.key for fate in argument_fates(dict.fromkeys(names, 1)) if fate.why.startswith("unknown")]
    assert len(names) > 900
    assert unknown == []


def test_the_command_shows_the_options_of_a_checkpoint_by_section(tmp_path: Path) -> None:
    flags = [*MINIMAL, "--data-path", "a", "--max-position-embeddings", "8"]
    config = json.loads(json.dumps(asdict(parse_arguments(flags).config)))
    checkpoints.write(tmp_path / "run", {"model/word": torch.zeros(2)}, config=config)
    shown = run_tool("inspect_checkpoint", tmp_path / "run")
    assert (shown.code, shown.stderr) == (0, "")
    assert [line for line in shown.stdout.splitlines() if line in config] == [*config]
    section = shown.stdout.partition("\ntraining\n")[2].partition("\n\n")[0]
    told = section.partition("a run that resumes has its own flag, and says if it differs: ")[2]
    assert "global_batch_size" in told.partition("noted")[0]
    assert "eval_interval" not in told.partition("noted")[0]
    config["model"]["of_tomorrow"] = 1
    checkpoints.write(tmp_path / "newer", {"model/word": torch.zeros(2)}, config=config)
    refused = run_tool("inspect_checkpoint", tmp_path / "newer")
    assert refused.code != 0
    assert "  refused  of_tomorrow: unknown to this version of megalite" in refused.stdout
    assert "use a newer megalite" in refused.stderr
