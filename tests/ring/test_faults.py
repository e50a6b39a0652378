"""A rank that is killed, stalls or raises before, in or after any phase of a run: all others end, and name it.

| phase | before | in | after |
|---|---|---|---|
| set-up | the process group is made | the group of the ring is made | the ring's first call |
| forward hop, backward hop | the call | rows are under way | the next call |
| all-to-all of rows, of heads | the call | rows are under way | the backward pass |
| agreement | the exchange | sizes are known, and the objects are not | the next one |

`make test` draws a kind and a moment for each phase, so that every kind and every moment comes; `make test-slow` has all 54.
The tests kill a stalled rank once the others have ended, as a launcher does.

Other faults have tests beside: ranks that make calls in another order (test_bad_input.py), ranks
that die while they train (tests/recipes/test_faults_of_two.py) or a job is checked (tests/cli/test_check.py), saves that are
killed at any change of the disk (tests/recipes/test_checkpoints.py), and full disks, signals, and files that were cut short
(tests/recipes/test_faults.py).
"""

import itertools
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.faults import KINDS, MOMENTS, OWN_ERROR, PHASES, WORLD_SIZE, Fault, outcome_of

#: The step that the errors of the other ranks name: the step of the fault, or a later step.
DOING = {
    "set-up": "",  # words of torch.distributed
    "forward hop": "comparing|ring attention, (forward|backward) pass, step",
    "backward hop": "comparing|ring attention, backward pass, step",
    "all-to-all of rows": "comparing|collective attention, (forward|backward) pass",
    "all-to-all of heads": "comparing|attention by heads, .*, on rank",
    "agreement": "comparing the calls of all ranks, on rank",
}


def drawn(kind, phase, moment, rng):
    """The fault of any rank, but for one case: torch waits without end to make a group if the process stalls that holds its
    store, process 0 of these. Under torchrun none of the processes holds it."""
    return Fault(kind, phase, moment, rng.randrange((kind, phase, moment) == ("stalled", "set-up", "in"), WORLD_SIZE))


def lost(error):
    """The processes that an error names."""
    named = re.search(r"lost (?:process|one or more of the processes) \[?([\d, ]+)", error)
    return [] if named is None else [int(rank) for rank in named[1].strip(", ").split(",")]


def check(fault, folder):
    """Runs the ranks with a fault, and checks how they end."""
    outcome = outcome_of(fault, folder)
    told = f"{fault}: {outcome}"
    others = [rank for rank in range(WORLD_SIZE) if rank != fault.rank]
    assert outcome.hung == ([fault.rank] if fault.kind == "stalled" else []), told
    if fault.kind == "raising":
        own = outcome.errors[fault.rank]
        assert outcome.statuses[fault.rank] == 1 and own.endswith(OWN_ERROR) and not lost(own), told
    else:
        assert outcome.statuses[fault.rank] == -signal.SIGKILL, told
    for rank in others:
        error = outcome.errors[rank]
        assert outcome.statuses[rank] == 1, told
        if fault.alone_at_start:
            assert f"process {rank} of {WORLD_SIZE} was not joined by all others" in error, told
            assert "look in each output for a process that ended, and start all again" in error, told
            continue
        # Another process may still wait while this process names the silent one. Process 0 takes the store with it: if it
        # ends first, this process only sees that.
        assert fault.rank in lost(error) or (lost(error) == [0] and fault.rank in lost(outcome.errors[0])), told
        assert f"process {rank} ends too; start again from the last checkpoint" in error, told
        assert re.search(DOING[fault.phase], error), told


def check_all(faults, folder):
    """Side by side, since most of the time of each is waiting."""
    folders = [folder / str(number) for number in range(len(faults))]
    for each in folders:
        each.mkdir()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, faults, folders))


def test_faults_of_any_kind_in_every_phase(rng, tmp_path):
    kinds, moments = ([*itertools.islice(itertools.cycle(rng.sample(x, 3)), len(PHASES))] for x in (KINDS, MOMENTS))
    rng.shuffle(moments)
    check_all([drawn(*each, rng) for each in zip(kinds, PHASES, moments, strict=True)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_every_fault(phase, rng, tmp_path):
    faults = [drawn(kind, phase, moment, rng) for kind in KINDS for moment in MOMENTS]
    check_all(faults, tmp_path)
