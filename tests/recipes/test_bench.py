"""The benchmarks measure at tiny sizes what their tables claim: positive numbers, and ratios that fit their seconds."""

import importlib
import json
import math
import re

import draw
import pytest
import speed
import torch
from timing import alternate, ratio

import hf_ring_attention as ra

TINY = ["--heads", "2", "--head-dim", "16"]
ONCE = ["--repeats", "1"]


@pytest.fixture
def tables(capsys, bench_in_this_process):
    """Returns the tables that a program prints: the rows of each, as texts and numbers; "-" is a NaN."""

    def measured(program, *words):
        importlib.import_module(program).main([*TINY, *words])
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        head, *found = printed.strip().split("\n\n")
        assert "2 heads x 16" in head
        return [[row for row in map(read, text.splitlines()) if len(row) > 1] for text in found]

    return measured


def read(line):
    """A name and the numbers behind it; nothing for lines of text."""
    name, *cells = re.split(r"  +", line.strip())
    numbers = [cell.rstrip("%") for cell in cells if re.fullmatch(r"-|[+-]?\d[\d.]*(e[+-]?\d+)?%?", cell)]
    return [name, *(math.nan if cell == "-" else float(cell) for cell in numbers)]


def test_speed(tables):
    (rows,) = tables("speed", "--tokens", "256", *ONCE, "--pattern", "window:64+4", "exact", "--no-flex")
    (_, sdpa, *ones), *ours = rows
    assert ones[1:3] == [1, 1] and len(ours) == 2
    for name, forward, both, forward_faster, faster, flops, of_floor in ours:
        assert 0 < forward < both
        # One turn: the ratio of medians is the median of ratios, but for the digits that are printed.
        assert forward_faster == pytest.approx(sdpa / forward, rel=0.03)
        assert faster == pytest.approx(ones[0] / both, rel=0.03)
        assert flops == pytest.approx(1 / ra.Pattern.parse(name).flop_share(256, num_heads=2), rel=0.01)
        assert of_floor == pytest.approx(faster / flops, rel=0.02)


