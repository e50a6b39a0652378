"""Layers that choose their keys: as each document alone in Transformers, whatever the row, the slices and the ranks."""

import contextlib
import copy
import itertools
import pickle
import random
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_ring_attention as ra
from hf_ring_attention.compute import chosen
from hf_ring_attention.hf.layer import indexed
from hf_ring_attention.hf.model.types import INDEXED

from ..support.probe import BOUNDS, alone, batch, errors, logits_and_gradients, over_ring
from ..support.ranks import on_ranks
from ..support.tiny_models import CAUSAL_TYPES, SEEING_TYPES, VOCAB, tiny_config, tiny_model
from ..support.tolerance import distance, gradients_distance
from ..support.training import checkpointed_step
from .alike import refused

#: Transformers has the text models of three types only inside of models that see; an older release may lack some.
TYPES = [name for name in (*CAUSAL_TYPES, *SEEING_TYPES) if {name, f"{name}_text"} & {*INDEXED}]
TYPES = [name for name in TYPES if f"{name}_text" not in TYPES]
#: Their softmax and RoPE are float32, also in models of float64.
BOUND = BOUNDS[torch.float32]


def changes_of(model_type, rng):
    """Few keys to choose, fewer and more than documents have; shared choices; and heads that share keys."""
    if model_type == "minimax_m3_vl_text":
        return {"index_topk_blocks": rng.choice([1, 2, 3, 9]), "index_block_size": rng.choice([1, 2, 5])}
    if model_type == "qwen4_exp_text":
        pool = rng.choice([2, 3, 4])
        return {"indexer_compress_ratio": pool, "indexer_budget": pool * rng.choice([1, 2, 9])}
    changes = {"index_topk": rng.choice([1, 3, 8, 40])}
    if model_type == "glm5_next":  # it chooses pools
        pool = rng.choice([1, 3, 4])
        return {"index_kpool": pool, "index_topk": pool * rng.choice([1, 2, 9])}
    if model_type in ("glm_moe_dsa", "hy_v4", "hy_v4_vl"):
        layers = tiny_config(model_type).get_text_config().num_hidden_layers
        changes["indexer_types"] = ["full", *rng.choices(["full", "shared"], k=layers - 1)]
    return changes


def random_rows(rng):
    """Inputs and labels of documents: padded, or packed with padding around them."""
    length, rows = rng.randint(2, 30), rng.randint(1, 3)
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    mask = torch.ones_like(ids)
    packed = rng.random() < 0.5
    for row in range(rows):
        ends = sorted(rng.sample(range(length + 1), min(length + 1, rng.randint(2, 5) if packed else 2)))
        mask[row] = 0
        for number, (start, stop) in enumerate(itertools.pairwise(ends), 1):
            mask[row, start:stop] = number
    return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)


@contextlib.contextmanager
def slices_of(rng):
    """Slices of few queries, and either way to attend."""
    size, cost = rng.choice([1, 500, 4000, 1 << 26]), rng.choice([0, 32, 1 << 20])
    few = mock.patch.object(indexed, "SCORES_BYTES", size), mock.patch.object(chosen, "SLICE_BYTES_OF_CPUS", size)
    with few[0], few[1], mock.patch.object(chosen, "GATHERED_COST", cost):
        yield


def compare(seed):
    """A random case against each document alone, by Transformers' own attention."""
    rng = random.Random(seed)
    model_type = rng.choice(TYPES)
    changes, (inputs, labels) = changes_of(model_type, rng), random_rows(rng)
    eager = tiny_model(model_type, "eager", **changes)
    counted = {**inputs, "position_ids": positions_of(inputs)}
    expected = alone(eager, counted, labels)
    if (
        not inputs["attention_mask"].gt(1).any()
    ):  # Mistral Large 4 scales queries by positions, which it counts in rows.
        inputs = counted
    ranks = rng.choice([1, 1, 2, 3, 4])
    settings = {
        "layout": rng.choice(["zigzag", "contiguous", "documents"]),
        "transport": rng.choice(["ring", "collective"]),
    }
    with slices_of(rng):
        if ranks == 1:
            found = [logits_and_gradients(ra.patch_model(tiny_model(model_type, "eager", **changes)), inputs, labels)]
        else:
            make = lambda: tiny_model(model_type, "eager", **changes)  # noqa: E731
            found = on_ranks(lambda ring, model: over_ring(model, ring, inputs, labels), make, ranks, **settings)
    for answer in found:
        assert max(errors(answer, expected)) <= BOUND, (seed, model_type, changes, settings, ranks)


def positions_of(inputs):
    """Positions that count each document."""
    mask = inputs["attention_mask"]
    positions = torch.zeros_like(mask)
    for row, numbers in enumerate(mask):
        for number in numbers.unique():
            at = (numbers == number).nonzero()[:, 0]
            positions[row, at] = torch.arange(len(at))
    return positions


@pytest.mark.parametrize("seed", range(12))
def test_random_rows(seed):
    compare(seed)


