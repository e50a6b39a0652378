"""The command line: what it prints, and that bad arguments end it with a reason."""

import json
import re
import subprocess
import sys

import pytest

from hf_ring_attention.plan.patterns import Pattern, Sink, Window
from hf_ring_attention.tools import cli
from hf_ring_attention.tools.benchmarks.harness import CallShape


def test_explain(capsys):
    cli.main(["explain", "--tokens", "131072", "--world-size", "8", "--heads", "32", "--kv-heads", "8"])
    printed = capsys.readouterr().out
    assert re.search(r"^transport  ring: the busiest of 8 ranks needs 448\.0 MiB", printed, re.MULTILINE)
    assert re.search(r"^\| ring \| 448\.0 \| 448\.0 \|", printed, re.MULTILINE)


def test_what_the_library_refuses_ends_the_program_with_its_reason():
    with pytest.raises(SystemExit, match=r"hf-ring-attention: .*serves 1 rank, got 8"):
        cli.main("explain --tokens 64 --world-size 8 --heads 4 --transport local".split())


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("exact", Pattern.exact()),
        ("window:64", Pattern((Window(64),))),
        ("window:64+4", Pattern((Sink(4), Window(64)))),
        ("pyramid:64,3", Pattern.pyramid(64, 3)),
        ("longnet:64/1,256/4,all/8", Pattern.longnet([64, 256, None], [1, 4, 8])),
    ],
)
def test_patterns_by_name(text, pattern):
    assert Pattern.parse(text) == pattern


def test_a_share_of_the_heads_keeps_whole_groups():
    """The ideal of --speed computes some heads of all, in groups of the number of key/value heads that divides them."""
    for heads, kv_heads, share in ((8, 2, 4), (8, 8, 4), (10, 5, 5), (12, 4, 3), (8, 2, 1)):
        q, k, v, _ = CallShape(heads, kv_heads, 4).tensors(6, share)
        assert q.shape == (1, share, 6, 4)
        assert k.shape == v.shape and share % k.shape[1] == 0 and kv_heads % k.shape[1] == 0


def test_bench(tmp_path):
    """Every part at a size that takes seconds; figures are there and their table says the same."""
    small = (
        "--repeats 1 --heads 4 --head-dim 8 --lengths 64 128 --exact-tokens 256 --longnet-tokens 512 "
        f"--tokens-per-rank 64 --memory-ranks 2 --json {tmp_path / 'figures.json'}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "hf_ring_attention", "bench", *small.split()],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {(row["pattern"], row["tokens"]) for row in figures["transport"]} == {
        (pattern, tokens) for pattern in ("exact", "longnet", "window") for tokens in (64, 128)
    }
    good = sum(row["auto_over_best"] <= 1.1 for row in figures["transport"])
    assert f"auto is within 10 % of the better one in {good} of 6 cells" in done.stdout
    assert [row["pattern"].split(",")[0] for row in figures["speed"]] == ["exact", "longnet"]
    assert all(row["both"] > 0 for row in figures["speed"])
    assert set(figures["memory"]) == {"ring", "collective"}
    assert set(figures["memory"]["ring"]) == {"2"}
    # Two ranks: one hop of keys and values in each of the rounds, forward; as many of gradients in backward.
    assert [row["share"] for row in figures["overlap"]] == [0.4, 0.8]
    assert all(row["hops"] % 3 == 0 for row in figures["overlap"])
