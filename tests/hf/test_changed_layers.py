"""Logits that are formed later are those of the layer as it was in the call: equal to the stock model's, or refused."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import hf_ring_attention as ra
from tests.hf.alike import assert_alike, assert_on_ranks
from tests.support.changed_layers import BATCH, IDS, REFUSED, Program, made
from tests.support.ranks import on_ranks
from tests.support.tolerance import assert_exact


def with_given_weights(model):
    given = {name: 1.1 * x.detach() for name, x in model.named_parameters()}
    return torch.func.functional_call(model, given, kwargs=BATCH).logits


def with_averaged_weights(model):
    kept = [x.clone() for x in model.parameters()]
    for x in model.parameters():
        x.data.mul_(0.9)
    logits = model(**BATCH).logits
    for x, before in zip(model.parameters(), kept):
        x.data.copy_(before)
    return logits


def in_the_other_mode(model):
    logits = model.eval()(**BATCH).logits
    model.train()
    return logits


@pytest.mark.parametrize(
    ("program", "head", "answer"),
    [
        (with_given_weights, "plain", "equal"),
        (with_averaged_weights, "plain", "refused"),
        (in_the_other_mode, "dropout", "equal"),
    ],
)
def test_logits_of_the_layer_in_the_call(program, head, answer):
    """Programs that `Program` does not draw: weights that are given to a call, or changed before and behind it."""
    expected = program(made(head)).detach()

    def on_a_rank(ring, model):
        with contextlib.nullcontext() if answer == "equal" else pytest.raises(RuntimeError, match=REFUSED):
            assert_exact((program(model) * 1).detach(), expected)

    on_ranks(on_a_rank, lambda: made(head))


@pytest.mark.drawn
@pytest.mark.parametrize("number", range(24))
def test_random_programs(number):
    """`make fuzz` runs others."""
    Program.draw(number).run()


def trained_with_divergence(ring, model):
    """Losses and divergences of a program that keeps a model close to itself without adapters, and its weights in the end."""
    weights = {name: x for name, x in model.named_parameters() if x.requires_grad}
    optimizer, logs = torch.optim.AdamW(weights.values(), lr=0.01, fused=True), []
    for step in range(3):
        ids = (IDS + step) % 94 + 3
        output = model(input_ids=ids, labels=ids)
        with torch.no_grad(), model.disable_adapter():
            reference = model(input_ids=ids, labels=ids)
        predicted, expected = (x.logits[:, :-1].log_softmax(-1) for x in (output, reference))
        divergence = F.kl_div(expected, predicted, log_target=True, reduction="batchmean")
        (output.loss + 0.1 * divergence).backward()
        logs.append(torch.stack([output.loss.detach(), divergence.detach()]))
        for x in weights.values():
            x.grad.copy_(sum(ring.gather(x.grad)) / ring.world_size)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(logs), {name: x.detach() for name, x in weights.items()}


def test_a_divergence_from_the_model_without_adapters():
    expected = trained_with_divergence(ra.Ring.alone(), made("LoRA"))
    assert abs(expected[0][-1, 1]) > 1e-3
    for world_size in (1, 2):
        assert_on_ranks(trained_with_divergence, lambda: made("LoRA"), expected, world_size)


def losses_with_dropout(rank):
    """The loss of a call whose output layer drops numbers, and the loss of its logits."""
    model = ra.patch_model(made("dropout"), ring=ra.Ring()).train()
    torch.manual_seed(rank)
    output = model(**BATCH)
    return output.loss.detach(), F.cross_entropy(output.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).detach()


def test_dropout_in_the_output_layer(ranks):
    """All ranks, and all uses of a call, drop the same numbers."""
    losses = [x for found in ranks.run(losses_with_dropout, 2) for x in found]
    assert_alike(losses, losses[:1] * 4)
    kept = made("dropout").eval()(**BATCH).loss
    assert abs(losses[0] - kept) > 1e-3
