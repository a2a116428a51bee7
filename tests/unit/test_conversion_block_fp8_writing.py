"""Folders written in blocks of fp8: their codes and scales, what reads them, and what is not written so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.loading import load_weights
from megalite.checkpoint.tensors import Kind
from megalite.conversion import block_fp8_writing
from megalite.conversion.block_fp8_writing import InBlocks
from megalite.conversion.export import export_of, rounded_to_blocks
from megalite.conversion.huggingface import open_huggingface, write_huggingface
from megalite.conversion.native import write_megalite
from megalite.conversion.opened import OpenedModel
from megalite.conversion.verification import TOLERANCE, load_with_transformers, verify
from megalite.errors import CheckpointError
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, LOGITS
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.rounded_products import Rounding, Roundings
from megalite.parallel.sharding import Box
from megalite_kernels.recipes import recipe
from megalite_kernels.tiles import quantize_weight
from tests.harness import huggingface as theirs
from tests.harness.tool import run_tool
from tests.harness.wide import wide_except
from tests.unit.test_conversion_block_fp8 import FP8, QUANTIZATION, of_tiles

pytestmark = pytest.mark.costly

_SHALLOW = {"llama": 1, "qwen3-moe": 2, "deepseek-v3": 3, "deepseek-v32": 2}
"""Numbers of layers of the models of `make test`."""
_TRANSPOSED = {"gpt2", "gpt2-exact"}
_OTHER_TENSORS = {"gpt-oss", "gpt-oss-plain", "granite"}
WRITTEN = [name for name in theirs.CONFIGS if name not in _TRANSPOSED | _OTHER_TENSORS]


def changes(name: str) -> dict[str, Any]:
    """Return sizes of whole tiles. Those of mixers that remember stay as they are: some of their tiles are smaller."""
    kind, own = theirs.CONFIGS[name]
    found: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    widths = ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_latent_size")
    found |= dict.fromkeys([*widths, "moe_shared_expert_intermediate_size", "shared_intermediate_size"], 128)
    found |= {
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "index_head_dim": 128,
    }
    found = {
        key: value
        for key, value in found.items()
        if key in own or key in ("hidden_size", "intermediate_size", "head_dim")
    }
    if name in _SHALLOW:
        found["num_hidden_layers"] = _SHALLOW[name]
    if own.get("q_lora_rank"):
        found["q_lora_rank"] = 128
    if kind in theirs._HEADS_OF_HIDDEN or name.startswith("gpt-neox") or "kv_lora_rank" in own:
        del found["head_dim"]
    return found


def written(opened: OpenedModel, folder: Path) -> dict[str, Tensor]:
    """Write a model in blocks, and return the tensors of its file."""
    usual: Mapping[str, Any] = {"shard": 10**9, "workers": 1, "advance": lambda _: None}
    write_huggingface(opened, folder, dtype=None, in_blocks=True, **usual)
    return load_file(folder / "model.safetensors")


def in_bf16(folder: Path, name: str, **more: Any) -> OpenedModel:
    """Write a model of transformers with weights in bf16, and open it. `more`: further sizes."""
    theirs.save(folder, name, changes(name) | more)
    tensors = load_file(folder / "model.safetensors")
    wide = ("A_log", "dt_bias", ".D", "e_score_correction_bias")
    save_file(
        {key: each if key.endswith(wide) else each.bfloat16() for key, each in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return open_huggingface(folder)


def weights(opened: OpenedModel) -> dict[str, Tensor]:
    found = {name: torch.empty(kind.shape, dtype=kind.dtype) for name, kind in opened.source.tensors.items()}
    for name, values in found.items():
        opened.source.fill(name, Box.whole(tuple(values.shape)), values)
    return found


@pytest.mark.parametrize("name", wide_except(WRITTEN, ["deepseek-v3"]))
def test_what_is_read_is_what_the_codes_stand_for(name: str, tmp_path: Path) -> None:
    """Rounding what is read changes no value. Its codes may be others: a tile with 224 as its largest has 448 then."""
    opened = in_bf16(tmp_path / "plain", name)
    tensors = written(opened, tmp_path / "packed")
    scales = {key for key in tensors if key.endswith("_scale_inv")}
    assert scales
    assert {key for key, each in tensors.items() if each.dtype == FP8} == {
        key.removesuffix("_scale_inv") for key in scales
    }
    plain = {key: each for key, each in tensors.items() if key not in scales}
    for key in scales:
        matrix = key.removesuffix("_scale_inv")
        plain[matrix] = of_tiles(tensors[matrix], tensors[key]).bfloat16()
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config.pop("quantization_config").items() >= QUANTIZATION.items()
    (tmp_path / "as_weights").mkdir()
    (tmp_path / "as_weights" / "config.json").write_text(json.dumps(config))
    save_file(plain, tmp_path / "as_weights" / "model.safetensors")
    found, expected = (weights(open_huggingface(tmp_path / folder)) for folder in ("packed", "as_weights"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    again = written(open_huggingface(tmp_path / "packed"), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    for key in scales:
        matrix = key.removesuffix("_scale_inv")
        assert torch.equal(of_tiles(again[matrix], again[key]), of_tiles(tensors[matrix], tensors[key]))
    last = written(open_huggingface(tmp_path / "again"), tmp_path / "last")
    assert all(torch.equal(last[key].view(torch.uint8), again[key].view(torch.uint8)) for key in again)


def test_codes_and_scales_are_those_of_products(tmp_path: Path) -> None:
    """Compare with gate and up of a layer rounded together, and keys and values of a group, as products have them."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "head_dim": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    theirs.save(tmp_path / "plain", "llama", sizes)
    opened = open_huggingface(tmp_path / "plain")
    assert opened.config.kv_groups == 2
    tensors, logical = written(opened, tmp_path / "packed"), weights(opened)
    layer, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    of_files = {
        "attention.query": [layer + "q_proj"],
        "attention.key_value": [layer + "k_proj", layer + "v_proj"],
        "attention.output": [layer + "o_proj"],
        "mlp.gate_up": [mlp + "gate_proj", mlp + "up_proj"],
        "mlp.down": [mlp + "down_proj"],
    }
    for name, files in of_files.items():
        whole = logical[f"layers.0.{name}"]
        rows = 256 if name.endswith("output") else -1
        tiles = quantize_weight(
            whole.reshape(rows, 256 if rows < 0 and name != "mlp.down" else whole[0].numel()), recipe("blockwise")
        ).forward
        codes, scales = ([tensors[f"{file}.weight{end}"] for file in files] for end in ("", "_scale_inv"))
        if name == "attention.key_value":  # a tile of keys, then one of values
            codes, scales = (
                [torch.stack([part.unflatten(0, (2, -1)) for part in each], 1).flatten(0, 2)]
                for each in (codes, scales)
            )
        assert torch.equal(torch.cat(codes).view(torch.uint8), tiles.codes.view(torch.uint8)), name
        assert torch.equal(torch.cat(scales), tiles.scales), name


