"""`mtp_loss`: layers of multi-token prediction train with their model, over a ring too, and are saved with it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compute.private import (
    checkpointing_of,
    draft_layers,
    has_unexpected_name,
    implementation_of,
    set_checkpointing,
    set_implementation,
)
from ..hf.forward_pass import CALL, pass_of_decoder, running_with
from ..hf.loss.lm_loss import IGNORED, next_labels
from ..hf.loss.on_use import OnUse
from ..hf.loss.output_layer import wrap_head
from ..hf.loss.values import Origin
from ..hf.model.config import patterns_of, settings_of, warn_once
from ..hf.model.wrappers import attachment_of, by_name, inner_model, modules_with_choices, runner_of
from ..hf.names import IMPLEMENTATION
from ..hf.patch import Model
from ..hf.rows.cut import whole_positions
from ..hf.rows.documents import rows_of_call
from ..hybrids.models import mixers_of
from ..plan.branches import check_count


def mtp_loss(model: Model, weight: float = 0.1, depths: int | None = None) -> Model:
    """Gives a model layers of multi-token prediction, as `model.mtp`, and adds their loss to its own in training mode.

    The layer of depth k, from 0, gets the last hidden state of token t, or that of the layer before, beside the embedding of
    token t + k + 1, and predicts token t + k + 2 of the same document by the model's head (DeepSeek-V3, arXiv 2412.19437).
    Transformers drafts with these layers (`generate(use_mtp=True)`), but neither trains nor saves them. They attend as they do
    there: by a pattern of all layers, and exactly if patterns differ by layer. Their logits are the head's alone, without a
    scale or a cap that the model applies behind it. `ra.estimate` does not count them.

    Args:
        model: a patched causal model of Transformers, or a wrapper of one, before its optimizer is made.
        weight: how much the mean of the losses of all depths counts; `outputs.mtp_losses` [depths] has them, each divided by
            `num_items_in_batch` as the model's own. With 0 the layers are frozen, and saved.
        depths: the number of new layers, with random weights; None loads the layers of the model's checkpoint.

    Returns:
        The model. `save_pretrained` and Trainer save the layers behind the decoder's, as `model.layers.61` of a
        DeepSeek-V3, or as `mtp`. Transformers finds those that the model's class names, and this function all.

    Raises:
        ValueError: no causal model, one that is not patched, has such layers, or has adapters of PEFT, which would not save
            them: call it before PEFT, with `modules_to_save=["mtp"]`; or in a call, no `input_ids`.
        NotImplementedError: layers that choose keys or pass states; a model that keeps its own attention, or for which
            Transformers makes no such layers; or in a call, images, rows that a loader has cut, or a loss that others compute.

    Example:
        >>> model, ids = ra.mtp_loss(ra.patch_model(tiny_llama()), depths=2), torch.arange(1, 33)[None]
        >>> outputs = model.train()(ids, labels=ids)
        >>> torch.allclose(outputs.loss, model.eval()(ids, labels=ids).loss + 0.1 * outputs.mtp_losses.mean())
        True
    """
    inner: Any = inner_model(model, "mtp_loss")
    name, config, runner = type(inner).__name__, inner.config.get_text_config(), runner_of(inner)
    if inner.get_output_embeddings() is None or not attachment_of(inner).number or hasattr(inner, "mtp"):
        raise ValueError(f"mtp_loss takes a causal model once, after ra.patch_model(model), got {name}")
    if getattr(model, "peft_config", None):
        raise ValueError(
            "mtp_loss: PEFT saves no layers that it does not know: call it first, with modules_to_save=['mtp']"
        )
    if not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
        raise ValueError(f"mtp_loss: weight must be a number of at least 0, got {weight!r}")
    mtp = _layers_for(inner, config, depths)
    last, first = inner.get_decoder().layers[-1], next(iter(_names(inner)[0].values()))
    if not has_unexpected_name(inner, f"{first}{'layers.0.' * ('layers' not in first)}enorm.weight"):
        warn_once(
            f"Transformers' own generate(use_mtp=True) does not find the layers of {name}: ra.mtp_loss(model) does"
        )
    others = mixers_of(mtp.layers, mtp.config) or modules_with_choices(mtp)
    if others or attachment_of(runner).own_attention or hasattr(inner.get_input_embeddings(), "embed_norm"):
        raise NotImplementedError(
            f"mtp_loss: {name} has layers that choose keys, pass states or keep their own attention, or a norm of embeddings: "
            f"set mtp_layer_types in its config to 'full_attention'"
        )
    for layer in mtp.layers:
        layer.mtp_block.gradient_checkpointing = getattr(last, "gradient_checkpointing", False)
        set_checkpointing(layer.mtp_block, checkpointing_of(last))
        for path, x in layer.named_parameters():  # Some models keep routers in float32.
            like = dict(last.named_parameters()).get(path.removeprefix("mtp_block."))
            x.data = x.data.to(next(last.parameters()).device, inner.dtype if like is None else like.dtype)
    inner.mtp = _Heads(mtp, weight).to(next(last.parameters()).device).train(inner.training)
    inner.mtp.requires_grad_(weight != 0)
    inner.save_pretrained = partial(_save_with_heads, inner)
    inner.register_load_state_dict_pre_hook(_to_own_names)
    inner.register_forward_pre_hook(_keep_batch, prepend=True, with_kwargs=True)
    inner.register_forward_hook(_add_losses, with_kwargs=True, always_call=True)
    runner.register_forward_hook(partial(_predict, inner), prepend=True, with_kwargs=True)
    return model


def _layers_for(inner: Any, config: Any, depths: int | None) -> Any:
    """Returns `depths` new layers, or those of the checkpoint."""
    name, before = type(inner).__name__, dict(vars(config))
    try:
        if depths is not None:
            check_count("mtp_loss", "depths", depths)
            config.num_mtp_layers = depths
            for kind in ("layer_types", "mlp_layer_types"):
                if types := getattr(config, kind, None):
                    given = [*(getattr(config, f"mtp_{kind}", None) or ())]
                    setattr(config, f"mtp_{kind}", (given + (given or types)[-1:] * depths)[:depths])
        numbers = re.findall(r"layers\.(\d+)\.enorm", " ".join(_names(inner)[1]))
        places = [rf"(^|\.)layers\.{number}\." for number in numbers] or [
            re.escape(place) for place in _names(inner)[1]
        ]
        return draft_layers(inner, depths, places)
    except (AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        vars(config).clear()
        vars(config).update(before)
        if depths is None:
            raise ValueError(
                f"mtp_loss: no layers are loaded for {name} ({error}): pass depths=1 for new ones"
            ) from error
        if isinstance(error, ValueError):
            raise
        raise NotImplementedError(f"mtp_loss: Transformers makes no such layers for {name} ({error})") from error


class _Heads(nn.Module):
    """The layers of multi-token prediction, as a part of their model, which owns the embedding and the head."""

    def __init__(self, mtp: Any, weight: float) -> None:
        super().__init__()
        self.layers = mtp.layers
        if mtp.use_shared_post_norm:
            self.shared_post_norm = mtp.shared_post_norm
        vars(self).update(mtp=mtp, weight=weight, batch=None, losses=None)  # and not as a module of this one


def _keep_batch(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keeps the whole rows of a call that trains."""
    batch, learns = by_name(model, args, kwargs), bool(model.training and model.mtp.weight)
    trains = learns and batch.get("labels") is not None
    if trains and batch.get("input_ids") is None:
        raise ValueError("mtp_loss embeds later tokens, and got no input_ids: pass them, and no inputs_embeds")
    if trains and (batch.get("fused_lm_head") or getattr(batch.get(CALL), "of_slice", None) is not None):
        raise NotImplementedError(
            "TRL and distillation compute a loss of their own, and would leave mtp_loss out: use Transformers' Trainer, or "
            "weight=0"
        )
    if trains and any(
        x is not None and re.match("pixel|image|video|audio|input_feat", key) for key, x in batch.items()
    ):
        raise NotImplementedError("mtp_loss takes rows of text, and got images or sound")
    frozen = not any(x.requires_grad for x in model.mtp.parameters())
    if learns and torch.is_grad_enabled() and (frozen or not trains):
        why = (
            "it was called without labels"
            if trains < learns
            else "they are frozen (with PEFT: modules_to_save=['mtp'])"
        )
        warn_once(f"the layers that mtp_loss gave {type(model).__name__} learn nothing: {why}")
    vars(model.mtp).update(batch=batch if trains else None, losses=None)


