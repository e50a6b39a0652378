"""Random models, batches and rings against eager attention: python -m tests.fuzz --only models

Every case follows from a separate number. A case draws a supported model type with random heads, windows, layers and
large weights; batches of documents as collators or people make them; one process or a simulated ring; and compares logits,
the loss and all gradients, or generated tokens, or perplexity.

Expected results come from Transformers' eager attention, each document by itself, whether the model was patched or only
names "ring_dilated" and is patched by its first call. Under patterns they come from `dense`.
Most cases compute in float64, also if Transformers asks for float32 (`tolerance`).
"""

import copy
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.hf.model.types import MIXERS
from hf_ring_attention.hf.model.wrappers import cache_argument, cache_in

from .dense import DENSE
from .random_cases import LET_PADDING_IN, NUMBERED_BY_MASK, OTHER_STEPS, SELF_NUMBERED, Case
from .random_rows import IGNORED
from .ranks import run_simulated
from .tiny_models import draw, tiny_config
from .tolerance import EXACT, allowed, float64, gradients_distance

REFUSALS = (ValueError, NotImplementedError)


@dataclass
class Refused:
    message: str


@dataclass
class Result:
    """logits: per batch [B, n, vocabulary], nan for tokens that are not computed; of other tasks other numbers.

    tokens: [B, n] that were generated, those before them included.
    """

    logits: list
    loss: float
    gradients: dict
    tokens: torch.Tensor | None = None


# ---- models


