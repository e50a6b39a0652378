"""What an evaluation is made of: patterns x tasks x lengths x depths x samples, cut into jobs, each with its records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .answers import SCORES
from .long_perplexity import ALPHA_GAIN, BETA_LIKELIHOOD, SHARING, SHORT_CONTEXT
from .questions import PromptWriter
from .tracing import RETRIEVAL, RULER, retrieval_task

#: Tasks over texts, and all tasks; "ruler" on a command line means those of `RULER`.
SCORING = ("perplexity", "longppl")
TASKS = (*SCORING, *RETRIEVAL)
#: The pattern that finds the tokens of LongPPL, for all patterns alike.
JUDGE = "exact"
#: In place of a pattern's text: what the checkpoint has in its config.
OWN = "own"

#: What tells records apart: task, pattern, length, depth, number.
Key = tuple[str, str, int, "float | None", int]


@dataclass(frozen=True)
class EvaluationPlan:
    """What is asked of a model. The figures follow from it, the model and the texts alone, and not from the processes.

    Attributes:
        patterns: their texts, files of calibrations, or "own".
        lengths: the context lengths, in tokens.
        depths: where answers stand, from 0 to 1, in tasks with a place.
        samples: the pieces of each text, and the questions of each length and depth.
        stride: that of windows over whole texts, in tokens; None for pieces in one pass each.
        most_tokens: of each text, with a stride; None for all.
        short_context, sharing: those of LongPPL, in tokens.
        least_gain, least_likelihood: of the tokens that LongPPL counts, in nats: how much likelier the long context makes
            them, and their log-likelihood with it.
        scores: of questions, some of `SCORES`.
        batch: questions that are read at once.
        chat: whether questions are turns of a chat.
    """

    patterns: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 4
    seed: int = 0
    stride: int | None = None
    most_tokens: int | None = None
    short_context: int = SHORT_CONTEXT
    sharing: int = SHARING
    least_gain: float = ALPHA_GAIN
    least_likelihood: float = BETA_LIKELIHOOD
    scores: tuple[str, ...] = SCORES
    batch: int = 1
    chat: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan in plain JSON types."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    @property
    def retrieval(self) -> tuple[str, ...]:
        """The tasks that ask questions."""
        return tuple(task for task in self.tasks if task in RETRIEVAL)


@dataclass(frozen=True)
class Job:
    """What is computed together, and whose records are written together.

    Attributes:
        numbers: of pieces or questions.
        patterns: one, but for LongPPL, whose judge's passes serve all.
    """

    task: str
    length: int
    depth: float | None
    numbers: tuple[int, ...]
    patterns: tuple[str, ...]

    @property
    def keys(self) -> list[Key]:
        """Those of its records, in order."""
        return [
            (self.task, pattern, self.length, self.depth, number)
            for pattern, number in itertools.product(self.patterns, self.numbers)
        ]


def key_of(record: Mapping[str, Any]) -> Key:
    """Returns what tells a record apart from the others of a run."""
    return record["task"], record["pattern"], record["length"], record["depth"], record["number"]


def expanded_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Returns tasks with "ruler" replaced by those that it stands for, each once.

    Raises:
        ValueError: an unknown name.
    """
    tasks: list[str] = []
    for name in names:
        if name != "ruler" and name not in TASKS:
            raise ValueError(f"one of {', '.join(TASKS)}, or ruler for {', '.join(RULER)}, was expected, got {name!r}")
        tasks += RULER if name == "ruler" else [name]
    return tuple(dict.fromkeys(tasks))


