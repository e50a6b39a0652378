"""A pass of a calibration agrees with dense attention, sharded too; and the form of a retrieval text."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import multiplicity_matrix
from hf_ring_attention.evaluation.calibration import passes
from hf_ring_attention.evaluation.calibration.passes import measure_text
from hf_ring_attention.evaluation.calibration.texts import CUE, NEEDLE, drawn_tokens, plain_text, retrieval_text
from tests.support.calibrations import MENU, model_of, random_texts
from tests.support.ranks import run_simulated
from tests.support.tiny_models import VOCAB
from tests.support.tolerance import assert_exact, distance, float64

#: How far products, which are kept in float32, may be apart: one rounding of each, relative to the largest.
OF_FLOAT32 = 2 * torch.finfo(torch.float32).eps


class DenseOracle:
    """Attention as matrices. Outputs keep their gradients, and it can compute the output under each pattern."""

    def __init__(self):
        self.layers = {}

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        group = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = query @ keys.mT * scaling

        def under(pattern):
            counts = multiplicity_matrix(pattern, query.shape[2], query.shape[1], key.shape[1], True)
            return (scores + counts.log().to(scores.dtype)).softmax(-1) @ values

        out = under(ra.Pattern.exact())
        out.retain_grad()
        self.layers[module.layer_idx] = out, under, key.shape[1]
        return out.transpose(1, 2), None


def dense_sums(model, ids, objective, menu):
    """The sums of d of each layer, and of products of d of all groups of heads."""
    oracle = DenseOracle()
    AttentionInterface.register("calibration_oracle", oracle)
    model.set_attn_implementation("calibration_oracle")
    objective(model(input_ids=ids[None]).logits[0]).backward()
    changes_of_layers = []
    for _, (out, under, kv_heads) in sorted(oracle.layers.items()):
        changes = [((under(one) - out) * out.grad)[0].sum(-1) for one in menu]  # [H, n] each
        d = torch.stack([x.unflatten(0, (kv_heads, -1)).sum(1) for x in changes], 1).detach()
        changes_of_layers.append(d)
    d = torch.stack(changes_of_layers)  # [layers, Hkv, P, n]
    return d.sum(-1), torch.einsum("lhpn,mgqn->lhpmgq", d, d).flatten(3, 4).flatten(0, 1)


def objective_of(text):
    """The loss whose gradient a first pass takes, written out."""

    def drawn(logits):
        logps = logits[:-1].log_softmax(-1)
        noise = [np.random.default_rng((text.seed, n)).standard_exponential(VOCAB) for n in range(len(logps))]
        tokens = (logps.detach().exp() / torch.tensor(np.array(noise))).argmax(-1)
        return -logps[torch.arange(len(tokens)), tokens].sum()

    def answers(logits):
        probs = logits[:-1].softmax(-1)[torch.arange(len(text.ids) - 1), text.ids[1:]]
        return ((1 - probs).log() - probs.log())[text.scored[1:]].sum()

    return answers if text.seed is None else drawn


def linear_of(found):
    """[layers, Hkv, P] of all layers."""
    return torch.stack([found.linear[layer] for layer in range(len(found.linear))])


@pytest.mark.parametrize("make", [plain_text, retrieval_text])
@pytest.mark.parametrize("world_size", [1, 2])
@patch.object(passes, "LOGITS_AT_ONCE", 16)
def test_a_pass_measures_what_dense_attention_says(make, world_size, rng):
    [ids] = random_texts(rng, 1, 72)
    text, menu = make(ids, rng.randrange(1000)), [ra.Pattern.parse(one) for one in MENU]

    def measure(ring):
        return measure_text(ra.patch_model(model_of(), "exact", ring), ring, text, menu)[0]

    with float64():
        linear, products = dense_sums(model_of(), text.ids, objective_of(text), menu)
        found_by_rank = [measure(ra.Ring.alone())] if world_size == 1 else run_simulated(measure, world_size)
    for found in found_by_rank:
        assert_exact(linear_of(found) * text.num_scored, linear)
        assert distance(found.products * text.num_scored, products) <= OF_FLOAT32


def test_sums_of_long_texts_have_the_products_of_all_their_tokens(rng):
    """With random signs, products of sums equal the products of tokens but for noise, on any number of ranks."""
    [ids] = random_texts(rng, 1, 200)
    text, menu = plain_text(ids, 0), [ra.Pattern.parse(one) for one in MENU]

    def measure(ring):
        return measure_text(ra.patch_model(model_of(), "exact", ring), ring, text, menu)[0]

    with float64():
        whole = measure(ra.Ring.alone())
        with patch.object(passes, "MOST_HELD", 60):
            alone = measure(ra.Ring.alone())
            found_by_rank = run_simulated(measure, 3)
    flat = whole.products.flatten(2).flatten(0, 1)
    sizes = flat.diagonal().sqrt()
    changes = sizes > 0  # "exact" changes nothing.
    noise = ((alone.products.view_as(flat) - flat) / (sizes[:, None] * sizes))[changes][:, changes]
    assert 0 < noise.square().mean().sqrt() < 2 / 60**0.5
    assert torch.equal(linear_of(alone), linear_of(whole))
    for found in found_by_rank:
        assert distance(found.products, alone.products) <= OF_FLOAT32


def test_a_second_pass_follows_the_divergence_from_exact_attention(rng):
    """Its sums of d are the slope of the divergence towards the output of each pattern, which finite steps show as well."""
    [ids] = random_texts(rng, 1, 40)
    text, ring, menu = plain_text(ids, 0), ra.Ring.alone(), [ra.Pattern.parse(one) for one in ("exact", "window:16+2")]
    model = ra.patch_model(model_of(), "window:4+1", ring)
    exact_model = ra.patch_model(model_of(), "exact", ring)
    _, exact = measure_text(exact_model, ring, text)
    with torch.no_grad():
        logps, expected = (m(input_ids=ids[None]).logits[0, :-1].log_softmax(-1) for m in (model, exact_model))
    divergence = float((expected.exp() * (expected - logps)).sum() / text.num_scored)
    found, own = measure_text(model, ring, text, menu, exact)[0], -logps.gather(1, ids[1:, None]).mean()
    for changes in (found, measure_text(model, ring, text, exact=exact)[0]):  # with a backward pass, and without
        assert [changes.divergence, changes.nll] == pytest.approx([divergence, float(own)], rel=1e-4)

    layer, head, number = rng.randrange(2), rng.randrange(2), rng.randrange(2)
    original = AttentionInterface()["ring_dilated"]

    def moved_by(step):
        """The divergence where one head's output has gone a step towards another pattern's."""

        def attend(module, query, key, value, mask, **kwargs):
            out, _ = original(module, query, key, value, mask, **kwargs)
            if module.layer_idx == layer:
                there = ra.ring_attention(query, key, value, pattern=menu[number], scale=kwargs["scaling"])
                heads = slice(head * out.shape[2] // 2, (head + 1) * out.shape[2] // 2)
                out[:, :, heads] += step * (there.transpose(1, 2) - out)[:, :, heads]
            return out, None

        AttentionInterface.register("ring_dilated", attend)
        try:
            return measure_text(model, ring, text, exact=exact)[0].divergence
        finally:
            AttentionInterface.register("ring_dilated", original)

    slope = (moved_by(0.02) - moved_by(-0.02)) / 0.04
    # Steps of this size show a slope that float32 does not drown, up to the curvature of third order.
    scale = float(found.linear[layer].abs().max())
    assert float(found.linear[layer][head, number]) == pytest.approx(slope, rel=0.02, abs=0.02 * scale)


def test_tokens_are_drawn_with_their_probabilities(rng):
    count, seed = 4_000, rng.randrange(1000)
    logits = torch.tensor([rng.gauss(0, 2) for _ in range(9)])
    drawn = drawn_tokens(logits.expand(count, -1), seed, range(count))
    probs = logits.double().softmax(-1)
    errors = (torch.bincount(drawn, minlength=9) - count * probs).abs() / (count * probs * (1 - probs)).sqrt()
    assert errors.max() < 6  # standard errors of a count
    assert torch.equal(drawn[100:], drawn_tokens(logits.expand(count - 100, -1), seed, range(100, count)))
    assert not torch.equal(drawn, drawn_tokens(logits.expand(count, -1), seed + 1, range(count)))


def test_a_rounding_hardly_moves_a_draw(rng):
    """Of 600, less than one is expected to move; of places in cumulated probabilities, more than fifteen would."""
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    logits, errors = (torch.randn(600, 5000, generator=generator) for _ in range(2))
    drawn, again = (drawn_tokens(x, 0, range(600)) for x in (logits, logits + 1e-3 * errors))
    assert (drawn != again).sum() <= 4


def test_a_pass_computes_layers_again_and_holds_none(rng):
    [ids] = random_texts(rng, 1, 64)
    model, calls = ra.patch_model(model_of(3), "exact", ra.Ring.alone()), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    measure_text(model, ra.Ring.alone(), plain_text(ids, 0), [ra.Pattern.parse(one) for one in MENU])
    assert len(calls) == 2 * 3


@pytest.mark.parametrize("length", [64, 100, 1000])
def test_a_retrieval_text_repeats_its_needles_at_the_end(length, rng):
    ids = torch.randperm(10 * length)[:length]
    text = retrieval_text(ids, rng.randrange(1000))
    count = max(1, length // 16 // NEEDLE)
    ends = text.ids[length - count * NEEDLE :].view(count, NEEDLE)
    rest = text.ids[: length - count * NEEDLE].tolist()
    assert len(text.ids) == length and text.num_scored == count * (NEEDLE - CUE)
    for needle, scored in zip(ends.tolist(), text.scored[length - count * NEEDLE :].view(count, NEEDLE)):
        assert any(rest[i : i + NEEDLE] == needle for i in range(len(rest)))
        assert scored.tolist() == [False] * CUE + [True] * (NEEDLE - CUE)
