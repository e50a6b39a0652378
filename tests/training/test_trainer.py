"""What else a RingTrainer does: virtual tokens, 16 bits, steps that are not finite; and refusals."""

import logging
import math

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import hf_ring_attention as ra
from tests.support.tolerance import allowed
from tests.support.training import assert_equal_runs, differences, documents, tiny_llama, trainer

pytestmark = pytest.mark.usefixtures("in_float64")

ROWS = documents(8, 20, 61, seed=0, prompt=3)
EVAL_ROWS = documents(5, 20, 61, seed=3)
DATA = {"rows": ROWS, "batch_size": 2, "steps": 5}


def with_prompts(rank, folder, ring_size):
    """Virtual tokens before each row, whose labels PEFT fills up."""
    torch.manual_seed(3)
    model = get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    return trainer(rank, folder, ring_size=ring_size, model=model, **DATA)[0]


def test_virtual_tokens(tmp_path, programs):
    """LoRA is in test_equality.py."""
    alone = with_prompts(0, tmp_path / "alone", 1)
    for figures in programs.run(with_prompts, 2, tmp_path / "ring", 2):
        assert_equal_runs(figures, alone, "with_prompts")


def in_bfloat16(rank, folder, ring_size):
    return trainer(rank, folder, ring_size=ring_size, bf16=True, **DATA)[0]


@pytest.mark.own_dtypes
def test_training_in_bfloat16(tmp_path, programs):
    """As far from a run without bfloat16 as one process is."""
    exact = trainer(0, tmp_path, ring_size=1, **DATA)[0]
    bounds = {name: allowed(error) for name, error in differences(in_bfloat16(0, tmp_path, 1), exact).items()}
    for figures in programs.run(in_bfloat16, 2, tmp_path, 2):
        assert_equal_runs(figures, exact, "bfloat16", bounds)


class Diverging(ra.RingTrainer):
    """The loss of the last process is NaN from its third step on."""

    def compute_loss(self, model, inputs, **options):
        answer = super().compute_loss(model, inputs, **options)
        loss, *outputs = answer if isinstance(answer, tuple) else (answer,)
        last = self.args.process_index == self.args.world_size - 1
        loss = loss * torch.nan if self.state.global_step >= 2 and last else loss
        return (loss, *outputs) if outputs else loss


class Stopping(Diverging):
    def when_not_finite(self, loss, grad_norm):
        raise ArithmeticError(f"step {self.state.global_step + 1}: {loss} {grad_norm}")


def diverging(rank, folder, ring_size):
    """The error of each process, and whether all weights are finite then; and the warnings of a Trainer that goes on."""
    model, told = tiny_llama(), []
    try:
        trainer(rank, folder, ring_size=ring_size, trainer_class=Stopping, model=model, **DATA)
    except ArithmeticError as error:
        told.append(str(error))
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hf_ring_attention").addHandler(handler)
    made = trainer(rank, folder, ring_size=ring_size, trainer_class=Diverging, eval_rows=EVAL_ROWS, **DATA)[1]
    logging.getLogger("hf_ring_attention").removeHandler(handler)
    assert made.state.global_step == 5
    figures = made.evaluate()
    assert math.isnan(figures["eval_loss"])
    return finite, told


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("world_size", "ring_size"), [(2, 2), (2, 1)])
def test_a_loss_that_is_not_finite_is_told_on_all_processes_together(world_size, ring_size, tmp_path, programs):
    for rank, (finite, told) in enumerate(programs.run(diverging, world_size, tmp_path, ring_size)):
        assert finite and told[0] == "step 3: nan nan"
        warned = [text for text in told[1:] if "training goes on" in text]
        assert len(warned) == (rank == 0) and all("step 3: loss nan, gradient norm nan" in text for text in warned)


REFUSED = {
    "2 processes cannot form rings of 3": {"ring_size": 3},
    "neftune_noise_alpha does not work over a ring": {"neftune_noise_alpha": 5},
    "attn_pdrop=0.1": {"model": GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=97))},
}


def refused(rank, folder):
    for message, settings in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            trainer(rank, folder, **{"ring_size": 2, **DATA, **settings})


def test_what_would_be_wrong_is_refused_on_every_rank(tmp_path, programs):
    programs.run(refused, 2, tmp_path)
