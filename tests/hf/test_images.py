"""Models that see images: as under eager attention, or refused with a reason."""

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_ring_attention as ra
from tests.support.neighbours import PYRAMID, built, check, logits_of
from tests.support.probe import (
    LOGITS,
    batch,
    distance,
    logits_and_gradients,
)
from tests.support.ranks import run_simulated
from tests.support.tiny_models import tiny

pytestmark = pytest.mark.usefixtures("calls")


IMAGE, IMAGE_START, IMAGE_END = 5, 6, 7
#: What makes the vision tower tiny, the tokens of an image, and the shape of two images' pixels.
SEEING = {
    "llava": ({"vision_config": {"image_size": 12, "patch_size": 4}}, 9, (2, 3, 12, 12)),
    "qwen2_vl": (
        {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            "vision_config": {"depth": 2, "embed_dim": 32, "patch_size": 2},
            "vision_start_token_id": IMAGE_START,
            "vision_end_token_id": IMAGE_END,
        },
        4,
        (2 * 4 * 4, 3 * 2 * 2 * 2),
    ),
    "gemma3": (
        {
            "vision_config": {"image_size": 16, "patch_size": 4},
            "mm_tokens_per_image": 4,
            "boi_token_index": IMAGE_START,
            "eoi_token_index": IMAGE_END,
        },
        4,
        (2, 3, 16, 16),
    ),
}
IMPLEMENTATIONS = {"text": {"text_config": "ring_dilated"}, "all": "ring_dilated", "patched": None}


def seeing(model_type, implementation="eager"):
    """None: patched."""
    changes = {**SEEING[model_type][0], "image_token_id": IMAGE}
    config = tiny(CONFIG_MAPPING[model_type](), changes)
    model = built(AutoModelForImageTextToText, config, implementation or "eager")
    return model if implementation else ra.patch_model(model)


def seen(model_type, images=True):
    """Inputs and labels of two rows, the second padded on the left, with an image each."""
    _, length, pixels = SEEING[model_type]
    inputs, labels = batch("left")
    del inputs["position_ids"]
    ids = inputs["input_ids"].clamp_min(8)
    if images:
        ids[:, 8] = IMAGE_START
        ids[:, 9 : 9 + length] = IMAGE
        ids[:, 9 + length] = IMAGE_END
        inputs["pixel_values"] = torch.randn(pixels, generator=torch.Generator().manual_seed(2))
        if model_type == "qwen2_vl":
            inputs |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (ids == IMAGE).int()}
        elif model_type == "gemma3":
            inputs["token_type_ids"] = (ids == IMAGE).long()
    return {**inputs, "input_ids": ids}, labels


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_images(calls, model_type, implementation):
    """The vision tower keeps its own attention, or computes exact attention, whatever the text's pattern."""
    inputs, labels = seen(model_type)
    model = seeing(model_type, IMPLEMENTATIONS[implementation])
    expected = logits_and_gradients(seeing(model_type), inputs, labels)
    assert any("vision" in name or "visual" in name for name in expected[1])
    check(logits_and_gradients(model, inputs, labels), expected)
    assert len(calls) == (2 if implementation != "all" else {"llava": 2 + 2, "qwen2_vl": 2 + 2 * 2}[model_type])
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
    for implementation in (IMPLEMENTATIONS["text"], IMPLEMENTATIONS["all"]):
        again = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=implementation).eval()
        assert distance(logits_of(again, *rows), logits_of(model, *rows)) <= LOGITS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_images_whose_tokens_see_each_other_are_refused(calls, implementation):
    model = seeing("gemma3", IMPLEMENTATIONS[implementation])
    inputs, labels = seen("gemma3", images=False)
    assert distance(logits_of(model, inputs, labels), logits_of(seeing("gemma3"), inputs, labels)) <= LOGITS
    calls.clear()
    with pytest.raises(ValueError, match=r"Gemma3.*cannot express this mask .*use 'eager' or 'sdpa'"):
        model(**seen("gemma3")[0])
    assert not any("Gemma3" in type(layer).__name__ for layer in calls)
    assert distance(logits_of(model, inputs, labels), logits_of(seeing("gemma3"), inputs, labels)) <= LOGITS


def test_such_images_are_refused_on_every_rank_of_a_ring():
    models = [seeing("gemma3") for _ in range(2)]
    inputs, labels = seen("gemma3", images=False)
    expected = logits_of(seeing("gemma3"), inputs, labels)

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        with pytest.raises(ValueError, match=r"Gemma3.*cannot express this mask .*use 'eager' or 'sdpa'"):
            model(**seen("gemma3")[0])
        return logits_of(model, inputs, labels)

    for found in run_simulated(work, 2):
        assert distance(found, expected) <= LOGITS
