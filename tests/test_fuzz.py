"""Random cases of `make fuzz`, as many as there is time for here; and cases that are wrong are reported, and repeated."""

import io
import re
from contextlib import chdir, redirect_stdout

import pytest
import torch

from hf_ring_attention.compute import kernel
from hf_ring_attention.ring import engine
from hf_ring_attention.transport import transports
from tests import fuzz
from tests.support.ranks import run_ranks

CASES = 64
DRAWS = """
import random, pytest
from hypothesis import given, strategies

@pytest.mark.drawn
@pytest.mark.parametrize("number", range(9))
def test_a_draw(number, request):
    pytest.fail(f"seed {request.config.option.seed}: {random.randrange(10**6)}")

def test_hypothesis():
    drawn = []
    given(strategies.integers(0, 10**9))(drawn.append)()
    pytest.fail(f"the sum is {sum(drawn)}")
"""
REPEATED = r"python -m tests\.fuzz --case ((?:attention|fused|models):\d+)"


def test_random_cases_of_attention(rng):
    """Random cases of models are in tests/hf/test_pairs.py."""
    report = fuzz.run_many(rng.randrange(10**6), ["attention"], cases=CASES)
    assert not report.failed, "\n".join(report.failed)
    assert sum(report.outcomes.values()) == CASES


def printed_by_pytest(rank, folder, workers):
    """All that a run by the rules of these tests prints."""
    with chdir(folder), redirect_stdout(io.StringIO()) as printed:
        pytest.main(["--seed", "7", "-n", str(workers), str(folder)])
    return printed.getvalue()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_run_draws_the_same(tmp_path, workers):
    """Which cases run, of tests that are marked for it, and their inputs, whichever process and whatever else is loaded."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = drawn")
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "test_it.py").write_text(DRAWS)

    def failures(workers):
        """(the tests that failed, with their messages; all printed text) of a run in a fresh process."""
        [printed] = run_ranks(printed_by_pytest, 1, tmp_path, workers)
        return sorted(re.findall(r"^FAILED (.*)$", printed, re.MULTILINE)), printed

    of_workers, printed = failures(workers)
    assert len(of_workers) == 4 and all("seed 7: " in line for line in of_workers[:3]), printed
    assert "repeat with the same inputs: python -m pytest -n 0 --seed 7 " in printed
    # Hypothesis would draw constants from the modules that are loaded.
    (tmp_path / "test_other.py").write_text(f"CONSTANTS = {[10**8 + number for number in range(500)]}")
    assert failures(0)[0] == of_workers


def test_a_number_decides_its_case_whatever_ran_before(rng):
    numbers = [rng.randrange(2**31) for _ in range(20)]
    for draw, _ in fuzz.KINDS.values():
        there, back = ([str(draw(number)) for number in order] for order in (numbers, numbers[::-1]))
        assert there == back[::-1]
        assert len(set(there)) > 1


def scaled(backward_pass, *call):
    """Gradients of values are a hundredth too small."""
    dq, dk, dv, dsinks = backward_pass(*call)
    return dq, dk, dv * 0.99, dsinks


def first(merge_, out, lse, new_out, new_lse):
    """Of the parts of a softmax, only the first one counts."""
    empty = lse == -torch.inf
    out.copy_(new_out.where(empty.unsqueeze(-1), out))
    lse.copy_(new_lse.where(empty, lse))


def miscounted(exchange, link, step, sends, receives):
    """Each exchange of a ring that sends rows counts one byte too many."""
    link.traffic.sent_bytes += any(message.tensor.numel() for message in sends)
    return exchange(link, step, sends, receives)


#: Functions with defects, and where they take the places of others.
DEFECTS = {first: (kernel, "merge_"), scaled: (engine, "backward_pass"), miscounted: (transports.Link, "exchange")}


# As in tests/hf/test_pairs.py.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize(
    ("kind", "defect", "cases"),
    [("attention", first, 6), ("attention", scaled, 3), ("attention", miscounted, 12), ("models", scaled, 3)],
)
def test_a_defect_is_reported_and_repeated(kind, defect, cases, capsys, monkeypatch):
    call = ["--only", kind, "--cases", str(cases), "--seed", "1"]
    place, name = DEFECTS[defect]
    with monkeypatch.context() as patched:
        replaced = getattr(place, name)
        patched.setattr(place, name, lambda *call: defect(replaced, *call))
        assert fuzz.main(call) == 1
        told = capsys.readouterr().out
        names = re.findall(f"^{REPEATED}$", told, re.MULTILINE)
        assert names
        assert re.search(rf"^{cases} cases of seed 1 in \d+ s: {len(names)} failed", told, re.MULTILINE)
        assert re.findall(f"^failed: {REPEATED}$", told, re.MULTILINE) == names
        with pytest.raises(AssertionError):
            fuzz.main(["--case", names[0]])
    # It was the defect, and not the case.
    assert fuzz.main(["--case", names[0]]) == 0


def test_time_ends_it(capsys):
    assert fuzz.main(["--only", "attention", "--minutes", "0", "--seed", "1"]) == 0
    assert re.search(r"^1 cases of seed 1 in \d+ s: 0 failed", capsys.readouterr().out, re.MULTILINE)
