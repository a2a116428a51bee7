"""Comparison of two models: their weights must be bit-identical, and their logits for the same tokens similar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.loading import load_weights
from megalite.checkpoint.reader import chunks
from megalite.checkpoint.tensors import Source
from megalite.conversion.block_fp8 import all_tiles_are_full
from megalite.conversion.huggingface import family_of
from megalite.conversion.huggingface_files import open_files, read_config
from megalite.conversion.opened import OpenedModel
from megalite.errors import CheckpointError
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, LOGITS
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sharding import Box

BATCH, SEQUENCE, SEED = 2, 64, 1234
TOLERANCE = 1e-4
"""Tolerance relative to the largest logit. Different orders of fp32 sums give about a hundredth of it."""


@dataclass(frozen=True)
class Agreement:
    """Result of comparing two models."""

    tensors: int
    different: tuple[str, ...]
    """Tensors whose values differ, after both are cast to the dtype of the second model."""
    logits: float
    """Largest difference between the logits of the two models, in fp32."""
    transformers: float | None
    """Largest difference between the logits of megalite and of transformers, for the model in a Hugging Face folder.

    None if transformers is not installed or cannot load it here, or if neither model is in such a folder.
    """
    largest: float
    """Largest absolute logit."""


def verify(first: OpenedModel, second: OpenedModel) -> Agreement:
    """Compare two models, which are loaded one after the other in fp32. Raises CheckpointError if one is unreadable."""
    names, others = set(first.source.tensors), set(second.source.tensors)
    if names != others:
        raise CheckpointError(f"only one of the two has {', '.join(sorted(names ^ others)[:8])}")
    different = tuple(name for name in first.source.tensors if not _same(first.source, second.source, name))
    tokens = _tokens(first)
    ours, theirs = logits(first, tokens), logits(second, tokens)
    judged = next((model for model in (second, first) if model.is_huggingface), None)
    apart = None
    if judged is not None and judged.folder is not None and _can_judge(judged.folder):
        with torch.no_grad():
            judgement = load_with_transformers(judged.folder)(input_ids=tokens).logits
        apart = _distance(theirs if judged is second else ours, judgement)
    return Agreement(len(names), different, _distance(ours, theirs), apart, ours.abs().max().item())


def farthest(first: Source, second: Source) -> tuple[float, str]:
    """Return the largest distance of a tensor of the second source from the first's, over its norm, and its name."""
    most = 0.0, ""
    for name, kind in first.tensors.items():
        squares = torch.zeros(2, dtype=torch.float64)
        for block in chunks(kind.whole, torch.float32):
            for box, _ in block:
                one, other = (torch.empty(box.size) for _ in range(2))
                first.fill(name, box, one)
                second.fill(name, box, other)
                squares += torch.stack([(one - other).double().square().sum(), one.double().square().sum()])
        if squares[0] > 0.0:
            most = max(most, ((squares[0] / squares[1]).sqrt().item(), name))
    return most


def _can_judge(folder: Path) -> bool:
    """Tell if transformers is there, knows a folder's kind of model, and can make weights of its blocks, if any."""
    if find_spec("transformers") is None:
        return False
    from transformers import CONFIG_MAPPING

    config = read_config(folder)
    in_fp8 = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    makes_weights = not in_fp8 or (find_spec("accelerate") is not None and all_tiles_are_full(open_files(folder)))
    return config.get("model_type") in CONFIG_MAPPING and makes_weights


def _tokens(model: OpenedModel) -> Tensor:
    """Return random [batch, sequence] tokens as input."""
    length = min(SEQUENCE, model.config.max_position_embeddings or SEQUENCE)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(model.config.vocab_size or 0, (BATCH, length), generator=generator)


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def _same(a: Source, b: Source, name: str) -> bool:
    """Return whether a tensor has the same bits in both sources. It is read block by block."""
    kind = b.tensors[name]
    if a.tensors[name].shape != kind.shape:
        return False
    for block in chunks(Box.whole(kind.shape), kind.dtype):
        for box, _ in block:
            values = [torch.empty(box.size, dtype=kind.dtype) for _ in range(2)]
            a.fill(name, box, values[0])
            b.fill(name, box, values[1])
            if not torch.equal(*(each.flatten().view(torch.uint8) for each in values)):
                return False
    return True


@torch.no_grad()
def logits(model: OpenedModel, tokens: Tensor) -> Tensor:
    """Return the logits [batch, sequence, vocabulary] of [batch, sequence] tokens, in fp32."""
    mesh = ParallelMesh()
    network = GPT(model.config, mesh).eval()
    load_weights(model.source, model.what, network, None, mesh)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = MicroBatch(tokens, positions, first_keys=None, labels=None, loss_mask=None, key=RandomKey(0, ()))
    found: Tensor = network({}, batch).tensors[LOGITS]
    return found.transpose(0, 1)[..., : network.vocab_size]


def load_with_transformers(folder: Path) -> Any:
    """Load a folder's model in fp32.

    Raises CheckpointError if transformers finds missing or unexpected weights, or makes no weights of its blocks.

    Weights in blocks of fp8 are dequantized, also where a GPU could multiply them as they are.

    It leaves out layers that predict further tokens, but knows their names only in models of published sizes.
    """
    import transformers

    config = read_config(folder)
    further = family_of(folder, config).of_prediction_layers(config) or ""

    transformers.utils.logging.disable_progress_bar()
    reader: Any = transformers.AutoModelForCausalLM  # Any, because its annotations omit the second result
    options: dict[str, Any] = {}
    if (blocks := config.get("quantization_config") or {}).get("quant_method") == "fp8":
        if not all_tiles_are_full(open_files(folder)):
            raise CheckpointError(f"{folder} has matrices with tiles below 128 x 128, of which transformers makes none")
        options["quantization_config"] = transformers.FineGrainedFP8Config(
            dequantize=True, modules_to_not_convert=blocks.get("modules_to_not_convert")
        )
    model, info = reader.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, **options
    )
    info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not re.fullmatch(further, name)}
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise CheckpointError(f"transformers does not take all of {folder}: {wrong}")
    return model.eval()
