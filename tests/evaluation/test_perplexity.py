"""Perplexity follows from the model's own logits, for every model type and padding; and bad input is refused at once."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.model.support import check_predicts_next
from tests.support.checkpoints import word_tokenizer
from tests.support.ranks import run_simulated
from tests.support.refusals import refused
from tests.support.threads import in_threads
from tests.support.tiny_models import CAUSAL_TYPES, NOT_BUILT, VOCAB, tiny_config, tiny_model
from tests.support.tolerance import EXACT
from tests.support.training import SIZES, tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")

#: Some number positions behind the id of padding; some take none, and number the tokens themselves; some read masks oddly.
TYPES = ["roberta", "data2vec-text", "xmod", "llama", "gpt2", "opt", "bart", "bloom", "rwkv", "xlm"]


def row(seed, length):
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def own(model, ids):
    """The sum of the losses of a row without padding, by the model's own logits."""
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))


def padded(rows, side):
    """[B, n] rows and their mask."""
    length = max(ids.shape[1] for ids in rows) + 2
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for number, tokens in enumerate(rows):
        count = tokens.shape[1]
        first = {"left": length - count, "right": 0, "both": 1}[side]
        ids[number, first : first + count], mask[number, first : first + count] = tokens[0], 1
    return ids, mask


@pytest.mark.parametrize("model_type", TYPES)
def test_it_is_that_of_the_model_whatever_the_padding(model_type, rng):
    seed = rng.randrange(10**6)
    model = tiny_model(model_type, "eager")
    rows = [row(seed, length) for length in (20, 2, 13)]
    right = sum(own(model, ids) for ids in rows)
    assert ra.perplexity(model, rows[0]).nll == pytest.approx(own(model, rows[0]), rel=EXACT)
    for side in ("left", "right", "both"):
        ids, mask = padded(rows, side)
        report = ra.perplexity(model, ids, attention_mask=mask)
        assert report.nll == pytest.approx(right, rel=EXACT) and report.tokens == 19 + 1 + 12
        within = mask.bool() & torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool()
        assert torch.equal(report.token_nll.isnan(), ~within), "scored are the tokens behind the first of a row"


def of_divided_weights(rank, seed, freed):
    """The nll while FSDP 2 divides the weights, and the head's with the whole model."""
    model = tiny_model("llama", "eager")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=freed)
    return [ra.perplexity(model, row(seed, 21), ring=ra.Ring(), logits_at_once=4).nll for _ in range(2)]


@pytest.mark.parametrize("freed", [True, None])
def test_it_is_the_same_where_weights_are_divided(freed, rng, ranks):
    """Also if the forward pass frees the weights of the head at its end."""
    seed = rng.randrange(10**6)
    right = own(tiny_model("llama", "eager"), row(seed, 21))
    for found in ranks.run(of_divided_weights, 2, seed, freed):
        assert found == pytest.approx([right] * 2, rel=EXACT)


@pytest.mark.parametrize(("model_type", "layout"), [("roberta", "zigzag"), ("xmod", "contiguous")])
def test_models_that_number_tokens_themselves_find_the_same_on_a_ring(model_type, layout, rng):
    seed = rng.randrange(10**6)
    rows = [row(seed, length) for length in (21, 2, 13)]
    made = [tiny_model(model_type, "eager") for _ in range(3)]
    right = sum(own(made[0], ids) for ids in rows)
    for side in ("left", "right"):
        ids, mask = padded(rows, side)

        def measure(ring, ids=ids, mask=mask):
            return ra.perplexity(made[ring.rank], ids, ring=ring, attention_mask=mask)

        for report in run_simulated(measure, 3, layout=layout):
            assert report.nll == pytest.approx(right, rel=EXACT) and report.tokens == 20 + 1 + 12


def test_what_a_tokenizer_returns_is_taken():
    tokenizer = word_tokenizer([f"w{number}" for number in range(97)], pad_token="w0", padding_side="left")
    model = tiny_llama()
    texts = ["w5 w6 w7 w8", "w9 w10"]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    assert isinstance(encoded, BatchEncoding)
    right = ra.perplexity(model, encoded["input_ids"], attention_mask=encoded["attention_mask"]).nll
    first, second = (own(model, torch.tensor([ids])) for ids in ([5, 6, 7, 8], [9, 10]))
    assert right == pytest.approx(first + second, rel=EXACT)
    none = torch.zeros_like(encoded["input_ids"])  # A processor also returns token types, and images if it has some.
    of_processor = {**encoded, "token_type_ids": none, "mm_token_type_ids": none.tolist(), "pixel_values": None}
    for batch in (encoded, dict(encoded), tokenizer(texts, padding=True), of_processor):
        assert ra.perplexity(model, batch).nll == right
    for text in (tokenizer("w5 w6 w7 w8"), *(torch.tensor([5, 6, 7, 8], dtype=x) for x in (torch.int64, torch.int32))):
        assert ra.perplexity(model, text).nll == pytest.approx(first, rel=EXACT)