def _predict(model: Any, runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Computes the losses of all depths from the last hidden states of this rank's tokens."""
    heads, now = model.mtp, pass_of_decoder(runner)
    mtp, batch, ring = heads.mtp, heads.batch, attachment_of(runner).ring
    if batch is None:
        return
    if now is None or now.rows is None or now.call.rows is not None:
        raise NotImplementedError("mtp_loss takes no graphs, caches or rows that a loader has cut: leave them out")
    if implementation_of(runner.config) != IMPLEMENTATION:
        raise NotImplementedError(
            f"mtp_loss needs ring_dilated, got {implementation_of(runner.config)!r}: ra.patch_model(model)"
        )
    rows = replace(rows_of_call(runner, batch["input_ids"], batch, divided=True), layout=now.layout)
    whole = whole_positions(runner, rows, batch)
    positions = whole if kwargs.get("position_ids") is None else kwargs["position_ids"]
    if positions.dim() != 2:
        raise NotImplementedError("mtp_loss takes rows of text, and got positions of images")
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    mtp.rotary_emb = getattr(model.get_decoder(), "rotary_emb", None)
    set_implementation(mtp.config, IMPLEMENTATION)
    setattr(mtp.config, IMPLEMENTATION, settings_of(runner.config))
    wrap_head(head)
    # Their numbers begin at 0 too, but patterns by number belong to the model's layers.
    skipped = tuple(range(1, len(heads.layers) + 1))
    inside = replace(now, runner=mtp, patterns=patterns_of(mtp.config), rows=rows, skipped=skipped, tokens=[])
    losses = []
    ids, documents, labels = batch["input_ids"], rows.numbers.to(output[0].device), next_labels(batch)
    counted = {name: batch[name] for name in ("num_items_in_batch", "ignore_index") if batch.get(name) is not None}
    counted["vocab_size"], ignored = model.config.get_text_config().vocab_size, counted.get("ignore_index", IGNORED)
    hidden, origin = output[0], Origin(type(model).__name__, rows, now.ring)
    for depth in range(len(heads.layers)):
        later = _later(ids, depth + 1, 0)
        embedded = embed(later if rows.layout is None else now.ring.shard(later, rows.layout))
        # RoPE that depends on the length of a document asks for positions.
        with running_with(forward_pass=replace(inside, rows=replace(rows, positions=whole + depth + 1))):
            hidden = mtp.forward_layer(depth, hidden, positions + depth + 1, None, inputs_embeds=embedded)
        logits = head(hidden if ring is None else OnUse.of_hidden(hidden, origin))
        beyond = (documents == 0) | (documents != _later(documents, depth + 2, 0))
        following = _later(labels.to(beyond.device), depth + 1, ignored).masked_fill(beyond, ignored)
        if bool((following == ignored).all()):  # A mean of none would be NaN.
            losses.append(hidden.sum().float() * 0)
        else:
            losses.append(model.loss_function(logits, None, shift_labels=following, **counted))
    heads.losses = torch.stack(losses)
    now.tokens += inside.tokens  # Backward may recompute the layers.


def _later(x: Tensor, count: int, fill: int) -> Tensor:
    """Returns for each token [B, n] the number of the token that comes `count` later; `fill` beyond the end of the row."""
    return F.pad(x, (0, count), value=fill)[:, count:]


def _add_losses(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Adds the losses of the layers to the model's."""
    heads = model.mtp
    losses, heads.batch, heads.losses = heads.losses, None, None
    if losses is None or output is None:
        return output
    loss = output[0] + heads.weight * losses.mean().to(output[0].dtype)
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output.loss, output.mtp_losses = loss, losses.detach()
    return output


# ---- names in checkpoints


def _names(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the beginnings of the layers' names in a checkpoint by those in the model, the longest first, and the reverse."""
    for place in ("mtp.", "model.mtp."):
        if has_unexpected_name(model, f"{place}layers.0.enorm.weight"):
            return {"mtp.": place}, {place: "mtp."}
    decoder, depths = model.get_decoder(), getattr(model.config.get_text_config(), "num_mtp_layers", None) or 0
    path = next(path for path, module in model.named_modules() if module is decoder)
    saved: dict[str, str] = {}
    loaded: dict[str, str] = {}
    for depth in range(depths):  # behind the decoder's layers, as in checkpoints of DeepSeek
        own, other = f"mtp.layers.{depth}.", f"{path}.layers.{len(decoder.layers) + depth}."
        saved |= {f"{own}mtp_block.": other, f"{own}post_norm.": f"{other}shared_head.norm.", own: other}
        loaded |= {f"{other}{name}.": f"{own}{name}." for name in ("enorm", "hnorm", "eh_proj")}
        loaded |= {f"{other}shared_head.norm.": f"{own}post_norm.", other: f"{own}mtp_block."}
    return saved, loaded


def _rename(state: dict[str, Any], names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Gives weights other beginnings of their names."""
    for name in [*state]:
        if old := next((old for old in names if name.startswith(prefix + old)), None):
            state[prefix + names[old] + name.removeprefix(prefix + old)] = state.pop(name)
    return state


def _save_with_heads(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
) -> None:
    """Saves a model with its layers of multi-token prediction, under their names in a checkpoint."""
    state = _rename({**(model.state_dict() if state_dict is None else state_dict)}, _names(model)[0])
    type(model).save_pretrained(model, save_directory, is_main_process, state_dict=state, **kwargs)


def _to_own_names(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Gives the layers of a checkpoint, from which Trainer resumes, their names in the model."""
    _rename(state, _names(model)[1], prefix)