def test_lengths_are_written_as_those_of_a_gpu(tables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--tokens", "128,256", *ONCE, "--pattern", "exact", "--json", "cpu.json"]
    assert [len(rows) for rows in tables("lengths", *words)[:2]] == [2, 2]
    found = json.loads((tmp_path / "cpu.json").read_text())
    for figure in ("both ms", "peak GiB"):
        lines = draw.lines_of(found["speed"], figure)
        assert {*lines} == {"sdpa", "exact"}
        assert all([tokens for tokens, _ in line] == [128, 256] for line in lines.values())
    assert [row["name"] for row in found["speed"]] == ["sdpa", "exact"] * 2
    assert all(row["both ms"] > 0 and row["peak GiB"] >= 0 for row in found["speed"])


def test_ideal(tables):
    (rows,) = tables("ideal", "--tokens", "256", *ONCE, "--pattern", "exact", "window:64")
    assert [row[0] for row in rows] == ["exact", "window:64"]
    for _, ring, ideal, forward, both, floor in rows:
        assert min(ring, ideal, forward, both, floor) > 0
        assert both == pytest.approx(ideal / ring, rel=0.03)


def test_decoding(tables, tmp_path):
    words = "--tokens 128 256 --layers 2 --kv-heads 1 --steps 2 --pattern exact window:32+4 --plot".split()
    for tokens, rows in zip((128, 256), tables("decoding", *words, str(tmp_path / "a.png"), *ONCE), strict=True):
        assert [row[0] for row in rows] == ["sdpa, whole cache", "exact", "window:32+4"]
        row_mib = 2 * 2 * 16 * 4 / 2**20  # 2 layers, keys and values of a head of 16 numbers
        for (name, ms, faster, mib, share), kept in zip(rows, (tokens, tokens, 36), strict=True):
            assert ms > 0 and faster == pytest.approx(rows[0][1] / ms, rel=0.03)
            # Four tokens in two turns come behind the text, and a growing cache has room for more.
            assert kept * row_mib <= mib * 1.01 <= (kept + 4) * 1.05 * row_mib, name
            assert share == pytest.approx(mib / rows[0][3], rel=0.03)
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_memory(tables):
    words = "--tokens 2k --rank-tokens 512 --ranks 1 2 --step-tokens 256 --pattern exact"
    attention, rings, steps = tables("memory", *words.split())
    assert [row[0] for row in attention] == ["sdpa", "exact"]
    for _, mib, share in attention:
        assert 0 < mib < 100 and share == pytest.approx(mib / attention[0][1], rel=0.03)
    assert [row[0] for row in rings] == ["ring", "collective"]
    ((_, weights, gradients, optimizer, kept, working, total, estimate, error),) = steps
    assert weights == gradients == pytest.approx(optimizer / 2, rel=0.01)
    assert total == pytest.approx(weights + gradients + optimizer + kept + working, rel=0.02)
    assert error == pytest.approx(100 * (estimate / total - 1), abs=1)


def test_peers(tables):
    words = ["--tokens", "256", "--ring-tokens", "256", "--sizes", "1", "2", "--pattern", "exact", "window:64"]
    ways, delays, rates = tables("peers", *words, *ONCE)
    assert len(ways) == 4 and all(min(row[1:6]) > 0 for row in ways)
    assert [row[2] > 1 for row in ways] == [False, True] * 2, "rows of one document, and packed ones"
    assert [math.isnan(row[6]) for row in ways] == [True, False] * 2, "only packed rows have another layout, the zigzag"
    assert [row[2] for row in delays] == [3, 3], "one hop forward, and two backward"
    assert delays[1][1] == pytest.approx(2 * delays[0][1], rel=0.02)
    for _, alone, both, share in rates:
        assert share == pytest.approx(both / (2 * alone), rel=0.02)


def test_systems(tables):
    words = "--tokens 128 --checkpointed-tokens 256 --pattern window:64 --parts systems checkpointing".split()
    rows, checkpointed = tables("systems", *words, *ONCE)
    (_, seconds, tokens, one, _), plain, *others = rows
    assert tokens == pytest.approx(128 / seconds, rel=0.02) and one == 1
    assert plain[2] == pytest.approx(2 * 128 / plain[1], rel=0.02), "a row on each process"
    assert [row[0] for row in others] == ["one process", "ring", "ring, cutting loader", "ring, FSDP 2"]
    for _, seconds, tokens, faster, error in others:
        assert tokens == pytest.approx(128 / seconds, rel=0.02)
        assert faster == pytest.approx(rows[0][1] / seconds, rel=0.03)
        assert math.isnan(error) or error < 1e-4
    (_, again, one, *busy), (name, kept, faster, *busy_kept, peak) = checkpointed
    assert name == "kept" and one == busy[1] == 1 and peak > 0
    assert faster == pytest.approx(again / kept, rel=0.03)
    assert busy_kept[1] == pytest.approx(busy[0] / busy_kept[0], rel=0.03)


def test_operations(tables):
    words = "--tokens 256 --ranks 2 --repeats 2 --pattern exact window:64"
    (rows,) = tables("operations", *words.split())
    assert [row[0] for row in rows[::3]] == ["exact", "window:64"] and len(rows) == 6
    for _, forward, backward, *milliseconds in rows:
        assert 0 < forward < backward
        # The time of one operation is the same everywhere, but for the digits that are printed.
        assert milliseconds[1] / milliseconds[0] == pytest.approx(backward / forward, rel=0.02)


@pytest.mark.parametrize("text", ["window:40+3", "pyramid:16,3", "exact"])
def test_masks_of_flex_attention_show_what_the_pattern_shows(text):
    pattern = ra.Pattern.parse(text)
    mask = speed.mask_of(pattern, 2)
    rows = torch.arange(120)
    for head in range(4):
        shown = mask(None, torch.tensor(head), rows[:, None], rows[None])
        for query in (0, 77, 119):
            heads = {"head": head, "num_heads": 4, "num_kv_heads": 2}
            assert shown[query].int().tolist() == [pattern.multiplicity(query, key, **heads) for key in rows.tolist()]
    for other in ("longnet:64/1,128/2", "kv0=exact;kv1=window:4"):
        with pytest.raises(ValueError, match="a mask"):
            speed.mask_of(ra.Pattern.parse(other), 1)


def test_what_computes_something_else_has_no_row(monkeypatch):
    monkeypatch.setattr(speed, "flex", lambda *_: lambda q, k, v: speed.sdpa(q, k, v))
    rows, refused = speed.measure(speed.Shape(2, 2, 16), 256, ["window:16", "exact"], 1)
    made = ["sdpa, all keys", "ours, window:16", "ours, exact", "flex, exact"]
    assert [f"{row['by']}, {row['attention']}" for row in rows] == made
    assert len(refused) == 1 and refused[0].startswith("flex has no row of window:16: its relative error is ")


def test_turns_alternate_and_the_first_does_not_count():
    order = []
    runs = alternate({name: lambda name=name: (order.append(name) or len(order),) for name in "ab"}, 2)
    assert order == [*"ba", *"ab", *"ba"]
    assert runs == {"a": [(3,), (6,)], "b": [(4,), (5,)]}
    assert ratio(runs, "a", "b") == (3 / 4 + 6 / 5) / 2
