"""What config.json says of a model's attention, against Transformers' own reading of it."""

import argparse
import json

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig

import hf_ring_attention as ra
from hf_ring_attention.hf.hybrid_types import MIXERS
from hf_ring_attention.plan.branches import Segment, Window
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.tools.model_config import (
    attention_of_config,
    check_positions,
    model_attention,
    most_positions,
    read_config,
)


def written(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


SMALL = {"model_type": "llama", "num_attention_heads": 8, "hidden_size": 512, "num_hidden_layers": 6}
#: Encoders with a decoder name the heads of both, and Transformers' common names mean those of the encoder.
SUPPORTED = [
    model.model_type
    for model in ra.supported_models()
    if model.status == "supported" and model.ring and model.model_type in CONFIG_MAPPING
]


#: Default configs of hybrids that do not tell their layers, and one without a layer that attends.
UNTOLD = {"lfm2_moe": "does not tell which layers attend", "bamba": "does not tell which layers attend"}
UNTOLD |= {"granitemoehybrid": "no layer of .* attends: its layers are (linear_attention|mamba)"}
UNTOLD |= {"dory": "runs some of its layers 2 times"}
#: Their layers differ in the size of heads.
UNLIKE = {"gemma4_text", "gemma4_unified_text"}
#: Their layers follow no period, and every config.json of them has layer_types.
IRREGULAR = {"beam", "flint", "mimo_v2_flash"}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """By type: the folder of the saved default config, and its text config."""
    made = {}
    for model_type in SUPPORTED:
        config = CONFIG_MAPPING[model_type]()
        folder = tmp_path_factory.mktemp(model_type)
        config.save_pretrained(folder)
        made[model_type] = folder, config.get_text_config()
    assert len(made) > 70
    return made


def branches_of(text, count):
    """The window or the chunks of each layer, as Transformers' models choose it."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    made = {
        "sliding_attention": (Window, window),
        "chunked_attention": (Segment, getattr(text, "attention_chunk_size", 0)),
    }
    return [made[kind][0](made[kind][1]) if kind in made else None for kind in kinds]


def test_heads_are_those_that_transformers_reads(configs):
    wrong = {}
    for model_type, (folder, text) in configs.items():
        if text.model_type in UNLIKE:
            with pytest.raises(
                argparse.ArgumentTypeError,
                match=r"differ in (global_)?head_dim, and one kind of layer was expected; or, for",
            ):
                model_attention(str(folder))
            continue
        if text.model_type in UNTOLD:
            with pytest.raises(argparse.ArgumentTypeError, match=UNTOLD[text.model_type]):
                model_attention(str(folder))
            continue
        attention = model_attention(str(folder))
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or (1 if getattr(text, "multi_query", False) else heads)
        if hasattr(text, "attn_config"):
            kv_heads = text.attn_config.kv_n_heads
        head_dim = getattr(text, "head_dim", None) or getattr(text, "kv_channels", None) or text.hidden_size // heads
        if getattr(text, "qk_nope_head_dim", None):  # latent attention
            head_dim, kv_heads = text.qk_nope_head_dim + text.qk_rope_head_dim, heads
        read = attention.num_heads, attention.num_kv_heads, attention.head_dim
        if read != (heads, kv_heads, head_dim):
            wrong[model_type] = read, (heads, kv_heads, head_dim)
    assert not wrong


@pytest.mark.parametrize(
    ("config", "positions"), [({"n_positions": 9}, 9), ({"max_position_embeddings": 7}, 7), ({}, None)]
)
def test_rows_fit_the_positions_by_any_of_their_names(config, positions):
    assert most_positions(config) == most_positions({"text_config": config | {"x": 1}}) == positions
    check_positions(config, positions or 10**9)
    if positions:
        with pytest.raises(argparse.ArgumentTypeError, match=f"positions for {positions} tokens, and rows have 10"):
            check_positions(config, 10)


@pytest.mark.parametrize("with_layer_types", [True, False])
def test_windows_are_those_of_the_layers(with_layer_types, configs, tmp_path):
    wrong, sliding = [], 0
    for model_type, (folder, text) in configs.items():
        if (
            text.model_type in UNLIKE
            or text.model_type in UNTOLD
            or (text.model_type in MIXERS and not (with_layer_types and getattr(text, "layer_types", None)))
            or (model_type in IRREGULAR and not with_layer_types)
        ):
            continue
        saved = json.loads((folder / "config.json").read_text())
        if not with_layer_types:  # as files were before Transformers knew them
            for part in (saved, saved.get("text_config") or {}):
                part.pop("layer_types", None)
        attention = model_attention(written(tmp_path / "model", saved))
        assert text.model_type in MIXERS or attention.numbers == tuple(range(len(attention.layers)))
        branches = branches_of(text, len(attention.layers))
        if text.model_type in MIXERS and text.model_type != "falcon_h1":  # All layers of that one do both.
            branches = [branches[number] for number in attention.numbers]
        sliding += any(attention.sliding)
        if list(attention.layers) != [Pattern((branch,)) if branch else Pattern.exact() for branch in branches]:
            wrong.append(model_type)
    assert sliding > 15 and "llama4_text" in configs
    assert not wrong


def test_patterns_that_were_saved_are_found(tmp_path):
    config = ra.patch_config(CONFIG_MAPPING["mistral"](num_hidden_layers=3, sliding_window=64), "window:32+4")
    config = ra.patch_config(config, "pyramid:32,2", layers=[1])
    config.save_pretrained(tmp_path)
    attention = model_attention(str(tmp_path))
    assert [str(pattern) for pattern in attention.layers] == ["window:64", "pyramid:32,2", "window:64"]
    assert str(attention.base) == "window:32+4"
    assert attention.sliding == (True, False, True)
    assert str(model_attention(str(tmp_path), Pattern.parse("exact")).base) == "exact"


def test_a_pattern_is_of_the_layers_without_a_window(tmp_path):
    folder = written(
        tmp_path, {**SMALL, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 8}
    )
    attention = model_attention(folder, Pattern.parse("pyramid:32,2"))
    assert [str(pattern) for pattern in attention.layers] == ["window:8", "pyramid:32,2"] * 3


def test_latent_attention_has_wider_keys_than_values(tmp_path):
    latent = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": 2}
    attention = model_attention(written(tmp_path, {**SMALL, **latent}))
    assert (attention.head_dim, attention.value_dim, attention.num_kv_heads) == (192, 128, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"num_hidden_layers": 2},
            "has none of num_attention_heads, n_head, .*: add it; or, for attention alone, give --heads, --kv-heads",
        ),
        ({**SMALL, "ring_dilated": {"pattern": 3}}, "has a 'ring_dilated' that ra.patch_config did not write"),
        ([1], "an object was expected"),
        (
            {**SMALL, "num_hidden_layers": 10**12},
            "num_hidden_layers=1000000000000, and a whole number of at most 65536",
        ),
        (
            {**SMALL, "model_type": "falcon_h1", "num_hidden_layers": 10**12},
            "num_hidden_layers=1000000000000, and a wh",
        ),
        ({"text_config": {**SMALL, "num_hidden_layers": 10**12}}, "num_hidden_layers=1000000000000, and a whole"),
        (
            {**SMALL, "num_attention_heads": 10**9},
            "num_attention_heads=1000000000, and a whole number of at most 65536",
        ),
        ({**SMALL, "num_key_value_heads": float("inf")}, "num_key_value_heads=inf, and a whole number"),
        ({**SMALL, "num_key_value_heads": [8] * 6}, "differ in num_key_value_heads"),
        ({**SMALL, "head_dim": float("nan")}, "head_dim=nan, and a whole number of at most 2147483648"),
        ({**SMALL, "head_dim": "64"}, "head_dim='64', and a whole number"),
        ({**SMALL, "attn_config": {"kv_n_heads": -1}}, "kv_n_heads=-1, and a whole number"),
        ({**SMALL, "num_experts": 10**12}, "num_experts=1000000000000, and a whole number"),
        ({**SMALL, "ring_dilated": {"pattern": {"branches": [{"type": "window", "length": 2**63}]}}}, "did not write"),
        (
            {
                **SMALL,
                "model_type": "jamba",
                "attn_layer_period": 3,
                "attn_layer_offset": 1,
                "mamba_expand": float("nan"),
                "mamba_d_conv": 4,
                "mamba_d_state": 16,
            },
            "has a wrong size of the mixers of the hybrid type 'jamba'",
        ),
    ],
)
def test_a_config_that_says_too_little_is_refused(config, message, tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        model_attention(written(tmp_path, config))


def test_where_no_config_is_the_remedy_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(argparse.ArgumentTypeError, match=r"holds no model: there is no config\.json in it"):
        read_config(str(tmp_path))
    with pytest.raises(
        argparse.ArgumentTypeError, match="a folder or a hub id as 'owner/name' was expected, got the file"
    ):
        read_config(str(tmp_path / "file"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"does not give its config\.json: .*\. Name a folder with a config\.json$"
    ):
        read_config("nobody/nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(argparse.ArgumentTypeError, match="is no JSON"):
        read_config(str(tmp_path))


HYBRID = {**SMALL, "num_hidden_layers": 4}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
DELTA |= {"linear_conv_kernel_dim": 4}
MAMBA = {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_d_state": 16}
MAMBA_2 = {"mamba_n_heads": 16, "mamba_d_head": "auto", "mamba_n_groups": 1, **MAMBA}


@pytest.mark.parametrize(
    ("config", "attending", "mixing"),
    [
        ({"model_type": "qwen3_next", "full_attention_interval": 2, **DELTA}, (1, 3), (0, 2)),
        ({"model_type": "jamba", "attn_layer_period": 3, "attn_layer_offset": 1, **MAMBA}, (1,), (0, 2, 3)),
        ({"model_type": "bamba", "attn_layer_indices": [2], **MAMBA_2}, (2,), (0, 1, 3)),
        ({"model_type": "falcon_h1", **MAMBA_2}, (0, 1, 2, 3), (0, 1, 2, 3)),
        ({"model_type": "lfm2", "layer_types": None, "full_attn_idxs": [0], "conv_L_cache": 3}, (0,), (1, 2, 3)),
        ({"model_type": "zamba", "layers_block_type": ["mamba", "hybrid"] * 2, **MAMBA}, (1, 3), (0, 1, 2, 3)),
        ({"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"]}, (1,), (0,)),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "recurrent", "attention"]}, (2,), (0, 1, 3)),
    ],
)
def test_layers_that_attend_and_mixers_are_counted_apart(config, attending, mixing, tmp_path):
    """By the names that the configs of each type have, also before Transformers knew layer_types."""
    attention = model_attention(written(tmp_path, {**HYBRID, **config}))
    assert attention.numbers == attending
    assert attention.mixers is not None and attention.mixers.layers == mixing
    assert (attention.mixers.numbers is None) == (config["model_type"] in ("minimax", "recurrent_gemma"))


def test_letters_of_layers_are_read(tmp_path):
    sizes = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 4, "n_groups": 2, "conv_kernel": 4}
    config = {**SMALL, **sizes, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E"}
    attention = model_attention(written(tmp_path, config))
    assert (attention.numbers, attention.mixers.layers) == ((3,), (0, 2))
    assert attention.mixers.numbers.channels == 8 * 16 + 2 * 2 * 4


def test_a_hybrid_that_lacks_a_size_is_refused(tmp_path):
    config = {**HYBRID, "model_type": "qwen3_next", "full_attention_interval": 2}
    with pytest.raises(argparse.ArgumentTypeError, match="has no 'linear_num_value_heads', a size of the mixers"):
        model_attention(written(tmp_path, config))


def test_a_pattern_replaces_what_was_saved(tmp_path):
    config = ra.patch_config(ra.patch_config(LlamaConfig(num_hidden_layers=3), "window:8"), "window:4", layers=[1])
    whole = json.loads(config.to_json_string())
    assert [str(one) for one in attention_of_config(whole, "x").layers] == ["window:8", "window:4", "window:8"]
    assert {str(one) for one in attention_of_config(whole, "x", ra.Pattern.exact()).layers} == {"exact"}
