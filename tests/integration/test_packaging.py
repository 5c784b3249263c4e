"""Wheel and sdist hold every module, and clients run where only msgpack and pyzmq are installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE_ONLY = ("torch", "triton", "transformers", "tokenizers", "lmdb", "jinja2", "rich", "numpy")

PAGE = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sessionkv/gateway/page").iterdir()}

pytestmark = pytest.mark.slow


def module_paths() -> set[str]:
    """Every module's path inside the package, links followed."""
    package = ROOT / "sessionkv"
    found = set()
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {
            (Path(folder) / name).relative_to(ROOT).as_posix()
            for name in names
            if name.endswith(".py")
        }
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_wheel_has_all_modules(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert module_paths() | PAGE <= names
    # Nothing beside the package: bare `kernels` would be somebody else's.
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sessionkv"}


def test_sdist_has_all_modules(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert module_paths() | PAGE <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"} <= names


@pytest.fixture(scope="module")
def client_python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel, msgpack and pyzmq, and nothing else (no network is used)."""
    home = tmp_path_factory.mktemp("client-env")
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    for name in ("msgpack", "pyzmq"):
        for item in metadata.files(name) or ():
            top = Path(item).parts[0]
            if top in ("..", "__pycache__") or (site / top).exists():
                continue
            (site / top).symlink_to(Path(item.locate()).parents[len(Path(item).parts) - 1] / top)
    return home / "bin" / "python"


def run(python: Path, code: str) -> str:
    done = subprocess.run(
        [python, "-I", "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_client_environment_lacks_engine_libraries(client_python: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {ENGINE_ONLY} if u.find_spec(n)])"
    assert run(client_python, code).strip() == "[]"


def test_clients_import_without_engine_libraries(client_python: Path) -> None:
    code = (
        "from sessionkv import AsyncClient, Client, EngineConfig, SamplingParams, launch\n"
        "import sessionkv; print(sessionkv.__file__)"
    )
    assert "client-env" in run(client_python, code)


def test_client_reports_absent_engine_without_engine_libraries(client_python: Path) -> None:
    code = (
        "from sessionkv import Client\n"
        "from sessionkv.errors import ConnectionLost\n"
        "try:\n"
        "    Client('ipc:///nonexistent/sessionkv.sock').stats()\n"
        "except ConnectionLost as error:\n"
        "    print(error.code)\n"
    )
    assert run(client_python, code).strip() == "connection_lost"
