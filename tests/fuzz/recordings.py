"""Traces of other programs' steps: valid ones of each kind of file, and what reads all that is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.fuzz.edits import BYTES, JSON, TORCH, Codec, Edit

_MEGATRON = "megatron/{}/iter_0000003/mp_rank_00.pth"
_RANK = "msprobe/step0/rank0"
_TENSOR = "Module.layers.0.Linear.forward.0.output.0.pt"
_SGLANG = "sglang/step=0___rank=0___dump_index={}___name={}___recompute_status=disabled.pt"
_LOG = "torchtitan/rank_0_activations.log"
_BLOCK = """[layers.0.wo/op_{}_mm]
  Shape: torch.Size([6, 4]), Dtype: torch.float32
  L2 norm: 2.5e+00
  Min: -1.000000e+00
  Max: 1.000000e+00
  Mean: 1.000000e-01
  Location: common/attention.py:53
{}
"""
FILES: Mapping[str, Codec] = {
    _MEGATRON.format("activations"): TORCH,
    _MEGATRON.format("wgrads"): TORCH,
    f"{_RANK}/dump.json": JSON,
    f"{_RANK}/dump_tensor_data/{_TENSOR}": BYTES,
    _SGLANG.format(1, "non_intrusive__decoder.layers.0.mlp.output"): TORCH,
    _SGLANG.format(2, "input_ids"): TORCH,
    _LOG: BYTES,
}


def prepare(base: Path) -> None:
    """Write a valid trace of each program."""
    import torch

    files = [base / "in" / file for file in FILES]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    activations, wgrads, dump, tensor, output, tokens, log = files
    values = torch.arange(12.0).view(3, 4)
    torch.save({"model_chunk0": {"decoder.layers.0.mlp.linear_fc1/output0": values, "output_layer/x": 1}}, activations)
    torch.save({"model_chunk0": {"decoder.layers.0.mlp.linear_fc1.weight": values}}, wgrads)
    torch.save(values, tensor)
    info = {"dtype": "torch.float32", "shape": [3, 4], "Max": 11.0, "Min": 0.0, "Mean": 5.5, "Norm": 22.5}
    call = {"input_args": [info], "input_kwargs": {"x": info}, "output": [info | {"data_name": _TENSOR}, None]}
    data = {"Module.layers.0.Linear.forward.0": call, "Module.layers.0.Linear.backward.0": {"input": [info]}}
    dump.write_text(json.dumps({"task": "tensor", "level": "L0", "data": data}))
    place = {"world_size": 1, "megatron_parallel_info": {"tp_rank": 0, "tp_size": 2}}
    torch.save({"value": values, "meta": {"name": "x", "layer_id": 0, "dims": "s[tp] h", **place}}, output)
    torch.save({"value": torch.arange(4).view(1, 4), "meta": {"name": "input_ids", **place}}, tokens)
    log.write_text("Total captured activations: 2\n" + _BLOCK.format(0, "") + _BLOCK.format(1, "  Phase: backward\n"))


def program(base: Path, edits: Sequence[Edit]) -> partial[None]:
    """Return what reads the trace with the file that was edited."""
    return partial(_read, base / "in" / edits[0][0].partition("/")[0])


def _read(folder: Path) -> None:
    import torch

    from megalite.extras.verify.readers.reading import read_trace
    from megalite.lifecycle.failure import run_main

    def main() -> int:
        for entry in read_trace(folder, None).entries:
            evidence = entry.read()
            if evidence.shape == (3, 4):
                evidence.distance(torch.zeros(3, 4, dtype=torch.float64))
        return 0

    run_main(main)
