"""One forward and one backward pass of a text, in which each layer measures what every pattern of a menu would change.

While the gradient of a loss travels back, each layer computes its attention again under each pattern, from the queries, keys
and values at hand, and takes d(token) = gradient . (output under the pattern - output), summed over a key/value head's query
heads. d is, to first order, what this pattern in this head alone adds to the loss of the whole text through that token. It
is all that outlives the layer. On a ring, a pass is sharded like any other, and each rank holds the d of all tokens.

A first pass, under exact attention, takes the loss of tokens which the model itself predicts, drawn at random, and not of
those of the text. Then d is 0 on average, and half the mean of d * d is how far the changed predictions are from the model's
own, as a divergence (Kullback-Leibler), to second order: the mean product of such gradients is the Fisher information. What
two groups of heads change together has the sum of their d, so that the mean products of the d of any two patterns of any two
groups tell how far a choice for all groups goes: changes of one direction add up, and others cancel. With the tokens of the
text itself, d also has what this one text happens to reward; the patterns that it favours do worse on others.

A second pass, under chosen patterns, takes that divergence itself, from the predictions that exact attention made. Its gradient
knows the changes of all groups together.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...compute.merge import accumulation_dtype
from ...compute.private import checkpoint_activations
from ...hf.forward_pass import Head
from ...hf.lm_loss import IGNORED
from ...hf.wrappers import evaluating
from ...plan.layouts import SequenceLayout
from ...plan.patterns import Pattern
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ..finite import check_finite
from ..hidden_states import hidden_states, layout_of_rows
from ..slices import head_in_slices, token_nll
from .taps import TappedCall, tapped
from .texts import ScoredText, drawn_tokens

#: A function of logits [1, m, vocabulary] and the places of these m tokens among those of the rank, whose gradient is taken.
Objective = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class TextChanges:
    """What a pass of a text measured.

    Attributes:
        nll: the mean negative log-likelihood of the scored tokens, in nats.
        divergence: of predictions from those of exact attention, mean of the scored tokens, in nats; 0 where these were made.
        linear: for each layer [Hkv, P] float64 on the CPU: the sum of d, over the number of scored tokens.
        products: [G, P, G, P] float32 on the CPU: the sums of products of two patterns' d, over the number of scored tokens,
            for the G groups of heads in the order of their layers; None in a second pass.
    """

    nll: float
    divergence: float
    linear: dict[int, Tensor]
    products: Tensor | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the measurements in plain JSON types; `from_dict` reads them back, with the same bits."""
        linear = {str(layer): x.tolist() for layer, x in self.linear.items()}
        products = None
        if self.products is not None:  # Numbers of many groups, as decimals, would take five times the space.
            content = b64encode(self.products.numpy().astype("<f4").tobytes()).decode()
            products = {"shape": list(self.products.shape), "float32": content}
        return {"nll": self.nll, "divergence": self.divergence, "linear": linear, "products": products}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> TextChanges:
        """Returns what `to_dict` wrote."""
        linear = {int(layer): torch.tensor(x, dtype=torch.float64) for layer, x in d["linear"].items()}
        products = None
        if d["products"] is not None:
            numbers = np.frombuffer(b64decode(d["products"]["float32"]), "<f4").astype(np.float32)
            products = torch.from_numpy(numbers).view(d["products"]["shape"])
        return cls(nll=d["nll"], divergence=d["divergence"], linear=linear, products=products)


#: The most tokens whose d are held. Those of longer texts are added up in so many sums, with signs drawn at random: products of
#: such sums are those of all tokens but for noise, of about 1 / sqrt(this) of the product of the sizes of both.
MOST_HELD = 8192

#: The attribute of modules that says whether Transformers checkpoints their layers.
_CHECKPOINTING = "gradient_checkpointing"


def measure_text(
    model: PreTrainedModel,
    ring: Ring,
    text: ScoredText,
    menu: Sequence[Pattern],
    *,
    exact: Tensor | None = None,
    logits_at_once: int = 512,
    after_layer: Callable[[int], None] = lambda layer: None,
) -> TextChanges:
    """Measures, in one pass of a text, what each pattern would change in each head of each layer.

    Layers with a window of their own are left out: no pattern of the menu is set for them. What is returned is the same on
    every rank.

    Args:
        model: a patched model, whose patterns are those that changes are counted from.
        text: the whole text, the same on every rank.
        exact: [1, n, width] the hidden states of this rank under exact attention, for the divergence from the predictions that
            are made of them; None for a first pass.
        logits_at_once: the number of tokens whose logits are held at once.
        after_layer: called with the number of each layer that is done.

    Raises:
        ValueError: on every rank: losses, or what patterns change of them, that are infinite or NaN.
    """
    layout = layout_of_rows(model, ring, text.ids[None])
    sums = _ScoreSums(ring, layout, menu, after_layer, for_products=exact is None)
    with ExitStack() as stack:
        for context in (evaluating(model), _without_gradients(model), _checkpointed(model), tapped(model, sums.add)):
            stack.enter_context(context)
        inputs = stack.enter_context(_embeddings(model))
        with torch.enable_grad():
            hidden, head = hidden_states(model, ring, text.ids[None].to(model.device))
        labels = _next_tokens(text, ring, layout, hidden.device)
        objective = _objective(text, labels, ring, layout, exact, head)
        gradient, loss = _gradient(hidden, head, objective, logits_at_once)
        # A head that is not known takes two passes, of which only the last has a gradient.
        torch.autograd.grad(hidden, inputs, gradient, allow_unused=True)
    with torch.no_grad():
        nll = _nll_of_text(hidden, head, labels, logits_at_once)
    of_all = torch.stack(ring.gather(torch.stack([nll, loss]))).sum(0) / text.num_scored
    check_finite(torch.cat([of_all.cpu(), *(x.flatten() for x in sums.linear.values())]), model, "calibrate")
    return TextChanges(
        nll=float(of_all[0]),
        divergence=0.0 if exact is None else float(of_all[1]),
        linear={layer: x / text.num_scored for layer, x in sums.linear.items()},
        products=sums.products(text.num_scored) if exact is None else None,
    )


