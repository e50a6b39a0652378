"""What a layer's attention refuses: arguments that change scores or keys, and rows that its pattern cannot be computed for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...compute.foreign_code import strings_in
from ...compute.private import attentions_are_collected
from ...plan.branches import Branch, Segment, Window
from ...plan.patterns import Pattern
from ..forward_pass import ForwardPass
from ..model.types import MIXERS
from .masks import Tokens

#: Arguments that change the scores or the keys, whoever passes them.
_REFUSED = ("position_bias", "head_mask", "block_table", "read_index", "write_index")

#: Arguments of layers that the mask replaces, or that are read by their names.
_KNOWN = (
    "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "is_causal", "max_length_k", "max_length_q", "output_attentions",
    "position_ids", "seq_idx",
)  # fmt: skip

#: The other arguments of a layer: dropout, scaling, sliding_window and softcap, and those beside them by their names.
LayerSettings = tuple[float, float | None, int | None, float | None, Mapping[str, Any]]


def name_of(module: nn.Module) -> str:
    return f"{type(module).__name__}: layer {getattr(module, 'layer_idx', None)}"


def check_dropped_keys(module: nn.Module, dropped: bool, of_model: Branch | None, pattern: Pattern) -> None:
    """Refuses a pattern that shows keys which a cache has dropped: it keeps as many as the layer's own branch shows.

    Branches other than windows depend on the positions of keys, which are known only in layers with chunks.
    """
    kept, chunks = getattr(of_model, "length", None) or 0, isinstance(of_model, Segment)
    for branch in (branch for one in pattern.kv_heads or (pattern,) for branch in one.branches):
        known = isinstance(branch, (Segment, Window)) and branch.length is not None and branch.length <= kept
        if dropped and not (known and (chunks or (isinstance(branch, Window) and branch.dilation == 1))):
            raise ValueError(
                f"{name_of(module)} has the pattern {pattern}, and its cache keeps only the model's window or chunk of {kept} "
                f"tokens: pass cache=DynamicCache()"
            )


def check_padding(module: nn.Module, tokens: Tokens, of_model: Branch | None) -> None:
    """Refuses padding inside a document that a layer's own window or chunks would count."""
    length = getattr(of_model, "length", None)
    if tokens.valid is not None and (tokens.before or (length is not None and length < tokens.valid.shape[1])):
        raise NotImplementedError(
            f"{name_of(module)} has a window or chunks of {length} tokens, "
            f"and its row has padding inside a document: take rows of one length, or use 'sdpa'"
        )


def check_call(module: nn.Module, settings: LayerSettings, now: ForwardPass) -> None:
    """Refuses dropout, a request for attention weights, and inputs that would change the scores, the keys or documents."""
    name, (dropout, *_, given) = type(module).__name__, settings
    if dropout:
        raise ValueError(
            f"{name}: attention dropout {dropout} was asked for, and ring_dilated has none: set the config's attention "
            f"dropout to 0 (attention_dropout, attn_pdrop) or call model.eval()"
        )
    if given.get("output_attentions") or attentions_are_collected():
        raise ValueError(
            f"{name}: output_attentions=True was asked for, but ring_dilated never forms the attention weights: use 'eager'"
        )
    forwards = [vars(base)["forward"] for base in type(module).__mro__ if "forward" in vars(base)]
    passed = frozenset().union(*map(strings_in, forwards))
    for argument, present in given.items():
        # Transformers passes every entry of a batch on to here. Only those that the layer's own code names have a meaning.
        if present is not None and argument not in _KNOWN and (argument in passed or argument in _REFUSED):
            raise NotImplementedError(
                f"{name_of(module)} came with {argument}, which would change the scores or the keys: use 'eager' or 'sdpa'"
            )
    described = given.get("cu_seq_lens_q") is not None or given.get("seq_idx") is not None
    if now.runner is module and (described or getattr(getattr(module, "config", None), "model_type", None) in MIXERS):
        raise ValueError(
            f"{name} attends beside recurrent layers, or got cu_seq_lens or seq_idx, which needs a call of a patched model: "
            f"call ra.patch_model(model) after set_attn_implementation, and the model rather than its layers"
        )
