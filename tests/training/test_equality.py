"""Training over rings has the losses, gradient norms and final parameters of one process."""

import functools
import tempfile

import pytest
from transformers import default_data_collator

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
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


#: By name: the kind of run, its data, and its settings.
ON_TWO = {
    "loop": (loop, "padded", {"decay": True}),
    "loop left": (loop, "left", {}),
    "loop packed": (loop, "packed", {"batch_size": 3}),
    "loop packed zigzag": (loop, "packed", {"batch_size": 3, "layout": "zigzag", "transport": "ring"}),
    "loop packed documents": (loop, "packed", {"batch_size": 3, "layout": "documents", "transport": "ring"}),
    "documents, FSDP2, checkpointing": (loop, "left", {"layout": "documents", "wrap": "fsdp2", "checkpointing": True}),
    "checkpointing": (loop, "padded", {"checkpointing": True}),
    "ring, zigzag": (loop, "padded", {"transport": "ring", "layout": "zigzag"}),
    "collective, contiguous": (loop, "padded", {"transport": "collective", "layout": "contiguous"}),
    "heads": (loop, "packed", {"batch_size": 3, "transport": "heads"}),
    "heads, FSDP2, checkpointing": (loop, "padded", {"transport": "heads", "wrap": "fsdp2", "checkpointing": True}),
    "accumulating": (loop, "padded", {"accumulate": 2, "batch_size": 1}),
    "sharded loader": (loop, "padded", {"sharded_loader": True}),
    "sharded loader, packed, documents, workers": (
        loop,
        "packed",
        {"sharded_loader": True, "batch_size": 3, "layout": "documents", "workers": 1},
    ),
    "exact attention": (loop, "padded", {"pattern": ra.Pattern.exact()}),
    "FSDP2": (loop, "padded", {"wrap": "fsdp2"}),
    "FSDP2, accumulating, checkpointing": (loop, "packed", {"wrap": "fsdp2", "accumulate": 2, "checkpointing": True}),
    "distillation": (loop, "packed", {"batch_size": 3, "layout": "documents", "loss_of": distillation}),
    "distillation, FSDP2, accumulating, checkpointing": (
        loop,
        "left",
        {"wrap": "fsdp2", "accumulate": 2, "checkpointing": True, "loss_of": distillation},
    ),
    "Trainer": (trainer, "padded", {}),
    "Trainer, packed, documents": (trainer, "packed", {"batch_size": 3, "layout": "documents"}),
    "Trainer, packed, ring": (trainer, "packed", {"batch_size": 3, "transport": "ring"}),
    "Trainer, packed, heads, zigzag": (trainer, "packed", {"batch_size": 3, "transport": "heads", "layout": "zigzag"}),
    "Trainer, accumulating, checkpointing": (
        trainer,
        "padded",
        {"accumulate": 2, "checkpointing": True, "offload_activations": True},
    ),
}
#: One process reads the batches of all rings together.
ON_FOUR = {
    "loop": (loop, "padded", {"transport": "ring", "decay": True}),
    "loop, packed, ring": (loop, "packed", {"transport": "ring", "batch_size": 3}),
    "loop, packed, heads": (loop, "packed", {"transport": "heads", "batch_size": 3}),
    "one ring of groups by heads, FSDP2": (
        loop,
        "packed",
        {"transport": "heads", "heads": 2, "wrap": "fsdp2", "ring_size": 4, "batch_size": 6},
    ),
    "FSDP2": (loop, "padded", {"wrap": "fsdp2", "checkpointing": True}),
    "distillation, FSDP2": (loop, "padded", {"wrap": "fsdp2", "loss_of": distillation}),
    "Trainer": (trainer, "padded", {}),
    "Trainer, accumulating": (trainer, "padded", {"accumulate": 2}),
    "Trainer, one ring of groups by heads": (
        trainer,
        "packed",
        {"transport": "heads", "heads": 2, "ring_size": 4, "batch_size": 6},
    ),
}


def run(rank, kind, data, settings):
    settings = {"batch_size": 2, "steps": STEPS, **DATA[data], **settings}
    if kind is loop:
        return loop(rank, **settings)
    with tempfile.TemporaryDirectory() as folder:
        return trainer(rank, folder, **settings)[0]


def alone(kind, data, settings):
    """One process, without the settings of several."""
    own = {
        name: settings[name] for name in ("batch_size", "accumulate", "pattern", "loss_of", "decay") if name in settings
    }
    # Both take the same steps, except that Trainer's end with an epoch.
    return run_once(kind if "accumulate" in own else loop, data, tuple(own.items()))


@functools.cache
def run_once(kind, data, settings):
    """The run on one process that several cases are compared with."""
    return run(0, kind, data, dict(settings))


@pytest.mark.drawn
@pytest.mark.parametrize("name", ON_TWO)
def test_a_ring_of_two(name):
    kind, data, settings = ON_TWO[name]
    expected = alone(kind, data, settings)
    for rank, figures in enumerate(run_ranks(run, 2, kind, data, {**settings, "ring_size": 2})):
        assert_equal_runs(figures, expected, f"{name}, rank {rank} of 2")


@pytest.mark.drawn
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_processes(name):
    """Two rings of two, or one of four; `batch_size` is that of a ring."""
    kind, data, changes = ON_FOUR[name]
    settings = {"ring_size": 2, "batch_size": 1, **changes}
    rings = 4 // settings["ring_size"]
    expected = alone(kind, data, {**settings, "batch_size": rings * settings["batch_size"]})
    for rank, figures in enumerate(run_ranks(run, 4, kind, data, settings)):
        assert_equal_runs(figures, expected, f"{name}, rank {rank} of 4")


def test_trainer_and_loop_take_the_same_steps():
    # Both shuffle by the seed of the process; Trainer sets it itself.
    first = run(0, loop, "padded", {})
    with tempfile.TemporaryDirectory() as folder:
        second, _ = trainer(0, folder, **{"batch_size": 2, "steps": STEPS, **PADDED})
    assert_equal_runs(second, first, "Trainer")
    assert len(set(first["losses"])) == STEPS
