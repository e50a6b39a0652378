"""What "ring_dilated" makes of a model type: equal to eager attention, on one device and sharded, or refused with a reason."""

import copy

import torch

import hf_ring_attention as ra
from hf_ring_attention.gate import runner_of
from hf_ring_attention.sharding import first_position

from .tiny_models import VOCAB, tiny_model

TOKENS = 20
BATCHES = ("plain", "left", "right", "packed")
#: Relative to the largest entry.
LOGITS, GRADIENTS = 1e-5, 1e-4


def batch(kind, first=0):
    """Inputs and labels: two rows of TOKENS tokens, the second padded, or one row of three documents.

    `first`: position of a document's first token.
    """
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in (7, 9, 4)])[None]
        labels = ids[:1].clone()
        labels[positions == 0] = -100
        return {"input_ids": ids[:1], "position_ids": positions + first}, labels
    if kind == "left":
        mask[1, :7] = 0
    elif kind == "right":
        mask[1, -7:] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    inputs = {"input_ids": ids, "position_ids": positions + first}
    if kind != "plain":
        inputs["attention_mask"] = mask
    return inputs, ids.masked_fill(mask == 0, -100)


def logits_and_gradients(model, inputs, labels):
    """Logits of the tokens that have labels, [tokens, VOCAB], and the gradients of the sum of their losses."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    valid = labels != -100
    torch.nn.functional.cross_entropy(logits[valid], labels[valid], reduction="sum").backward()
    return logits.detach()[valid], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def distance(got, expected):
    """The largest difference, relative to the largest entry."""
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def errors(found, expected):
    """(of logits, of gradients: each parameter relative to the largest of its own, or a hundredth of all's largest).

    The latter for those that should be zero, such as of biases of keys.
    """
    (logits, gradients), (logits_, gradients_) = found, expected
    assert gradients.keys() >= gradients_.keys()
    floor = 1e-2 * max(float(g.abs().max()) for g in gradients_.values())
    worst = max(float((g - gradients_[n]).abs().max() / gradients_[n].abs().max().clamp_min(floor)) for n, g in gradients.items() if n in gradients_)
    return distance(logits, logits_), worst


def alone(model, inputs, labels):
    """`logits_and_gradients` of packed rows, each document in a forward pass of its own."""
    starts = (inputs["position_ids"][0] == inputs["position_ids"][0, 0]).nonzero().flatten().tolist()
    found = []
    for start, stop in zip(starts, [*starts[1:], TOKENS]):
        document = {name: x[:, start:stop] for name, x in inputs.items()}
        found.append(logits_and_gradients(model, document, labels[:, start:stop]))
        found[-1] = found[-1][0], {name: gradient.clone() for name, gradient in found[-1][1].items()}
    names = {name for _, gradients in found for name in gradients}
    return (
        torch.cat([logits for logits, _ in found]),
        {name: sum(gradients[name] for _, gradients in found if name in gradients) for name in names},
    )


def on_one_device(model_type, kind, **changes):
    """`errors` of "ring_dilated" against eager; eager computes packed documents one by one."""
    inputs, labels = batch(kind)
    eager = tiny_model(model_type, "eager", **changes)
    ours = ra.patch_model(tiny_model(model_type, "eager", **changes))
    expected = (alone if kind == "packed" else logits_and_gradients)(eager, inputs, labels)
    return errors(logits_and_gradients(ours, inputs, labels), expected)


def of_shards(model, ring, inputs, labels):
    """`logits_and_gradients` of a model that is sharded over the ring, of whole rows."""
    layout = ring.layout_for(TOKENS, ra.Pattern.exact())
    model.zero_grad()
    shards = {name: ring.shard(x, layout) for name, x in inputs.items()}
    logits = model(**shards, use_cache=False).logits
    local = ring.shard(labels, layout, fill=-100)
    (torch.nn.functional.cross_entropy(logits.flatten(0, 1), local.flatten(), reduction="sum", ignore_index=-100)).backward()
    gradients = {n: torch.stack(ring.gather(p.grad)).sum(0) for n, p in model.named_parameters() if p.grad is not None}
    return ring.unshard(logits.detach(), layout)[labels != -100], gradients


def on_two_ranks(model_type, kind, layout, transport, **changes):
    """`errors` of two simulated ranks against one."""
    models = [tiny_model(model_type, "eager", **changes) for _ in range(2)]
    inputs, labels = batch(kind, first_position(runner_of(models[0])))
    expected = logits_and_gradients(ra.patch_model(tiny_model(model_type, "eager", **changes)), inputs, labels)

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        return errors(of_shards(model, ring, inputs, labels), expected)

    found = ra.run_simulated(work, 2, layout=layout, transport=transport, timeout=60)
    return tuple(max(values) for values in zip(*found))
