"""`calibrate`: measures which pattern each group of heads of a checkpoint can afford, and chooses them under a budget."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...hf.config import patch_config
from ...hf.patch import patch_model
from ...hf.registration import IMPLEMENTATION
from ...hf.rings import attached_ring
from ...hf.support import check_predicts_next
from ...hf.tensor_parallel import tensor_parallel_mesh
from ...hf.wrappers import whole_model
from ...plan.patterns import Pattern, as_pattern
from ...ring.ring import Ring
from ...transport.agreement import digest
from ..perplexity import check_token_rows, token_ids
from ..progress import progress_bar
from .choice import choose, squares_of
from .costs import BudgetOf, Cost
from .journal import calibration_journal
from .result import CalibratedText, Calibration
from .search import Groups, Search
from .texts import plain_text, retrieval_text, shortest_retrieval_text

logger = logging.getLogger(__name__)

#: The patterns that `calibrate` chooses among by default: windows with a few sinks, windows with many, since some heads read
#: the first tokens of a text as much as the last ones, and exact attention.
MENU = (
    *(f"window:{window}+4" for window in (64, 128, 256, 512, 1024)),
    *(f"window:{window}+128" for window in (256, 512, 1024, 2048)),
    "exact",
)

#: What a config says of how it was loaded, and of patterns, which a calibration sets itself.
_NOT_OF_THE_MODEL = (
    IMPLEMENTATION,
    "_name_or_path",
    "_attn_implementation",
    "attn_implementation",
    "transformers_version",
)
#: What decides which adapters of PEFT a layer computes with, and how much they count.
_OF_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
#: Integers of so many bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: The number of what a folder's files of measurements hold; it goes up when that changes.
_FORMAT = 4


def calibrate(
    model: PreTrainedModel,
    texts: Sequence[Tensor | Sequence[int]],
    budget: float = 0.25,
    menu: Sequence[Pattern | str] = MENU,
    ring: Ring | None = None,
    *,
    budget_of: BudgetOf = "flops",
    ranks: int | None = None,
    seq_len: int | None = None,
    retrieval: float = 0.1,
    refinements: int = 1,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> Calibration:
    """Chooses a pattern for each key/value head of each layer of a checkpoint, by what it would do to its predictions.

    One forward and backward pass of each text, under exact attention, scores every pattern in every group of heads, and each
    two of them together; a knapsack takes one pattern for each group under the budget. A second such pass, under the patterns
    chosen, corrects the scores, and the next choice is kept if forward passes show that it is nearer to exact attention.
    Nothing is trained. The model is left with the patterns that it had.

    The texts should be like those that the model will read, each as long as its rows: a pattern is not measured beyond them.

    Args:
        model: a causal language model.
        texts: the token ids [n] of each text, the same on every rank.
        budget: the share of exact attention's cost that the layers without a window of their own may take, in (0, 1].
        menu: the patterns to choose among, as `Pattern` or text.
        ring: the ranks over which texts are sharded; None for the ring that the model was patched with, if any.
        budget_of: what is counted as cost: "flops", the query-key pairs of a whole text; "cache_reads", the rows of the
            key/value cache that attention reads for the next token, which cost time in generation (the cache itself keeps
            all); or "bytes", the rows of keys and values that the ranks of a ring take from each other, where a slow link
            between them costs the time.
        ranks: of "bytes", those of the ring; None for the ring over which texts are sharded.
        seq_len: the tokens at which costs are counted; None for the longest text.
        retrieval: how much a text counts beside all others in which random tokens must be found again far back; it is made of
            the first one, and scored by the log-odds of its answers. With 1, its scores add up to as much as those of the
            others. With 0 there is no such text, and heads that retrieve may lose their keys, since plain text hardly shows
            them.
        refinements: how often the scores are corrected around the last choice. A correction helps texts like those given, and
            may harm others: give texts of every kind that the model will read, or take 0.
        seed: the number, of 0 or more, from which the tokens drawn in the first pass follow, and the retrieval text.
        folder: where measurements are written as they come; a run that was ended goes on from there, and ends with the same
            result. None keeps nothing.
        progress: whether a bar counts the layers of all passes; a file gets a line of it every half minute.

    Returns:
        The patterns, with scores and measured losses, the same on every rank.

    Raises:
        ValueError: on every rank, before anything is computed: no causal language model, a budget outside (0, 1] or below the
            cheapest patterns of the menu, a menu with less than two patterns or one of them twice, or with one for other
            numbers of heads, texts that are too short or have tokens that the model does not know, a folder with measurements
            of another calibration or that another process writes to, or ranks that differ.
        OSError: a folder that cannot be written to; the ranks but the first raise ValueError.
        NotImplementedError: a model that ring_dilated does not compute; a model all of whose layers have windows.

    Example:
        >>> texts = [torch.arange(1, 65), torch.arange(64, 0, -1)]
        >>> chosen = ra.calibrate(tiny_llama(), texts, budget=0.4, menu=["window:4+1", "window:16+1", "exact"])
        >>> len(chosen.layers), chosen.flop_share <= 0.4
        (2, True)
        >>> model = ra.patch_model(tiny_llama(), chosen)
    """
    inner = whole_model(model, "calibrate")
    served = ring or attached_ring(inner) or Ring.alone()
    with served.agreement("calibrate") as call:
        check_predicts_next(inner, "calibrate")
        _check_undivided(inner)
        patterns = _checked_menu(menu)
        rows = _checked_texts(inner, texts, retrieval)
        _check_numbers(budget, retrieval, refinements, seed)
        cost = _checked_cost(budget_of, ranks, served, seq_len, rows)
        _check_budget(patterns, budget, cost)
        settings = {
            "model": _stamp_of(inner),
            "dtype": str(inner.dtype),
            "menu": [str(pattern) for pattern in patterns],
            "format": _FORMAT,
        }
        costs = {"budget_of": cost.of, "ranks": cost.ranks, "seq_len": cost.seq_len}
        numbers = {"budget": budget, **costs, "retrieval": retrieval, "seed": seed}
        digests = [digest(row) for row in rows]
        for name, value in {**settings, **numbers, "refinements": refinements, "texts": digests}.items():
            call.same(name, value)
        call.same("whether there is a folder", folder is not None)
    plain = [plain_text(row, seed) for row in rows]
    answers = [retrieval_text(rows[0], seed)] if retrieval else []
    passes = 2 * len(plain) * (1 + refinements) + len(answers)  # Each choice is tried by forward passes.
    with (
        calibration_journal(None if folder is None else Path(folder), settings, served) as journal,
        _as_it_was(inner, served),
        _bar(inner, passes, served, progress) as bar,
    ):
        search = Search(inner, served, partial(_patch, inner), plain, answers, patterns, journal, bar)
        first = search.first_passes()
        _check_layers_of_model(inner, first.heads)
        groups = Groups.of(first.heads, patterns, budget, cost)
        harm: Any = 0.0
        for of_answers in first.of_answers:
            # By their weight, of what all patterns of the menu do harm one by one.
            squares = squares_of(of_answers).sum()
            harm = harm + retrieval * (squares_of(first.products).sum() / max(squares, 1e-300)) * of_answers
        products = first.products + harm
        best = search.tried(groups, choose(np.zeros_like(groups.costs, float), groups.costs, groups.budget, products))
        for _ in range(refinements):
            best = search.refined(groups, best, first.products, harm)
    logger.info("chose patterns whose predictions diverge from exact attention's by %.4f nats", best.divergence)
    return Calibration(
        layers=groups.patterns(best.chosen),
        num_hidden_layers=inner.config.get_text_config().num_hidden_layers,
        budget=budget,
        budget_of=cost.of,
        seq_len=cost.seq_len,
        ranks=cost.ranks,
        menu=patterns,
        scores={layer: tuple(map(tuple, x.tolist())) for layer, x in groups.by_layer(squares_of(products) / 2).items()},
        texts=tuple(
            CalibratedText(tokens=len(row), exact_nll=exact_nll, chosen_nll=nll)
            for row, exact_nll, nll in zip(rows, first.nlls, best.nlls)
        ),
        retrieval=retrieval,
        seed=seed,
    )


# ---- the model


def _stamp_of(model: PreTrainedModel) -> str:
    """Returns what tells a model from others: of each tensor the first numbers and the sum of its bits, config and adapters."""
    config = model.config.get_text_config()
    settings = {name: value for name, value in config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    # Buffers that are not saved follow from the config, and are rounded differently by different machines.
    tensors = {name: _stamp_of_tensor(x) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    # The weights of all adapters are among the tensors, whichever of them compute.
    adapters = [
        [name, *(str(getattr(layer, setting, None)) for setting in _OF_ADAPTERS)]
        for name, layer in model.named_modules()
        if hasattr(layer, "disable_adapters")
    ]
    return digest([tensors, json.dumps(settings, default=str), adapters])


def _stamp_of_tensor(x: Tensor) -> tuple[str, int]:
    """Returns a digest of the first numbers, and the sum of all numbers' bits, which no order of adding them changes."""
    bits = x.contiguous().view(_BITS[x.element_size()])
    return digest(x.flatten()[:256].float()), int(bits.sum(dtype=torch.int64))


