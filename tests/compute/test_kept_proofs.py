"""A proof that a kernel passed is kept on disk for later processes, and only as long as all that it depends on is the same."""

import ctypes
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest
import torch

from hf_ring_attention.compute import kept_proofs, proof
from hf_ring_attention.compute.cuda_kernels import CudaFlash, Cudnn
from hf_ring_attention.compute.kept_proofs import KeptProof
from hf_ring_attention.compute.kernels import Math
from hf_ring_attention.plan.kernel_choice import ANY_TILES, TileKinds
from tests.support.cuda_operators import CudnnAttention, FlashAttention2
from tests.support.patches import replaced

CPU = torch.device("cpu")
WHOLE = TileKinds(rows=4096, whole_rows=True, full_rows=True, few_calls=True, shapes=("causal",))


class Counted(Math):
    """Plain math that counts its calls, and may be wrong."""

    def __init__(self, wrong=False):
        super().__init__()
        self.calls, self.wrong = 0, wrong

    def forward(self, *call):
        self.calls += 1
        out, lse = super().forward(*call)
        return out, lse + self.wrong


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """The facts of a device that has no proofs yet; the CPU plays it."""
    facts = {"device": "a card", "driver": "580.1", "torch": ["2.13.0"], "sources": "abc"}
    replaced(monkeypatch, kept_proofs, machine_facts=lambda device: dict(facts))
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path))
    replaced(monkeypatch, proof, _FAULTS={})
    kept_proofs._warn.cache_clear()
    return facts


def new_process(kernel=None, tiles=ANY_TILES, dtype=torch.float32, sizes=(2, 8, 8), softcap=None):
    """The number of calls that a process makes before it takes the kernel, and the fault that it finds."""
    proof._FAULTS.clear()
    kernel = kernel or Counted()
    fault = proof.fault_of(kernel, softcap, tiles, CPU, dtype, *sizes)
    return getattr(kernel, "calls", None), fault


def test_the_second_process_computes_no_proof(machine, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(proof, "LONG_WAIT", 1000)  # A busy CPU may take long.
    first, fault = new_process()
    assert first > 0
    assert fault is None
    files = list((tmp_path / "proofs").iterdir())
    assert len(files) == 2, "one for each case, and no temporary file"
    assert new_process() == (0, None)
    assert {file.name for file in files} == {file.name for file in (tmp_path / "proofs").iterdir()}
    # Of two cases one is known: exact attention of packed rows, which a ring needs too.
    assert 0 < new_process(tiles=TileKinds(rows=100, shapes=("causal", "full")))[0] < first
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_whatever_a_proof_depends_on_asks_for_a_new_one(machine):
    new_process()
    for fact in [*machine]:
        machine[fact] = "another"
        assert new_process()[0] > 0, fact
    assert new_process()[0] == 0


def test_other_calls_have_other_proofs(machine):
    calls = [
        {}, {"dtype": torch.float16}, {"sizes": (1, 8, 8)}, {"sizes": (2, 8, 16)}, {"softcap": 2.0},
        {"tiles": TileKinds(rows=100, shapes=("full",))}, {"tiles": WHOLE},
    ]  # fmt: skip
    for call in calls:
        kernel = Counted()
        kernel.softcap = call.get("softcap")
        assert new_process(kernel, **call)[0] > 0
        assert new_process(**call)[0] == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert new_process()[0] > 0
    finally:
        torch.use_deterministic_algorithms(False)
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # Then plain math, which sets the bounds, is rougher.
    try:
        assert new_process()[0] > 0
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
    assert new_process()[0] == 0


def test_faults_are_not_kept(machine, tmp_path):
    """A compiler that is missing today may be there tomorrow."""
    assert "lse" in new_process(Counted(wrong=True))[1]
    assert not (tmp_path / "proofs").exists()
    calls, fault = new_process()
    assert calls > 0
    assert fault is None


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"], ids=str)
def test_a_broken_file_is_ignored_and_written_anew(content, machine, tmp_path, caplog):
    new_process()
    files = {file: file.read_bytes() for file in (tmp_path / "proofs").iterdir()}
    for file in files:
        file.write_bytes(content)
    assert new_process()[0] > 0
    assert len([record for record in caplog.records if "is broken" in record.getMessage()]) == len(files)
    assert {file: file.read_bytes() for file in (tmp_path / "proofs").iterdir()} == files


@pytest.mark.parametrize("obstacle", ["file", "full", "no home"])
def test_a_folder_that_cannot_be_written_fails_no_call(obstacle, machine, tmp_path, monkeypatch, caplog):
    if obstacle == "file":
        (tmp_path / "proofs").write_text("in the way")
    elif obstacle == "full":
        full = Mock(side_effect=OSError(28, "No space left on device"))
        replaced(monkeypatch, kept_proofs.os, replace=full)
    else:
        for name in ("HF_RING_ATTENTION_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        home = Mock(side_effect=RuntimeError("Could not determine home directory."))
        replaced(monkeypatch, kept_proofs.Path, home=home)
    for _ in range(2):
        calls, fault = new_process()
        assert calls > 0
        assert fault is None
    [warning] = [r.getMessage() for r in caplog.records if "kept (" in r.getMessage()]
    assert warning.endswith("name another folder with HF_RING_ATTENTION_CACHE")
    if obstacle == "full":
        assert not list((tmp_path / "proofs").iterdir())


def test_processes_write_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path))
    seen = []

    def process(number):
        kept = KeptProof({"rank": number % 2})
        for _ in range(20):
            assert kept.keep() == f"kept in {tmp_path / 'proofs'}"
            seen.append(kept.found())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(process, range(8)))
    assert seen == [True] * 160
    assert len(list((tmp_path / "proofs").iterdir())) == 2


