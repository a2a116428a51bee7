"""The check of vLLM, rehearsed with a stand-in whose network is transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import megalite
from benchmarks import gpu_vllm
from tests.harness.phased_engine import PhasedEngine


@pytest.mark.parametrize("takes", [True, False])
def test_log_probabilities_are_those_of_the_weights_that_were_sent(takes: bool, tmp_path: Path) -> None:
    """An engine that takes the weights of the first export alone is found."""
    engine, run = PhasedEngine(), gpu_vllm.make_run(bf16=False)
    run.export_weights(tmp_path / "model")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))

    def score(samples: list[list[int]]) -> Tensor:
        if takes or engine.calls.count("finish") == 1:
            model.load_state_dict(engine.tensors)
        tokens = torch.tensor(samples)
        with torch.no_grad():
            found = model(tokens).logits[:, :-1].log_softmax(-1)
        return found.gather(-1, tokens[:, 1:, None]).squeeze(-1)

    worst = gpu_vllm.compare(run, megalite.VLLMReceiver(engine, engine.connect, {"master_port": 7}), score)
    run.close()
    assert (worst < 1e-4) is takes, worst
    assert (worst < gpu_vllm.TOLERANCE) is takes


def test_nothing_is_checked_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_vllm.main() == 2
