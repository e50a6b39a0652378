"""Models that see images: as under eager attention, or refused with a reason."""

import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_ring_attention as ra
from hf_ring_attention.hf.forward_pass import CALL, RingCall
from hf_ring_attention.hf.model.wrappers import cache_argument, runner_of
from hf_ring_attention.hf.rows.cut import cut, rows_to_cut
from tests.hf.alike import assert_on_ranks, logits, refused
from tests.hf.test_whole_rows import check_over_ring
from tests.support.neighbours import PYRAMID, built, check, logits_of, on_two_ranks
from tests.support.probe import LOGITS, TOKENS, batch, distance, logits_and_gradients
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB, tiny, tiny_model

pytestmark = pytest.mark.usefixtures("calls")


IMAGE, IMAGE_START, IMAGE_END = 5, 6, 7
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
MARKS = {"vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END}
QWEN3_VISION = {
    "depth": 2, "patch_size": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
    "temporal_patch_size": 2,
}  # fmt: skip
QWEN2_VISION = {"depth": 2, "embed_dim": 32, "patch_size": 2}
GLM4V_VISION = {"depth": 2, "patch_size": 2, "image_size": 16, "out_hidden_size": 32}
GEMMA3 = {"mm_tokens_per_image": 4, "boi_token_index": IMAGE_START, "eoi_token_index": IMAGE_END}
#: What makes the vision tower tiny, the tokens of an image, and the shape of its pixels.
SEEING = {
    "llava": ({"vision_config": {"image_size": 12, "patch_size": 4}}, 9, (1, 3, 12, 12)),
    "qwen2_vl": ({"text_config": ROPE, "vision_config": QWEN2_VISION, **MARKS}, 4, (4 * 4, 3 * 2 * 2 * 2)),
    "qwen3_vl": ({"text_config": ROPE, "vision_config": QWEN3_VISION, **MARKS}, 4, (4 * 4, 3 * 2 * 2 * 2)),
    "glm4v": ({"text_config": ROPE, "vision_config": GLM4V_VISION}, 4, (4 * 4, 3 * 2 * 2 * 2)),
    "gemma3": ({"vision_config": {"image_size": 16, "patch_size": 4}, **GEMMA3}, 4, (1, 3, 16, 16)),
}
IMPLEMENTATIONS = {"text": {"text_config": "ring_dilated"}, "all": "ring_dilated", "patched": None}


def seeing(model_type, implementation="eager"):
    """None: patched."""
    changes = {**SEEING[model_type][0], "image_token_id": IMAGE}
    config = tiny(CONFIG_MAPPING[model_type](), changes)
    model = built(AutoModelForImageTextToText, config, implementation or "eager")
    return model if implementation else ra.patch_model(model)


def seen(model_type, images=1):
    """Inputs and labels of two rows, the second padded on the left, with so many images each."""
    _, length, pixels = SEEING[model_type]
    ids = torch.randint(8, VOCAB, (2, 12 + images * (length + 2)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for first in range(6, 6 + images * (length + 3), length + 3):
        ids[:, first], ids[:, first + 1 + length] = IMAGE_START, IMAGE_END
        ids[:, first + 1 : first + 1 + length] = IMAGE
    inputs = {"input_ids": ids, "attention_mask": mask}
    if images:
        inputs["pixel_values"] = torch.randn(2 * images * pixels[0], *pixels[1:])
        if "rope" in str(SEEING[model_type]):
            inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2 * images)
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        elif model_type == "gemma3":
            inputs["token_type_ids"] = (ids == IMAGE).long()
    return inputs, ids.masked_fill((mask == 0) | (ids == IMAGE), -100)


@pytest.mark.parametrize(
    ("model_type", "implementation"), [("llava", "patched"), ("qwen2_vl", "text"), ("qwen2_vl", "all")]
)
def test_images(calls, model_type, implementation):
    """The vision tower keeps its attention, or computes exact attention, whatever the text's pattern."""
    inputs, labels = seen(model_type)
    model = seeing(model_type, IMPLEMENTATIONS[implementation])
    expected = logits_and_gradients(seeing(model_type), inputs, labels)
    assert any("vision" in name or "visual" in name for name in expected[1])
    check(logits_and_gradients(model, inputs, labels), expected)
    assert len(calls) == (2 if implementation != "all" else 2 + 2 * 2)
    kept = {"text": "sdpa", "all": "ring_dilated", "patched": "eager"}[implementation]
    assert model.config.vision_config._attn_implementation == kept

    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **settings), seeing(model_type).generate(**inputs, **settings))

    ra.patch_config(model.config, PYRAMID)
    text = model.config.get_text_config()
    assert text.ring_dilated and not hasattr(model.config.vision_config, "ring_dilated")
    found = logits_of(model, inputs, labels)
    assert distance(found, expected[0]) > 1e-2
    assert distance(found, logits_of(ra.patch_model(seeing(model_type), PYRAMID), inputs, labels)) <= LOGITS


