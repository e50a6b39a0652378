"""The loss in slices is the model's own, its gradients too; and bad batches are refused."""

import copy
import functools
import threading

import pytest
import torch
from transformers import BartConfig, BartForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import hf_ring_attention as ra
from hf_ring_attention.hf.heads import LogitsNotFormed
from tests.support.ranks import run_ranks
from tests.support.threads import in_threads
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import EXACT, assert_exact, float64
from tests.support.training import SIZES, documents, tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")


def loss_and_gradients(model, inputs, at_once):
    model.zero_grad()
    with ra.sliced_loss(model, at_once):
        output = model(**inputs)
        loss = output.loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, output.logits


# Plain heads, with a bias, scaled, capped, and a head of several layers.
@pytest.mark.parametrize("model_type", ["llama", "phi", "cohere", "granite", "gemma2", "gpt2", "roberta"])
@pytest.mark.parametrize("num_items", [None, 50])
def test_slices_give_the_loss_of_the_model(model_type, num_items):
    model = tiny_model(model_type, "ring_dilated").train()
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (2, 37), generator=generator)
    labels = ids.masked_fill(torch.rand(2, 37, generator=generator) < 0.3, -100)
    inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
    if num_items:
        inputs["num_items_in_batch"] = torch.tensor(num_items)
    expected, gradients, logits = loss_and_gradients(model, inputs, 0)
    assert logits.shape[1] == 37
    for at_once in (1, 10, 1000):
        loss, theirs, last = loss_and_gradients(model, inputs, at_once)
        assert_exact(loss, expected)
        assert isinstance(last, LogitsNotFormed)
        assert theirs.keys() == gradients.keys()
        largest = max(float(x.abs().max()) for x in gradients.values())
        for name, gradient in gradients.items():
            assert float((theirs[name] - gradient).abs().max()) <= EXACT * largest, name
    with torch.no_grad(), ra.sliced_loss(model, 10):
        assert_exact(model(**inputs).loss, expected)


def test_logits_of_a_slice_are_all_that_exist():
    model = tiny_llama(vocab_size=5000)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[-2]))
    ids = torch.randint(1, 97, (1, 300))
    with ra.sliced_loss(model, 64):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert max(seen) == 60 and len(seen) > 10  # five equal slices


def test_the_model_is_as_it_was_afterwards():
    model = tiny_llama()
    ids = torch.randint(1, 97, (1, 30))
    before = model(input_ids=ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="own"), ra.sliced_loss(model, 4):
        raise RuntimeError("own")
    after = model(input_ids=ids, labels=ids)
    assert after.logits.shape[1] == 30 and after.loss == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in (model, model.lm_head))
    assert model.loss_function is ForCausalLMLoss


@pytest.mark.parametrize("tokens_at_once", [0, 5])
def test_padding_without_hidden_states_does_not_hide_a_scale(tokens_at_once):
    """The last tokens are padding whose embedding is 0, of which any head makes the same logits."""
    torch.manual_seed(0)
    config = GraniteConfig(**SIZES, pad_token_id=0, logits_scaling=8.0, attn_implementation="eager")
    model = GraniteForCausalLM(config).eval()
    rows = documents(3, 5, 20, seed=4)
    ids = ra.PaddingCollator()(rows)
    expected = float(model(**ids).loss.detach())
    with ra.sliced_loss(model, tokens_at_once):
        assert float(model(**ids).loss.detach()) == pytest.approx(expected, rel=EXACT)
    report = ra.perplexity(ra.patch_model(model), ids["input_ids"], attention_mask=ids["attention_mask"])
    assert report.nll / report.tokens == pytest.approx(expected, rel=EXACT)


def test_losses_that_are_no_numbers_stay_what_they_are():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    ids = torch.randint(1, 97, (1, 30))
    with ra.sliced_loss(model, 4):
        assert model(input_ids=ids, labels=ids).loss.isnan()


def test_a_head_of_another_kind_is_refused():
    model = tiny_llama()

    class Squared(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) ** 2

    model.lm_head = Squared(model.lm_head)
    model.get_output_embeddings = lambda: model.lm_head.inner
    ids = torch.randint(1, 97, (1, 30))
    with pytest.raises(NotImplementedError, match=r"a way of its own.*tokens_at_once=0"), ra.sliced_loss(model, 4):
        model(input_ids=ids, labels=ids)


def test_a_step_without_labels_has_no_loss():
    with pytest.raises(ValueError, match="every label is -100"):
        ra.count_tokens([{"shift_labels": torch.full((1, 5), -100)}])


