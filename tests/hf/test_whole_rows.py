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
from hf_ring_attention.compute.private import checkpoint_activations
from hf_ring_attention.hf.cache import cache_argument
from hf_ring_attention.hf.config import warn_once
from hf_ring_attention.hf.forward_pass import running_with

from ..support.ranks import on_ranks
from ..support.tiny_models import VOCAB, draw, tiny_config
from ..support.tolerance import EXACT, distance

pytestmark = pytest.mark.usefixtures("in_float64")

TOKENS = 21
#: Patterns of all kinds; the last one has another pattern for each head.
PATTERNS = ("exact", "window:6+2", "pyramid:4,2", "longnet:4/1,8/2", ra.Pattern.by_kv_head(["window:6+2", "exact"]))
TRANSPORTS = ("ring", "collective", "heads")


def rows(kind):
    """Input ids with a mask or positions, and which tokens count."""
    ids = torch.randint(8, VOCAB, (2, TOKENS))
    mask = torch.ones_like(ids)
    if kind == "left":
        mask[1, :7] = 0
    elif kind == "right":
        mask[0, -6:] = 0
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in (7, 9, TOKENS - 16)]).expand(2, -1)
        return {"input_ids": ids, "position_ids": positions}, mask
    return {"input_ids": ids} | ({} if kind == "plain" else {"attention_mask": mask}), mask


def model_of(auto, model_type, pattern="exact", ring=None, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {
            "attn_implementation": "eager",
            "experts_implementation": "eager",
            "dtype": torch.get_default_dtype(),
        }
        model = auto.from_config(tiny_config(model_type, **changes), **options)
    draw(model)
    model.eval()
    return ra.patch_model(model, pattern, ring=ring)


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


def check_over_ring(make, call, world_size=3, valid=None, bound=EXACT, **settings):
    """Compares all tensors of a call, and the mean of the ranks' gradients, with the results of one device."""
    expected, gradients = results(make(None), call)

    def work(ring, model):
        found, own = results(model, call)
        return found, {name: torch.stack(ring.gather(x)).mean(0) for name, x in own.items()}

    largest_of_all = max([float(x.abs().max()) for x in gradients.values()], default=0.0)
    for found, mean in on_ranks(work, lambda: make(None), world_size, **settings):
        assert {*expected} == {*found}, ({*found}, {*expected})
        for name, x in found.items():
            assert x.shape == expected[name].shape, (name, x.shape, expected[name].shape)
            own, other = x, expected[name]
            if valid is not None and x.shape[:2] == valid.shape:
                own, other = own[valid != 0], other[valid != 0]
            assert distance(own, other) <= bound, (name, distance(own, other))
        assert gradients.keys() == mean.keys()
        for name, x in mean.items():
            error = float(
                (x - gradients[name]).abs().max() / gradients[name].abs().max().clamp_min(1e-2 * largest_of_all)
            )
            assert error <= bound, (name, error)


# ---- causal language models


@pytest.mark.parametrize(
    ("number", "kind"),
    [(number, kind) for number in range(5) for kind in (("plain", "left"), ("right", "packed"))[number % 2]],
)
def test_the_loss_of_a_causal_model(number, kind):
    inputs, mask = rows(kind)
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
    transport = TRANSPORTS[number % 3]
    check_over_ring(
        functools.partial(model_of, AutoModelForCausalLM, "llama", PATTERNS[number]),
        lambda model: model(**inputs, labels=labels, use_cache=False),
        world_size=2 if transport == "heads" else 3,
        transport=transport,
    )


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("llama", "plain"),
        *((name, kind) for name in ("llama", "opt", "gpt2", "roberta") for kind in ("left", "packed")),
        ("biogpt", "left"),
    ],
)
def test_logits_and_hidden_states(model_type, kind):
    """Models count positions in different ways where the caller passes none."""
    inputs, mask = rows(kind)
    if kind == "packed" and model_type == "roberta":
        inputs["position_ids"] = inputs["position_ids"] + 1 + tiny_config("roberta").pad_token_id
    elif model_type == "roberta":
        inputs["input_ids"] = inputs["input_ids"].masked_fill(mask == 0, tiny_config("roberta").pad_token_id)
    check_over_ring(
        lambda ring: model_of(AutoModelForCausalLM, model_type, "window:6+2", ring),
        lambda model: model(**inputs, output_hidden_states=True, use_cache=False),
        valid=mask,
        layout="zigzag",
    )