def test_a_seeing_model_is_saved_with_its_pattern(tmp_path):
    rows = seen("llava")
    model = ra.patch_model(seeing("llava"), PYRAMID)
    model.save_pretrained(tmp_path)
    for ways in ({}, *({"attn_implementation": IMPLEMENTATIONS[name]} for name in ("text", "all"))):
        again = AutoModelForImageTextToText.from_pretrained(tmp_path, **ways).eval()
        assert again.config.get_text_config()._attn_implementation == "ring_dilated"
        assert ways or again.config.vision_config._attn_implementation != "ring_dilated"
        assert distance(logits_of(again, *rows), logits_of(model, *rows)) <= LOGITS


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llava", "glm4v"])
def test_prefill_of_images_is_refused(model_type):
    """The remedy of the error is a `PatternCache` that a call with the images fills."""
    model, (inputs, _) = ra.patch_model(seeing(model_type), "window:4+2"), seen(model_type)
    first = {name: x if name == "pixel_values" else x[:1] for name, x in inputs.items() if name != "attention_mask"}
    first["pixel_values"] = inputs["pixel_values"][: len(inputs["pixel_values"]) // 2]
    said = r"input_ids hold tokens of images or sounds .*: call the model with them and cache=ra.PatternCache"
    refused(said, ra.prefill, model, first["input_ids"])
    more, cache = torch.arange(10, 13)[None], ra.PatternCache(model)
    model(**first, use_cache=True, **cache_argument(cache))
    found = model(more, use_cache=True, **cache_argument(cache)).logits
    whole = first | {"input_ids": torch.cat([first["input_ids"], more], 1)}
    whole |= {name: F.pad(x, (0, 3)) for name, x in first.items() if name == "mm_token_type_ids"}
    assert distance(found, model(**whole, use_cache=False).logits[:, -3:]) <= LOGITS
    text = torch.arange(10, 40)[None]
    assert ra.prefill(model, text).get_seq_length() == 30


@pytest.mark.parametrize(("model_type", "images"), [("qwen2_vl", 2), ("qwen3_vl", 0)])
def test_images_over_a_ring(model_type, images):
    inputs, labels = seen(model_type, images)

    def make():
        return ra.patch_model(seeing(model_type), "window:6+2")

    check_over_ring(make, lambda model: model(**inputs, labels=labels, use_cache=False), world_size=2)
    check_over_ring(make, lambda model: model(**inputs, use_cache=False), world_size=3, valid=inputs["attention_mask"])


def positions_of(ids):
    """Of a document with an image of 4 tokens: time, height and width [3, 1, n], which the image numbers by its grid."""
    first = int((ids == IMAGE).nonzero()[0, 1])
    grid = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]) + first
    before, after = (torch.arange(n).expand(3, -1) for n in (first, ids.shape[1] - first - 4))
    return torch.cat([before, grid, after + first + 2], 1)[:, None]


