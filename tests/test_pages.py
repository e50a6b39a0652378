"""Pages of recipes/guide: names as their docstrings describe them, a loop that trains, patterns as they are drawn and cost."""

import re
import runpy
import shlex
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.cli import main as cli
from tests import pages
from tests.support.tiny_models import tiny_model

from .test_readme import CHOSEN, LOOP, PREAMBLE, ROOT, as_tested, run_snippet, save_inputs

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


# ---- programs of training.md


#: The tests add this to the loop, to see the model at its end.
SAVE = "\ntorch.save(model.state_dict(), f'{RANK}.pt')\n"
#: The lines of the loop that one process leaves out.
SEVERAL = ("torch.distributed", "ring = ", "ra.patch_model(model, ring=ring)", "model = DistributedDataParallel(model)")


def trained(program, folder, processes):
    """The weights of each process at the end of a program, and what it printed."""
    (folder / "loop.py").write_text("import os\nRANK = os.environ.get('RANK', 'alone')\n" + program + SAVE)
    printed = run_snippet("loop.py", processes, folder=folder)
    names = ["alone"] if processes == 1 else range(processes)
    states = [torch.load(folder / f"{name}.pt", weights_only=True) for name in names]
    return [{key.removeprefix("module."): value for key, value in state.items()} for state in states], printed


def test_the_program_for_layers_that_choose_keys(tmp_path):
    (tmp_path / "program.py").write_text(CHOSEN)
    made = mock.Mock(from_pretrained=lambda name: tiny_model("glm_moe_dsa", "sdpa"))
    names = {"ra": ra, "ring": ra.Ring.alone(), "AutoModelForCausalLM": made, "input_ids": torch.arange(3, 40)[None]}
    found = runpy.run_path(str(tmp_path / "program.py"), names)
    assert found["loss"] > 0 and "indexer" in {name.split(".")[-1] for name, _ in found["model"].named_modules()}


def test_the_plain_loop_trains_over_a_ring_as_on_one_process(tmp_path):
    """Its updates are compared, since AdamW changes weights by little."""
    save_inputs(tmp_path)
    assert len([line for line in LOOP.splitlines() if line]) == 12
    begin = as_tested(PREAMBLE, tmp_path / "model")
    lines = [line for line in LOOP.splitlines() if not line.startswith(SEVERAL)]
    assert len(lines) == len(LOOP.splitlines()) - len(SEVERAL)
    (expected,), _ = trained(begin + "\n".join(lines), tmp_path, 1)
    (first, second), printed = trained(f"{begin}{LOOP}\nprint('sent', ring.traffic().sent_bytes > 0)\n", tmp_path, 2)
    assert printed.count("sent True") == 2, "keys and values travelled"
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, before in start.items():
        assert torch.equal(first[name], second[name]), name
        update = (expected[name] - before).norm()
        assert update > 0 and (first[name] - expected[name]).norm() < 1e-3 * update, name


# ---- the gallery of ideas.md


IDEAS = (GUIDE / "ideas.md").read_text(encoding="utf-8")
#: Patterns with their costs and perplexity.
ROWS = [line.strip("| ").split(" | ") for line in IDEAS.splitlines() if line.startswith("| `")]
#: Pictures, by the command that draws them.
PICTURES = re.findall(r"^hf-ring-attention (.* --plot (recipes/pictures/\w+\.png))$", IDEAS.replace("\\\n", ""), re.M)


def test_costs_are_those_of_the_patterns():
    assert len(ROWS) >= 9
    heads = {"num_heads": 32, "num_kv_heads": 8}
    for name, *costs in ROWS:
        pattern = ra.Pattern.parse(name.strip("`"))
        cache = ra.explain(pattern, seq_len=131072, ring_size=1, **heads, head_dim=128).cache
        kept = 32 * cache.kept  # layers
        size = f"{kept / 2**30:.1f} GiB" if kept >= 2**30 else f"{kept / 2**20:.1f} MiB"
        assert costs[:3] == [*(f"{pattern.flop_share(tokens, **heads):.1%}" for tokens in (4096, 131072)), size], name


def test_perplexities_stand_in_measured_tables():
    tables = "".join((GUIDE / f"{guide}.md").read_text("utf-8") for guide in ("figures", "serving")).splitlines()
    measured = {row[0]: row[4] for row in ROWS if len(row) == 5}
    assert {"exact", "window:512+4", "pyramid:512,3"} <= {name.strip("`") for name in measured}
    for name, perplexity in measured.items():
        assert any(line.startswith(f"| {name} |") and f" {perplexity}" in line for line in tables), name


@pytest.mark.parametrize(("command", "file"), PICTURES, ids=[file for _, file in PICTURES])
def test_pictures_are_what_their_commands_draw(command, file, tmp_path):
    """Each colour of a pattern takes as much of both pictures; fonts and margins may differ by release of matplotlib."""
    plots = pytest.importorskip("hf_ring_attention.cli.plots")
    image = pytest.importorskip("matplotlib.image")
    assert f"](../../{file})".replace("../../recipes/", "../") in IDEAS
    assert (ROOT / file).stat().st_size < 60_000
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(command.replace(file, str(tmp_path / "drawn.png"))))
    assert not ended.value.code
    shares = []
    for path in (ROOT / file, tmp_path / "drawn.png"):
        pixels = np.round(image.imread(path)[..., :3] * 255).reshape(-1, 3)
        names = plots.UNSEEN, plots.FUTURE, plots.SINKS
        colours = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in names]
        shares.append([np.mean(abs(pixels - colour).max(1) <= 2) for colour in (*colours, (252, 253, 191))])
    assert shares[0][1] > 0.1
    assert np.allclose(*shares, atol=0.01), shares


def test_all_patterns_with_one_text_in_all_heads_have_a_picture():
    drawn = {word for command, _ in PICTURES for word in command.split()}
    assert {name.strip("`") for name, *_ in ROWS} - drawn == {
        *("window:1020+4", "window:2044+4"),  # They look as the shorter window does.
        "kv0,2-7=window:512+4;kv1=exact",
    }
