"""Runs an evaluation: jobs are dealt to rings, and each job's records are in the journal before the next one begins."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.config import patch_config
from ..hf.patch import patch_model
from ..hf.registration import IMPLEMENTATION
from ..ring.ring import Ring
from ..transport.agreement import digest
from .answers import answer_questions, check_answers
from .inputs import EvaluationInputs
from .jobs import JUDGE, OWN, SCORING, Job, Key, jobs_of, key_of
from .journal import Journal
from .long_perplexity import short_context_nll, tokens_that_gain
from .perplexity import perplexity
from .scoring import rank_among, string_match_all, string_match_part
from .strides import stride_nll
from .texts import TextPiece

#: The first bucket of positions ends here, in tokens; each later one ends sqrt(2) times as far from the beginning.
_FIRST_BUCKET = 64


def position_edges(length: int) -> list[int]:
    """Returns where the buckets of positions begin, and where the last one ends, for pieces of `length` tokens."""
    edges, power = [1], 0
    while (edge := round(_FIRST_BUCKET * 2 ** (power / 2))) < length:
        edges, power = [*edges, edge], power + 1
    return [*edges, length]


def losses_by_position(nll: Tensor, length: int) -> list[list[float]]:
    """Returns (first position, nll, tokens) of each bucket of positions that has scored tokens."""
    edges, buckets = position_edges(length), []
    for first, stop in itertools.pairwise(edges):
        part = nll[first:stop]
        part = part[~part.isnan()]
        if len(part):
            buckets.append([first, float(part.double().sum()), len(part)])
    return buckets


class Evaluator:
    """One model and what it is asked.

    Args:
        model: a causal language model; the ring may shard its sequences.
    """

    def __init__(self, model: PreTrainedModel, inputs: EvaluationInputs, ring: Ring | None = None) -> None:
        self.model, self.inputs, self.plan = model, inputs, inputs.plan
        self.ring = Ring.alone() if ring is None else ring
        #: The pattern that the checkpoint came with, if any.
        self.own = copy.deepcopy(getattr(model.config.get_text_config(), IMPLEMENTATION, None))

    def run(self, journal: Journal | None, tell: Callable[[int, int, Job], None] = lambda *_: None) -> None:
        """Computes what the journal lacks, on all processes together.

        Args:
            journal: that of process 0; None on the others.
            tell: hears how many jobs are done, of how many, and the next one, on each process.

        Raises:
            ValueError: on every process: processes that differ in plan, texts or tokens, or what a job refuses; on the others,
                what process 0 could not write.
            OSError: on process 0, a journal that cannot be written to.
        """
        jobs = jobs_of(self.plan, {task: self.inputs.counts(task) for task in SCORING})
        with self.ring.agreement("an evaluation", everywhere=True) as call:
            call.same("the plan of the evaluation", digest(self.plan))
            call.same("the texts of the evaluation", digest([(text.name, text.checksum) for text in self.inputs.texts]))
            call.same("the words of questions", str(self.inputs.words))
            call.same("the patterns of the evaluation", self.inputs.texts_of_patterns)
            for pattern in self.inputs.patterns.values():
                patch_config(copy.deepcopy(self.model.config), pattern)  # One for other models is refused.
            if self.plan.retrieval:
                check_answers(self.model)
            call.message = None if journal is None else [key_of(record) for record in journal.records]
        done: set[Key] = {tuple(key) for key in call.answers[0] or ()}
        left = [job for job in jobs if not done.issuperset(job.keys)]
        rings = self.ring.dp_size
        for first in range(0, len(left), rings):
            of_rings = left[first : first + rings]
            with self.ring.agreement("a job of an evaluation", everywhere=True) as call:
                tell(len(jobs) - len(left) + first, len(jobs), of_rings[0])
                if self.ring.dp_rank < len(of_rings):
                    records = self.records_of(of_rings[self.ring.dp_rank])
                    call.message = records if self.ring.rank == 0 else None
            with self.ring.agreement("writing the records of an evaluation", everywhere=True):
                if journal is not None:
                    found = [record for records in call.answers for record in records or ()]
                    journal.append([record for record in found if key_of(record) not in done])

    def records_of(self, job: Job) -> list[dict[str, Any]]:
        """Returns the records of a job, one a key, as JSON."""
        if job.task == "longppl":
            found = self._long_perplexity(job)
        elif job.task == "perplexity":
            found = [self._perplexity(job)]
        else:
            found = self._answers(job)
        names = ("task", "pattern", "length", "depth", "number")
        return [dict(zip(names, key)) | record for key, record in zip(job.keys, found, strict=True)]

    def use(self, pattern: str) -> None:
        """Makes the model compute a pattern in all layers without a window of their own, or what its config came with."""
        if pattern == OWN:
            setattr(self.model.config.get_text_config(), IMPLEMENTATION, copy.deepcopy(self.own))
        patch_model(self.model, self.inputs.patterns.get(pattern), self.ring)

    def _perplexity(self, job: Job) -> dict[str, Any]:
        piece = self.inputs.pieces[job.length][job.numbers[0]]
        self.use(job.patterns[0])
        start = time.perf_counter()
        if self.plan.stride is None:
            nll = self._whole_nll(piece)
        else:
            nll = stride_nll(self.model, piece.ids, job.length, self.plan.stride, self.ring, opening=piece.opening)
        seconds = time.perf_counter() - start
        scored = ~nll.isnan()
        by_position = {} if self.plan.stride else {"by_position": losses_by_position(nll, job.length)}
        return {
            "document": piece.name,
            "nll": float(nll[scored].double().sum()),
            "tokens": int(scored.sum()),
            "bytes": piece.size_of(scored),
            "opening": piece.opening,
            **by_position,
            "seconds": seconds,
        }

    def _whole_nll(self, piece: TextPiece) -> Tensor:
        """Returns [n] float32: the nll of the tokens of a piece in one pass, NaN where they are not scored."""
        nll = perplexity(self.model, piece.ids, ring=self.ring).token_nll[0]
        nll[: piece.opening] = torch.nan
        return nll

    def _long_perplexity(self, job: Job) -> list[dict[str, Any]]:
        piece = self.inputs.long_pieces[job.length][job.numbers[0]]
        self.use(JUDGE)
        long = self._whole_nll(piece)
        plan, opening = self.plan, piece.opening
        short = short_context_nll(self.model, piece.ids, plan.short_context, plan.sharing, self.ring, opening=opening)
        gaining = tokens_that_gain(long, short, plan.least_gain, plan.least_likelihood)
        records = []
        for pattern in job.patterns:
            self.use(pattern)
            start = time.perf_counter()
            nll = self._whole_nll(piece)
            records.append(
                {
                    "document": piece.name,
                    "nll": float(nll[gaining].double().sum()),
                    "tokens": len(gaining),
                    "compared": int((~short.isnan()).sum()),
                    "seconds": time.perf_counter() - start,
                }
            )
        return records

    def _answers(self, job: Job) -> list[dict[str, Any]]:
        questions = [self.inputs.question(job.task, job.length, job.depth, number) for number in job.numbers]
        self.use(job.patterns[0])
        answers = answer_questions(self.model, self.inputs.tokenizer, questions, self.plan.scores)
        records = []
        for question, answer in zip(questions, answers, strict=True):
            record: dict[str, Any] = {
                "prompt_tokens": len(question.prompt),
                "repeats": question.task.haystack == "texts" and question.units > len(self.inputs.materials.sentences),
                "answers": list(question.draft.answers),
            }
            if answer.text is not None:
                match = string_match_all if question.task.scoring == "all" else string_match_part
                record |= {"text": answer.text, "match": match(answer.text, question.draft.answers)}
            if answer.losses is not None:
                sizes = [len(candidate.encode()) for candidate in question.draft.candidates]
                record |= {
                    "candidates": list(question.draft.candidates),
                    "candidate_nll": list(answer.losses),
                    "rank": rank_among(answer.losses, sizes),
                    "answer_tokens": len(question.candidate_ids[0]),
                }
            records.append(record | {"reading_seconds": answer.reading_seconds, "seconds": answer.seconds})
        return records
