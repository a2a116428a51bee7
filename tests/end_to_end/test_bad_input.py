"""Errors are reported once, in one message on what to change, on any number of ranks; good files stay good."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.end_to_end.runs import GENERATE, GPT2, LLAMA, MOCK, PRETRAIN, Ended, contents, saved_tensors, words
from tests.harness.job import Job
from tests.harness.token_files import add_document

BYTES = words("--tokenizer-type ByteTokenizer")
SHORT = (*GPT2, "--train-iters", 3)

# Code that an entry script runs before the program, on the affected rank.
BEFORE = """
import os, resource, runpy, sys
rank = int(os.environ["RANK"])
{before}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Place:
    """Files for the cases: a good token file, a good checkpoint of SHORT on mock data, and a folder for each case."""

    prefix: str
    good: Path
    folder: Path

    def copy_of_data(self) -> str:
        """Return a token file that a case may damage."""
        for suffix in ("bin", "idx", "megalite.json"):
            shutil.copy(f"{self.prefix}.{suffix}", self.folder / f"copy.{suffix}")
        return str(self.folder / "copy")

    def copy_of_good(self) -> Path:
        """Return a run directory that a case may damage."""
        return Path(shutil.copytree(self.good, self.folder / "run"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("good")
    prefix = str(folder / "data")
    text = np.frombuffer((Path(__file__).read_text() * 2).encode(), np.uint8)
    with IndexedDatasetWriter(prefix, np.uint16, ByteTokenizer().identity()) as writer:
        for document in np.split(text[:6000], 20):
            add_document(writer, [*document.tolist(), 256])
        writer.finish()
    with Job([PRETRAIN, *MOCK, *SHORT, "--save", folder / "run"], 1, folder / "job") as job:
        assert job.wait() == [0], job.stderr(0)
    return prefix, folder / "run"


@pytest.fixture
def place(prepared: tuple[str, Path], tmp_path: Path) -> Place:
    return Place(*prepared, tmp_path)


Refused = Callable[..., str]


@pytest.fixture
def refused(spawn: Callable[..., Job], tmp_path: Path) -> Refused:
    """Run a command that must fail with an exit code and one message; return the message."""

    def run(code: int, *argv: Any, world_size: int = 2, before: str = "") -> str:
        command = list(argv)
        if before:
            entry = tmp_path / "entry.py"
            entry.write_text(BEFORE.format(before=before))
            command.insert(0, entry)
        job = spawn(command, world_size)
        found = job.wait_as_launcher()
        result = Ended([found], job.stdout(0), "".join(job.stderr(rank) for rank in range(world_size)))
        assert found == code, f"{found}\n{result.stderr}"
        assert "Traceback" not in result.stderr, result.stderr
        assert len(re.findall(r"^error", result.stderr, re.MULTILINE)) == 1, result.stderr
        return result.stderr

    return run


# ---------------------------------------------------------------------------------------------------- flags and YAML


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["--hiden-size", "16"], ["--hiden-size", "did you mean --hidden-size"]),
        (["--num-layers", "two"], ["--num-layers 'two': expected a whole number"]),
        pytest.param(
            ["--train-iters", "1e3"], ["--train-iters '1e3': expected a whole number"], marks=pytest.mark.wide
        ),
        pytest.param(["--lr", "high"], ["--lr 'high': expected a finite number"], marks=pytest.mark.wide),
        (["--lr-decay-style", "cosin"], ["'cosin'", "cosine"]),
        (["--lr", "-1"], ["--lr -1", "at least 0"]),
        pytest.param(["--lr", "nan"], ["--lr 'nan': expected a finite number"], marks=pytest.mark.wide),
        (["--distributed-backend", "nccl"], ["nccl connects only GPUs, but this run is on cpu: use gloo"]),
        (["--tp", "3"], ["2 ranks", "--tensor-model-parallel-size 3"]),
        pytest.param(
            ["--tp", "2", "--num-attention-heads", "1"],
            ["--num-attention-heads 1", "--tensor-model-parallel-size 2"],
            marks=pytest.mark.wide,
        ),
        (["--num-attention-heads", "3"], ["--hidden-size 16", "--num-attention-heads 3"]),
        (["--global-batch-size", "6"], ["--global-batch-size 6", "--micro-batch-size 2"]),
        pytest.param(["--pp", "3"], ["2 ranks", "--pipeline-model-parallel-size 3"], marks=pytest.mark.wide),
        (["--fp8-format", "e4m3", "--fp8-recipe", "delayed"], ["--fp8-recipe delayed", "past steps", "tensorwise"]),
        (["--bf16", "--fp64"], ["--bf16", "--fp64"]),
        pytest.param(["--bf16", "true"], ["--bf16 takes no value"], marks=pytest.mark.wide),
        pytest.param(["--seq-length"], ["--seq-length needs one value"], marks=pytest.mark.wide),
        (["--optimizer-backend", "apex"], ["No module named 'apex'", "--optimizer-backend auto needs nothing"]),
        (["--config", "nowhere.yaml"], ["--config nowhere.yaml", "No such file"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_flags(flags: list[str], fragments: list[str], refused: Refused) -> None:
    message = refused(64, PRETRAIN, *MOCK, *SHORT, *flags)
    for fragment in fragments:
        assert fragment in message


def test_no_arguments_name_what_is_needed(refused: Refused) -> None:
    message = refused(64, PRETRAIN, world_size=1)
    for flag in (
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
        "--lr",
    ):
        assert flag in message


def test_no_data(refused: Refused) -> None:
    assert "--preference-data or --mock-data" in refused(64, PRETRAIN, *BYTES, *SHORT)


@pytest.mark.parametrize(
    ("yaml", "fragments"),
    [
        ("model:\n  hiden_size: 16\n", ["line 2", "hiden_size", "did you mean hidden_size"]),
        pytest.param("modell:\n  hidden_size: 16\n", ["modell", "did you mean model"], marks=pytest.mark.wide),
        ("model:\n  num_layers: two\n", ["line 2", "num_layers", "a whole number"]),
        ("model: [1, 2\n", ["not YAML"]),
        ("optimizer:\n  hidden_size: 16\n", ["belongs under model"]),
    ],
    ids=["key", "section", "type", "syntax", "place"],
)
def test_yaml(yaml: str, fragments: list[str], refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml)
    message = refused(64, PRETRAIN, "--config", path, *MOCK, *SHORT)
    for fragment in [str(path), *fragments]:
        assert fragment in message


def test_ranks_started_with_different_flags(refused: Refused, tmp_path: Path) -> None:
    before = "sys.argv += ['--lr', '2e-2'] if rank == 1 else []"
    message = refused(64, PRETRAIN, *MOCK, *SHORT, "--save", tmp_path / "run", before=before)
    assert "rank 1" in message
    assert "lr: 0.02" in message
    assert "lr: 0.01" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
def test_ranks_started_with_different_layouts(refused: Refused) -> None:
    before = "sys.argv += ['--tp', '2'] if rank == 1 else []"
    message = refused(64, PRETRAIN, *MOCK, *SHORT, before=before)
    assert "tensor_model_parallel_size: 2" in message


def test_several_ranks_without_a_launcher(refused: Refused) -> None:
    message = refused(64, PRETRAIN, *MOCK, *SHORT, before="del os.environ['MASTER_ADDR']")
    assert "torchrun" in message
    assert "MASTER_ADDR" in message


def test_a_module_that_is_not_installed(refused: Refused) -> None:
    imported = "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('megalite')]"
    message = refused(64, PRETRAIN, *MOCK, *SHORT, before=f"{imported}; sys.modules['einops'] = None")
    assert "einops" in message
    assert "pip install -e ." in message


# ---------------------------------------------------------------------------------------------------- data


def damage_idx(place: Place) -> str:
    prefix = place.copy_of_data()
    Path(f"{prefix}.idx").write_bytes(b"garbage" * 50)
    return prefix


def cut_idx(place: Place) -> str:
    prefix = place.copy_of_data()
    Path(f"{prefix}.idx").write_bytes(Path(f"{prefix}.idx").read_bytes()[:-5])
    return prefix


def cut_bin(place: Place) -> str:
    prefix = place.copy_of_data()
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-2])
    return prefix


def flip_a_bit_of_bin(place: Place) -> str:
    prefix = place.copy_of_data()
    data = bytearray(Path(f"{prefix}.bin").read_bytes())
    data[1000] ^= 1
    Path(f"{prefix}.bin").write_bytes(data)
    return prefix


def without(suffix: str) -> Callable[[Place], str]:
    def make(place: Place) -> str:
        prefix = place.copy_of_data()
        Path(f"{prefix}.{suffix}").unlink()
        return prefix

    return make


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (without("idx"), ["copy.idx does not exist"]),
        pytest.param(without("bin"), ["copy.bin does not exist"], marks=pytest.mark.wide),
        (damage_idx, ["copy.idx is damaged", "magic"]),
        pytest.param(cut_idx, ["copy.idx is damaged", "bytes"], marks=pytest.mark.wide),
        pytest.param(cut_bin, ["copy.bin is damaged", "bytes"], marks=pytest.mark.wide),
        (flip_a_bit_of_bin, ["copy.bin is damaged", "another checksum than copy.megalite.json records"]),
        (lambda place: f"{place.prefix}.bin", ["leave out .bin"]),
        (lambda place: f"0 {place.prefix}", ["--data-path 0", "every weight positive"]),
    ],
    ids=["no idx", "no bin", "magic", "cut idx", "cut bin", "flipped bit", "suffix", "weights"],
)
def test_data_files(make: Callable[[Place], str], fragments: list[str], place: Place, refused: Refused) -> None:
    message = refused(64, PRETRAIN, "--data-path", *make(place).split(), *BYTES, *SHORT)
    for fragment in fragments:
        assert fragment in message


