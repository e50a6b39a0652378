"""Attention of a sequence's last tokens to all of it, with keys from a cache."""

from hf_ring_attention.ring.attention import Options, checked_call


def cached_attention(q, k, v, *, held, sinks=None, **settings):
    return checked_call(q, k, v, sinks, Options(**settings, held=held))(q, k, v, sinks)[0]