@pytest.mark.drawn
@pytest.mark.parametrize("masked", [True, False], ids=["mask of ones", "no mask"])
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_positions_in_time_height_and_width_that_restart_begin_a_document(model_type, masked):
    """Each document sees its image and nothing of its neighbours, on one process and on a ring."""
    inputs, _ = seen(model_type)
    kinds, pixels = inputs["mm_token_type_ids"], inputs["pixel_values"].split(SEEING[model_type][2][0])
    # The second and the third are parts of a row, with an image and without.
    spans = ((0, 0, 18), (1, 4, 16), (1, 16, 18))
    expected, positions = [], []
    for row, start, stop in spans:
        ids = inputs["input_ids"][row : row + 1, start:stop]
        image = {"pixel_values": pixels[row], "image_grid_thw": inputs["image_grid_thw"][:1]} if IMAGE in ids else {}
        types = {"mm_token_type_ids": kinds[row : row + 1, start:stop]} if image else {}
        expected.append(logits(seeing(model_type), ids, **image, **types))
        positions.append(positions_of(ids) if image else torch.arange(stop - start).expand(3, 1, -1))
    packed = {
        "ids": torch.cat([inputs["input_ids"][row, start:stop] for row, start, stop in spans])[None],
        "position_ids": torch.cat(positions, 2),
        "pixel_values": inputs["pixel_values"],
        "image_grid_thw": inputs["image_grid_thw"],
    }
    if masked:
        packed["attention_mask"] = torch.ones_like(packed["ids"])

    for ranks in (1, 2):
        assert_on_ranks(
            lambda ring, model: logits(model, **packed), lambda: seeing(model_type), torch.cat(expected, 1), ranks
        )


#: Of models whose images see themselves: the name of their token types, and the type of text.
TOKEN_TYPES = {
    "gemma3": ("token_type_ids", 0),
    "gemma4": ("mm_token_type_ids", 0),
    "gemma4_unified": ("mm_token_type_ids", 0),
    "hrm_text": ("token_type_ids", 0),
    "paligemma": ("token_type_ids", 1),
}


def of_type(model_type):
    """A tiny model of a type of `TOKEN_TYPES`, whose images see themselves."""
    if model_type == "paligemma":
        return built(AutoModelForImageTextToText, tiny(CONFIG_MAPPING[model_type](), {}))
    seeing = {"use_bidirectional_attention": "vision"} if "gemma4" in model_type else {}
    return tiny_model(model_type, "eager", **seeing)


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["left", "packed"])
@pytest.mark.parametrize("model_type", TOKEN_TYPES)
def test_token_types_of_text_change_nothing(model_type, kind):
    """Processors always return them, and TRL hands them on; in packed rows too."""
    name, of_text = TOKEN_TYPES[model_type]
    inputs, labels = batch(kind)
    make = functools.partial(of_type, model_type)
    expected = logits_and_gradients(make(), inputs, labels)
    inputs[name] = torch.full_like(labels, of_text)
    check(logits_and_gradients(ra.patch_model(make()), inputs, labels), expected)
    check(on_two_ranks(make, inputs, labels), expected)


def test_generation_with_token_types_of_text():
    """With the model's own cache, and with a sharded one."""
    inputs, _ = batch("left")
    inputs["token_type_ids"] = torch.zeros_like(inputs.pop("position_ids"))
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}

    def work(ring, model):
        cache = ra.prefill(model, inputs["input_ids"][:, :12], inputs["attention_mask"][:, :12])
        return [model.generate(**inputs, **ways, **settings) for ways in (cache_argument(cache), {})]

    assert_on_ranks(work, lambda: of_type("gemma3"), [of_type("gemma3").generate(**inputs, **settings)] * 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_whose_tokens_see_each_other_are_refused(calls, ranks):
    """On every rank; rows of text go on to be computed."""
    (inputs, labels), (with_images, _) = seen("gemma3", images=0), seen("gemma3")
    expected = logits_of(seeing("gemma3"), inputs, labels)

    def work(ring, model):
        assert distance(logits_of(model, inputs, labels), expected) <= LOGITS
        refused(r"Gemma3.*cannot express this mask .*use 'eager' or 'sdpa'", model, **with_images)
        return logits_of(model, inputs, labels)

    assert_on_ranks(work, lambda: seeing("gemma3"), expected, ranks)


def test_blocks_on_one_rank_of_rows_that_a_loader_cut_are_refused_by_all():
    inputs, _ = batch("plain")
    inputs["token_type_ids"] = (torch.arange(TOKENS) < 4).long().expand(2, -1)  # a prefix whose tokens see each other

    def work(ring, model):
        whole = rows_to_cut(runner_of(model), ring, inputs)
        part, _ = cut(runner_of(model), inputs, whole, ring)
        refused(r"HrmText.*cannot express this mask", model, **part, **{CALL: RingCall(whole)})
        return bool(part["token_type_ids"].any())

    assert sorted(on_ranks(work, lambda: tiny_model("hrm_text", "eager"), layout="contiguous")) == [False, True]
