"""Loads what a command names: a device and a ring, a config, a tokenizer, and a checkpoint for "ring_dilated"."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from ..cost.models import attention_of_model, load_config
from ..hf.registration import IMPLEMENTATION
from ..plan.patterns import Pattern
from ..ring.ring import Ring
from .output import spinner


def device_or_best(name: str | None) -> str:
    """Returns the device that was named, or else "cuda" if there is one and "cpu" if not."""
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def read_config(source: str, *, trust: bool = False) -> PretrainedConfig:
    """Returns the config of a folder or hub id, as `load_config` does, which has its errors."""
    with spinner(f"reading the config of {source}"):  # An unreachable hub is asked for half a minute.
        return load_config(source, trust=trust)


def check_positions(config: PretrainedConfig, tokens: int) -> None:
    """Refuses rows of more tokens than a model has positions for.

    Raises:
        ValueError: for such rows.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise ValueError(
            f"the model has positions for {positions} tokens, and rows have {tokens}: ask for {positions} at most, or take a "
            f"checkpoint with more"
        )


def check_kv_heads(config: PretrainedConfig, source: str, pattern: Pattern) -> None:
    """Refuses patterns for other numbers of key/value heads than a model has.

    Raises:
        ValueError: for such a pattern, or a config without the sizes of heads.
    """
    if pattern.kv_heads:
        pattern.check_heads(attention_of_model(config, source).num_kv_heads, source)


def ring_of_processes(device_name: str | None) -> tuple[Ring, torch.device]:
    """Returns the ring of all processes that a launcher started, or of this one alone, and the device of this process.

    Args:
        device_name: "cpu" or "cuda"; None for the latter if there is one.
    """
    device = device_or_best(device_name)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ring.alone(), torch.device(device)
    state = PartialState(cpu=device == "cpu")
    return Ring(), state.device


def load_tokenizer(source: str, *, trust: bool = False) -> Any:
    """Returns the tokenizer of a folder or hub id; `trust` lets the code run that the source brings.

    Raises:
        ValueError: one that cannot be loaded.
    """
    return _loaded(source, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=trust))


def load_model(source: str, dtype: str, device: Any, *, trust: bool = False) -> Any:
    """Returns the causal language model of a folder or hub id on a device, with the attention "ring_dilated".

    Args:
        trust: whether the code runs that the source brings.

    Raises:
        ValueError: one that cannot be loaded, or that ring_dilated does not compute.
    """
    return _loaded(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(
            source, attn_implementation=IMPLEMENTATION, dtype=getattr(torch, dtype), trust_remote_code=trust
        ),
    ).to(device)


def _loaded(source: str, load: Callable[[], Any]) -> Any:
    disable_progress_bar()
    try:
        with spinner("loading the model"):
            return load()
    except (OSError, ValueError, NotImplementedError) as error:
        own_code = "trust_remote_code" in str(error)
        remedy = (
            ". It brings code of its own: read it, and pass --trust-remote-code if you trust it" if own_code else ""
        )
        raise ValueError(f"{source!r} cannot be loaded: {error}{remedy}") from None
