"""What mixers hold while states pass: bytes that go down with the number of ranks."""

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hybrids import states
from hf_ring_attention.plan.state_runs import runs_of
from hf_ring_attention.tools.estimates.live_bytes import LiveBytes

from ..support.ranks import run_simulated
from ..support.releases import needs_mixers
from ..support.tiny_models import VOCAB, tiny_model

pytestmark = needs_mixers


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next", "kimi_linear", "bamba", "jamba"])
def test_the_peak_of_a_step_goes_down_with_the_ranks(model_type):
    tokens, models = 512, [tiny_model(model_type, "eager") for _ in range(4)]
    ids = torch.randint(3, VOCAB, (1, tokens))

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        with LiveBytes() as live:
            model(ids, labels=ids).loss.backward()
        model.zero_grad()
        return live.peak

    (alone,), by_rank = run_simulated(work, 1), run_simulated(work, 4, layout="contiguous")
    assert alone > 10 * tokens * VOCAB * 8
    # Gradients of parameters and states do not go down.
    parameters = sum(x.nbytes for x in models[0].parameters())
    assert max(by_rank) <= 1.2 * alone / 4 + 3 * parameters


def scan_of_a_kernel(x, dt, A, B, C, *, z, delta_bias, delta_softplus, return_last_state):
    """Keeps nothing but its inputs, as a kernel does; what it returns has the shapes and the gradients of a scan."""
    return x * dt + C.sum(1, keepdim=True), (x * dt).sum(-1, keepdim=True) * A * B.sum(-1)[:, None]


def read_of_a_selective_scan(ring, tokens, channels, entries):
    """The peak of forward and backward, and the bytes of the inputs of a rank's scan."""
    runs = runs_of((((0, tokens),),), ring.layout_for(tokens, "exact"))
    chain = states.chain_of(ring, runs, 1)
    sizes = {"x": (1, channels, chain.longest), "dt": (1, channels, chain.longest), "A": (channels, entries)}
    sizes |= {"B": (1, entries, chain.longest), "C": (1, entries, chain.longest), "delta_bias": (channels,)}
    inputs = {name: torch.randn(size).requires_grad_() for name, size in sizes.items()}
    five, bias = [inputs[name] for name in ("x", "dt", "A", "B", "C")], inputs["delta_bias"]
    with LiveBytes() as live:
        out = states._selective(scan_of_a_kernel, chain, *five, delta_bias=bias, delta_softplus=True)
        out.sum().backward()
    return live.peak, sum(x.nbytes for x in inputs.values())


def test_the_entries_of_a_state_are_not_read_by_all_tokens_at_once(monkeypatch):
    """They would be 16 times as many as those of x."""

    def work(ring):
        return read_of_a_selective_scan(ring, 8192, 8, 16)

    for peak, inputs in run_simulated(work, 2, layout="contiguous"):
        assert peak <= 3 * inputs
    monkeypatch.setattr(states, "_AT_ONCE", 1 << 30)
    for peak, inputs in run_simulated(work, 2, layout="contiguous"):
        assert peak > 10 * inputs
