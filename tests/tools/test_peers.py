"""The benchmark beside other implementations: all compute the same, and what cannot run says why in one line."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import multiplicity_matrix, reference_attention
from hf_ring_attention.tools.benchmarks import peer_table, peers
from hf_ring_attention.tools.benchmarks.block_masks import BLOCK, block_mask, mask_function
from hf_ring_attention.tools.benchmarks.contestants import (
    DENSE,
    FLEX,
    LOCAL,
    OURS,
    Contestant,
    buckets_of,
    contestants_of,
)
from hf_ring_attention.tools.benchmarks.harness import CallShape
from hf_ring_attention.tools.commands import bench
from tests.support.cases import random_pattern


def without_counts(rng):
    """A random pattern that shows each key once at most, whatever the length of a document."""
    while True:
        pattern = random_pattern(rng)
        if any(isinstance(branch, ra.Last) for branch in pattern.branches):
            continue
        if pattern.overlap == "once" or len(pattern.branches) == 1:
            return pattern


def positions(tokens, heads):
    """The arguments of a mask, which are all heads, queries and keys."""
    return None, torch.arange(heads)[:, None, None], torch.arange(tokens)[:, None], torch.arange(tokens)


def test_the_mask_of_a_pattern_is_its_definition(rng):
    for _ in range(150):
        pattern = without_counts(rng)
        kv_heads = rng.choice([1, 2, 3])
        heads, tokens = kv_heads * rng.choice([1, 2]), rng.randint(1, 40)
        visible = mask_function(pattern, heads, kv_heads)(*positions(tokens, heads))
        expected = multiplicity_matrix(pattern, tokens, heads, kv_heads, True)
        assert torch.equal(visible.expand(heads, tokens, tokens).double(), expected), (pattern, tokens, heads, kv_heads)


@pytest.mark.parametrize("tokens", [1, BLOCK, 5 * BLOCK - 77])
@pytest.mark.parametrize(
    "text", ["exact", "window:150+2", "pyramid:60,3", "branches:segment=256,segment=all/4:all@query_head"]
)
def test_blocks_are_those_of_create_block_mask(text, tokens):
    pattern, heads = ra.Pattern.parse(text), 4
    computed = block_mask(pattern, tokens, heads, 2, "cpu")
    whole = create_block_mask(mask_function(pattern, heads, 2), None, heads, tokens, tokens, device="cpu")
    assert computed.seq_lengths == whole.seq_lengths and computed.BLOCK_SIZE == whole.BLOCK_SIZE
    for kind in ("kv", "full_kv"):
        counts, expected = (getattr(mask, f"{kind}_num_blocks") for mask in (computed, whole))
        assert torch.equal(counts.expand_as(expected), expected)
        numbers, indices = (getattr(mask, f"{kind}_indices") for mask in (computed, whole))
        shown = torch.arange(indices.shape[-1]) < expected[..., None]  # What is behind them is not read.
        assert torch.equal(numbers.expand_as(indices)[shown], indices[shown])


def test_a_pattern_that_counts_keys_has_no_mask():
    found, missing = contestants_of("longnet:64/1,all/4", 128, CallShape(2, 2, 8))
    assert [contestant.name for contestant in found] == [OURS]
    assert missing == {FLEX: "a mask shows a key or hides it, and this pattern counts some keys several times"}


def compute(contestant, tokens, heads, kv_heads):
    """What a contestant computes, and the oracle's."""
    q, k, v, _ = (x.detach() for x in CallShape(heads, kv_heads, 16).tensors(tokens))
    expected, _ = reference_attention(q, k, v, pattern=ra.Pattern.parse(contestant.pattern))
    return contestant.attend(q, k, v).double(), expected


def test_buckets_show_a_query_and_the_keys_of_its_window_before_it():
    assert buckets_of(512) == (73, 7)
    assert buckets_of(128) == (127, 1)  # 127 is prime.
    for window in range(1, 700):
        size, back = buckets_of(window)
        assert size * back == window - 1
        assert size >= min(64, window - 1)


@pytest.mark.parametrize("window", [1, 2, 33, 64, 129, 500])
def test_local_attention_is_the_oracle(window):
    pytest.importorskip("local_attention", reason="it is not installed: pip install local-attention")
    (peer,) = (one for one in contestants_of(f"window:{window}", 300, CallShape(4, 2, 16))[0] if LOCAL in one.name)
    torch.testing.assert_close(*compute(peer, 300, 4, 2), atol=1e-5, rtol=1e-5)


