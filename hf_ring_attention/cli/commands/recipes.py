"""`hf-ring-attention recipes`: copies the recipes, which install with the package, to a folder where users change them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..arguments import new_folder
from ..options import AsJson, parsed, refuse
from ..output import print_json

EXAMPLES_OF_RECIPES = """\b
Examples:
  hf-ring-attention recipes my_recipes
  python my_recipes/finetune.py --help
"""
#: The folders of the recipes in an installed package, and in a checkout.
RECIPE_FOLDERS = (Path(__file__).parents[2] / "recipes", Path(__file__).parents[3] / "recipes")


def recipe_files() -> dict[str, Path]:
    """Returns every file of the recipes, by its name relative to their folder."""
    folder = next((place for place in RECIPE_FOLDERS if (place / "finetune.py").is_file()), None)
    if folder is None:
        raise FileNotFoundError(
            f"there are no recipes in {' or '.join(map(str, RECIPE_FOLDERS))}: install the package again"
        )
    kinds = (".py", ".yaml", ".txt", ".md", ".png")
    files = sorted(path for path in folder.rglob("*") if path.suffix in kinds and path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in files}


def copy_recipes(folder: Path) -> list[Path]:
    """Copies the recipes into a folder, and overwrites nothing.

    Raises:
        FileExistsError: the folder has files of these names.
    """
    files = recipe_files()
    existing = [name for name in files if (folder / name).exists()]
    if existing:
        raise FileExistsError(
            f"{folder} has {', '.join(existing)} already, which would be overwritten: name a new folder, or delete them"
        )
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
    return [folder / name for name in files]


def recipes_command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", parser=parsed(new_folder), help="The folder to copy to, made if it is missing."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Copy the recipes into a folder of your own, to start from.

    They fine-tune a model with Accelerate or with Trainer, and measure perplexity and retrieval. Nothing is overwritten.
    """
    try:
        copies = copy_recipes(folder)
    except OSError as error:
        raise refuse(str(error), "FOLDER") from None
    if as_json:
        print_json([str(path) for path in copies])
    else:
        print(f"{len(copies)} files are in {folder}; begin with: python {folder / 'finetune.py'} --help")
