"""`hf-ring-attention check`: every verdict where all is well, and where one process is not, which it is and what to do."""

import importlib.metadata
import json
import os
import re
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from packaging.version import Version
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import CONFIG_MAPPING, LlamaConfig

import hf_ring_attention as ra
from hf_ring_attention.cli import main as cli
from hf_ring_attention.cli.checks import model as checks_of_model
from hf_ring_attention.cli.checks import oracle, runner
from hf_ring_attention.cli.checks.catalogue import all_checks
from hf_ring_attention.cli.checks.machine import NEWEST_TESTED
from hf_ring_attention.cli.checks.runner import CheckRun
from hf_ring_attention.compute.kernels import CpuFlash
from tests.support.programs import run_program
from tests.support.ranks import TIMEOUT, begin_as_a_program, start_server

ROOT = Path(__file__).parents[2]
#: Seconds for a check where a process hangs: enough for all checks before it. Elsewhere a busy machine has all the time.
SECONDS = 10
PATIENT = ("--timeout", str(TIMEOUT))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}


def verdicts(printed):
    """(the verdict, its text) by the names of checks, and the last line."""
    *lines, last = printed.splitlines()
    rows = [re.match(r"(ok|warning|FAILED|-) +(\S+(?: \S+)*)  +(.*)", line) for line in lines]
    return {row.group(2): (row.group(1), row.group(3)) for row in rows if row}, last


def remedy_of(printed, name):
    """What to do about a failed check."""
    return re.search(rf"^FAILED +{name} .*\n +What to do: (.*)$", printed, re.MULTILINE).group(1)


@pytest.fixture
def alone(ended):
    """Runs the command in this process; returns its exit status and what it printed."""
    return lambda *words: ended(["check", *PATIENT, *words])[:2]


def test_one_process(alone):
    """And last queries see every key, also in generation."""
    status, printed = alone("--pattern", "branches:window=4,last=3")
    found, last = verdicts(printed)
    assert status == 0, printed
    assert list(found) == [check.name for check in all_checks(1)]
    assert {name for name, (verdict, _) in found.items() if verdict == "-"} == {"latency", "bandwidth"}
    installed = {name: Version(importlib.metadata.version(name)) for name in NEWEST_TESTED}
    newer = any(installed[name].release[:2] > Version(tested).release[:2] for name, tested in NEWEST_TESTED.items())
    assert re.fullmatch(rf"all 7 checks are ok{' but for warnings of versions' * newer}, in \d+ s", last)
    assert re.fullmatch(r"tiny llama: 3 tokens after a prefill; .* one process's", found["generation"][1])
    assert "pattern branches:window=4,last=3" in found["model"][1]
    assert re.search(r"float64 \S+e-1\d of 1.0e-12, float32 \S+e-0\d of \S+e-0\d", found["oracle local"][1])


def test_verdicts_as_json(alone, tmp_path):
    status, printed = alone("--json", str(tmp_path / "verdicts.json"))
    found = json.loads((tmp_path / "verdicts.json").read_text())
    assert status == 0 and {name: x["text"] for name, x in found.items() if x["status"] == "ok"} == {
        name: text for name, (verdict, text) in verdicts(printed)[0].items() if verdict == "ok"
    }


def command_of_rank(words):
    """The command as a process of a launcher."""
    begin_as_a_program()
    os.environ.update(ENVIRONMENT)
    cli.main(words)


def test_two_processes_of_torchrun(tmp_path):
    """Of its agent and with its store; with a model: every check and its figures."""
    config = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"hidden_size": 64, "num_hidden_layers": 3, "dtype": "bfloat16", "architectures": ["Qwen3ForCausalLM"]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    logs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL)
    place = {"run_id": tmp_path.name, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "logs_specs": logs}
    launch = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="forkserver", **place)
    start_server()
    elastic_launch(launch, command_of_rank)(["check", "--model", str(file), *PATIENT])
    (printed,) = tmp_path.glob("**/0/stdout.log")
    found, last = verdicts(printed.read_text())
    assert list(found) == [check.name for check in all_checks(2)] and last.startswith("all 11 checks are ok")
    assert found["oracle heads x ring"] == ("-", "a ring of 2 has no parts of 2 ranks or more")
    assert re.match(r"2 processes on \S+, .* CPU, 1 ring of 2; backend gloo, which waits 30 min", found["launch"][1])
    assert f"{file}: qwen3 of 3 layers, bfloat16, pattern exact" == found["model"][1]
    for transport in ("ring", "collective", "heads"):
        errors = re.findall(r"(float64|bfloat16) (\S+) of ([^\s,;]+)", found[f"oracle {transport}"][1])
        assert [name for name, _, _ in errors] == ["float64", "bfloat16"]
        assert all(0 < float(error) <= float(bound) for _, error, bound in errors)
    assert re.search(r"from process (0 to 1|1 to 0)$", found["latency"][1])
    for name, shown in (("train step", "loss .*"), ("generation", "3 tokens after a prefill")):
        assert re.fullmatch(rf"tiny qwen3: {shown}; (the same as|\d+e-(0[7-9]|1\d) from) one process's", found[name][1])


