"""The texts that are scored and that needles are hidden in: those of the user, or the help texts of Python 3.11."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class EvaluationText:
    """A text with the name that reports give it."""

    name: str
    content: str

    @property
    def checksum(self) -> str:
        """The first digits of the SHA-256 of the text in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TextPiece:
    """Tokens of a text that are scored together.

    Attributes:
        ids: [n] int64, those with which the model's texts open before those of the text.
        opening: how many of them do not belong to the text, and are not scored.
        sizes: [n] int64, the bytes in UTF-8 of the text that each token stands for.
    """

    name: str
    ids: Tensor
    opening: int
    sizes: Tensor

    def size_of(self, scored: Tensor) -> int:
        """Returns the bytes of the tokens that are True in scored, [n]."""
        return int(self.sizes[scored].sum())


def python_topics() -> EvaluationText:
    """Returns the help texts of Python 3.11, the text where no other is named.

    They come with the package: those of the running Python differ from release to release, and figures with them.
    """
    packed = Path(__file__).with_name("python_topics.txt.gz").read_bytes()
    return EvaluationText("pydoc topics of Python 3.11.7", gzip.decompress(packed).decode())


def text_pieces(text: EvaluationText, tokenizer: Any, length: int, most: int) -> list[TextPiece]:
    """Cuts a text into pieces of `length` tokens, each with the tokens that open it.

    A rest that is shorter is left out, unless it is all there is.

    Args:
        most: no more pieces than these.

    Raises:
        ValueError: a tokenizer that does not tell where tokens stand in the text, a text of fewer than 2 tokens, or a length
            that has no room for one.
    """
    ids, ends = _tokens_of(text.name, beginning_of(text.content, length * most), tokenizer)
    opening = opening_tokens(tokenizer)
    room = length - len(opening)
    if room < 1:
        raise ValueError(f"{len(opening)} tokens open each text of this model: ask for a length greater than {length}")
    count = max(1, min(most, len(ids) // room))
    pieces = []
    for first in range(0, count * room, room):
        stop = min(first + room, len(ids))
        # A token stands for what begins behind the one before it, spaces that no token tells of among it.
        own = [text.content[start:end] for start, end in zip([0, *ends][first:stop], ends[first:stop])]
        sizes = torch.tensor([0] * len(opening) + [len(part.encode()) for part in own])
        name = text.name if count == 1 else f"{text.name}, piece {first // room + 1}"
        pieces.append(TextPiece(name, torch.cat([opening, ids[first:stop]]), len(opening), sizes))
    return pieces


def opening_tokens(tokenizer: Any) -> Tensor:
    """Returns [k] int64: the tokens that a tokenizer puts before each text; without them, some models predict far worse."""
    text, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    places = (first for first in range(len(whole)) if whole[first : first + len(text)] == text)
    return torch.tensor(whole[: next(places, 0)], dtype=torch.int64)


def first_tokens(text: str, tokenizer: Any, count: int | None = None, skip: int = 0) -> Tensor:
    """Returns [n] int64: tokens of a text behind its first `skip`, after those that open it, `count` in all (None: all)."""
    part = text if count is None else beginning_of(text, skip + count)
    ids = tokenizer(part, add_special_tokens=False, verbose=False).input_ids
    return torch.cat([opening_tokens(tokenizer), torch.tensor(ids[skip:], dtype=torch.int64)])[:count]


def beginning_of(text: str, tokens: int) -> str:
    """Returns so much of a text that its first tokens are those of the whole text: all but the last few of a prefix are."""
    return text[: 40 * tokens + 1000]


def _tokens_of(name: str, text: str, tokenizer: Any) -> tuple[Tensor, list[int]]:
    """Returns the tokens of a text, [n] int64, and where each of them ends in it."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell where its tokens stand in a text, by which its bytes are counted: "
            f"take the fast tokenizer of the model"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if len(ids) < 2:
        raise ValueError(f"{name} has {len(ids)} token(s), 2 or more are needed: name a longer text")
    return ids, [end for _, end in encoded["offset_mapping"]]


def sentences_of(texts: Sequence[EvaluationText]) -> tuple[str, ...]:
    """Returns the sentences of texts, one behind the other: what ends with a full stop, a question or an exclamation mark."""
    sentences = []
    for text in texts:
        parts = re.split(r"(?<=[.!?])\s+", text.content)
        sentences += [" ".join(part.split()) for part in parts if part.split()]
    return tuple(sentences)
