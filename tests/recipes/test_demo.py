"""The demo runs with a tiny model in place of its own, and prints what its recipes and commands have measured."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import common
import demo
import layer
import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.cli.main import command_parser, main
from tests.support.checkpoints import save_tiny_checkpoint
from tests.support.patches import replaced
from tests.support.recipe_runs import run


@pytest.fixture(params=[False, True], ids=["idle", "busy"])
def shown(request, tmp_path, monkeypatch, capsys):
    """All that the demo prints itself; its recipes and commands run in this process, or in processes of the tests' server."""

    def recipe(program, *words, processes=1):
        file = tmp_path / "figures.json"
        run(program, *words, "--json", file, processes=processes, fork=program == "layer.py")
        figures = json.loads(file.read_text())
        return [row | {"disturbed": request.param} for row in figures] if program == "layer.py" else figures

    def command(*words, **_):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code

    save_tiny_checkpoint(tmp_path / "cache" / common.BUNDLED, max_position_embeddings=2048)
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path / "cache"))
    replaced(monkeypatch, demo, run=recipe, command=command)
    sizes = ["--layer-tokens", "1024", "--tokens", "1024", "--steps", "1", "--row-tokens", "64", "--minutes", "99"]
    monkeypatch.setattr("sys.argv", ["demo.py", *sizes, "--output", str(tmp_path / "demo")])
    demo.main()
    return capsys.readouterr().out.splitlines()


def test_a_layer_on_two_processes(tmp_path):
    file = tmp_path / "figures.json"
    out = run("layer.py", "--tokens", 1024, "--pattern", demo.WINDOW, "--json", file, processes=2)
    rows = json.loads(file.read_text())
    assert [(row["attention"], row["processes"]) for row in rows] == [("exact", 2), (demo.WINDOW, 2)]
    assert out.count(" MiB a process") == 2, "The first process prints for all: a line for each pattern."
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in rows)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells how long a thread waited")
def test_a_run_beside_busy_programs_is_marked():
    """As many of them as cores, so that each thread waits for about half of its time."""
    args = layer.parse_args(["--tokens", "4096"])
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        end = time.perf_counter() + 60
        while not layer.measure("sdpa", ra.Ring.alone(), 4096, args, torch.device("cpu"))["disturbed"]:
            assert time.perf_counter() < end
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize(("waits", "disturbed"), [(0.0, False), (10.0, True)])
def test_a_run_is_disturbed_if_its_threads_wait_for_a_core(waits, disturbed, monkeypatch):
    seconds = iter((5.0, 5.0 + waits))
    monkeypatch.setattr(layer, "waited", lambda: next(seconds))
    measured = layer.measure("sdpa", ra.Ring.alone(), 64, layer.parse_args([]), torch.device("cpu"))
    assert measured["disturbed"] is disturbed


@pytest.fixture
def short_demo(tmp_path, monkeypatch):
    """A demo whose parts do nothing but take their time, and end after 200 s by its clock."""

    def nothing(self):
        self.part(1, "Nothing", "")
        time.sleep(0.2)

    parts = ("layer", "perplexities", "pass_keys", "fine_tuning", "closing", "calibration")
    replaced(monkeypatch, demo.Demo, seconds=200.0, **dict.fromkeys(parts, nothing))
    monkeypatch.setattr(demo.common, "obstacle", lambda name: None)

    def run(minutes):
        monkeypatch.setattr("sys.argv", ["demo.py", "--output", str(tmp_path), "--minutes", str(minutes)])
        demo.main()

    return run


def test_a_part_that_takes_long_tells_that_it_goes_on(short_demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "HEARTBEAT", 0.05)
    short_demo(99)
    assert capsys.readouterr().out.count("(part 1 goes on: 0 s)") >= 5
    monkeypatch.setattr(demo, "HEARTBEAT", 0.9)
    short_demo(99)
    assert "goes on" not in capsys.readouterr().out, "Each part begins its time anew."


def test_the_minutes_of_a_calibration_follow_from_the_time_that_has_passed(short_demo, capsys):
    short_demo(3.5)
    told = re.search(r"no time for part 6, a calibration: with --minutes (\d+) it runs", capsys.readouterr().out)
    assert int(told[1]) == 6  # 1.3 x 200 s, and a fifth more
    short_demo(told[1])
    assert "no time" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo(shown, tmp_path):
    figures = json.loads((tmp_path / "demo" / "demo.json").read_text())
    chosen = tmp_path / "demo" / "calibrated" / "calibration.json"
    names = [["exact", demo.WINDOW, demo.PYRAMID, demo.LONGNET], ["exact", demo.RIVAL, str(chosen)]]
    for patterns, part in zip(names, ("perplexity", "calibration"), strict=True):
        exact, *others = (row["perplexity"] for row in figures[part])
        told = [f"{name} {other / exact - 1:+.1%}" for name, other in zip(patterns[1:], others, strict=True)]
        assert [row["pattern"] for row in figures[part]] == patterns
        assert f"perplexity against exact: {', '.join(told)}" in shown
    assert abs(figures["two_processes"]) < 1e-4
    assert ra.Calibration.load(chosen).seq_len == 512 and 0 < ra.Calibration.load(chosen).flop_share <= demo.BUDGET
    assert 0.9 * demo.BUDGET < ra.Pattern.parse(demo.RIVAL).flop_share(1024) < demo.BUDGET
    for when in ("before", "after"):
        exact, other = (figures["fine_tuning"][name][f"perplexity_{when}"] for name in ("exact", demo.LEARNED))
        told = f"{demo.LEARNED} {other / exact - 1:+.1%}"
        assert f"{when} the steps, held-out perplexity against exact: {told}" in shown
    assert {row["pattern"] for row in figures["pass_keys"]} == {"exact", "window:128+4"}
    pictures = {f"{name}.png" for name in ("speed", "patterns", "quality", "losses", "retrieval", "layers")}
    assert pictures == {path.name for path in (tmp_path / "demo").glob("*.png")}
    # It closes with its figures and a command that runs.
    layers = [(row["attention"], row["processes"]) for row in figures["layer"]]
    assert layers == [("sdpa", 1), (demo.WINDOW, 1), ("exact", 2), (demo.WINDOW, 2)]
    # The queries alone, and as much for out and for each of their gradients: 1024 tokens x 2 heads x 64 numbers of 4 bytes.
    assert all(row["bytes"] * row["processes"] > 4 * 1024 * 2 * 64 * 4 for row in figures["layer"])
    seconds = {(row["attention"], row["processes"]): row["seconds"] for row in figures["layer"]}
    text, (python, *words) = " ".join(shown), shlex.split(shown[-1])
    claim = f"was {seconds['sdpa', 1] / seconds[demo.WINDOW, 1]:.1f} times as fast as sdpa"
    busy = figures["layer"][0]["disturbed"]
    assert (claim in text, text.count(demo.BUSY)) == ((False, 2) if busy else (True, 0))
    assert Path(python).is_file() and words[:2] == ["-m", "hf_ring_attention"]
    args = command_parser().parse_args(words[2:])  # It reads the text.
    assert args.model == str(tmp_path / "cache" / common.BUNDLED) and args.pattern == ["exact", demo.WINDOW]
