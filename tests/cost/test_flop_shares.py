"""What patterns cost a model counts all its layers, those with windows of their own too."""

import pytest

import hf_ring_attention as ra
from hf_ring_attention.cost.models import attention_of_model
from hf_ring_attention.evaluation.calibration.result import load_pattern
from tests.support.checkpoints import save_calibration
from tests.support.tiny_models import tiny_model


def test_windows_of_the_model_count_as_such(tmp_path):
    config = tiny_model("gemma3_text", "ring_dilated").config
    full = [n for n, kind in enumerate(config.layer_types) if kind == "full_attention"]
    layers, tokens = config.num_hidden_layers, 200
    assert 0 < len(full) < layers and config.sliding_window < tokens
    heads = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
    own = ra.Pattern.parse(f"window:{config.sliding_window}").flop_share(tokens, **heads)
    for text in ("exact", "window:5+1", save_calibration(tmp_path / "chosen.json", dict.fromkeys(full, "window:9+2"))):
        pattern = load_pattern(text)
        of_full = ra.Pattern.parse("window:9+2") if text.endswith(".json") else pattern
        expected = (len(full) * of_full.flop_share(tokens, **heads) + (layers - len(full)) * own) / layers
        assert attention_of_model(config, "tiny", pattern).flop_share(tokens) == pytest.approx(expected)