class OwnPositions(LlamaForCausalLM):
    """A model that takes neither positions nor settings of a cache, and returns a tuple."""

    def forward(self, input_ids):
        return super().forward(input_ids=input_ids).to_tuple()


def test_a_model_that_takes_no_positions_and_returns_a_tuple():
    plain, ids = LlamaForCausalLM(LlamaConfig(**SIZES)), row(0, 20)
    model = OwnPositions(plain.config)
    model.load_state_dict(plain.state_dict())
    assert ra.perplexity(model, ids).nll == pytest.approx(own(plain, ids), rel=EXACT)


class Noisy(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.training:
            output.logits = output.logits + 1
        return output


def test_modules_return_to_their_own_modes():
    torch.manual_seed(0)
    model, ids = Noisy(LlamaConfig(**SIZES, attention_dropout=0.5)).eval(), row(0, 20)
    right = ra.perplexity(model, ids).nll
    model.train().model.layers[1].eval()
    assert ra.perplexity(model, ids).nll == pytest.approx(right, rel=EXACT)
    assert model.training and model.model.layers[0].training and not model.model.layers[1].training


def test_threads_score_one_model():
    model, rows = tiny_llama(), [row(number, 20 + 5 * number) for number in range(4)]
    right = [ra.perplexity(model, ids).nll for ids in rows]

    def work(number):
        for _ in range(6):
            assert ra.perplexity(model, rows[number]).nll == pytest.approx(right[number], rel=EXACT)

    in_threads(work, 4)


IDS = row(0, 12)
MASK = torch.ones_like(IDS)
BATCH, HOLE = {"input_ids": IDS, "attention_mask": MASK}, (torch.arange(12) != 5).long()[None]
#: The batch, other arguments, and the error.
REFUSED = [
    ("a text", {}, "input_ids must be rows of integers of one length, got str"),
    ({"input_ids": [[5, 6, 7], [8, 9]]}, {}, "rows of integers of one length.*padding=True"),
    ({"input_ids": IDS, "labels": IDS}, {}, r"expected input_ids and perhaps attention_mask.*, got \['input_ids',"),
    ({"input_ids": IDS, "token_type_ids": MASK}, {}, "it scores every token of whole sequences"),
    ({"input_ids": IDS, "mm_token_type_ids": MASK, "pixel_values": None}, {}, r"\['input_ids', 'mm_token_type_ids',"),
    (BATCH, {"attention_mask": MASK}, "attention_mask in the batch and another beside it"),
    (IDS.float(), {}, r"input_ids must be integers .*, got torch.float32: pass input_ids.long\(\)"),
    (IDS[:, :1], {}, r"2 tokens or more, got \(1, 1\)"),
    (IDS + 97, {}, "input_ids must be from 0 to 96, as LlamaForCausalLM has embeddings, got"),
    (IDS.masked_fill(IDS > 50, -100), {}, "got -100 to .*tokens instead of labels"),
    (IDS, {"attention_mask": MASK.float()}, "attention_mask must be integers .1 for tokens.*float32"),
    (IDS, {"attention_mask": -9 * MASK}, "1 for tokens and 0 for padding, got values from -9 to -9"),
    (IDS, {"attention_mask": MASK[:, :5]}, r"the shape of input_ids \(1, 12\), got \(1, 5\)"),
    (IDS, {"attention_mask": HOLE}, "row 0 of attention_mask has padding inside: it marks 11 of the tokens 0 to 11"),
    (IDS, {"attention_mask": 1 - HOLE}, "no token to score"),
]


def never(*args):
    raise AssertionError("the model was called")


@pytest.mark.parametrize(("given", "more", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_input_is_refused_before_anything_is_computed(given, more, message):
    model = tiny_llama()
    model.register_forward_pre_hook(never)
    refused(f"perplexity: .*{message}", ra.perplexity, model, given, **more)


@pytest.mark.parametrize("model_type", ["bert", "big_bird", "xmod", "xlm", "xlnet"])
def test_models_that_see_what_they_are_to_predict_are_refused(model_type):
    setting = {"xlnet": {}, "xlm": {"causal": False}}.get(model_type, {"is_decoder": False})
    model, ids = tiny_model(model_type, "eager", **setting), row(0, 12)
    changed = ids.clone()
    changed[0, 6:] = 7
    with torch.no_grad():
        assert not torch.allclose(model(input_ids=ids).logits[:, 0], model(input_ids=changed).logits[:, 0], rtol=1e-3)
    for function, batch in ((ra.perplexity, ids), (ra.distillation_loss, {"input_ids": ids, "labels": ids})):
        refused("attends to those behind it", function, model, batch)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("model_type", sorted({*CAUSAL_TYPES} - {"xlnet", *NOT_BUILT}))
def test_no_causal_model_is_taken_for_an_encoder(model_type):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    check_predicts_next(model, "here")


def test_classifiers_and_masked_language_models_are_refused():
    for model_class in (LlamaForTokenClassification, LlamaForSequenceClassification):
        told = r"does not compute the loss of next tokens .its loss is"
        refused(told, ra.perplexity, model_class(LlamaConfig(**SIZES)), row(0, 12))
    masked = ModernBertForMaskedLM(ModernBertConfig(**SIZES, pad_token_id=0))
    refused("its loss is ForMaskedLM", ra.perplexity, masked, row(0, 12))


@pytest.mark.parametrize(("value", "ranks"), [(torch.nan, 2), (torch.inf, 1)])
def test_losses_that_are_not_finite_are_refused(rng, value, ranks):
    ids = torch.tensor([rng.randrange(3, VOCAB - 1) for _ in range(60)])
    ids[40] = VOCAB - 1
    models = [tiny_model("llama", "ring_dilated") for _ in range(ranks)]
    for model in models:
        with torch.no_grad():  # All tokens that see this one have no finite loss.
            model.get_input_embeddings().weight[VOCAB - 1] = value
    assert ra.perplexity(models[0], ids[:40]).tokens == 39

    def measure(ring):
        told = r"\d+ of \d+ losses of LlamaForCausalLM in torch\.float64 are infinite"
        refused(told, ra.perplexity, models[ring.rank], ids, ring=ring)

    run_simulated(measure, ranks)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "roberta", "marian"])
def test_rows_longer_than_a_table_of_positions_are_refused(model_type):
    """Whose error would be an index, on the rank that has the row's end."""
    model = tiny_model(model_type, "eager")
    places, too_many = 20, 200
    while too_many - places > 1:
        middle = (places + too_many) // 2
        try:
            with torch.no_grad():
                model(input_ids=row(0, middle))
            places = middle
        except (IndexError, RuntimeError):
            too_many = middle
    assert too_many < 200
    assert ra.perplexity(model, row(0, places)).tokens == places - 1
    told = f"learned positions for {places} tokens, and a row has {places + 1}"
    refused(told, ra.perplexity, model, row(0, places + 1))


def one_bad_rank(rank):
    ring, model = ra.Ring(), tiny_llama()
    for given, more, message in REFUSED:
        begin = "^perplexity: .*" if rank else "^rank 1 of the ring refused the call: perplexity: .*"
        refused(begin + message, ra.perplexity, model, given if rank else IDS, ring=ring, **(more if rank else {}))
    for given, more, message in (
        (IDS + rank, {}, "disagree on a checksum of input_ids"),
        (IDS[:, : 12 - rank], {}, r"disagree on the shape of input_ids: rank 0: \(1, 12\), rank 1: \(1, 11\)"),
        (IDS, {"attention_mask": (torch.arange(12) >= rank).long()[None]}, "disagree on a checksum of attention_mask"),
        (IDS, {"logits_at_once": 5 + rank}, "disagree on logits_at_once: rank 0: 5, rank 1: 6"),
    ):
        refused(message, ra.perplexity, model, given, ring=ring, **more)
    return ra.perplexity(model, IDS, ring=ring).nll


def test_what_one_rank_came_with_is_told_to_all(ranks):
    assert ranks.run(one_bad_rank, 2) == pytest.approx([own(tiny_llama(), IDS)] * 2, rel=EXACT)
