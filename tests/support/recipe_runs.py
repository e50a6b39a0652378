"""Runs of recipes: how they are started, on a tiny model or another, and what two runs are compared by."""

import contextlib
import importlib
import io
import json
import os
import traceback
import warnings
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import save_tiny_checkpoint
from tests.support.programs import Ended, run_program
from tests.support.ranks import TIMEOUT
from tests.support.training import process_environment

RECIPES = Path(__file__).parents[2] / "recipes"
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
STEPS = 6


def save_inputs(folder, width=32, times=100):
    """Saves a tiny model with a byte-level tokenizer, and a text."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 4096}
    save_tiny_checkpoint(folder / "model", **sizes)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again. " * times)
    return folder


def words(folder, output, *more):
    """The arguments of a run."""
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--pattern", "window:32+2", "--tokens", 128]
    options += ["--steps", STEPS, "--lr", "1e-2", "--schedule", "constant", "--output", output]
    return [str(word) for word in (*options, "--json", output / "figures.json", *more)]


def losses_of(output):
    return [step["loss"] for step in json.loads((output / "figures.json").read_text())["steps"]]


def at_step(monkeypatch, module, number, act):
    """Has a recipe `act` in the step of this number, from 1, before its loss."""
    calls = iter(range(1, 100))
    loss = module.batch_loss

    def counted(*args, **options):
        if next(calls) == number:
            act()
        return loss(*args, **options)

    monkeypatch.setattr(module, "batch_loss", counted)


def finetuned(output):
    """What two runs are compared by."""
    figures = json.loads((output / "figures.json").read_text())
    return {
        "losses": [step["loss"] for step in figures["steps"]],
        "norms": [step["grad_norm"] for step in figures["steps"]],
        **({"perplexity": [figures["perplexity_after"]]} if "perplexity_after" in figures else {}),
        "parameters": AutoModelForCausalLM.from_pretrained(output).state_dict(),
    }


# ---- how recipes are started

AS_GPUS = Path(__file__).parent / "as_gpus.py"


def environment_of(plugin):
    """The variables that Accelerate's launcher sets for the processes of a file of recipes/accelerate."""
    command = ["--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no"]
    command += ["--config_file", str(RECIPES / "accelerate" / f"{plugin}.yaml"), "script.py"]
    args = _validate_launch_command(launch_command_parser().parse_args(command))[0]
    if plugin == "fsdp2":
        return prepare_multi_gpu_env(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(load_config_from_file(args.config_file).deepspeed_config)
    return prepare_deepspeed_cmd_env(args)[1]


def launch(recipe, *arguments, processes=1, fork=False, plugin=None):
    """What became of a recipe.

    One process is this one, unless it is to be forked as several are. With a `plugin`, two processes are forked that find what
    the launcher would set for them.
    """
    environment = {**os.environ, **ENVIRONMENT}
    if plugin is not None:
        options = {"processes": 2, "environment": environment | environment_of(plugin), "timeout": TIMEOUT}
        return run_program(AS_GPUS, RECIPES / recipe, *arguments, **options)
    if processes == 1 and not fork:
        return _run_here(recipe, arguments)
    options = {"processes": processes, "environment": environment, "timeout": TIMEOUT}
    return run_program(RECIPES / recipe, *arguments, **options)


def _run_here(recipe, arguments):
    """Runs a recipe in this process; returns its status and output, as a separate process would."""
    module, status, out, err = importlib.import_module(Path(recipe).stem), 0, io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("ignore")
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr("sys.argv", [recipe, *map(str, arguments)])
        process_environment(0, 1)
        try:
            module.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
            print(end.code, file=err)
        except Exception:
            status = 1
            traceback.print_exc(file=err)
    return Ended(status, out.getvalue(), err.getvalue())


def run(recipe, *arguments, **options):
    """The output of a recipe."""
    done = launch(recipe, *arguments, **options)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def refused(recipe, *arguments, **options):
    """The error of a recipe that must fail."""
    done = launch(recipe, *arguments, **options)
    assert done.returncode != 0
    return done.stderr
