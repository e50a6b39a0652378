"""The words that keys and lists of questions are made of, and where they come from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .texts import EvaluationText, python_topics

#: Texts of fewer different words than this make no list: their questions would repeat each other.
FEWEST_WORDS = 500


@dataclass(frozen=True)
class WordList:
    """Different words in alphabetical order.

    Attributes:
        name: where they come from, as reports say it.
    """

    name: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        checksum = hashlib.sha256(" ".join(self.words).encode()).hexdigest()[:16]
        return f"{len(self.words)} words of {self.name} ({checksum})"


def word_list(texts: Sequence[EvaluationText]) -> WordList:
    """Returns the words of the package wonderwords, as RULER does, if it is installed, else those of the texts.

    Where the texts have fewer than `FEWEST_WORDS`, the words are those of `python_topics`.
    """
    if importlib.util.find_spec("wonderwords") is not None:
        from wonderwords import RandomWord

        listed = RandomWord().filter(include_categories=["noun", "adjective", "verb"])
        name = f"wonderwords {importlib.metadata.version('wonderwords')}"
        return WordList(name, tuple(sorted({word for word in listed if re.fullmatch("[a-z]+", word)})))
    of_texts = _words_of(texts)
    if len(of_texts) >= FEWEST_WORDS:
        return WordList(", ".join(text.name for text in texts), of_texts)
    topics = python_topics()
    return WordList(topics.name, _words_of([topics]))


def _words_of(texts: Sequence[EvaluationText]) -> tuple[str, ...]:
    return tuple(sorted({word for text in texts for word in re.findall(r"\b[a-z]{4,10}\b", text.content)}))
