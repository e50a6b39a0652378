"""Finds out whether "ring_dilated" equals eager attention for a model type, on one device and sharded, or refuses the type.

python -m tests.survey              writes models.json and MODELS.md (make models)
python -m tests.survey llama qwen3  prints the results of these types, and writes nothing
"""

from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_ring_attention.hf.model.models import ModelSupport
from hf_ring_attention.hf.model.types import INDEXED, MIXERS, OWN_ATTENTION, OWN_ATTENTION_OVER_RINGS
from hf_ring_attention.hf.model.wrappers import runner_of
from hf_ring_attention.hf.patch import patch_model
from hf_ring_attention.hf.rows.documents import documents_from_mask, first_position, rows_of_call
from tests.support.ranks import on_ranks
from tests.support.tiny_models import NOT_BUILT, VOCAB, tiny_config, tiny_model
from tests.support.tolerance import EXACT, distance, gradients_distance, largest

TOKENS = 20
BATCHES = ("plain", "left", "right", "packed")
#: The bounds of errors in float64, and in both dtypes, relative to the largest entry.
LOGITS = GRADIENTS = EXACT
BOUNDS = {torch.float64: EXACT, torch.float32: 2e-5}
#: Types that keep their own attention, with the implementation and the dtype in which rows that begin with padding are numbers.
STOCK = {
    **dict.fromkeys(("bloom", "deepseek_v4", "gpt_neo", "mpt"), ("eager", torch.float32)),
    "doge": ("sdpa", torch.float32),
}


class Answer(NamedTuple):
    """The answer of a model: logits of the tokens that have labels, [tokens, VOCAB], and gradients by parameter."""

    logits: Tensor
    gradients: dict[str, Tensor]


class Errors(NamedTuple):
    """The distances between two answers: of their logits, and of their gradients."""

    logits: float
    gradients: float


def batch(kind, first=0):
    """Returns inputs and labels: two rows of TOKENS tokens, the second padded, or one row of three documents.

    Args:
        kind: one of `BATCHES`, or "both": the first row is padded on the left, and the second one on the right. "counted" is
            the same, but the model counts the positions itself.
        first: the position of a document's first token.
    """
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in (7, 9, 4)])[None]
        labels = ids[:1].clone()
        labels[positions == 0] = -100
        return {"input_ids": ids[:1], "position_ids": positions + first}, labels
    if kind in ("left", "both", "counted"):
        mask[int(kind == "left"), :7] = 0
    if kind in ("right", "both", "counted"):
        mask[1, -7:] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    inputs = {"input_ids": ids, "position_ids": positions + first}
    if kind == "counted":
        del inputs["position_ids"]
    if kind != "plain":
        inputs["attention_mask"] = mask
    return inputs, ids.masked_fill(mask == 0, -100)


def logits_and_gradients(model, inputs, labels):
    """Returns the answer to whole sequences; its gradients come from the sum of the losses."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    valid = labels != -100
    torch.nn.functional.cross_entropy(logits[valid], labels[valid], reduction="sum").backward()
    return Answer(logits.detach()[valid], {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def errors(answer, expected):
    """Returns how far two answers are apart."""
    return Errors(distance(answer[0], expected[0]), gradients_distance(answer[1], expected[1]))


def alone(model, inputs, labels):
    """Returns the answer to packed or padded rows, from a separate forward pass for each document, without padding."""
    mask = inputs.get("attention_mask", torch.ones_like(labels))
    rows = rows_of_call(runner_of(model), labels, inputs).documents or documents_from_mask(mask)
    logits, gradients = [], {}
    for row, (start, stop) in ((row, span) for row, spans in enumerate(rows) for span in spans):
        document = {name: x[row : row + 1, start:stop] for name, x in inputs.items() if name != "attention_mask"}
        answer = logits_and_gradients(model, document, labels[row : row + 1, start:stop])
        logits.append(answer.logits)
        for name, gradient in answer.gradients.items():
            gradients[name] = gradients.get(name, 0) + gradient
    return Answer(torch.cat(logits), gradients)


def over_ring(model, ring, inputs, labels):
    """Returns the answer to whole sequences of a model that is sharded over the ring; its gradients are the ranks' mean."""
    answer = logits_and_gradients(model, inputs, labels)
    return Answer(answer.logits, {n: torch.stack(ring.gather(x)).mean(0) for n, x in answer.gradients.items()})


