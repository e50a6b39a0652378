"""The attention that a config describes, against the attributes that Transformers' models read; and refusals."""

import json
from unittest.mock import Mock, patch

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import CONFIG_MAPPING, LlamaConfig, PretrainedConfig

import hf_ring_attention as ra
from hf_ring_attention.cli.loading import check_positions
from hf_ring_attention.cost.layers import explain_layers
from hf_ring_attention.cost.models import attention_of_model, config_of, load_config
from hf_ring_attention.evaluation.calibration.result import load_pattern
from hf_ring_attention.hf.model.types import MIXERS
from hf_ring_attention.plan.branches import Segment, Window
from hf_ring_attention.plan.patterns import Pattern

from ..support.checkpoints import save_calibration
from ..support.refusals import refused
from ..support.releases import what_lacks
from ..support.tiny_models import tiny_config


def attention_in(folder, pattern=None):
    return attention_of_model(load_config(folder), folder, pattern)


SMALL = {"model_type": "llama", "num_attention_heads": 8, "hidden_size": 512, "num_hidden_layers": 6}
SUPPORTED = [x.model_type for x in ra.supported_models() if x.ring and x.model_type in CONFIG_MAPPING]
#: Types whose default configs are refused: hybrids that do not name their layers, and layers that differ or run twice.
REFUSED = {
    "bamba": "no layer of .* attends",
    "granitemoehybrid": "no layer of .* attends",
    "lfm2_moe": "needs layer_types",
    "dory": r"runs some layers 2 times",
    "mimo_v2_flash": "differ in num_key_value_heads: expected one",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), r"differ in (global_)?head_dim: expected one"),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), "differ in num_attention_heads, "),
    "qwen4_exp_text": "needs indexer_budget of at least 1, got None",
}


def branches_of(text):
    """The window or the chunks of each layer that attends, as Transformers' models choose them."""
    window = getattr(text, "sliding_window", None)
    usual = ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or usual
    made = {"sliding_attention": (Window, window)}
    made["chunked_attention"] = Segment, getattr(text, "attention_chunk_size", 0)
    mixing = {"linear_attention", "mamba", "conv", "mlp", "moe"}
    return [made[kind][0](made[kind][1]) if kind in made else None for kind in kinds if kind not in mixing]


def test_heads_and_windows_are_those_that_transformers_reads(tmp_path):
    wrong = {}
    assert len(SUPPORTED) > 70
    for model_type in (known for known in SUPPORTED if not what_lacks(known)):
        config = CONFIG_MAPPING[model_type]()
        config.save_pretrained(tmp_path / model_type)
        text = config.get_text_config(decoder=True)
        if message := REFUSED.get(model_type) or REFUSED.get(text.model_type):
            refused(message, attention_in, str(tmp_path / model_type))
            continue
        attention = attention_in(str(tmp_path / model_type))
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or (1 if getattr(text, "multi_query", False) else heads)
        if hasattr(text, "attn_config"):
            kv_heads = text.attn_config.kv_n_heads
        head_dim = getattr(text, "head_dim", None) or getattr(text, "kv_channels", None) or text.hidden_size // heads
        if getattr(text, "qk_nope_head_dim", None):  # Latent attention expands its keys.
            head_dim, kv_heads = text.qk_nope_head_dim + text.qk_rope_head_dim, heads
        read = attention.num_heads, attention.num_kv_heads, attention.head_dim
        # Moshi's layers ignore the window of its config.
        branches = [None] * len(attention.layers) if text.model_type == "moshi" else branches_of(text)
        patterns = [Pattern((x,)) if x else Pattern.exact() for x in branches]
        if read != (heads, kv_heads, head_dim) or list(attention.layers) != patterns:
            wrong[model_type] = read, (heads, kv_heads, head_dim)
        assert text.model_type in MIXERS or attention.numbers == tuple(range(text.num_hidden_layers))
    assert not wrong


@pytest.mark.parametrize("make", [CONFIG_MAPPING["gpt2"], LlamaConfig])
def test_rows_fit_the_positions_by_any_of_their_names(make):
    config = make(max_position_embeddings=7)
    check_positions(config, 7)
    with pytest.raises(ValueError, match="positions for 7 tokens, and rows have 10"):
        check_positions(config, 10)


def test_patterns_that_were_saved_are_found(tmp_path):
    config = ra.patch_config(CONFIG_MAPPING["mistral"](num_hidden_layers=3, sliding_window=64), "window:32+4")
    config = ra.patch_config(config, "pyramid:32,2", layers=[1])
    config.save_pretrained(tmp_path)
    attention = attention_in(str(tmp_path))
    assert [str(pattern) for pattern in attention.layers] == ["window:64", "pyramid:32,2", "window:64"]
    assert str(attention.base) == "window:32+4"
    assert attention_of_model(config_of(config.to_dict()), "x") == attention_of_model(config, "x")
    assert str(attention_in(str(tmp_path), Pattern.exact()).base) == "exact"


