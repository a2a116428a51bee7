"""Relations of the flags of adapters and frozen weights, and the factor of what adapters add."""

from __future__ import annotations

import pytest

from megalite.config.adapters import AdaptersConfig
from megalite.tasks.flops import flops_per_token
from tests.unit.test_config_validate import config_of, problems
from tests.unit.test_flops import model

LORA = "--lora-rank 4 "
EXPERTS = "--num-experts 2 --moe-router-topk 1 "
LATENTS = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 4 --qk-head-dim 8 --v-head-dim 8 "
    "--qk-pos-emb-head-dim 2 --context-parallel-size 2 "
)
UNTIED = "--untie-embeddings-and-output-weights --lora-target-modules "
REFUSED = {
    "--lora-alpha 8": "--lora-alpha needs --lora-rank",
    "--use-dora --use-rslora": "--use-rslora needs --lora-rank",
    LORA + "--freeze embedding.*": "--lora-rank freezes all weights but the adapters: drop --freeze",
    LORA
    + "--use-dora --lora-dropout 0.1": "--use-dora normalizes weights, which have no dropout: give --lora-dropout 0",
    LORA + "--lora-dropout 0.1 --mlp-chunks-for-training 2": "--lora-dropout does not know the places of parts",
    LORA + "--qk-clip": "--lora-rank and --qk-clip, which scales weights after each update",
    "--freeze embedding.* --qk-clip": "--freeze and --qk-clip",
    LORA + EXPERTS + "--use-dora": "--use-dora: experts (--num-experts) have plain LoRA alone: leave the flag out",
    LORA
    + EXPERTS
    + "--lora-dropout 0.1 --lora-target-modules up": "--lora-dropout: experts (--num-experts) have plain",
    LORA
    + LATENTS
    + "--lora-dropout 0.1": "--lora-dropout: latents travel between the ranks of --context-parallel-size",
    LORA + "--lora-target-modules lm_head": "--lora-target-modules lm_head: the embedding and the output layer are one",
    LORA + UNTIED + "word_embeddings --mtp-num-layers 1": "--lora-target-modules word_embeddings: depths of prediction",
    LORA
    + UNTIED
    + "lm_head --mtp-num-layers 1 --mtp-detach-heads": "--lora-target-modules lm_head: --mtp-detach-heads",
    LORA + UNTIED + "output_layer --lora-dropout 0.1": "--lora-dropout: output_layer has adapters without it alone",
    LORA
    + "--load x --moe-use-upcycling --num-experts 2 --moe-router-topk 1": "--moe-use-upcycling changes the weights",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_does_not_go_together_is_refused(flags: str) -> None:
    assert any(line.startswith(REFUSED[flags]) for line in problems(flags))


@pytest.mark.parametrize(
    "flags",
    [
        EXPERTS + "--lora-target-modules query --use-dora",
        LATENTS + "--use-dora",
        LATENTS + "--lora-dropout 0.1 --lora-target-modules output",
        LATENTS + "--lora-dropout 0.1 --cp-comm-type a2a",
        LATENTS.replace("--context-parallel-size 2", "--lora-dropout 0.1"),
        UNTIED + "lm_head embed_tokens query",
        UNTIED + "lm_head attention.output embed_tokens --use-dora",
    ],
)
def test_options_go_with_the_layers_that_compute_them(flags: str) -> None:
    found = problems(LORA + flags + " --freeze x")
    assert not [line for line in found if line.startswith(("--use-dora", "--lora-dropout", "--lora-target-modules"))]


def test_the_factor_of_adapters() -> None:
    assert config_of("").adapters == AdaptersConfig()
    assert config_of(LORA).adapters.lora_scale == 1.0
    assert config_of(LORA + "--lora-alpha 6").adapters.lora_scale == 1.5
    assert config_of(LORA + "--lora-alpha 6 --use-rslora").adapters.lora_scale == 3.0


def test_frozen_weights_leave_out_a_third_of_their_products() -> None:
    whole, frozen = (flops_per_token(model(), 40, 0, adapters=each) for each in (None, 0.0))
    assert frozen == whole * 2 / 3
    scores = [flops_per_token(model(), 40, 10, adapters=each) for each in (None, 0.0)]
    assert scores[0] - whole == scores[1] - frozen > 0