def test_a_tokenizer_that_is_not_the_one_of_the_data(place: Place, refused: Refused) -> None:
    flags = words("--tokenizer-type NullTokenizer --vocab-size 300")
    message = refused(64, PRETRAIN, "--data-path", place.prefix, *flags, *SHORT)
    assert "ByteTokenizer" in message
    assert "NullTokenizer" in message


def test_tokens_beyond_the_vocabulary_where_no_tokenizer_is_recorded(place: Place, refused: Refused) -> None:
    prefix = without("megalite.json")(place)
    message = refused(
        64, PRETRAIN, "--data-path", prefix, *words("--tokenizer-type NullTokenizer --vocab-size 99"), *SHORT
    )
    assert "another tokenizer" in message


def test_a_tokenizer_file_that_is_missing_or_foreign(refused: Refused, tmp_path: Path) -> None:
    flags = ["--mock-data", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    assert "nowhere.model cannot be read" in refused(64, PRETRAIN, *flags, "nowhere.model", *SHORT)
    (tmp_path / "foreign.model").write_text("no model")
    assert "is not a SentencePiece model" in refused(64, PRETRAIN, *flags, tmp_path / "foreign.model", *SHORT)


def test_a_split_that_leaves_nothing(place: Place, refused: Refused) -> None:
    flags = ["--data-path", place.prefix, *BYTES, *SHORT, "--eval-iters", 1, "--split"]
    assert "--split" in refused(64, PRETRAIN, *flags, "1,0,0")
    assert "--split" in refused(64, PRETRAIN, *flags, "999,1,0")
    assert "--split" in refused(64, PRETRAIN, *flags, "a,b")


# ---------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["--hidden-size", "32"], ["from another model", "hidden_size: 16 in the checkpoint, 32 in this run"]),
        pytest.param(LLAMA, ["from another model", "swiglu"], marks=pytest.mark.wide),
        pytest.param(["--num-layers", "1"], ["num_layers"], marks=pytest.mark.wide),
        pytest.param(
            ["--vocab-size", "70"], ["vocab_size: 61 in the checkpoint, 71 in this run"], marks=pytest.mark.wide
        ),
        pytest.param(["--bf16"], ["its optimizer state", "give --optimizer, the precision"], marks=pytest.mark.wide),
        pytest.param(["--fp64"], ["float32 in it and float64 in this run"], marks=pytest.mark.wide),
        pytest.param(["--optimizer", "sgd"], ["--optimizer"], marks=pytest.mark.wide),
    ],
    ids=["hidden", "family", "layers", "vocabulary", "bf16", "fp64", "sgd"],
)
def test_a_checkpoint_that_does_not_fit(flags: list[str], fragments: list[str], place: Place, refused: Refused) -> None:
    before = contents(place.good)
    message = refused(93, PRETRAIN, *MOCK, *SHORT, "--train-iters", 9, *flags, "--save", place.good, "--resume", "auto")
    for fragment in fragments:
        assert fragment in message
    assert contents(place.good) == before


