"""Secret of a run's ranks, and the file that passes it on."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.errors import ConfigurationError
from megalite.watchdog.secret import find_secret, make_secret


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the system's folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("MEGALITE_SECRET", raising=False)
    return folder


def test_it_goes_by_a_file_that_nobody_else_can_read_and_that_is_removed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secret = make_secret(tmp_path / "run")
    finally:
        os.umask(before)
    assert secret.file is not None
    assert secret.file.parent == tmp_path / "run"
    assert stat.S_IMODE(secret.file.stat().st_mode) == 0o600
    assert find_secret(secret.name, tmp_path / "run") == secret.value
    assert make_secret(None).value != secret.value
    secret.remove()
    secret.remove()
    with pytest.raises(OSError, match="No such file"):
        find_secret(secret.name, tmp_path / "run")


def test_without_a_folder_that_can_be_written_to_it_is_for_this_machine(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file"):
        secret = make_secret(folder)
        assert secret.file is not None
        assert secret.file.parent == temporary
        assert find_secret(secret.name, folder) == secret.value


def test_where_there_is_no_place_at_all_nobody_else_has_it(temporary: Path) -> None:
    temporary.rmdir()
    temporary.touch()
    secret = make_secret(None)
    assert (secret.name, secret.file, len(secret.value)) == ("", None, 64)


def by_link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


SPOILS: dict[str, Callable[[Path], object]] = {
    "group": lambda path: path.chmod(0o640),
    "all": lambda path: path.chmod(0o604),
    "of another user": lambda path: os.chown(path, 65534, -1),
    "a link": by_link,
    "a fifo": as_fifo,
    "a folder": lambda path: (path.unlink(), path.mkdir(mode=0o700)),
    "empty": lambda path: path.write_bytes(b""),
    "known": lambda path: path.write_bytes(b"x" * 64),
    "longer": lambda path: path.write_bytes(b"0" * 65),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_what_another_could_have_written_or_can_read_is_no_secret(spoil: Callable[[Path], object]) -> None:
    if spoil is SPOILS["of another user"] and os.getuid() != 0:
        pytest.skip("only root gives files away")
    secret = make_secret(None)
    assert secret.file is not None
    spoil(secret.file)
    with pytest.raises((ValueError, OSError)):
        find_secret(secret.name, None)


@pytest.mark.parametrize(
    "name", ["", "id_rsa", "../.megalite_secret_" + "0" * 32, ".megalite_secret_" + "0" * 32 + "\n"]
)
def test_no_other_file_is_read(name: str, temporary: Path) -> None:
    (temporary / "id_rsa").write_bytes(b"0" * 64)
    (temporary / "id_rsa").chmod(0o600)
    with pytest.raises(ValueError, match="not the name"):
        find_secret(name, None)


def test_the_launchers_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setenv("MEGALITE_SECRET", "0123456789abcdef" * 2)
    secret = make_secret(None)
    assert (secret.value, secret.name) == (b"0123456789abcdef" * 2, "")
    assert find_secret("", None) == secret.value
    assert list(temporary.iterdir()) == []
    monkeypatch.setenv("MEGALITE_SECRET", "hunter2")
    with pytest.raises(ConfigurationError, match="MEGALITE_SECRET has 7 characters") as error:
        make_secret(None)
    assert "hunter2" not in str(error.value)