class TypeModels:
    """The tiny models of one type, equal in their weights; each is built when it is first needed.

    Attributes:
        eager: computes with eager attention.
        patched: computes with "ring_dilated" on one device.
        ranks: one for each of two simulated ranks.
    """

    def __init__(self, model_type):
        self.model_type = model_type
        self.implementation, self.dtype = STOCK.get(model_type, ("eager", torch.float64))

    @property
    def text_type(self):
        return tiny_config(self.model_type).get_text_config().model_type

    @property
    def bound(self):
        return BOUNDS[torch.float32 if self.text_type in INDEXED else self.dtype]  # They have float32 inside.

    def model(self):
        return tiny_model(self.model_type, self.implementation).to(self.dtype)

    @cached_property
    def eager(self):
        return self.model()

    @cached_property
    def patched(self):
        return patch_model(self.model())

    @cached_property
    def ranks(self):
        return self.model(), self.model()

    def on_one_device(self, kind):
        """Returns how far "ring_dilated" is from eager attention, which computes packed documents one by one.

        So it does rows of hybrid types, some of which let padding into their states, and rows of types that choose their keys.
        """
        inputs, labels = batch(kind)
        one_by_one = kind == "packed" or self.text_type in (*MIXERS, *INDEXED)
        expected = (alone if one_by_one else logits_and_gradients)(self.eager, inputs, labels)
        return errors(logits_and_gradients(self.patched, inputs, labels), expected)

    def on_two_ranks(self, kind, layout, transport):
        """Returns how far two simulated ranks are from one device."""
        inputs, labels = batch(kind, first_position(runner_of(self.eager)))
        expected = logits_and_gradients(self.patched, inputs, labels)

        def work(ring, model):
            return errors(over_ring(model, ring, inputs, labels), expected)

        by_rank = on_ranks(work, iter(self.ranks).__next__, layout=layout, transport=transport)
        return Errors(largest(error.logits for error in by_rank), largest(error.gradients for error in by_rank))


def survey(model_type):
    """Runs a tiny model of a type in float64 (`float64`), and returns the line of the table.

    Raises:
        AssertionError: its results differ from eager attention.
    """
    names = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}[model_type]
    entry = partial(ModelSupport, model_type, names if isinstance(names, str) else names[0])

    def refusal(run, *args):
        """Returns the error of a run that refuses; None if it computes what eager attention does."""
        try:
            error = run(*args)
        except (ValueError, NotImplementedError) as refused:
            return str(refused)
        assert max(error) <= models.bound, (model_type, args, error)
        return None

    if model_type in NOT_BUILT:
        return entry("untested", False, False, NOT_BUILT[model_type])
    models = TypeModels(model_type)
    refused = refusal(models.on_one_device, "plain")
    if refused:
        return entry("refused", False, False, refused)
    assert refusal(models.on_one_device, "both") is None
    packed = refusal(models.on_one_device, "packed") is None
    refused = refusal(models.on_two_ranks, "both", "zigzag", "ring")
    if refused:
        return entry("supported", False, packed, refused)
    assert refusal(models.on_two_ranks, "counted", "zigzag", "collective") is None
    if models.text_type in (*OWN_ATTENTION, *OWN_ATTENTION_OVER_RINGS):
        return entry("supported", True, False, "")
    assert packed
    assert refusal(models.on_two_ranks, "packed", "contiguous", "collective") is None
    return entry("supported", True, packed, "")
