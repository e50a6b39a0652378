"""The search for the patterns of all groups of heads: passes of the texts, and choices by what they measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ...plan.patterns import Pattern
from ...ring.ring import Ring
from ...transport.agreement import digest
from .choice import choose
from .costs import Cost
from .journal import CalibrationJournal
from .passes import TextChanges, measure_losses, measure_text
from .texts import ScoredText

#: How far a choice by corrected scores may go beyond the last one, in turn until one is better: the factor of what changes are
#: expected to do harm together.
CAUTION = (1.0, 2.0, 4.0)

#: The pattern of each layer.
Layers = Mapping[int, Pattern]


@dataclass(frozen=True)
class Groups:
    """The groups of heads, [G] in the order of their layers, and what each pattern of the menu costs in each.

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

    def together(self, of_layers: Mapping[int, Tensor]) -> np.ndarray:
        """Returns [G, ...] of what there is for the heads of each layer, [heads, ...]."""
        return np.concatenate([of_layers[layer].numpy() for layer in sorted(self.heads)])

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
class Tried:
    """Patterns that forward passes of the texts have tried.

    Attributes:
        chosen: [G] which pattern of the menu each group has.
        nlls: of each text, the mean negative log-likelihood of its tokens, in nats.
        divergence: from the predictions of exact attention, mean of all tokens, in nats.
    """

    chosen: np.ndarray
    nlls: tuple[float, ...]
    divergence: float


@dataclass(frozen=True)
class FirstPasses:
    """What passes under exact attention measured.

    Attributes:
        nlls: of each plain text, the mean negative log-likelihood of its tokens, in nats.
        heads: the number of key/value heads of each layer for which patterns can be chosen.
        products: [G, P, G, P] float64: the mean products of the d of two patterns, over the tokens of all plain texts.
        of_answers: likewise, of each text with answers.
    """

    nlls: tuple[float, ...]
    heads: Mapping[int, int]
    products: np.ndarray
    of_answers: Sequence[np.ndarray]


class Search:
    """Chooses patterns for a model.

    Args:
        model: a patched model.
        patch: sets patterns of layers in the model, and exact attention in the others.
        texts: the plain texts, of which each token counts alike.
        answers: the texts in which answers must be found.
        bar: what counts the layers of all passes, as tqdm does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ring: Ring,
        patch: Callable[[Layers], None],
        texts: Sequence[ScoredText],
        answers: Sequence[ScoredText],
        menu: tuple[Pattern, ...],
        journal: CalibrationJournal,
        bar: Any,
    ) -> None:
        self._model, self._ring, self._patch = model, ring, patch
        self._texts, self._answers, self._menu = texts, answers, menu
        self._journal, self._bar = journal, bar
        self._layers = model.config.get_text_config().num_hidden_layers
        self._exact: dict[str, Tensor] = {}  # By the digest of the text; they are small beside its logits.
        self._shares = np.array([text.num_scored for text in texts]) / sum(text.num_scored for text in texts)

    def first_passes(self) -> FirstPasses:
        """Measures each text under exact attention: the plain ones, and those with answers."""
        products: Any = 0.0
        nlls, heads = [], {}
        for share, text in zip(self._shares, self._texts):
            one = self._changes({}, text)
            products = products + share * _float64(one.products)
            nlls.append(one.nll)
            heads = {layer: len(x) for layer, x in one.linear.items()}
        answers = [_float64(self._changes({}, text).products) for text in self._answers]
        return FirstPasses(tuple(nlls), heads, products, answers)

    def tried(self, groups: Groups, chosen: np.ndarray) -> Tried:
        """Measures what patterns do to the plain texts."""
        layers = groups.patterns(chosen)
        losses = [self._losses(layers, text) for text in self._texts]
        divergence = float(self._shares @ [one["divergence"] for one in losses])
        return Tried(chosen, tuple(one["nll"] for one in losses), divergence)

    def refined(self, groups: Groups, best: Tried, products: np.ndarray, harm: np.ndarray | float) -> Tried:
        """Returns patterns that passes around the best ones so far lead to, or the best ones where these are no better.

        Args:
            products: [G, P, G, P] the mean products of two patterns' d in the first passes of plain texts.
            harm: likewise of texts with answers, as they are weighed.
        """
        layers = groups.patterns(best.chosen)
        passes = [self._changes(layers, text) for text in self._texts]
        slope = np.tensordot(self._shares, np.stack([groups.together(one.linear) for one in passes]), 1)
        # Products count changes from exact attention; here they are to count those from the best patterns.
        of_best = products[:, :, np.arange(len(best.chosen)), best.chosen].sum(2)
        for caution in CAUTION:
            scores = slope - caution * of_best
            chosen = choose(scores, groups.costs, groups.budget, caution * products + harm)
            if np.array_equal(chosen, best.chosen):
                break
            if caution != CAUTION[0]:
                self._bar.total += len(self._texts) * self._layers
            candidate = self.tried(groups, chosen)
            if candidate.divergence < best.divergence:
                return candidate
        return best

    def _exact_states(self, text: ScoredText) -> Tensor:
        """Returns [1, n, width] this rank's hidden states under exact attention, which every choice is compared with."""
        if text.digest not in self._exact:
            self._patch({})
            self._exact[text.digest] = measure_losses(self._model, self._ring, text, None)[0]
        return self._exact[text.digest]

    def _changes(self, layers: Layers, text: ScoredText) -> TextChanges:
        def measure() -> dict[str, Any]:
            exact = self._exact_states(text) if layers else None
            self._patch(layers)
            return measure_text(
                self._model, self._ring, text, self._menu, exact=exact, after_layer=lambda layer: self._bar.update()
            ).to_dict()

        before = self._bar.n
        changes = TextChanges.from_dict(self._journal.measured(f"changes-{text.digest}-{_name(layers)}", measure))
        # Layers with windows of their own count, too, and so does a pass that an earlier run measured.
        self._bar.update(before + self._layers - self._bar.n)
        return changes

    def _losses(self, layers: Layers, text: ScoredText) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            exact = self._exact_states(text)
            self._patch(layers)
            _, nll, divergence = measure_losses(self._model, self._ring, text, exact)
            return {"nll": nll, "divergence": divergence}

        losses = self._journal.measured(f"losses-{text.digest}-{_name(layers)}", measure)
        self._bar.update(self._layers)
        return losses


def _float64(products: Tensor | None) -> np.ndarray:
    assert products is not None  # It was a first pass.
    return products.double().numpy()


def _name(layers: Layers) -> str:
    """Returns a name of patterns, for files."""
    return digest([(layer, str(pattern)) for layer, pattern in sorted(layers.items())]) if layers else "exact"
