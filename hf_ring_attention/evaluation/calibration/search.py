"""The search for the patterns of all groups of heads: passes of the texts, and choices by what they measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...hf.config import patch_config
from ...plan.patterns import Pattern
from ...ring.ring import Ring
from .choice import choose, squares_of
from .costs import Cost
from .journal import Journal
from .passes import TextChanges, measure_losses, measure_text
from .texts import ScoredText

#: How far a refined choice may go from the last one, tried in turn until one is better: the factor of the harm that changes are
#: expected to do together.
CAUTION = (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Groups:
    """The groups of heads, [G] in the order of their layers, and the cost of each pattern of the menu in each.

    Attributes:
        heads: the number of key/value heads of each layer.
        costs: [G, P] as `Cost` counts.
        budget: what all groups may cost together.
    """

    menu: tuple[Pattern, ...]
    heads: Mapping[int, int]
    costs: np.ndarray
    budget: float

    @classmethod
    def of(cls, heads: Mapping[int, int], menu: tuple[Pattern, ...], budget: float, cost: Cost) -> Groups:
        """Makes the groups of layers with these numbers of key/value heads; `budget` is a share of exact attention's cost."""
        by_heads = {count: cost.of_menu(menu, count) for count in set(heads.values())}
        costs = np.concatenate([by_heads[heads[layer]] for layer in sorted(heads)])
        return cls(menu, heads, costs, budget * len(costs) * cost.of_exact())

    def by_layer(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Returns, for each layer, the part [heads, ...] of [G, ...]."""
        layers = sorted(self.heads)
        ends = np.cumsum([self.heads[layer] for layer in layers])
        return dict(zip(layers, np.split(values, ends[:-1])))

    def patterns(self, chosen: np.ndarray) -> dict[int, Pattern]:
        """Returns the pattern of each layer, whose groups have these patterns of the menu."""
        return {
            layer: Pattern.by_kv_head([self.menu[number] for number in numbers])
            for layer, numbers in self.by_layer(chosen).items()
        }


@dataclass(frozen=True)
class Choice:
    """Patterns, and what forward passes of the texts measured under them.

    Attributes:
        chosen: [G] the pattern of the menu that each group has.
        nlls: for each text, the mean negative log-likelihood of its tokens, in nats.
        divergence: from the predictions under exact attention, mean of all tokens, in nats.
    """

    chosen: np.ndarray
    nlls: tuple[float, ...]
    divergence: float


@dataclass(frozen=True)
class ExactPasses:
    """What passes under exact attention measured.

    Attributes:
        nlls: for each plain text, the mean negative log-likelihood of its tokens, in nats.
        heads: the number of key/value heads of each layer for which patterns can be chosen.
        products: [G, P, G, P] float64: the mean products of two patterns' d over the tokens of all plain texts.
        harm: likewise for the texts with answers, by their weight; 0 without such texts.
    """

    nlls: tuple[float, ...]
    heads: Mapping[int, int]
    products: np.ndarray
    harm: Any


@dataclass(frozen=True)
class _Layers:
    """The patterns of some layers, as `patch_config` takes them."""

    layers: Mapping[int, Pattern]
    num_hidden_layers: int


class Search:
    """Chooses patterns for a patched model.

    Args:
        texts: the plain texts, whose tokens all count alike.
        answers: the texts in which answers must be found.
        bar: a bar like tqdm's, which counts the layers of all passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ring: Ring,
        texts: Sequence[ScoredText],
        answers: Sequence[ScoredText],
        menu: tuple[Pattern, ...],
        journal: Journal,
        bar: Any,
    ) -> None:
        self._model, self._ring, self._menu = model, ring, menu
        self._texts, self._answers = texts, answers
        self._journal, self._bar = journal, bar
        self._num_layers = model.config.get_text_config().num_hidden_layers
        self._exact: dict[str, Tensor] = {}  # By the digest of the text; they are small beside its logits.
        self._shares = np.array([text.num_scored for text in texts]) / sum(text.num_scored for text in texts)

    def exact_passes(self, retrieval: float) -> ExactPasses:
        """Measures all texts under exact attention; `retrieval` weighs the answers by the harm of the menu's patterns.

        Raises:
            NotImplementedError: a model whose layers all have windows.
        """
        changes = [self._changes({}, text) for text in self._texts]
        heads = {layer: len(x) for layer, x in changes[0].linear.items()}
        if not heads:
            raise NotImplementedError(
                f"calibrate: every layer of {type(self._model).__name__} has its own window, so no choice is left: set "
                f"patterns with ra.patch_config(config, pattern, layers=...)"
            )
        products: Any = sum(share * _products(of_text) for share, of_text in zip(self._shares, changes))
        harm: Any = 0.0
        for of_answers in (_products(self._changes({}, text)) for text in self._answers):
            of_menu = squares_of(products).sum() / max(squares_of(of_answers).sum(), 1e-300)
            harm = harm + retrieval * of_menu * of_answers
        return ExactPasses(tuple(of_text.nll for of_text in changes), heads, products, harm)

    def first_choice(self, groups: Groups, exact: ExactPasses) -> Choice:
        """Chooses patterns by the passes under exact attention."""
        products = exact.products + exact.harm
        return self._tried(groups, choose(np.zeros_like(groups.costs, float), groups.costs, groups.budget, products))

    def refined(self, groups: Groups, exact: ExactPasses, best: Choice) -> Choice:
        """Returns the patterns that passes around the best ones so far lead to; the best ones if these are not better."""
        layers, slope = groups.patterns(best.chosen), np.zeros(groups.costs.shape)
        for share, text in zip(self._shares, self._texts):
            linear = self._changes(layers, text).linear
            slope += share * torch.cat([linear[layer] for layer in sorted(linear)]).numpy()
        # Products count changes from exact attention; here they must count changes from the best patterns.
        of_best = exact.products[:, :, np.arange(len(best.chosen)), best.chosen].sum(2)
        for caution in CAUTION:
            scores = slope - caution * of_best
            chosen = choose(scores, groups.costs, groups.budget, caution * exact.products + exact.harm)
            if np.array_equal(chosen, best.chosen):
                break
            if caution != CAUTION[0]:
                self._bar.total += len(self._texts) * self._num_layers
            candidate = self._tried(groups, chosen)
            if candidate.divergence < best.divergence:
                return candidate
        return best

    def _tried(self, groups: Groups, chosen: np.ndarray) -> Choice:
        """Measures what patterns do to the plain texts."""
        layers = groups.patterns(chosen)
        losses = [self._losses(layers, text) for text in self._texts]
        divergence = float(self._shares @ [of_text["divergence"] for of_text in losses])
        return Choice(chosen, tuple(of_text["nll"] for of_text in losses), divergence)

    def _changes(self, layers: Mapping[int, Pattern], text: ScoredText) -> TextChanges:
        def measure() -> dict[str, Any]:
            exact = self._exact_states(text) if layers else None
            self._set(layers)
            changes = measure_text(
                self._model, self._ring, text, self._menu, exact=exact, after_layer=lambda: self._bar.update()
            )
            return vars(changes)

        before = self._bar.n
        changes = TextChanges(**self._journal.measured("changes", measure, text.digest, _names(layers)))
        # Count layers with their own window, too, and all layers of a pass that an earlier run measured.
        self._bar.update(before + self._num_layers - self._bar.n)
        return changes

    def _losses(self, layers: Mapping[int, Pattern], text: ScoredText) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            exact = self._exact_states(text)
            self._set(layers)
            _, nll, divergence = measure_losses(self._model, self._ring, text, exact)
            return {"nll": nll, "divergence": divergence}

        losses = self._journal.measured("losses", measure, text.digest, _names(layers))
        self._bar.update(self._num_layers)
        return losses

    def _exact_states(self, text: ScoredText) -> Tensor:
        """Returns [1, n, width] this rank's hidden states under exact attention, with which every choice is compared."""
        if text.digest not in self._exact:
            self._set({})
            self._exact[text.digest] = measure_losses(self._model, self._ring, text, None)[0]
        return self._exact[text.digest]

    def _set(self, layers: Mapping[int, Pattern]) -> None:
        """Sets patterns of layers, and exact attention in the others that have no window of their own."""
        patch_config(self._model.config, _Layers(layers, self._num_layers) if layers else "exact")


def _products(changes: TextChanges) -> np.ndarray:
    assert changes.products is not None  # It was a first pass.
    return changes.products.double().numpy()


def _names(layers: Mapping[int, Pattern]) -> dict[int, str]:
    return {layer: str(pattern) for layer, pattern in sorted(layers.items())}
