"""`make gpu` without a GPU: every section at small sizes, with no package that images for GPUs lack."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gpu
import gpu_times
import pytest
from timing import kernel_microseconds
from torch.autograd import DeviceType

from tests.support.patches import replaced
from tests.support.ranks import TIMEOUT

ROOT = Path(__file__).parents[2]
#: Packages that the run must not need; a Python that starts without them, and without pytest's plugins, which need some. It is
#: quick, too: a look at its clock takes 0.3 s, so that `timed` repeats no call, and nobody looks for garbage.
MISSING = ("rich", "datasets", "trl", "matplotlib", "hypothesis", "peft", "gguf")
WITHOUT = f"""
import gc, importlib.util, itertools, sys, time

time.perf_counter = lambda clock=time.perf_counter, looks=itertools.count(): clock() + 0.3 * next(looks)
gc.collect = lambda *_: 0

class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {MISSING}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in {MISSING} else find(name, *rest)
"""
SECTIONS = ["versions and ceilings", "errors", "tests marked cuda", "speed, 256 tokens", "speed, 512 tokens"]
SECTIONS += ["training steps", "decoding", "a simulated ring", "process group", "long rows", "FlashAttention 3 and 4"]
SECTIONS += ["speed, 1024 tokens, the longest rows", "compiled models", "first calls"]


def titles_of(printed):
    return [line[3:].rpartition(", ")[0] for line in printed.splitlines() if line.startswith("== ")]


def assert_right(figures):
    """Those of the parts that a dry run has time for."""
    assert figures["wrong"] == {} and figures["machine"]["commit"] and all(figures["group"].values())
    assert len(figures["errors"]) == 8 * len(gpu.KERNELS)
    assert [row["name"] for row in figures["ring"]] == ["exact", "window:512+4", "pyramid:512,3"]
    assert all(row["error"] < gpu.LIMITS[gpu.DTYPE] and (row["ratio"] is None) != gpu.CUDA for row in figures["ring"])
    assert len(figures["flash"]) + len({"FA3", "FA4"} & figures["left out"].keys()) >= 2


@pytest.fixture
def without_packages(tmp_path, monkeypatch):
    """Programs that start in this test have none of the packages."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
