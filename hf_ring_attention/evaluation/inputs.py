"""What an evaluation asks of a model: pieces of texts and questions in its tokens, checked before the model is loaded."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from .calibration.result import Calibration, load_pattern
from .jobs import JUDGE, OWN, EvaluationPlan, check_plan
from .questions import Materials, PromptWriter, Question, question_of
from .texts import EvaluationText, TextPiece, opening_tokens, sentences_of, text_pieces
from .tracing import retrieval_task
from .words import word_list


class EvaluationInputs:
    """The pieces and the questions of a plan.

    Args:
        tokenizer: that of the model.
        texts: the same on every process.
        positions: the most tokens that the model has positions for; None if it does not say.
        own_pattern: whether its config has a pattern.

    Raises:
        ValueError: what `check_plan` refuses, patterns that are none, texts that are too short or have no sentence for a
            question, or lengths that have no room for one.
        OSError: a file of a calibration that cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[EvaluationText],
        plan: EvaluationPlan,
        *,
        positions: int | None = None,
        own_pattern: bool = False,
    ) -> None:
        self.tokenizer, self.plan, self.texts = tokenizer, plan, list(texts)
        #: What the names of patterns stand for, read once: a file may hold another calibration later.
        self.patterns = {name: load_pattern(name) for name in (*plan.patterns, JUDGE) if name != OWN}
        self.writer = PromptWriter(tokenizer, plan.chat)
        check_plan(plan, positions=positions, own_pattern=own_pattern, writer=self.writer)
        self.words = word_list(texts)
        # The patterns ask the same questions, one behind the other.
        self.question = lru_cache(maxsize=4 * plan.batch)(self._question)
        self._check_pieces()
        for task in plan.retrieval:
            if retrieval_task(task, min(plan.lengths)).haystack == "texts" and not self.materials.sentences:
                raise ValueError(f"{task}: it hides needles among the sentences of {self.names}, where there is none")
            self.question(task, min(plan.lengths), None, 0)

    @cached_property
    def materials(self) -> Materials:
        """What questions are made of."""
        return Materials(self.words, sentences_of(self.texts), self.names)

    @property
    def texts_of_patterns(self) -> dict[str, str | dict[str, str]]:
        """What the names of patterns stand for, in plain JSON types: for a calibration, the patterns of its layers."""
        return {
            name: one.texts_of_layers if isinstance(one, Calibration) else str(one)
            for name, one in self.patterns.items()
        }

    @property
    def opening(self) -> list[str]:
        """The tokens with which each piece of text opens."""
        tokens: list[str] = self.tokenizer.convert_ids_to_tokens(opening_tokens(self.tokenizer).tolist())
        return tokens

    @property
    def names(self) -> str:
        """The names of the texts."""
        return ", ".join(text.name for text in self.texts)

    @cached_property
    def pieces(self) -> dict[int, list[TextPiece]]:
        """The pieces of all texts for perplexity, by length; whole texts where they are scored with a stride."""
        plan = self.plan
        if plan.stride is None:
            return self.long_pieces
        most = plan.most_tokens or sys.maxsize
        wanted = "perplexity" in plan.tasks
        whole = [piece for text in self.texts if wanted for piece in text_pieces(text, self.tokenizer, most, 1)]
        return dict.fromkeys(plan.lengths, whole)

    @cached_property
    def long_pieces(self) -> dict[int, list[TextPiece]]:
        """The pieces of all texts for LongPPL, and for perplexity without a stride, by length."""
        wanted = len(self.plan.retrieval) < len(self.plan.tasks)
        return {
            length: [
                piece
                for text in self.texts
                if wanted
                for piece in text_pieces(text, self.tokenizer, length, self.plan.samples)
            ]
            for length in self.plan.lengths
        }

    def counts(self, task: str) -> dict[int, int]:
        """Returns how many pieces a task has, by length."""
        pieces = self.long_pieces if task == "longppl" else self.pieces
        return {length: len(of_length) for length, of_length in pieces.items()}

    def _check_pieces(self) -> None:
        short = self.plan.short_context
        self.counts("perplexity")  # Texts that are too short are refused where their pieces are made.
        if "longppl" in self.plan.tasks:
            for piece in itertools.chain(*self.long_pieces.values()):
                if len(piece.ids) <= short:
                    raise ValueError(
                        f"longppl: {piece.name} has {len(piece.ids)} tokens, and the short context has {short}: name longer "
                        f"texts, or ask for a shorter context"
                    )

    def _question(self, task: str, length: int, depth: float | None, number: int) -> Question:
        kind = retrieval_task(task, length)
        how: dict[str, Any] = {"seed": self.plan.seed, "materials": self.materials, "writer": self.writer}
        return question_of(kind, length, depth, number, **how)