def check_plan(plan: EvaluationPlan, *, positions: int | None, own_pattern: bool, writer: PromptWriter) -> None:
    """Refuses what cannot be evaluated, before any work.

    Args:
        positions: the most tokens that the model has positions for; None if it does not say.
        own_pattern: whether its config has a pattern.

    Raises:
        ValueError: the setting, what it is and what it may be.
    """
    for name in ("patterns", "tasks", "lengths", "scores", "depths"):
        if name != "depths" and not getattr(plan, name):
            raise ValueError(f"{name}: one at least was expected, got none")
        if len(set(getattr(plan, name))) < len(getattr(plan, name)):
            raise ValueError(f"{name}: each is to be named once, got {', '.join(map(str, getattr(plan, name)))}")
    if OWN in plan.patterns and not own_pattern:
        raise ValueError(
            "pattern 'own': the model's config has no pattern. ra.patch_config and ra.patch_model put one there, which "
            "save_pretrained saves"
        )
    wrong = [depth for depth in plan.depths if not 0 <= depth <= 1]
    if wrong or (not plan.depths and any(retrieval_task(x, 1).by_depth for x in plan.retrieval)):
        raise ValueError(
            f"depths: numbers from 0, the beginning, to 1, the end, were expected, got {list(plan.depths)}"
        )
    if positions is not None and max(plan.lengths) > positions:
        raise ValueError(
            f"lengths: the model has positions for {positions} tokens, and a length is {max(plan.lengths)}: ask for "
            f"{positions} at most, or take a checkpoint with more"
        )
    if plan.stride is not None and plan.stride > min(plan.lengths):
        raise ValueError(
            f"stride: it must be at most the shortest length, {min(plan.lengths)} tokens, got {plan.stride}: tokens between "
            f"windows would not be scored"
        )
    if "longppl" in plan.tasks and min(plan.lengths) <= plan.short_context:
        raise ValueError(
            f"longppl: it compares each length with a short context of {plan.short_context} tokens, and a length is "
            f"{min(plan.lengths)}: ask for greater lengths, or for a shorter context than the paper's {SHORT_CONTEXT}"
        )
    if plan.chat and not getattr(writer.tokenizer, "chat_template", None):
        raise ValueError("chat: the model's tokenizer has no chat template: ask without it, or take a model for chats")


def jobs_of(plan: EvaluationPlan, pieces: Mapping[str, Mapping[int, int]]) -> list[Job]:
    """Returns all jobs in order: those of one piece or batch of questions are next to each other, a pattern each.

    Args:
        pieces: how many pieces of text a task has, by its name and by length.
    """
    jobs = []
    for task, length in itertools.product(plan.tasks, plan.lengths):
        if task == "longppl":
            jobs += [Job(task, length, None, (number,), plan.patterns) for number in range(pieces[task][length])]
            continue
        if task == "perplexity":
            batches: list[tuple[int, ...]] = [(number,) for number in range(pieces[task][length])]
        else:
            samples = range(plan.samples)
            batches = [tuple(samples[first : first + plan.batch]) for first in range(0, plan.samples, plan.batch)]
        by_depth = task in RETRIEVAL and retrieval_task(task, length).by_depth
        depths: Sequence[float | None] = plan.depths if by_depth else [None]
        for depth, batch, pattern in itertools.product(depths, batches, plan.patterns):
            jobs.append(Job(task, length, depth, batch, (pattern,)))
    return jobs


def task_notes(plan: EvaluationPlan, texts: str, words: str, opening: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Returns what a report must say of each task, as JSON: version, haystack, scoring.

    Args:
        texts, words: where these come from.
        opening: the tokens with which pieces of texts open.
    """
    opened = {"opened_by": list(opening)} if opening else {}
    notes: dict[str, dict[str, Any]] = {}
    for task in plan.tasks:
        if task == "perplexity":
            how = "pieces in one pass each" if plan.stride is None else f"windows of each length, stride {plan.stride}"
            notes[task] = {"version": 1, "text": texts, **opened, "scored": how}
        elif task == "longppl":
            notes[task] = {
                "version": 1,
                "text": texts,
                **opened,
                "judge": f"the model itself under {JUDGE}",
                "short_context": plan.short_context,
                "tokens_sharing_a_context": plan.sharing,
                "least_gain_nats": plan.least_gain,
                "least_log_likelihood": plan.least_likelihood,
            }
        else:
            kind = retrieval_task(task, max(plan.lengths))
            sources = {"noise": "repeated noise", "texts": texts, "words": words, "coded words": "coded words"}
            keys = {"keys": words} if kind.haystack == "texts" else {}
            scoring = {"scoring": f"string_match_{kind.scoring}", "new_tokens": kind.new_tokens}
            notes[task] = {"version": 1, "haystack": sources[kind.haystack], **keys, **scoring}
    return notes
