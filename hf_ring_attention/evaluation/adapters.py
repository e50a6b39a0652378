"""Loads the weights of adapters that Transformers leaves out."""

from __future__ import annotations

from typing import Any


def complete_adapters(model: Any, source: str) -> None:
    """Loads the adapters of a folder or hub id again into a model that `from_pretrained(source)` made, if it has any.

    Transformers 5.24 looks for the magnitudes of DoRA under another name, and goes on with those of the base weights.
    """
    if not getattr(model, "peft_config", None):
        return
    from peft import load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(source, device="cpu")
    set_peft_model_state_dict(model, {name.removeprefix("base_model.model."): x for name, x in weights.items()})
