"""Rules of what measures and clips the largest logits of attention."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig


def clip_problems(model: ModelConfig) -> Iterator[str]:
    """Yield what makes --qk-clip have no effect, or change weights that are not trained."""
    if model.qk_clip and model.trains_indexers_alone:
        yield f"--qk-clip scales the weights of queries and keys, which --dsa-stage {model.dsa_stage} freezes: drop it"
    # Logits of normalised queries and keys do not follow the weights.
    if model.qk_clip and model.qk_layernorm and "attention" in model.kinds:
        yield (
            "--qk-clip scales the weights of queries and keys, and --qk-layernorm normalises queries and keys behind "
            "them, which undoes it: drop one of them (with --multi-latent-attention the norms stand before, and both "
            "go together)"
        )


def logit_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each option with which the largest logits are not those of a step with one set of weights."""
    chosen, model = config.synchronization, config.model
    if not model.measures_logits:
        return
    flag = "--qk-clip" if model.qk_clip else "--log-max-attention-logit"
    ways = {
        f"--local-update {chosen.local_update}: each replica has weights of its own": chosen.has_replicas,
        "--asynchronous parameter-server: workers have weights of different steps": chosen.has_servers,
        "--drop-stragglers-after: a micro-batch that is left out has logits all the same": (
            chosen.drop_stragglers_after is not None
        ),
        "--survivors-finish-step: logits of micro-batches that survivors keep are lost": (
            config.recovery.survivors_finish_step
        ),
    }
    yield from (f"{flag} and {way}; drop one of them" for way, is_given in ways.items() if is_given)