@pytest.mark.parametrize("name", wide_except(["llama", "qwen3", "qwen3-moe"], ["qwen3-moe"]))
def test_a_run_with_rounded_products_computes_the_same_from_blocks(name: str, tmp_path: Path) -> None:
    """Round what was rounded: with heads of a tile's width, products have the tiles of the files."""
    opened = in_bf16(tmp_path / "plain", name, head_dim=128)
    written(opened, tmp_path / "packed")

    def computed(model: OpenedModel, rounding: Rounding | None) -> Tensor:
        of_layers = Roundings((rounding,) * model.config.num_layers)
        network = GPT(model.config, ParallelMesh(), roundings=of_layers).eval()
        load_weights(model.source, model.what, network, None, ParallelMesh())
        tokens = theirs.tokens()
        batch = MicroBatch(
            tokens,
            torch.arange(tokens.shape[1]).expand_as(tokens),
            first_keys=None,
            labels=None,
            loss_mask=None,
            key=RandomKey(0, ()),
        )
        with torch.no_grad():
            found: Tensor = network({}, batch).tensors[LOGITS]
        return found

    rounding, packed = Rounding(recipe("blockwise")), open_huggingface(tmp_path / "packed")
    assert torch.equal(computed(opened, rounding), computed(packed, rounding))
    assert not torch.equal(computed(opened, None), computed(packed, None))