def test_a_dry_run_of_every_section(tmp_path, without_packages):
    words = [f"PYTHON={sys.executable}", f"GPU_ARGS=--small --json {tmp_path / 'figures.json'}"]
    done = subprocess.run(
        ["make", "-C", ROOT, "--no-print-directory", "gpu", *words], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert titles_of(done.stdout) == SECTIONS
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 100  # The last line names the file.
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert_right(figures)
    # The file that it runs at small sizes needs none of the missing packages.
    assert "skipped" in figures["tests"]
    assert {row["tokens"] for row in figures["speed"]} == {256, 512, 1024}
    for row in figures["speed"]:
        flops = 4 * 4 * 16 * row["pairs"] / 1e9
        assert row["forward TF/s"] == pytest.approx(flops / row["forward ms"])
        assert row["both TF/s"] == pytest.approx(3.5 * flops / row["both ms"])
        faster = max(x["both TF/s"] for x in figures["speed"] if "sdpa" in x["name"] and x["tokens"] == row["tokens"])
        if "sdpa" not in row["name"]:
            assert row["of SDPA"] == pytest.approx(row["both TF/s"] / faster)
        if row["goal"]:
            goal, verdict = row["goal"].split()
            assert verdict == ("met" if row["of SDPA"] >= float(goal) else "missed")
    steps = {row["name"]: row for row in figures["steps"]}
    assert len(steps) == len(gpu_times.LLAMAS) * len(gpu_times.WAYS)
    long = {row["name"]: row for row in figures["long rows"]}
    assert long.keys() == {"256, window:512+4", "256, pyramid:512,3", "512, window:512+4", "256, exact"}
    # MLPs in slices change the estimate, and not the loss.
    assert long["256, exact"]["estimate"] < steps["1B, exact"]["estimate"]
    assert long["256, exact"]["loss"] == pytest.approx(steps["1B, exact"]["loss"], rel=1e-5)
    assert [row["name"] for row in figures["decoding"]] == ["sdpa", "exact", "window:512+4"]
    # A CPU has no time of kernels.
    assert all(row["ms"] > 0 and (row["GPU ms"] is None) != gpu.CUDA for row in figures["decoding"])
    [row] = figures["proofs"]
    assert row.pop("pattern") == "window:512+4" and len(row) == 3 and min(row.values()) > 0
    ways = ("eager", "compiled with breaks", "in one graph")
    assert [(row["pattern"], row["way"]) for row in figures["compile"]] == [("window:512+4", way) for way in ways]
    assert all(row["tokens/s"] > 0 and ("worth" in row) == (row["way"] == ways[-1]) for row in figures["compile"])


def test_parts_can_be_named(tmp_path, capsys):
    """Parts of a dry run that take little time, in this process."""
    words = ["--small", "--parts", "group", "errors", "ring", "flash"]
    with pytest.raises(SystemExit) as ended:
        gpu.main([*words, "--json", str(tmp_path / "figures.json")])
    assert not ended.value.code
    assert titles_of(capsys.readouterr().out) == [*SECTIONS[:2], *SECTIONS[7:9], SECTIONS[10]]
    assert_right(json.loads((tmp_path / "figures.json").read_text()))
    with pytest.raises(SystemExit):
        gpu.main(["--small", "--parts", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_all_parts_fit_into_the_run():
    assert sum(seconds for seconds, _ in gpu.parts_of(False).values()) <= gpu.SECONDS <= 540
    assert gpu.parts_of(True).keys() == gpu.parts_of(False).keys()


@pytest.fixture
def report(tmp_path):
    return gpu.Report(60, True, tmp_path / "figures.json")


def test_missing_packages_are_named(report, without_packages, monkeypatch, capsys):
    gpu.tests(report, "tests/plan/test_notation.py", "tests/training/test_stock_trainers.py")
    left_out = {"tests/plan/test_notation.py": "hypothesis is missing"}
    assert report.figures["left out"] == left_out | {"tests/training/test_stock_trainers.py": "datasets is missing"}
    assert report.figures["wrong"] == {}
    assert "left out: tests/plan/test_notation.py: hypothesis is missing" in capsys.readouterr().out
    replaced(monkeypatch, gpu, find_spec=lambda name: None)
    gpu.tests(report)
    assert report.figures["left out"]["tests"] == "pytest is missing"


#: A conftest.py with the option of this project's, and a test that passes for 2.
ALL = "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')"
MARKED = "import pytest\n@pytest.mark.cuda\ndef test_{}():\n    assert {} == 2\n"


def test_failed_tests_and_wrong_numbers_are_named(report, monkeypatch, tmp_path, capsys):
    """Beside the pytest-benchmark of images for GPUs, which warns if it is loaded. The longest tests start last."""
    plugin = tmp_path / "plugin" / "benchmark-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Name: benchmark\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[pytest11]\nbenchmark = warns_beside_xdist\n")
    (plugin.parent / "warns_beside_xdist.py").write_text("raise RuntimeError('a warning')")
    monkeypatch.setenv("PYTHONPATH", str(plugin.parent))
    (tmp_path / "conftest.py").write_text(ALL)
    (tmp_path / "test_one.py").write_text(MARKED.format("wrong", 1) + MARKED.format("right", 2))
    gpu.tests(report, f"--rootdir={tmp_path}", str(tmp_path))
    assert [*report.figures["wrong"].values()] == ["assert 1 == 2"]
    assert "1 failed, 1 passed" in report.figures["tests"]
    assert Path(gpu.marked_files()[-1]).name == "test_against_oracle.py"
    whole = gpu.ra.ring_attention
    replaced(monkeypatch, gpu.ra, ring_attention=lambda *x, **y: tuple(1.01 * z for z in whole(*x, **y)))
    replaced(monkeypatch, gpu, LIMITS={"float32": -1.0})
    gpu.errors(report)
    assert len(report.figures["wrong"]) == 1 + 8 * len(gpu.KERNELS)


def test_errors_and_missing_time_leave_figures(report, capsys):
    def fails():
        raise gpu.torch.OutOfMemoryError("no memory")

    assert report.run("much", 1, fails) is None
    assert report.run("late", 10**6, fails) is None
    assert report.run("wrong", 1, lambda: 1 // 0) is None
    report.figures["number"] = float("nan")
    assert report.run("right", 1, lambda: 5) == 5
    figures = json.loads(report.file.read_text())
    assert figures["left out"].keys() == {"much", "late"} and figures["number"] is None
    assert figures["wrong"] == {"wrong": "ZeroDivisionError: integer division or modulo by zero"}


def test_tests_that_take_too_long_are_left_out(report, monkeypatch, tmp_path):
    """Pytest is waited for, also once it was killed: Python warns of a process that still runs when it is forgotten."""
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)"
    (tmp_path / "sitecustomize.py").write_text(deaf)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report.end, started = time.monotonic(), []
    start, wait = subprocess.Popen, subprocess.Popen.wait
    replaced(monkeypatch, subprocess, Popen=lambda *x, **y: started.append(start(*x, **y)) or started[0])
    replaced(monkeypatch, start, wait=lambda process, seconds=None: wait(process, seconds and min(seconds, 2)))
    gpu.tests(report, str(tmp_path))
    assert started[0].returncode is not None
    assert report.figures["left out"] == {"tests": "those that had not ended after 1 s"}
    gpu.errors(report), gpu.steps(report)
    assert report.figures["errors"] == report.figures["steps"] == [] and report.figures["wrong"] == {}


def test_a_ring_with_other_results_is_wrong(report, monkeypatch):
    run = gpu.ra.run_simulated
    replaced(monkeypatch, gpu.ra, run_simulated=lambda *x, **y: [[1.01 * z for z in one] for one in run(*x, **y)])
    gpu_times.ring_on_one_device(report)
    assert [row["error"] for row in report.figures["ring"]] == pytest.approx([0.01] * 3, rel=1e-3)
    assert [*report.figures["wrong"]] == [f"ring of 8, {row['name']}" for row in report.figures["ring"]]


def test_other_implementations_are_timed_where_they_are_installed(report, monkeypatch):
    """FA4 is there, and FA3 is not; a block mask for flex_attention that shows other keys is found."""
    active = []

    def activate(name):
        if name == "FA3":
            raise ImportError("No module named 'flash_attn_interface'")
        active.append(name)

    def flex(pattern, tokens, shape, BACKEND):
        assert (str(pattern), tokens, BACKEND) == ("window:512+4", 512, "FLASH")
        return lambda q, k, v: gpu.ra.ring_attention(q, k, v, pattern="window:64+4")

    settings = {"activate": activate, "restore": active.clear}
    for word, function in settings.items():
        monkeypatch.setattr(gpu.torch.nn.attention, f"{word}_flash_attention_impl", function)
    replaced(monkeypatch, gpu_times, flex=flex)
    gpu_times.flash(report)
    assert report.figures["left out"]["FA3"] == "ImportError: No module named 'flash_attn_interface'"
    by_torch, *_, by_flex = report.figures["flash"]
    assert by_torch["name"] == "sdpa by FA4" and by_torch["error"] < gpu.LIMITS[gpu.DTYPE]
    assert by_flex["name"] == "flex by FA4, window:512+4" and by_flex["both ms"] > 0
    assert [*report.figures["wrong"]] == [by_flex["name"]] and not active
    if not gpu.CUDA:  # No CPU has the kernel, and its ring says so.
        assert {"kernel flash by FA4, exact", "kernel flash by FA4, window:512+4"} <= report.figures["left out"].keys()


def test_kernels_count_once_and_copies_not_at_all():
    events = [("aten::mm", "CPU", 5.0), ("gemm", "CUDA", 5.0), ("Memcpy DtoD (Device -> Device)", "CUDA", 3.0)]
    events += [("_forward", "CUDA", 2.0), ("Memset (Device)", "CUDA", 1.0), ("step", "CUDA", 9.0)]
    names = ("key", "device_type", "self_device_time_total", "is_user_annotation")
    entries = [(key, getattr(DeviceType, device), time, key == "step") for key, device, time in events]
    profile = [SimpleNamespace(**dict(zip(names, entry))) for entry in entries]
    assert kernel_microseconds(profile) == 7


def test_the_time_of_a_call_is_its_own():
    calls = []
    milliseconds, host = gpu.timed(lambda: (calls.append(1), time.sleep(0.005)))
    assert milliseconds >= 5 and host >= 5 and 3 <= len(calls) <= 22


def test_a_machine_without_a_gpu_needs_small_sizes(capsys):
    if not gpu.CUDA:
        with pytest.raises(SystemExit):
            gpu.main([])
        assert "use --small for a dry run" in capsys.readouterr().err
