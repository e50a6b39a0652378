"""Refuses what the parts of `hf-ring-attention bench` cannot measure here, before anything is measured."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ..options import checked, refuse

#: The measurements that need several ranks.
_OF_SEVERAL_RANKS = {"transport", "ideal", "overlap", "hybrids"}


def check_division(parts: list[str], heads: int, ranks: int, ring_tokens: int, scaling_ranks: list[int]) -> None:
    """Refuses ranks, heads and tokens with which the chosen parts cannot divide their work."""
    if ranks < 2 and _OF_SEVERAL_RANKS & {*parts}:
        raise refuse(
            f"a whole number of at least 2 was expected, got {ranks}: transport, ideal, overlap and hybrids need several ranks",
            "--ranks",
        )
    if "ideal" in parts and heads % ranks:
        raise refuse(
            f"ideal gives each rank its share of the heads, and {heads} heads = {heads // ranks} * {ranks} ranks + "
            f"{heads % ranks}: take a multiple of {ranks}",
            "--heads",
        )
    rings = ([ranks] if {"ideal", "overlap"} & {*parts} else []) + (scaling_ranks if "scaling" in parts else [])
    fitting = ring_tokens + -ring_tokens % math.lcm(*(2 * p for p in rings))
    for p in rings:
        pieces = 2 * p
        if ring_tokens % pieces:
            raise refuse(
                f"zigzag cuts the row into 2 * {p} = {pieces} equal pieces, and {ring_tokens} = {ring_tokens // pieces} * "
                f"{pieces} + {ring_tokens % pieces}: take {fitting}",
                "--ring-tokens",
            )


def check_step(parts: list[str], head_dim: int, ranks: int, step_lengths: list[int]) -> None:
    """Refuses what the training step cannot be built for: heads of odd size, and rows with fewer tokens than ranks."""
    if "step-memory" not in parts:
        return
    if head_dim % 2:
        raise refuse(
            f"step-memory trains a model that turns pairs of numbers by position, and {head_dim} = {head_dim // 2} * 2 + 1: "
            f"take {head_dim + 1}",
            "--head-dim",
        )
    if min(step_lengths) < ranks:
        raise refuse(
            f"each of {ranks} ranks needs one token at least, and a row has {min(step_lengths)}: take {ranks} or more",
            "--step-lengths",
        )


def check_model_folder(model: str) -> None:
    """Refuses a model without a config.json before anything is measured."""
    from ..loading import read_config

    checked("--model", read_config, model)


def make_folder(folder: Path, option: str) -> None:
    """Makes the folder of pictures or tables, and refuses one that cannot be written to before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refuse(f"the folder {str(folder)!r} cannot be made: {error.strerror}", option) from None
    if not os.access(folder, os.W_OK):
        raise refuse(f"the folder {str(folder)!r} cannot be written to", option)


def check_devices(parts: list[str], where: str, ranks: int, memory_ranks: list[int], scaling_ranks: list[int]) -> None:
    """Refuses more ranks than there are GPUs, if those are what ranks run on."""
    if where != "cuda":
        return
    import torch

    count = torch.cuda.device_count()
    needed = [("--ranks", ranks if (_OF_SEVERAL_RANKS | {"step-memory", "peers"}) & {*parts} else 1)]
    needed.append(("--memory-ranks", max(memory_ranks) if "ring-memory" in parts else 1))
    needed.append(("--scaling-ranks", max(scaling_ranks) if "scaling" in parts else 1))
    for option, number in needed:
        if number > count:
            raise refuse(f"{number} ranks need {number} GPUs, there are {count}: take fewer, or --device cpu", option)
