"""`make gpu GPU_ARGS=--tune` on a CPU: a dry run in Triton's interpreter, candidates, the choice, and the printed row."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args

import gpu
import pytest
import torch
from timing import Shape

from hf_ring_attention.compute.fused.choice import settings_for
from hf_ring_attention.compute.fused.settings import Loops, Setting, Settings
from tests import tune
from tests.support.fused import needs_interpreter, needs_triton
from tests.support.patches import replaced

H100 = {width: settings_for(torch.bfloat16, width, "sm_90") for width in (64, 128)}
NAMES = [workload.name for workload in tune.WORKLOADS]


@pytest.fixture
def report(tmp_path):
    return gpu.Report(60, True, tmp_path / "tune.json")


def row_read(row, folder):
    """The entry of `_TUNED` that a printed row is as code."""
    module = folder / "row.py"
    names = "from hf_ring_attention.compute.fused.settings import Setting, Settings"
    module.write_text(f"{names}\nROWS = {{\n{row}\n}}\n")
    return runpy.run_path(str(module))["ROWS"]


@pytest.mark.slow
@needs_interpreter
def test_a_dry_run(tmp_path, capfd):
    """The process that `make gpu` starts compiles, checks and times candidates, and its figures come back."""
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--small", "--tune", "--json", str(tmp_path / "gpu.json")])
    printed = capfd.readouterr().out
    assert not ended.value.code, printed
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert figures["wrong"] == figures["left out"] == {}
    found = figures["settings"]["cpu, 64"]
    tried = {kernel: [*times] for kernel, times in found["ratios"].items()}
    assert tried.keys() == tune.BLOCKS.keys() and all(len(x) == 2 for x in tried.values())
    assert tried["forward"][0] == tune.short(H100[64].forward[0])
    for some in found["ratios"].values():
        for times in some.values():
            assert [*times] == NAMES[::4] and min(times.values()) > 0
    assert found["row"] in printed and "forward, width 64: times beside today's" in printed
    ((key, settings),) = row_read(found["row"], tmp_path).items()
    assert key == ("cpu", 64) and (settings != H100[64]) == bool(found["changes"])


def test_without_triton_or_tests_the_part_is_left_out_and_a_broken_process_is_wrong(report, tmp_path, monkeypatch):
    replaced(monkeypatch, tune, why_not_fused=lambda *_: "Triton cannot be imported")
    with pytest.raises(SystemExit) as ended:
        tune.main(["--small", "--json", str(tmp_path / "tune.json")])
    assert not ended.value.code
    assert json.loads((tmp_path / "tune.json").read_text())["left out"] == {tune.TITLE: "Triton cannot be imported"}
    replaced(monkeypatch, gpu, ROOT=tmp_path)
    gpu.tune(report)
    assert report.figures["left out"] == {gpu.SETTINGS: "this copy has no tests"}
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "tune.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", "")
    gpu.tune(report)
    assert report.figures["wrong"] == {gpu.SETTINGS: "tests/tune.py ended with status 3"}


@needs_interpreter
def test_wrong_and_slow_candidates_are_named(report, monkeypatch, capsys):
    """A kernel with other results is wrong, and candidates that time does not allow are left out; today's settings stay."""
    from triton.runtime.errors import OutOfResources

    scale, now = tune.SMALL._replace(every=9), H100[64]
    report.figures["settings"] = {}
    shape, launch = Shape(2, 1, 64, "float16"), tune.Trial._launch
    found = {"forward": [now.forward[0], Setting(32, 16, 4, 1)], "dq": [], "dkdv": [], "few_keys": []}

    def wrong(marks, kernel, grid, *args, **constants):
        launch(marks, kernel, grid, *args, **constants)
        if constants["BLOCK_M"] == 32 and "RESUME" in constants:
            args[3].mul_(1.1)  # out

    replaced(monkeypatch, tune.Trial, _launch=staticmethod(wrong))
    tune.tune_width(report, scale, "cpu", shape, now, found, 60)
    assert report.figures["wrong"].keys() == {"forward 32 16 4 1 one, width 64"}
    assert "differs from today's by 1.0e-01" in report.figures["wrong"]["forward 32 16 4 1 one, width 64"]
    assert [*report.figures["settings"]["cpu, 64"]["ratios"]["forward"]] == [tune.short(now.forward[0])]
    tune.tune_width(report, scale, "cpu", shape, now, found, 0)
    reason = "there was no time to time it"
    assert report.figures["left out"] == {tune.named(64, "forward", x): reason for x in found["forward"]}
    assert report.figures["settings"]["cpu, 64"]["changes"] == []
    report.run("large", 0, lambda: (_ for _ in ()).throw(OutOfResources(600, 512, "tensor memory")))
    assert "out of resource: tensor memory" in report.figures["left out"]["large"]
    assert "Nothing changes." in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "shared"), [("sm_80", 163), ("sm_86", 99), ("sm_90", 227), ("gfx942", 64)])
