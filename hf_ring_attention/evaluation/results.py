"""The figures of an evaluation from its records: means with intervals, in the layout of lm-evaluation-harness's results.

The harness keeps a task's figures under "metric,filter"; here the filter is the pattern. What it has no place for (intervals,
figures by depth and by position, costs) stands beside, under keys of its own.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .bootstrap import bootstrap_interval, share_interval
from .jobs import EvaluationPlan

#: Whether more is better, by metric.
HIGHER_IS_BETTER = {
    "perplexity": False,
    "bits_per_byte": False,
    "long_perplexity": False,
    "string_match_all": True,
    "string_match_part": True,
    "acc": True,
    "answer_rank": False,
}


def _ratio(sums: Sequence[float], counts: Sequence[float], seed: int, scale: Any = float) -> dict[str, Any]:
    """Returns scale(sum / sum) with its interval and what it is of."""
    pairs = [(total, count) for total, count in zip(sums, counts) if count > 0]
    if not pairs:
        return {"value": None, "low": None, "high": None, "stderr": None, "samples": 0}
    sums, counts = zip(*pairs)
    interval = bootstrap_interval(sums, counts, seed=seed)
    low, high = (None, None) if interval is None else map(scale, interval)
    value = scale(sum(sums) / sum(counts))
    return {"value": value, "low": low, "high": high, "stderr": None, "samples": len(pairs)}


def _mean(values: Sequence[float], seed: int) -> dict[str, Any]:
    """Returns the mean of values with its interval, and its standard error as the harness has it."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return _ratio(values, [1] * len(values), seed) | {"stderr": error}


def _share(values: Sequence[float], seed: int) -> dict[str, Any]:
    """Returns the mean of scores from 0 to 1, likewise."""
    figures = _mean(values, seed)
    low, high = share_interval(figures["value"], len(values))
    return figures | {"low": low, "high": high}


def _metrics(task: str, records: Sequence[Mapping[str, Any]], seed: int) -> dict[str, dict[str, Any]]:
    """Returns the figures of the records of a task, pattern and length, by metric."""

    def column(name: str) -> list[float]:
        return [record[name] for record in records]

    if task == "perplexity":
        return {
            "perplexity": _ratio(column("nll"), column("tokens"), seed, math.exp),
            "bits_per_byte": _ratio(column("nll"), column("bytes"), seed, lambda nats: nats / math.log(2)),
        }
    if task == "longppl":
        return {"long_perplexity": _ratio(column("nll"), column("tokens"), seed, math.exp)}
    figures = {}
    if "match" in records[0]:
        figures[f"string_match_{records[0]['scoring']}"] = _share(column("match"), seed)
    if "rank" in records[0]:
        figures["acc"] = _share([float(rank == 1) for rank in column("rank")], seed)
        figures["answer_rank"] = _mean(column("rank"), seed)
    return figures


