"""The short texts of patterns: "window:512+4" is a window of 512 tokens and 4 sinks.

    exact                         every key
    window:512+4                  a sliding window of 512 tokens, and the first 4 tokens
    pyramid:512,3                 `Pattern.pyramid(512, 3)`; then ratio and sinks: pyramid:512,3,2,0
    longnet:512/1,2048/4,all/8    `Pattern.longnet([512, 2048, None], [1, 4, 8])`
    branches:sink=4,window=512,window=2048/4:dilated,segment=all/8@count
                                  any other pattern: each branch with its length, and its dilation and queries unless they
                                  have their defaults; then the overlap
    kv0,3-5=exact;kv1-2=window:512+4
                                  a pattern for each key/value head, by their numbers from 0 on

This module reads and writes the branches and settings of the texts; `Pattern` gives them their meaning.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .branches import BRANCHES, Branch, Segment, Sink, Window

_BRANCH_FORMS = "sink=TOKENS, window=LENGTH[/DILATION][:QUERIES] or segment=LENGTH[/DILATION][:QUERIES], with commas"
#: By the word that a text begins with.
_FORMS = {
    "exact": "exact",
    "window": "window:LENGTH[+SINKS]",
    "pyramid": "pyramid:WINDOW,LEVELS[,RATIO[,SINKS]]",
    "longnet": "longnet:LENGTH/RATE,... with 'all' for the whole document",
    "branches": f"branches: with {_BRANCH_FORMS}",
}
_HEADS_FORM = "Each key/value head from 0 on has one pattern, for example kv0,3-5=exact;kv1-2=window:512+4"
FORMS = (
    f"{'; '.join(_FORMS.values())}. Behind each may stand @count or @once. For example "
    f"window:512+4, pyramid:512,3 or longnet:512/1,2048/4,all/8 (where key/value heads differ, kv0,3-5=exact;kv1-2=window:512)"
)
#: What went with version 0.3, and what to write instead.
_GONE = {
    "last": "'last' went with version 0.3: give some heads or layers 'exact', whose queries see every key",
    "query_head": "'@query_head' went with version 0.3: leave it out, and key/value heads set the phases",
    "kv_head": "'@kv_head' went with version 0.3: leave it out, since key/value heads set the phases",
}
#: No model has more key/value heads, and each head that a text names takes memory.
_MOST_HEADS = 65536
#: No number that a pattern takes has more digits, and Python refuses to read thousands of them.
_MOST_DIGITS = 19
#: The characters of a wrong text that its error repeats.
_LONGEST_SHOWN = 200


def read(text: str, patterns: Any) -> Any:
    """Returns the pattern of a text; `patterns` is the class `Pattern`, whose constructors texts name."""
    if not isinstance(text, str):
        raise ValueError(f"pattern must be a Pattern, or its text such as 'window:512+4', got {text!r}")
    if text.strip().startswith("kv"):
        texts = _texts_of_heads(text)
        made = {of_head: read(of_head, patterns) for of_head in {*texts}}
        return patterns.by_kv_head([made[of_head] for of_head in texts])
    body, *words = text.strip().split("@")
    name, colon, rest = body.partition(":")
    if name not in _FORMS:
        word = re.match("[A-Za-z]*", name[:_LONGEST_SHOWN])[0]  # type: ignore[index]
        right = [x + ":" * (len(word) < len(name)) for x in difflib.get_close_matches(word, _FORMS, 1)]
        near = [text.strip().replace(word, x, 1) for x in right]
        meant = f": did you mean {shown(near[0])}?" if near else f". A pattern is one of: {FORMS}"
        raise ValueError(f"pattern {shown(text)} is not known{meant}")
    try:
        if name == "exact" and colon:
            raise ValueError(f"'exact' takes nothing after it, got {shown(rest)}")
        settings = _settings(words)
        if name == "branches":
            return patterns(map(_branch, rest.split(",")), **settings)
        return replace(getattr(patterns, name)(*_READERS[name](rest)), **settings)
    except ValueError as error:
        raise ValueError(f"pattern {shown(text)} cannot be read: {error}. Its form is {_FORMS[name]}") from None


def _texts_of_heads(text: str) -> list[str]:
    """Returns the text of each key/value head's pattern, by the heads' numbers."""
    texts: dict[int, str] = {}
    try:
        for part in text.split(";"):
            match = re.fullmatch(r"\s*kv([0-9,\- ]+)=(?!\s*kv)\s*(.+)", part)
            if match is None:
                raise ValueError(f"kvNUMBERS=PATTERN was expected, got {shown(part)}")
            for number in _head_numbers(match.group(1)):
                if number in texts:
                    raise ValueError(f"it names key/value head {number} twice")
                texts[number] = match.group(2).strip()
        missing = sorted({*range(max(texts) + 1)} - {*texts})
        if missing:
            raise ValueError(f"it leaves out the key/value heads {missing[:8]}{'...' * (len(missing) > 8)}")
    except ValueError as error:
        raise ValueError(f"pattern {shown(text)} cannot be read: {error}. {_HEADS_FORM}") from None
    return [texts[number] for number in sorted(texts)]


def _head_numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low, high = _number(first), _number(last if dash else first)
        if high < low:
            raise ValueError(f"{shown(part)} ends before it begins")
        if high >= _MOST_HEADS:
            raise ValueError(f"at most {_MOST_HEADS} key/value heads were expected, got head {high}")
        yield from range(low, high + 1)


def _settings(words: Sequence[str]) -> dict[str, str]:
    for word in words:
        if word not in ("count", "once"):
            raise ValueError(_GONE.get(word, f"behind @ stands count or once, got {shown(word)}"))
    if len(words) > 1:
        raise ValueError(f"@{' and @'.join(words)} set the same thing: write one of them")
    return {"overlap": words[0]} if words else {}


def _window(rest: str) -> tuple[int, ...]:
    length, plus, sinks = rest.partition("+")
    return _number(length), *((Sink(_number(sinks)).tokens,) if plus else ())


def _pyramid(rest: str) -> list[int]:
    numbers = [_number(number) for number in rest.split(",")]
    if not 2 <= len(numbers) <= 4:
        raise ValueError(f"a pyramid has 2 to 4 numbers, got {len(numbers)}")
    return numbers


def _longnet(rest: str) -> tuple[list[int | None], list[int]]:
    pairs = [pair.partition("/") for pair in rest.split(",")]
    return [_length(length) for length, _, _ in pairs], [_number(rate) for _, _, rate in pairs]


#: The arguments of `Pattern`'s constructors, by their names.
_READERS: dict[str, Any] = {"exact": lambda _: (), "window": _window, "pyramid": _pyramid, "longnet": _longnet}


def _branch(text: str) -> Branch:
    match = re.fullmatch(r"\s*(\w+)=(\w+)(?:/(\w+))?(?::(\w+))?\s*", text)
    if match is None or match.group(1) not in BRANCHES:
        gone = _GONE.get(text.strip().split("=")[0])
        raise ValueError(
            gone or f"a branch such as sink=4, window=512 or segment=2048/4 was expected, got {shown(text)}"
        )
    name, length, dilation, queries = match.groups()
    kind: Any = BRANCHES[name]
    more: dict[str, Any] = {"dilation": _number(dilation)} if dilation else {}
    more |= {"queries": queries} if queries else {}
    if more and kind is Sink:
        raise ValueError(f"{name} has a number of tokens and nothing else, got {shown(text)}")
    branch: Branch = kind(_length(length), **more)
    return branch


def _length(text: str) -> int | None:
    return None if text == "all" else _number(text)


def _number(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([kKmM]?)", text.strip())
    if match is None:
        raise ValueError(f"a number was expected, got {shown(text)}")
    digits = match[1].lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of at most {_MOST_DIGITS} digits was expected, got {len(digits)} digits")
    return int(digits) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def shown(text: object) -> str:
    """Returns a text as an error repeats it: whole, or its beginning."""
    return repr(text) if not isinstance(text, str) or len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]!r}..."


def write(branches: Sequence[Branch], overlap: str) -> str:
    """Returns the shortest text of a pattern; `read` reads it back."""
    text = _family(branches, overlap) or f"branches:{','.join(map(str, branches))}"
    usual = "count" if text.startswith("longnet") else "once"
    return text if overlap == usual else f"{text}@{overlap}"


def write_heads(texts: Sequence[str]) -> str:
    """Returns the text of a pattern from the text of each key/value head; `read_heads` reads it back."""
    heads_of: dict[str, list[int]] = {}
    for head, text in enumerate(texts):
        heads_of.setdefault(text, []).append(head)
    parts = []
    for text, heads in heads_of.items():
        numbered = itertools.groupby(enumerate(heads), lambda place: place[1] - place[0])
        runs = [[head for _, head in run] for _, run in numbered]
        parts.append(f"kv{','.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}={text}")
    return ";".join(parts)


def _family(branches: Sequence[Branch], overlap: str) -> str | None:
    """Returns "exact", or the text of a longnet, or of a window or pyramid with or without sinks; None for other branches."""
    if overlap == "count":
        segments = [x for x in branches if isinstance(x, Segment) and x.queries == "dilated"]
        pairs = ",".join(f"{x.length or 'all'}/{x.dilation}" for x in segments)
        return f"longnet:{pairs}" if len(segments) == len(branches) else None
    if [*branches] == [Segment()]:
        return "exact"
    first = branches[0]
    sinks = first.tokens if isinstance(first, Sink) else 0
    windows = [x for x in branches[bool(sinks) :] if isinstance(x, Window) and x.queries == "all"]
    if not windows or len(windows) + bool(sinks) < len(branches):
        return None
    length, ratio = windows[0].length, windows[1].dilation if len(windows) > 1 else 1
    if any((x.length, x.dilation) != (length * ratio**i, ratio**i) for i, x in enumerate(windows)):
        return None
    if len(windows) == 1:
        return f"window:{length}" + (f"+{sinks}" if sinks else "")
    more = [ratio, sinks] if sinks != 4 else [ratio] if ratio != 4 else []
    return "pyramid:" + ",".join(map(str, [length, len(windows), *more]))
