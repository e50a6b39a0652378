"""Measures attention by pattern beside other implementations: in one run, on the same tensors, in turns.

Times are medians, and ratios are medians of the ratios of one repeat, which a busy machine changes less.
Before any is timed, its first call, which compiles it and does not count, is compared with the dense oracle: what computes
something else is not timed. Since attention is causal, the first tokens of a long row are a short row of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compute.reference import reference_attention
from ...plan.patterns import Pattern
from ..output import Sheet
from .contestants import DENSE, OURS, Contestant, contestants_of, dense_attention, first_line
from .harness import CallShape, alternately, forward_backward, progress, timed

#: The patterns that are compared where none is named.
PEER_PATTERNS = ["window:512+4", "window:512", "pyramid:512,3", "exact"]
#: The tokens at the beginning of a row that are compared with the oracle, whose matrices have all pairs of them.
_CHECKED = 1024
#: The relative errors that rounding may make, by dtype; a key too many or too few in a window of 512 makes larger ones.
_LIMITS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
#: Of forward without gradients, and of forward + backward; None where there is no backward.
Seconds = tuple[float, float | None]


def relative_error(computed: Tensor, expected: Tensor) -> float:
    """Returns the Euclidean distance of two tensors, as a share of the length of the second one."""
    return float(torch.dist(computed.double(), expected.double()) / expected.double().norm())


class Oracle:
    """The dense definition of a pattern on the first tokens of a row, with the gradients of q, k and v."""

    def __init__(self, pattern: str, tensors: Tensors) -> None:
        self.tokens = min(_CHECKED, tensors[0].shape[2])
        q, k, v = (x[:, :, : self.tokens].detach().double().requires_grad_() for x in tensors[:3])
        out, _ = reference_attention(q, k, v, pattern=Pattern.parse(pattern))
        gradients = torch.autograd.grad(out, (q, k, v), tensors[3][:, :, : self.tokens].double())
        self.expected = [out.detach(), *gradients]

    def error_of(self, contestant: Contestant, tensors: Tensors) -> tuple[float, Tensor]:
        """Runs a contestant, and returns the largest relative error of outputs and gradients, and all its outputs.

        The gradient of the output is zero behind the first tokens, so that those behind them give them none.
        """
        dout = tensors[3].clone()
        dout[:, :, self.tokens :] = 0
        with torch.no_grad():
            out = contestant.attend(*(x.detach() for x in tensors[:3]))
        pairs = [(out, self.expected[0])]
        if contestant.has_backward:
            q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
            trained = contestant.attend(q, k, v)
            pairs += zip([trained.detach(), *torch.autograd.grad(trained, (q, k, v), dout)], self.expected)
        return max(relative_error(x[:, :, : self.tokens], expected) for x, expected in pairs), out


def check_contestant(
    contestant: Contestant, oracle: Oracle, tensors: Tensors, dtype: str, ours: Tensor | None
) -> tuple[float | None, str | None, Tensor | None]:
    """Runs a contestant once, and returns its error, why it is not timed (None where it is), and its outputs.

    Args:
        ours: this package's outputs under the same pattern, with which the outputs of all tokens are compared.
    """
    try:
        error, out = oracle.error_of(contestant, tensors)
    except (ImportError, OSError, RuntimeError, ValueError) as failure:
        if contestant.name == OURS:
            raise
        return None, f"it does not run here: {first_line(failure)}", None
    if ours is not None:
        error = max(error, relative_error(out, ours))
    if not error <= _LIMITS[dtype]:  # A NaN is wrong too.
        return error, f"not timed: its relative error is {error:.1e}, and {_LIMITS[dtype]:.0e} is allowed", out
    return error, None, out


def time_contestants(
    contestants: Sequence[Contestant], tensors: Tensors, repeats: int, device: str
) -> dict[tuple[str, str], list[Seconds]]:
    """Returns the seconds of forward without gradients and of forward + backward in each repeat, by pattern and name."""
    by_key: dict[Any, Contestant] = {(contestant.pattern, contestant.name): contestant for contestant in contestants}
    runs: dict[Any, list[Seconds]] = {key: [] for key in by_key}
    keys: list[Any] = list(by_key)
    for number in progress(range(repeats), "peers"):
        for key in alternately(keys, number):
            attend = by_key[key].attend
            with torch.no_grad():
                # Where backward is missing, tensors that require gradients are refused even here.
                inputs = [x.detach() for x in tensors[:3]]
                forward, _ = timed(lambda attend=attend, inputs=inputs: attend(*inputs), device)  # type: ignore[misc]
            both = sum(forward_backward(attend, tensors, device)) if by_key[key].has_backward else None
            runs[key].append((forward, both))
    return runs


def measure_peers(shape: CallShape, tokens: int, patterns: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Returns the seconds and errors of this package and its peers under each pattern.

    torch's dense attention, which has no pattern, is timed once in each repeat, and has a row beside every pattern.

    Returns:
        A dict for each row: "pattern"; "attention" with its version; "computes", which is "exact" for dense attention;
        the seconds "forward" and "both", and "forward_ratio" and "both_ratio" to ours; "error"; and "skipped", why there
        are no seconds. What is not known is None.
    """
    tensors = shape.tensors(tokens)
    dense = dense_attention()
    groups = {pattern: contestants_of(pattern, tokens, shape) for pattern in patterns}
    checks: dict[tuple[str, str], tuple[float | None, str | None]] = {}
    for pattern in progress(dict.fromkeys([*patterns, dense.pattern]), "checks"):
        oracle, ours = Oracle(pattern, tensors), None
        group = [*(groups[pattern][0] if pattern in groups else []), *([dense] if pattern == dense.pattern else [])]
        for contestant in group:
            error, reason, out = check_contestant(contestant, oracle, tensors, shape.dtype, ours)
            ours = out if ours is None and reason is None and contestant.name == OURS else ours
            checks[pattern, contestant.name] = error, reason
    everyone = [dense, *(contestant for found, _ in groups.values() for contestant in found)]
    timed_ones = [contestant for contestant in everyone if checks[contestant.pattern, contestant.name][1] is None]
    runs = time_contestants(timed_ones, tensors, repeats, shape.device)
    rows = []
    for pattern, (found, missing) in groups.items():
        own = runs.get((pattern, found[0].name), [])
        for contestant in (*found, dense):
            key = contestant.pattern, contestant.name
            row = _row(pattern, contestant.name, runs.get(key, []), own)
            error, reason = checks[key]
            rows.append(row | {"computes": contestant.pattern, "error": error, "skipped": reason})
        rows += [_row(pattern, name, [], own) | {"skipped": reason} for name, reason in missing.items()]
    return rows


