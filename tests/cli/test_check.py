"""`hf-ring-attention check`: one line for each check that is ok, and the first fault, with the process and what to do."""

import json
import os
import re
import sys
import time
from unittest.mock import patch

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import LlamaConfig

import hf_ring_attention as ra
from hf_ring_attention.cli import checks
from hf_ring_attention.cli import main as cli
from hf_ring_attention.compute.kernels import CpuFlash
from hf_ring_attention.compute.private import default_store
from tests.support.programs import run_offline
from tests.support.ranks import TIMEOUT, begin_as_a_program, start_server

#: Seconds that processes wait if one hangs: enough for all checks before. Elsewhere a busy machine has all the time.
SECONDS = 15
PATIENT = ("--timeout", str(TIMEOUT))
BEFORE, AFTER = ["launch", "versions", "environment"], ["train step", "generation"]


def texts(printed):
    """The texts of checks that are ok, by their names."""
    return dict(re.findall(r"^ok +(\S+(?: \S+)?)  +(.*)$", printed, re.MULTILINE))


@pytest.fixture
def alone(ended):
    """Runs the command in this process; returns its exit status and what it printed."""
    return lambda *words: ended(["check", *PATIENT, *words])


def test_one_process(alone, tmp_path):
    """--json stands by itself, or names a file."""
    assert "train step" in json.loads(alone("--json")[1])
    status, printed, _ = alone("--pattern", "window:4+3", "--json", str(tmp_path / "found.json"))
    found = texts(printed)
    assert status == 0 and [*found] == [*BEFORE, "model", "oracle local", *AFTER], printed
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert found["model"] == "a tiny llama, float32, pattern window:4+3"
    assert re.fullmatch(r"tiny llama: 3 tokens after a prefill, \d+e[-+]\d+ from one process's", found["generation"])
    assert re.fullmatch(r"outputs and gradients off by at most \d+% of their bounds; kernel \w+", found["oracle local"])


def command_of_rank(words):
    """The command as a process of a launcher."""
    begin_as_a_program()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
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
    found = texts(printed.read_text())
    oracles = ["oracle ring", "oracle collective", "oracle heads"]
    assert sorted(found) == sorted([*BEFORE, "links", "model", *oracles, *AFTER])
    assert re.fullmatch(r"2 processes on 1 host, \S+ CPU, 1 ring of 2", found["launch"])
    assert found["model"] == f"{file}: qwen3, bfloat16, pattern exact"
    assert re.fullmatch(r"8 B in .* from process [01]; 4.0 MiB in .*", found["links"])


FAULTS = {
    "wrong": (PATIENT, "0: attention by exact in contiguous, .* on process 1: do not"),
    "refuses": (PATIENT, "1: no such kernel"),
    "dies": (PATIENT, "0: lost process 1 of 2"),
    "stalls": (("--timeout", str(SECONDS)), "0: lost process 1 of 2"),
}


@pytest.mark.parametrize("fault", ["wrong", "refuses", "dies", pytest.param("stalls", marks=pytest.mark.slow)])
def test_the_first_fault_ends_all_and_is_named(fault):
    options, text = FAULTS[fault]
    start = time.monotonic()
    done = run_offline(__file__, fault, *options, processes=2)
    assert done.returncode != 0 and re.search(f"FAILED  oracle ring, on process {text}", done.stderr), done.stderr
    assert [*texts(done.stdout)] == [*BEFORE, "links", "model"]
    assert time.monotonic() - start < TIMEOUT / 2


def test_patterns_of_layers_are_checked(tmp_path, alone, monkeypatch):
    """Unless the job has another pattern."""
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, hidden_size=32, intermediate_size=32)
    ra.patch_config(config, ["window:8", "exact", "window:8"]).save_pretrained(tmp_path)
    compute = checks.ring_attention

    def wrong(*x, pattern, **y):
        return compute(*x, pattern=pattern, **y) * (1 + (pattern == ra.Pattern.parse("window:8")))

    monkeypatch.setattr(checks, "ring_attention", wrong)
    status, printed, error = alone("--model", tmp_path)
    assert status == 1 and texts(printed)["model"].endswith("pattern exact, and 2 patterns of single layers")
    assert "attention by window:8 in contiguous" in error and "do not train" in error
    status, printed, _ = alone("--model", tmp_path, "--pattern", "window:9")
    assert status == 0 and texts(printed)["model"].endswith("pattern window:9")


@pytest.mark.parametrize(
    ("config", "text"),
    [(None, "there is no folder"), ({"model_type": "bloom"}, "does not call Transformers' attention interface")],
)
@patch("huggingface_hub.constants.HF_HUB_OFFLINE", True)
def test_a_model_that_is_not_known_or_not_computed(config, text, tmp_path, alone):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    status, printed, error = alone("--model", "nobody/nothing" if config is None else tmp_path)
    assert status == 1 and [*texts(printed)] == BEFORE
    assert error.startswith("FAILED  model, on process 0: ") and text in error


def test_a_release_whose_cache_is_another(alone):
    """It renames an argument, or computes something else by it."""

    def wrong(model, ids, prefill=checks.prefill):
        cache = prefill(model, ids)
        for layer in cache.layers:
            layer.tensors[1].mul_(1.5)
        return cache

    for name, value, message in (
        ("cache_argument", lambda cache: {"tokens_before": cache}, "are not used by the model: ['tokens_before']"),
        ("prefill", wrong, "3 tokens after a prefill of a tiny model: "),
    ):
        with patch.object(checks, name, value):
            status, printed, error = alone()
        assert status == 1 and "generation" not in texts(printed)
        assert error.startswith("FAILED  generation, on process 0: ") and message in error


def test_what_differs_between_processes_is_named(monkeypatch):
    run = checks.CheckRun(None, 2, 0)
    for ours, theirs in (("Ring", "Tree"), ("Ring", None)):
        other = {} if theirs is None else {"NCCL_ALGO": theirs}
        monkeypatch.setattr(run, "of_all", lambda values, other=other: [values, other])
        with pytest.raises(checks.Failure, match=f"NCCL_ALGO is {theirs} on process 1 and {ours} on process 0: set it"):
            run.alike({"NCCL_ALGO": ours}, "set it")


def test_a_number_that_is_none_is_a_failure():
    """Also if others come before it."""
    run, ones = checks.CheckRun(None, 1, 0), torch.ones(2)
    assert "0e+00 from" in run._compared([ones, ones], [ones, ones], "a loss")
    with pytest.raises(checks.Failure, match="a loss of a tiny model: inf from one process's on process 0: do not"):
        run._compared([ones, ones * float("nan")], [ones, ones], "a loss")


def faulty(fault):
    """Gives this process a fault."""

    def wrong(*args, forward=CpuFlash.forward_masked):
        out, lse = forward(*args)
        return 1.5 * out, lse

    def refuses(*args):
        raise ValueError("no such kernel")

    def stalls(*args):
        while default_store().num_keys():  # It ends with the process that holds the store.
            time.sleep(0.2)

    faults = {"wrong": wrong, "dies": lambda *_: os._exit(3), "stalls": stalls, "refuses": refuses}
    CpuFlash.forward_masked = faults[fault]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        faulty(sys.argv[1])
    cli.main(["check", *sys.argv[2:]])
