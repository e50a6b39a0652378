"""Whole rows in, whole results out: a ring returns what one device returns, whatever the head, the rows and the pattern."""

import functools

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.forward_pass import running_with
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.wrappers import cache_argument

from ..support.ranks import on_ranks
from ..support.tiny_models import VOCAB, draw, tiny_config
from ..support.tolerance import EXACT, distance
from .alike import assert_alike, refused

pytestmark = pytest.mark.usefixtures("in_float64")

TOKENS = 21


def rows(kind, model_type="llama"):
    """Input ids with a mask or positions, and which tokens count; of a number, two plain rows of this length."""
    ids = torch.randint(8, VOCAB, (2, kind if isinstance(kind, int) else TOKENS))
    mask = torch.ones_like(ids)
    if kind == "left":
        mask[1, :7] = 0
    elif kind == "right":
        mask[0, -6:] = 0
    # Models count positions in different ways if the caller passes none.
    padding, first = (tiny_config("roberta").pad_token_id, 1) if model_type == "roberta" else (0, 0)
    inputs = {"input_ids": ids.masked_fill(mask == 0, padding)}
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in (7, 9, TOKENS - 16)]).expand(2, -1)
        inputs["position_ids"] = positions + first + padding
    elif kind in ("left", "right"):
        inputs["attention_mask"] = mask
    return inputs, mask


