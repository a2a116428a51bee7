"""Model FLOPs by formula, and the peak FLOP/s of devices, for throughput and utilization.

The formula counts the matrix products of forward, times 3 for forward and backward. Recomputation is not counted: these
are model FLOPs, not hardware FLOPs. Norms, activations, softmax and the embedding lookup are not counted. Runs report
the figure for causal attention, which counts half of the score matrix, as Megatron-LM does
(megatron/training/training.py). PaLM (arXiv:2204.02311, appendix B) and nanoGPT count the full matrix.
"""

from __future__ import annotations

import re

from megalite.config.kinds.table import kinds_of
from megalite.config.model import ModelConfig

_FORWARD_AND_BACKWARD = 3
_MULTIPLY_AND_ADD = 2

# Dense bf16 and fp16 peaks in FLOP/s, which the planner reads, too. Utilization (MFU) is of these, whatever products
# are rounded to. An entry matches a device if the device's name has all its words; the longest one counts.
_PEAK_FLOPS = {
    "A100": 312e12,  # NVIDIA A100 datasheet
    "H100": 989.4e12,  # NVIDIA H100 datasheet, SXM5
    "H100 PCIe": 756e12,  # the same, PCIe
    "H100 NVL": 835e12,  # the same, NVL, one of the pair
    "H200": 989.4e12,  # NVIDIA H200 datasheet, SXM
    "GH200": 989.4e12,  # NVIDIA GH200 datasheet
    "B200": 2250e12,  # NVIDIA DGX B200 datasheet, an eighth
    "B300": 2250e12,  # NVIDIA DGX B300 datasheet, an eighth
    "GB200": 2500e12,  # NVIDIA GB200 NVL72 datasheet, a seventy-second
    "GB300": 2500e12,  # NVIDIA GB300 NVL72 datasheet, a seventy-second
    "L40S": 362e12,  # NVIDIA L40S datasheet
    "RTX 4090": 165.2e12,  # NVIDIA Ada GPU architecture, with fp32 sums
    "MI250X": 383e12,  # AMD Instinct MI250X datasheet, both dies
    "MI300X": 1307.4e12,  # AMD Instinct MI300X datasheet
}


def flops_per_token(
    model: ModelConfig,
    padded_vocab_size: int,
    sequence_length: int,
    *,
    causal: bool = True,
    adapters: float | None = None,
) -> float:
    """Return the model FLOPs of a training step per token, summed over all ranks.

    Args:
        causal: count only the attention scores inside the causal mask and the sliding window; otherwise all scores.
        adapters: multiplications of adapters for a token, beside which all weights are frozen: no product is of the
            gradient of one. None: the weights are trained.
    """
    layers = of_weights = 0.0
    for layer in model.passed_layers:
        seen = _attended(sequence_length, layer.keys_before) if causal else sequence_length
        layers += sum(kind.products(model, seen) for kind in kinds_of(layer))
        of_weights += sum(kind.products(model, 0) for kind in kinds_of(layer))
    logits = model.hidden_size * padded_vocab_size * (1 + model.depths)
    projections = 2 * model.hidden_size**2 * model.depths
    passes = 1 if model.trains_indexers_alone else _FORWARD_AND_BACKWARD
    products = passes * (layers + projections + logits)
    if adapters is not None:
        products += passes * adapters - (of_weights + projections + logits)
    return float(_MULTIPLY_AND_ADD * products)


def _attended(sequence_length: int, keys_before: int | None) -> float:
    """Return the number of keys that a token attends to on average: half of the sequence without a window."""
    window = sequence_length if keys_before is None else min(keys_before + 1, sequence_length)
    return window - window * window / (2 * sequence_length) if sequence_length else 0.0


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of a device by its name (`torch.cuda.get_device_name()`); None if unknown."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    if "Laptop" in words:  # other chips of the same names
        return None
    matches = [name for name in _PEAK_FLOPS if words.issuperset(name.split())]
    return _PEAK_FLOPS[max(matches, key=len)] if matches else None
