"""The size of the slices of a loss, for estimates too, which do without torch."""

#: The bytes of a slice's logits in float32, at least.
LEAST_BYTES = 64 << 20


def tokens_at_once(tokens: int, width: int, vocabulary: int) -> int:
    """Returns the number of tokens in a slice of `tokens` hidden states of this width.

    Each slice reads and writes the gradient of all weights, so on a GPU many small slices take longer than the logits. By the
    rule of Liger's fused loss (arXiv 2410.10989), the logits of a slice are about as large as the hidden states of all tokens.
    """
    share = -(-tokens // -(-vocabulary // width))
    return max(1, LEAST_BYTES // (4 * vocabulary), 1 << (share - 1).bit_length())
