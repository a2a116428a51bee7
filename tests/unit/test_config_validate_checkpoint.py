"""Valid combinations of flags for saving and loading, and the fields of a saved model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.commands.convert import Arguments, open_model
from megalite.config import CheckpointConfig, parse_arguments
from megalite.config.checkpoint import checkpoint_problems
from megalite.config.monitoring import logging_problems
from megalite.config.yaml_file import Sections
from megalite.errors import CheckpointError, ConfigurationError
from tests.unit.test_config_megatron_flags import MINIMAL

COURSE = ["--seq-length", "8", "--micro-batch-size", "1", "--lr", "0.1"]


def problems(flags: str) -> list[str]:
    config = parse_arguments([*MINIMAL, *flags.split()]).config
    return [*checkpoint_problems(config.checkpoint), *logging_problems(config.logging)]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--save-retain-interval 2 --save s", "--save-retain-interval 2 needs --save-interval"),
        (
            "--save-retain-interval 5 --save-interval 2 --save s",
            "--save-retain-interval 5 is not a multiple of --save-int",
        ),
        ("--no-save-optim", "--no-save-optim needs --save"),
        (
            "--no-save-optim --save s --resume auto",
            "--resume auto continues with the optimizer's state, which --no-sav",
        ),
        ("--tolerated-save-failures 0", "--tolerated-save-failures 0 needs --save"),
        ("--async-save", "--async-save needs --save, the run directory"),
        ("--resume auto", "--resume auto needs --save"),
        ("--ckpt-step 3 --save s", "--ckpt-step 3 needs --load"),
        ("--finetune --save s", "--finetune needs --load"),
        ("--no-load-optim --save s", "--no-load-optim needs --load"),
        ("--load-casts --save s", "--load-casts needs --load or --resume auto"),
        ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint needs --load or --resume auto"),
        ("--allow-changed-rotary", "--allow-changed-rotary needs --load or --resume auto"),
        ("--use-checkpoint-args", "--use-checkpoint-args needs --load or --resume auto"),
        ("--load s --save s/../s --finetune", "--finetune begins a new run at step 0: --save and --load must be"),
        (
            "--load s --save s --resume auto --ckpt-step 3",
            "--ckpt-step 3 is for the checkpoint in --load, but --resume",
        ),
        ("--load s --save s --resume auto --no-load-optim", "--no-load-optim is for the checkpoint in --load"),
        ("--load s --save s --resume auto --finetune", "--finetune is for the checkpoint in --load"),
        (
            "--save s3://b/r --ckpt-format torch_dist",
            "--ckpt-format torch_dist needs a --save that is a folder",
        ),
        ("--branch-from a --save s", "--branch-from a: give RUN@STEP, such as run/a@1000, or RUN@latest"),
        ("--branch-from a@-1 --save s", "--branch-from a@-1: give RUN@STEP"),
        ("--branch-from @1 --save s", "--branch-from @1: give RUN@STEP"),
        ("--branch-from a@1", "--branch-from needs --save, the directory of the new run"),
        ("--branch-from s@1 --save a/../s", "--branch-from s@1 begins a new run: give another --save"),
        ("--branch-from a@1 --save s --load b", "--load b contradicts --branch-from"),
        ("--branch-from a@1 --save s --ckpt-step 1", "--ckpt-step 1 contradicts --branch-from"),
        ("--branch-from a@1 --save s --finetune", "--finetune contradicts --branch-from"),
        ("--branch-from a@1 --save s --no-load-optim", "--no-load-optim contradicts --branch-from"),
        ("--tensorboard-dir s3://b/r", "--tensorboard-dir s3://b/r: TensorBoard appends to its files"),
        ("--load s3://b/r --save s3://b/r/ --finetune", "--finetune begins a new run at step 0: --save and"),
    ],
)
def test_what_has_nothing_to_act_on_is_refused(flags: str, problem: str) -> None:
    found = problems(flags)
    assert len(found) == 1
    assert found[0].startswith(problem)


@pytest.mark.parametrize(
    "flags",
    [
        "--save s --load s --save-interval 2 --save-retain-interval 4 --tolerated-save-failures 0",
        "--save s --load l --resume auto --ckpt-step 3 --no-load-optim --load-casts",
        "--save s --load l --finetune --use-checkpoint-args --no-load-optim",
        "--save s --load s --no-save-optim --no-load-optim --ckpt-step 0",
        "--save s3://b/r --metrics-path s3://b/m --load s3://b/other --finetune",
        "--save s --resume auto --exit-on-missing-checkpoint --load-casts --use-checkpoint-args",
    ],
)
def test_what_goes_together(flags: str) -> None:
    assert problems(flags) == []


def test_finetune_implies_a_new_optimizer() -> None:
    parsed = parse_arguments([*MINIMAL, "--finetune", "--no-load-optim", "--load", "l"])
    assert parsed.config.checkpoint.load_optim
    assert parsed.notes == ("--no-load-optim: changes nothing, since --finetune takes the weights alone",)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("iter_0000003/manifest.json", "is a run directory: --use-checkpoint-args takes the flags of the network"),
        ("manifest.json", "is a run directory: --use-checkpoint-args takes the flags of the network"),
        (
            "iter_0000003/common.pt",
            "has a checkpoint of Megatron-LM: import it with megalite-convert --loader megatron",
        ),
        ("release/mp_rank_00/model_rng.pt", "has a checkpoint of Megatron-LM: import it with megalite-convert"),
        ("step-100/.metadata", "has no config.json, which describes the network in a Hugging Face folder, and no"),
        ("model.safetensors", "has no config.json, which describes the network in a Hugging Face folder, and no"),
    ],
)
def test_without_a_network_the_message_says_what_helps_with_the_folder(tmp_path: Path, file: str, what: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(ConfigurationError, match=re.escape(f"(--load {tmp_path} {what}")):
        parse_arguments([*COURSE, "--load", str(tmp_path)])
    with pytest.raises(ConfigurationError, match=r"s3://b/r is no Hugging.*, --use-checkpoint-args takes"):
        parse_arguments([*COURSE, "--load", "s3://b/r"])


def test_the_loader_of_a_checkpoint_that_is_no_hugging_face_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / "manifest.json").touch()
    arguments = Arguments(loader="hf", saver="megatron", load_dir=str(tmp_path), save_dir="out")
    with pytest.raises(CheckpointError, match=r"has no config\.json: .* \(--loader megalite reads its checkpoint\)"):
        open_model("hf", tmp_path, arguments)


def test_saved_fields_stand_below_yaml_and_flags(tmp_path: Path) -> None:
    asked: list[CheckpointConfig] = []

    def saved(settings: CheckpointConfig, tokenizer_type: str | None) -> Sections:
        assert tokenizer_type is None
        asked.append(settings)
        model = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 2, "swiglu": True}
        return {"model": model, "data": {"tokenizer_type": "ByteTokenizer"}}

    yaml = tmp_path / "run.yaml"
    yaml.write_text("model:\n  num_attention_heads: 4\ncheckpoint:\n  load: from-yaml\n  save: s\n")
    flags = [*COURSE, "--config", str(yaml), "--hidden-size", "32", "--ckpt-step", "7"]
    with pytest.raises(ConfigurationError, match=r"missing: --num-layers.*\n\(--load from-yaml is not a folder"):
        parse_arguments(flags, saved)
    with pytest.raises(ConfigurationError, match="missing: --num-layers"):
        parse_arguments([*flags, "--use-checkpoint-args", "--no-use-checkpoint-args"], saved)
    assert asked == []
    config = parse_arguments([*flags, "--use-checkpoint-args"], saved).config
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (3, 32, 4)
    assert config.model.swiglu
    assert config.data.tokenizer_type == "ByteTokenizer"
    assert asked == [CheckpointConfig(save="s", load="from-yaml", ckpt_step=7, use_checkpoint_args=True)]
    nothing = [text for name in ("ckpt-step", "save", "load", "resume") for text in (f"--{name}", "None")]
    parse_arguments([*flags, "--use-checkpoint-args", *nothing], saved)
    assert asked[1:] == [CheckpointConfig(use_checkpoint_args=True)]
    with pytest.raises(ConfigurationError, match=r"missing: --num-layers[^\n]*$"):
        parse_arguments([*flags, *nothing], saved)
    with pytest.raises(ConfigurationError, match=r"--ckpt-step 'x': expected a whole number$"):
        parse_arguments([*flags[:-1], "x", "--num-layers", "1", "--use-checkpoint-args"], saved)
