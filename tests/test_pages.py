"""Pages of recipes/guide: the page of public names is its docstrings, and the loop of the FAQ trains as one process does."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_ring_attention as ra
from tests import pages

from .support.checkpoints import save_tiny_checkpoint
from .support.programs import run_program
from .support.ranks import TIMEOUT
from .test_readme import MODEL, PREAMBLE, ROOT, ROW, blocks

GUIDE = ROOT / "recipes" / "guide"


def test_the_page_of_public_names_is_made_from_the_docstrings():
    text = pages.api_page()
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert len(headings) == len(ra.__all__) - 1  # without the version
    assert pages.API.read_text(encoding="utf-8") == text, "run `make docs`"


def test_a_public_name_without_a_place_is_refused(monkeypatch):
    monkeypatch.setitem(pages.SECTIONS, "Cost", "explain Explanation estimate")
    with pytest.raises(ValueError, match=r"each public name once: \['Estimate'\]"):
        pages.api_page()


# ---- the FAQ


#: The tests add this to the loop, to see the model at its end.
SAVE = "\ntorch.save(model.state_dict(), f'{RANK}.pt')\n"
#: The lines of the loop that one process leaves out.
SEVERAL = ("torch.distributed", "ring = ", "ra.patch_model(model, ring=ring)", "model = DistributedDataParallel(model)")


def trained(program, folder, processes):
    """The weights of each process at the end of a program, and what it printed."""
    (folder / "loop.py").write_text("import os\nRANK = os.environ.get('RANK', 'alone')\n" + program + SAVE)
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **settings}
    done = run_program("loop.py", processes=processes, environment=environment, timeout=TIMEOUT, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ["alone"] if processes == 1 else range(processes)
    states = [torch.load(folder / f"{name}.pt", weights_only=True) for name in names]
    return [{key.removeprefix("module."): value for key, value in state.items()} for state in states], done.stdout


def test_the_loop_of_the_faq_trains_over_a_ring_as_on_one_process(tmp_path):
    """Its updates are compared, since AdamW changes weights by little."""
    save_tiny_checkpoint(
        tmp_path / "model", "<end>", hidden_size=32, intermediate_size=64, max_position_embeddings=16384
    )
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Chapter {number}. " + "The quick brown fox jumps. " * 30)
    (loop,) = blocks(GUIDE / "faq.md", "python")
    assert len([line for line in loop.splitlines() if line]) == 12
    begin = PREAMBLE.replace(MODEL, str(tmp_path / "model")).replace(ROW, "1024")
    lines = [line for line in loop.splitlines() if not line.startswith(SEVERAL)]
    assert len(lines) == len(loop.splitlines()) - len(SEVERAL)
    (expected,), _ = trained(begin + "\n".join(lines), tmp_path, 1)
    (first, second), printed = trained(f"{begin}{loop}\nprint('sent', ring.traffic().sent_bytes > 0)\n", tmp_path, 2)
    assert printed.count("sent True") == 2, "keys and values travelled"
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, before in start.items():
        assert torch.equal(first[name], second[name]), name
        update = (expected[name] - before).norm()
        assert update > 0 and (first[name] - expected[name]).norm() < 1e-3 * update, name
