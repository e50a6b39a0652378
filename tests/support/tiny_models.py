"""A tiny model of every causal language model type of Transformers, with the same large weights at every call.

The config of a type is the default config of its class with small numbers; odd types need more
changes (`_CHANGES`).
"""

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.small_configs import *  # noqa: F403
from tests.support.small_configs import EXPERTS, HEADS, INNER, VOCAB, WIDTH, draw, model_with_large_weights, tiny

CAUSAL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

#: Types of models that see, whose text models choose their keys and have no causal class of their own.
SEEING_TYPES = tuple(x for x in ("glm5_next", "hy_v4_vl", "mistral_large4") if x in CONFIG_MAPPING)

# Types without a tiny model, and the reasons.
NOT_BUILT = {
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "attends to the keys and values of another model only",
    "gemma4_unified_assistant": "attends to the keys and values of another model only",
    "musicgen": "AutoModelForCausalLM hands its decoder the config of the whole model",
    "musicgen_melody": "AutoModelForCausalLM hands its decoder the config of the whole model",
    "reformer": "has no backward pass in evaluation mode, and its hashed attention is not causal",
}

_PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_DOTS3_NOTE = {
    "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8,
    "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 6,
}  # fmt: skip
_QWEN4_EXP = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
_N_GRAMS = {
    "ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 4,
    "ple_embed_dim": 16, "ple_conv_kernel_size": 3,
}  # fmt: skip
# Odd types need these changes besides, nested as their configs are. The default configs of some types lack kinds of layers that
# released models have.
_CHANGES = {
    "bamba": {"attn_layer_indices": [1]},  # The default lacks attention.
    "blt": {
        "encoder_hash_byte_group_size": [3], "encoder_hash_byte_group_vocab": VOCAB,
        "encoder_config": {"hidden_size_global": WIDTH}, "decoder_config": {"hidden_size_global": WIDTH},
    },
    "cohere_compass_text": {  # The default lacks a rotary embedding.
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {  # several compressed keys among a few tokens, not all of them selected
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "index_topk": 3,
    },
    "dory": {  # Its configs list attention and MLP as separate layers.
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2,
        "initializer_range": 1.0,  # It divides scales, which would make rounding errors 56 times as large.
    },
    "dots1": {
        "layer_types": ["sliding_attention", "full_attention"],
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "dots3_note": {
        "text_config": _DOTS3_NOTE,
        "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    },
    "dots3_note_text": _DOTS3_NOTE,
    "gemma3n_text": {
        **_PER_LAYER_INPUTS, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "num_kv_shared_layers": 2,  # the last layers take the keys of the first
    },
    "gemma4": {"text_config": {**_PER_LAYER_INPUTS, "global_head_dim": 16}},
    "gemma4_text": {**_PER_LAYER_INPUTS, "global_head_dim": 16},
    "gemma4_unified": {"text_config": {"global_head_dim": 16}},
    "gemma4_unified_text": {"global_head_dim": 16},
    "glm5_next": {
        "text_config": {"index_kpool": 4, "qk_rope_head_dim": 0, "layer_types": ["linear_attention", "indexed_attention"]},
        "vision_config": {"depth": 1, "out_hidden_size": WIDTH, "projection_intermediate_size": INNER},
    },
    "got_ocr2": {"vision_config": {"image_size": 32, "output_channels": 8}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},  # The default lacks attention.
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},  # It counts the layers of all cycles.
    "hy_v4_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},  # attention in the second of two layers
    "laguna": {"layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "phi4_multimodal": {
        "audio_config": dict.fromkeys(
            ("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), WIDTH
        ),
    },
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": {**_QWEN4_EXP, **_N_GRAMS},
    "recurrent_gemma": {"num_hidden_layers": 3},  # the third has attention
    "roc_bert": {
        "pronunciation_vocab_size": VOCAB, "pronunciation_embed_dim": 8, "shape_vocab_size": VOCAB, "shape_embed_dim": 8,
    },
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    # zamba needs two hybrid layers, which share weights.
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(model_type, **changes):
    """Returns the config of a tiny model of the type, with changes to it, or to its text config if it has one."""
    default = CONFIG_MAPPING[model_type]()
    own = _CHANGES.get(model_type, {})
    if default.get_text_config() is default:
        return tiny(default, {**own, **changes})
    return tiny(default, {**own, "text_config": {**own.get("text_config", {}), **changes}})


def tiny_model(model_type, attn_implementation, **changes):
    """Returns the model of `tiny_config`, in evaluation mode and the default dtype; a config always has the same weights.

    The weights are so large that attention is far from uniform; a wrong key then shows. Norms keep their scales.
    """
    return model_with_large_weights(tiny_config(model_type, **changes), attn_implementation)


def with_large_weights(model):
    """The model with large weights, as `tiny_model` has them."""
    draw(model)
    return model
