"""`hf-ring-attention recipes`: copies the recipes, which install with the package, to a folder where users change them."""

from __future__ import annotations

import shutil
from argparse import Namespace

from .options import RECIPE_FOLDERS, Parser, Refusal, checked, new_folder


def add_recipes(parser: Parser) -> None:
    text = "The new folder to copy them to."
    parser.add_argument("folder", metavar="FOLDER", type=new_folder, help=text)


def recipes_command(args: Namespace) -> None:
    """Copy the recipes into a folder of your own, to start from.

    finetune, finetune_trainer, retrieval, ask and merge are programs to change, not commands. Nothing is
    overwritten.

    Examples:
      hf-ring-attention recipes my_recipes
      python my_recipes/finetune.py --help
    """
    source = next(place for place in RECIPE_FOLDERS if (place / "finetune.py").is_file())
    if args.folder.exists():
        raise Refusal(f"{args.folder} exists already: name a new folder", "FOLDER")
    checked("FOLDER", shutil.copytree, source, args.folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    print(f"the recipes are in {args.folder}; begin with: python {args.folder / 'finetune.py'} --help")
