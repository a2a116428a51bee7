"""Weights in blocks of fp8: the values that their tiles' scales make, and files that are not such blocks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.tensors import Kind
from megalite.conversion.block_fp8 import unpacked
from megalite.conversion.huggingface import open_huggingface, write_huggingface
from megalite.conversion.verification import logits, verify
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from tests.harness import huggingface as theirs
from tests.unit.test_conversion_huggingface import LOGITS, TOKENS, distance

pytestmark = pytest.mark.costly

FP8 = torch.float8_e4m3fn
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"hidden_size": 144, "intermediate_size": 260, "q_lora_rank": 130},
    "deepseek-v32": {"hidden_size": 144, "intermediate_size": 260, "q_lora_rank": 130, "index_head_dim": 12},
    "kimi-linear": {"hidden_size": 144, "intermediate_size": 260},
    "minimax-m2": {"hidden_size": 144, "intermediate_size": 130},
}
"""Models some of whose matrices have several tiles, the last ones smaller."""


def of_tiles(values: Tensor, scales: Tensor) -> Tensor:
    """Return the weight in fp32, one number after the other of each tile."""
    weight = values.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128] *= scales[row, column]
    return weight


def quantized(name: str) -> bool:
    return name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight", ".wq_b.weight", ".wk.weight"))


def folders(root: Path, name: str, dtype: torch.dtype, of_scales: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """Write a quantized folder, pairs of which lie in two files, and one of the same values."""
    packed, plain = root / "packed", root / "plain"
    theirs.save(plain, name, MODELS[name])
    tensors: dict[str, Tensor] = load_file(plain / "model.safetensors")
    of_files: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for seed, key in enumerate(sorted(tensors)):
        tensors[key] = tensors[key].to(tensors[key].dtype if "bias" in key and "k_norm" not in key else dtype)
        if not quantized(key):
            of_files[seed % 2][key] = tensors[key]
            continue
        generator = torch.Generator().manual_seed(seed)
        shape = tuple(-(-size // 128) for size in tensors[key].shape)
        values = (tensors[key].float() * 50).to(FP8)
        scales = (torch.rand(shape, generator=generator) * 0.01 + 0.015).to(of_scales)
        tensors[key] = of_tiles(values, scales.float()).to(dtype)
        of_files[seed % 2][key], of_files[1 - seed % 2][f"{key}_scale_inv"] = values, scales
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    index = {}
    for number, held in enumerate(of_files):
        save_file(held, packed / f"model-{number}.safetensors")
        index |= dict.fromkeys(held, f"model-{number}.safetensors")
    (packed / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((plain / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    (plain / "config.json").write_text(json.dumps(config))
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return packed, plain


@pytest.mark.wide_except("deepseek-v32-dtype1-of_scales1", "kimi-linear-dtype2-of_scales2")
@pytest.mark.parametrize(
    ("name", "dtype", "of_scales"),
    [
        ("deepseek-v3", torch.bfloat16, torch.float32),
        ("deepseek-v32", torch.bfloat16, torch.float8_e8m0fnu),
        ("kimi-linear", torch.float32, torch.bfloat16),
        ("minimax-m2", torch.bfloat16, torch.float32),
    ],
)
def test_the_same_weights_are_read(name: str, dtype: torch.dtype, of_scales: torch.dtype, tmp_path: Path) -> None:
    packed, plain = folders(tmp_path, name, dtype, of_scales)
    found, expected = open_huggingface(packed), open_huggingface(plain)
    assert found.config == expected.config
    assert found.dtype == dtype
    assert found.source.tensors == expected.source.tensors
    for tensor, kind in expected.source.tensors.items():
        ours, others = (torch.empty(kind.shape, dtype=kind.dtype) for _ in range(2))
        found.source.fill(tensor, Box.whole(kind.shape), ours)
        expected.source.fill(tensor, Box.whole(kind.shape), others)
        assert torch.equal(ours, others), tensor
    write_huggingface(found, tmp_path / "out", dtype=None, shard=10**9, workers=1, advance=lambda _: None)
    written, of_plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", plain))
    assert written.keys() == of_plain.keys()
    assert not any(each.dtype == FP8 for each in written.values())
    assert verify(expected, found).different == ()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_it_computes_what_transformers_does(tmp_path: Path) -> None:
    packed, plain = folders(tmp_path, "deepseek-v3", torch.float32)
    expected = theirs.logits(theirs.load(plain)[0], TOKENS)
    assert expected.abs().max() > 0.1
    assert distance(logits(open_huggingface(packed), TOKENS), expected) <= 2 * LOGITS  # of wider sums


def test_every_number_of_eight_bits_is_that_of_the_format() -> None:
    """Compare with e4m3: a sign, four bits of an exponent, three of a fraction, and NaN for all of them."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8).view(1, 256)
    scales = torch.tensor([[1.0, 3.0]])
    weight = read({"a.weight": values, "a.weight_scale_inv": scales}, "float32")["a.weight"]
    assert weight.dtype == torch.float32
    for bits, value in enumerate(weight.flatten().tolist()):
        exponent, fraction = bits >> 3 & 15, bits & 7
        size = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
        size *= -3 if bits >= 128 else 1
        assert value != value if exponent == 15 and fraction == 7 else value == size