def flip_a_byte(run: Path) -> None:
    path = run / "iter_0000003" / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte after the header
    path.write_bytes(data)


def cut_a_file(run: Path) -> None:
    path = run / "iter_0000003" / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def cut_the_manifest(run: Path) -> None:
    path = run / "iter_0000003" / "manifest.json"
    path.write_text(path.read_text()[:-20])


def remove_a_file(run: Path) -> None:
    (run / "iter_0000003" / "rank_00000.safetensors").unlink()


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, *(pytest.param(d, marks=pytest.mark.wide) for d in (cut_a_file, cut_the_manifest, remove_a_file))],
)
def test_a_damaged_checkpoint(damage: Callable[[Path], None], place: Place, refused: Refused) -> None:
    run = place.copy_of_good()
    damage(run)
    before = contents(run)
    message = refused(93, PRETRAIN, *MOCK, *SHORT, "--train-iters", 9, "--save", run, "--resume", "auto")
    assert str(run) in message
    assert contents(run) == before
    assert str(run) in refused(93, GENERATE, "--load", run, "--prompt", "1 2 3", world_size=1)


@pytest.mark.wide
def test_a_full_disk_at_save(place: Place, refused: Refused) -> None:
    run = place.copy_of_good()
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"  # a checkpoint needs twice that
    flags = [*MOCK, *SHORT, "--train-iters", 9, "--save", run, "--resume", "auto"]
    message = refused(93, PRETRAIN, *flags, "--exit-interval", 5, before=limit)
    assert "File too large" in message
    assert "Free space" in message
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000003"]
    saved_tensors(run / "iter_0000003")