def test_local_attention_takes_part_in_plain_windows_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "local_attention", None)  # any import of it fails
    for text, named in (("window:8", True), ("window:8+1", False), ("pyramid:8,2", False), ("exact", False)):
        found, missing = contestants_of(text, 32, CallShape(2, 2, 8))
        assert [contestant.name for contestant in found] == [OURS, FLEX]
        assert [*missing] == ([LOCAL] if named else [])
        assert all(reason.endswith(": pip install local-attention") for reason in missing.values())


def test_what_computes_something_else_is_not_timed(monkeypatch):
    """A window of one key too many, a wrong gradient, a wrong output far behind; and what fails says its first line."""

    def attend(q, k, v, pattern="window:32"):
        return ra.ring_attention(q, k, v, pattern=pattern)

    def wrong_gradient(q, k, v):
        return attend(q, k * 2 - k.detach(), v)

    def wrong_behind(q, k, v):
        out = attend(q, k, v)
        return torch.cat([out[:, :, :-1], 2 * out[:, :, -1:]], 2)

    def fail(q, k, v):
        raise NotImplementedError("\nno such thing\nand more")

    monkeypatch.setattr(peers, "CHECKED_TOKENS", 100)
    tensors = CallShape(2, 1, 8).tensors(150)
    oracle = peers.Oracle("window:32", tensors)

    def check(attend, name="peer", ours=None):
        return peers.check_contestant(Contestant(name, "window:32", attend), oracle, tensors, "float32", ours)

    error, reason, ours = check(attend)
    assert error < 1e-5 and reason is None
    assert check(attend, ours=ours)[1] is None
    for wrong in (lambda *x: attend(*x, "window:33"), wrong_gradient, wrong_behind, lambda *x: attend(*x) * torch.nan):
        assert "not timed: its relative error is " in check(wrong, ours=ours)[1]
    assert check(wrong_behind)[1] is None  # Of this one, the oracle sees nothing.
    assert check(fail) == (None, "it does not run here: no such thing", None)
    with pytest.raises(NotImplementedError):
        check(fail, OURS)


def test_contestants_take_turns():
    calls = []

    def attend(name):
        return lambda q, k, v: (calls.append(name), q + k + v)[1]

    contestants = [
        Contestant("a", "exact", attend("a")),
        Contestant("b", "exact", attend("b"), no_backward="it has none"),
    ]
    runs = peers.time_contestants(contestants, CallShape(2, 2, 4).tensors(8), 3, "cpu")
    assert "".join(calls) == "baa" + "aab" + "baa"  # a has a call without gradients, and one with them.
    assert [len(seconds) for seconds in runs.values()] == [3, 3]
    assert all(both > 0 for _, both in runs["exact", "a"]) and all(both is None for _, both in runs["exact", "b"])


def test_ratios_are_those_of_one_repeat(monkeypatch):
    """The machine is thrice as slow in the second repeat, and twice as slow in the last one."""
    runs = {OURS: [(1.0, 4.0), (3.0, 12.0), (2.0, 8.0)], FLEX: [(2.0, None), (6.0, None), (3.0, None)]}
    runs[DENSE] = [(4.0, 8.0), (12.0, 36.0), (9.0, 16.0)]

    def contestants_of(pattern, tokens, shape):
        return [Contestant(name, pattern, None) for name in (OURS, FLEX)], {LOCAL: "it is too late"}

    def time_contestants(contestants, *rest):
        return {(one.pattern, one.name): runs[one.name] for one in contestants}

    monkeypatch.setattr(peers, "contestants_of", contestants_of)
    monkeypatch.setattr(peers, "time_contestants", time_contestants)
    monkeypatch.setattr(peers, "check_contestant", lambda *call: (1e-7, None, None))
    monkeypatch.setattr(
        peers, "launch", lambda function, ranks, shape, tokens, keys, threads: dict.fromkeys(keys, 2**20)
    )
    ours, flex, dense, local = peers.measure_peers(CallShape(1, 1, 2), 4, ["window:2"], 3)
    times = ("forward", "both", "forward_ratio", "both_ratio", "error")
    assert [ours[name] for name in times] == [2, 8, 1, 1, 1e-7]
    assert [flex[name] for name in times] == [3, None, 2, None, 1e-7]
    assert [dense[name] for name in times] == [9, 16, 4, 2, 1e-7]
    assert (dense["pattern"], dense["computes"]) == ("window:2", "exact")
    # Each of 4 queries sees 2 keys, but the first: 7 of 10 pairs. Of the runs, the middle ratio counts; flex has no backward.
    assert [row["of_floor"] for row in (ours, flex, dense)] == pytest.approx([2 * 0.7, 2 * 0.7, 0.7])
    assert [row["peak_bytes"] for row in (ours, flex, dense, local)] == [2**20] * 3 + [None]
    assert [local[name] for name in (*times, "skipped")] == [None] * 5 + ["it is too late"]


