"""What a user installs: source archive and wheel, built from what is in the repository and installed elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import sglang_mla_ext

REPOSITORY = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "sglang_mla_ext", "kernels", "configs")
DATA = ("status.html", "py.typed")


def shipped() -> set[str]:
    """What has to be in a wheel: all modules, and the configurations that the package reads."""
    found = {f"sglang_mla_ext/{name}" for name in DATA}
    for folder, inside in (("sglang_mla_ext", ""), ("kernels", "sglang_mla_ext/"), ("configs", "sglang_mla_ext/")):
        for path in (REPOSITORY / folder).rglob("*.py"):
            found.add(f"{inside}{path.relative_to(REPOSITORY)}")
    for kind in ("checkpoints", "gpus", "workloads"):
        found |= {
            f"sglang_mla_ext/configs/{kind}/{path.name}" for path in (REPOSITORY / "configs" / kind).glob("*.json")
        }
    return {name for name in found if "__pycache__" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in BUILT_FROM:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (archive,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return archive, wheel


def test_everything_is_in_them(built: tuple[Path, Path]) -> None:
    archive, wheel = built
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == shipped()
    with tarfile.open(archive) as packed_source:
        names = {name.partition("/")[2] for name in packed_source.getnames()}
    assert shipped() <= names


def test_it_runs_where_it_is_installed(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment of its own, beside this one's SGLang and torch, from another folder; it brings nothing else."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    python = tmp_path / "venv" / "bin" / "python"
    beside = Path(find_spec("sglang").origin).parents[1]  # as a path it brings no links to this checkout
    run = dict(env=os.environ | {"PYTHONPATH": str(beside)}, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    before = set((tmp_path / "venv").glob("lib/*/site-packages/*"))
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", built[1]], check=True, **run)
    added = {path.name for path in set((tmp_path / "venv").glob("lib/*/site-packages/*")) - before}
    assert added == {"sglang_mla_ext", f"sglang_mla_ext-{sglang_mla_ext.__version__}.dist-info"}
    where = "import sglang_mla_ext, sglang_mla_ext.kernels.merge as m; print(sglang_mla_ext.__file__, m.__file__)"
    found = subprocess.run([python, "-c", where], check=True, **run).stdout
    assert found.count(str(tmp_path / "venv")) == 2 and str(REPOSITORY) not in found
    doctor = subprocess.run([tmp_path / "venv" / "bin" / "sglang-mla", "doctor"], **run)
    assert "ready" in doctor.stdout.splitlines()[-1] and sglang_mla_ext.__version__ in doctor.stdout, doctor
    assert version("sglang") in doctor.stdout
    plugins = (
        "from importlib.metadata import entry_points\n"
        "(each,) = entry_points(group='sglang.srt.plugins', name='hybrid_mla')\n"
        "print(each.load().__module__)"
    )
    assert subprocess.run([python, "-c", plugins], check=True, **run).stdout.split()[-1].endswith("adapter.plugin")


def test_the_version_is_one(built: tuple[Path, Path]) -> None:
    ours = sglang_mla_ext.__version__
    assert all(f"-{ours}" in path.name for path in built)
    assert f"## {ours}" in (REPOSITORY / "CHANGELOG.md").read_text()
