"""The short texts of patterns: "window:512+4" is a window of 512 tokens and 4 sinks.

    exact                         every key
    window:512+4                  a sliding window of 512 tokens, and the first 4 tokens
    pyramid:512,3                 `Pattern.pyramid(512, 3)`; then ratio and sinks: pyramid:512,3,2,0
    longnet:512/1,2048/4,all/8    `Pattern.longnet([512, 2048, None], [1, 4, 8])`
    branches:sink=4,window=512,window=2048/4:dilated,segment=all/8@count@query_head
                                  any other pattern: each branch with its length, its dilation and its queries, where they
                                  are not the usual ones; then the overlap, and which heads' numbers set the phases
    branches:sink=4,window=512,last=64
                                  the same with the last 64 queries of a document, which see every key
    kv0,3-5=exact;kv1-2=window:512+4
                                  a pattern for each key/value head, by their numbers from 0 on

This module reads and writes the texts; `Pattern` knows their meaning.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

FORMS = (
    "exact; window:LENGTH[+SINKS]; pyramid:WINDOW,LEVELS[,RATIO[,SINKS]]; longnet:LENGTH/RATE,... with 'all' for the whole "
    "document; branches:sink=TOKENS,window=LENGTH[/DILATION][:QUERIES],segment=LENGTH[/DILATION][:QUERIES],last=TOKENS. Behind "
    "each may stand @count or @once, and @query_head or @kv_head. For example window:512+4, pyramid:512,3 or "
    "longnet:512/1,2048/4,all/8 (where key/value heads differ, kvNUMBERS=PATTERN for all of them: "
    "kv0,3-5=exact;kv1-2=window:512+4)"
)
#: The words that may stand behind an @, each with the setting whose value it is.
_SETTINGS = {"count": "overlap", "once": "overlap", "kv_head": "phase_by", "query_head": "phase_by"}
#: The queries that take part in a branch whose text does not name them, by the branch's type.
_USUAL_QUERIES = {"segment": "dilated", "window": "all"}
#: The types of branches that have a number of tokens and nothing else.
_OF_TOKENS = ("sink", "last")
#: No model has more key/value heads, and each head that a text names takes memory.
_MOST_HEADS = 65536
#: No number that a pattern takes has more digits, and Python refuses to read thousands of them.
_MOST_DIGITS = 19
#: The characters of a wrong text that its error repeats.
_LONGEST_SHOWN = 200


class PatternText(NamedTuple):
    """The content of a pattern's text.

    Attributes:
        maker: the class method of `Pattern`, "exact", "pyramid" or "longnet"; "branches" for a list of branches.
        arguments: the arguments of the maker; for "branches" the dicts that `Pattern.from_dict` reads.
        settings: overlap and phase_by, where the text has them.
    """

    maker: str
    arguments: tuple[Any, ...]
    settings: dict[str, Any]


def read(text: str) -> PatternText:
    """Reads the text of a pattern.

    Raises:
        ValueError: a text that has none of the forms; the message says what is wrong with it, and lists the forms.
    """
    if not isinstance(text, str):
        raise ValueError(f"a pattern or its text was expected, got {shown(text)}. A text is one of: {FORMS}")
    body, *settings = text.strip().split("@")
    name, colon, rest = body.partition(":")
    readers = {"exact": _exact, "window": _window, "pyramid": _pyramid, "longnet": _longnet, "branches": _branches}
    if name not in readers:
        near = difflib.get_close_matches(name[:_LONGEST_SHOWN], readers, 1)
        if near:
            raise ValueError(
                f"pattern {shown(text)} is not known: did you mean {shown(text.strip().replace(name, near[0], 1))}?"
            )
        raise ValueError(f"pattern {shown(text)} is not known. A pattern is one of: {FORMS}")
    try:
        maker, arguments = readers[name](rest if colon else None)
        return PatternText(maker, arguments, _settings(settings))
    except ValueError as error:
        raise ValueError(f"pattern {shown(text)} cannot be read: {error}. A pattern is one of: {FORMS}") from None


def read_heads(text: str) -> list[str] | None:
    """Returns the text of each key/value head's pattern, by the heads' numbers; None for a text that heads share.

    Raises:
        ValueError: heads that are named twice or not at all.
    """
    if not isinstance(text, str) or not text.strip().startswith("kv"):
        return None
    texts: dict[int, str] = {}
    for part in text.split(";"):
        match = re.fullmatch(r"\s*kv([0-9,\- ]+)=(.+)", part)
        if match is None or match.group(2).strip().startswith("kv"):
            raise ValueError(
                f"pattern {shown(text)} cannot be read: kvNUMBERS=PATTERN was expected, got {shown(part)}. {_HEADS_FORM}"
            )
        for number in _numbers(match.group(1), text):
            if number in texts:
                raise ValueError(
                    f"pattern {shown(text)} cannot be read: it names key/value head {number} twice. {_HEADS_FORM}"
                )
            texts[number] = match.group(2).strip()
    missing = sorted({*range(max(texts) + 1)} - {*texts})
    if missing:
        listed = f"{missing[:8]}{'...' * (len(missing) > 8)}"
        raise ValueError(
            f"pattern {shown(text)} cannot be read: it leaves out the key/value heads {listed}. {_HEADS_FORM}"
        )
    return [texts[number] for number in sorted(texts)]


_HEADS_FORM = "Each key/value head from 0 on has one pattern, for example kv0,3-5=exact;kv1-2=window:512+4"


def _numbers(text: str, whole: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low, high = _number(first), _number(last if dash else first)
            if high < low:
                raise ValueError(f"{shown(part)} ends before it begins")
            if high >= _MOST_HEADS:
                raise ValueError(f"at most {_MOST_HEADS} key/value heads were expected, got head {high}")
        except ValueError as error:
            raise ValueError(f"pattern {shown(whole)} cannot be read: {error}. {_HEADS_FORM}") from None
        yield from range(low, high + 1)


def _settings(words: Sequence[str]) -> dict[str, str]:
    unknown = [word for word in words if word not in _SETTINGS]
    if unknown:
        raise ValueError(f"behind @ stands one of {', '.join(_SETTINGS)}, got {shown(unknown[0])}")
    settings = {_SETTINGS[word]: word for word in words}
    if len(settings) < len(words):
        raise ValueError(f"two of @{' and @'.join(words)} set the same thing: write one of them")
    return settings


def _exact(rest: str | None) -> tuple[str, tuple[Any, ...]]:
    if rest is not None:
        raise ValueError(f"'exact' takes nothing after it, got {shown(rest)}")
    return "exact", ()


def _window(rest: str | None) -> tuple[str, tuple[Any, ...]]:
    length, plus, sinks = (rest or "").partition("+")
    sink = ({"type": "sink", "tokens": _number(sinks)},) if plus else ()
    return "branches", (*sink, {"type": "window", "length": _number(length)})


def _pyramid(rest: str | None) -> tuple[str, tuple[Any, ...]]:
    numbers = tuple(_number(number) for number in (rest or "").split(","))
    if not 2 <= len(numbers) <= 4:
        raise ValueError(f"a pyramid has 2 to 4 numbers, got {len(numbers)}")
    return "pyramid", numbers


def _longnet(rest: str | None) -> tuple[str, tuple[Any, ...]]:
    pairs = [pair.partition("/") for pair in (rest or "").split(",")]
    return "longnet", ([_length(length) for length, _, _ in pairs], [_number(rate) for _, _, rate in pairs])


def _branches(rest: str | None) -> tuple[str, tuple[Any, ...]]:
    return "branches", tuple(_branch(part) for part in (rest or "").split(","))


def _branch(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"\s*(\w+)=(\w+)(?:/(\w+))?(?::(\w+))?\s*", text)
    kind = match.group(1) if match else None
    if match is None or kind not in (*_OF_TOKENS, *_USUAL_QUERIES):
        raise ValueError(
            f"a branch such as sink=4, window=512, segment=2048/4 or last=64 was expected, got {shown(text)}"
        )
    if kind in _OF_TOKENS:
        if match.group(3) or match.group(4):
            raise ValueError(f"{kind} has a number of tokens and nothing else, got {shown(text)}")
        return {"type": kind, "tokens": _number(match.group(2))}
    branch: dict[str, Any] = {
        "type": kind,
        "length": _length(match.group(2)) if kind == "segment" else _number(match.group(2)),
    }
    if match.group(3):
        branch["dilation"] = _number(match.group(3))
    if match.group(4):
        branch["queries"] = match.group(4)
    return branch


def _length(text: str) -> int | None:
    return None if text == "all" else _number(text)


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise ValueError(f"a number was expected, got {shown(text)}")
    digits = text.strip().lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of at most {_MOST_DIGITS} digits was expected, got {len(digits)} digits")
    return int(digits)


def shown(text: object) -> str:
    """Returns a text as an error repeats it: whole, or its beginning."""
    return repr(text) if not isinstance(text, str) or len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]!r}..."


def write(pattern: Mapping[str, Any]) -> str:
    """Returns the shortest text of a pattern in the form of `Pattern.to_dict`; `read` and `read_heads` read it back."""
    if "kv_heads" in pattern:
        return _write_heads([write(one) for one in pattern["kv_heads"]])
    branches: list[dict[str, Any]] = pattern["branches"]
    overlap, usual_overlap = pattern["overlap"], "once"
    text = _as_window(branches) or _as_pyramid(branches) if overlap == "once" else None
    if [*branches] == [{"type": "segment", "length": None, "dilation": 1, "queries": "dilated"}] and overlap == "once":
        text = "exact"
    if overlap == "count":
        text = _as_longnet(branches)
        usual_overlap = "count" if text else "once"
    if text is None:
        text = "branches:" + ",".join(map(_as_branch, branches))
    if overlap != usual_overlap:
        text += f"@{overlap}"
    return text if pattern["phase_by"] == "kv_head" else f"{text}@{pattern['phase_by']}"


def _write_heads(texts: Sequence[str]) -> str:
    heads_of: dict[str, list[int]] = {}
    for head, text in enumerate(texts):
        heads_of.setdefault(text, []).append(head)
    parts = []
    for text, heads in heads_of.items():
        numbered = itertools.groupby(enumerate(heads), lambda place: place[1] - place[0])
        runs = [[head for _, head in run] for _, run in numbered]
        parts.append(f"kv{','.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}={text}")
    return ";".join(parts)


def _split_sinks(branches: Sequence[Mapping[str, Any]]) -> tuple[int, Sequence[Mapping[str, Any]]]:
    """Returns the tokens of the sink in front (0 if there is none) and the branches behind it."""
    if branches[0]["type"] == "sink":
        return branches[0]["tokens"], branches[1:]
    return 0, branches


def _as_window(branches: Sequence[Mapping[str, Any]]) -> str | None:
    sinks, rest = _split_sinks(branches)
    if len(rest) != 1 or rest[0]["type"] != "window" or rest[0]["dilation"] != 1 or rest[0]["queries"] != "all":
        return None
    return f"window:{rest[0]['length']}" + (f"+{sinks}" if sinks else "")


def _as_pyramid(branches: Sequence[Mapping[str, Any]]) -> str | None:
    sinks, rest = _split_sinks(branches)
    if len(rest) < 2 or any(branch["type"] != "window" or branch["queries"] != "all" for branch in rest):
        return None
    window, ratio = rest[0]["length"], rest[1]["dilation"]
    expected = [(window * ratio**level, ratio**level) for level in range(len(rest))]
    if [(branch["length"], branch["dilation"]) for branch in rest] != expected:
        return None
    more = [ratio, sinks] if sinks != 4 else [ratio] if ratio != 4 else []
    return "pyramid:" + ",".join(map(str, [window, len(rest), *more]))


def _as_longnet(branches: Sequence[Mapping[str, Any]]) -> str | None:
    if any(branch["type"] != "segment" or branch["queries"] != "dilated" for branch in branches):
        return None
    return "longnet:" + ",".join(f"{_length_text(branch)}/{branch['dilation']}" for branch in branches)


def _as_branch(branch: Mapping[str, Any]) -> str:
    if branch["type"] in _OF_TOKENS:
        return f"{branch['type']}={branch['tokens']}"
    dilation = f"/{branch['dilation']}" if branch["dilation"] != 1 else ""
    queries = f":{branch['queries']}" if branch["queries"] != _USUAL_QUERIES[branch["type"]] else ""
    return f"{branch['type']}={_length_text(branch)}{dilation}{queries}"


def _length_text(branch: Mapping[str, Any]) -> str:
    return "all" if branch["length"] is None else str(branch["length"])
