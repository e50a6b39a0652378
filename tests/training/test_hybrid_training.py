"""Training of hybrids, and of models that balance their experts, has the losses and parameters of one process."""

import functools
import tempfile

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import default_data_collator

from tests.support.ranks import run_ranks
from tests.support.releases import needs_mixers
from tests.support.tiny_models import tiny_model
from tests.support.training import assert_equal_runs, documents, loop, packed, padded, trainer

pytestmark = [pytest.mark.usefixtures("in_float64"), needs_mixers]

#: Documents of uneven lengths, padded on the left; and more of them packed into rows of uneven fill.
DATA = {
    "left": {"rows": documents(6, 20, 41, seed=0, prompt=3), "collator": functools.partial(padded, left=True)},
    "packed": {"rows": packed(documents(14, 5, 31, seed=1), 48)[:6], "collator": default_data_collator},
}
#: By name: the kind of run, the model with its changes, its data, and its settings.
CASES = {
    "delta rule and routers, Trainer": (trainer, "qwen3_next", "packed", {"batch_size": 2}),
    "delta rule and routers, FSDP2, checkpointing": (
        loop, "qwen3_next", "left", {"wrap": "fsdp2", "checkpointing": True, "layout": "zigzag"},
    ),
    "delta rule, Trainer, LoRA": (trainer, "qwen3_next", "left", {"layout": "contiguous"}),
    "Mamba 2, Trainer, accumulating, checkpointing": (
        trainer, "bamba", "left", {"accumulate": 2, "checkpointing": True, "batch_size": 1},
    ),
    "Mamba, routers, FSDP2": (loop, "jamba", "packed", {"wrap": "fsdp2", "layout": "documents"}),
    "convolutions, Trainer": (trainer, "lfm2", "packed", {}),
    "routers, Trainer, accumulating": (trainer, "mixtral", "packed", {"accumulate": 2, "batch_size": 1}),
}  # fmt: skip


def made_model(name, model_type):
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if "routers" in name else {}
    model = tiny_model(model_type, "ring_dilated", **changes)
    if "LoRA" not in name:
        return model
    torch.manual_seed(0)
    modules = ["q_proj", "in_proj_qkvz", "out_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=modules, init_lora_weights=False, lora_dropout=0.0))


def run(rank, name, settings):
    kind, model_type, data, _ = CASES[name]
    settings = {"batch_size": 2, "steps": 3, **DATA[data], **settings, "model": made_model(name, model_type)}
    if kind is loop:
        return loop(rank, **settings, pattern=None)
    with tempfile.TemporaryDirectory() as folder:
        return trainer(rank, folder, **settings)[0]


@pytest.mark.drawn
@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_two(name):
    settings = CASES[name][3]
    expected = run(0, name, {key: settings[key] for key in ("batch_size", "accumulate") if key in settings})
    assert len(set(expected["losses"])) == 3
    for rank, figures in enumerate(run_ranks(run, 2, name, {**settings, "ring_size": 2})):
        assert_equal_runs(figures, expected, f"{name}, rank {rank} of 2")
