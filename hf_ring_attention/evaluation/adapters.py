"""Loads the weights of adapters that Transformers leaves out."""

from __future__ import annotations

from typing import Any


def complete_adapters(model: Any, source: str) -> None:
    """Loads the adapters of a folder or hub id again into a model that `from_pretrained(source)` made, if it has any.

    Transformers 5.24 looks for the magnitudes of DoRA under another name, and goes on with those of the base weights.

    Raises:
        ValueError: the file of the adapters lacks some of their weights.
    """
    if not getattr(model, "peft_config", None):
        return
    from peft import load_peft_weights, set_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    weights = load_peft_weights(source, device="cpu")
    whole = {name.removeprefix("base_model.model."): x for name, x in weights.items()}
    prefixes = {PEFT_TYPE_TO_PREFIX_MAPPING[adapter.peft_type] for adapter in model.peft_config.values()}
    loaded: Any = set_peft_model_state_dict(model, whole)
    missing = [x for x in loaded.missing_keys if any(prefix in x for prefix in prefixes)]
    if missing:
        raise ValueError(
            f"{source} lacks {len(missing)} weights of its adapters, such as {missing[0]}: save the adapters again"
        )