@pytest.mark.slow
def test_500_random_rows():
    for seed in range(1000, 1500):
        compare(seed)


@torch.no_grad()
def test_pickled_models_and_embeddings():
    """Qwen4-Exp reads its tokens back from embeddings, also where a ring looks at what stands in a decoder."""
    ids = batch("plain")[0]["input_ids"]
    model = ra.patch_model(tiny_model("glm5_next", "eager"))
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits[:], model(ids).logits[:])
    eager = tiny_model("qwen4_exp_text", "eager")
    embeddings, expected = eager.get_input_embeddings()(ids), eager(ids).logits

    def work(ring, model):
        return distance(model(inputs_embeds=embeddings, use_cache=False).logits[:], expected)

    assert max(on_ranks(work, lambda: tiny_model("qwen4_exp_text", "eager"), 2)) <= BOUND


WAYS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model_type", TYPES)
def test_generation_is_that_of_transformers_for_each_row_alone(model_type):
    """With whole and static caches, and over a ring, where each rank computes whole rows."""
    eager, ids, mask = (
        tiny_model(model_type, "eager"),
        batch("left")[0]["input_ids"],
        torch.ones(2, 20, dtype=torch.int64),
    )
    mask[0, :7] = 0
    alone_ = [eager.generate(row[valid.bool()][None], **WAYS)[0, -6:] for row, valid in zip(ids, mask)]

    def check(model):
        for options in ({}, {"cache_implementation": "static"}):
            assert torch.equal(model.generate(ids, attention_mask=mask, **WAYS, **options)[:, -6:], torch.stack(alone_))
        return True

    check(ra.patch_model(tiny_model(model_type, "eager")))
    assert all(on_ranks(lambda ring, model: check(model), lambda: tiny_model(model_type, "eager"), 2))


def step_of_process(rank, model_type, inputs, labels, wrap):
    model = ra.patch_model(tiny_model(model_type, "eager"), ring=ra.Ring())
    return checkpointed_step(model, {**inputs, "labels": labels}, wrap)


@pytest.mark.parametrize(
    ("model_type", "wrap"), [("glm5_next", "ddp"), ("glm_moe_dsa", "fsdp2"), ("minimax_m3_vl_text", "ddp")]
)
def test_checkpointed_training_in_processes(ranks, model_type, wrap):
    inputs, labels = batch("packed")
    model = ra.patch_model(tiny_model(model_type, "eager"))
    loss, gradients = checkpointed_step(model, {**inputs, "labels": labels})
    for of_rank, mean in ranks.run(step_of_process, 2, model_type, inputs, labels, wrap):
        assert abs(of_rank - loss) <= BOUND * loss
        assert gradients_distance(mean, gradients) <= BOUND


def test_adapters_copies_and_other_implementations():
    model, (inputs, _) = ra.patch_model(tiny_model("deepseek_v32", "eager")), batch("packed")
    expected = model(**inputs).logits[:].detach()
    with torch.no_grad():
        for other in (copy.deepcopy(model), torch.compile(model, backend="eager")):
            assert distance(other(**inputs).logits[:], expected) == 0
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(target_modules=["q_b_proj", "kv_b_proj"], init_lora_weights=False)
    )
    gradients = logits_and_gradients(adapted, *batch("packed")).gradients
    assert all("lora" in name for name in gradients) and len(gradients) == 8
    stock = tiny_model("deepseek_v32", "sdpa")(**inputs).logits
    model.set_attn_implementation("sdpa")
    assert distance(model(**inputs).logits[:], stock) == 0


def test_other_layers_have_patterns_and_these_do_not():
    ids = batch("plain")[0]["input_ids"]
    make = lambda: tiny_model("minimax_m3_vl_text", "eager")  # noqa: E731
    expected = ra.patch_model(make(), "window:4+2")(ids).logits[:].detach()
    assert distance(ra.patch_model(make())(ids).logits[:], expected) > 1e-3
    for found in on_ranks(lambda ring, model: ra.patch_model(model, "window:4+2")(ids).logits[:].detach(), make, 2):
        assert distance(found, expected) <= BOUND
    said = "layers .* choose their keys at run time"
    refused(said, ra.patch_config, make().config, "window:4", layers=[1])
    refused(said, ra.patch_model, tiny_model("deepseek_v32", "eager"), "window:4")
    model = ra.patch_model(make())
    for call in (ra.PatternCache, ra.prefill, ra.calibrate):
        refused(
            "choose their keys at run time",
            call,
            model,
            *([ids] * (call is not ra.PatternCache)),
            error=NotImplementedError,
        )
    inside = torch.ones_like(ids)
    inside[0, 5] = 0
    refused("padding inside a document", model, ids, attention_mask=inside)
    layer = model.model.layers[1].self_attn
    refused("outside of its model", layer, torch.zeros(1, 3, 32), (torch.zeros(1, 3, 8),) * 2, None)
