"""Memory that grows with the sequence: saved by the forward pass, and used by a layer's backward pass and by the loss.

The formulas follow what autograd saves for the operations of Transformers' layers (arXiv 2205.05198, section 4, counts another
model the same way). A norm saves its input in float32, the normalized rows and its output. Attention saves queries, keys,
values, output and log-sum-exp. A gated MLP saves its two projections, the activated one, and the product. Mixers of hybrids are
not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hf.loss_bytes import BYTES_AT_ONCE
from .parts import TrainingSetting
from .shape import LayerShape, ModelShape

#: Lines of sources.
SAVED_BY_AUTOGRAD = "what autograd saves in Transformers' layers; as arXiv 2205.05198, section 4"
CHECKPOINTED = "activation checkpointing, arXiv 1604.06174, a layer at a time"


@dataclass(frozen=True)
class LayerMemory:
    """The bytes of one layer for each token of a rank: saved by autograd, and the most while backward computes a part.

    Backward of a part counts what the layer still has saved; it is 0 if the layer lacks the part.
    """

    saved: int
    backward_of_mlp: int
    backward_of_attention: int


def layer_memory(shape: ModelShape, layer: LayerShape, setting: TrainingSetting, whole: bool) -> LayerMemory:
    """Returns the bytes of a layer for each token; attention of one tile, `whole`, copies no output to another order."""
    size, attention, width = setting.number_bytes, shape.attention, shape.width
    queries = attention.num_heads * attention.head_dim
    # With fewer key/value heads than ranks, several ranks have the same head (plan/heads.py).
    group = (setting.heads or setting.ring_size) if setting.transport == "heads" else 1
    keys = max(attention.num_kv_heads, group) * (attention.head_dim + attention.value_dim)
    outputs = attention.num_heads * attention.value_dim
    # A norm saves its input in float32 and the reciprocal root, the normalized rows, and the output that a linear layer reads.
    norms = sum(norm * (4 + 2 * size) + 4 for norm in layer.norm_widths)
    of_heads = layer.head_norm_width * (4 + size)
    projections = (queries + keys + outputs * (1 if whole else 2) + layer.gate_width) * size + 4 * attention.num_heads
    # The last norm of a layer belongs to its MLP, if it has one.
    has_mlp = layer.mlp_width > 0
    last_norm = layer.norm_widths[-1] * (4 + 2 * size) if has_mlp and layer.norm_widths else 0
    # Gate, activated gate, up and product; without a gate, the projection and its activation.
    inner = layer.mlp_width * size
    routed = 2 * layer.experts_per_token * width * size + 12 * layer.experts
    mlp = (4 if layer.gated else 2) * inner + routed
    attention_saved = norms - last_norm + of_heads + projections * layer.attends
    # Backward of the product holds gate, activated gate and up, and the gradients of product, activated gate and up, beside the
    # gradient of the residual stream.
    working_mlp = (6 if layer.gated else 3) * inner + routed
    if setting.mlp_tokens_at_once:
        working_mlp, mlp = int(working_mlp * min(1.0, setting.mlp_tokens_at_once / setting.local_tokens)), 0
    # With several tiles, gradients of queries, keys and values are summed in float32 beside the gradients of a tile, and the
    # output's gradient is copied to the order of the kernel.
    sums = (queries + keys) * (size if whole else 4 + size)
    return LayerMemory(
        saved=attention_saved + last_norm + mlp,
        backward_of_mlp=(attention_saved + last_norm + working_mlp + 2 * width * size) * has_mlp,
        backward_of_attention=(attention_saved + width * size + 2 * outputs * size + sums) * layer.attends,
    )


def logits_bytes(shape: ModelShape, setting: TrainingSetting) -> tuple[int, str]:
    """Returns the bytes of a slice of the loss, and the formula.

    Backward of a slice holds the logarithms of probabilities, their gradient and the gradient of the logits, in float32. The
    logits themselves are gone by then.
    """
    at_once = min(setting.local_tokens, max(1, BYTES_AT_ONCE // (4 * shape.vocabulary)))
    return at_once * shape.vocabulary * 12, f"{at_once:,} tokens x {shape.vocabulary:,} words x 12 bytes"
