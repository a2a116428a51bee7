"""Runs through `megalite.Trainer` with offloaded activations: a model of one's own, and a GPT."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import megalite
from megalite.errors import ConfigurationError

SAMPLES = [(torch.full((8,), number / 16), torch.tensor(number % 2)) for number in range(8)]
GPT = megalite.GPTConfig(
    num_layers=3, hidden_size=16, num_attention_heads=2, vocab_size=16, position_embedding_type="rope"
)
NUMBERS = {"loss", "lm_loss", "grad_norm"}
TOKENS = [{"tokens": torch.arange(8) + number} for number in range(4)]


def records(model: Any, **settings: Any) -> tuple[list[dict[str, Any]], Any]:
    """Return the records of two steps, without times and memory, and what the run offloads."""
    with megalite.Trainer(model, optimizer=megalite.AdamW(lr=0.1), quiet=True, precision="fp64", **settings) as run:
        found = []
        for _ in range(2):
            run.step()
            found.append({name: run.last_record[name] for name in NUMBERS & run.last_record.keys()})
        return found, run._trainer.task.offloading


def blocks(**settings: Any) -> tuple[list[dict[str, Any]], Any]:
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)), nn.Linear(8, 2)
    )

    def loss(outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])

    given = {"dataset": SAMPLES, "loss": loss, "micro_batch_size": 2, "global_batch_size": 8}
    return records(model, **given, **settings)


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_of_a_custom_model_give_the_same_numbers(recompute: bool) -> None:
    plain, nothing = blocks(recompute=recompute)
    offloaded, offload = blocks(recompute=recompute, cpu_offloading_num_layers=2)
    assert nothing is None
    assert offloaded == plain
    assert offload.layers == [[0, 1]]
    retained, offload = blocks(
        recompute=recompute, cpu_offloading_num_layers=2, cpu_offloading_retain_pinned_cpu_buffers=True
    )
    assert retained == plain
    assert offload.host_bytes > 0


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_optimizer_of_a_custom_model_gives_the_same_numbers(fraction: float) -> None:
    settings = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    assert blocks(**settings)[0] == blocks()[0]


def test_several_optimizers_give_the_same_numbers() -> None:
    torch.manual_seed(1)
    optimizers = {"0": megalite.AdamW(lr=0.1), "1": megalite.SGD(lr=0.1)}

    def run(**settings: Any) -> list[tuple[float, float]]:
        torch.manual_seed(1)
        with megalite.Trainer(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)),
            dataset=SAMPLES,
            loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
            optimizer=optimizers,
            micro_batch_size=4,
            precision="fp64",
            quiet=True,
            **settings,
        ) as trainer:
            return [trainer.step(only=only)["loss"] for only in (None, "0", "1", None)]

    assert run(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True) == run()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimizer_offload_fraction": 0.5}, "needs optimizer_cpu_offload=..."),
        (
            {"parameter_offload": True, "optimizer_cpu_offload": True},
            r"needs Layout\(zero=\.\.\.\) optim_grads_params \(ZeRO 3\), not ZeRO 0",
        ),
        ({"cpu_offloading_num_layers": 5}, "cpu_offloading_num_layers=5 is more than the 4 blocks of the model"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ("mlp_norm",)},
            r"offload_modules=\('mlp_norm',\) are modules of a GPT's layers",
        ),
        (
            {"cpu_offloading_retain_pinned_cpu_buffers": True},
            "cpu_offloading_retain_pinned_cpu_buffers=... needs cpu_offloading_num_layers=...",
        ),
    ],
)
def test_what_a_custom_model_cannot_offload_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        blocks(**settings)


def gpt(**settings: Any) -> tuple[list[dict[str, Any]], Any]:
    return records(GPT, dataset=TOKENS, micro_batch_size=2, seq_length=8, **settings)


def test_layers_and_modules_of_a_gpt_give_the_same_numbers() -> None:
    plain, _ = gpt()
    modules = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ("attn_norm", "core_attn"),
        "min_offloaded_tensor_size": 0,
    }
    for settings in ({"cpu_offloading_num_layers": 2}, modules):
        offloaded, offload = gpt(**settings)
        assert offloaded == plain
        assert offload is not None


def test_the_table_at_the_start_has_what_stays_and_what_the_host_holds(capsys: pytest.CaptureFixture[str]) -> None:
    def memory(**settings: Any) -> dict[str, str]:
        with megalite.Trainer(
            GPT, optimizer=megalite.SGD(lr=0.1), dataset=TOKENS, micro_batch_size=2, seq_length=8, **settings
        ) as run:
            run.step()
            lines = run._trainer.summary()
        capsys.readouterr()
        return {name.strip(): str(lines[name]) for name in lines}

    plain, offloaded = memory(), memory(cpu_offloading_num_layers=2)
    assert "host" not in plain
    kept, on_device, host = plain["activations"], offloaded["activations"], offloaded["host"]
    sizes = [float(text.removesuffix(" KiB")) for text in (kept, on_device, host)]
    assert sizes[0] == pytest.approx(sizes[1] + sizes[2], rel=0.01)
    assert sizes[2] > sizes[1] / 2


def test_activations_that_a_host_has_no_room_for_are_refused() -> None:
    with (
        mock.patch("megalite.process.host.memory_limit", return_value=1000),
        pytest.raises(ConfigurationError, match="offload fewer layers by --cpu-offloading-num-layers"),
        megalite.Trainer(
            GPT,
            optimizer=megalite.SGD(lr=0.1),
            dataset=TOKENS,
            micro_batch_size=2,
            seq_length=8,
            cpu_offloading_num_layers=2,
        ) as run,
    ):
        run.step()
