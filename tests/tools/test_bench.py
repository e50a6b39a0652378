"""The benchmark: every part at a size that takes seconds; that of peers is in a file of its own."""

import json
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ring_attention.evaluation import progress
from hf_ring_attention.tools import cli
from hf_ring_attention.tools.benchmarks import choice, harness, hybrid_steps, scaling, step_memory
from hf_ring_attention.tools.benchmarks.harness import (
    CallShape,
    give_memory_back_at_once,
    held_memory,
    launch,
    peak_memory,
    reset_peak_memory,
)
from hf_ring_attention.tools.commands import bench
from hf_ring_attention.tools.commands.bench import ONLY_NAMED, PARTS

from ..support.releases import needs_mixers


def test_a_share_of_the_heads_keeps_whole_groups():
    """The ideal computes some heads of all, in groups of the number of key/value heads that divides them."""
    for heads, kv_heads, share in ((8, 2, 4), (8, 8, 4), (10, 5, 5), (12, 4, 3), (8, 2, 1)):
        q, k, v, _ = CallShape(heads, kv_heads, 4).tensors(6, share)
        assert q.shape == (1, share, 6, 4)
        assert k.shape == v.shape and share % k.shape[1] == 0 and kv_heads % k.shape[1] == 0


def test_long_measurements_tell_a_file_how_far_they_are(capsys, monkeypatch):
    assert [*harness.progress(range(3), "short")] == [0, 1, 2]
    assert "short" not in capsys.readouterr().err
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e-6)
    assert [*harness.progress(range(3), "long")] == [0, 1, 2]
    assert "long" in (told := capsys.readouterr().err) and "3/3" in told


def test_every_part_measures(tmp_path, capfd):
    """JSON stands alone on stdout, and the tables on stderr say the same.

    In this process: its ranks are forked from the server of the tests, and no other one imports the libraries.
    """
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    capfd.readouterr()  # It imports libraries, which write to stdout as well.
    small = (
        "--repeats 1 --heads 4 --kv-heads 2 --head-dim 8 --tokens 2k --lengths 64 --ring-tokens 256 "
        "--longnet-tokens 512 --rank-tokens 64 --memory-ranks 1,2 --model-tokens 64 --decode-tokens 64 "
        f"--pattern longnet:128/1,1024/8 --pattern pyramid:64,2 --model {tmp_path} --json --step-lengths 1k,512 "
        f"--memory 3GB --scaling-ranks 1,2 --plots {tmp_path / 'a' / 'pictures'}"
    )
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *small.split()])
    printed = capfd.readouterr()
    assert not end.value.code, printed.err
    figures = json.loads(printed.out)
    assert figures.keys() & {*PARTS} == {*PARTS} - {*ONLY_NAMED}
    patterns = ["longnet:128/1,1024/8", "pyramid:64,2"]
    assert [row["attention"] for row in figures["speed"]] == ["sdpa", *patterns]
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in figures["speed"])
    assert [row["attention"] for row in figures["memory"]] == ["sdpa", *patterns, "exact"]
    # q, k, v, dout, out and three gradients of 2048 tokens, in float32.
    assert all(row["bytes"] > 2048 * 8 * 4 * (4 * 4 + 2 * 4) / 2 for row in figures["memory"])
    assert figures["model"]["ratio"] > 0
    assert [row["pattern"] for row in figures["decode"]] == [*patterns, "exact"]
    assert all(row["ratio"] > 0 for row in figures["decode"])
    assert {(row["pattern"], row["tokens"], row["documents"]) for row in figures["transport"]} == {
        (pattern, tokens, documents)
        for pattern in choice.patterns_for(64)
        for tokens in (64,)
        for documents in (1, len(choice.packed_row(tokens)[0]))
    }
    assert all(row["seconds"].keys() >= {"ring", "collective", "heads"} for row in figures["transport"])
    good = sum(row["auto_over_best"] <= 1.1 for row in figures["transport"])
    assert f"auto is within 10 % of the best way in {good} of 6 cells" in printed.err
    assert all(row["expected_seconds"].keys() == row["seconds"].keys() for row in figures["transport"])
    assert all(0 < seconds < 10 for row in figures["transport"] for seconds in row["expected_seconds"].values())
    assert [row["pattern"].split(",")[0] for row in figures["ideal"]] == ["exact", "longnet"]
    assert all(row["both"] > 0 for row in figures["ideal"])
    assert {name: {*peaks} for name, peaks in figures["ring-memory"].items()} == {
        "ring": {"1", "2"},
        "collective": {"1", "2"},
    }
    # Two ranks: one hop of keys and values in each of the rounds, forward; as many of gradients in backward.
    assert [row["share"] for row in figures["overlap"]] == [0.4, 0.8]
    assert all(row["hops"] % 3 == 0 for row in figures["overlap"])
    step = figures["step-memory"]
    assert (step["pattern"], step["ranks"], step["rank_memory"]) == (patterns[0], 2, 3_000_000_000)
    assert [(row["tokens"], row["ranks"]) for row in step["rows"]] == [(512, 2), (1024, 2)]
    assert all(sum(row["parts"].values()) == row["peak"] for row in step["rows"])
    rows = figures["scaling"]["rows"]
    assert [row["pattern"] for row in rows] == ["exact", *patterns]
    for row in rows:
        assert row["rates"].keys() == {"1", "2"} and min(row["rates"].values()) > 0
        assert row["efficiency"] == pytest.approx(row["rates"]["2"] / (2 * row["rates"]["1"]))
    for part in ("step-memory", "scaling"):
        file = tmp_path / "a" / "pictures" / f"{part.replace('-', '_')}.png"
        assert file.stat().st_size > 5000 and f"wrote {file}\n" in printed.err
    titles = ("attention on one device", "peak memory of forward", "in a 4-layer model", "in the cache", "ring against")
    for title in (
        *titles,
        "FLOPs without communication",
        "peak memory of exact attention",
        "delay of every hop",
        "step in MiB",
        "tokens a second",
    ):
        assert title in printed.err


