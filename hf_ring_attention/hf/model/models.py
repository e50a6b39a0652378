"""The table of the causal language models of Transformers, made by running a tiny model of each type."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

_TABLE: dict[str, Any] = json.loads(resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ModelSupport:
    """The support of "ring_dilated" for a model type.

    Attributes:
        model_type: the type, as config.json names it.
        model_class: the name of its class for causal language modelling.
        status: "supported": outputs and gradients were equal to eager attention's; "refused": with an error, before
            anything is computed; "untested": no tiny model of it could be made.
        ring: whether its rows can be sharded over a ring, with the results of one device.
        packed: whether rows may hold several documents, described by position_ids.
        reason: why it is refused or untested, or why a supported type cannot be sharded; else "".

    Example:
        >>> mamba = next(model for model in ra.supported_models() if model.model_type == "mamba")
        >>> print(mamba.status, mamba.reason)
        refused MambaForCausalLM: all its layers are recurrent: it has no attention to shard: leave this package out
    """

    model_type: str
    model_class: str
    status: Literal["supported", "refused", "untested"]
    ring: bool
    packed: bool
    reason: str


def supported_models() -> tuple[ModelSupport, ...]:
    """Returns every causal model type of the Transformers release that this package was tested with, by its name.

    `make models` generates the table, and the tests run every line of it again. `patch_model` may accept other types too: it
    decides by the model itself. `hf-ring-attention models` warns if another release of Transformers is installed.

    Example:
        >>> support = {model.model_type: model for model in ra.supported_models()}
        >>> support["qwen3"].status, support["qwen3"].ring, support["qwen3"].packed
        ('supported', True, True)
    """
    return tuple(ModelSupport(**entry) for entry in _TABLE["models"])


def why_not(model_type: str, ranks: int = 1) -> str | None:
    """Returns why a model type is not computed on this number of ranks; None if the table does not refuse it."""
    support = next((model for model in supported_models() if model.model_type == model_type), None)
    accepted = {"supported": ranks == 1, "untested": True, "refused": False}
    if support is None or support.ring or accepted[support.status]:
        return None
    where = " over a ring" if support.status == "supported" else ""
    return f"models of type {model_type!r} are not computed{where}: {support.reason}"


def release_of_table() -> str:
    """Returns the release of Transformers whose models `supported_models` lists, such as "5.23.0"."""
    return str(_TABLE["transformers"])
