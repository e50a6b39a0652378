"""The recipes install with the package, and are copied by one command."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
FILES = [path for kind in ("py", "yaml", "txt", "md", "png", "gz", "json") for path in RECIPES.rglob(f"*.{kind}")]


def test_all_recipes_are_copied_and_nothing_is_overwritten(tmp_path, command, refusal):
    folder = tmp_path / "mine"
    printed = command(["recipes", folder])
    copied = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert copied >= {path.relative_to(RECIPES) for path in FILES}
    assert f"the recipes are in {folder}; begin with: python" in printed
    assert not [path for path in copied if "__pycache__" in path.parts]
    (folder / "finetune.py").write_text("my own")
    assert f"{folder} exists already: name a new folder" in refusal(["recipes", folder])
    assert (folder / "finetune.py").read_text() == "my own"


def test_a_wheel_has_the_recipes_and_runs_none_of_the_checkout(tmp_path):
    """The wheel is built without a network from a copy of its sources, and unpacked as an installer would."""
    source = tmp_path / "source"
    for name in ("hf_ring_attention", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-q"]
    command += ["-w", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    package = ROOT / "hf_ring_attention"
    assert {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")} <= {*names}, "pyproject lists folders"
    assert RECIPES / "guide" / "ideas.md" in FILES
    for path in FILES:
        assert f"hf_ring_attention/recipes/{path.relative_to(RECIPES).as_posix()}" in names
    assert not [name for name in names if name.startswith(("recipes/", "tests/")) or "__pycache__" in name]
    command = [sys.executable, "-m", "hf_ring_attention", "recipes", "mine"]
    place = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path / "site")}}
    done = subprocess.run(command, **place, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "mine" / "accelerate" / "fsdp2.yaml").is_file()
    assert (tmp_path / "mine" / "finetune.py").read_bytes() == (RECIPES / "finetune.py").read_bytes()
