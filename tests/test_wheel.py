"""The built wheel works outside the checkout: every data file is in it, and the command runs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("monitor", "trainers", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build from a copy, so that no build folder of the checkout gets in or is left behind."""
    import shutil

    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for pattern in ("pyproject.toml", "LICENSE", "*.md"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), str(source)]
    subprocess.run(pip, check=True)
    (built,) = out.glob("latentwatch-*.whl")
    return built


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Run Python with nothing of the checkout on its path, in a folder of its own."""
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True)
    environment = os.environ | {"PYTHONPATH": str(site), "LATENTWATCH_CACHE": str(elsewhere / "cache")}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.site = site
    return run


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    """A new data folder or package that pyproject.toml does not list fails here, not at a user's."""
    ours = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == ours


def test_data_files_are_found_from_elsewhere(run):
    code = """
from importlib.resources import files
import monitor
print(monitor.__file__)
print((files("recipes.concepts") / "harry_potter" / "pairs.jsonl").read_text(encoding="utf-8").count("\\n"))
print(sum(path.name.endswith(".yaml") for path in (files("recipes") / "configs").iterdir()))
print(sum(path.name.endswith(".jsonl") for path in (files("monitor.stimuli") / "bias_data").iterdir()))
"""
    package, pairs, configs, stimuli = run("-c", code).split()
    assert Path(package).is_relative_to(run.site)  # not the checkout's
    assert int(pairs) >= 150 and int(configs) >= 1 and int(stimuli) >= 1


def test_the_command_runs_from_elsewhere(run):
    assert "smollm2-135m" in run("-m", "recipes.cli", "models")
    assert run("-m", "recipes", "--version").startswith("latentwatch 0.")
