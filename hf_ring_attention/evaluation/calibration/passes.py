"""One forward and one backward pass of a text, in which each layer measures what every pattern of a menu would change.

While the gradient of a loss travels back, each layer computes its attention again under each pattern, from its queries, keys
and values. Then d(token) = gradient . (output under the pattern - output), summed over the query heads of a key/value
head. To first order, d is what this pattern in this head alone adds to the loss of the whole text through that token. Only d
outlives the layer. On a ring, a pass is sharded like any other, and each rank holds the d of all tokens.

The first pass runs under exact attention. Its loss does not take the tokens of the text: the model draws tokens from its
predictions. Then d is 0 on average, and half the mean of d * d is, to second order, the divergence (Kullback-Leibler) of the
changed predictions from the model's own, because the mean product of such gradients is the Fisher information. Changes of two
groups of heads add their d. So the mean products of d for any two patterns of any two groups predict how far a choice for all
groups goes: changes in one direction add up, and others cancel. With the tokens of the text, d would also contain what this one
text happens to reward, and patterns chosen by it do worse on other texts.

A second pass, under chosen patterns, takes the divergence from the predictions of exact attention itself. Its gradient knows
the changes of all groups together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...compute.merge import accumulation_dtype
from ...hf.forward_pass import Head
from ...hf.layer.attention import TAP
from ...hf.loss.lm_loss import IGNORED
from ...hf.model.wrappers import decoder_of, evaluating
from ...plan.layouts import SequenceLayout
from ...plan.patterns import Pattern
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ...training.distillation import divergences
from ..logits import check_finite, hidden_states, layout_of_rows
from .texts import ScoredText, drawn_tokens

#: The most tokens whose d are held. A longer text adds its tokens up into so many sums, with signs drawn at random. Products of
#: such sums are the products of all tokens plus noise, of about 1 / sqrt(this) of the product of both sizes.
MOST_HELD = 8192
#: The number of tokens whose logits are held at once.
LOGITS_AT_ONCE = 512

#: The attribute of modules that Transformers sets while it checkpoints their layers.
_CHECKPOINTING = "gradient_checkpointing"


@dataclass(frozen=True)
class TextChanges:
    """Means over the scored tokens of a text that a pass measured; losses are in nats, tensors on the CPU."""

    nll: float
    divergence: float  # from the predictions under exact attention; 0 if the pass did not compare them
    linear: dict[int, Tensor]  # for each layer [Hkv, P] float64: d
    products: Tensor  # [G, P, G, P] float32, of two patterns' d in the G groups of heads; empty but for a first pass


def measure_text(
    model: PreTrainedModel, ring: Ring, text: ScoredText, menu: Sequence[Pattern] = (), exact: Tensor | None = None
) -> tuple[TextChanges, Tensor]:
    """Measures, in one pass of a text, the change by each pattern in each head of each layer without a window.

    Changes are counted from the patterns of the model. Without a menu, there is a forward pass alone. `exact` are this rank's
    hidden states under exact attention; None for a first pass, and under exact attention. Returns the changes, the same on
    every rank, and this rank's hidden states, [1, n, width].
    """
    layout, back = layout_of_rows(model, ring, text.ids[None]), bool(menu)
    changes = _LayerChanges(ring, layout, menu, keep=exact is None)
    labels = F.pad(text.ids[1:].masked_fill(~text.scored[1:], IGNORED), (0, 1), value=IGNORED)
    positions = torch.tensor(layout.positions(ring.rank))
    with evaluating(model), _tapped(model, changes.add) if back else nullcontext():
        with torch.set_grad_enabled(back):
            hidden, head = hidden_states(model, ring, text.ids[None].to(model.device))
        labels = ring.shard(labels[None].to(hidden.device), layout, fill=IGNORED)[0]
        gradient, sums = torch.zeros_like(hidden), hidden.new_zeros(2, dtype=torch.float64)
        for first in range(0, len(labels), LOGITS_AT_ONCE):
            part = slice(first, first + LOGITS_AT_ONCE)
            scored = labels[part] != IGNORED
            answers, states = labels[part][scored], hidden[0, part][scored].detach().requires_grad_(back)
            with torch.set_grad_enabled(back):
                logits = _precise(head, states)
                if exact is not None:
                    expected = _precise(head, exact[0, part][scored]).log_softmax(-1)
                    losses = divergences(logits.log_softmax(-1), expected)
                elif back:
                    losses = _losses(logits, answers, text.seed, positions[part][scored.cpu()].tolist())
                else:
                    losses = logits.new_zeros(1)
            if back:
                gradient[0, part][scored] = torch.autograd.grad(losses.sum(), states)[0]
            nll = F.cross_entropy(logits.detach(), answers, reduction="none")
            sums += torch.stack([nll.double().sum(), losses.detach().double().sum()])
        if back:
            hidden.backward(gradient)
    mean_nll, mean_loss = sums = torch.stack(ring.gather(sums)).sum(0).cpu() / text.num_scored
    check_finite(torch.cat([sums, *(x.flatten() for x in changes.linear.values())]), model, "calibrate")
    return TextChanges(
        nll=float(mean_nll),
        divergence=0.0 if exact is None else float(mean_loss),
        linear={layer: x / text.num_scored for layer, x in changes.linear.items()},
        products=changes.products(text.num_scored),
    ), hidden.detach()


def _precise(head: Head, states: Tensor) -> Tensor:
    """Returns the logits [m, vocabulary] of hidden states [m, width], in float32 at least."""
    logits = head(states[None])[0]
    return logits.to(accumulation_dtype(logits.dtype))


def _losses(logits: Tensor, answers: Tensor, seed: int | None, positions: Iterable[int]) -> Tensor:
    """Returns [m]: the loss of each scored token, whose gradient a first pass takes."""
    if seed is not None:
        return F.cross_entropy(logits, drawn_tokens(logits, seed, positions), reduction="none")
    # The log-odds against the answer still show a change if the answer is as good as certain.
    rest = logits.scatter(1, answers[:, None], -torch.inf).logsumexp(-1)
    return rest - logits.gather(1, answers[:, None])[:, 0]


# ---- layers


class _LayerChanges:
    """Sums up d of each layer as its gradient arrives: `linear` has [Hkv, P] for each layer, the sum over all tokens."""

    def __init__(self, ring: Ring, layout: SequenceLayout, menu: Sequence[Pattern], keep: bool) -> None:
        self.linear: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}  # with `keep`, the d of tokens, for products of all layers
        self._ring, self._menu, self._keep = ring, menu, keep
        positions = torch.tensor(layout.positions(ring.rank))
        self._is_token = positions < layout.seq_len
        self._num_places = min(layout.seq_len, MOST_HELD)
        self._places = (positions % MOST_HELD).masked_fill(~self._is_token, 0)
        self._signs = torch.ones(len(positions))
        if layout.seq_len > MOST_HELD:
            signs = 2 * torch.randint(2, (layout.seq_len,), generator=torch.Generator().manual_seed(0)) - 1
            self._signs = signs[positions.clamp_max(layout.seq_len - 1)].float()

    def add(
        self, layer: int, settings: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad: Tensor
    ) -> None:
        """Adds up the changes by each pattern; `settings` are other arguments of `ring_attention`, out is [1, H, n, Dv]."""
        num_kv_heads, num_tokens = key.shape[1:3]
        d = torch.zeros(num_kv_heads, len(self._menu), num_tokens, dtype=torch.float64, device=out.device)
        for number, pattern in enumerate(self._menu):
            if pattern == settings["pattern"]:
                continue  # It changes nothing.
            changed: Any = ring_attention(query, key, value, **{**settings, "pattern": pattern})
            change = ((changed - out).double() * grad.double()).sum(-1)[0]  # [H, n]
            d[:, number] = change.view(num_kv_heads, -1, num_tokens).sum(1)
        d.masked_fill_(~self._is_token.to(d.device), 0)
        self.linear[layer] = torch.stack(self._ring.gather(d.sum(-1))).sum(0).cpu()
        if self._keep:
            kept = d.new_zeros(*d.shape[:2], self._num_places)
            kept.index_add_(2, self._places.to(d.device), d * self._signs.to(d.device))
            # Each token is on one rank, so the sum over ranks contains it once.
            self._kept[layer] = torch.stack(self._ring.gather(kept.float())).sum(0).cpu()

    def products(self, num_scored: int) -> Tensor:
        if not self._kept:
            return torch.zeros(0, 0, 0, 0)
        d = torch.cat([self._kept[layer] for layer in sorted(self._kept)])
        rows = d.flatten(0, 1).double()
        return (rows @ rows.T / num_scored).float().view(*d.shape[:2], *d.shape[:2])


@contextmanager
def _tapped(model: PreTrainedModel, tap: Callable[..., None]) -> Iterator[None]:
    """Has `tap` called for each attention layer when its gradient arrives, with the arguments of `_LayerChanges.add`.

    Gradients are recorded from the embedded tokens on, and not for parameters. If the model supports it, backward computes
    layers again, so that only one of them is held. The context of the forward pass is gone then, so the modules have the tap.
    """
    modules, tapped = list(model.modules()), list(decoder_of(model).modules())
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    saved: list[tuple[Any, str, bool]] = [(x, "requires_grad", x.requires_grad) for x in model.parameters()]
    saved += [(layer, "training", layer.training) for layer in layers]
    saved += [(x, _CHECKPOINTING, getattr(x, _CHECKPOINTING)) for x in modules if hasattr(x, _CHECKPOINTING)]
    hook = model.get_input_embeddings().register_forward_hook(lambda *args: args[-1].requires_grad_())
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def through_tap(module: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor, settings: Any) -> Tensor:
        """Returns the output of a layer's attention, whose gradient the tap will get."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or not out.requires_grad:
            return out
        rows = query.detach(), key.detach(), value.detach(), out
        watched: Tensor = _Tapped.apply(partial(tap, layer, settings), *rows)
        return watched

    for module in tapped:
        setattr(module, TAP, through_tap)
    if layers:
        model.activation_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # The modules inside stay in evaluation mode.
    try:
        yield
    finally:
        hook.remove()
        for module in tapped:
            delattr(module, TAP)
        for holder, name, value in saved:
            setattr(holder, name, value)


class _Tapped(torch.autograd.Function):
    """Returns the output as it is, and saves what the tap needs, which checkpointing computes again in backward."""

    @staticmethod
    def forward(ctx: Any, tap: Callable[..., None], query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, out)
        ctx.tap = tap
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.tap(*ctx.saved_tensors, grad)
        return None, None, None, None, grad
