"""The built wheel, in an empty environment with nothing but its hard dependencies, gives a working command line."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def pip(*arguments: object) -> None:
    quiet = [sys.executable, "-m", "pip", "-qq", "--no-input", "--disable-pip-version-check"]
    subprocess.run([*quiet, *map(str, arguments)], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, ".")
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_dir(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(place, with_pip=False)
    pip("--python", place / "bin" / "python", "install", "--constraint", "constraints.txt", wheel)
    return place / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "stepwell/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"stepwell"}


def test_the_command_line_works_without_torch(bin_dir: Path, tmp_path: Path) -> None:
    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True, text=True)

    # First that the environment is what the test claims; otherwise it would show nothing.
    missing = run(bin_dir / "python", "-I", "-c", "import torch")
    assert "No module named 'torch'" in missing.stderr

    shown = run(bin_dir / "stepwell", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "Usage: stepwell" in shown.stdout
