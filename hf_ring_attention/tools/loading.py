"""Loads what a command names: the device to compute on, a tokenizer, and a checkpoint that computes "ring_dilated"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ..hf.registration import IMPLEMENTATION
from .output import spinner


def device_or_best(name: str | None) -> str:
    """Returns the device that was named, or else "cuda" if there is one and "cpu" if not."""
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(source: str) -> Any:
    """Returns the tokenizer of a folder or hub id.

    Raises:
        ValueError: one that cannot be loaded.
    """
    return _loaded(source, lambda: AutoTokenizer.from_pretrained(source))


def load_model(source: str, dtype: str, device: Any) -> Any:
    """Returns the causal language model of a folder or hub id on a device, with the attention "ring_dilated".

    Raises:
        ValueError: one that cannot be loaded, or that ring_dilated does not compute.
    """
    return _loaded(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(
            source, attn_implementation=IMPLEMENTATION, dtype=getattr(torch, dtype)
        ),
    ).to(device)


def _loaded(source: str, load: Callable[[], Any]) -> Any:
    disable_progress_bar()
    try:
        with spinner("loading the model"):
            return load()
    except (OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{source!r} cannot be loaded: {error}") from None