@needs_mixers
def test_steps_of_hybrids_over_a_ring_are_those_of_one_process(capsys):
    """Both kinds of states, with the bytes that they send."""
    with pytest.raises(SystemExit, match="0"):
        cli.main("bench hybrids --hybrid-tokens 128 --repeats 1 --json".split())
    printed = capsys.readouterr()
    rows = json.loads(printed.out)["hybrids"]
    assert [row["model_type"] for row in rows] == [*hybrid_steps.HYBRIDS]
    for row in rows:
        assert row["skipped"] is None and 0 <= row["error"] <= 1e-4
        assert row["speedup"] == pytest.approx(row["one"] / row["ring"])  # of a single pair
        assert row["sent_bytes"] > 0
    assert "a training step of a hybrid, 128 tokens" in printed.err


def test_a_hybrid_whose_gradients_are_others_is_not_shown():
    row = {"model_type": "bamba", "ranks": 2, "tokens": 64, "one": 1.0, "ring": 0.5, "speedup": 2.0, "sent_bytes": 1}
    rows = [{**row, "error": 0.5, "skipped": "not shown: 5.0e-01 off, and 1e-04 is allowed"}]
    (cells,) = hybrid_steps.hybrids_report(rows, 1).rows
    assert cells[2:5] == ("not shown: 5.0e-01 off, and 1e-04 is allowed", "", "")


@pytest.fixture(scope="module")
def steps():
    """The memory of training steps on a ring of 2, of rows of 4096 and of 8192 tokens, in heads of 4 * 32 = 128 numbers."""
    shape = CallShape(heads=4, kv_heads=2, head_dim=32)
    return step_memory.measure_step_memory(shape, [4096, 8192], 2, "window:64+4", None)["rows"]


def test_the_parts_of_a_step_are_the_bytes_of_its_tensors(steps):
    hidden = 128
    layer = (
        2 * hidden * hidden + 2 * hidden * 64 + 3 * hidden * 3 * hidden + 2 * hidden
    )  # 64: two key/value heads of 32.
    weights = 4 * (2 * 8192 * hidden + 4 * layer + hidden)
    for row in steps:
        parts = row["parts"]
        assert parts["weights"] == parts["gradients"] == weights
        # AdamW has two moments of each weight, and a number for each tensor of weights.
        assert 2 * weights < parts["optimizer state"] < 2 * weights + 1000
        assert sum(parts.values()) == row["peak"]


