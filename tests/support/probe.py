"""What "ring_dilated" makes of a model type: equal to eager attention, on one device and sharded, or refused with a reason.

Run as a program (`make models`), it writes hf_ring_attention/hf/models.json and MODELS.md beside it.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_ring_attention as ra
from hf_ring_attention.hf.positions import first_position
from hf_ring_attention.hf.wrappers import runner_of
from hf_ring_attention.tools.model_table import models_page

from .ranks import run_simulated
from .tiny_models import CAUSAL_TYPES, NOT_BUILT, VOCAB, tiny_model
from .tolerance import EXACT, distance, float64, largest

TOKENS = 20
BATCHES = ("plain", "left", "right", "packed")
#: In float64, relative to the largest entry.
LOGITS = GRADIENTS = EXACT


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


def errors(found, expected):
    """(of logits, of gradients: each parameter relative to the largest of its own, or a hundredth of all's largest).

    The latter for those that should be zero, such as of biases of keys.
    """
    (logits, gradients), (logits_, gradients_) = found, expected
    assert gradients.keys() >= gradients_.keys()
    floor = 1e-2 * max(float(g.abs().max()) for g in gradients_.values())
    worst = largest(
        float((g - gradients_[n]).abs().max() / gradients_[n].abs().max().clamp_min(floor))
        for n, g in gradients.items()
        if n in gradients_
    )
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
    (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), local.flatten(), reduction="sum", ignore_index=-100)
    ).backward()
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

    found = run_simulated(work, 2, layout=layout, transport=transport)
    return tuple(largest(values) for values in zip(*found))


def survey(model_type):
    """The `ModelSupport` of a type, by running it, in float64 (`tests.support.tolerance`).

    Raises:
        AssertionError: results that are not those of eager attention.
    """

    def entry(status, reason, ring=False, packed=False):
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        return ra.ModelSupport(model_type, names if isinstance(names, str) else names[0], status, ring, packed, reason)

    def refusal(run, *args):
        """What it says when it refuses; else nothing."""
        try:
            logits, gradients = run(model_type, *args)
        except (ValueError, NotImplementedError) as refused:
            return str(refused)
        assert logits <= LOGITS and gradients <= GRADIENTS, (model_type, args, logits, gradients)
        return None

    if model_type in NOT_BUILT:
        return entry("untested", NOT_BUILT[model_type])
    refused = refusal(on_one_device, "plain")
    if refused:
        return entry("refused", refused)
    for padding in ("left", "right"):
        assert refusal(on_one_device, padding) is None
    packed = refusal(on_one_device, "packed") is None
    refused = refusal(on_two_ranks, "plain", "zigzag", "ring")
    if refused:
        return entry("supported", refused, packed=packed)
    assert packed
    for batch_kind, layout, transport in (
        ("left", "contiguous", "collective"),
        ("right", "zigzag", "ring"),
        ("packed", "contiguous", "ring"),
    ):
        assert refusal(on_two_ranks, batch_kind, layout, transport) is None
    return entry("supported", "", ring=True, packed=packed)


HF = Path(ra.__file__).parent / "hf"


def main():
    torch.set_num_threads(1)
    models = []
    for model_type in CAUSAL_TYPES:
        with float64():
            models.append(survey(model_type))
        print(model_type, models[-1].status, flush=True)
    text = json.dumps([asdict(m) for m in models], indent=1) + "\n"
    (HF / "models.json").write_text(text, encoding="utf-8")
    (HF / "MODELS.md").write_text(models_page(models), encoding="utf-8")


if __name__ == "__main__":
    main()