def test_decoders_that_gather_over_rings_only():
    """On one device, BART's decoder takes patterns and a `PatternCache`."""
    config = tiny_config("bart", is_decoder=True, is_encoder_decoder=False)
    attention = attention_of_model(config, "bart", "window:4")
    (cache,) = (size for _, size in attention.caches(64, 1, 2).values())
    assert cache.kept < cache.whole
    assert str(explain_layers(attention, seq_len=64, ring_size=1).calls[0][1].pattern) == "window:4"
    refused("takes no pattern over a ring", explain_layers, attention, seq_len=64, ring_size=2)
    over_ring = explain_layers(attention_of_model(config, "bart"), seq_len=64, ring_size=2)
    assert over_ring.base.layout.kind == "contiguous" and over_ring.calls[0][1].decision.choice == "gathered"
    refused("scores grow with the square of the row", ra.estimate, config, 64, devices=2)


def test_flop_shares_count_windows_of_the_model(tmp_path):
    config = tiny_config("gemma3_text")
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


def test_latent_attention_has_wider_keys_than_values():
    attention = attention_of_model(config_of({**SMALL, "model_type": "deepseek_v3", "num_key_value_heads": 8}), "x")
    assert (attention.head_dim, attention.value_dim, attention.num_kv_heads) == (192, 128, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SMALL, "ring_dilated": {"pattern": 3}}, "config.ring_dilated must be as ra.patch_config"),
        ([1], "cannot be read"),
        ({"num_hidden_layers": 2}, "cannot be read: Unrecognized model"),
        ({**SMALL, "model_type": "nothing"}, "cannot be read: .*`nothing`"),
        ({**SMALL, "num_hidden_layers": 10**12}, "cannot be read: num_hidden_layers=1000000000000 is more than 65536"),
        ({"model_type": "gemma3", "text_config": {**SMALL, "num_hidden_layers": 10**12}}, "is more than 65536"),
        ({**SMALL, "num_attention_heads": 0}, "cannot be read|num_attention_heads of at least 1, got 0"),
        ({**SMALL, "num_key_value_heads": float("inf")}, "num_key_value_heads=inf is more than"),
        ({**SMALL, "num_key_value_heads": [8] * 6}, "cannot be read|differ in num_key_value_heads"),
        ({**SMALL, "head_dim": "64"}, "cannot be read"),
        (None, r"has no config\.json: name the folder of a model"),
    ],
    ids=str,
)
def test_a_config_that_describes_no_model_is_refused_in_few_words(config, message, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(message, attention_in, str(tmp_path))
    assert "patch_config" in message or config is None or len(error.split()) <= 30


def test_a_file_that_is_no_config_and_a_dict_of_no_type_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    refused("cannot be read", load_config, str(tmp_path / "file"))
    refused("knows no model_type 'nothing': set", config_of, {"model_type": "nothing"})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RepositoryNotFoundError, r"the hub gives no config\.json of that name: name another one"),
        (GatedRepoError, "the hub gives this model to accounts that may read it: hf auth login"),
        (None, "the hub was not reached, .*: connect, or name a folder"),  # as Transformers finds it offline
    ],
)
def test_a_wrong_name_and_a_hub_that_is_not_reached_are_two_errors(answer, message):
    failing = OSError("a text")
    failing.__cause__ = answer and answer("no", response=Mock())
    offline = patch("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with patch.object(PretrainedConfig, "get_config_dict", side_effect=failing) if answer else offline:
        refused(f"no folder 'nobody/nothing', and {message}", load_config, "nobody/nothing")


HYBRID = {**SMALL, "num_hidden_layers": 4}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
DELTA |= {"linear_conv_kernel_dim": 4}
LETTERS = {"hybrid_override_pattern": "M-M*E", "num_hidden_layers": 5, "mamba_num_heads": 8, "mamba_head_dim": 16}


@pytest.mark.parametrize(
    ("config", "attending", "mixing"),
    [
        ({"model_type": "qwen3_next", "full_attention_interval": 2, **DELTA}, (1, 3), (0, 2)),
        ({"model_type": "jamba", "attn_layer_period": 3, "attn_layer_offset": 1}, (1,), (0, 2, 3)),
        ({"model_type": "bamba", "attn_layer_indices": [2], "mamba_n_heads": 16}, (2,), (0, 1, 3)),
        ({"model_type": "nemotron_h", **LETTERS}, (3,), (0, 2)),
        ({"model_type": "falcon_h1"}, (0, 1, 2, 3), (0, 1, 2, 3)),
        ({"model_type": "lfm2", "full_attn_idxs": [0]}, (0,), (1, 2, 3)),
        ({"model_type": "zamba", "layers_block_type": ["mamba", "hybrid"] * 2}, (1, 3), (0, 1, 2, 3)),
        ({"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"] * 2}, (1, 3), (0, 2)),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "recurrent", "attention"]}, (2,), (0, 1, 3)),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else str(x),
)
def test_layers_that_attend_and_mixers_are_counted_apart(config, attending, mixing):
    attention = attention_of_model(config_of({**HYBRID, **config}), "x")
    assert attention.numbers == attending
    (mixers,) = attention.mixers
    assert mixers.layers == mixing
    assert (mixers.numbers is None) == (config["model_type"] in ("minimax", "recurrent_gemma"))