@pytest.mark.parametrize(
    "name", wide_except([name for name in WRITTEN if name not in ("nemotron-h", "nemotron-3")], ["deepseek-v32"])
)
def test_transformers_has_blocks_for_the_same_matrices(name: str, tmp_path: Path) -> None:
    """Compare with the modules that it replaces for a GPU. Nemotron's experts lack a key that it needs."""
    import transformers
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    theirs.save(tmp_path, name, changes(name))
    export = export_of(open_huggingface(tmp_path), None, in_blocks=True)
    kept = export.config["quantization_config"]["modules_to_not_convert"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=kept)
    quantizer = FineGrainedFP8HfQuantizer(config, pre_quantized=True)
    quantizer._normalize_modules_to_not_convert(model)
    kept = quantizer.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
    replace_with_fp8_linear(model, kept, config, pre_quantized=True)
    ours = {each.removesuffix(".weight_scale_inv") for each in export.source.tensors if each.endswith("_scale_inv")}
    matrices = {part for part, module in model.named_modules() if isinstance(module, FP8Linear)}
    renamed = {each.replace("backbone.", "model.").replace("block_sparse_moe.", "mlp.") for each in ours}
    assert {each for each in renamed if ".experts." not in each} == {
        each.replace("block_sparse_moe.", "mlp.") for each in matrices
    }
    of_experts = {part for part, module in model.named_modules() if part.endswith(".experts")}
    assert {part for part, module in model.named_modules() if isinstance(module, FP8Experts)} == of_experts
    assert bool(of_experts) == any(".experts." in each for each in ours)


@pytest.mark.wide
@pytest.mark.parametrize("name", WRITTEN)
def test_verification_compares_with_the_rounded_model(name: str, tmp_path: Path) -> None:
    theirs.save(tmp_path / "plain", name, changes(name))
    opened = open_huggingface(tmp_path / "plain")
    tensors = written(opened, tmp_path / "packed")
    found = verify(rounded_to_blocks(opened, None), open_huggingface(tmp_path / "packed"))
    assert found.different == ()
    assert found.logits == 0.0
    whole = all(size % 128 == 0 for each in tensors.values() if each.dtype == FP8 for size in each.shape)
    assert (found.transformers is not None) == whole
    assert (found.transformers or 0.0) <= TOLERANCE * found.largest
    assert verify(opened, open_huggingface(tmp_path / "packed")).different
    if not whole:
        with pytest.raises(CheckpointError, match=r"has matrices with tiles below 128 x 128"):
            load_with_transformers(tmp_path / "packed")


