"""The loss in slices is the model's own, its gradients too; and bad batches are refused."""

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

import hf_ring_attention as ra
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.training import SIZES, documents, tiny_llama


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
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert last.shape[1] == 1
        assert theirs.keys() == gradients.keys()
        largest = max(float(x.abs().max()) for x in gradients.values())
        for name, gradient in gradients.items():
            assert float((theirs[name] - gradient).abs().max()) <= 1e-5 * largest, name
    with torch.no_grad(), ra.sliced_loss(model, 10):
        torch.testing.assert_close(model(**inputs).loss, expected, rtol=1e-6, atol=0)


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
    assert not model.lm_head._forward_pre_hooks and "_loss_function" not in vars(model)


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
        assert float(model(**ids).loss.detach()) == pytest.approx(expected, rel=1e-6)
    report = ra.perplexity(ra.patch_model(model), ids["input_ids"], attention_mask=ids["attention_mask"])
    assert report.nll / report.tokens == pytest.approx(expected, rel=1e-5)


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
    torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss, rtol=1e-6, atol=0)