@torch.no_grad()
def measure_losses(
    model: PreTrainedModel, ring: Ring, text: ScoredText, exact: Tensor | None, *, logits_at_once: int = 512
) -> tuple[Tensor, float, float]:
    """Measures, in one forward pass, what the patterns that a model has now do to a text.

    Args:
        exact: as for `measure_text`; None under exact attention.

    Returns:
        [1, n, width] this rank's hidden states; and, the same on every rank, the means that `TextChanges` calls nll and
        divergence.

    Raises:
        ValueError: on every rank: losses that are infinite or NaN.
    """
    layout = layout_of_rows(model, ring, text.ids[None])
    with evaluating(model):
        hidden, head = hidden_states(model, ring, text.ids[None].to(model.device))
    labels = _next_tokens(text, ring, layout, hidden.device)
    of_rank = _nll_of_text(hidden, head, labels, logits_at_once)
    apart, scored = torch.zeros_like(of_rank), labels != IGNORED
    if exact is not None:
        both = (head_in_slices(x, head, scored, logits_at_once) for x in (hidden, exact))
        for (_, logits), (_, expected) in zip(*both, strict=True):
            apart += _divergences(logits, expected).sum().double()
    nll, divergence = of_all = torch.stack(ring.gather(torch.stack([of_rank, apart]))).sum(0) / text.num_scored
    check_finite(of_all, model, "calibrate")
    return hidden, float(nll), float(divergence)


def _next_tokens(text: ScoredText, ring: Ring, layout: SequenceLayout, device: torch.device) -> Tensor:
    """Returns [1, n] the next token of each of this rank's tokens, or `IGNORED` where that is not scored."""
    labels = F.pad(text.ids[None, 1:].masked_fill(~text.scored[None, 1:], IGNORED), (0, 1), value=IGNORED)
    return ring.shard(labels.to(device), layout, fill=IGNORED)


def _nll_of_text(hidden: Tensor, head: Head, labels: Tensor, logits_at_once: int) -> Tensor:
    """Returns the sum of the losses of this rank's tokens in float64, in nats."""
    logits = head_in_slices(hidden, head, labels != IGNORED, logits_at_once)
    return token_nll(logits, labels)[labels != IGNORED].sum(dtype=torch.float64)


def _divergences(logits: Tensor, expected: Tensor) -> Tensor:
    """Returns the divergence of predictions from those that are expected, in nats, of each token."""
    logps, expected = (_precise(x).log_softmax(-1) for x in (logits, expected))
    return F.kl_div(logps, expected, reduction="none", log_target=True).sum(-1)


def _gradient(hidden: Tensor, head: Head, objective: Objective, logits_at_once: int) -> tuple[Tensor, Tensor]:
    """Returns the gradient [1, n, width] of an objective by hidden states, summed over all tokens, and that sum in float64."""
    gradient, total = torch.zeros_like(hidden), torch.zeros((), dtype=torch.float64, device=hidden.device)
    for first in range(0, hidden.shape[1], logits_at_once):
        part = slice(first, first + logits_at_once)
        with torch.enable_grad():
            states = hidden[:, part].detach().requires_grad_()
            loss = objective(_precise(head(states)), part)
        gradient[:, part] = torch.autograd.grad(loss, states)[0]
        total += loss.detach()
    return gradient, total