def test_the_folder(monkeypatch):
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", "/own")
    assert str(kept_proofs.folder()) == "/own/proofs"
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(kept_proofs.folder()) == "/cache/hf_ring_attention/proofs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(kept_proofs.folder()) == os.path.expanduser("~/.cache/hf_ring_attention/proofs")


# ---- what the proof depends on


@pytest.fixture
def card(monkeypatch):
    replaced(
        monkeypatch, torch.cuda, get_device_name=lambda device: "H100", get_device_capability=lambda device: (9, 0)
    )
    replaced(monkeypatch, kept_proofs, _driver=lambda: "580.1")


def test_the_facts_of_a_machine(card, monkeypatch):
    facts = kept_proofs.machine_facts(torch.device("cuda"))
    assert (facts["device"], facts["capability"], facts["driver"]) == ("H100", (9, 0), "580.1")
    assert torch.__version__ in facts["torch"]
    assert kept_proofs.machine_facts(CPU) is None
    replaced(monkeypatch, kept_proofs, _driver=lambda: None)
    assert kept_proofs.machine_facts(torch.device("cuda")) is None


def test_the_version_of_the_driver(monkeypatch, tmp_path):
    """By a file of Linux, or by NVIDIA's library if a container does not have this file."""

    class Library:
        status = 0

        def nvmlInit_v2(self):
            return self.status

        def nvmlSystemGetDriverVersion(self, text, size):
            text.value = b"580.95.05"
            return self.status

    def driver():
        return kept_proofs._driver.__wrapped__()

    library = Library()
    replaced(monkeypatch, kept_proofs, _DRIVERS=(str(tmp_path / "none"), str(tmp_path / "version")))
    replaced(monkeypatch, ctypes, CDLL=lambda name: library)
    assert driver() == "580.95.05"
    library.status = 9
    assert driver() is None
    (tmp_path / "version").write_text("NVRM version: 570.1\n")
    assert driver() == "NVRM version: 570.1"
    os.unlink(tmp_path / "version")

    replaced(monkeypatch, ctypes, CDLL=Mock(side_effect=OSError("no such library")))
    assert driver() is None


def test_sources_are_told_apart(tmp_path):
    digests, file = [], tmp_path / "fused" / "kernels.py"
    file.parent.mkdir()
    for change in (
        lambda: file.write_text("a = 1"),
        lambda: file.write_text("a = 2"),
        lambda: file.rename(file.with_name("others.py")),
        lambda: file.with_suffix(".pyc").write_text(""),
    ):
        change()
        digests.append(kept_proofs._digest.__wrapped__(tmp_path))
    assert len({*digests}) == 3 and digests[-1] == digests[-2]


