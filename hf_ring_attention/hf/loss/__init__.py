"""Hidden states and logits that are formed when they are used, and losses in slices."""
