"""Memory that grows with the sequence: what the forward pass saves, and what a layer's backward pass and the loss work with.

The formulas follow what autograd saves for the operations of Transformers' layers (arXiv 2205.05198, section 4, counts likewise
for another model): each norm its input in float32, the normalized rows and its output; attention its queries, keys, values,
output and log-sum-exp; a gated MLP its two projections, the activated one, and the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...hf.loss_bytes import BYTES_AT_ONCE
from .exchange import runs_of_ring
from .layer_shape import LayerShape
from .model_shape import ModelShape
from .parts import TrainingSetting

if TYPE_CHECKING:
    from .mixer_memory import MeasuredMixer

#: Lines of sources.
SAVED_BY_AUTOGRAD = "what autograd saves in Transformers' layers; as arXiv 2205.05198, section 4"
MEASURED_ON_META = (
    "mixers: measured on torch's meta device in Transformers' own code; kernels of flash-linear-attention and mamba-ssm "
    "keep less"
)
CHECKPOINTED = "activation checkpointing, arXiv 1604.06174, a layer at a time"


@dataclass(frozen=True)
class LayerMemory:
    """The bytes of one layer: for each token of a rank, and those of a mixer for all its tokens together.

    Attributes:
        saved: what autograd saves, without that of a mixer.
        backward_of_mlp, backward_of_attention, backward_of_mixer: the most that exists at once while backward computes the one
            or the other, with what is still saved of the layer, without the mixer's part; 0 for what a layer lacks.
        mixer_saved: what autograd saves of a mixer, for all tokens.
        mixer_peak: the most that exists at once while a mixer computes, what it has saved included, for all tokens.
    """

    saved: int
    backward_of_mlp: int
    backward_of_attention: int
    backward_of_mixer: int = 0
    mixer_saved: int = 0
    mixer_peak: int = 0


def layer_memory(shape: ModelShape, layer: LayerShape, setting: TrainingSetting, whole: bool) -> LayerMemory:
    """Returns the bytes of a layer for each token.

    Args:
        whole: whether a rank computes its attention as one tile, so that the output is not copied to another order.
    """
    size, attention, width = setting.number_bytes, shape.attention, shape.width
    queries = attention.num_heads * attention.head_dim
    # Where fewer key/value heads than ranks are exchanged, several ranks have the same one (plan/heads.py).
    group = (setting.heads or setting.ring_size) if setting.transport == "heads" else 1
    keys = max(attention.num_kv_heads, group) * (attention.head_dim + attention.value_dim)
    outputs = attention.num_heads * attention.value_dim
    # A norm saves its input in float32 and the reciprocal root, the normalized rows, and the output that a linear layer reads.
    norms = sum(norm * (4 + 2 * size) + 4 for norm in layer.norm_widths)
    of_heads = layer.head_norm_width * (4 + size)
    projections = (queries + keys + outputs * (1 if whole else 2) + layer.gate_width) * size + 4 * attention.num_heads
    projections = projections if layer.attends else 0
    # The last norm of a layer is that of its MLP, if it has one.
    has_mlp = layer.mlp_width > 0
    last_norm = layer.norm_widths[-1] * (4 + 2 * size) if has_mlp else 0
    # They are the gate, the activated gate, up and the product; without a gate, the projection and its activation.
    inner = layer.mlp_width * size
    routed = 2 * layer.experts_per_token * width * size + 12 * layer.experts
    mlp = (4 if layer.gated else 2) * inner + routed
    attention_saved = norms - last_norm + of_heads + projections
    saved = attention_saved + last_norm + mlp
    # Of the product's backward: gate, activated gate and up, and the gradients of product, activated gate and up; the gradient
    # of the residual stream waits.
    working_mlp = (6 if layer.gated else 3) * inner + routed
    if setting.mlp_tokens_at_once:
        slices = min(1.0, setting.mlp_tokens_at_once / setting.local_tokens)
        working_mlp, mlp = int(working_mlp * slices), 0
        saved = attention_saved + last_norm
    # Gradients of queries, keys and values are summed in float32 where there are several tiles, beside those of a tile, and
    # the gradient of the output is copied to the order of the kernel.
    sums = (queries + keys) * (size if whole else 4 + size)
    mixer_saved, mixer_peak = mixer_bytes(shape, layer.mixer, setting) if layer.mixer is not None else (0, 0)
    return LayerMemory(
        saved=saved,
        backward_of_mlp=(attention_saved + last_norm + working_mlp + 2 * width * size) * has_mlp,
        backward_of_attention=(attention_saved + width * size + 2 * outputs * size + sums) * layer.attends,
        # The gradients of the mixer's output and of the residual stream wait.
        backward_of_mixer=(attention_saved + 2 * width * size) * (layer.mixer is not None),
        mixer_saved=mixer_saved,
        mixer_peak=mixer_peak,
    )


def mixer_bytes(shape: ModelShape, mixer: MeasuredMixer, setting: TrainingSetting) -> tuple[int, int]:
    """Returns what autograd saves of a mixer on the busiest rank, and the most that exists at once while it computes.

    Raises:
        ValueError: a mixer that does not run on torch's meta device.
    """
    runs = runs_of_ring(shape.attention.base, setting)
    passing = mixer.passes and runs.linked > 0
    growth = mixer.growth(setting.dtype, passing)
    if passing:
        tokens, own, linked = runs.longest, runs.most, runs.linked
    else:  # Whole rows, which are gathered where there are several ranks.
        tokens, own, linked = setting.seq_len, setting.batch_size, 0
    tokens = -(-tokens // mixer.chunk) * mixer.chunk
    foreign = 0 if passing else max(0, own * tokens - setting.local_tokens) * shape.width * setting.number_bytes
    foreign = foreign if setting.ring_size > 1 else 0
    saved = growth.saved.at(tokens, own, linked) + foreign
    return saved, max(saved, growth.peak.at(tokens, own, linked) + foreign)


def logits_bytes(shape: ModelShape, setting: TrainingSetting) -> tuple[int, str]:
    """Returns what the loss holds of logits, and the formula.

    Backward of a slice holds the logarithms of probabilities, their gradient and that of the logits, in float32; the logits
    themselves are gone then.
    """
    at_once = min(setting.local_tokens, max(1, BYTES_AT_ONCE // (4 * shape.vocabulary)))
    return at_once * shape.vocabulary * 12, f"{at_once:,} tokens x {shape.vocabulary:,} words x 12 bytes"
