"""The exceptional model types, and the hybrid types that are computed; whoever reads them needs no torch or Transformers."""

from __future__ import annotations

#: The class of the mixers of each hybrid type that is computed: modules that pass a state (hybrids/mixers.py).
MIXERS = {
    "bailing_hybrid": ("BailingHybridDeltaAttention",),
    "bamba": ("BambaMixer",),
    "falcon_h1": ("FalconH1Mixer",),
    "glm5_next_text": ("Glm5NextTextLinearAttention",),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer",),
    "jamba": ("JambaMambaMixer",),
    "kimi_linear": ("KimiLinearDeltaAttention",),
    "lfm2": ("Lfm2ShortConv",),
    "lfm2_moe": ("Lfm2MoeShortConv",),
    "lfm3": ("Lfm3ShortConv",),
    "minimax": ("MiniMaxLightningAttention",),
    "nemotron_h": ("NemotronHMamba2Mixer",),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet",),
    "qwen3_5_moe_text": ("Qwen3_5MoeGatedDeltaNet",),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet",),
    "qwen3_next": ("Qwen3NextGatedDeltaNet",),
    "qwen4_exp_text": ("Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextPLELayer"),
    "recurrent_gemma": ("RecurrentGemmaRecurrentBlock",),
    "zamba": ("ZambaMambaMixer",),
    "zamba2": ("Zamba2MambaMixer",),
}

#: Mixers that keep their state in themselves, and let padding into it.
STATES_INSIDE = ("RecurrentGemmaRecurrentBlock",)

#: The types of layers with mixers, as configs name them.
MIXER_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid")

#: Types whose layers choose keys at run time, by an indexer that is computed, and how configs name such layers.
INDEXED = (
    "axk2",
    "deepseek_v32",
    "dots3_note_text",
    "glm5_next_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl_text",
    "minimax_m3_vl_text",
    "mistral_large4_text",
    "qwen4_exp_text",
)
INDEXED_LAYERS = "indexed_attention", "minimax_m3_sparse"

INDEXER = "its indexer selects keys at run time, and no pattern can express that"

_RECURRENT = "all its layers are recurrent: it has no attention to shard"

#: Model types whose attention or positions depend on more than the interface is given, as running them showed.
BEYOND_THE_INTERFACE = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "xlstm"), _RECURRENT),
    "blt": "it attends from bytes to patches and back, which is cross-attention",
    "fnet": "it mixes all tokens by Fourier transforms, and has no attention",
    "zaya": "convolutions inside its attention mix queries and keys of several tokens, which shards cut apart",
    "git": "it lets image features see each other in both directions",
}

_NO_INTERFACE = "it does not call Transformers' attention interface"
_ALIBI = "it adds to its scores by distance (ALiBi)"

#: Types that keep the attention of Transformers, over a ring with the keys of a `RingCache`, and why they compute no pattern.
OWN_ATTENTION = {
    **dict.fromkeys(("falcon", "gpt_neox_japanese", "megatron-bert", "mvp"), _NO_INTERFACE),
    **dict.fromkeys(("rembert", "roformer", "trocr", "xglm"), _NO_INTERFACE),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    "doge": "it adds a learned mask of its own to the square mask",
    "deepseek_v4": "it attends to compressed keys of several tokens",
    "gpt_neo": _NO_INTERFACE,
}

#: Those of them that have modules, of these classes, which need whole rows over a ring, and not only their keys.
WHOLE_LAYERS = {
    "deepseek_v4": ("DeepseekV4Attention",),
    "gpt_neo": ("GPTNeoSelfAttention",),
}

_COUNTS = "it numbers its tokens by its cache and takes no position_ids"

#: Types that do so over a ring only.
OWN_ATTENTION_OVER_RINGS = {
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus"), _COUNTS
    ),
    "plbart": _COUNTS,
}

#: Model types that mix the tokens of a row outside of attention.
MIX_TOKENS = {
    "mobilebert": "it embeds each token together with its neighbours (trigram_input)",
    "esm": "it scales embeddings by the share of mask tokens in the row (token_dropout)",
}

#: Model types that are decoders, although their config has is_decoder=False.
DECODERS_ALL_THE_SAME = ("gpt_neox", "gpt_neox_japanese")

#: Model types whose layers attend to other values than they give to their cache, which a `PatternCache` cannot hold.
OTHER_VALUES = {
    "diffllama": "its layers attend twice, to two halves of the values",
}

#: Types that no `PatternCache` serves, with the reason.
OTHER_CACHES = {"dory": "its layers run several times, each time with other keys"}

#: Decoders that count positions by the mask, from its first token on. Other types count all tokens of a row.
COUNT_BY_MASK = ("opt",)
