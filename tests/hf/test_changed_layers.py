"""Logits that are formed later are those of the layer as it was in the call: equal to the stock model's, or refused."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hf_ring_attention as ra
from tests.hf.alike import assert_alike
from tests.support.changed_layers import BATCH, IDS, REFUSED, Program, made
from tests.support.ranks import on_ranks
from tests.support.tolerance import assert_exact


def called(model, **more):
    return model(**BATCH, **more).logits


def without_adapters(model):
    with model.disable_adapter():
        return called(model)


def with_another_adapter(model):
    model.set_adapter("other")
    logits = called(model)
    model.set_adapter("default")
    return logits


def with_given_weights(model):
    given = {name: 1.1 * x.detach() for name, x in model.named_parameters()}
    return torch.func.functional_call(model, given, kwargs=BATCH).logits


def with_averaged_weights(model):
    kept = [x.clone() for x in model.parameters()]
    for x in model.parameters():
        x.data.mul_(0.9)
    logits = called(model)
    for x, before in zip(model.parameters(), kept):
        x.data.copy_(before)
    return logits


def behind_a_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with torch.enable_grad():
        output = model(**BATCH)
        output.loss.backward()
    optimizer.step()
    return output.logits.detach()


def in_the_other_mode(model):
    logits = called(model.eval())
    model.train()
    return logits


#: Programs by the output layer that they need, each with the answer: "equal" without gradients and with them, or "refused".
PROGRAMS = [
    (without_adapters, "LoRA", "equal", "equal"),
    (without_adapters, "a copy", "equal", "equal"),
    (with_another_adapter, "LoRA", "equal", "refused"),
    (with_another_adapter, "a copy", "equal", "refused"),
    (with_given_weights, "plain", "equal", "equal"),
    (with_averaged_weights, "plain", "refused", "refused"),
    (behind_a_step, "plain", "refused", "refused"),
    (in_the_other_mode, "plain", "equal", "equal"),
    (in_the_other_mode, "dropout", "equal", "equal"),
]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("program", "head", "unrecorded_answer", "recorded_answer"), PROGRAMS)
def test_logits_of_the_layer_in_the_call(program, head, unrecorded_answer, recorded_answer, recorded):
    answer = recorded_answer if recorded else unrecorded_answer

    def work(model):
        with torch.set_grad_enabled(recorded):
            return torch.logsumexp(program(model), -1).mean().detach()

    expected = work(made(head))

    def on_a_rank(ring, model):
        with contextlib.nullcontext() if answer == "equal" else pytest.raises(RuntimeError, match=REFUSED):
            assert_exact(work(model), expected)

    for world_size in (1, 2):
        on_ranks(on_a_rank, lambda: made(head), world_size)


@pytest.mark.parametrize("number", range(24))
def test_random_programs(number):
    """`make fuzz` runs others."""
    Program.draw(number).run()


def trained_with_divergence(rank, world_size, rings, patched=True):
    """Losses and divergences of a program that keeps a model close to itself without adapters, and its weights in the end.

    Each of the rings has other rows; a model that is not patched gets the rows of all.
    """
    model = made("LoRA")
    size = world_size // rings
    if patched:
        groups = [dist.new_group([*range(first, first + size)]) for first in range(0, world_size, size)]
        model = ra.patch_model(model, ring=ra.Ring(groups[rank // size]))
    weights = {name: x for name, x in model.named_parameters() if x.requires_grad}
    optimizer, logs = torch.optim.AdamW(weights.values(), lr=0.01, fused=True), []
    for step in range(3):
        for part in [rank // size] if patched else range(rings):
            ids = (IDS + step + 7 * part) % 94 + 3
            output = model(input_ids=ids, labels=ids)
            with torch.no_grad(), model.disable_adapter():
                reference = model(input_ids=ids, labels=ids)
            predicted, expected = (x.logits[:, :-1].log_softmax(-1) for x in (output, reference))
            divergence = F.kl_div(expected, predicted, log_target=True, reduction="batchmean")
            (output.loss + 0.1 * divergence).backward()
            logs.append(torch.stack([torch.tensor(part), output.loss.detach(), divergence.detach()]))
        for x in weights.values():
            if patched:
                dist.all_reduce(x.grad)
            x.grad /= world_size if patched else rings
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(logs), {name: x.detach() for name, x in weights.items()}


@pytest.mark.parametrize(("world_size", "rings"), [(1, 1), (2, 1), (4, 2)])
def test_a_divergence_from_the_model_without_adapters(ranks, world_size, rings):
    logs, weights = trained_with_divergence(0, 1, rings, patched=False)
    assert abs(logs[-1, 2]) > 1e-3
    for rank, (found, found_weights) in enumerate(ranks.run(trained_with_divergence, world_size, world_size, rings)):
        assert_alike(found, logs[logs[:, 0] == rank // (world_size // rings)])
        assert_alike(found_weights, weights)


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
