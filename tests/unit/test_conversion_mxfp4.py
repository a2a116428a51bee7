"""Weights of gpt-oss in blocks of MXFP4: the values that transformers reads, and files that are not such blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.tensors import Kind
from megalite.conversion.huggingface import open_huggingface
from megalite.conversion.mxfp4 import unpacked
from megalite.conversion.verification import logits
from megalite.errors import CheckpointError
from tests.harness import huggingface as theirs
from tests.unit.test_conversion_huggingface import LOGITS, TOKENS, distance

pytestmark = pytest.mark.costly

PACKED = ("gate_up_proj", "down_proj")


def blocks_of(shape: torch.Size, seed: int) -> tuple[Tensor, Tensor]:
    """Return blocks and scales of any bits for a weight [experts, inputs, outputs] of about 0.3."""
    experts, inputs, outputs = shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a folder with packed experts, pairs of which lie in two files, and one of the same values in fp32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, plain = (tmp_path_factory.mktemp("mxfp4") / name for name in ("packed", "plain"))
    theirs.save(plain, "gpt-oss")
    tensors, of_files = load_file(plain / "model.safetensors"), ({}, {})
    for seed, name in enumerate(sorted(tensors)):
        if name.endswith(PACKED):
            blocks, scales = blocks_of(tensors[name].shape, seed)
            tensors[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
            of_files[0][f"{name}_blocks"], of_files[1][f"{name}_scales"] = blocks, scales
        else:
            of_files[seed % 2][name] = tensors[name]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    index = {}
    for number, held in enumerate(of_files):
        save_file(held, folder / f"model-{number}.safetensors")
        index |= dict.fromkeys(held, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return folder, plain


def test_it_computes_what_transformers_does(packed: tuple[Path, Path]) -> None:
    folder, plain = packed
    expected = theirs.logits(theirs.load(plain)[0], TOKENS)
    assert distance(logits(open_huggingface(folder), TOKENS), expected) <= LOGITS


def test_every_number_of_four_bits_is_that_of_the_format() -> None:
    """Compare with e2m1: a sign, two bits of an exponent, one of a fraction."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.full((1, 1, 16), 127, dtype=torch.uint8)
    scales[..., 8:] = 129
    weight = read({"a_blocks": blocks, "a_scales": scales})["a"]
    assert weight.shape == (1, 512, 1)
    for place, value in enumerate(weight.flatten().tolist()):
        byte = place // 2
        bits = byte >> 4 if place % 2 else byte & 15
        exponent, fraction = bits >> 1 & 3, bits & 1
        size = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
        assert value == (-size if bits & 8 else size) * (4 if byte >= 128 else 1)


def read(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored = {name: (Kind(tuple(each.shape), each.dtype), lambda each=each: each) for name, each in tensors.items()}
    return {name: make() for name, (_, make) in unpacked(stored).items()}


BYTES = {"a_blocks": torch.zeros(2, 3, 4, 16, dtype=torch.uint8), "a_scales": torch.zeros(2, 3, 4, dtype=torch.uint8)}
WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "no scales": ({"a_blocks": BYTES["a_blocks"]}, "a_blocks has no a_scales beside it"),
    "other scales": (BYTES | {"a_scales": torch.zeros(2, 3, 5, dtype=torch.uint8)}, "are not blocks of MXFP4"),
    "another width": (BYTES | {"a_blocks": torch.zeros(2, 3, 4, 8, dtype=torch.uint8)}, "are not blocks of MXFP4"),
    "numbers": (BYTES | {"a_scales": torch.zeros(2, 3, 4)}, "are not blocks of MXFP4"),
    "one weight twice": (BYTES | {"a": torch.zeros(2, 128, 3)}, "a is there twice"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_are_no_blocks_is_refused(what: str) -> None:
    tensors, words = WRONG[what]
    with pytest.raises(CheckpointError, match=words):
        read(tensors)


def test_another_quantization_is_refused(packed: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((packed[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match=r"quantization_config is .*fp8.*, but only mxfp4 is supported"):
        open_huggingface(tmp_path)