@dataclass(frozen=True)
class _LayersOnly:
    layers: Mapping[int, Pattern]
    num_hidden_layers: int


def _patch(model: PreTrainedModel, layers: Mapping[int, Pattern]) -> None:
    """Sets patterns of layers, and exact attention in the others but for windows of their own."""
    count = model.config.get_text_config().num_hidden_layers
    patch_config(model.config, _LayersOnly(layers, count) if layers else "exact")


@contextmanager
def _as_it_was(model: PreTrainedModel, ring: Ring) -> Iterator[None]:
    """Gives a model its ring, for good, and afterwards the patterns that it had."""
    config = model.config.get_text_config()
    before = copy.deepcopy(getattr(config, IMPLEMENTATION, None))
    patch_model(model, ring=ring)
    try:
        yield
    finally:
        if before is None:
            patch_config(model.config, "exact")
            delattr(config, IMPLEMENTATION)
        else:
            setattr(config, IMPLEMENTATION, before)


def _bar(model: PreTrainedModel, passes: int, ring: Ring, progress: bool) -> Any:
    """Returns the bar that counts the layers of all passes."""
    layers = model.config.get_text_config().num_hidden_layers
    silent = not progress or ring.rank > 0
    return progress_bar("calibrate", total=passes * layers, unit="layer", silent=silent)