def model_of(auto, model_type, pattern="exact", ring=None, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dtype = torch.get_default_dtype()
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
        model = auto.from_config(tiny_config(model_type, **changes), **options)
    draw(model)
    return ra.patch_model(model.eval(), pattern, ring=ring)


def plain(pattern="exact"):
    return model_of(AutoModelForCausalLM, "llama", pattern)


def results(model, call):
    """The tensors of a call's output by name, and the gradients of its loss."""
    model.zero_grad()
    output = call(model)
    tensors = {}
    for name, value in output.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = torch.stack([value])[0].detach()  # All ranks form it together.
        elif isinstance(value, tuple) and isinstance(value[0], torch.Tensor):
            tensors |= {f"{name}.{number}": x.detach() for number, x in enumerate(value)}
    if getattr(output, "loss", None) is not None and output.loss.requires_grad:
        output.loss.backward()
    return tensors, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_over_ring(make, call, world_size=3, valid=None, **settings):
    """Compares all tensors of a call, and the mean of the ranks' gradients, with the results of one device."""
    expected, gradients = results(make(), call)

    def work(ring, model):
        found, own = results(model, call)
        return found, {name: torch.stack(ring.gather(x)).mean(0) for name, x in own.items()}

    for found, mean in on_ranks(work, make, world_size, **settings):
        assert {*expected} == {*found}, ({*found}, {*expected})
        for name, x in found.items():
            assert x.shape == expected[name].shape, (name, x.shape, expected[name].shape)
            counting = valid != 0 if valid is not None and x.shape[:2] == valid.shape else ...
            error = distance(x[counting], expected[name][counting])
            assert error <= EXACT, (name, error)
        assert_alike(mean, gradients)


# ---- heads


def learned(ids, mask):
    return {"labels": ids.masked_fill(mask == 0, -100), "use_cache": False}


def counted(items):
    """Labels that the caller has shifted and counted."""

    def arguments(ids, mask):
        shifted = torch.nn.functional.pad(learned(ids, mask)["labels"][:, 1:], (0, 1), value=-100)
        shifted = shifted.masked_fill(torch.rand(ids.shape) < 0.3, -100)
        return {**learned(ids, mask), "shift_labels": shifted, "num_items_in_batch": items}

    return arguments


def kept(keep):
    return lambda ids, mask: {"logits_to_keep": keep, "use_cache": False}


def hidden(ids, mask):
    return {"output_hidden_states": True, "use_cache": False}


#: By the name of a head: the class of its models, changes of their configs, and the arguments of a call by its ids and mask.
HEADS = {
    "hidden states": (AutoModelForCausalLM, {}, hidden),
    **{f"kept logits {keep}": (AutoModelForCausalLM, {}, kept(keep)) for keep in (1, 5, 24, torch.tensor([-1, 4, 0]))},
    **{f"shifted labels {items}": (AutoModelForCausalLM, {}, counted(items)) for items in (7, torch.tensor(11))},
    # Decoders classify by the last token before the padding, and encoders by the first token.
    "sequences": (
        AutoModelForSequenceClassification, {"is_decoder": False}, lambda ids, mask: {"labels": torch.tensor([0, 1])},
    ),
    "rewards": (
        AutoModelForSequenceClassification, {"num_labels": 1}, lambda ids, mask: {"labels": torch.tensor([0.5, -1.0])},
    ),
    "tokens": (
        AutoModelForTokenClassification, {"is_decoder": False},
        lambda ids, mask: {"labels": (ids % 2).masked_fill(mask == 0, -100)},
    ),
    "answers": (
        AutoModelForQuestionAnswering, {"is_decoder": False},
        lambda ids, mask: {"start_positions": torch.tensor([2, 5]), "end_positions": torch.tensor([4, 9])},
    ),
    "masked tokens": (
        AutoModelForMaskedLM, {"is_decoder": False},
        lambda ids, mask: {"labels": ids.masked_fill((mask == 0) | (torch.rand(mask.shape) < 0.5), -100)},
    ),
    "none, and a pooler": (AutoModel, {"is_decoder": False}, lambda ids, mask: {"output_hidden_states": True}),
}  # fmt: skip
#: The head, the type, the rows, and the ring; each two losses of each type are in tests/hf/test_on_use.py.
CASES = [
    # Some ranks have nothing but padding.
    *(("hidden states", "llama", length, {"world_size": 4}) for length in (1, 5)),
    *(("hidden states", model_type, "left", {"layout": "zigzag"}) for model_type in ("opt", "roberta", "biogpt")),
    *((head, "llama", "left", {}) for head in HEADS if "kept" in head),
    *((head, "llama", "right", {}) for head in HEADS if "shifted" in head),
    *(
        (head, model_type, "right", {"world_size": 2}) for head, model_type in [
            ("sequences", "llama"), ("sequences", "bert"), ("rewards", "qwen3"), ("tokens", "modernbert"),
            ("answers", "bert"), ("masked tokens", "roberta"), ("none, and a pooler", "bert"),
        ]
    ),
    ("sequences", "llama", "left", {"world_size": 2}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("head", "model_type", "kind", "settings"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_ring_returns_what_one_device_does(head, model_type, kind, settings):
    auto, changes, arguments = HEADS[head]
    inputs, mask = rows(kind, model_type)
    options = arguments(inputs["input_ids"], mask)
    check_over_ring(
        functools.partial(model_of, auto, model_type, "window:6+2", **changes),
        lambda model: model(**inputs, **options),
        valid=None if auto is AutoModelForCausalLM and head != "hidden states" else mask,
        **settings,
    )


ANSWERS = "LlamaForQuestionAnswering chooses among all tokens of a row, and some are padding"
FIRST = "BertForSequenceClassification got rows that begin with padding"


@pytest.mark.parametrize(
    ("auto", "model_type", "kind", "warning"),
    [
        (AutoModelForQuestionAnswering, "llama", "left", ANSWERS),
        (AutoModelForQuestionAnswering, "llama", "plain", None),
        (AutoModelForSequenceClassification, "bert", "left", FIRST),
        (AutoModelForSequenceClassification, "bert", "right", None),
    ],
)
def test_heads_that_read_padding_are_named(caplog, auto, model_type, kind, warning):
    """Attention gives no output for padding, so their results differ from eager attention; all other results are equal."""
    inputs, _ = rows(kind)
    labels = {"labels": torch.tensor([0, 1])}
    if auto is AutoModelForQuestionAnswering:
        labels = {"start_positions": torch.tensor([8, 9]), "end_positions": torch.tensor([10, 12])}
    make = functools.partial(model_of, auto, model_type, **({"is_decoder": False} if model_type == "bert" else {}))
    losses = []
    for implementation in ("ring_dilated", "eager"):
        warn_once.cache_clear()
        model = make()
        model.set_attn_implementation(implementation)
        losses.append(model(**inputs, **labels).loss.detach())
    assert (distance(*losses) > 1e-4) == (warning is not None)
    said = [text for text in caplog.messages if "attention output is 0" in text]
    assert len(said) == (warning is not None) and all(text.startswith(warning) for text in said)
    caplog.clear()
    warn_once.cache_clear()
    on_ranks(lambda ring, model: model(**inputs)[0].detach(), make)
    assert len([text for text in caplog.messages if "attention output is 0" in text]) == (warning is not None)


# ---- several passes


def test_caches_that_were_not_formed_say_so_when_they_are_used():
    inputs, _ = rows("plain")

    def work(ring, model):
        (name,) = cache_argument(None)
        cache = {name: getattr(model(**inputs), name)}
        said = r"this output has no cache: .*use_cache=True"
        refused(said, model, inputs["input_ids"][:, :1], **cache, error=RuntimeError)

    on_ranks(work, plain)


# ---- calls that differ


def change_of(**changed):
    """Other arguments for those of a call."""
    return lambda model, inputs: inputs.update(changed)


def at(name, place, value):
    """Another number in an argument."""
    return lambda model, inputs: inputs[name].__setitem__(place, value)


#: The change that one rank makes, and the error on all ranks; first arguments that no model takes.
CHANGES = [
    *(
        (change_of(**slip), "must be|must rise|cuts rows of tokens")
        for slip in (
            {"position_ids": torch.zeros(3, TOKENS, dtype=torch.long)}, {"position_ids": torch.arange(TOKENS)},
            {"position_ids": list(range(TOKENS))}, {"seq_idx": torch.zeros(2, 10, dtype=torch.long)},
            {"attention_mask": torch.ones(TOKENS, dtype=torch.long)}, {"attention_mask": {"full_attention": None}},
            {"cu_seq_lens_q": torch.tensor([0, 5, 10])}, {"cu_seq_lens_q": [0, TOKENS]},
            {"input_ids": torch.zeros(0, TOKENS, dtype=torch.long)}, {"input_ids": None},
        )
    ),
    (
        at("input_ids", (0, 3), 7),
        r"disagree on input_ids: .*; all must pass the same: use one data seed, and torch\.random\.fork_rng\(\) where",
    ),
    (
        lambda model, inputs: inputs.update({name: x[:, :-1] for name, x in inputs.items()}), "disagree on input_ids",
    ),
    (at("attention_mask", (0, 0), 0), "disagree on attention_mask"),
    (lambda model, inputs: inputs.pop("attention_mask"), "disagree on"),
    (
        at("attention_mask", (1, 9), 0),
        "batch row 1 of the attention mask has padding inside a document.*takes padding before and after",
    ),
    (lambda model, inputs: model.train(), "disagree on whether the model trains: rank 0: False, rank 1: True"),
    (  # an evaluation on one rank
        lambda model, inputs: (inputs.update(input_ids=inputs["input_ids"][:1], attention_mask=None), model.train()),
        "disagree on whether the model trains: rank 0: False, rank 1: True; all must make the same calls in one order: "
        "evaluate on every rank, not only on the main process",
    ),
    (
        lambda model, inputs: model.model.layers[0].self_attn.train(),
        r"LlamaAttention: attention dropout 0\.1 was asked for.*model\.eval\(\)",
    ),
]  # fmt: skip


def test_a_pass_that_differs_on_one_rank_ends_on_all_and_the_next_is_right():
    inputs, mask = rows("right")
    expected = plain()(**inputs).logits.detach()

    def work(ring, model):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        for change, message in CHANGES:
            own = {name: x.clone() for name, x in inputs.items()}
            if ring.rank == 1:
                change(model, own)
            refused(message, model, **own, use_cache=False)
            found = model.eval()(**inputs).logits.detach()
            assert distance(found[mask != 0], expected[mask != 0]) <= EXACT, message

    on_ranks(work, plain)


def test_a_rank_that_does_not_call():
    """It makes another call, or ends: the error on every rank names which."""
    inputs, _ = rows("plain")

    def another_call(ring, model):
        layout = ring.layout_for(TOKENS, "exact")
        local = torch.ones(1, layout.local_len)
        call = (lambda: ring.unshard(local, layout)) if ring.rank == 1 else (lambda: model(**inputs))
        refused("the call: rank 0: a forward pass of a model, rank 1: unshard", call)

    def ends(ring, model):
        if ring.rank != 1:
            refused("receiving from rank 1 did not end", model, **inputs, error=RuntimeError)

    for work in (another_call, ends):
        on_ranks(work, plain)


def test_rows_that_change_before_the_decoder_are_refused_by_name():
    inputs, _ = rows("plain")

    def shortened(module, args, kwargs):
        return args, {**kwargs, "input_ids": kwargs["input_ids"][:, 1:]}

    def work(ring, model):
        model.register_forward_pre_hook(shortened, with_kwargs=True)
        said = r"LlamaModel got .*rows that change before the decoder"
        refused(said, model, **inputs, error=NotImplementedError)

    on_ranks(work, plain)


# ---- bytes on the ring


def moved(ring, call):
    ring.reset_traffic()
    call()
    return ring.traffic().received_bytes


def test_bytes_of_joining_are_those_of_their_formulas():
    """Per rank: p - 1 parts of hidden states, of a few tokens, or of fields; p - 1 sums of losses; and no objects."""
    world_size, (inputs, mask) = 3, rows("right")
    labels = learned(inputs["input_ids"], mask)["labels"]
    pytest.importorskip("trl")
    from trl.trainer.utils import add_fused_lm_head

    def refuse(*args, **kwargs):
        raise AssertionError("objects were gathered in a forward pass")

    def work(ring, model):
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        ring.communicator.gather_objects = refuse
        layout = ring.layout_for(TOKENS, "window:6+2", [[(0, TOKENS - 6)], [(0, TOKENS)]])
        others, local, width = world_size - 1, layout.local_len, model.config.hidden_size
        with torch.no_grad():
            with running_with(on_use=True):
                alone = moved(ring, lambda: model.base_model(**inputs))
            found = {
                "hidden states": moved(ring, lambda: model(**inputs)),
                "kept": moved(ring, lambda: model(**inputs, logits_to_keep=3)),
                "loss": moved(ring, lambda: model(**inputs, labels=labels)),
                "fields": moved(ring, lambda: model(**inputs, labels=labels, fused_lm_head=True)),
            }
        return {name: x - alone for name, x in found.items()}, {
            "hidden states": others * 2 * local * width * 8,
            "kept": others * 2 * 3 * width * 8,
            "loss": others * 8,
            # Two fields, and the mask of labels.
            "fields": others * 2 * local * (2 * 8 + 1),
        }

    for found, expected in on_ranks(work, lambda: plain("window:6+2"), world_size, layout="zigzag"):
        assert found == expected
