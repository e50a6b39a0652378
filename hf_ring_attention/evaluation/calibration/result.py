"""`Calibration`: the pattern of each layer and key/value head that was chosen for a checkpoint, with the figures behind it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ...plan.branches import LARGEST, check_choice, check_count
from ...plan.patterns import Pattern
from ..whole_files import write_whole
from .choice import BudgetOf, Cost

#: The version of what `to_dict` writes.
FORMAT = 3
#: No model has more layers.
_MOST_LAYERS = 65536
#: The attributes that JSON has as they are.
_PLAIN = ("budget", "budget_of", "seq_len", "ranks", "retrieval", "seed", "num_hidden_layers")


@dataclass(frozen=True)
class CalibratedText:
    """A text, with the mean negative log-likelihood of its tokens under exact attention and the chosen patterns, in nats."""

    tokens: int
    exact_nll: float
    chosen_nll: float

    @property
    def perplexity_ratio(self) -> float:
        """The perplexity under the chosen patterns, divided by the perplexity under exact attention."""
        return math.exp(self.chosen_nll - self.exact_nll)


@dataclass(frozen=True)
class Calibration:
    """A pattern for each layer, which may differ by key/value head, as `calibrate` chose it for one checkpoint.

    `ra.patch_model(model, calibration)` and `ra.patch_config(config, calibration)` set it, and the config saves it.

    Attributes:
        layers: the pattern of each layer without a window in the model.
        num_hidden_layers: the number of all layers of the model.
        seq_len: the number of tokens at which costs were counted.
        budget, budget_of, ranks, menu, retrieval, seed: as in `calibrate`.
        scores: for each layer [key/value heads][len(menu)]: the mean divergence in nats from exact attention's predictions
            that this pattern in this head alone is expected to cause, with the weighted scores of retrieval.
        texts: the texts that the patterns were chosen by.

    Example:
        >>> chosen = ra.calibrate(tiny_llama(), [torch.arange(1, 65)], budget=0.5, menu=["window:8", "window:16", "exact"])
        >>> chosen.flop_share <= 0.5
        True
        >>> model = ra.patch_model(tiny_llama(), chosen)
        >>> ra.Calibration.from_dict(chosen.to_dict()) == chosen
        True
    """

    layers: Mapping[int, Pattern]
    num_hidden_layers: int
    budget: float
    budget_of: BudgetOf
    seq_len: int
    ranks: int | None
    menu: tuple[Pattern, ...]
    scores: Mapping[int, tuple[tuple[float, ...], ...]]
    texts: tuple[CalibratedText, ...]
    retrieval: float
    seed: int

    def __post_init__(self) -> None:
        layers, scored = sorted(self.layers), sorted(self.scores)
        if not layers or layers != scored:
            raise ValueError(
                f"Calibration: expected a pattern for each layer with scores, {scored}, got patterns for {layers}"
            )
        if not all(0 <= layer < self.num_hidden_layers for layer in layers):
            raise ValueError(f"Calibration: expected layers from 0 to {self.num_hidden_layers - 1}, got {layers}")
        for layer, pattern in self.layers.items():
            pattern.check_heads(len(self.scores[layer]), f"layer {layer}")

    @property
    def flop_share(self) -> float:
        """The FLOPs of attention in these layers, as a share of exact attention's, for one document of `seq_len` tokens."""
        return self.share("flops")

    def share(self, of: BudgetOf, seq_len: int | None = None) -> float:
        """Returns the cost of the patterns in these layers, as a share of the cost of exact attention.

        Args:
            of: the cost, as `budget_of` of `calibrate`; "bytes" of a calibration without ranks is a ValueError.
            seq_len: tokens of a document; None for the calibration's own.
        """
        if of == "bytes":
            check_count("Calibration.share: a ring that moves bytes", "ranks", self.ranks, least=2)
        cost, layers = Cost(of, seq_len or self.seq_len, self.ranks), self.of_heads().values()
        costs = [cost.of_pattern(x, head, len(heads)) for heads in layers for head, x in enumerate(heads)]
        return sum(costs) / (len(costs) * cost.of_exact())

    def share_of(self, pattern: Pattern, of: Literal["flops", "cache"] = "flops") -> float:
        """Returns the FLOPs or the cache of a pattern in one head, as a share of exact attention's, at `seq_len` tokens."""
        cost = Cost(of, self.seq_len)
        return cost.of_pattern(pattern, 0, 1) / cost.of_exact()

    def of_heads(self) -> dict[int, tuple[Pattern, ...]]:
        """Returns the pattern of each key/value head of each layer."""
        heads = {layer: range(len(scores)) for layer, scores in self.scores.items()}
        return {layer: tuple(map(pattern.of_kv_head, heads[layer])) for layer, pattern in self.layers.items()}

    @property
    def texts_of_layers(self) -> dict[str, str]:
        """The text of each layer's pattern, by the number of the layer."""
        return {str(layer): str(pattern) for layer, pattern in self.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns the calibration in plain JSON types, patterns as their texts; `from_dict` reads it back."""
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in _PLAIN},
            "flop_share": self.flop_share,
            "menu": [str(pattern) for pattern in self.menu],
            "layers": self.texts_of_layers,
            "scores": {str(layer): [list(head) for head in heads] for layer, heads in self.scores.items()},
            "texts": [asdict(text) for text in self.texts],
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Calibration:
        """Returns the calibration that `to_dict` wrote; anything else is a ValueError."""
        try:
            if d["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {d['format']!r}")
            check_choice("Calibration", "budget_of", d["budget_of"], get_args(BudgetOf))
            return cls(
                layers={int(layer): Pattern.parse(text) for layer, text in d["layers"].items()},
                num_hidden_layers=_count(d, "num_hidden_layers", most=_MOST_LAYERS),
                budget=_finite(d["budget"]),
                budget_of=d["budget_of"],
                seq_len=_count(d, "seq_len"),
                ranks=None if d["ranks"] is None else _count(d, "ranks"),
                menu=tuple(Pattern.parse(text) for text in d["menu"]),
                scores={int(n): tuple(tuple(map(_finite, head)) for head in heads) for n, heads in d["scores"].items()},
                texts=tuple(
                    CalibratedText(_count(text, "tokens"), _finite(text["exact_nll"]), _finite(text["chosen_nll"]))
                    for text in d["texts"]
                ),
                retrieval=_finite(d["retrieval"]),
                seed=_count(d, "seed", least=0),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"expected a calibration that Calibration.to_dict wrote: {error!r}") from error

    def save(self, file: str | Path) -> None:
        """Writes the calibration to a JSON file."""
        write_whole(Path(file), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> Calibration:
        """Reads the file that `save` wrote; anything else is a ValueError."""
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            remedy = "name the calibration.json in the --output of hf-ring-attention calibrate"
            raise FileNotFoundError(f"there is no file {str(file)!r} (from {Path.cwd()}): {remedy}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a JSON file: {error}") from error
        return cls.from_dict(content)


def load_pattern(text: str) -> Pattern | Calibration:
    """Returns the pattern that a text describes; for a name that ends in .json, the calibration in that file."""
    return Calibration.load(text) if text.endswith(".json") else Pattern.parse(text)


def _count(d: Mapping[str, Any], name: str, least: int = 1, most: int = LARGEST) -> int:
    check_count("Calibration", name, d[name], least, most)
    return int(d[name])


def _finite(value: Any) -> float:
    """Returns a number of a file; JSON can contain NaN and Infinity."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"Calibration: expected a finite number, got {value!r:.40}")
    return float(value)
