"""Receivers of exported weights: a folder, vLLM's and SGLang's calls, a connection, and shared memory."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.checkpoint.tensors import Kind
from megalite.errors import CheckpointError, CommunicationError
from megalite.extras.post_training import receivers, weight_link
from megalite.extras.post_training.receivers import FolderReceiver, Receiver, SGLangReceiver, VLLMReceiver, row_ranges
from megalite.extras.post_training.weight_link import LinkReceiver, receive_weights
from tests.harness.phased_engine import PhasedEngine

SECRET = b"a secret of the run"
TENSORS = {
    "model.embed_tokens.weight": torch.randn(7, 5),
    "model.layers.0.mlp.up_proj.weight": torch.randn(3, 40).bfloat16(),
    "model.layers.1.experts": torch.randn(4, 2, 3, dtype=torch.float64),
    "model.norm.weight": torch.randn(5).half(),
}
CONFIG = {"model_type": "llama", "hidden_size": 5}


@pytest.fixture(autouse=True)
def small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "BOX", 64)


def export(receiver: Receiver, tensors: Mapping[str, Tensor] = TENSORS) -> None:
    """Call a receiver as an export does."""
    kinds = {name: Kind(tuple(values.shape), values.dtype) for name, values in tensors.items()}
    receiver.begin(kinds, CONFIG)
    for name, kind in kinds.items():
        for start, stop in row_ranges(kind):
            receiver.box(name, start, tensors[name][start:stop].clone())
    receiver.finish()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor] = TENSORS) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name


def test_boxes_are_rows_of_bounded_size() -> None:
    assert list(row_ranges(Kind((7, 5), torch.float32))) == [(0, 3), (3, 6), (6, 7)]
    assert list(row_ranges(Kind((3, 40), torch.float32))) == [(0, 1), (1, 2), (2, 3)]
    assert list(row_ranges(Kind((5,), torch.float16))) == [(0, 5)]


@pytest.mark.parametrize("shard", [10**6, 200])
def test_a_folder_has_all_files_at_its_end_and_none_before(shard: int, tmp_path: Path) -> None:
    companions = tmp_path / "tokenizer"
    companions.mkdir()
    (companions / "tokenizer.json").write_text("{}")
    folder = tmp_path / "new"
    receiver = FolderReceiver(folder, shard=shard, companions=companions)
    finish = receiver.finish

    def before_the_end() -> None:
        assert not folder.exists()
        finish()

    receiver.finish = before_the_end  # type: ignore[method-assign]
    export(receiver)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(folder / file)
    assert_same({name: found[name] for name in TENSORS})
    assert (len(files) > 1) == (shard == 200) == (folder / "model.safetensors.index.json").exists()
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    assert (folder / "tokenizer.json").exists()
    with pytest.raises(CheckpointError, match="already exists: choose another folder"):
        export(FolderReceiver(folder))


def test_an_abandoned_folder_leaves_nothing(tmp_path: Path) -> None:
    receiver = FolderReceiver(tmp_path / "new")
    receiver.begin({"weight": Kind((2, 2), torch.float32)}, CONFIG)
    receiver.box("weight", 0, torch.ones(1, 2))
    receiver.abandon()
    receiver.abandon()
    assert not list(tmp_path.iterdir())


class Engine:
    """Engine with the call of SGLang's `Engine`."""

    def __init__(self, answer: object = (True, "Success")) -> None:
        self.groups: list[list[str]] = []
        self.flushes: list[bool] = []
        self.tensors: dict[str, Tensor] = {}
        self.answer = answer

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Tensor]], load_format: str | None = None, flush_cache: bool = True
    ) -> object:
        self.groups.append([name for name, _ in named_tensors])
        self.tensors.update(named_tensors)
        self.flushes.append(flush_cache)
        assert load_format is None
        return self.answer


GROUPS = [[0], [1], [2, 3]]  # of 140, 240, 192 and 10 bytes


def test_vllm_takes_whole_tensors_in_four_phases_and_groups_of_bounded_size() -> None:
    engine = PhasedEngine()
    receiver = VLLMReceiver(engine, engine.connect, {"master_port": 7}, most_bytes=210)
    export(receiver)
    assert_same(engine.tensors)
    assert engine.groups == [[list(TENSORS)[number] for number in group] for group in GROUPS]
    assert engine.calls == ["init 7", "start", "update", "update", "update", "finish"]
    export(receiver)
    assert engine.calls.count("init 7") == 1


def test_vllm_that_does_not_answer_is_named() -> None:
    engine = PhasedEngine()
    engine.update_weights = lambda request: threading.Event().wait()  # type: ignore[method-assign, assignment]
    with pytest.raises(CommunicationError, match=r"vLLM does not take .* and 0 more tensors within 0 s"):
        export(VLLMReceiver(engine, engine.connect, {"master_port": 7}, most_bytes=210, seconds=0.2))
    assert "finish" not in engine.calls


def test_an_error_of_vllm_is_told_though_a_send_waits_and_no_further_export_begins() -> None:
    """The stand-in's group is never read: a send blocks, as NCCL's would."""
    engine = PhasedEngine()

    def fail(request: object) -> None:
        raise ValueError("there is no weight named model.norm.weight")

    def connect() -> Callable[[Tensor], object]:
        engine.connect()
        return lambda tensor: threading.Event().wait()

    engine.update_weights = fail  # type: ignore[method-assign]
    receiver = VLLMReceiver(engine, connect, {"master_port": 7}, most_bytes=210)
    with pytest.raises(ValueError, match="there is no weight named"):
        export(receiver)
    receiver.abandon()  # as an export does
    with pytest.raises(CommunicationError, match="start the engine again"):
        export(receiver)