# ---- checks


def _checked_menu(menu: Any) -> tuple[Pattern, ...]:
    if isinstance(menu, (str, Pattern)) or not isinstance(menu, Sequence):
        raise ValueError(f"calibrate: menu must be a list of patterns, or their texts, got {menu!r}")
    patterns = [as_pattern(one, "calibrate: menu") for one in menu]
    if len(patterns) < 2:
        raise ValueError(
            f"calibrate: menu has {len(patterns)} pattern(s), and there is nothing to choose: name 2 or more"
        )
    for number, pattern in enumerate(patterns):
        if pattern.kv_heads:
            raise ValueError(
                f"calibrate: menu has {pattern}, which differs by heads: name the patterns of single heads, of which each head "
                f"is given one"
            )
        if pattern in patterns[:number]:
            raise ValueError(
                f"calibrate: menu has {pattern} twice, as numbers {patterns.index(pattern)} and {number} ({menu[number]!r}): "
                f"name each pattern once"
            )
    return tuple(patterns)


def _checked_texts(model: PreTrainedModel, texts: Any, retrieval: float) -> list[Tensor]:
    if isinstance(texts, (str, bytes, Mapping)) or not isinstance(texts, (Sequence, Tensor)) or not len(texts):
        raise ValueError(
            f"calibrate: texts must be a list of the token ids of one or more texts, got "
            f"{type(texts).__name__ if not isinstance(texts, Sequence) or texts else 'an empty one'}"
        )
    rows = [token_ids(f"text {number}", text, "calibrate") for number, text in enumerate(texts)]
    least = shortest_retrieval_text() if retrieval else 2
    for number, row in enumerate(rows):
        if row.dim() != 1:
            raise ValueError(f"calibrate: text {number} must be [tokens], got {list(row.shape)}: pass texts one by one")
        needed = least if number == 0 else 2
        if len(row) < needed:
            reason = (
                " for the retrieval text that is made of the first one (none with retrieval=0)" if needed > 2 else ""
            )
            raise ValueError(
                f"calibrate: text {number} has {len(row)} token(s), and {needed} or more are needed{reason}: name a longer text"
            )
        check_token_rows(model, row[None], torch.ones_like(row)[None], "calibrate")
    return rows


