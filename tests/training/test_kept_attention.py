"""Checkpointing that keeps attention: gradients as without, each row sent once forward and once backward, and who sets it."""

import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments, modeling_utils

import hf_ring_attention as ra
from hf_ring_attention.compute.kept import kept_results
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.ring.engine import Execution
from hf_ring_attention.training import trainer as training
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import EXACT, distance
from tests.support.training import PLAIN_STEPS, assert_equal_runs, documents, padded, tiny_llama, trainer

pytestmark = pytest.mark.usefixtures("in_float64")

ROWS = documents(4, 20, 61, seed=0, prompt=3)
RECOMPUTED, KEPT = {"use_reentrant": False}, {"use_reentrant": False, "context_fn": ra.keep_attention}


@pytest.fixture
def calls(monkeypatch):
    """The calls of attention so far, one entry for each forward pass of a layer's attention."""
    made, forward = [], Execution.forward

    def counted(self, *args, **kwargs):
        made.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Execution, "forward", counted)
    return made


def steps(rank, transport):
    """[sent bytes, gradients] of a step without checkpointing, with it, and with kept attention."""
    found = []
    for options in (None, RECOMPUTED, KEPT):
        ring = ra.Ring(transport=transport)
        model = ra.patch_model(tiny_llama(), ring=ring).train()
        if options is not None:
            model.activation_checkpointing_enable(options)
        model(**padded(ROWS)).loss.backward()  # The first step also compares calls and opens connections.
        model.zero_grad()
        ring.reset_traffic()
        model(**padded(ROWS)).loss.backward()
        found.append((ring.traffic().sent_bytes, [x.grad for x in model.parameters()]))
    return found


@pytest.mark.drawn(3)
@pytest.mark.parametrize("transport", ["ring", "collective", "heads"])
def test_a_step_sends_rows_once_forward_and_once_backward(transport, programs):
    for (plain, want), (again, _), (kept, got) in programs.run(steps, 2, transport):
        assert kept == plain < again
        assert max(map(distance, got, want)) <= EXACT


@pytest.mark.own_dtypes
def test_casts_of_weights_that_autocast_keeps():
    """The second forward pass finds the casts of the first one; its recomputation makes them again."""
    model = ra.patch_model(tiny_llama()).train()
    found = []
    for options in (RECOMPUTED, KEPT):
        model.activation_checkpointing_enable(options)
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model(**padded(rows)).loss for rows in (ROWS[:2], ROWS[2:])]
        sum(losses).backward()
        found.append([x.grad.clone() for x in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *found))


def test_an_output_that_is_changed_in_place_is_refused():
    def layer(x):
        return ra.ring_attention(x, x, x, pattern="exact").mul_(2)

    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    operators = [torch.ops.hf_ring_attention.attend.default]
    y = checkpoint(layer, x, use_reentrant=False, context_fn=partial(kept_results, operators))
    with pytest.raises(RuntimeError, match="changed the output of its attention in place"):
        y.sum().backward()


def trained(rank, folder):
    """[figures, sent bytes] of a RingTrainer without checkpointing, with kept attention, and without it."""
    found = []
    for checkpointing, keeps in ((False, True), (True, True), (True, False)):
        shared = {"rows": ROWS, "ring_size": 2, "steps": 2, "ring_keep_attention": keeps}
        run, made = trainer(rank, folder, checkpointing=checkpointing, **shared)
        assert f'"ring_keep_attention": {str(keeps).lower()}' in made.args.to_json_string()
        found.append((run, made.ring.traffic().sent_bytes))
    return found


def test_a_trainer_keeps_attention_unless_told_otherwise(tmp_path, programs):
    for (want, plain), (got, kept), (other, again) in programs.run(trained, 2, str(tmp_path)):
        assert kept == plain < again
        assert_equal_runs(got, want, "kept attention")
        assert_equal_runs(other, want, "attention computed again")