def test_a_negative_slice_is_refused():
    with pytest.raises(ValueError, match="got -1"), ra.sliced_loss(tiny_llama(), -1):
        pass


def test_next_token_loss_is_the_mean_over_the_tokens_given():
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 40))
    shard = ra.shard_batch({"input_ids": ids, "labels": ids}, ra.Ring.alone())
    tokens = ra.count_tokens([shard])
    assert tokens == 2 * 39
    loss = ra.next_token_loss(model, shard, tokens, tokens_at_once=16)
    assert_exact(loss, model(input_ids=ids, labels=ids).loss)


# ---- what else runs beside it


def test_other_threads_see_the_model_as_it_is():
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    expected = model(input_ids=ids, labels=ids)
    seen = []

    def other():
        plain, labelled = model(input_ids=ids), model(input_ids=ids, labels=ids)
        seen.append((plain.logits, labelled.logits, labelled.loss))

    with ra.sliced_loss(model, 7):
        thread = threading.Thread(target=float64()(other))
        thread.start()
        thread.join()
    for logits in seen[0][:2]:
        assert torch.equal(logits, expected.logits) and logits.requires_grad
    assert torch.equal(seen[0][2], expected.loss)


def test_threads_compute_losses_of_one_model_each_in_its_own_way():
    """Some in slices, some not, some without labels; their contexts open and close beside each other."""
    model = tiny_llama()
    rows = [torch.randint(1, 97, (1, 20 + number)) for number in range(4)]
    expected = [model(input_ids=ids, labels=ids) for ids in rows]

    def work(number):
        ids, right = rows[number], expected[number]
        for turn in range(25):
            if number == 3:
                output = model(input_ids=ids, labels=ids)
                assert torch.equal(output.logits, right.logits)
            else:
                with ra.sliced_loss(model, 3 + number):
                    assert model(input_ids=ids).logits.shape[1] == ids.shape[1]
                    output = model(input_ids=ids, labels=ids)
                assert isinstance(output.logits, LogitsNotFormed)
            assert_exact(output.loss, right.loss, f"thread {number}, {turn}")

    in_threads(work, 4)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in (model, model.lm_head))


@pytest.mark.parametrize("where", ["inside", "afterwards", "in another thread"])
def test_backward_may_run_anywhere(where):
    """It forms the logits again, when the context may be closed, or open for another call."""
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    with ra.sliced_loss(model, 7):
        loss = model(input_ids=ids, labels=ids).loss
        if where == "inside":
            loss.backward()
        elif where == "in another thread":
            thread = threading.Thread(target=float64()(loss.backward))
            thread.start()
            thread.join()
    if where == "afterwards":
        loss.backward()
    for name, parameter in model.named_parameters():
        assert_exact(parameter.grad, expected[name])


def test_a_copy_made_inside_is_a_model_like_any_other():
    model = tiny_llama()
    ids = torch.randint(1, 97, (1, 30))
    expected = model(input_ids=ids, labels=ids).loss.detach()
    with ra.sliced_loss(model, 7):
        twin = copy.deepcopy(model)
    assert twin(input_ids=ids, labels=ids).logits.shape[1] == 30
    with ra.sliced_loss(twin, 7):
        assert_exact(twin(input_ids=ids, labels=ids).loss, expected)


def test_contexts_inside_each_other():
    model, other = tiny_llama(), tiny_llama(seed=3)
    ids = torch.randint(1, 97, (1, 30))
    with ra.sliced_loss(model, 7), ra.sliced_loss(other, 5):
        for each in (model, other):
            assert isinstance(each(input_ids=ids, labels=ids).logits, LogitsNotFormed)
        with ra.sliced_loss(model, 0):
            assert model(input_ids=ids, labels=ids).logits.shape[1] == 30
            assert isinstance(other(input_ids=ids, labels=ids).logits, LogitsNotFormed)
        with ra.sliced_loss(model, 3):
            assert isinstance(model(input_ids=ids, labels=ids).logits, LogitsNotFormed)
        assert isinstance(model(input_ids=ids, labels=ids).logits, LogitsNotFormed)


# ---- losses of another kind


def smoothed(logits, labels, vocab_size, **kwargs):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.5)


class WithOwnFunction(LlamaForCausalLM):
    loss_function = staticmethod(smoothed)


OWN_LOSSES = {
    "set": smoothed,
    "partial": functools.partial(ForCausalLMLoss, ignore_index=3),
    "class": None,
}