def test_versions_of_kernels(card, monkeypatch):
    versions = {"flash-attn-4": "4.0.0b18", "nvidia-cutlass-dsl": "4.5.3", "quack-kernels": "0.5.0"}

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    replaced(monkeypatch, kept_proofs, installed_version=version)

    def of(kernel, implementation):
        call = {"kernel": kernel, "implementation": implementation}
        text = kept_proofs.kept_proof(torch.device("cuda"), call)._text
        return text and {word: word in text for word in ("triton", *versions, *versions.values())}

    assert not any(of("flash", None).values())
    assert [word for word, found in of("flash", "FA4").items() if found] == [*versions, *versions.values()]
    assert of("flash", "FA3") is None, "no such package: its files may change"
    assert of("flash", "other") is None
    pytest.importorskip("triton")
    assert [word for word, found in of("fused", None).items() if found] == ["triton"]


# ---- how much is proved


@pytest.fixture
def calls_of_proof(checked_operators, monkeypatch):
    def calls_of_proof(kernel, operators, tiles):
        checked = checked_operators(torch.float32, played_by=operators)
        replaced(monkeypatch, proof, _FAULTS={})
        assert proof.fault_of(kernel, None, tiles, CPU, torch.float32, 1, 64, 64) is None
        return checked.calls

    return calls_of_proof


def test_cudnn_compiles_a_program_of_each_direction_for_rows_of_one_document(calls_of_proof):
    """It compiles for each shape, and so few shapes are proved: only those of the call's kinds of tiles."""

    def programs(tiles):
        calls = calls_of_proof(Cudnn(), CudnnAttention(), tiles)
        return len({(name, *(given[x].shape for x in ("query", "key")), given["is_causal"]) for name, given in calls})

    assert programs(WHOLE) == 2
    assert programs(WHOLE._replace(shapes=("full",))) == 2
    assert programs(TileKinds(rows=4096, full_rows=True, shapes=("causal", "full"))) == 8


def test_flash_is_proved_in_the_form_of_the_call(calls_of_proof):
    """Packed rows in place are other programs than tiles, and so are bands."""

    def forms(tiles):
        calls = calls_of_proof(CudaFlash(), FlashAttention2, tiles)
        return {(given["cum_seq_q"] is not None, given["is_causal"], "window_size_left" in given) for _, given in calls}

    assert forms(WHOLE) == {(False, True, False)}
    bands = {(False, *form) for form in ((True, False), (False, False), (False, True))}
    assert forms(WHOLE._replace(rows=0, shapes=())) == bands
    assert forms(TileKinds(rows=10, whole_rows=True, few_calls=True, shapes=("causal",))) == {(True, True, False)}


# ---- the line of the first call


def test_the_first_call_says_what_was_compiled_and_how_long_it_took(machine, tmp_path, monkeypatch, caplog):
    clock = iter(range(0, 1000, 8))
    replaced(monkeypatch, proof.time, perf_counter=lambda: float(next(clock)))

    def lines():
        return [(r.levelname, r.getMessage()) for r in caplog.records if "was compiled" in r.getMessage()]

    with caplog.at_level(logging.INFO):
        new_process()
        call = "window, causal; torch.float32; heads of 8 and 8 numbers; cpu"
        said = (
            f"kernel math was compiled and proved right in 8.0 s ({call}): the proof is kept in {tmp_path / 'proofs'}"
        )
        assert lines() == [("WARNING", said)]
        new_process()
        assert len(lines()) == 1, "a kept proof takes no time"
        monkeypatch.setenv("LOCAL_RANK", "1")
        new_process(dtype=torch.float16)
        assert [level for level, _ in lines()] == ["WARNING", "INFO"], "one process of a machine shows it"
        monkeypatch.delenv("LOCAL_RANK")
        replaced(monkeypatch, proof, LONG_WAIT=10)
        new_process(dtype=torch.bfloat16)
        assert [level for level, _ in lines()] == ["WARNING", "INFO", "INFO"], "a short wait needs no line"


def test_the_line_names_an_implementation_and_proofs_that_are_not_kept(machine, checked_operators, monkeypatch, caplog):
    replaced(monkeypatch, proof, torch_flash=lambda: "other")
    checked_operators(torch.float32, played_by=FlashAttention2)
    with caplog.at_level(logging.INFO):
        assert proof.fault_of(CudaFlash(), None, WHOLE, CPU, torch.float32, 2, 64, 64) is None
    [line] = [r.getMessage() for r in caplog.records if "was compiled" in r.getMessage()]
    assert line.startswith("kernel flash of other was compiled")
    assert line.endswith("the proof is not kept, since the driver or the implementation has no known version")
