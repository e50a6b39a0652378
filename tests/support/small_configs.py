"""Small configs, and tiny models of them with the same large weights at every call.

A config has small numbers in place of the large ones (`_SIZES`), and as few layers as show every kind of layer (`_PER_LAYER`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

# The sizes of all models, for a test to refer to.
VOCAB, POSITIONS, WINDOW = 97, 128, 6
WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 2, 4, 2, 8
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH = 4, 2, 16

# The values that attributes get in every config, unless the default is None.
_SIZES = {
    name: size
    for size, names in (
        (VOCAB, "vocab_size"),
        (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
        (POSITIONS, "max_target_positions max_source_positions position_bias_max_distance rel_extent"),
        (WINDOW, "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size"),
        (WINDOW, "local_attention_window_len keep_window_size"),
        (2 * WINDOW, "local_attention"),  # both sides
        (WIDTH, "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim lru_width"),
        (WIDTH // 2, "embedding_size input_embedding_size output_embedding_size"),
        (INNER, "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim ffn_hidden_size"),
        (INNER, "decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff mlp_dim mamba_d_ssm"),
        (LAYERS, "num_hidden_layers num_layers n_layer n_layers num_blocks num_layers_per_stack"),
        (LAYERS, "decoder_layers encoder_layers num_decoder_layers num_encoder_layers"),
        (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
        (HEADS, "decoder_attention_heads encoder_attention_heads linear_num_heads linear_num_value_heads"),
        (HEADS, "num_decoder_attention_heads num_encoder_attention_heads"),
        (KV_HEADS, "num_kv_heads num_query_groups kv_n_heads swa_num_key_value_heads linear_num_key_heads"),
        (HEAD_DIM, "swa_head_dim d_head dim_head kv_channels query_pre_attn_scalar linear_head_dim"),
        (HEAD_DIM, "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim index_head_dim"),
        # Latent attention, with values narrower than the keys.
        (8, "kv_lora_rank q_lora_rank o_lora_rank qk_nope_head_dim"),
        (6, "v_head_dim"),
        (4, "qk_rope_head_dim rotary_dim"),
        # Selected keys: so few that most are left out.
        (8, "index_topk"),
        (4, "index_block_size"),
        (2, "index_n_heads index_topk_blocks"),
        (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (EXPERTS_PER_TOKEN, "num_experts_per_tok num_experts_per_token moe_k moe_topk zero_expert_num"),
        (EXPERT_WIDTH, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
        (EXPERT_WIDTH, "moe_shared_expert_intermediate_size shared_experts_intermediate_size"),
        (EXPERT_WIDTH, "expert_ffn_hidden_size router_hidden_size"),
        (1, "n_group topk_group num_expert_group n_shared_experts first_k_dense_replace"),
        # State space layers.
        (8, "mamba_d_state ssm_state_size state_size mamba_n_heads mamba_num_heads mamba_chunk_size chunk_size"),
        (4, "mamba_dt_rank time_step_rank"),
        (1, "n_groups mamba_n_groups mamba_ngroups"),
        # Types that are encoders by default become decoders; no decoder attends to another model.
        (True, "is_decoder"),
        (False, "add_cross_attention"),
    )
    for name in names.split()
}
# Attributes that get these values even if the default is None.
_TINY_HEADS = {"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
# Configs get these tokens.
_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# These attributes are lists with an entry for each layer.
_PER_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "no_rope_layers", "layer_rope_theta",
)  # fmt: skip


def tiny(default: PretrainedConfig, changes: dict[str, Any]) -> PretrainedConfig:
    """Returns a config like the default one with small numbers, down to its sub-configs; `changes` are nested likewise."""
    values = default.to_dict()
    settings: dict[str, Any] = {name: size for name, size in _SIZES.items() if values.get(name) is not None}
    settings |= {name: size for name, size in _TINY_HEADS.items() if name in values}
    if "kv_lora_rank" in values:  # latent attention: a key head for each query head
        settings |= {"num_key_value_heads": HEADS, "head_dim": settings["qk_rope_head_dim"]}
    settings |= {name: 0.0 for name, value in values.items() if "drop" in name and isinstance(value, float)}
    settings |= _few_layers(values, settings) | _SPECIAL_TOKENS
    for name in default.sub_configs:
        if getattr(default, name) is not None:
            changes = {**changes, name: tiny(getattr(default, name), changes.get(name, {}))}
    return type(default)(**{**settings, **changes})


def _few_layers(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the lists of `_PER_LAYER` for only the layers that show something new, and the number of these layers."""
    lists = {key: values[key] for key in _PER_LAYER if isinstance(values.get(key), list)}
    layers: list[int] = []
    shown: set[tuple[str, Any]] = set()
    for layer in range(len(next(iter(lists.values()), []))):
        kinds = {(key, entries[layer]) for key, entries in lists.items()}
        if not kinds <= shown:
            layers.append(layer)
            shown |= kinds
    if len(layers) < LAYERS:
        layers = list(range(LAYERS))
    counts = dict.fromkeys({"num_hidden_layers", "n_layer", "n_layers", "num_layers"} & settings.keys(), len(layers))
    return {**counts, **{key: [entries[layer] for layer in layers] for key, entries in lists.items()}}


def model_with_large_weights(config: PretrainedConfig, attn_implementation: str) -> PreTrainedModel:
    """Returns a model of a tiny config in evaluation mode, whose weights are so large that a wrong key shows."""
    kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(
            config,
            attn_implementation=attn_implementation,
            dtype=torch.get_default_dtype(),
            experts_implementation="eager",  # torch's grouped products of matrices take no float64
        )
    model.to(torch.get_default_dtype())  # torch.FloatTensor is of float32 in any case
    draw(model)
    return model.eval()


def draw(model: PreTrainedModel, seed: int = 5) -> None:
    """Draws large weights, and adds noise to all vectors, since some are zero at first (biases, attention sinks)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner, _, kind = name.rpartition(".")
            module = model.get_submodule(owner)
            scales_a_norm = "Norm" in type(module).__name__ and kind == "weight"
            if scales_a_norm or not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if isinstance(module, torch.nn.Embedding):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() > 1:
                inputs = parameter.shape[0 if isinstance(module, Conv1D) else -1]
                parameter.copy_(1.5 * noise / inputs**0.5)
            else:
                parameter.add_(0.5 * noise)