@pytest.mark.wide
def test_a_disk_that_stays_full(place: Place, refused: Refused) -> None:
    """Two failed saves are reported and tolerated; the third ends the run."""
    run = place.copy_of_good()
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000)) if rank == 1 else None"
    flags = [*MOCK, *SHORT, "--train-iters", 20, "--save", run, "--save-interval", 2, "--resume", "auto"]
    message = refused(93, PRETRAIN, *flags, before=limit)
    assert "saving iteration 8 to" in message
    assert "on rank 1: [Errno 27] File too large" in message
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000003"]
    saved_tensors(run / "iter_0000003")


@pytest.mark.wide
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_on_one_node(rank: int, place: Place, refused: Refused) -> None:
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000)) if rank == {rank} else None"
    flags = ["--save", place.folder / "run", "--exit-interval", 1, "--use-distributed-optimizer"]
    message = refused(93, PRETRAIN, *MOCK, *SHORT, *flags, before=limit)
    assert f"rank {rank}" in message
    assert not list((place.folder / "run").glob("iter_*"))


@pytest.mark.wide
def test_a_disk_that_fills_up_with_metrics(place: Place, refused: Refused) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000)) if rank == 0 else None"
    message = refused(93, PRETRAIN, *MOCK, *SHORT, "--metrics-path", place.folder / "metrics.jsonl", before=limit)
    assert "metrics.jsonl" in message
    assert "File too large" in message


@pytest.mark.wide
def test_a_read_only_folder_at_save(place: Place, refused: Refused) -> None:
    run = place.copy_of_good()
    before = contents(run)
    read_only = f"""
import errno
from pathlib import Path
from tests.harness.file_faults import FileFaults, fail_with
FileFaults(Path({str(run)!r}), 0, fail_with(errno.EROFS), lasting=True).__enter__()
"""
    flags = [*MOCK, *SHORT, "--train-iters", 9, "--save", run, "--resume", "auto"]
    message = refused(93, PRETRAIN, *flags, before=read_only)
    assert f"--save {run} failed" in message
    assert "Read-only file system" in message
    assert contents(run) == before


@pytest.mark.wide
def test_a_folder_that_the_ranks_do_not_share(place: Place, refused: Refused) -> None:
    """Each rank has its own disk, with a folder of the same name."""
    for rank in range(2):
        (place.folder / str(rank)).mkdir()
    apart = f"""
from megalite.checkpoint import run_lock
run_lock.SEEN_WITHIN = 0.5
os.chdir({str(place.folder)!r} + f"/{{rank}}")
"""
    message = refused(93, PRETRAIN, *MOCK, *SHORT, "--save", "run", before=apart)
    assert "checking the run directory --save run failed on rank 1" in message
    assert "the folder must be on a file system that all nodes share" in message
    assert not (place.folder / "1" / "run").exists()


@pytest.mark.wide
@pytest.mark.parametrize(
    "flag",
    ["--save", *(pytest.param(flag, marks=pytest.mark.wide) for flag in ("--metrics-path", "--tensorboard-dir"))],
)
def test_a_folder_that_cannot_be_made(flag: str, place: Place, refused: Refused) -> None:
    file = place.folder / "file"
    file.touch()
    message = refused(93, PRETRAIN, *MOCK, *SHORT, flag, file / "below")
    assert str(file / "below") in message
    assert file.read_bytes() == b""


@pytest.mark.wide
def test_a_save_folder_that_is_a_file(place: Place, refused: Refused) -> None:
    file = place.folder / "file"
    file.write_text("mine")
    assert str(file) in refused(93, PRETRAIN, *MOCK, *SHORT, "--save", file)
    assert file.read_text() == "mine"


# ---------------------------------------------------------------------------------------------------- generation


def test_generation(place: Place, refused: Refused) -> None:
    command = [GENERATE, "--load", place.good]
    assert "learned 32 positions" in refused(64, *command, "--prompt", "1 " * 33)
    assert "is blank" in refused(64, *command, "--prompt", "", world_size=1)
    assert "--temperature" in refused(64, *command, "--prompt", "1", "--temperature", "-1", world_size=1)
    assert "--top-p" in refused(64, *command, "--prompt", "1", "--top-p", "0", world_size=1)
    assert "--max-new-tokens" in refused(64, *command, "--prompt", "1", "--max-new-tokens", "-1", world_size=1)
    assert "'one'" in refused(64, *command, "--prompt", "one")
    nowhere = refused(64, GENERATE, "--load", place.folder / "nowhere", "--prompt", "1")
    assert f"--load {place.folder / 'nowhere'} is no folder" in nowhere
    assert "--tensor-model-parallel-size 3 does not divide" in refused(64, *command, "--prompt", "1", world_size=3)
