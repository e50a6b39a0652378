"""Follows a page in a folder as its reader does: runs its commands, with tiny models and small numbers where a test asks."""

import glob
import itertools
import os
import re
import shlex

from tests.support.programs import run_program
from tests.support.recipe_runs import AS_GPUS, ENVIRONMENT, RECIPES, environment_of

#: Seconds for one command, which takes some seconds.
TIMEOUT = 120
COMMAND_LINE = "from hf_ring_attention.cli.main import main\nmain()\n"


class Reader:
    """Runs commands in a folder that has the recipes."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "recipes").symlink_to(RECIPES)
        (folder / "command_line.py").write_text(COMMAND_LINE)
        path = os.pathsep.join(map(str, (RECIPES, RECIPES.parent)))
        self.environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "HF_DATASETS_CACHE": str(folder / "cache")}

    def run(self, command, status=0, instead=None):
        """What a command prints. A launcher's processes are forked, two of them; pip has nothing to install.

        Args:
            instead: a program that runs in place of the command's.
        """
        words = list(itertools.dropwhile(re.compile("[A-Z_]+=").match, shlex.split(command, comments=True)))
        processes, environment = 1, self.environment
        if words[0] in ("export", "pip"):
            return ""
        if words[0] in ("torchrun", "accelerate"):
            processes = 2
            start = next(number for number, word in enumerate(words) if word == "-m" or word.endswith(".py"))
            launcher, words = words[:start], ["python", *words[start:]]
            if any("fsdp2" in word for word in launcher):
                environment, words = environment | environment_of("fsdp2"), ["python", str(AS_GPUS), *words[1:]]
        if words[:3] == ["python", "-m", "hf_ring_attention"]:
            words = ["python", "command_line.py", *words[3:]]
        elif words[0] == "hf-ring-attention":
            words = ["python", "command_line.py", *words[1:]]
        script, *words = words[1:]
        words = [name for word in words for name in (sorted(glob.glob(word, root_dir=self.folder)) or [word])]
        options = {"processes": processes, "environment": environment, "timeout": TIMEOUT, "folder": self.folder}
        done = run_program(self.folder / (instead or script), *words, **options)
        printed = done.stdout + done.stderr
        assert done.returncode == status, f"{command}\n{printed[-4000:]}"
        return printed
