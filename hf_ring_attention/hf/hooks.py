"""The hooks around the calls of a patched model and its decoder: rows are cut before the decoder, and joined behind it.

Further hooks correct the few modules that would take a rank's part for a row.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..compute.private import remove_hooks
from ..ring.attention import UNTRACEABLE, check_not_traced
from ..ring.ring import Ring
from .cache import ShardedCache, cache_in
from .cut import by_name, cut, tokens_in, whole_positions
from .forward_pass import ForwardPass, WholeRows, drop_broken_passes, forward_pass_of, running
from .join import joined_output, kept
from .model_call import begin_call, end_call
from .positions import check_places
from .rings import remember_patched, set_ring
from .wrappers import decoder_of, runner_of

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def attach_ring(model: PreTrainedModel, ring: Ring | None) -> None:
    """Makes this the ring of the model's attention layers; None makes its rows whole ones again."""
    remember_patched(model)
    of_ring = {model, *decoder_of(model).modules()}
    for module in model.modules():
        remove_hooks(module, _is_own)
        set_ring(module, ring if module in of_ring else None)
    # Any of these may be the one that is called: a model with its head, its base model, and the decoder of this.
    for called in dict.fromkeys((model, model.base_model, runner_of(model))):
        called.register_forward_pre_hook(before_model, with_kwargs=True)
        called.register_forward_hook(_after_model, with_kwargs=True, always_call=True)
    if ring is None or ring.world_size == 1:
        return
    for name, module in model.base_model.named_modules():
        if _depends_on_length(module):
            module.register_forward_pre_hook(_with_last_position, with_kwargs=True)
            module.register_forward_hook(_without_last_position)
        if name == "pooler":
            module.register_forward_pre_hook(_with_first_token)


def _is_own(hook: Any) -> bool:
    return getattr(hook, "__module__", None) in (__name__, f"{__package__}.patch")


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(kind in _LENGTH_DEPENDENT_ROPE for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


# ---- the model and its decoder


@torch.compiler.disable(reason=UNTRACEABLE)
def before_model(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begins the call of a model, and gives its decoder this rank's part of the rows."""
    check_not_traced()
    drop_broken_passes()
    runner = runner_of(module)
    now = forward_pass_of(runner.config)
    # TRL puts a function of the model in place of its forward, which calls the model with tokens.
    if (now is not None and module is not runner) or any(isinstance(x, nn.Module) for x in args):
        return None
    kwargs = by_name(module, args, kwargs)
    now = now or begin_call(module, runner, kwargs)
    return (), kwargs if module is not runner or now.rows is None else _of_decoder(now, now.rows, kwargs)


def _of_decoder(now: ForwardPass, rows: WholeRows, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the decoder: this rank's part of the rows, and positions that count each packed document."""
    runner, tokens = now.runner, tokens_in(kwargs)
    if rows.layout is None:
        if not (rows.from_collator and rows.packed and kwargs.get("position_ids") is None):
            return kwargs
        return {**kwargs, "position_ids": whole_positions(runner, rows, kwargs)}
    assert now.ring is not None and tokens is not None
    if now.call.rows is not None:  # A loader has cut them.
        parts, now.last_position = dict(kwargs), rows.last_position
    else:
        if tuple(tokens.shape[:2]) != (rows.batch, rows.length):
            raise NotImplementedError(
                f"{type(runner).__name__} got {list(tokens.shape[:2])} tokens, and its model {[rows.batch, rows.length]}: rows "
                f"that change before the decoder cannot be cut: use one process (ring=None)"
            )
        positions = whole_positions(runner, rows, kwargs)
        now.last_position = int(positions.max())
        parts = cut({**kwargs, "position_ids": positions}, rows, now.ring)
    check_places(runner, now.last_position)
    if not isinstance(cache_in(kwargs), ShardedCache) and "use_cache" in inspect.signature(runner.forward).parameters:
        parts["use_cache"] = False
    return parts


@torch.compiler.disable(reason="it belongs to before_model")
def _after_model(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Joins the results of the decoder, and ends the call of a model."""
    runner = runner_of(module)
    now = forward_pass_of(runner.config)
    if now is None:
        return None
    if module is runner and now.layout is not None and output is not None:
        output = joined_output(now, output)
    return end_call(now, kwargs, output) if now.module is module else output


# ---- modules that take a part for a row


@torch.compiler.disable(reason="it reads what before_model found")
def _with_last_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives RoPE that depends on the row's length one more column, with the row's last position."""
    now = running().forward_pass
    if now is None or now.last_position is None:
        return None  # Whole rows, or a step after a prefill, in which all ranks have all positions.
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    column = torch.full_like(positions[..., :1], now.last_position)
    positions = torch.cat([positions, column], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


@torch.compiler.disable(reason="it belongs to _with_last_position")
def _without_last_position(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    now = running().forward_pass
    if now is None or now.last_position is None:
        return output
    return tuple(x[:, :-1] for x in output) if isinstance(output, tuple) else output[:, :-1]


@torch.compiler.disable(reason="it asks another rank")
def _with_first_token(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Gives a pooler the first token of the whole sequence; it reads the first token [B, D] of [B, n, D]."""
    now = running().forward_pass
    if now is None or now.layout is None:
        return None
    assert now.rows is not None and now.ring is not None
    one_token = args[0].dim() == 2
    states: Tensor = args[0].unsqueeze(1) if one_token else args[0]
    first = kept(states, now.rows, now.ring, torch.tensor([0]))
    return (first.squeeze(1) if one_token else first, *args[1:])