def _row(pattern: str, name: str, runs: Sequence[Seconds], own: Sequence[Seconds]) -> dict[str, Any]:
    pairs = list(zip(runs, own))
    return {
        "pattern": pattern,
        "attention": name,
        "computes": pattern,
        "forward": _median([forward for forward, _ in runs]),
        "both": _median([both for _, both in runs]),
        "forward_ratio": _median([theirs[0] / ours[0] for theirs, ours in pairs]),
        "both_ratio": _median([theirs[1] and ours[1] and theirs[1] / ours[1] for theirs, ours in pairs]),
        "error": None,
        "skipped": None,
    }


def _median(numbers: Sequence[float | None]) -> float | None:
    """Returns the median of the numbers that are known, or None without any."""
    known = [number for number in numbers if number is not None]
    return statistics.median(known) if known else None


def peers_report(rows: list[dict[str, Any]], shape: CallShape, tokens: int, repeats: int) -> Sheet:
    """Returns the table of `measure_peers`, and below it why some rows have no seconds."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["skipped"]:
            reasons.setdefault(f"{row['attention']}: {row['skipped']}", []).append(row["pattern"])
    notes = [
        f"{DENSE} computes all keys, whatever the pattern.",
        "/ ours: the seconds over those of the first row of the pattern in the same repeat; more than 1 is slower.",
        f"error: of outputs and gradients of the first {min(_CHECKED, tokens)} tokens against the dense oracle, or of all "
        f"outputs against ours, whichever is larger.",
    ]
    notes += [f"{reason} ({', '.join(patterns)})" for reason, patterns in reasons.items()]
    return Sheet(
        f"ours and peers, {tokens} tokens, {shape.heads}/{shape.kv_heads} heads x {shape.head_dim}, {shape.dtype}, "
        f"medians of {repeats} runs",
        ("pattern", "attention", "forward s", "/ ours", "forward + backward s", "/ ours", "error"),
        [
            (
                row["pattern"],
                row["attention"],
                _shown(row["forward"], ".3f"),
                _shown(row["forward_ratio"], ".2f"),
                "no backward on CPU" if row["forward"] and not row["both"] else _shown(row["both"], ".3f"),
                _shown(row["both_ratio"], ".2f"),
                _shown(row["error"], ".1e"),
            )
            for row in rows
        ],
        notes,
        left=2,
    )


def _shown(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