def build(case: Case, implementation: str, dtype: torch.dtype):
    """The model of a case, with the same large weights at every call."""
    config = tiny_config(case.model_type, **copy.deepcopy(case.changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, experts_implementation="eager", dtype=torch.float32
        )
    draw(model, case.seed)
    return model.to(dtype).eval()


def prepared(case: Case, model, ring):
    """The model patched and in its mode."""
    if case.patched:
        patterns = case.patterns
        if case.before == "patched":
            ra.patch_model(model, ra.Pattern.pyramid(window=2, levels=2))
            patterns = {None: ra.Pattern.exact(), **patterns}
        for layer, pattern in patterns.items():
            ra.patch_config(model.config, pattern, None if layer is None else [layer])
        ra.patch_model(model, ring=ring)
    if case.before == "refused":  # a call with a square mask, which breaks off and must leave nothing behind
        with torch.no_grad(), suppress(*REFUSALS):
            model(input_ids=torch.full((1, 4), 5), attention_mask=torch.ones(1, 1, 4, 4), use_cache=False)
            raise AssertionError("a square mask, which must be refused, was computed")
    model.train(case.train)
    if case.checkpointing is not None and model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": case.checkpointing})
    return model


def gradients_of(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def cross_entropy(logits, targets, loss):
    """The sum over the targets: in float64, or as models compute it, from float32."""
    logits = logits.double() if loss == "logits" else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def tokens_of(case):
    return sum(int((batch.targets() != IGNORED).sum()) for batch in case.batches)


# ---- expected results


def expected(case: Case, found: Result, dtype: torch.dtype) -> Result:
    """By eager attention, or under patterns by its definition, on one process.

    Args:
        found: whose tokens a generation under patterns goes on with.
    """
    model = build(case, DENSE if case.patterns else "eager", dtype)
    setattr(model.config.get_text_config(), DENSE, case.patterns)
    with float64(dtype == torch.float64):
        return TASKS_OF_EAGER[case.task](case, model, found)


@torch.no_grad()
def expected_perplexity(case, model, found):
    batch, targets = case.batches[0], case.batches[0].targets()
    nll = torch.full((*batch.shape, 1), torch.nan, dtype=torch.float64)
    for row, start, stop in batch.spans():
        logits = model(batch.inputs["input_ids"][row : row + 1, start:stop], use_cache=False).logits[0, :-1]
        own = F.cross_entropy(logits.float(), targets[row, start : stop - 1], reduction="none")
        nll[row, start + 1 : stop, 0] = own.double()
    return Result([nll], float(nll.nansum()), {})


@torch.no_grad()
def expected_tokens(case, model, found):
    """Of eager generation; under patterns, of the found tokens without a cache."""
    batch, new = case.batches[0], case.generated[0]
    if not case.patterns:
        kept = {}
        # Cached keys keep the length of the row at their step, and prefilled tokens were computed as a row.
        if case.prefilled and ("rope_parameters" in case.changes or case.model_type in OTHER_STEPS):
            ids, mask = before_question(case)
            positions = counted(case, case.batches[0])[:, : ids.shape[1]]
            filled = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
            kept |= cache_argument(cache_in(filled))
        if case.prefilled and case.model_type in MIXERS:
            # Transformers' own mixers begin anew with each piece of several tokens behind a cache.
            case = replace(case, generated=(*case.generated[:2], {}))
        return generated(case, model, kept)
    tokens = found.tokens
    rows = []
    for row, start, _ in batch.spans():
        ids = tokens[row : row + 1, start:-1]
        positions = torch.arange(ids.shape[1])[None]  # as `generate` numbers them for every model
        rows.append(model(ids, position_ids=positions, use_cache=False).logits[0, -new:])
    return Result([torch.stack(rows)], 0.0, {}, tokens)


def expected_step(case, model, found):
    """Forward and backward passes of batches, or of their documents."""
    tokens = tokens_of(case)
    found, total = [], 0.0
    for batch in case.batches:
        whole, targets = None, batch.targets()
        for index, inputs in parts(case, batch, model.dtype):
            logits = model(**inputs).logits
            loss = cross_entropy(logits, targets[index], case.loss) / tokens
            loss.backward()
            total += float(loss.detach())
            if whole is None:
                whole = torch.full((*batch.shape, logits.shape[-1]), torch.nan, dtype=torch.float64)
            whole[index] = logits.detach().double().reshape(whole[index].shape)
        found.append(whole)
    return Result(found, total, gradients_of(model))


def parts(case, batch, dtype):
    """(index into [B, n], inputs) of the forward passes that together are expected of a batch."""
    names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    inputs = {name: x for name, x in given(case, batch, dtype).items() if name in names}
    positions = inputs.get("position_ids")
    if by_itself(case, batch) and case.model_type in SELF_NUMBERED:  # documents would be numbered anew
        inputs.pop("position_ids", None)
        yield (slice(None), slice(None)), {**inputs, "attention_mask": square_mask(batch, dtype), "use_cache": False}
        return
    if not by_itself(case, batch):
        yield (slice(None), slice(None)), {**inputs, **case.cache}
        return
    if positions is None:
        positions = numbered(case, batch)
    for row, start, stop in batch.spans():
        document = {name: inputs[name][row : row + 1, start:stop] for name in names[:2] if name in inputs}
        document["use_cache"] = False
        document["position_ids"] = positions[row % len(positions)][None, start:stop]
        # Without a mask Transformers would take positions that jump for a border.
        document["attention_mask"] = torch.ones(1, stop - start, dtype=torch.int64)
        yield (row, slice(start, stop)), document


def by_itself(case, batch):
    """Whether each document is expected to be computed by itself, rather than the batch as it is."""
    if "rope_parameters" in case.changes or batch.as_eager or batch.holes:
        return False
    return bool(case.patterns) or batch.apart or case.model_type in LET_PADDING_IN


def given(case, batch, dtype):
    """The model's inputs from a batch: tokens, or embeddings for them."""
    if case.embeds is None:
        return batch.inputs
    embeds = case.embeds[case.batches.index(batch)].to(dtype)
    return {"inputs_embeds": embeds, **{name: x for name, x in batch.inputs.items() if name != "input_ids"}}


def square_mask(batch, dtype):
    """[B, 1, n, n] of documents, for a causal model: added to its scores."""
    length = batch.shape[1]
    visible = torch.zeros(batch.shape[0], 1, length, length, dtype=torch.bool)
    for row, start, stop in batch.spans():
        visible[row, 0, start:stop, start:stop] = True
    visible = visible.tril() | torch.eye(length, dtype=torch.bool)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -1e30)


def counted(case, batch):
    """[B, n] the positions of each document from its first token."""
    positions = torch.zeros(batch.shape, dtype=torch.int64)
    for row, start, stop in batch.spans():
        positions[row, start:stop] = torch.arange(stop - start)
    return positions + case.first


def numbered(case, batch):
    """[B, n] how the model numbers the tokens of a batch without position_ids."""
    if max(map(len, batch.documents)) > 1:
        return counted(case, batch)
    valid = torch.ones(batch.shape, dtype=torch.int64)
    if case.first or case.model_type in NUMBERED_BY_MASK:
        valid = batch.inputs.get("attention_mask", valid)
    return (valid.cumsum(-1) - 1).clamp_min(0) + case.first


TASKS_OF_EAGER = {"train": expected_step, "perplexity": expected_perplexity, "generate": expected_tokens}


# ---- results of "ring_dilated"


def found_by(case: Case) -> Result | Refused:
    """By "ring_dilated", on one process or a simulated ring."""
    count = 1 if case.ring is None else case.ring[0]
    # Made here: in float64 other weights would be drawn, and in threads each others'.
    models = [build(case, "eager" if case.patched else "ring_dilated", case.dtype) for _ in range(count)]
    with float64(case.dtype == torch.float64):
        return result_of(case, models[0], None) if case.ring is None else found_on_ring(case, models)


def result_of(case, model, ring) -> Result | Refused:
    try:
        return TASKS[case.task](case, prepared(case, model, ring))
    except REFUSALS as refused:
        return Refused(str(refused))


def found_on_ring(case: Case, models) -> Result | Refused:
    """On the ranks of a simulated ring, and the mean of their gradients.

    Raises:
        AssertionError: ranks differ in results that must be equal on all ranks, or only some ranks refuse.
    """
    world_size, settings = case.ring
    by_rank = run_simulated(lambda ring: result_of(case, models[ring.rank], ring), world_size, **settings)
    first = by_rank[0]
    assert len({type(result) for result in by_rank}) == 1, f"only some ranks refuse: {by_rank}"
    if isinstance(first, Refused):
        return first
    for result in by_rank[1:]:
        for own, other in zip(first.logits, result.logits, strict=True):
            assert torch.equal(own.nan_to_num(), other.nan_to_num()), "ranks differ"
        assert result.loss == first.loss, "ranks have other losses"
        assert result.tokens is None or torch.equal(result.tokens, first.tokens), "ranks generate other tokens"
    names = {name for result in by_rank for name in result.gradients}
    gradients = {n: sum(r.gradients[n] for r in by_rank if n in r.gradients) / world_size for n in names}
    return replace(first, gradients=gradients)


def train(case, model) -> Result:
    """Forward and backward passes of one optimizer step."""
    found, total, tokens = [], 0.0, tokens_of(case)
    for batch in case.batches:
        logits, loss = of_batch(case, model, batch, tokens)
        loss.backward()
        total += float(loss.detach())
        found.append(logits.detach().double())
    return Result(found, total, gradients_of(model))


def of_batch(case, model, batch, tokens):
    """The logits and the loss of a batch as it is."""
    inputs = {name: x for name, x in given(case, batch, case.dtype).items() if name != "labels"}
    if case.loss == "logits":
        logits = model(**inputs, **case.cache, return_dict=case.before == "")[0]
        return logits, cross_entropy(logits, batch.targets(), case.loss) / tokens
    labels = F.pad(batch.targets()[:, :-1], (1, 0), value=IGNORED)  # which the model shifts in the row
    output = model(**inputs, labels=labels, num_items_in_batch=tokens, **case.cache)
    if case.ring is None:
        return output.logits, output.loss
    with torch.no_grad():
        return model(**inputs, **case.cache).logits, output.loss


def perplexity(case, model) -> Result:
    """Minus the log-likelihood of each token, [B, n, 1]."""
    batch = case.batches[0]
    report = ra.perplexity(model, batch.inputs["input_ids"], attention_mask=batch.inputs.get("attention_mask"))
    assert report.tokens == int((~report.token_nll.isnan()).sum())
    return Result([report.token_nll.double()[..., None]], report.nll, {})


def generate(case, model) -> Result:
    """Logits of the tokens that are generated, [B, new tokens, vocabulary]; the loss is a number of all tokens."""
    kept = cache_argument(ra.prefill(model, *before_question(case))) if case.prefilled else {}
    return generated(case, model, kept)


def before_question(case):
    """The tokens [B, n] that are not asked, and their mask, or None."""
    ids, mask = (case.batches[0].inputs.get(name) for name in ("input_ids", "attention_mask"))
    return ids[:, : case.before_question], None if mask is None else mask[:, : case.before_question]


def generated(case, model, kept) -> Result:
    new, _, how = case.generated
    output = model.generate(
        **{name: x for name, x in case.batches[0].inputs.items() if name != "labels"},
        **how,
        **kept,
        max_new_tokens=new,
        min_new_tokens=new,  # the end token would end it
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Result([torch.stack(output.logits, 1).double()], 0.0, {}, output.sequences)


TASKS = {"train": train, "perplexity": perplexity, "generate": generate}


# ---- comparing


def errors(case: Case, found: Result, want: Result) -> dict[str, float]:
    """Of logits, loss and gradients, each relative to the largest entry.

    In float32, where gradients that should be zero are the difference of rounded numbers, to the largest of all gradients.
    """
    worst = {"logits": 0.0}
    for batch, own, other in zip(case.batches, found.logits, want.logits, strict=True):
        if case.task == "train":
            own, other = own[batch.valid()], other[batch.valid()]
        assert torch.equal(own.isfinite(), other.isfinite()), "other tokens are computed, or some values are NaN"
        largest = float(other.nan_to_num().abs().max())
        worst["logits"] = max(worst["logits"], float((own - other).nan_to_num().abs().max()) / (largest or 1.0))
    worst["loss"] = abs(found.loss - want.loss) / (abs(want.loss) or 1.0)
    if found.tokens is not None:
        assert torch.equal(found.tokens, want.tokens), "other tokens are generated"
    zeros = dict.fromkeys(found.gradients.keys() | want.gradients.keys(), torch.zeros(()))
    floor = 1e-2 if case.dtype == torch.float64 else 1.0
    worst["gradients"] = gradients_distance(zeros | found.gradients, zeros | want.gradients, floor)
    return worst


def compared(case: Case, found: Result | Refused) -> str:
    """Compares results with the expected ones: "equal", in float64; "rounded", as near as eager attention; or "refused".

    Raises:
        AssertionError: they differ, or the refusal is wrong.
    """
    if isinstance(found, Refused):
        assert case.refusable, f"refused: {found.message}"
        return "refused"
    want = expected(case, found, torch.float64)
    worst = errors(case, found, want)
    if case.dtype == torch.float64:
        assert all(error <= EXACT for error in worst.values()), f"errors {worst}, of {EXACT}"
        return "equal"
    bounds = {name: allowed(error) for name, error in errors(case, expected(case, found, torch.float32), want).items()}
    assert all(worst[name] <= bounds[name] for name in worst), f"errors {worst}, and eager attention allows {bounds}"
    return "rounded"
