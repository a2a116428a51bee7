"""Greedy text of Hugging Face folders, on several ranks and in batches, equals the text from transformers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from megalite.inference.sampling import Sampling
from tests.distributed.inference_run import generated_by_huggingface_folders
from tests.distributed.layout_expected import one_thread
from tests.harness import huggingface as theirs
from tests.harness.rank_pool import RankPools

NAMES = (
    "llama-yarn",
    "mistral",
    "qwen2-window",
    "gpt2",
    "gpt-neox",
    "gemma2",
    "gemma3",
    "nemotron-h-dense",
    "qwen3.5",
    "lfm2",
    "olmo-hybrid",
    "qwen3-next",
    "nemotron-3",
    "granite",
    "gpt-oss",
    "minimax-m2",
    "olmoe",
    "deepseek-v2",
    "deepseek-v3",
    "moonlight",
    "deepseek-v32",
    "glm-moe-dsa",
    "kimi-linear",
)
PROMPTS = [[31, 41, 59, 26, 53, 58, 9, 7, 9], [3, 23], [8, 46, 26, 43, 38]]
NEW, EOD = 10, 5


@pytest.mark.wide
@one_thread()
def test_greedy_text_is_that_of_transformers(tmp_path: Path, rank_pools: RankPools) -> None:
    expected = []
    for name in NAMES:
        model = theirs.save(tmp_path / name, name)
        for prompt in PROMPTS:
            tokens = torch.tensor([prompt])
            mask = torch.ones_like(tokens)
            text = model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0]
            expected.append((name, text[len(prompt) :].tolist()))
    assert any(EOD in text for _, text in expected)
    run = functools.partial(
        generated_by_huggingface_folders, max_new_tokens=NEW, ends=(EOD,), sampling=Sampling(temperature=0.0)
    )
    for ranks in rank_pools(4).run(run, [tmp_path / name for name in NAMES], PROMPTS, 2, 2):
        found = []
        for name, events in zip(NAMES, ranks, strict=True):
            for number in range(len(PROMPTS)):
                *text, finish = [event for index, event in events if index == number]
                found.append((name, [*text, EOD] if finish == "stop" else text))
        assert found == expected
