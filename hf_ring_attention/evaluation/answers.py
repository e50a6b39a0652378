"""A model's answers to questions: generated greedily, or the likelihoods of candidates, after one pass over each prompt.

The prompt is read by `prefill`, sharded over the model's ring; the cache then serves every candidate and the generation.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..hf.cache import ShardedCache, cache_argument
from ..hf.config import fewest_last_of
from ..hf.generation import prefill
from ..hf.positions import first_position
from ..hf.wrappers import evaluating, runner_of
from .finite import check_finite
from .questions import Question

#: The ways to score an answer: the text that is generated, and the likelihood of the right one among candidates.
SCORES = ("generated", "likelihood")


@dataclass(frozen=True)
class ModelAnswer:
    """What a model answers to a question.

    Attributes:
        text: the generated text; None where none was asked for.
        losses: the nll of each candidate, in nats; None where they were not asked for.
        reading_seconds: the wall time of reading the prompts of a batch, over their number.
        seconds: that of all there was to do, likewise.
    """

    text: str | None
    losses: tuple[float, ...] | None
    reading_seconds: float
    seconds: float


@torch.no_grad()
def answer_questions(
    model: PreTrainedModel, tokenizer: Any, questions: Sequence[Question], scores: Sequence[str] = SCORES
) -> list[ModelAnswer]:
    """Returns the answers to questions, which are read as one batch, padded on the left.

    Args:
        model: a model with a ring or without, as of `patch_model`; every rank asks the same questions.
        scores: some of `SCORES`.

    Raises:
        ValueError: questions of which the prompts differ in length, for a model that takes no positions; predictions that are
            infinite or NaN; or what `check_answers` refuses.
    """
    check_answers(model)
    start = time.perf_counter()
    longest = max(len(question.prompt) for question in questions)
    filler = _filler(model, tokenizer)
    rows = [[filler] * (longest - len(question.prompt)) + list(question.prompt) for question in questions]
    ids = torch.tensor(rows, device=model.device)
    mask = torch.ones_like(ids)
    for row, question in enumerate(questions):
        mask[row, : longest - len(question.prompt)] = 0
    with evaluating(model):
        # The last token of a prompt is left for the first step, which predicts what follows it.
        cache = prefill(model, ids[:, :-1], None if bool(mask.all()) else mask[:, :-1])
        read = time.perf_counter()
        losses = _candidate_losses(model, cache, ids, mask, questions, filler) if "likelihood" in scores else None
        texts = _generated(model, tokenizer, cache, ids, mask, questions) if "generated" in scores else None
    each = 1 / len(questions)
    return [
        ModelAnswer(
            text=None if texts is None else texts[row],
            losses=None if losses is None else tuple(losses[row]),
            reading_seconds=(read - start) * each,
            seconds=(time.perf_counter() - start) * each,
        )
        for row in range(len(questions))
    ]


def check_answers(model: PreTrainedModel) -> None:
    """Refuses models that number tokens differently in a forward pass and in `generate`, so that answers are not comparable.

    Raises:
        ValueError: such a model: RoBERTa and its kin begin behind the number of padding, and `generate` begins with 0.
    """
    first = first_position(runner_of(model))
    if first:
        raise ValueError(
            f"{type(model).__name__} has position {first} for the first token of a row, and Transformers' generate gives it "
            f"position 0, so that generated answers would not be the model's: ask for perplexity alone"
        )


def _candidate_losses(
    model: PreTrainedModel, cache: ShardedCache, ids: Tensor, mask: Tensor, questions: Sequence[Question], filler: int
) -> list[list[float]]:
    """Returns the nll of the candidates of each question, and leaves the cache as it was."""
    held, at_once = cache.get_seq_length(), fewest_last_of(model.config.get_text_config())
    losses: list[list[float]] = [[] for _ in questions]
    for number in range(max(len(question.candidate_ids) for question in questions)):
        # A question with fewer candidates repeats its last one, which is not counted.
        of_rows = [question.candidate_ids[min(number, len(question.candidate_ids) - 1)] for question in questions]
        most = max(map(len, of_rows))
        # Behind shorter candidates stands what is not scored, and what no earlier token sees.
        padded = torch.tensor([[*row, *[filler] * (most - len(row))] for row in of_rows], device=ids.device)
        step = torch.cat([ids[:, -1:], padded[:, :-1]], 1)
        seen = F.pad(mask, (0, most - 1), value=1)
        positions = (seen.cumsum(-1) - 1).clamp_min(0)
        parts = []
        # Under a `Last`, only so many tokens at a time would each be the last of the row if they came one by one.
        for first in range(0, most, at_once or most):
            part = slice(held + first, held + min(most, first + (at_once or most)))
            arguments: dict[str, Any] = {"attention_mask": seen[:, : part.stop]}
            if "position_ids" in inspect.signature(model.forward).parameters:
                arguments["position_ids"] = positions[:, part]
            piece = step[:, part.start - held : part.stop - held]
            parts.append(model(piece, use_cache=True, **cache_argument(cache), **arguments).logits)
        logits = torch.cat(parts, 1)
        nll = F.cross_entropy(logits.float().transpose(1, 2), padded, reduction="none").cpu()
        for row, tokens in enumerate(of_rows):
            if number < len(questions[row].candidate_ids):
                check_finite(nll[row, : len(tokens)], model, "answer_questions")
                losses[row].append(float(nll[row, : len(tokens)].double().sum()))
        cache.crop(held - cache.get_seq_length())
    return losses


def _generated(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: ShardedCache,
    ids: Tensor,
    mask: Tensor,
    questions: Sequence[Question],
) -> list[str]:
    """Returns the texts that follow the prompts greedily; settings that a checkpoint has for other ways do not count."""
    own: GenerationConfig = model.generation_config
    end = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max(question.task.new_tokens for question in questions),
        eos_token_id=end,
        pad_token_id=_filler(model, tokenizer),
    )
    generate: Any = model.generate
    # What is not set in a config that is passed would come from the model's own one, penalties among it.
    model.generation_config = settings
    try:
        checked = LogitsProcessorList([_FiniteLogits(model)])
        output = generate(ids, attention_mask=mask, logits_processor=checked, **cache_argument(cache))
    finally:
        model.generation_config = own
    new = output[:, ids.shape[1] :]
    texts: list[str] = tokenizer.batch_decode(new, skip_special_tokens=True)
    return texts


def _filler(model: PreTrainedModel, tokenizer: Any) -> int:
    """Returns the token that stands where there is none; nothing sees it, but the model must have an embedding of it."""
    table = model.get_input_embeddings()
    tokens = table.num_embeddings if isinstance(table, nn.Embedding) else math.inf
    # A token for padding that was added to a tokenizer alone has none.
    known = (x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None and x < tokens)
    return next(known, 0)


class _FiniteLogits(LogitsProcessor):
    """Refuses predictions that are no numbers, of which the likeliest token would be any."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        check_finite(scores.logsumexp(-1), self._model, "answer_questions")
        return scores