def cells_of(plan: EvaluationPlan, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the figures of each task, pattern, length and metric, and of each depth where there are several.

    A cell has "task", "pattern", "length", "depth" (None for all of them together), "metric", "value" (None where nothing
    was scored), "low", "high" (the ends of the interval, None for a single sample), "stderr" and "samples".
    """
    groups: dict[tuple[str, str, int, float | None], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        task, pattern, length, depth = (record[name] for name in ("task", "pattern", "length", "depth"))
        groups[task, pattern, length, None].append(record)
        if depth is not None:
            groups[task, pattern, length, depth].append(record)
    cells = []
    order = {name: number for number, name in enumerate((*plan.tasks, *plan.patterns))}
    for key in sorted(groups, key=lambda x: (order[x[0]], x[2], x[3] is not None, x[3] or 0, order[x[1]])):
        task, pattern, length, depth = key
        # An interval must not depend on the order in which processes wrote records.
        of_cell = sorted(groups[key], key=lambda record: (record["depth"] or 0, record["number"]))
        for metric, figures in _metrics(task, of_cell, plan.seed).items():
            names = {"task": task, "pattern": pattern, "length": length, "depth": depth, "metric": metric}
            cells.append(names | figures)
    return cells


def positions_of(plan: EvaluationPlan, records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[list[float]]]]:
    """Returns (first position, mean loss in nats, tokens) of each bucket of positions, by length and by pattern."""
    sums: dict[tuple[int, str, int], list[float]] = defaultdict(lambda: [0.0, 0])
    for record in records:
        for first, nll, tokens in record.get("by_position") or ():
            entry = sums[record["length"], record["pattern"], first]
            entry[0], entry[1] = entry[0] + nll, entry[1] + tokens
    found: dict[str, dict[str, list[list[float]]]] = {}
    for length in plan.lengths:
        for pattern in plan.patterns:
            buckets = sorted(
                (first, *entry) for (n, one, first), entry in sums.items() if (n, one) == (length, pattern)
            )
            if buckets:
                means = [[first, nll / tokens, tokens] for first, nll, tokens in buckets]
                found.setdefault(str(length), {})[pattern] = means
    return found


def seconds_of(plan: EvaluationPlan, records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the median seconds of a pass, by "scoring" (texts) or "reading" (prompts), by length and by pattern."""
    times: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for record in records:
        kind, name = ("reading", "reading_seconds") if "reading_seconds" in record else ("scoring", "seconds")
        times[kind, record["length"], record["pattern"]].append(record[name])
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in ("scoring", "reading"):
        for length in plan.lengths:
            for pattern in plan.patterns:
                if times[kind, length, pattern]:
                    of_kind = found.setdefault(kind, {}).setdefault(str(length), {})
                    of_kind[pattern] = statistics.median(times[kind, length, pattern])
    return found


def remarks_on(plan: EvaluationPlan, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what readers must know where they got something other than what the settings say."""
    remarks = []
    scored = [record for record in records if record["task"] == "perplexity"]
    if plan.stride is None:
        # Nothing predicts the first token, and none that opens a text is scored.
        short = {r["document"] for r in scored if r["tokens"] < r["length"] - max(1, r["opening"])}
        if short:
            remarks.append(
                f"Shorter than a length, and scored with all tokens that they have: {', '.join(sorted(short))}."
            )
    if scored and len({record["document"] for record in scored}) < 2:
        remarks.append("There is one piece of text, so perplexities have no interval: name more texts, or longer ones.")
    none = {record["document"] for record in records if record["task"] == "longppl" and not record["tokens"]}
    if none:
        remarks.append(f"No token gains from the long context, so LongPPL leaves them out: {', '.join(sorted(none))}.")
    if any(record.get("repeats") for record in records):
        remarks.append("The texts are shorter than some prompts, in which they repeat.")
    for task in plan.retrieval:
        for length in plan.lengths:
            tokens = [r["prompt_tokens"] for r in records if (r["task"], r["length"]) == (task, length)]
            if tokens and statistics.mean(tokens) < 0.8 * length:
                remarks.append(
                    f"Prompts of {task} at {length} tokens have {statistics.mean(tokens):.0f} on average: whole units of their "
                    f"haystack and the room for the answer leave no place for more, or the word list ends."
                )
    return remarks


def results_of(
    plan: EvaluationPlan, records: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], notes: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns all results as JSON.

    Args:
        facts: keys that are taken over as they are: "config", "date", "flop_share", ...
        notes: those of `task_notes`.
    """
    rows = [
        dict(record) | {"scoring": notes[record["task"]].get("scoring", "").rpartition("_")[2]} for record in records
    ]
    cells = cells_of(plan, rows)
    results: dict[str, dict[str, Any]] = {}
    intervals: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if cell["depth"] is not None or cell["value"] is None:
            continue
        name, key = f"{cell['task']}_{cell['length']}", f"{cell['metric']},{cell['pattern']}"
        entry = results.setdefault(name, {"alias": name})
        entry[key] = cell["value"]
        entry[f"{cell['metric']}_stderr,{cell['pattern']}"] = "N/A" if cell["stderr"] is None else cell["stderr"]
        intervals.setdefault(name, {})[key] = [cell["low"], cell["high"]]
    names = {f"{task}_{length}": (task, length) for task in plan.tasks for length in plan.lengths}
    counts = {
        name: len({(r["depth"], r["number"]) for r in rows if (r["task"], r["length"]) == names[name]})
        for name in results
    }
    metrics = {name: sorted({key.partition(",")[0] for key in intervals[name]}) for name in results}
    return {
        "results": results,
        "group_subtasks": {name: [] for name in results},
        "configs": {
            name: {"task": names[name][0], "length": names[name][1], **notes[names[name][0]]} for name in results
        },
        "versions": {name: notes[names[name][0]]["version"] for name in results},
        "n-shot": {name: 1 if names[name][0] in ("variable_tracking", "common_words") else 0 for name in results},
        "higher_is_better": {name: {metric: HIGHER_IS_BETTER[metric] for metric in metrics[name]} for name in results},
        "n-samples": {name: {"original": count, "effective": count} for name, count in counts.items()},
        **facts,
        "intervals": intervals,
        "cells": cells,
        "loss_by_position": positions_of(plan, rows),
        "seconds": seconds_of(plan, rows),
        "remarks": remarks_on(plan, rows),
    }
