"""The size of the slices of a loss, for estimates too, which do without torch."""

#: The bytes of the logits of a slice, in float32.
BYTES_AT_ONCE = 64 << 20