@pytest.mark.parametrize("keep", [1, 5, TOKENS + 3, torch.tensor([-1, 4, 0])], ids=str)
def test_kept_logits(keep):
    inputs, _ = rows("left")
    check_over_ring(
        lambda ring: model_of(AutoModelForCausalLM, "llama", "window:6+2", ring),
        lambda model: model(**inputs, logits_to_keep=keep, use_cache=False),
    )


def test_labels_that_are_shifted_and_counted_by_the_caller():
    inputs, mask = rows("right")
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).masked_fill(
        torch.rand(labels.shape) < 0.3, -100
    )
    for items in (7, torch.tensor(11)):
        check_over_ring(
            lambda ring: model_of(AutoModelForCausalLM, "llama", "window:6+2", ring),
            lambda model, items=items: model(
                **inputs, labels=labels, shift_labels=shifted, num_items_in_batch=items, use_cache=False
            ),
        )


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_rows(length):
    """Some ranks have nothing but padding."""
    ids = torch.randint(8, VOCAB, (2, length))
    check_over_ring(
        lambda ring: model_of(AutoModelForCausalLM, "llama", "window:6+2", ring),
        lambda model: model(ids, labels=ids if length > 1 else None, use_cache=False),
        world_size=4,
    )


@pytest.mark.parametrize(
    "model_type",
    ["mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "cohere2", "granite", "deepseek_v3", "bert"],
)
def test_other_causal_models(model_type):
    """Windows, chunks, softcaps, sinks with logits, scaled logits, values narrower than keys, a head of several layers."""
    inputs, mask = rows("right")
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
    check_over_ring(
        lambda ring: model_of(AutoModelForCausalLM, model_type, None, ring),
        lambda model: model(**inputs, labels=labels, use_cache=False),
        world_size=2,
    )


# ---- other heads


#: The classes of models, their types, changes of their configs, and the arguments of a call by its ids and mask.
HEADS = {
    # Decoders classify by the last token before the padding, and encoders by the first token.
    "sequences": (
        AutoModelForSequenceClassification, ("llama", "bert"), {}, lambda ids, mask: {"labels": torch.tensor([0, 1])},
    ),
    "rewards": (
        AutoModelForSequenceClassification, ("qwen3",), {"num_labels": 1},
        lambda ids, mask: {"labels": torch.tensor([0.5, -1.0])},
    ),
    "tokens": (
        AutoModelForTokenClassification, ("llama", "bert", "modernbert"), {},
        lambda ids, mask: {"labels": (ids % 2).masked_fill(mask == 0, -100)},
    ),
    "answers": (
        AutoModelForQuestionAnswering, ("llama", "bert"), {},
        lambda ids, mask: {"start_positions": torch.tensor([2, 5]), "end_positions": torch.tensor([4, 9])},
    ),
    "masked tokens": (
        AutoModelForMaskedLM, ("modernbert", "roberta", "bert"), {},
        lambda ids, mask: {"labels": ids.masked_fill((mask == 0) | (torch.rand(mask.shape) < 0.5), -100)},
    ),
    "none, and a pooler": (AutoModel, ("llama", "bert"), {}, lambda ids, mask: {"output_hidden_states": True}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("head", "model_type", "kind"),
    [
        (head, model_type, kind)
        for head, (_, types, _, _) in HEADS.items()
        for model_type in types
        for kind in ("plain", "left", "right")
        if kind == "right" or (head, model_type) == ("sequences", "llama")
    ],
)
def test_other_heads(head, model_type, kind):
    auto, _, changes, arguments = HEADS[head]
    inputs, mask = rows(kind)
    inputs["input_ids"] = inputs["input_ids"].masked_fill(mask == 0, 0)
    options = arguments(inputs["input_ids"], mask)
    check_over_ring(
        lambda ring: model_of(auto, model_type, "window:6+2", ring, is_decoder=False, **changes),
        lambda model: model(**inputs, **options),
        world_size=2,
        valid=mask,
    )


ANSWERS = "LlamaForQuestionAnswering chooses among all tokens of a row, and some are padding"
FIRST = "BertForSequenceClassification got rows that begin with padding"


@pytest.mark.parametrize(
    ("auto", "model_type", "kind", "warning"),
    [
        *((AutoModelForQuestionAnswering, "llama", kind, ANSWERS) for kind in ("left", "right")),
        (AutoModelForQuestionAnswering, "llama", "plain", None),
        (AutoModelForSequenceClassification, "bert", "left", FIRST),
        (AutoModelForSequenceClassification, "bert", "right", None),
        (AutoModelForSequenceClassification, "llama", "left", None),
    ],
)
def test_heads_that_read_padding_are_named(caplog, auto, model_type, kind, warning):
    """Attention gives no output for padding, so their results differ from eager attention; all other results are equal."""
    inputs, mask = rows(kind)
    inputs["input_ids"] = inputs["input_ids"].masked_fill(mask == 0, 0)
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


@pytest.mark.parametrize(
    ("model_type", "kind", "use_reentrant", "world_size", "settings"),
    [
        ("llama", "left", False, 4, {"transport": "heads", "heads": 2}),
        ("llama", "left", True, 2, {"transport": "heads"}),
        ("llama", "packed", False, 2, {"transport": "heads"}),
        ("llama", "packed", True, 3, {}),
        ("gpt2", "left", False, 3, {}),
        ("gpt2", "left", True, 4, {"transport": "heads", "heads": 2}),
    ],
)
def test_checkpointed_layers(model_type, kind, use_reentrant, world_size, settings):
    """GPT-2 hands the mask to its layers by position, and torch's reentrant checkpoint repeats them with a copy of it."""
    inputs, mask = rows(kind)
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)

    def make(ring):
        model = model_of(AutoModelForCausalLM, model_type, "window:6+2", ring)
        checkpoint_activations(model, {"use_reentrant": use_reentrant})
        return model.train()

    check_over_ring(make, lambda model: model(**inputs, labels=labels), world_size, **settings)


def test_generation_computes_whole_rows_on_every_rank():
    inputs, _ = rows("left")
    settings = {"max_new_tokens": 5, "do_sample": False}
    expected = model_of(AutoModelForCausalLM, "llama", "window:6+2").generate(**inputs, **settings)
    tokens = on_ranks(
        lambda ring, model: model.generate(**inputs, **settings),
        lambda: model_of(AutoModelForCausalLM, "llama", "window:6+2"),
    )
    assert all(torch.equal(found, expected) for found in tokens)


def test_logits_of_an_evaluation_are_formed_when_they_are_used():
    inputs, mask = rows("left")
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
    with torch.no_grad():
        expected = model_of(AutoModelForCausalLM, "llama", "window:6+2")(**inputs, use_cache=False).logits

    def work(ring, model):
        with torch.no_grad():
            output = model(**inputs, labels=labels)
            ring.reset_traffic()
            assert output.logits.shape == expected.shape
            assert ring.traffic().sent_bytes == 0
            return output.logits.argmax(-1), torch.stack([output.logits])[0]

    for best, logits in on_ranks(work, lambda: model_of(AutoModelForCausalLM, "llama", "window:6+2"), 2):
        assert distance(logits[mask != 0], expected[mask != 0]) <= EXACT
        assert torch.equal(best, logits.argmax(-1))


def test_caches_that_were_not_formed_say_so_when_they_are_used():
    inputs, _ = rows("plain")

    def work(ring, model):
        (name,) = cache_argument(None)
        with pytest.raises(RuntimeError, match=r"this output has no cache: .*use_cache=True"):
            model(inputs["input_ids"][:, :1], **{name: getattr(model(**inputs), name)})

    on_ranks(work, lambda: model_of(AutoModelForCausalLM, "llama", "window:6+2"), 2)


# ---- calls that differ


#: Arguments that no model takes.
SLIPS = (
    {"position_ids": torch.zeros(3, TOKENS, dtype=torch.long)},
    {"position_ids": torch.arange(TOKENS)},
    {"position_ids": list(range(TOKENS))},
    {"seq_idx": torch.zeros(2, 10, dtype=torch.long)},
    {"attention_mask": torch.ones(TOKENS, dtype=torch.long)},
    {"attention_mask": {"full_attention": None}},
    {"cu_seq_lens_q": torch.tensor([0, 5, 10])},
    {"cu_seq_lens_q": [0, TOKENS]},
    {"input_ids": torch.zeros(0, TOKENS, dtype=torch.long)},
    {"input_ids": None},
)
#: The change that one rank makes, and the error on all ranks.
CHANGES = {
    **{
        f"slip {number}": (lambda model, inputs, slip=slip: inputs.update(slip), "must be|must rise|cuts rows of tokens")
        for number, slip in enumerate(SLIPS)
    },
    "other tokens": (lambda model, inputs: inputs["input_ids"].__setitem__((0, 3), 7), "disagree on input_ids"),
    "other lengths": (
        lambda model, inputs: inputs.update({name: x[:, :-1] for name, x in inputs.items()}), "disagree on input_ids",
    ),
    "another mask": (lambda model, inputs: inputs["attention_mask"].__setitem__((0, 0), 0), "disagree on attention_mask"),
    "no mask": (lambda model, inputs: inputs.pop("attention_mask"), "disagree on"),
    "a hole": (
        lambda model, inputs: inputs["attention_mask"].__setitem__((1, 9), 0),
        "batch row 1 of the attention mask has padding inside a document.*takes padding before and after",
    ),
    "training": (
        lambda model, inputs: model.train(), "disagree on whether the model trains: rank 0: False, rank 1: True",
    ),
    "dropout": (
        lambda model, inputs: model.model.layers[0].self_attn.train(),
        r"LlamaAttention: attention dropout 0\.1 was asked for.*model\.eval\(\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_pass_that_differs_on_one_rank_ends_on_all_and_the_next_is_right(name):
    change, message = CHANGES[name]
    inputs, mask = rows("right")
    expected = model_of(AutoModelForCausalLM, "llama")(**inputs).logits.detach()

    def work(ring, model):
        own = {name: x.clone() for name, x in inputs.items()}
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        if ring.rank == 1:
            change(model, own)
        with pytest.raises(ValueError, match=message):
            model(**own, use_cache=False)
        return model.eval()(**inputs).logits.detach()

    for found in on_ranks(work, lambda: model_of(AutoModelForCausalLM, "llama")):
        assert distance(found[mask != 0], expected[mask != 0]) <= EXACT


def test_a_rank_that_does_not_call():
    """It makes another call, or ends: the error on every rank names which."""
    inputs, _ = rows("plain")

    def another_call(ring, model):
        layout = ring.layout_for(TOKENS, "exact")
        local = torch.ones(1, layout.local_len)
        call = (lambda: ring.unshard(local, layout)) if ring.rank == 1 else (lambda: model(**inputs))
        with pytest.raises(ValueError, match="the call: rank 0: a forward pass of a model, rank 1: unshard"):
            call()

    def ends(ring, model):
        if ring.rank != 1:
            with pytest.raises(RuntimeError, match="receiving from rank 1 did not end"):
                model(**inputs)

    for work in (another_call, ends):
        on_ranks(work, lambda: model_of(AutoModelForCausalLM, "llama"))


def test_rows_that_change_before_the_decoder_are_refused_by_name():
    inputs, _ = rows("plain")

    def shortened(module, args, kwargs):
        return args, {**kwargs, "input_ids": kwargs["input_ids"][:, 1:]}

    def work(ring, model):
        model.register_forward_pre_hook(shortened, with_kwargs=True)
        with pytest.raises(NotImplementedError, match=r"LlamaModel got .*rows that change before the decoder"):
            model(**inputs)

    on_ranks(work, lambda: model_of(AutoModelForCausalLM, "llama"))


# ---- bytes on the ring


def moved(ring, call):
    ring.reset_traffic()
    call()
    traffic = ring.traffic()
    assert traffic.sent_bytes >= 0
    return traffic.received_bytes


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_of_joining_are_those_of_their_formulas(world_size):
    """Per rank: p - 1 parts of hidden states, of a few tokens, or of fields; p - 1 sums of losses; and no objects."""
    inputs, mask = rows("right")
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
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

    for found, expected in on_ranks(
        work, lambda: model_of(AutoModelForCausalLM, "llama", "window:6+2").eval(), world_size, layout="zigzag"
    ):
        assert found == expected
