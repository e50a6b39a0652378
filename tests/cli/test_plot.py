"""The plot command: text, JSON and pictures."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import Gemma3TextConfig

import hf_ring_attention as ra
from hf_ring_attention.cli import plots
from hf_ring_attention.plan.patterns import Pattern

RING = "plot ring --tokens 8k --ranks 4 --heads 8 --kv-heads 2 --head-dim 64 --tflops 10 --gbps 100"


def pixels(path):
    """[height, width, 3] of a picture, 0 to 255."""
    image = pytest.importorskip("matplotlib.image").imread(path)
    return (image[..., :3] * 255).round().astype(int)


def count(picture, colour):
    """How many pixels are of a colour, as #rrggbb."""
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((abs(picture - rgb).max(-1) <= 2).sum())


def test_patterns_as_text_and_json(command):
    printed = command("plot pattern window:512+4 exact --tokens 8k")
    assert "window:512+4, 8k tokens: one head sees 12.2% of the pairs, 8 heads 12.2%" in printed
    assert "exact, 8k tokens: one head sees 100.0%" in printed and "┃ sinks" in printed
    (row,) = json.loads(command("plot pattern pyramid:512,3 --tokens 8k --head 3 --json"))
    assert (row["head"], row["heads"], row["sinks"]) == (3, 8, 4)
    assert row["share_of_causal_pairs"] == pytest.approx(Pattern.parse("pyramid:512,3").flop_share(8192), rel=0.01)
    assert np.shape(row["share_of_squares"]) == (64, 64)


def test_the_patterns_of_a_models_layers(tmp_path, command, refusal):
    """Also one that was patched in, and with the model's own heads."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, sliding_window=512, layer_types=kinds
    )
    ra.patch_config(config, "pyramid:512,3")
    config.save_pretrained(tmp_path)
    rows = json.loads(command(f"plot pattern exact --model {tmp_path} --tokens 8k --json"))
    assert [row["pattern"] for row in rows] == ["exact", "window:512, layers 0-1, 3", "pyramid:512,3, layers 2"]
    assert {(row["heads"], row["kv_heads"]) for row in rows} == {(6, 2)}
    assert "--heads: --model has it already" in refusal(f"plot pattern --model {tmp_path} --heads 4")


def test_layouts_as_text_and_json(command):
    printed = command("plot layout --tokens 4k --ranks 4")
    assert printed.startswith("zigzag: with contiguous pieces the busiest rank does")
    assert "rank   0 " + "█" * 8 + "·" * 48 + "█" * 8 + " work 1.00 of the mean" in printed
    answer = json.loads(command("plot layout --tokens 4k --ranks 4 --layout contiguous --json"))
    assert [rank["pieces"] for rank in answer["ranks"]] == [[[i * 1024, (i + 1) * 1024]] for i in range(4)]
    assert [round(rank["work"], 2) for rank in answer["ranks"]] == [0.25, 0.75, 1.25, 1.75]


def test_a_ring_as_text_and_json(command):
    printed = command(RING)
    assert "exact over 8k tokens, 4 ranks, zigzag, 10 TFLOP/s, 100 Gbit/s: one layer forward" in printed
    answer = json.loads(command(f"{RING} --json"))
    # The busiest rank's FLOPs over its speed, and no less.
    flops = 2 * 2 * 64 * 8 * 8192 * 8193 / 2 / 4
    assert answer["seconds"] >= flops / 10e12 * (1 - 1e-9)
    assert answer["share_computing"] == pytest.approx(flops / 10e12 / answer["seconds"], rel=1e-3)
    assert {span["kind"] for span in answer["spans"]} >= {"compute", "send"}


def test_pictures_show_sinks_whatever_the_length(tmp_path, command):
    file = tmp_path / "pattern.png"
    command(f"plot pattern window:512+4 --tokens 1M --output {file}")
    picture = pixels(file)
    height = max(np.unique(np.argwhere(abs(picture - [25, 211, 243]).max(-1) <= 2)[:, 0], return_counts=True)[1].shape)
    assert count(picture, plots.SINKS) >= height, "a column of them"
    assert height > 300
    assert count(picture, plots.UNSEEN) > 10000 and count(picture, plots.FUTURE) > 10000
    command(f"plot pattern exact --tokens 1M --output {file}")
    assert count(pixels(file), plots.SINKS) == 0


def test_what_is_seen_more_is_brighter(tmp_path):
    pytest.importorskip("matplotlib")
    luminance = []
    for text in ("branches:window=16,segment=all/64:all", "branches:window=16,segment=all/8:all", "exact"):
        plots.plot_patterns({text: Pattern.parse(text)}, 4096, tmp_path / "a.png", num_heads=1, num_kv_heads=1)
        picture = pixels(tmp_path / "a.png")
        luminance.append(picture[300:340, 120:160].mean())  # far below the diagonal
    assert luminance[0] < luminance[1] < luminance[2]


@pytest.mark.parametrize("words", [RING, "plot layout --tokens 1000 --ranks 3"])
def test_other_pictures_are_written(words, tmp_path, command):
    pytest.importorskip("matplotlib")
    assert command(f"{words} --output {tmp_path / 'a.png'}") == f"wrote {tmp_path / 'a.png'}\n"
    assert len(np.unique(pixels(tmp_path / "a.png").reshape(-1, 3), axis=0)) > 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read in /proc")
def test_a_long_picture_takes_little_memory(tmp_path):
    pytest.importorskip("matplotlib")
    script = f"""
from pathlib import Path
from hf_ring_attention.cli.main import main

try:
    main("plot pattern pyramid:512,6 longnet:2048/1,all/16 --tokens 128k --output {tmp_path / "a.png"}".split())
finally:
    print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 500 * 1024, "KiB"