def read(tensors: dict[str, Tensor], dtype: str = "bfloat16") -> dict[str, Tensor]:
    stored = {name: (Kind(tuple(each.shape), each.dtype), lambda each=each: each) for name, each in tensors.items()}
    return {name: make() for name, (_, make) in unpacked(stored, {"torch_dtype": dtype}).items()}


PAIR = {"a.weight": torch.zeros(130, 3).to(FP8), "a.weight_scale_inv": torch.ones(2, 1)}
WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "no values": ({"a.weight_scale_inv": PAIR["a.weight_scale_inv"]}, "a.weight_scale_inv has no a.weight beside it"),
    "other tiles": (PAIR | {"a.weight_scale_inv": torch.ones(1, 1)}, "are not fp8 in blocks of 128 x 128"),
    "a vector": ({"a.weight": PAIR["a.weight"][:, 0], "a.weight_scale_inv": torch.ones(2)}, "are not fp8 in blocks"),
    "other numbers": (
        PAIR | {"a.weight": torch.zeros(130, 3)},
        "^a.weight is float32, and a.weight_scale_inv float32: only",
    ),
    "other scales": (
        PAIR | {"a.weight_scale_inv": torch.ones(2, 1).half()},
        r"a.weight_scale_inv float16: only float8_e4m3fn with float32 or bfloat16 or float8_e8m0fnu is supported: load",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_are_no_blocks_is_refused_before_it_is_read(what: str) -> None:
    def fail() -> Tensor:
        raise AssertionError

    tensors, words = WRONG[what]
    stored = {name: (Kind(tuple(each.shape), each.dtype), fail) for name, each in tensors.items()}
    with pytest.raises(CheckpointError, match=words):
        unpacked(stored, {})


@pytest.mark.parametrize(("scale", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-0.5, "-0.5")])
def test_what_is_no_scale_is_refused(scale: float, shown: str) -> None:
    scales = torch.tensor([[1.0], [scale]])
    with pytest.raises(CheckpointError, match=rf"^a.weight_scale_inv has {shown} for tile 1, 0: a scale is 0 or more$"):
        read(PAIR | {"a.weight_scale_inv": scales})


def test_a_scale_of_zero_beside_other_codes_has_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """It has none beside zeros, which some programs store so."""
    zeros = torch.zeros(130, 200)
    codes = zeros.clone()
    codes[129, 199] = codes[129, 3] = 1.0
    for values, scales in ((zeros, torch.zeros(2, 2)), (codes, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))):
        assert (read({"a.weight": values.to(FP8), "a.weight_scale_inv": scales})["a.weight"] == 0).sum() >= 25_999
    warning = "WARNING: a.weight_scale_inv has 0 for tile 1, 1, whose weights become zeros\n"
    assert capsys.readouterr() == ("", warning)


def test_values_without_scales_are_refused(tmp_path: Path) -> None:
    theirs.save(tmp_path, "moonlight")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(FP8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} with the dtype float8_e4m3fn, supported are F64"):
        open_huggingface(tmp_path)