def run_peers(words, environment):
    """What `bench peers` writes to stdout, read as JSON, and to stderr, in one line."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hf_ring_attention", "bench", "peers", "--json", "--repeats", "1"),
            *("--ranks", "1", "--simulated-ranks", "1", *words.split()),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), " ".join(done.stderr.split())


def test_peers_run_only_when_they_are_named(tmp_path):
    """In one run, where torch finds no compiler: flex_attention's rows say so, and the others have their seconds."""
    assert "peers" in bench.ONLY_NAMED
    environment = {**os.environ, "CXX": "no-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    figures, shown = run_peers(
        "--heads 2 --head-dim 8 --peer-tokens 200 --pattern window:32+2 --pattern exact", environment
    )
    assert figures.keys() & {*bench.PARTS} == {"peers"}
    rows = figures["peers"]
    assert [(row["pattern"], row["attention"]) for row in rows] == [
        (pattern, name) for pattern in ("window:32+2", "exact") for name in (OURS, FLEX, DENSE)
    ]
    for row in rows:
        seconds = [row[name] for name in ("forward", "both", "forward_ratio", "both_ratio")]
        if row["attention"] == FLEX:
            assert "No working C++ compiler found" in row["skipped"] and "\n" not in row["skipped"]
            assert seconds == [None] * 4
        else:
            assert row["skipped"] is None and min(seconds) > 0 and row["error"] < 1e-5
    assert [row["computes"] for row in rows] == ["window:32+2", "window:32+2", "exact"] + ["exact"] * 3
    # Dense attention is timed once in each repeat, whatever the number of patterns.
    assert rows[2]["forward"] == rows[5]["forward"]
    assert "ours and peers, 200 tokens, 2/2 heads x 8" in shown
    assert shown.count("No working C++ compiler found") == 1


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs the C++ compiler g++, which is not installed")
def test_compiled_flex_attention_is_timed_where_it_is_the_oracle(tmp_path):
    """One pattern has branches of all kinds, since compiling each takes seconds; other tests are kept from compilers."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    # A folder without results of other runs; and headers that are compiled once for many kernels take longer than one kernel.
    environment.update(TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0")
    text = "branches:sink=3,window=40,segment=256/2,window=200/4:dilated"
    figures, _ = run_peers(f"--heads 4 --kv-heads 2 --head-dim 16 --peer-tokens 300 --pattern {text}", environment)
    (row,) = (row for row in figures["peers"] if row["attention"] == FLEX)
    assert row["skipped"] is None and row["error"] < 1e-5
    assert row["forward"] > 0 and row["forward_ratio"] > 0
    assert row["both"] is None and row["both_ratio"] is None


def test_the_table_has_the_rows_that_passed_and_says_why_others_did_not():
    ours = peers.peer_row("window:8", OURS, [(0.5, 2.0)], [(0.5, 2.0)], [(1.0, 4.0)], 0.25)
    flex = peers.peer_row("window:8", FLEX, [(0.75, None)], [(0.5, 2.0)], [(1.0, 4.0)], 0.25)
    rows = [
        ours | {"error": 2e-7, "peak_bytes": 20 * 2**20},
        flex | {"error": 1e-7, "no_backward": "no backward on CPU", "peak_bytes": 2**20},
        *(peers.peer_row(f"window:{w}", LOCAL, [], [], [], 1.0) | {"skipped": "it is too late"} for w in (8, 9)),
        peers.peer_row("exact", f"{OURS}, ring", [], [], [], 1.0, 8)
        | {"simulated": True, "error": 3e-7, "sent_bytes": 2**21},
        peers.peer_row("exact", "torchscale", [(3.0, None)], [(2.0, 1.0)], [], 1.0) | {"error": 3e-7},
    ]
    sheet = peer_table.peers_report([row | {"threads": 2} for row in rows], CallShape(), 16384, 3)
    assert sheet.rows == [
        ("window:8", OURS, "1 x 2", "0.500", "1.00", "2.000", "1.00", "0.50", "20", "-", "2.0e-07"),
        ("window:8", FLEX, "1 x 2", "0.750", "1.50", "no backward on CPU", "-", "0.33", "1.0", "-", "1.0e-07"),
        ("exact", f"{OURS}, ring", "8 simulated", "-", "-", "-", "-", "-", "-", "2.0", "3.0e-07"),
        ("exact", "torchscale", "1 x 2", "3.000", "1.50", "-", "-", "-", "-", "-", "3.0e-07"),
    ]
    assert len(sheet.headings) == len(sheet.rows[0])
    assert sheet.notes[-1] == "local-attention: it is too late (window:8, window:9)"
    assert "torchscale takes 1.50 of our forward time under exact." in sheet.notes
    assert any(note.startswith("simulated: ") for note in sheet.notes)
