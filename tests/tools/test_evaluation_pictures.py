"""Pictures of an evaluation show all its figures, and no label lies on another or leaves the picture."""

import json
import re

import pytest

from hf_ring_attention.evaluation.jobs import EvaluationPlan
from hf_ring_attention.evaluation.results import cells_of, results_of
from hf_ring_attention.evaluation.tracing import RULER
from hf_ring_attention.tools.evaluation_plots import plot_evaluation, quality_by_pattern
from hf_ring_attention.tools.evaluation_report import report_text

PATTERNS = ("exact", "window:512+4", "pyramid:512,3", "longnet:512/1,2048/4,all/8@query_head", "own")
LENGTHS = (2048, 4096, 8192)


@pytest.fixture
def saved(monkeypatch):
    """The figures that were saved, by the names of their files."""
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    figures, save = {}, figure_class.savefig

    def remember(figure, path, *args, **kwargs):
        figures[path.name.removesuffix(".part")] = figure  # They are written beside their names.
        save(figure, path, *args, **kwargs)

    monkeypatch.setattr(figure_class, "savefig", remember)
    return figures


def made_up(rng):
    """Results of random records of every kind of task."""
    tasks, depths = ("perplexity", "longppl", "passkey", *RULER), (0.0, 0.25, 0.5, 0.75, 1.0)
    plan = EvaluationPlan(PATTERNS, tasks, LENGTHS, depths, samples=2)
    records, notes = [], {task: {"version": 1, "scoring": "string_match_all"} for task in tasks}
    for task in tasks:
        for pattern in PATTERNS:
            for length in LENGTHS:
                for depth in depths if task == "passkey" else [None]:
                    for number in range(2):
                        key = dict(
                            zip(
                                ("task", "pattern", "length", "depth", "number"), (task, pattern, length, depth, number)
                            )
                        )
                        tokens = rng.randint(1, length)
                        record = {"document": f"book {number}", "nll": tokens * rng.uniform(2, 3), "tokens": tokens}
                        if task == "perplexity":
                            buckets = [[first, rng.uniform(2, 3), 1] for first in (1, 64, 91, 128, 1024)]
                            record |= {"bytes": 4 * tokens, "opening": 0, "by_position": buckets}
                        if task not in ("perplexity", "longppl"):
                            record = {
                                "prompt_tokens": length,
                                "repeats": False,
                                "match": rng.random(),
                                "rank": rng.randint(1, 8),
                            }
                            record["reading_seconds"] = rng.random()
                        records.append(key | record | {"seconds": rng.random()})
    config = {"patterns": list(PATTERNS), "lengths": list(LENGTHS), "dtype": "float32", "draws": 2000, "random_seed": 0}
    config["package_versions"] = {"torch": "2"}
    facts = {"config": config, "model_name": "m", "machine": "a CPU", "command": "evaluate", "complete": True}
    facts["flop_share"] = {pattern: {str(length): rng.random() for length in LENGTHS} for pattern in PATTERNS}
    return plan, records, json.loads(json.dumps(results_of(plan, records, facts, notes)))


def boxes_of(figure):
    """The places of all texts that are shown."""
    from matplotlib.text import Text

    figure.draw_without_rendering()  # Places are those of the resolution of the file, as it was saved last.
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent()) for text in texts]


def test_all_pictures_show_all_patterns_and_their_labels_lie_apart(rng, saved, tmp_path):
    plan, _, results = made_up(rng)
    drawn = plot_evaluation(results, tmp_path)
    assert (
        set(drawn)
        == saved.keys()
        == {
            *("pareto.png", "loss_by_position.png", "passkey_generated.png", "passkey_likelihood.png"),
            *("tasks_generated.png", "tasks_likelihood.png"),
        }
    )
    for name, figure in saved.items():
        # Numbers of ticks that lie outside an axis are texts that are not drawn.
        boxes = [(text, box) for text, box in boxes_of(figure) if not re.fullmatch(r"\W*[\d.]+[kM%]?", text)]
        assert set(PATTERNS) <= {text for text, _ in boxes}, name
        for text, box in boxes:
            assert (
                box.x0 >= -1 and box.x1 <= figure.bbox.width + 1 and box.y0 >= -1 and box.y1 <= figure.bbox.height + 1
            ), (name, text)
        words = [(text, box) for text, box in boxes if len(text) > 4]
        for number, (text, box) in enumerate(words):
            for other, second in words[:number]:
                assert not box.overlaps(second), (name, text, other)
    shares = [text for text, _ in boxes_of(saved["passkey_generated.png"]) if text.count(".") == 1 and len(text) == 4]
    assert len(shares) == len(PATTERNS) * len(LENGTHS) * len(plan.depths)
    report = report_text(results, drawn)
    assert all(f"![{title}]({file})" in report for file, title in drawn.items())


def test_figures_are_means_over_what_they_name(rng):
    plan, records, results = made_up(rng)
    for cell in rng.sample(results["cells"], 60):
        own = [
            r
            for r in records
            if all(r[name] == cell[name] for name in ("task", "pattern", "length"))
            and cell["depth"] in (None, r["depth"])
        ]
        if cell["metric"] in ("perplexity", "long_perplexity"):
            expected = 2.718281828459045 ** (sum(r["nll"] for r in own) / sum(r["tokens"] for r in own))
        elif cell["metric"] == "bits_per_byte":
            expected = sum(r["nll"] for r in own) / 0.6931471805599453 / sum(r["bytes"] for r in own)
        else:
            values = {
                "string_match_all": [r.get("match") for r in own],
                "acc": [float(r.get("rank") == 1) for r in own],
            }
            values = values.get(cell["metric"]) or [r["rank"] for r in own]
            expected = sum(values) / len(values)
        assert cell["value"] == pytest.approx(expected, rel=1e-9)
        assert cell["low"] <= cell["value"] <= cell["high"] and cell["samples"] == len(own)
    shuffled = rng.sample(records, len(records))
    rows = [[record | {"scoring": "all"} for record in some] for some in (records, shuffled)]
    assert cells_of(plan, rows[0]) == cells_of(plan, rows[1]), "the order of records counts"
    length, found = quality_by_pattern(results, "acc")
    own = [
        c["value"]
        for c in results["cells"]
        if (c["metric"], c["length"], c["pattern"], c["depth"]) == ("acc", 8192, "own", None)
    ]
    assert length == 8192 and found["own"][0] == pytest.approx(sum(own) / len(own)) and len(own) == 8
