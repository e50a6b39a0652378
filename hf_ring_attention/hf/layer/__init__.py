"""One attention layer."""
