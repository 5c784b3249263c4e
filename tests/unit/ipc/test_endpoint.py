from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sessionkv.config import LimitsConfig
from sessionkv.errors import ConfigError, EngineRunning
from sessionkv.ipc.endpoint import (
    EndpointLock,
    default_endpoint,
    is_listening,
    prepare_folder,
    private_endpoint,
    private_folder,
    socket_path,
)
from sessionkv.ipc.server import RouterServer
from tests.builders.fake_engine import short_endpoint


def test_the_default_lies_in_the_users_runtime_folder(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert default_endpoint() == "ipc:///run/user/1/sessionkv/engine.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_endpoint() == f"ipc:///tmp/sessionkv-{os.getuid()}/engine.sock"


@pytest.mark.parametrize(
    "endpoint",
    ["", "engine.sock", "ipc://engine.sock", "ipc://@abstract", "ipc://*", "tcp://127.0.0.1:5",
     "inproc://x", "ipc:///a\0b"],
)  # fmt: skip
def test_other_endpoints_are_refused_by_name(endpoint):
    with pytest.raises(ConfigError) as caught:
        socket_path(endpoint)
    assert caught.value.details["field"] == "endpoint"


def test_tcp_is_refused_with_the_reason():
    with pytest.raises(ConfigError) as caught:
        socket_path("tcp://0.0.0.0:5555")
    assert caught.value.message == (
        "endpoint is 'tcp://0.0.0.0:5555'; allowed: ipc://PATH: an engine listens on Unix sockets "
        "only; for other machines there is `sessionkv serve --http`"
    )


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}/new/deep does not"):
        prepare_folder(tmp_path / "new" / "deep" / "engine.sock")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file does not"):
        prepare_folder(tmp_path / "file" / "engine.sock")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(ConfigError, match="folder that exists"):
        RouterServer(f"ipc://{tmp_path}/new/engine.sock", LimitsConfig())
    assert os.listdir(tmp_path) == ["file"]


def test_the_products_own_folder_is_made_private_and_another_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    prepare_folder(socket_path(default_endpoint()))
    assert (tmp_path / "sessionkv").stat().st_mode & 0o777 == 0o700
    (tmp_path / "old").mkdir(mode=0o755)
    (tmp_path / "old").chmod(0o755)
    prepare_folder(tmp_path / "old" / "engine.sock")
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o755


def test_the_runtime_folder_is_made_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "sessionkv").mkdir()
    (tmp_path / "sessionkv").chmod(0o777)
    prepare_folder(socket_path(default_endpoint()))
    assert (tmp_path / "sessionkv").stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_runtime_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sessionkv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="belongs to this user"):
        prepare_folder(socket_path(default_endpoint()))


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path):
    path = tmp_path / "engine.sock"
    with EndpointLock(path):
        with pytest.raises(EngineRunning) as caught:
            EndpointLock(path)
        assert caught.value.details["pid"] == os.getpid()
    EndpointLock(path).release()


def test_a_lock_in_a_folder_that_is_not_there_is_a_clear_error():
    with pytest.raises(ConfigError, match="lock file"):
        EndpointLock(Path("/nowhere/engine.sock"))


def test_the_socket_is_the_users_alone_from_its_first_moment():
    with short_endpoint() as endpoint:
        assert not is_listening(endpoint)
        old = os.umask(0)
        try:
            with RouterServer(endpoint, LimitsConfig()):
                assert socket_path(endpoint).stat().st_mode & 0o777 == 0o600
                assert is_listening(endpoint)
        finally:
            os.umask(old)
        assert not is_listening(endpoint)
        assert not socket_path(endpoint).exists()


def test_a_private_folder_is_new_and_short_enough_wherever_temporary_files_are(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    short = private_folder()
    assert short.parent == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("d" * 120)))
    folders = [private_folder(), private_folder()]
    for folder in folders:
        assert folder.parent == Path(f"/tmp/sessionkv-{os.getuid()}")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert socket_path(private_endpoint(folder)).parent == folder
        folder.rmdir()
    assert folders[0] != folders[1]