@pytest.mark.parametrize("kind", OWN_LOSSES)
def test_a_loss_function_of_the_user_is_never_replaced(kind):
    ids = torch.randint(1, 97, (2, 30))
    if kind == "class":
        torch.manual_seed(0)
        model = WithOwnFunction(LlamaConfig(**SIZES))
    else:
        model = tiny_llama()
        model.loss_function = OWN_LOSSES[kind]
    expected = model(input_ids=ids, labels=ids).loss
    shard = ra.shard_batch({"input_ids": ids, "labels": ids}, ra.Ring.alone())
    for at_once in (0, 7):
        with pytest.raises(ValueError, match=r"the loss_function of .* is .*overriding compute_loss"):
            ra.next_token_loss(model, shard, 58, tokens_at_once=at_once)
    with pytest.raises(ValueError, match=r"sliced_loss: the loss_function of"), ra.sliced_loss(model, 7):
        pass
    with ra.sliced_loss(model, 0):
        assert torch.equal(model(input_ids=ids, labels=ids).loss, expected)


def test_a_loss_function_that_is_set_inside_is_not_replaced_either():
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    with ra.sliced_loss(model, 7):
        model.loss_function = smoothed
        with pytest.raises((ValueError, NotImplementedError)):
            model(input_ids=ids, labels=ids)
    assert model.loss_function is smoothed


def test_a_loss_that_shifts_no_labels_is_refused():
    model = BartForCausalLM(BartConfig(
        vocab_size=97, d_model=32, decoder_layers=1, decoder_ffn_dim=64, decoder_attention_heads=4, is_decoder=True,
    ))  # fmt: skip
    ids = torch.randint(3, 97, (2, 30))
    shard = ra.shard_batch({"input_ids": ids, "labels": ids}, ra.Ring.alone())
    for at_once in (0, 7):
        with pytest.raises(ValueError, match="BartForCausalLM does not compute the loss of next tokens"):
            ra.next_token_loss(model, shard, 58, tokens_at_once=at_once)
    message = "BartForCausalLM does not compute the loss of next tokens"
    with pytest.raises(ValueError, match=message), ra.sliced_loss(model, 7):
        pass


class WithZLoss(LlamaForCausalLM):
    """As bamba does it."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + output.logits.logsumexp(-1).square().mean()
        return output


class WithTerm(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss += 0.5 * self.lm_head.weight.square().mean()
        return output


def test_a_term_of_the_logits_beside_the_loss_is_refused():
    ids = torch.randint(1, 97, (2, 30))
    model = WithZLoss(LlamaConfig(**SIZES))
    with ra.sliced_loss(model, 7), pytest.raises(NotImplementedError, match=r"a term of its logits.*tokens_at_once=0"):
        model(input_ids=ids, labels=ids)
    model = WithTerm(LlamaConfig(**SIZES))
    expected = model(input_ids=ids, labels=ids).loss
    with ra.sliced_loss(model, 7):
        assert_exact(model(input_ids=ids, labels=ids).loss, expected)


# ---- batches that no ring's loader made


def test_a_batch_without_shifted_labels_says_which_loader_makes_them():
    ids = torch.randint(1, 97, (2, 40))
    batch = {"input_ids": ids, "labels": ids}
    for call in (lambda: ra.count_tokens([batch]), lambda: ra.next_token_loss(tiny_llama(), batch, 78)):
        with pytest.raises(ValueError, match=r"no shift_labels, only \['input_ids', 'labels'\].*prepare_data_loader"):
            call()


def test_one_shard_counts_as_a_list_of_one():
    ids = torch.randint(1, 97, (2, 40))
    shard = ra.shard_batch({"input_ids": ids, "labels": ids}, ra.Ring.alone())
    assert ra.count_tokens(shard) == ra.count_tokens([shard]) == 78


def test_no_shards_are_refused():
    with pytest.raises(ValueError, match="got no shards"):
        ra.count_tokens([])


def counted(rank):
    ids = torch.randint(1, 97, (1, 40))
    shard = ra.shard_batch({"input_ids": ids, "labels": ids}, ra.Ring.alone())
    try:
        ra.count_tokens([] if rank else [shard])
    except ValueError as error:
        return str(error)


def test_shards_that_one_process_lacks_are_an_error_on_all():
    first, second = run_ranks(counted, 2)
    assert "1 other processes refused their shards" in first and "got no shards" in second