def test_candidates_fit_into_shared_memory(kind, shared):
    for width in (64, 128):
        now = settings_for(torch.bfloat16, width, kind)
        found = tune.candidates(now, width, kind, shared << 10)
        for kernel, every in found.items():
            today = [now.few_keys] if kernel == "few_keys" else [*dict.fromkeys(getattr(now, kernel))]
            others = every[len(today) :]
            assert every[: len(today)] == today and len(set(every)) == len(every) and len(others) >= 4
            for x in filter(None, others):
                assert tune.shared_bytes(kernel, x, width, kind) <= shared << 10
        # Every way through a tile that the kernels have is tried.
        assert {x.loops for every in found.values() for x in every if x} == set(get_args(Loops))
    if kind == "sm_90":  # 64 query rows, and 128 keys, by 8 warps
        assert {(x.rows, x.keys, x.warps) for x in found["dkdv"]} >= {(64, 64, 8), (64, 128, 8), (32, 128, 8)}


def test_workloads_see_few_keys_or_many():
    """Each launch of a workload has the kind that its name claims, so its candidates take turns with the right settings."""
    few, many = Setting(64, 64, 4, 1), Setting(128, 128, 4, 1)
    settings, shape = Settings(*[(few, many)] * 3), Shape(32, 8, 64)
    for workload in tune.WORKLOADS:
        work = tune.work_of(workload, shape, tune.LARGE.tokens, settings)
        launches = (*work.forward_launches, *work.dq_launches, *work.key_launches)
        assert {launch.setting for launch in launches} == {many if workload.many else few}, workload.name


FORWARD, DQ, DKDV = H100[128][:3]
OTHER = Setting(128, 32, 8, 3)


def ratios(**times):
    """Ratios of settings of kernels, those of workloads with few keys, and with many."""
    return {
        kernel: {
            x: {workload.name: pair[workload.many] for workload in tune.WORKLOADS} for x, pair in of_kernel.items()
        }
        for kernel, of_kernel in times.items()
    }


def test_a_setting_is_proposed_if_it_is_faster_by_more_than_the_noise():
    few, many = FORWARD
    now = H100[128]
    made_up = {few: (1.0, 1.2), many: (1.3, 0.98), OTHER: (0.9, 0.97)}
    best, changes = tune.best_settings(now, ratios(forward=made_up))
    # 3 % is more than the noise of 2 % beside the setting for many keys.
    assert best == now._replace(forward=(OTHER, OTHER)) and len(changes) == 2
    assert changes[0] == "forward, few keys: 64 64 4 3 one few -> 128 32 8 3 one: 0.900 of the time, noise 0.000"
    made_up[OTHER] = (0.9, 0.985)
    assert tune.best_settings(now, ratios(forward=made_up))[0] == now._replace(forward=(OTHER, many))
    # One workload more slowly and two faster: the mean decides.
    some = ratios(forward=made_up)
    some["forward"][OTHER] |= {"window 512": 1.4, "packed window": 0.8, "packed short": 0.7}
    assert tune.best_settings(now, some)[0].forward == (OTHER, many)
    some["forward"][OTHER]["window 512"] = 1.6
    assert tune.best_settings(now, some) == (now, [])


def test_key_items_of_few_keys_have_one_setting_or_none():
    made_up = {H100[128].few_keys: (1.0, 1.01), None: (0.9, 1.02), OTHER: (0.97, 0.97)}
    best, changes = tune.best_settings(H100[128], ratios(few_keys=made_up))
    # (3 * 0.9 + 4 * 1.02) / 7 = 0.969 without a separate launch.
    assert best.few_keys is None
    assert changes == ["few_keys, all keys: 64 16 4 2 staged -> as others: 0.969 of the time, noise 0.010"]
    made_up[OTHER] = (0.96, 0.97)
    assert tune.best_settings(H100[128], ratios(few_keys=made_up))[0].few_keys == OTHER


@pytest.mark.parametrize("width", [64, 128])
def test_the_row_is_code(width, tmp_path):
    row = tune.row_of("sm_80", width, H100[width])
    assert row_read(row, tmp_path) == {("sm_80", width): H100[width]}
    changed = H100[width]._replace(few_keys=OTHER, dq=(OTHER, OTHER._replace(loops="split", small=True)))
    assert row_read(tune.row_of("gfx942", width, changed), tmp_path) == {("gfx942", width): changed}
    assert max(map(len, row.splitlines())) <= 120


#: Compiles for an H100 that is not there, as a worker does, and prints bytes of shared memory or an error.
COMPILES = """
import json, sys
from types import SimpleNamespace
from typing import get_args
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tests import tune

target = GPUTarget("cuda", 90, 32)
numbers = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0, "get_current_target": lambda: target}
driver.set_active(SimpleNamespace(**numbers))
now, shape = tune.settings_for(tune.torch.bfloat16, 64, "sm_90"), tune.Shape(32, 8, 64, "bfloat16")
for keys in (32, 24):
    print(json.dumps(tune.compiled(("forward", tune.Setting(64, keys, 4, 3), now, shape, tune.LARGE.tokens_to_compile))))
"""


@pytest.mark.slow
@needs_triton
def test_workers_compile_what_is_timed(tmp_path):
    """A forward kernel has three programs: of one launch, and the first and other ones of several; no GPU is needed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILES], capture_output=True, text=True, timeout=300, env=environment, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    shared, error = map(json.loads, ran.stdout.splitlines())
    setting = Setting(64, 32, 4, 3)
    # Its queries are also in shared memory there.
    assert shared == tune.shared_bytes("forward", setting, 64, "sm_90") + 64 * 64 * 2
    assert len([*tmp_path.glob("*/forward_kernel.cubin")]) == 3 and not [*tmp_path.glob("*/dq_kernel.cubin")]
    assert error.startswith("CompilationError")
