"""Attention by its definition, in the precision of its inputs: what random batches are compared with.

Transformers' eager attention takes softmax in float32 whatever the scores are; this one does not. It gets the square
masks that eager attention gets, or weighs keys by the multiplicities of a pattern.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from hf_ring_attention.compute.reference import multiplicity_matrix

#: Of the attention implementation, and of the config's attribute that holds patterns by layer; None is for the others.
DENSE = "dense_oracle"


def dense_attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **kwargs
):
    """What Transformers calls: query [B, H, m, D], key and value [B, Hkv, n, D], attention_mask [B, 1, m, n] additive.

    Patterns apply to rows of one document without padding.
    """
    pattern = _pattern(module)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if pattern is not None:
        counts = multiplicity_matrix(pattern, key.shape[2], query.shape[1], key.shape[1], True)[:, -query.shape[2] :]
        attention_mask = counts.log().to(query.dtype)  # m e^s = e^(s + log m)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = scaling * query @ key.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    if s_aux is not None:
        column = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _pattern(module):
    """The pattern of a layer; else the pattern of all layers without a window."""
    patterns = getattr(module.config, DENSE, None) or {}
    if module.layer_idx in patterns:
        return patterns[module.layer_idx]
    return None if None not in patterns or windowed(module.config, module.layer_idx) else patterns[None]


def windowed(config, layer):
    """Whether a layer has a sliding window or chunks in the model; Moshi's config has a window that its masks ignore."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return kinds[layer] in ("sliding_attention", "chunked_attention")
    return getattr(config, "sliding_window", None) is not None and config.model_type != "moshi"


AttentionInterface.register(DENSE, dense_attention)
AttentionMaskInterface.register(DENSE, eager_mask)