def test_sglang_flushes_its_cache_with_the_last_group() -> None:
    engine = Engine()
    export(SGLangReceiver(engine, most_bytes=210))
    assert_same(engine.tensors)
    assert engine.flushes == [False, False, True]
    with pytest.raises(CheckpointError, match=r"SGLang did not take .* and 3 more tensors: .'no memory'"):
        export(SGLangReceiver(Engine((False, "no memory"))))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = weight_link.connect("127.0.0.1", server.getsockname()[1], seconds=20.0)
        reader, _ = server.accept()
        reader.settimeout(20.0)
    with sender, reader:
        yield sender, reader


def in_thread(work: object, *arguments: object) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work(*arguments)  # type: ignore[operator]
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("shared", [False, True])
def test_another_process_receives_every_export(shared: bool, ends: tuple[socket.socket, socket.socket]) -> None:
    sender, reader = ends
    before = set(os.listdir(weight_link._shared_folder()))
    process = os.fork()
    if process == 0:  # the training
        reader.close()
        receiver = LinkReceiver(sender, SECRET, shared=shared)
        try:
            export(receiver)
            export(receiver, {name: -values for name, values in TENSORS.items()})
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert_same(dict(receive_weights(reader, SECRET)))
    assert_same(dict(receive_weights(reader, SECRET)), {name: -values for name, values in TENSORS.items()})
    assert os.waitpid(process, 0)[1] == 0
    left = set(os.listdir(weight_link._shared_folder())) - before
    assert not [name for name in left if name.startswith("megalite_weights_")]


def test_the_wrong_secret_ends_both_sides(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, reader = ends
    thread, errors = in_thread(export, LinkReceiver(sender, b"another secret"))
    with pytest.raises(CommunicationError, match="does not have the same secret"):
        next(receive_weights(reader, SECRET))
    reader.close()
    thread.join()
    assert isinstance(errors[0], CommunicationError)


class Changing:
    """Connection on which somebody in between changes a bit of each box."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.recv_into, self.setsockopt = connection, connection.recv_into, connection.setsockopt
        self.gettimeout, self.settimeout = connection.gettimeout, connection.settimeout

    def sendall(self, data: bytes | memoryview) -> None:
        changed = bytearray(data)
        if isinstance(data, memoryview):
            changed[0] ^= 1
        self.connection.sendall(changed)


def test_a_changed_frame_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, reader = ends
    receiver = LinkReceiver(Changing(sender), SECRET)  # type: ignore[arg-type]

    def begin() -> None:
        receiver.begin({"weight": Kind((2, 2), torch.float32)}, CONFIG)
        receiver.box("weight", 0, torch.ones(2, 2))

    thread, errors = in_thread(begin)
    with pytest.raises(CommunicationError, match="does not have the same secret"):
        list(receive_weights(reader, SECRET))
    thread.join()
    assert not errors


def test_an_early_end_is_an_error_on_the_other_side(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, reader = ends
    receiver = LinkReceiver(sender, SECRET)

    def begin_and_abandon() -> None:
        receiver.begin({"weight": Kind((2, 2), torch.float32)}, CONFIG)
        receiver.box("weight", 0, torch.ones(1, 2))
        receiver.abandon()

    thread, _ = in_thread(begin_and_abandon)
    with pytest.raises(CommunicationError, match="has ended"):
        list(receive_weights(reader, SECRET))
    thread.join()


@pytest.mark.parametrize(
    "frames",
    [
        [{"tensors": [["weight", "int64", [2]]]}],
        [{"tensors": [["weight", "float32", [2, 0]]]}],
        [{"tensors": [["weight", "float32", [2**41]]]}],
        [{"tensors": [["weight", "float32", "2"]]}],
        [{"tensors": [], "shared": "../../etc/passwd"}],
        [{"tensors": [], "shared": "megalite_weights_absent"}],
        [{"tensors": [["weight", "float32", [2]]]}, {"name": "weight", "row": 1, "rows": 1}],
        [{"tensors": [["weight", "float32", [2]]]}, {"name": "weight", "row": 0, "rows": 3}],
        [{"tensors": [["weight", "float32", [2]]]}, {"name": "other", "row": 0, "rows": 2}],
        [{"tensors": [["weight", "float32", [2]]]}, {"name": "weight", "row": 0, "rows": 2}],
        [{"tensors": [["weight", "float32", [2]]]}, {"finished": True}],
    ],
)
def test_a_message_without_meaning_is_refused(
    frames: list[dict[str, object]], ends: tuple[socket.socket, socket.socket]
) -> None:
    sender, reader = ends

    def talk() -> None:
        channel = weight_link._Channel(sender, SECRET, b"sender", b"reader")
        for frame in frames:
            channel.send(frame)

    thread, errors = in_thread(talk)
    with pytest.raises(CommunicationError, match="without meaning"):
        list(receive_weights(reader, SECRET))
    thread.join()
    assert not errors


def test_a_proof_that_comes_byte_by_byte_has_a_time_limit(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_link, "PROOF_SECONDS", 0.3)
    here, stranger = ends
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.02):
            stranger.sendall(b"x")

    dribbling = threading.Thread(target=dribble)
    dribbling.start()
    with pytest.raises(CommunicationError, match="does not answer"):
        next(receive_weights(here, SECRET))
    over.set()
    dribbling.join()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(CommunicationError, match="start the process that generates first"):
        weight_link.connect("127.0.0.1", port, seconds=5.0)
