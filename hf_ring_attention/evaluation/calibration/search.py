"""The search for the patterns of all groups of heads: passes of the texts, and choices by their measurements.

Each measurement is written to a file at once, so that a run that was killed continues. Rank 0 writes and reads for all.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...hf.model.config import patch_config
from ...plan.patterns import Pattern
from ...ring.ring import Ring
from ...transport.agreement import digest
from ..progress import moved_by_layers
from ..whole_files import whole_file
from .choice import Cost, choose, squares_of
from .passes import TextChanges, measure_text
from .texts import ScoredText

#: The version of the files.
_FORMAT = 7
#: Factors of the harm that changes are expected to do together, tried in turn until a refined choice is better.
CAUTION = (1.0, 2.0, 4.0)
#: A backward pass, with all patterns of the menu, moves the bar as far as so many forward passes.
BACKWARD_PASS = 5


def tokens_of_bar(texts: Sequence[ScoredText], answers: Sequence[ScoredText], refinements: int) -> int:
    """Returns the tokens of all passes: a forward and a backward pass, and one that tries a choice, of all texts each time."""
    of_texts, of_answers = (sum(len(text.ids) for text in of) for of in (texts, answers))
    return (2 + BACKWARD_PASS) * (1 + refinements) * of_texts + (1 + BACKWARD_PASS) * of_answers


@dataclass(frozen=True)
class Choice:
    """The pattern of each group, [G], with the mean nll of each text and the mean divergence from exact attention, in nats."""

    chosen: np.ndarray
    nlls: tuple[float, ...]
    divergence: float


class Search:
    """Chooses patterns for a patched model, whose G groups of heads are in the order of their layers.

    The names of files in the folder contain a checksum of everything that decides their measurements, such as `settings`, so
    another calibration neither reads nor overwrites them. `bar` is a bar like tqdm's, of tokens: see `tokens_of_bar`.

    Attributes, after `first_choice`:
        heads: the number of key/value heads of each layer without a window in the model.
        nlls: the mean negative log-likelihood of each plain text under exact attention, in nats.
        products: [G, P, G, P] float64: the mean products of two patterns' d over the tokens of all plain texts.
        harm: the same for the texts with answers, weighted; 0 without such texts.
        costs: [G, P]: the cost of each pattern in each group; all groups may cost `budget` together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ring: Ring,
        texts: Sequence[ScoredText],
        menu: tuple[Pattern, ...],
        folder: Path | None,
        settings: Mapping[str, Any],
        bar: Any,
    ) -> None:
        self._model, self._ring, self._texts, self._menu = model, ring, texts, menu
        self._folder, self._settings, self._bar = folder, {**settings, "format": _FORMAT}, bar
        self._num_layers = model.config.get_text_config().num_hidden_layers
        self._exact: dict[str, Tensor] = {}  # [1, n, width] by the digest of the text; small beside its logits.
        self._shares = np.array([text.num_scored for text in texts]) / sum(text.num_scored for text in texts)

    def first_choice(self, answers: Sequence[ScoredText], retrieval: float, cost: Cost, budget: float) -> Choice:
        """Chooses patterns by passes of all texts under exact attention.

        `retrieval` weighs the answers by the harm of the menu's patterns.
        """
        changes = [self._measured({}, text, self._menu) for text in self._texts]
        self.nlls = tuple(of_text.nll for of_text in changes)
        self.heads = {layer: len(x) for layer, x in sorted(changes[0].linear.items())}
        if not self.heads:
            raise NotImplementedError(
                f"calibrate: every layer of {type(self._model).__name__} has its own window, so no choice is left: set "
                f"patterns with ra.patch_config(config, pattern, layers=...)"
            )
        self.products: Any = sum(share * x.products.double().numpy() for share, x in zip(self._shares, changes))
        self.harm: Any = 0.0
        for text in answers:
            of_answers = self._measured({}, text, self._menu).products.double().numpy()
            of_menu = squares_of(self.products).sum() / max(squares_of(of_answers).sum(), 1e-300)
            self.harm = self.harm + retrieval * of_menu * of_answers
        self.costs = np.concatenate([cost.of_menu(self._menu, count) for count in self.heads.values()])
        self.budget = budget * len(self.costs) * cost.of_exact()
        return self._tried(choose(np.zeros(self.costs.shape), self.costs, self.budget, self.products + self.harm))

    def refined(self, best: Choice) -> Choice:
        """Returns the patterns that passes around the best ones so far lead to; the best ones if these are not better."""
        layers, slope = self.patterns(best.chosen), np.zeros(self.costs.shape)
        for share, text in zip(self._shares, self._texts):
            linear = self._measured(layers, text, self._menu).linear
            slope += share * torch.cat([linear[layer] for layer in self.heads]).numpy()
        # Products count changes from exact attention; here they must count changes from the best patterns.
        of_best = self.products[:, :, np.arange(len(best.chosen)), best.chosen].sum(2)
        for caution in CAUTION:
            scores = slope - caution * of_best
            chosen = choose(scores, self.costs, self.budget, caution * self.products + self.harm)
            if np.array_equal(chosen, best.chosen):
                break
            if caution != CAUTION[0]:
                self._bar.total += sum(len(text.ids) for text in self._texts)
            candidate = self._tried(chosen)
            if candidate.divergence < best.divergence:
                return candidate
        return best

    def patterns(self, chosen: np.ndarray) -> dict[int, Pattern]:
        """Returns the pattern of each layer, whose groups have these patterns of the menu, [G]."""
        menu, by_layer = self._menu, self.by_layer(chosen)
        return {layer: Pattern.by_kv_head([menu[number] for number in numbers]) for layer, numbers in by_layer.items()}

    def by_layer(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Returns, for each layer, the part [heads, ...] of [G, ...]."""
        return dict(zip(self.heads, np.split(values, np.cumsum([*self.heads.values()])[:-1])))

    def _tried(self, chosen: np.ndarray) -> Choice:
        """Measures what patterns do to the plain texts."""
        layers = self.patterns(chosen)
        losses = [self._measured(layers, text) for text in self._texts]
        divergence = float(self._shares @ [of_text.divergence for of_text in losses])
        return Choice(chosen, tuple(of_text.nll for of_text in losses), divergence)

    def _measured(self, layers: Mapping[int, Pattern], text: ScoredText, menu: Sequence[Pattern] = ()) -> TextChanges:
        """Measures a text under patterns of layers, or reads the measurement; without a menu, by a forward pass."""
        changes, file, tokens = None, None, len(text.ids)
        passes = (tokens, BACKWARD_PASS * tokens) if menu else (tokens,)
        if self._folder is not None:
            names = {layer: str(pattern) for layer, pattern in sorted(layers.items())}
            checksum = digest([self._settings, text.digest, names])
            file = self._folder / f"{'changes' if menu else 'losses'}-{checksum}.pt"
            changes = self._read(file)
        if changes is None:
            exact = None
            if layers:  # Every choice is compared with the hidden states under exact attention.
                if text.digest not in self._exact:
                    self._set({})
                    self._bar.total += tokens
                    with moved_by_layers(self._bar, self._model, tokens):
                        self._exact[text.digest] = measure_text(self._model, self._ring, text)[1]
                exact = self._exact[text.digest]
            self._set(layers)
            with moved_by_layers(self._bar, self._model, *passes):
                changes, _ = measure_text(self._model, self._ring, text, menu, exact)
            if file is not None:
                with self._ring.agreement(f"writing {file.name}"):
                    if self._ring.rank == 0:
                        with whole_file(file) as part:
                            torch.save(vars(changes), part)
        else:
            self._bar.update(sum(passes))
        return changes

    def _read(self, file: Path) -> TextChanges | None:
        """Returns the measurement in a file; None if the file does not exist."""
        with self._ring.agreement(f"reading {file.name}") as call:
            if self._ring.rank == 0 and file.exists():
                try:
                    call.message = torch.load(file, weights_only=True)
                except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                    raise ValueError(f"{file} is damaged: delete it, and it is measured again") from error
        return None if call.answers[0] is None else TextChanges(**call.answers[0])

    def _set(self, layers: Mapping[int, Pattern]) -> None:
        """Sets patterns of layers, and exact attention in all other layers without a window."""
        patterns: Any = SimpleNamespace(layers=layers, num_hidden_layers=self._num_layers)
        patch_config(self._model.config, patterns if layers else "exact")
