"""`Calibration`: the pattern of each layer and key/value head that was chosen for a checkpoint, and the figures behind it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from ...plan.branches import LARGEST, check_count
from ...plan.patterns import Pattern
from ..whole_files import write_whole
from .costs import BudgetOf, Cost

#: The version of what `to_dict` writes.
FORMAT = 3
#: No model has more layers.
_MOST_LAYERS = 65536


@dataclass(frozen=True)
class CalibratedText:
    """What passes of a text measured; `nll` is the mean negative log-likelihood of its tokens, in nats.

    Attributes:
        tokens: how many tokens it has.
        exact_nll: under exact attention.
        chosen_nll: under the patterns that were chosen.
    """

    tokens: int
    exact_nll: float
    chosen_nll: float

    @property
    def perplexity_ratio(self) -> float:
        """The perplexity under the patterns that were chosen, over exact attention's."""
        return math.exp(self.chosen_nll - self.exact_nll)


@dataclass(frozen=True)
class Calibration:
    """A pattern for each layer, which may differ by key/value head, as `calibrate` chose it for one checkpoint.

    `ra.patch_model(model, calibration)` and `ra.patch_config(config, calibration)` set it; it is saved with the config.

    Attributes:
        layers: the pattern of each layer that has no window of its own.
        num_hidden_layers: how many layers the model has in all.
        budget: the share of exact attention's cost that was allowed.
        budget_of: what was counted as cost: "flops", "cache_reads" or "bytes".
        seq_len: the number of tokens at which costs were counted.
        ranks: of "bytes", the ranks of the ring whose bytes were counted.
        menu: the patterns that could be chosen.
        scores: for each layer [key/value heads][len(menu)]: how far that pattern in that head alone is expected to take the
            predictions from exact attention's, as a mean divergence in nats, with the weighted scores of retrieval.
        texts: the texts that the patterns were chosen by.
        retrieval: the weight of retrieval in the scores, as in `calibrate`.
        seed: the number that the retrieval texts follow from.

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
        if not self.layers or {*self.layers} != {*self.scores}:
            raise ValueError(
                f"Calibration: a pattern for each layer that has scores, {sorted(self.scores)}, was expected, got patterns for "
                f"{sorted(self.layers)}: calibrate again"
            )
        if not all(0 <= layer < self.num_hidden_layers for layer in self.layers):
            raise ValueError(
                f"Calibration: layers of 0..{self.num_hidden_layers - 1} were expected, got {sorted(self.layers)}"
            )
        for layer, pattern in self.layers.items():
            pattern.check_heads(len(self.scores[layer]), f"layer {layer}")

    @property
    def flop_share(self) -> float:
        """The FLOPs of attention in these layers, as a share of exact attention's, for one document of `seq_len` tokens."""
        return self.share("flops")

    def share(self, of: BudgetOf, seq_len: int | None = None, ranks: int | None = None) -> float:
        """Returns what the patterns cost in these layers, as a share of what exact attention costs.

        Args:
            of: "flops"; "cache_reads": the rows of the key/value cache that are read for the next token; or "bytes": those
                of keys and values that the ranks of a ring take from each other.
            seq_len: tokens of a document; None for those of the calibration.
            ranks: of "bytes", those of the ring; None for those of the calibration.

        Raises:
            ValueError: the bytes of no ring of two ranks or more.
        """
        ranks = ranks or self.ranks
        if of == "bytes" and (ranks is None or ranks < 2):
            raise ValueError(f"Calibration.share: a ring that moves bytes has 2 or more ranks, got ranks={ranks}")
        cost = Cost(of, seq_len or self.seq_len, ranks)
        costs = [
            cost.of_pattern(pattern, head, len(heads))
            for heads in self.of_heads().values()
            for head, pattern in enumerate(heads)
        ]
        return sum(costs) / (len(costs) * cost.of_exact())

    def share_of(self, pattern: Pattern) -> float:
        """Returns the FLOPs of a pattern in one head, as a share of exact attention's, at `seq_len` tokens."""
        cost = Cost("flops", self.seq_len)
        return cost.of_pattern(pattern, 0, 1) / cost.of_exact()

    def of_heads(self) -> dict[int, tuple[Pattern, ...]]:
        """Returns the pattern of each key/value head of each layer."""
        return {
            layer: tuple(pattern.of_kv_head(head) for head in range(len(self.scores[layer])))
            for layer, pattern in self.layers.items()
        }

    @property
    def texts_of_layers(self) -> dict[str, str]:
        """The texts of the patterns of layers, by their numbers."""
        return {str(layer): str(pattern) for layer, pattern in self.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns the calibration in plain JSON types, patterns as their texts; `from_dict` reads it back."""
        return {
            "format": FORMAT,
            "budget": self.budget,
            "budget_of": self.budget_of,
            "seq_len": self.seq_len,
            "ranks": self.ranks,
            "retrieval": self.retrieval,
            "seed": self.seed,
            "flop_share": self.flop_share,
            "menu": [str(pattern) for pattern in self.menu],
            "layers": self.texts_of_layers,
            "num_hidden_layers": self.num_hidden_layers,
            "scores": {str(layer): [list(head) for head in heads] for layer, heads in self.scores.items()},
            "texts": [{field.name: getattr(text, field.name) for field in fields(text)} for text in self.texts],
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Calibration:
        """Returns the calibration that `to_dict` wrote.

        Raises:
            ValueError: something else.
        """
        try:
            if d["format"] != FORMAT:
                raise ValueError(f"format {FORMAT} was expected, got {d['format']!r}")
            if d["budget_of"] not in get_args(BudgetOf):
                raise ValueError(f"budget_of must be one of {', '.join(get_args(BudgetOf))}, got {d['budget_of']!r}")
            return cls(
                layers={int(layer): Pattern.parse(text) for layer, text in d["layers"].items()},
                num_hidden_layers=_count(d, "num_hidden_layers", most=_MOST_LAYERS),
                budget=_finite(d["budget"]),
                budget_of=d["budget_of"],
                seq_len=_count(d, "seq_len"),
                ranks=None if d["ranks"] is None else _count(d, "ranks"),
                menu=tuple(Pattern.parse(text) for text in d["menu"]),
                scores={int(layer): _rows_of_numbers(heads) for layer, heads in d["scores"].items()},
                texts=tuple(map(_text_of, d["texts"])),
                retrieval=_finite(d["retrieval"]),
                seed=_count(d, "seed", least=0),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no calibration that Calibration.to_dict wrote: {error!r}") from error

    def save(self, file: str | Path) -> None:
        """Writes the calibration to a JSON file."""
        write_whole(Path(file), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> Calibration:
        """Reads the file that `save` wrote.

        Raises:
            ValueError: a file with something else.
        """
        try:
            written = json.loads(Path(file).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is no JSON file: {error}") from error
        return cls.from_dict(written)


def load_pattern(text: str) -> Pattern | Calibration:
    """Returns the pattern of a text, or the calibration in the file that it names, which ends in .json.

    Raises:
        ValueError: the text of no pattern, or a file with something else.
        OSError: a file that cannot be read.
    """
    return Calibration.load(text) if text.endswith(".json") else Pattern.parse(text)


def _rows_of_numbers(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(_finite, row)) for row in rows)


def _text_of(d: Mapping[str, Any]) -> CalibratedText:
    return CalibratedText(_count(d, "tokens"), _finite(d["exact_nll"]), _finite(d["chosen_nll"]))


def _count(d: Mapping[str, Any], name: str, least: int = 1, most: int = LARGEST) -> int:
    check_count("Calibration", name, d[name], least, most)
    return int(d[name])


def _finite(value: Any) -> float:
    """Returns a number of a file; JSON can contain NaN and Infinity."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"Calibration: a finite number was expected, got {value!r:.40}")
    return float(value)