def test_a_checkpointed_step_keeps_the_inputs_of_its_layers(steps):
    """It keeps no more than a few tensors of their size: what is inside a layer is computed again.

    The loss has computed the gradient of the head, of 8192 words.
    """
    of_head = 4 * 8192 * 128
    for row in steps:
        inputs = 4 * (row["tokens"] // row["ranks"]) * 128 * 4
        assert inputs <= row["parts"]["kept for backward"] - of_head <= 3 * inputs
        # Backward computes a layer again: its three tensors of the MLP, each 3 times as wide as an input.
        assert row["parts"]["working memory"] >= 3 * 3 * inputs / 4
    short, long = (row["parts"]["kept for backward"] - of_head for row in steps)
    assert long / short == pytest.approx(2, rel=0.2)


def test_a_ring_of_one_trains_too():
    shape = CallShape(heads=2, kv_heads=2, head_dim=8, dtype="bfloat16")
    figures = step_memory.measure_step_memory(shape, [256], 1, "exact", None)
    (row,) = figures["rows"]
    assert row["ranks"] == 1
    assert row["parts"]["optimizer state"] == pytest.approx(2 * row["parts"]["weights"], rel=1e-2)
    # A single length has no line to be extended.
    assert step_memory.step_memory_report(figures, shape).notes == ["measured up to 256 tokens"]


def test_the_memory_of_the_cpu_is_shared_by_the_ranks():
    assert step_memory.memory_of_rank("cpu", 4) == step_memory.memory_of_rank("cpu", 1) // 4
    assert step_memory.memory_of_rank("cpu", 1) > torch.ones(2**20).nbytes


def held_around_a_tensor(shape):
    """The bytes of a tensor, and those held with it, held after it and held at most, beyond those held before."""
    give_memory_back_at_once()
    cpu = torch.device("cpu")
    before = reset_peak_memory(cpu)
    tensor = torch.ones(64 * 2**20)  # 256 MiB
    size, with_it = tensor.nbytes, held_memory(cpu) - before
    del tensor
    return size, with_it, held_memory(cpu) - before, peak_memory(cpu) - before


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read in /proc")
def test_held_memory_falls_where_the_peak_stays():
    """In a process of its own: another one may hold freed memory that a tensor takes again."""
    size, with_it, after_it, peak = launch(held_around_a_tensor, 1, CallShape())
    assert with_it > 0.9 * size
    assert after_it < 0.5 * size
    assert peak > 0.9 * size


def test_rates_are_tokens_of_the_whole_row_over_the_median_seconds(monkeypatch):
    """The first run, which does not count, is the slowest."""
    seconds = iter([(99.0, 1.0), (1.0, 1.0), (3.0, 5.0), (1.0, 3.0)])
    monkeypatch.setattr(scaling, "forward_backward", lambda *call: next(seconds))
    assert scaling.rates_of_ring(CallShape(2, 2, 4), 1024, ["exact"], 3) == {"exact": 1024 / 4}


def test_rings_that_share_cores_are_told(monkeypatch):
    rates = {1: 10.0, 2: 18.0, 4: 20.0}
    monkeypatch.setattr(scaling, "launch", lambda function, p, *args: {"exact": rates[p]})
    monkeypatch.setattr(scaling.os, "cpu_count", lambda: 2)
    figures = scaling.measure_scaling(CallShape(), 64, ["exact"], [4, 1, 2], 1)
    assert figures["rows"] == [{"pattern": "exact", "rates": rates, "efficiency": 0.5}]
    sheet = scaling.scaling_report(figures, 1)
    assert sheet.headings == ["pattern", "p = 1", "p = 2", "p = 4", "efficiency of p = 4"]
    assert sheet.rows == [["exact", "10", "18", "20", "0.50"]]
    (note,) = sheet.notes
    assert note.startswith("p = 4: more ranks than cores (2)")
    several = scaling.measure_scaling(CallShape(), 64, ["exact"], [2], 1)
    sheet = scaling.scaling_report(several, 1)
    assert (sheet.headings, sheet.rows, sheet.notes) == (["pattern", "p = 2"], [["exact", "18"]], [])


@pytest.mark.parametrize(("words", "pattern"), [("", "exact"), ("--pattern window:8 --pattern window:4", "window:8")])
def test_the_step_has_the_first_pattern_that_is_given(words, pattern, monkeypatch, capsys):
    def refuse(options):
        raise bench.refuse(f"{options.step_pattern} of {len(options.patterns)}")

    monkeypatch.setitem(bench.MEASUREMENTS, "step-memory", refuse)
    with pytest.raises(SystemExit):
        cli.main(f"bench step-memory --ranks 1 {words}".split())
    assert f"{pattern} of 2" in capsys.readouterr().err