@pytest.mark.parametrize(
    ("model_type", "changes", "check", "verdict", "text"),
    [
        ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 0}, "train step", "ok", "tiny jamba: loss"),
        ("dory", {}, "train step", "-", "there is no tiny model of type 'dory': "),
        ("recurrent_gemma", {}, "generation", "-", "keeps its state in the model itself"),
    ],
)
def test_types_that_are_skipped_and_sizes_that_must_fit(model_type, changes, check, verdict, text, tmp_path, alone):
    """A tiny model keeps zeros; where its numbers do not fit together, nothing has failed."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release of Transformers lacks {model_type}")
    CONFIG_MAPPING[model_type](**changes).save_pretrained(tmp_path)
    status, printed = alone("--model", tmp_path)
    found = verdicts(printed)[0]
    assert (status, found[check][0]) == (0, verdict) and text in found[check][1], printed
    assert model_type == "dory" or found["train step"][0] == "ok"


def test_patterns_of_layers_are_checked(tmp_path, alone, monkeypatch):
    """Unless the job has another pattern."""
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, hidden_size=32, intermediate_size=32)
    ra.patch_config(config, ["window:8", "exact", "window:8"]).save_pretrained(tmp_path)
    found = verdicts(alone("--model", tmp_path)[1])[0]
    assert "pattern exact, and 2 patterns of single layers" in found["model"][1] and found["oracle local"][0] == "ok"
    compute, wrong = oracle.ring_attention, ra.Pattern.parse("window:8")
    monkeypatch.setattr(
        oracle, "ring_attention", lambda *x, pattern, **y: compute(*x, pattern=pattern, **y) * (1 + (pattern == wrong))
    )
    assert verdicts(alone("--model", tmp_path)[1])[0]["oracle local"][0] == "FAILED"
    found = verdicts(alone("--model", tmp_path, "--pattern", "window:9")[1])[0]
    assert found["model"][1].endswith("pattern window:9") and found["oracle local"][0] == "ok"


LATE = ("--timeout", str(SECONDS))
OUT_OF_STEP = "'oracle ring' left the processes out of step"
#: The fault of process 1, options, the result of the first oracle, its remedy, and why the training step is skipped.
FAILED = [
    ("wrong", (), r"process 1: out is \S+ from .*, of 1.0e-12, in contig.*", "Do not train:", "it needs 'oracle ring'"),
    ("dies", LATE, "process 1 of 2 did not answer.*", "Read that process's output", OUT_OF_STEP),
    ("stalls", LATE, f"process 1 of 2 did not end within {SECONDS} s", "See what that process waits for", OUT_OF_STEP),
]


@pytest.mark.parametrize(("fault", "options", "text", "remedy", "reason"), FAILED, ids=[case[0] for case in FAILED])
def test_a_fault_of_one_process_is_named_with_a_remedy(fault, options, text, remedy, reason):
    start = time.monotonic()
    words = (fault, *PATIENT, *options)  # A later --timeout counts.
    done = run_program(__file__, *words, processes=2, environment={**os.environ, **ENVIRONMENT}, timeout=TIMEOUT)
    status, printed = done.returncode, done.stdout
    found, last = verdicts(printed)
    assert status != 0
    assert found["oracle ring"][0] == "FAILED" and re.fullmatch(text, found["oracle ring"][1]), printed
    assert remedy_of(printed, "oracle ring").startswith(remedy)
    assert found["train step"] == ("-", reason)
    assert found["oracle collective"][0] == ("FAILED" if fault == "wrong" else "-")
    assert re.match(r"failed, after \d+ s: oracle ring", last)
    assert time.monotonic() - start < TIMEOUT / 4 or not options


@pytest.mark.parametrize(
    ("config", "text"),
    [(None, "there is no folder"), ({"model_type": "bloom"}, "does not call Transformers' attention interface")],
)
def test_a_model_that_is_not_known_or_not_computed(config, text, tmp_path, alone, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    status, printed = alone("--model", "nobody/nothing" if config is None else tmp_path)
    found, _ = verdicts(printed)
    assert status == 1
    assert text in found["model"][1]
    assert "`hf-ring-attention models`" in remedy_of(printed, "model")
    assert found["train step"][0] == "-"


def test_rings_that_do_not_divide_the_processes(monkeypatch, refusal):
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = refusal("check --ranks 3")
    assert "argument --ranks: a number that divides the 2 processes was expected, got 3" in error


def test_a_release_whose_cache_is_another(alone, monkeypatch):
    """It renames an argument, or computes something else by it."""

    def wrong(model, ids, prefill=checks_of_model.prefill):
        cache = prefill(model, ids)
        for layer in cache.layers:
            layer.values *= 1.5
        return cache

    for name, value, message in (
        ("cache_argument", lambda cache: {"tokens_before": cache}, "are not used by the model: ['tokens_before']"),
        ("prefill", wrong, " from one process's on process 0"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(checks_of_model, name, value)
            status, printed = alone()
        found, _ = verdicts(printed)
        assert (status, found["generation"][0]) == (1, "FAILED") and message in found["generation"][1]
        assert remedy_of(printed, "generation").startswith("Generate with no prefill over a ring, or with an older")


def judged(name, answers, **facts):
    """The verdict of a check on what processes answered."""
    run = CheckRun(Namespace(ranks=None), HashStore(), 0, len(answers))
    run.facts.update(facts)
    return next(check for check in all_checks(len(answers)) if check.name == name).verdict(run, answers)


MACHINES = [{"host": "a", "device": f"GPU {n}", "type": "cuda", "cores": 8} for n in range(4)]


def test_devices_that_are_shared_and_variables_that_differ():
    settings = {"torch's threads": "1", "NCCL_ALGO": "Ring"}
    assert judged("environment", [settings, settings], machines=MACHINES[:2]).status == "ok"
    shared = judged("environment", [settings] * 2, machines=[MACHINES[0]] * 2)
    assert (shared.status, shared.text) == ("failed", "processes 0 and 1 share the device GPU 0 of a")
    differing = judged("environment", [settings, {**settings, "NCCL_ALGO": "Tree"}], machines=MACHINES[:2])
    assert (differing.status, differing.text) == ("failed", "NCCL_ALGO is Tree on process 1 and Ring on process 0")
    crowded = [{**machine, "type": "cpu"} for machine in MACHINES[:2]]
    assert judged("environment", [{"torch's threads": "8"}] * 2, machines=crowded).status == "warning"


def test_slow_links():
    slow = judged("latency", [1e-5, 1e-5, 1e-3, 1e-5], machines=MACHINES)
    assert slow.status == "warning" and "slowest 1 ms from process 2 to 3" in slow.text


def test_versions_that_are_newer_than_tested_or_not_supported():
    torch_release, transformers = (NEWEST_TESTED[name] for name in ("torch", "transformers"))
    versions = {"python": "3.11.0", "torch": torch_release + ".9", "transformers": transformers + ".dev0"}
    assert judged("versions", [versions] * 2).status == "ok"
    for name, found, newest in (("torch", "2.99.0+cu130", torch_release), ("transformers", "6.0.0", transformers)):
        newer = judged("versions", [versions | {name: found}] * 2)
        assert (newer.status, newer.text) == ("warning", f"newer than tested: {name} {found} is newer than {newest}")
    assert f"torch {torch_release}" in (ROOT / "README.md").read_text("utf-8")
    other = judged("versions", [versions, versions | {"transformers": "99.0"}])
    assert other.text == f"transformers is 99.0 on process 1 and {versions['transformers']} on process 0"
    assert other.remedy.startswith("Install the same transformers on all hosts")
    old = judged("versions", [{**versions, "torch": "2.1.0"}] * 2)
    assert (old.status, old.text) == ("failed", "torch is 2.1.0, and >=2.11 is supported")
    assert old.remedy == "pip install 'torch>=2.11'"


def faulty(fault):
    """Gives this process a fault."""

    def wrong(*args, forward=CpuFlash.forward_masked):
        out, lse = forward(*args)
        return 1.5 * out, lse

    faults = {"wrong": wrong, "dies": lambda *_: os._exit(3), "stalls": lambda *_: time.sleep(TIMEOUT)}
    CpuFlash.forward_masked = faults[fault]


if __name__ == "__main__":
    runner.PATIENCE = 1.0
    if os.environ["RANK"] == "1":
        faulty(sys.argv[1])
    cli.main(["check", *sys.argv[2:]])
