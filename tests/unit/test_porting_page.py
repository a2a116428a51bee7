"""Scripts of the page on ports run, and those before and after give the same numbers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.harness.job import Job

pytestmark = pytest.mark.costly

PAGE = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
SCRIPTS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with all scripts in it."""
    for name, program in SCRIPTS.items():
        (tmp_path / name).write_text(program)
    return tmp_path


def printed(name: str, folder: Path, ranks: int = 1) -> str:
    """Run a script in its folder, and return what rank 0 prints."""
    with Job([folder / name], ranks, folder / f"{name}-{ranks}", cwd=folder, store_of_rank_0=True) as job:
        assert job.wait() == [0] * ranks, "\n".join(job.stderr(rank) for rank in range(ranks))
        return job.stdout(0)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch \d: loss (.*)$", output, re.MULTILINE)]


def test_all_scripts_of_the_page_are_known() -> None:
    assert len(SCRIPTS) == PAGE.count("```python\n")
    before = {name.removeprefix("with_") for name in SCRIPTS if name.startswith("with_")}
    after = {name.removeprefix("from_") for name in SCRIPTS if name.startswith("from_")}
    assert before == after == {"accelerate.py", "ddp.py", "horovod.py"}


@pytest.mark.wide
def test_scripts_from_ddp_and_horovod_run(folder: Path) -> None:
    ours = losses(printed("from_ddp.py", folder))
    assert len(ours) == 2
    assert losses(printed("from_horovod.py", folder)) == ours[1:]  # the same training, in two scripts
    assert (folder / "run/from_ddp/weights/model.safetensors").exists()


@pytest.mark.wide
def test_scripts_give_the_numbers_of_ddp(folder: Path) -> None:
    before, after = losses(printed("with_ddp.py", folder)), losses(printed("from_ddp.py", folder))
    assert len(before) == 2
    assert after == pytest.approx(before, abs=2e-4)


@pytest.mark.wide
def test_the_script_from_accelerate_runs(folder: Path) -> None:
    assert re.search(r"^accuracy 0\.\d{4}$", printed("from_accelerate.py", folder), re.MULTILINE)
    assert (folder / "run/from_accelerate/latest_checkpointed_iteration.txt").read_text() == "16\n"


@pytest.mark.wide
@pytest.mark.parametrize("name", ["accelerate", "ddp", "horovod"])
def test_scripts_give_the_same_on_two_ranks(name: str, folder: Path) -> None:
    one, two = folder / "one", folder / "two"
    for place in (one, two):
        place.mkdir()
        for script in folder.glob("*.py"):
            (place / script.name).write_text(script.read_text())
    results = [
        re.findall(r"^(?:epoch|accuracy).*$", printed(f"from_{name}.py", place, ranks), re.MULTILINE)
        for ranks, place in ((1, one), (2, two))
    ]
    assert results[0] == results[1] != []


@pytest.mark.wide
def test_the_script_from_accelerate_gives_its_accuracy(folder: Path) -> None:
    before, after = (
        re.findall(r"^accuracy .*$", printed(f"{way}_accelerate.py", folder), re.M) for way in ("with", "from")
    )
    assert before == after != []


@pytest.mark.wide
def test_a_model_of_transformers_trains_on_any_ranks_and_loads_again(folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM

    from tests.harness import huggingface as theirs

    theirs.save(folder / "base", "llama", {"tie_word_embeddings": True, "vocab_size": 64})
    finals = []
    for ranks in (1, 2):
        out = printed("finetune.py", folder, ranks)
        finals.append(re.findall(r"^step 4/4 \| loss ([\d.]+)", out, re.MULTILINE))
        model, info = AutoModelForCausalLM.from_pretrained(folder / "tuned", output_loading_info=True)
        assert not any(info.values()), info
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert json.loads((folder / "tuned/config.json").read_text())["model_type"] == "llama"
        (folder / "tuned").rename(folder / f"tuned-{ranks}")
    assert finals[0] == finals[1] != []
