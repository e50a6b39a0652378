"""Turns texts into tokens of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenizedText:
    """The first tokens of a text, behind the tokens that open texts of the model, such as BOS."""

    ids: Tensor  # [n] int64
    opening: int  # the number of opening tokens, which are not scored
    sizes: Tensor | None  # [n] int64: the bytes of each token in UTF-8; None if the tokenizer does not return offsets

    def size_of(self, scored: Tensor) -> int | None:
        """Returns the bytes of the tokens that are True in scored, [n]."""
        return None if self.sizes is None else int(self.sizes[scored].sum())


def tokenized_text(text: str, tokenizer: Any, count: int | None) -> TokenizedText:
    """Returns `count` tokens of a text, opening tokens included; fewer if the text is shorter, and with None all of them."""
    # A prefix has at least `count` tokens; all but its last few are also tokens of the whole text.
    part, opening = text if count is None else text[: 40 * count + 1000], opening_tokens(tokenizer)
    places = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(part, add_special_tokens=False, return_offsets_mapping=places, verbose=False)
    ids = torch.cat([opening, torch.tensor(encoded["input_ids"], dtype=torch.int64)])[:count]
    if not places:
        return TokenizedText(ids, len(opening), None)
    # A token stands for everything behind the token before it, including spaces that no token covers.
    ends = [end for _, end in encoded["offset_mapping"]]
    own = [len(part[start:end].encode()) for start, end in zip([0, *ends], ends)]
    return TokenizedText(ids, len(opening), torch.tensor([0] * len(opening) + own)[:count])


def opening_tokens(tokenizer: Any) -> Tensor:
    """Returns [k] int64: the tokens that a tokenizer puts before each text. Without them, some models predict far worse."""
    text, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    places = (first for first in range(len(whole)) if whole[first : first + len(text)] == text)
    return torch.tensor(whole[: next(places, 0)], dtype=torch.int64)
