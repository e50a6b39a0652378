"""Launches of recipes: what becomes of them, what they print, and what they say when they refuse something."""

import os
import subprocess
import sys
from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from tests.support.programs import run_program
from tests.support.recipe_runs import ENVIRONMENT, RECIPES

AS_GPUS = Path(__file__).parent / "as_gpus.py"

#: What starts a recipe anew: Python; or two processes by torch's launcher, and by Accelerate's with the files of
#: recipes/accelerate, whose plugins act where Accelerate takes the processes for GPUs.
ACCELERATE = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
LAUNCHERS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}
for plugin in ("fsdp2", "zero3"):
    file = RECIPES / "accelerate" / f"{plugin}.yaml"
    LAUNCHERS[plugin] = [*ACCELERATE, "--config_file", str(file), "--mixed_precision", "no", str(AS_GPUS)]


def environment_of(plugin):
    """The variables that Accelerate's launcher sets for the processes of a file of recipes/accelerate."""
    command = [*LAUNCHERS[plugin][2:], "script.py"]
    args = _validate_launch_command(launch_command_parser().parse_args(command))[0]
    if plugin == "fsdp2":
        return prepare_multi_gpu_env(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(load_config_from_file(args.config_file).deepspeed_config)
    return prepare_deepspeed_cmd_env(args)[1]


def launch(recipe, *arguments, launcher=None, processes=1, timeout=1200, path=None, plugin=None):
    """What became of a recipe, from a launcher or from none; a folder of modules for it comes before others.

    With a `plugin` and no launcher, two processes are forked that find what the launcher would set for them.
    """
    environment = {**os.environ, **ENVIRONMENT}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    if plugin is not None:
        options = {"processes": 2, "environment": environment | environment_of(plugin), "timeout": timeout}
        return run_program(AS_GPUS, RECIPES / recipe, *arguments, **options)
    if launcher is None:
        options = {"processes": processes, "environment": environment, "timeout": timeout}
        return run_program(RECIPES / recipe, *arguments, **options)
    command = [sys.executable, *LAUNCHERS[launcher], str(RECIPES / recipe), *map(str, arguments)]
    return subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)


def run(recipe, *arguments, **options):
    """What a recipe prints."""
    done = launch(recipe, *arguments, **options)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def refused(recipe, *arguments, **options):
    """What a recipe says that ends with an error."""
    done = launch(recipe, *arguments, **options)
    assert done.returncode != 0
    return done.stderr
