"""A process of a command that is killed ends the others by one line that names it."""

import itertools
import os
import re
import signal
import time

from hf_ring_attention.cli import main as cli
from hf_ring_attention.ring import engine
from tests.support.checkpoints import save_checkpoint_of_words
from tests.support.programs import run_offline
from tests.support.ranks import PROMPTLY
from tests.support.tiny_models import with_large_weights

COMMAND = "calibrate --model model --text fox.txt --tokens 80 --menu window:4+1 --menu exact"


def test_the_others_name_it_in_one_line(tmp_path, monkeypatch):
    folder = save_checkpoint_of_words(tmp_path, with_large_weights, num_key_value_heads=2)
    monkeypatch.chdir(folder)
    start = time.monotonic()
    done = run_offline(__file__, *COMMAND.split(), processes=3, timeout=2 * PROMPTLY)
    assert time.monotonic() - start < PROMPTLY
    lines = [line for line in done.stderr.splitlines() if "lost" in line]
    assert len(lines) == 2 and "Traceback" not in done.stderr, done.stderr
    # Another process may still wait while this process names the one that does not answer.
    which = r"(?:process|one or more of the processes) \[?([\d, ]+)\]? of 3 .*, so process (\d) ends too"
    named = [re.match(f"hf-ring-attention: lost {which}", line) for line in lines]
    lost = {match[2]: match[1].replace(" ", "").split(",") for match in named}
    assert lost.keys() == {"0", "2"} and "1" in lost["0"], lines
    # Process 0 holds the store of entries: if it ends first, process 2 names it, and its line names process 1.
    assert "1" in lost["2"] or lost["2"] == ["0"], lines
    assert len(done.stderr.splitlines()) < 10, done.stderr


CALLS = itertools.count()


def killed_in_its_third_call(*call, forward=engine.forward_pass):
    if next(CALLS) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(*call)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        engine.forward_pass = killed_in_its_third_call
    cli.main()
