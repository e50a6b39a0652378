"""Loads a tokenizer and a checkpoint for "ring_dilated", on the ring of all processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from ..evaluation.adapters import complete_adapters
from ..hf.names import IMPLEMENTATION
from ..hf.patch import take_pattern_of_adapters
from ..ring.ring import Ring


def check_positions(config: PretrainedConfig, tokens: int) -> None:
    """Raises a ValueError for rows of more tokens than a model has positions for."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        remedy = f"take {positions} tokens at most, or another checkpoint"
        raise ValueError(f"the model has positions for {positions} tokens, and rows have {tokens}: {remedy}")


def ring_of_processes() -> tuple[Ring, torch.device]:
    """Returns the ring of all processes that a launcher started, or of this one alone, and the device of this process."""
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available())
    return Ring() if state.num_processes > 1 else Ring.alone(), state.device


def load_tokenizer(source: str, trust: bool) -> Any:
    """Returns the tokenizer of a folder or hub id; a folder of adapters may leave it to their model."""
    if Path(source, "calibration.json").is_file():
        raise ValueError(f"{source} has no weights: --model MODEL --pattern {source}/calibration.json")
    adapters = Path(source, "adapter_config.json")
    if adapters.is_file() and not Path(source, "tokenizer_config.json").is_file():
        source = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return _loaded(AutoTokenizer, source, trust_remote_code=trust)


def load_model(source: str, dtype: str, device: Any, trust: bool) -> Any:
    """Returns the causal language model of a folder or hub id on a device, with the attention "ring_dilated".

    Transformers loads a folder of adapters with their model, which then gets the pattern of the adapters.
    """
    settings = {"attn_implementation": IMPLEMENTATION, "dtype": getattr(torch, dtype), "trust_remote_code": trust}
    try:
        model = _loaded(AutoModelForCausalLM, source, **settings).to(device)
    except KeyError:  # Falcon and GPT-Neo look it up in tables of their own, and keep their attention.
        model = _loaded(AutoModelForCausalLM, source, **{**settings, "attn_implementation": None}).to(device)
    complete_adapters(model, source)
    take_pattern_of_adapters(getattr(model, "peft_config", {}), model.config)
    return model


def _loaded(kind: Any, source: str, **settings: Any) -> Any:
    """Returns what a class of Transformers loads from a folder or hub id; raises a ValueError if it cannot."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        return kind.from_pretrained(source, **settings)
    except (OSError, ValueError, NotImplementedError) as error:
        own_code = "trust_remote_code" in str(error)
        remedy = ". It brings its own code: read it, and pass --trust-remote-code if you trust it" if own_code else ""
        reason = "it has no tokenizer: save its tokenizer there too" if "backend tokenizer" in str(error) else error
        raise ValueError(f"{source!r} cannot be loaded: {reason}{remedy}") from None