def _check_undivided(model: PreTrainedModel) -> None:
    mesh = tensor_parallel_mesh(model)
    if mesh is not None:
        raise ValueError(
            f"calibrate: tensor parallelism divides the heads among {mesh.size()} ranks, and each must have all: load the "
            f"model without it, and shard the texts with ring="
        )


def _check_numbers(budget: Any, retrieval: Any, refinements: Any, seed: Any) -> None:
    if not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 < budget <= 1:
        raise ValueError(
            f"calibrate: budget must be a share of exact attention's cost, above 0 and at most 1, got {budget!r}"
        )
    if not isinstance(retrieval, (int, float)) or not (math.isfinite(retrieval) and retrieval >= 0):
        raise ValueError(f"calibrate: retrieval must be a weight of at least 0, got {retrieval!r}")
    for name, value in {"refinements": refinements, "seed": seed}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"calibrate: {name} must be a whole number of at least 0, got {value!r}")


def _checked_cost(budget_of: Any, ranks: Any, ring: Ring, seq_len: Any, rows: Sequence[Tensor]) -> Cost:
    if budget_of not in get_args(BudgetOf):
        raise ValueError(f"calibrate: budget_of must be one of {', '.join(get_args(BudgetOf))}, got {budget_of!r}")
    if budget_of == "bytes":
        ranks = ring.world_size if ranks is None else ranks
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2:
            raise ValueError(
                f"calibrate: the bytes of a ring of ranks={ranks!r} cannot be a budget, since one rank moves none: name the "
                f"ranks, 2 or more, of the ring that the model is for"
            )
    elif ranks is not None:
        raise ValueError(
            f"calibrate: ranks={ranks!r} counts for budget_of='bytes' alone, got budget_of={budget_of!r}: leave it out"
        )
    if seq_len is None:
        return Cost(budget_of, max(map(len, rows)), ranks)
    if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 2:
        raise ValueError(f"calibrate: seq_len must be a number of tokens of at least 2, got {seq_len!r}")
    return Cost(budget_of, seq_len, ranks)


def _check_budget(menu: Sequence[Pattern], budget: float, cost: Cost) -> None:
    exact = cost.of_exact()
    costs = {pattern: cost.of_pattern(pattern, 0, 1) for pattern in menu}
    cheapest = min(menu, key=costs.__getitem__)
    if costs[cheapest] > budget * exact:
        raise ValueError(
            f"calibrate: the cheapest pattern of the menu, {cheapest}, takes {costs[cheapest]} / {exact} = "
            f"{costs[cheapest] / exact:.4f} of exact attention's {cost.of} at {cost.seq_len} tokens, and the budget is "
            f"{budget}: raise the budget, or add a cheaper pattern to the menu"
        )


def _check_layers_of_model(model: PreTrainedModel, heads: Mapping[int, int]) -> None:
    if not heads:
        raise NotImplementedError(
            f"calibrate: every layer of {type(model).__name__} has a window of its own, and there is nothing to choose: set "
            f"patterns with ra.patch_config(config, pattern, layers=...)"
        )
