"""`calibrate`: measures which pattern each group of heads of a checkpoint can afford, and chooses them under a budget."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...hf.model.config import settings_of
from ...hf.model.support import check_predicts_next, why_no_pattern
from ...hf.model.wrappers import attachment_of, tensor_parallel_mesh, whole_model
from ...hf.names import IMPLEMENTATION
from ...hf.patch import patch_model
from ...plan.branches import check_choice, check_count
from ...plan.patterns import Pattern, as_pattern
from ...ring.ring import Ring
from ...transport.agreement import digest
from ..perplexity import check_token_rows, token_ids
from ..progress import progress_bar
from ..whole_files import own_folder
from .choice import BudgetOf, Cost, squares_of
from .result import CalibratedText, Calibration
from .search import Search, tokens_of_bar
from .texts import SHORTEST_RETRIEVAL_TEXT, plain_text, retrieval_text

logger = logging.getLogger(__name__)

#: The default menu: windows with few sinks, windows with many, because some heads read the beginning of a text as much as its
#: end, and exact attention.
MENU = (
    *(f"window:{window}+4" for window in (64, 128, 256, 512, 1024)),
    *(f"window:{window}+128" for window in (256, 512, 1024, 2048)),
    "exact",
)

#: The entries of a config that do not change what the model computes under a given pattern.
_NOT_OF_THE_MODEL = {
    IMPLEMENTATION, "_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation"
}  # fmt: skip
#: The attributes of PEFT's layers that decide which adapters compute, and how much they count.
_OF_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
#: Integers by their bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def calibrate(
    model: PreTrainedModel,
    texts: Sequence[Tensor | Sequence[int]],
    budget: float = 0.25,
    menu: Sequence[Pattern | str] = MENU,
    ring: Ring | None = None,
    *,
    budget_of: BudgetOf = "flops",
    ranks: int | None = None,
    retrieval: float = 0.1,
    refinements: int = 1,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> Calibration:
    """Chooses a pattern for each key/value head of each layer of a checkpoint, by its effect on the predictions.

    One forward and backward pass of each text, under exact attention, scores every pattern in every group of heads, and every
    two of them together. A knapsack takes one pattern for each group under the budget. A second such pass, under the chosen
    patterns, corrects the scores. The next choice is kept if forward passes show that it is nearer to exact attention. Nothing
    is trained, and the model keeps the patterns that it had.

    Take texts like those that the model will read, each as long as its rows: a pattern is not measured beyond them.

    Args:
        model: a causal language model.
        texts: the token ids [n] of each text, the same on every rank.
        budget: the share of exact attention's cost, in (0, 1], for all layers without a window in the model.
        menu: the patterns to choose among, as `Pattern` or text. Windows that cover all texts are left out beside exact.
        ring: the ranks over which texts are sharded; None for the ring that the model was patched with, if any.
        budget_of: the cost, counted for the longest text. "flops" counts its query-key pairs. "cache_reads" counts the rows of
            the key/value cache that attention reads for the next token. "cache" counts the rows that `ra.PatternCache` keeps.
            "bytes" counts the rows of keys and values that ranks of a ring receive from each other.
        ranks: the size of the ring for "bytes"; None for the ring over which texts are sharded.
        retrieval: the weight of a text, made of the first one, in which random tokens must be found again far back. With 1,
            its scores add up to as much as the scores of all other texts. With 0, heads that retrieve may lose their keys.
        refinements: how often the scores are corrected around the last choice. A correction may harm other kinds of texts.
        seed: decides the tokens drawn in the first pass, and the retrieval text.
        folder: for measurements. A run that was killed continues from there, with the same result; another budget reuses them.
        progress: whether a bar counts the tokens of all passes, layer by layer; a file gets a line of it every half minute.

    Returns:
        The patterns, with scores and measured losses, the same on every rank.

    Raises:
        ValueError: on every rank, before anything is computed: no causal language model; a wrong budget, menu or text; a folder
            that another process writes to; ranks that differ. Later: a damaged file in the folder.
        OSError: on rank 0, a folder that cannot be written to; the other ranks raise ValueError.
        NotImplementedError: a model that ring_dilated does not compute; a model whose layers all have windows.

    Example:
        >>> texts = [torch.arange(1, 65), torch.arange(64, 0, -1)]
        >>> chosen = ra.calibrate(tiny_llama(), texts, budget=0.4, menu=["window:4+1", "window:16+1", "exact"])
        >>> len(chosen.layers), chosen.flop_share <= 0.4
        (2, True)
        >>> model = ra.patch_model(tiny_llama(), chosen)
    """
    inner = whole_model(model, "calibrate")
    served = ring or attachment_of(inner).ring or Ring.alone()
    with served.agreement("calibrate") as call:
        check_predicts_next(inner, "calibrate")
        if refused := why_no_pattern(inner.config.get_text_config()):
            raise NotImplementedError(f"calibrate: {type(inner).__name__} computes no patterns: {refused}")
        mesh = tensor_parallel_mesh(inner)
        if mesh is not None:
            raise ValueError(
                f"calibrate: each rank must have all heads, but tensor parallelism divides them among {mesh.size()} ranks: "
                f"load the model without it, and shard texts with ring="
            )
        rows = _checked_texts(inner, texts, retrieval)
        _check_numbers(budget, retrieval, refinements, seed)
        patterns, cost = menu_and_cost(menu, budget_of, ranks, served, max(map(len, rows)), budget)
        settings = {"model": _stamp_of(inner), "dtype": str(inner.dtype), "menu": [*map(str, patterns)]}
        numbers = {"budget": budget, "cost": cost, "retrieval": retrieval, "refinements": refinements, "seed": seed}
        numbers |= {"texts": [*map(digest, rows)], "whether there is a folder": folder is not None}
        call.values = settings | numbers
    plain = [plain_text(row, seed) for row in rows]
    answers = [retrieval_text(rows[0], seed)] if retrieval else []
    written_to = None if folder is None else Path(folder)
    tokens = tokens_of_bar(plain, answers, refinements)
    bar = progress_bar("calibrate", tokens, silent=not progress or served.rank > 0)
    with _measuring(inner, served, written_to), bar:
        search = Search(inner, served, plain, patterns, written_to, settings, bar)
        best = search.first_choice(answers, retrieval, cost, budget)
        for _ in range(refinements):
            best = search.refined(best)
    logger.info("chose patterns whose predictions diverge from exact attention's by %.4f nats", best.divergence)
    scores = search.by_layer(squares_of(search.products + search.harm) / 2)
    return Calibration(
        layers=search.patterns(best.chosen),
        num_hidden_layers=inner.config.get_text_config().num_hidden_layers,
        budget=budget,
        budget_of=cost.of,
        seq_len=cost.seq_len,
        ranks=cost.ranks,
        menu=patterns,
        scores={layer: tuple(map(tuple, heads.tolist())) for layer, heads in scores.items()},
        texts=tuple(CalibratedText(len(row), *nlls) for row, *nlls in zip(rows, search.nlls, best.nlls)),
        retrieval=retrieval,
        seed=seed,
    )


# ---- the model


def _stamp_of(model: PreTrainedModel) -> str:
    """Returns a checksum that differs between models: of their tensors, config and adapters."""
    config = model.config.get_text_config().to_dict()
    settings = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    # A tensor is known by its first numbers, and by the sum of the bits of all numbers, which any order of adding gives.
    tensors = {}
    for name, x in model.state_dict().items():
        if isinstance(x, Tensor):
            bits = x.contiguous().view(_INTEGERS[x.element_size()])
            tensors[name] = digest(x.flatten()[:256].float()), int(bits.sum(dtype=torch.int64))
    # The tensors contain the weights of all adapters, whether they compute or not.
    layers = ((name, layer) for name, layer in model.named_modules() if hasattr(layer, "disable_adapters"))
    adapters = [[name, *(str(getattr(layer, entry, None)) for entry in _OF_ADAPTERS)] for name, layer in layers]
    return digest([tensors, json.dumps(settings, default=str), adapters])


@contextmanager
def _measuring(model: PreTrainedModel, ring: Ring, folder: Path | None) -> Iterator[None]:
    """Keeps other processes from the folder; gives a model its ring, for good, and afterwards the patterns that it had."""
    config = model.config.get_text_config()
    before = settings_of(config)
    with ExitStack() as stack:
        if folder is not None:
            with ring.agreement("opening the folder of a calibration"):
                if ring.rank == 0:
                    stack.enter_context(own_folder(folder))
        patch_model(model, ring=ring)
        try:
            yield
        finally:
            vars(config).pop(IMPLEMENTATION, None)
            if before is not None:
                setattr(config, IMPLEMENTATION, before)


# ---- checks


def menu_and_cost(
    menu: Any, budget_of: Any, ranks: Any, ring: Ring, seq_len: int, budget: float
) -> tuple[tuple[Pattern, ...], Cost]:
    """Returns the patterns to choose from and their cost; in rows of `seq_len` tokens, exact attention has no equal in them."""
    check_choice("calibrate", "budget_of", budget_of, get_args(BudgetOf))
    if budget_of == "bytes":
        ranks = ring.world_size if ranks is None else ranks
        check_count("calibrate: a ring that moves bytes", "ranks", ranks, least=2)
    elif ranks is not None:
        raise ValueError(f"calibrate: ranks={ranks!r} needs budget_of='bytes', got {budget_of!r}: leave it out")
    if isinstance(menu, (str, Pattern)) or not isinstance(menu, Sequence):
        raise ValueError(f"calibrate: menu must be a list of patterns, or their texts, got {menu!r}")
    patterns = [as_pattern(pattern, "calibrate: menu") for pattern in menu]
    for pattern in patterns:
        if pattern.kv_heads:
            raise ValueError(f"calibrate: menu has {pattern}, which differs by heads: name patterns of single heads")
        if patterns.count(pattern) > 1:
            raise ValueError(f"calibrate: menu has {pattern} twice: name each pattern once")
    if (exact := Pattern.exact()) in patterns:
        patterns = [x for x in patterns if x == exact or x.flop_share(seq_len) != 1]
    if len(patterns) < 2:
        got = f"got {len(patterns)} that differ in rows of {seq_len} tokens"
        raise ValueError(f"calibrate: menu must have 2 or more patterns to choose from, {got}")
    cost = Cost(budget_of, seq_len, ranks)
    of_exact, (least, cheapest) = cost.of_exact(), min((cost.of_pattern(x, 0, 1), str(x)) for x in patterns)
    if least > budget * of_exact:
        raise ValueError(
            f"calibrate: budget={budget} is below the cheapest pattern of the menu, {cheapest}: {least} / {of_exact} = "
            f"{least / of_exact:.4f} of exact attention's {budget_of}: raise it, or add a cheaper pattern"
        )
    return tuple(patterns), cost


def _checked_texts(model: PreTrainedModel, texts: Any, retrieval: float) -> list[Tensor]:
    if isinstance(texts, (str, bytes)) or not isinstance(texts, (Sequence, Tensor)) or not len(texts):
        got = type(texts).__name__
        raise ValueError(f"calibrate: texts must be a list with the token ids of one or more texts, got {got}")
    rows = [token_ids(f"text {number}", text, "calibrate") for number, text in enumerate(texts)]
    for number, row in enumerate(rows):
        if row.dim() != 1:
            raise ValueError(f"calibrate: text {number} must be [tokens], got {list(row.shape)}: pass texts one by one")
        least = SHORTEST_RETRIEVAL_TEXT if retrieval and number == 0 else 2
        if len(row) < least:
            remedy = "take a longer text" + (", or retrieval=0" if least > 2 else "")
            raise ValueError(f"calibrate: text {number} must have {least} or more tokens, got {len(row)}: {remedy}")
        check_token_rows(model, row[None], torch.ones_like(row)[None], "calibrate")
    return rows


def _check_numbers(budget: Any, retrieval: Any, refinements: Any, seed: Any) -> None:
    if not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 < budget <= 1:
        raise ValueError(f"calibrate: budget must be a share above 0 and at most 1, got {budget!r}")
    if not isinstance(retrieval, (int, float)) or not (math.isfinite(retrieval) and retrieval >= 0):
        raise ValueError(f"calibrate: retrieval must be a weight of at least 0, got {retrieval!r}")
    check_count("calibrate", "refinements", refinements, least=0)
    check_count("calibrate", "seed", seed, least=0)
