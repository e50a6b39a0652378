"""Training over rings has the losses, gradient norms and final parameters of one process; so has training of hybrids."""

import functools
import re
import tempfile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import default_data_collator

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model
from tests.support.training import assert_equal_runs, documents, loop, packed, padded, trainer

pytestmark = pytest.mark.usefixtures("in_float64")

#: More than an epoch has of batches of two rows: runs see the end of an epoch, and the first batch of the next.
STEPS = 4
#: Documents of uneven lengths, padded; and more, packed into rows of uneven fill.
PADDED = {"rows": documents(6, 20, 61, seed=0, prompt=3)}
LEFT = {**PADDED, "collator": functools.partial(padded, left=True)}
PACKED = {"rows": packed(documents(16, 5, 41, seed=1), 64)[:6], "collator": default_data_collator}
DATA = {"padded": PADDED, "left": LEFT, "packed": PACKED}


def distillation(model, batch, items):
    return ra.distillation_loss(model, batch, items)


def case(kind, data, **settings):
    """A run by `loop` or `trainer`, its data, and its settings, which name it."""
    shown = (f"{name}={getattr(x, '__name__', x)}" for name, x in settings.items())
    return pytest.param(kind, data, settings, id=" ".join([kind.__name__, data, *shown]))


ON_TWO = [
    case(loop, "padded", decay=True),
    case(loop, "packed", batch_size=3, layout="zigzag", transport="ring"),
    case(loop, "left", layout="documents", wrap="fsdp2", checkpointing=True),
    case(loop, "padded", transport="heads", wrap="fsdp2", checkpointing=True),
    case(loop, "padded", accumulate=2, batch_size=1),
    case(loop, "padded", sharded_loader=True),
    case(loop, "packed", sharded_loader=True, batch_size=3, layout="documents", workers=1),
    case(loop, "left", wrap="fsdp2", accumulate=2, checkpointing=True, loss_of=distillation),
    case(trainer, "packed", batch_size=3, transport="heads", layout="zigzag"),
    case(trainer, "padded", accumulate=2, checkpointing=True, offload_activations=True),
    # Models with mixers (a delta rule, Mamba 2, Mamba, convolutions) and with routers of experts: see `made_model`.
    case(loop, "left", model="qwen3_next routers", wrap="fsdp2", checkpointing=True, layout="zigzag"),
    case(trainer, "left", model="qwen3_next lora", layout="contiguous"),
    case(trainer, "left", model="bamba", accumulate=2, checkpointing=True, batch_size=1),
    case(loop, "packed", model="jamba routers", wrap="fsdp2", layout="documents"),
]
#: One process reads the batches of all rings together. In one ring of four, `heads` makes groups by heads.
ON_FOUR = [
    case(loop, "packed", transport="ring", batch_size=3, decay=True),
    case(loop, "padded", wrap="fsdp2", loss_of=distillation),
    case(trainer, "packed", transport="heads", heads=2, ring_size=4, batch_size=6),
]


def made_model(name):
    model_type, *changes = name.split()
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if "routers" in changes else {}
    model = tiny_model(model_type, "ring_dilated", **routers)
    if "lora" not in changes:
        return model
    torch.manual_seed(0)
    modules = ["q_proj", "in_proj_qkvz", "out_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=modules, init_lora_weights=False, lora_dropout=0.0))


def run(rank, kind, data, settings):
    settings = {"batch_size": 2, "steps": STEPS, **DATA[data], **settings}
    if "model" in settings:
        settings |= {"model": made_model(settings["model"]), **({"pattern": None} if kind is loop else {})}
    if kind is loop:
        return loop(rank, **settings)
    with tempfile.TemporaryDirectory() as folder:
        return trainer(rank, folder, **settings)[0]


def alone(kind, data, settings):
    """One process, without the settings of several."""
    names = ("batch_size", "accumulate", "pattern", "loss_of", "decay", "model")
    own = {name: settings[name] for name in names if name in settings}
    # Both take the same steps, except that Trainer's end with an epoch.
    return run_once(kind if own.keys() & {"accumulate", "model"} else loop, data, tuple(own.items()))


@functools.cache
def run_once(kind, data, settings):
    """The run on one process that several cases are compared with."""
    return run(0, kind, data, dict(settings))


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("kind", "data", "settings"), ON_TWO)
def test_a_ring_of_two(kind, data, settings, programs):
    expected = alone(kind, data, settings)
    for rank, figures in enumerate(programs.run(run, 2, kind, data, {**settings, "ring_size": 2})):
        assert_equal_runs(figures, expected, f"rank {rank} of 2")


@pytest.mark.drawn
@pytest.mark.parametrize(("kind", "data", "changes"), ON_FOUR)
def test_four_processes(kind, data, changes, programs):
    """Two rings of two, or one ring of four; `batch_size` counts the rows of a ring."""
    settings = {"ring_size": 2, "batch_size": 1, **changes}
    expected = alone(kind, data, {**settings, "batch_size": 4 // settings["ring_size"] * settings["batch_size"]})
    for rank, figures in enumerate(programs.run(run, 4, kind, data, settings)):
        assert_equal_runs(figures, expected, f"rank {rank} of 4")


def test_trainer_and_loop_take_the_same_steps():
    # Both shuffle by the seed of the process; Trainer sets it itself.
    first = run(0, loop, "padded", {})
    with tempfile.TemporaryDirectory() as folder:
        second, _ = trainer(0, folder, **{"batch_size": 2, "steps": STEPS, **PADDED})
    assert_equal_runs(second, first, "Trainer")
    assert len(set(first["losses"])) == STEPS


#: The tokens of a long row.
TOKENS = 65536


def step(rank):
    ids = torch.randint(1, 97, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    row = {"input_ids": ids, "labels": ids}
    figures = loop(rank, ring_size=4, rows=[row], steps=1, pattern=ra.Pattern.pyramid(512, levels=3), shuffle=False)
    # Not ru_maxrss, which begins at the value of the parent process.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return figures["losses"][0], int(peak[1]) * 1024


@pytest.mark.slow
@pytest.mark.own_dtypes
def test_a_step_of_65536_tokens_fits():
    """Over four processes, in less than 2 GiB each."""
    for loss, peak in run_ranks(step, 4):
        assert 3 < loss < 7
        assert peak < 2 * 2**30, f"{peak / 2**30:.2f} GiB"
