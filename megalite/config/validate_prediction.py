"""Rules of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import given, needs
from megalite.config.pipeline_layout import STAGE_FIELDS
from megalite.config.prediction import DEPTHS_FLAG, NEEDED
from megalite.config.run import RunConfig


def prediction_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each option of a run that does not go with its depths."""
    parallel, depths = config.parallel, config.model.depths
    if not depths:
        yield from needs(parallel, "mtp_standalone", NEEDED)
        return
    if depths >= config.data.seq_length:
        yield f"{DEPTHS_FLAG} {depths} is not below --seq-length {config.data.seq_length}: no token has such a label"
    if not parallel.mtp_standalone:
        return
    ways = [name for name in STAGE_FIELDS if name != "num_virtual_stages_per_pipeline_rank"]
    for flag in given(parallel, " ".join(ways)):
        yield f"--mtp-standalone leaves the other stages equal parts of the layers: leave {flag} out, or write ...|mL"