def computed_again(tmp_path, calls, model=None, **arguments):
    """Whether a step of a RingTrainer computes the attention of its layers twice."""
    warn_once.cache_clear()
    trainer(0, tmp_path, rows=ROWS[:1], steps=1, model=model, **arguments)
    assert len(calls) in (2, 4)
    return len(calls) == 4


def no_contexts():
    return nullcontext(), nullcontext()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_reentrant": True}, "checkpointing is reentrant: set use_reentrant=False"),
        ({"use_reentrant": False, "context_fn": no_contexts}, "checkpointing has a context_fn already"),
    ],
)
def test_checkpointing_that_cannot_keep_attention_is_told_once(options, reason, tmp_path, calls, caplog):
    with caplog.at_level(logging.WARNING, "hf_ring_attention"):
        arguments = {"activation_checkpointing_kwargs": options, "accumulate": 1}
        assert computed_again(tmp_path, calls, checkpointing=True, **arguments)
    assert [reason in record.message for record in caplog.records if "attention again" in record.message] == [True]


@pytest.mark.parametrize("options", [{"offload": True}, {"every_n_layers": 2}])
def test_options_of_transformers(options, tmp_path, calls, monkeypatch):
    monkeypatch.setattr(modeling_utils, "save_on_cpu", lambda **_: save_on_cpu())  # It pins memory, also without a GPU.
    arguments = {"activation_checkpointing_kwargs": {"use_reentrant": False, **options}}
    assert not computed_again(tmp_path, calls, checkpointing=True, **arguments)


def test_kept_results_are_offloaded_with_the_inputs_of_layers(tmp_path, calls, monkeypatch):
    """The input, the output and the log-sum-exp of each layer; all else that is saved belongs to no layer."""
    moved, model = [], tiny_llama()

    def pack(x):
        moved.append(tuple(x.shape))
        return x

    monkeypatch.setattr(training, "save_on_cpu", lambda **_: saved_tensors_hooks(pack, lambda x: x))
    assert not computed_again(tmp_path, calls, model, checkpointing=True, offload_activations=True)
    length = len(ROWS[0]["input_ids"])
    for shape in ((1, 4, length, 8), (1, 4, length)):
        assert moved.count(shape) == model.config.num_hidden_layers


def wrapped_by_torch(model):
    """The model, whose layers checkpoint as under FSDP's own option."""
    layers = model.get_decoder().layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
    return model


def test_the_own_checkpointing_of_fsdp(tmp_path, calls):
    assert not computed_again(tmp_path, calls, wrapped_by_torch(tiny_llama()))


def test_the_own_checkpointing_of_fsdp_finds_the_documents_of_a_hybrid():
    rows, grads = {name: x.clamp(max=30) for name, x in padded(ROWS).items()}, []
    for wrap in (lambda model: model, wrapped_by_torch):
        model = wrap(ra.patch_model(tiny_model("qwen3_next", "ring_dilated"))).train()
        model(**rows, use_cache=False).loss.backward()
        grads.append([x.grad for x in model.parameters() if x.grad is not None])
    assert max(map(distance, *grads)) <= EXACT


@pytest.mark.parametrize("options", [RECOMPUTED, KEPT])
def test_a_stock_trainer(options, tmp_path, calls):
    """The model gets the function beforehand: the Trainer's arguments must be JSON for loggers, without a function."""
    model = ra.patch_model(tiny_llama())
    model.activation_checkpointing_enable(options)
    args = TrainingArguments(str(tmp_path), **PLAIN_STEPS, max_steps=1, per_device_train_batch_size=1)
    Trainer(model, args, train_dataset=ROWS, data_collator=padded).train()
    assert args.to_json_string()
    assert len(calls) == (2 if options is KEPT else 4)
    args = TrainingArguments(str(tmp_path), **PLAIN_STEPS, **{"activation_checkpointing_kwargs": KEPT})
    with pytest.raises(TypeError, match="not JSON serializable"):
        args.to_json_string()
