"""The benchmark: every part at a size that takes seconds."""

import json
import os
import subprocess
import sys

from transformers import LlamaConfig, LlamaForCausalLM

from hf_ring_attention.tools.benchmarks import choice
from hf_ring_attention.tools.benchmarks.harness import CallShape
from hf_ring_attention.tools.commands.bench import PARTS


def test_a_share_of_the_heads_keeps_whole_groups():
    """The ideal computes some heads of all, in groups of the number of key/value heads that divides them."""
    for heads, kv_heads, share in ((8, 2, 4), (8, 8, 4), (10, 5, 5), (12, 4, 3), (8, 2, 1)):
        q, k, v, _ = CallShape(heads, kv_heads, 4).tensors(6, share)
        assert q.shape == (1, share, 6, 4)
        assert k.shape == v.shape and share % k.shape[1] == 0 and kv_heads % k.shape[1] == 0


def test_every_part_measures(tmp_path):
    """JSON stands alone on stdout, and the tables on stderr say the same."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    small = (
        "--repeats 1 --heads 4 --kv-heads 2 --head-dim 8 --tokens 2k --lengths 64,128 --ring-tokens 256 "
        "--longnet-tokens 512 --rank-tokens 64 --memory-ranks 1,2 --model-tokens 64 --decode-tokens 64 "
        f"--pattern longnet:128/1,1024/8 --pattern pyramid:64,2 --model {tmp_path} --json"
    )
    done = subprocess.run(
        [sys.executable, "-m", "hf_ring_attention", "bench", *small.split()],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures.keys() >= PARTS.keys()
    patterns = ["longnet:128/1,1024/8", "pyramid:64,2"]
    assert [row["attention"] for row in figures["speed"]] == ["sdpa", *patterns]
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in figures["speed"])
    assert [row["attention"] for row in figures["memory"]] == ["sdpa", *patterns, "exact"]
    # q, k, v, dout, out and three gradients of 2048 tokens, in float32.
    assert all(row["bytes"] > 2048 * 8 * 4 * (4 * 4 + 2 * 4) / 2 for row in figures["memory"])
    assert figures["model"]["ratio"] > 0
    assert [row["pattern"] for row in figures["decode"]] == [*patterns, "exact"]
    assert all(row["ratio"] > 0 for row in figures["decode"])
    assert {(row["pattern"], row["tokens"]) for row in figures["transport"]} == {
        (pattern, tokens) for pattern in choice.patterns_for(64) for tokens in (64, 128)
    }
    good = sum(row["auto_over_best"] <= 1.1 for row in figures["transport"])
    assert f"auto is within 10 % of the better one in {good} of 6 cells" in done.stderr
    assert [row["pattern"].split(",")[0] for row in figures["ideal"]] == ["exact", "longnet"]
    assert all(row["both"] > 0 for row in figures["ideal"])
    assert {name: {*peaks} for name, peaks in figures["ring-memory"].items()} == {
        "ring": {"1", "2"},
        "collective": {"1", "2"},
    }
    # Two ranks: one hop of keys and values in each of the rounds, forward; as many of gradients in backward.
    assert [row["share"] for row in figures["overlap"]] == [0.4, 0.8]
    assert all(row["hops"] % 3 == 0 for row in figures["overlap"])
    titles = ("attention on one device", "peak memory of forward", "in a 4-layer model", "in the cache", "ring against")
    for title in (*titles, "FLOPs without communication", "peak memory of exact attention", "delay of every hop"):
        assert title in done.stderr
