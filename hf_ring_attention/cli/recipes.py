"""`hf-ring-attention recipes`: copies the recipes, which install with the package, to a folder where users change them."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

from .options import Parser, Refusal, new_folder

#: The folders of the recipes in an installed package, and in a checkout.
RECIPE_FOLDERS = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[2] / "recipes")


def add_recipes(parser: Parser) -> None:
    """Adds the options of `recipes`."""
    text = "The folder to copy to; the command makes it."
    parser.add_argument("folder", metavar="FOLDER", type=new_folder, help=text)


def recipes_command(args: Namespace) -> None:
    """Copy the recipes into a folder of your own, to start from.

    They fine-tune a model with Accelerate or with Trainer, and measure perplexity and retrieval. Nothing is overwritten.

    Examples:
      hf-ring-attention recipes my_recipes
      python my_recipes/finetune.py --help
    """
    files = recipe_files()
    existing = [name for name in files if (args.folder / name).exists()]
    if existing:
        raise Refusal(f"{args.folder} has {', '.join(existing)} already: name a new folder, or delete them", "FOLDER")
    try:
        for name, source in files.items():
            (args.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, args.folder / name)
    except OSError as error:
        raise Refusal(str(error), "FOLDER") from None
    print(f"{len(files)} files are in {args.folder}; begin with: python {args.folder / 'finetune.py'} --help")


def recipe_files() -> dict[str, Path]:
    """Returns every file of the recipes, by its name relative to their folder."""
    folder = next((place for place in RECIPE_FOLDERS if (place / "finetune.py").is_file()), None)
    if folder is None:
        raise FileNotFoundError(
            f"there are no recipes in {' or '.join(map(str, RECIPE_FOLDERS))}: install the package again"
        )
    kinds = (".py", ".yaml", ".txt", ".md", ".png", ".gz")
    files = sorted(path for path in folder.rglob("*") if path.suffix in kinds and path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in files}