def _objective(
    text: ScoredText, labels: Tensor, ring: Ring, layout: SequenceLayout, exact: Tensor | None, head: Head
) -> Objective:
    """Returns the sum of losses of this rank's tokens.

    Args:
        labels: [1, n] the next token of each of them, or `IGNORED` where that is not scored.
    """
    scored = labels != IGNORED

    def of_answers(logits: Tensor, part: slice) -> Tensor:
        """The log-odds against the answers, which still show a change where an answer is as good as certain."""
        label = labels[:, part, None].clamp_min(0)
        others = logits.scatter(2, label, -torch.inf).logsumexp(-1)
        return (others - logits.gather(2, label)[..., 0]).masked_fill(~scored[:, part], 0).sum()

    seed = text.seed
    if seed is None:
        return of_answers

    def of_divergence(logits: Tensor, part: slice) -> Tensor:
        assert exact is not None
        with torch.no_grad():
            expected = head(exact[:, part])
        return _divergences(logits, expected).masked_fill(~scored[:, part], 0).sum()

    if exact is not None:
        return of_divergence
    positions = layout.positions(ring.rank)

    def of_drawn(logits: Tensor, part: slice) -> Tensor:
        drawn = drawn_tokens(logits[0], seed, positions[part]).masked_fill(~scored[0, part], IGNORED)
        return F.cross_entropy(logits[0], drawn, ignore_index=IGNORED, reduction="sum")

    return of_drawn


class _ScoreSums:
    """Sums up d of each layer as its gradient arrives, and may keep d for products of all layers."""

    def __init__(
        self,
        ring: Ring,
        layout: SequenceLayout,
        menu: Sequence[Pattern],
        after_layer: Callable[[int], None],
        for_products: bool,
    ) -> None:
        self.linear: dict[int, Tensor] = {}
        self._held: dict[int, Tensor] = {}
        self._ring, self._menu, self._after_layer, self._for_products = ring, menu, after_layer, for_products
        positions = torch.tensor(layout.positions(ring.rank))
        self._is_token = positions < layout.seq_len
        self._places, self._num_places = positions % MOST_HELD, min(layout.seq_len, MOST_HELD)
        self._places[~self._is_token] = 0
        self._signs = torch.ones(len(positions))
        if layout.seq_len > MOST_HELD:
            signs = 2 * torch.randint(2, (layout.seq_len,), generator=torch.Generator().manual_seed(0)) - 1
            self._signs = signs[positions.clamp_max(layout.seq_len - 1)].float()

    def add(self, call: TappedCall) -> None:
        """Computes the attention of a layer under each pattern, and keeps what that would change."""
        num_kv_heads, num_tokens = call.key.shape[1:3]
        device = call.out.device
        d = torch.zeros(num_kv_heads, len(self._menu), num_tokens, dtype=torch.float64, device=device)
        for number, pattern in enumerate(self._menu):
            if pattern == call.settings["pattern"]:
                continue  # It changes nothing.
            out: Any = ring_attention(call.query, call.key, call.value, **{**call.settings, "pattern": pattern})
            change = ((out - call.out).double() * call.grad.double()).sum(-1)[0]  # [H, n]
            d[:, number] = change.view(num_kv_heads, -1, num_tokens).sum(1)
        d.masked_fill_(~self._is_token.to(device), 0)
        self.linear[call.layer] = torch.stack(self._ring.gather(d.sum(-1))).sum(0).cpu()
        if self._for_products:
            held = d.new_zeros(*d.shape[:2], self._num_places)
            held.index_add_(2, self._places.to(device), d * self._signs.to(device))
            # A token is held by one rank, so that the ranks' sums are all tokens', each once.
            self._held[call.layer] = torch.stack(self._ring.gather(held.float())).sum(0).cpu()
        self._after_layer(call.layer)

    def products(self, num_scored: int) -> Tensor:
        """Returns [G, P, G, P] float32: the sums of products of d over the number of scored tokens."""
        if not self._held:  # There is no layer to choose patterns for.
            return torch.zeros(0, 0, 0, 0)
        d = torch.cat([self._held[layer] for layer in sorted(self._held)])
        rows = d.flatten(0, 1).double()
        return (rows @ rows.T / num_scored).float().view(*d.shape[:2], *d.shape[:2])


def _precise(logits: Tensor) -> Tensor:
    return logits.to(accumulation_dtype(logits.dtype))


@contextmanager
def _without_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Records no gradients by parameters: they are not needed, and neither is what they would have to keep."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


@contextmanager
def _checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Has layers computed again in backward, so that no more than one of them is held, if the model can do that."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    training = [layer.training for layer in layers]
    before = {module: module.gradient_checkpointing for module in model.modules() if hasattr(module, _CHECKPOINTING)}
    if layers:
        checkpoint_activations(model, {"use_reentrant": False})
        for layer in layers:
            layer.training = True  # Of the layer alone: what is inside goes on in evaluation mode.
    try:
        yield
    finally:
        for layer, mode in zip(layers, training):
            layer.training = mode
        for module, value in before.items():
            setattr(module, _CHECKPOINTING, value)


@contextmanager
def _embeddings(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yields a list that will have the embedded tokens of the next pass, by which gradients are recorded."""
    embedded: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output.requires_grad_()
        embedded.append(output)
        return output

    handle = model.get_input_embeddings().register_forward_hook(record)
    try:
        yield embedded
    finally:
        handle.remove()
