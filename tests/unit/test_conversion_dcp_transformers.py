"""State of transformers' models in folders of torch.distributed.checkpoint, as FSDP's users save it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from megalite.conversion.dcp import open_dcp
from megalite.conversion.huggingface import open_huggingface
from megalite.conversion.verification import logits
from tests.harness import huggingface as theirs
from tests.harness.huggingface import CONFIGS

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # it says so even where that is asked
]

LOGITS = 1e-5  # of logits of about 1, in fp32, from two implementations


@pytest.mark.wide_except("llama-scaled", "mixtral", "nemotron-h", "gpt2", "deepseek-v3")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_state_of_a_model_is_read(name: str, tmp_path: Path) -> None:
    """Its names are those of modules, which are not those of published files in every family."""
    model = theirs.save(tmp_path / "folder", name)
    config = open_huggingface(tmp_path / "folder").config
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)

    found = logits(open_dcp(tmp_path / "dcp", config), theirs.tokens())

    assert (found - theirs.logits(model, theirs.tokens())).abs().max() < LOGITS
