"""Damaged or foreign files in a folder of Megatron-LM's: the error names them."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalite.conversion.dcp_files import _key, _numbers
from megalite.conversion.megatron import open_megatron
from megalite.conversion.megatron_arguments import model_of, tokenizer_of
from megalite.conversion.megatron_legacy import flat_tensors
from megalite.errors import CheckpointError
from tests.unit.test_conversion_megatron import GPT2, random_model, read, write
from tests.unit.test_conversion_restricted_pickle import of_one_hash

TRACKER = "latest_checkpointed_iteration.txt"


def cut_off(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 3000)


def other_values_described(folder: Path) -> None:
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes().replace(b"decoder", b"decoded"))


def outside(folder: Path) -> None:
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes().replace(b"__0_0.d", b"../_0.d"))


def described(folder: Path, old: bytes, new: bytes) -> None:
    data = (folder / ".metadata").read_bytes()
    assert old in data
    (folder / ".metadata").write_bytes(data.replace(old, new))


def in_a_file_of_a_long_name(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "a" * 5000
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"__0_0.distcp cannot be read"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0.distcp cannot be read: No such file"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), r".metadata cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})), "does not describe a checkpoint"),
        (outside, r"names .*_0.distcp, which is not in its folder"),
        (in_a_file_of_a_long_name, "does not describe a checkpoint .TypeError.*is not a name"),
        (other_values_described, "which the network in its arguments does not have"),
        (lambda folder: (folder / "metadata.json").unlink(), "torch_dcp or fsdp_dtensor"),
        (lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "has the format zarr"),
        (lambda folder: (folder / "common.pt").unlink(), r"common.pt cannot be read"),
        (lambda folder: torch.save({}, folder / "common.pt"), "does not have the arguments"),
        (lambda folder: (folder / ".metadata").unlink(), "has no file of the first rank"),
        (lambda folder: (folder.parent / TRACKER).write_text("12"), "names '12', which is not a checkpoint there"),
        (lambda folder: (folder.parent / TRACKER).unlink(), "no latest_checkpointed_iteration.txt"),
        (lambda folder: (folder.parent / TRACKER).write_text("1" * 999), "names '111"),
        (lambda folder: (folder.parent / TRACKER).write_text("1" * 6000), "no latest_checkpointed_iteration.txt"),
        (lambda folder: (folder / "metadata.json").write_text("[" * 10**5), "metadata.json cannot be read .nested"),
        (lambda folder: described(folder, b"sizes", b"sizez"), "does not describe a checkpoint"),
        *(
            (lambda folder, name=name: fifo(folder / name), f"{name} cannot be read .not a regular file")
            for name in ("metadata.json", "common.pt", "__0_0.distcp")
        ),
    ],
)
def test_what_is_damaged_is_named(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    damage(write(random_model(GPT2), tmp_path))
    with pytest.raises(CheckpointError, match=message):
        read(open_megatron(tmp_path))


@pytest.mark.parametrize("values", [(0,) * 65, (10**5000,), (2**63,), (-1,), (1.0,), [1], "ab"])
def test_a_size_is_a_few_numbers_of_64_bits(values: object) -> None:
    assert _numbers((0, 2**63 - 1)) == (0, 2**63 - 1)
    with pytest.raises(TypeError, match="neither a size nor an offset") as raised:
        _numbers(values)
    assert len(str(raised.value)) < 200


def test_chunks_are_found_whatever_numbers_their_offsets_have() -> None:
    assert len({hash(_key("weight", offset)) for offset in of_one_hash(100)}) == 100


SMALL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
NESTED: list[object] = ["x"]
for _ in range(60):  # in full it would have 2**60 entries
    NESTED = [NESTED, NESTED]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": "x"}, "--hidden-size 'x': megalite has no such network"),
        ({"hidden_size": float("nan")}, "--hidden-size nan: megalite has no such network"),
        ({"hidden_size": 10**400}, "--hidden-size 1000.*: must be at most 2.53"),
        ({"num_attention_heads": 0}, "--num-attention-heads 0: must be at least 1"),
        ({"num_attention_heads": 3}, "--hidden-size 8 is not a multiple of --num-attention-heads 3"),
        ({"num_layers": 10**9}, "--num-layers 1000000000: must be at most 10,000"),
        ({"num_layers": -1}, "--num-layers -1: must be at least 1"),
        ({"norm_epsilon": -1.0}, "--norm-epsilon -1.0: must be at least 0"),
        ({"swiglu": 1}, "--swiglu 1: megalite has no such network"),
        ({"spec": NESTED}, "--spec .*: megalite has no such network"),
        ({"window_size": NESTED}, "--window-size"),
        ({"window_size": (8, 0), "window_attn_skip_freq": [1] * 10**5}, "--window-attn-skip-freq"),
    ],
)
def test_arguments_that_no_network_has_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        model_of(SMALL | arguments)
    assert len(str(raised.value)) < 400


def test_what_names_no_tokenizer_is_left_out() -> None:
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": NESTED, "vocab_file": "v.json"}
    assert tokenizer_of(named) == {"tokenizer_type": "HuggingFaceTokenizer", "vocab_file": "v.json"}


def test_a_model_that_is_too_large_for_its_files_is_not_made(tmp_path: Path) -> None:
    folder = write(random_model(GPT2), tmp_path)
    for sizes in ({"hidden_size": 2**20}, {"max_position_embeddings": 10**9}, {"num_layers": 9_999}):
        arguments = Namespace(**SMALL | {"max_position_embeddings": 4} | sizes)
        torch.save({"args": arguments}, folder / "common.pt")
        with pytest.raises(CheckpointError, match="too few for the model that it describes"):
            open_megatron(tmp_path)


def test_dictionaries_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    wide: dict[str, object] = {"x": 1}
    for _ in range(15):
        wide = {str(number): wide for number in range(10)}
    itself: dict[str, object] = {}
    itself["itself"] = itself
    for model in (wide, itself):
        torch.save(
            {"args": Namespace(**SMALL, max_position_embeddings=4), "checkpoint_version": 3.0, "model": model}, path
        )
        with pytest.raises(CheckpointError, match="has too many nested dictionaries"):
            open_megatron(tmp_path)


def test_a_key_of_many_long_texts_is_not_written_out(tmp_path: Path) -> None:
    model: dict[object, object] = {("a" * 10**6,) * 10: {}}
    tracemalloc.start()
    assert list(flat_tensors(tmp_path, model)) == []  # type: ignore[arg-type]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10**6