@pytest.mark.wide
def test_depths_of_prediction_are_in_blocks_but_for_their_projection(tmp_path: Path) -> None:
    theirs.save(tmp_path / "plain", "deepseek-v3", changes("deepseek-v3") | {"num_nextn_predict_layers": 1})
    save_file(theirs.add_prediction_layers(tmp_path / "plain", 1), tmp_path / "plain" / "model.safetensors")
    opened = open_huggingface(tmp_path / "plain")
    assert opened.config.depths == 1
    tensors = written(opened, tmp_path / "packed")
    of_depth = {name.removeprefix("model.layers.3."): each for name, each in tensors.items() if ".layers.3." in name}
    plain = {name for name, each in of_depth.items() if each.dim() == 2 and each.dtype != FP8 and "_scale" not in name}
    assert plain == {"eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight", "mlp.gate.weight"}
    kept = export_of(opened, None, in_blocks=True).config["quantization_config"]["modules_to_not_convert"]
    assert {f"model.layers.3.{name.removesuffix('.weight')}" for name in plain} <= {*kept}
    again = open_huggingface(tmp_path / "packed")
    assert again.config.depths == 1
    expected, found = weights(rounded_to_blocks(opened, None)), weights(again)
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_the_command_writes_and_verifies_blocks(tmp_path: Path) -> None:
    theirs.save(tmp_path / "plain", "qwen3-moe", changes("qwen3-moe"))
    opened = open_huggingface(tmp_path / "plain")
    write_megalite(opened, tmp_path / "run", layout=None, dtype=None, workers=1, advance=lambda _: None)
    flags = ("--loader", "megalite", "--saver", "hf", "--load-dir", tmp_path / "run", "--save-dir", tmp_path / "out")
    ended = run_tool("convert", *flags, "--quantize", "fp8-blockwise", "--target-params-dtype", "bf16", "--verify")
    assert ended.code == 0, ended.stderr
    assert "are the same bit for bit" in ended.stdout
    assert "verified: those of transformers differ" in ended.stdout
    before, after = (weights(each) for each in (opened, open_huggingface(tmp_path / "out")))
    apart = {
        name: ((after[name].double() - each.double()).norm() / each.double().norm()).item()
        for name, each in before.items()
    }
    name = max(apart, key=lambda each: apart[each])
    assert 0.02 < apart[name] < 0.03
    assert ended.stdout.splitlines()[-1] == (
        "rounding: this compares with the model as it is rounded, whose weights differ from the checkpoint's by "
        f"{apart[name]:.2%} of their norm at most, in {name}"
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert f"{sum(each.nbytes for each in tensors.values()):,} bytes" in ended.stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


class Given:
    """A source of one matrix."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.most = values, 0
        self.tensors = {"a.weight": Kind(tuple(values.shape), values.dtype)}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        self.most = max(self.most, values.numel())
        values.copy_(self.values[box.slices()])


def test_any_box_is_made_of_a_few_rows_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_fp8_writing, "BLOCK", 2 * 128 * 200 * 4)
    values = torch.randn(700, 200, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 700)[:, None]
    tiles, given = quantize_weight(values, recipe("blockwise")).forward, Given(values)
    source = InBlocks(given, {"a.weight"})
    for name, whole in (("a.weight", tiles.codes), ("a.weight_scale_inv", tiles.scales)):
        kind = source.tensors[name]
        assert (kind.shape, kind.dtype) == (tuple(whole.shape), whole.dtype)
        for start in range(0, kind.whole.numel, 7919 if whole is tiles.codes else 5):
            for box, _ in kind.whole.flat_range(start, min(start + 7919, kind.whole.numel)):
                part = torch.empty(box.size, dtype=kind.dtype)
                source.fill(name, box, part)
                assert torch.equal(part.float(), whole[box.slices()].float())
    assert given.most == 2 * 128 * 200


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_not_written(value: float) -> None:
    values = torch.ones(140, 3)
    values[131, 1] = value
    source = InBlocks(Given(values), {"a.weight"})
    with pytest.raises(CheckpointError, match=r"^a.weight has NaN or infinities in rows 0 to 139, which [^\n]*$"):
        source.fill("a.weight", Box.whole((140, 3)), torch.empty(140, 3, dtype=FP8))


@pytest.mark.parametrize("name", wide_except([*_TRANSPOSED, *_OTHER_TENSORS], ["gpt2"]))
def test_a_family_with_other_matrices_is_not_written_so(name: str, tmp_path: Path) -> None:
    theirs.save(tmp_path, name)
    with pytest.raises(CheckpointError, match=r"of this family is not one matrix \[outputs, inputs\][^\n]*--quantize$"):
        export_of(open_huggingface(tmp_path), None, in_blocks=True)


@pytest.mark.wide
def test_a_folder_that_also_sees_images_may_be_in_blocks(tmp_path: Path) -> None:
    expected = weights(rounded_to_blocks(in_bf16(tmp_path / "plain", "qwen3.5-moe"), None))
    written(open_huggingface(tmp_path / "plain"), tmp_path / "packed")
    text = json.loads((tmp_path / "packed" / "config.json").read_text())
    outer = {key: text.pop(key) for key in ("quantization_config", "architectures")}
    of_both = {**outer, "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(of_both))
    found = weights(open_huggingface(tmp_path / "packed"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    of_both["quantization_config"] |= {"weight_block_size": [64, 64]}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(of_both))
    with pytest.raises(CheckpointError, match="weight_block_size of quantization_config is"):
        open_huggingface(tmp_path / "packed")


def test_weights_of_fp16_are_not_written_so(tmp_path: Path) -> None:
    theirs.save(tmp_path, "llama")
    with pytest.raises(CheckpointError, match=r"stand for bf16 or fp32: give --target-params-dtype bf16$"):
        export_of(open_huggingface(tmp_path), torch.float16, in_blocks=True)
    flags = ("--loader", "hf", "--saver", "megalite", "--load-dir", tmp_path, "--save-dir", tmp_path / "out")
    assert "--quantize needs --saver hf" in run_tool("convert", *flags, "--quantize", "fp8-blockwise").stderr
