"""What hybrid models move over a ring, by their config.json and for rows of any length; and what mixers hold meanwhile."""

import itertools

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.cost.layers import explain_layers
from hf_ring_attention.cost.models import attention_of_model
from hf_ring_attention.cost.trace import LiveBytes
from hf_ring_attention.hf.forward_pass import running_with
from hf_ring_attention.hf.loss.on_use import values_of
from hf_ring_attention.hf.model.types import INDEXED, MIXERS, OWN_ATTENTION, OWN_ATTENTION_OVER_RINGS
from hf_ring_attention.hf.model.wrappers import runner_of, takes
from hf_ring_attention.hybrids import states
from hf_ring_attention.plan.choices import decide_call
from hf_ring_attention.plan.problem import Problem
from hf_ring_attention.plan.state_runs import rows_traffic, runs_of, states_traffic
from hf_ring_attention.plan.traffic import RowBytes, collective_traffic, ring_traffic
from tests.support.ranks import on_ranks, run_simulated
from tests.support.tiny_models import CAUSAL_TYPES, VOCAB, tiny_config, tiny_model

#: One of each kind of state, and one whose rows are gathered.
KINDS = ["lfm2", "qwen3_next", "kimi_linear", "bamba", "jamba", "minimax"]
TYPES = [name for name in MIXERS if name in CAUSAL_TYPES and name not in INDEXED]
ITEM = 8  # bytes: tests compute in float64


def of_attention(attention, documents, layout, ring):
    """(forward, backward) of the layers that attend: bytes that this rank sends and receives."""
    width, both = attention.head_dim + attention.value_dim, []
    for pattern in attention.layers:
        heads = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
        problem = Problem(pattern, layout, documents, **heads)
        sizes = RowBytes(width * ITEM, width * ITEM)
        problem, decision = decide_call("auto", problem, sizes)
        both.append(
            {"ring": ring_traffic, "collective": collective_traffic}[decision.choice](problem, ring.rank, sizes)
        )
    return both


def of_mixers(mixers, documents, layout, kept=False):
    if mixers.numbers is None:
        one = rows_traffic(mixers.width, len(documents), layout, ITEM, mixers.with_positions)
    else:
        one = states_traffic(mixers.numbers, documents, layout, ITEM, ITEM, kept)
    return [one] * len(mixers.layers)


def moved(ring):
    traffic = ring.traffic()
    return traffic.sent_bytes, traffic.received_bytes


def added(parts):
    return tuple(map(sum, zip(*parts)))


def rows(length):
    """Two rows of one document, and a row of three documents, marked by their positions."""
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
    whole = torch.arange(length)[None].expand(2, -1)
    cuts = (length // 3, length // 3 + 1, length - 2 * (length // 3) - 1)
    packed = torch.cat([torch.arange(n) for n in cuts])[None]
    ends = [0, cuts[0], cuts[0] + cuts[1], length]
    yield ids, whole, (((0, length),),) * 2
    yield ids[:1], packed, (tuple(itertools.pairwise(ends)),)


def logits_of_a_part(model, ids, positions):
    """The logits of this rank's tokens, so that nothing is joined behind the decoder."""
    with running_with(on_use=True):
        values = values_of(model(ids, position_ids=positions, use_cache=False).logits)
    return values.of_states(values.part)


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("model_type", "world_size", "layout"),
    [*((model_type, 2, "zigzag") for model_type in TYPES), *((model_type, 3, "contiguous") for model_type in KINDS)],
)
def test_bytes_are_those_that_the_config_tells(model_type, world_size, layout):
    """Of whole models, with their attention, in forward and in backward, at two lengths."""
    attention = attention_of_model(tiny_config(model_type), model_type)
    (mixers,) = attention.mixers
    assert mixers.layers and attention.numbers

    def work(ring, model):
        by_call = []
        for length in (12, 24):
            for ids, positions, documents in itertools.islice(rows(length), 2 if length == 12 else 1):
                layout = ring.layout_for(length, "exact", documents)
                ring.reset_traffic()
                logits = logits_of_a_part(model, ids, positions)
                forward = moved(ring)
                logits.sum().backward()
                planned = of_attention(attention, documents, layout, ring)
                mixed = of_mixers(mixers, documents, layout)
                assert forward == added(x.forward for x in [*planned, *mixed]), (length, documents)
                assert moved(ring) == added(y for x in [*planned, *mixed] for y in (x.forward, x.backward)), length
                assert sum(mixed[0].forward) > 0
                by_call.append(mixed[0])
        return by_call

    for by_call in on_ranks(work, lambda: tiny_model(model_type, "eager"), world_size, layout=layout):
        whole, _, whole_longer = by_call
        if mixers.numbers is None:
            assert whole_longer.forward.sent == 2 * whole.forward.sent
        else:
            assert whole_longer == whole, "the bytes of states depend on the length"


GATHERING = [*OWN_ATTENTION, *OWN_ATTENTION_OVER_RINGS, *(x for x in INDEXED if x in CAUSAL_TYPES)]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("model_type", [x for x in GATHERING if not x.startswith("dots3_note")])
def test_bytes_of_gathered_rows_are_explained(model_type):
    """Of models that keep their own attention, or whose layers choose keys; dots3_note has layers of several sizes."""
    attention = attention_of_model(tiny_config(model_type), model_type)
    ids, positions, _ = next(rows(24))

    def work(ring, model):
        call = {"seq_len": 24, "ring_size": 2, "batch_size": 2, "dtype": "float64"}
        step = explain_layers(attention, layout=ring.layout, **call)
        parts = [call.traffic()[ring.rank] for numbers, call in step.calls for _ in numbers]
        parts += [of_layer for kind, of_layer in step.mixers for _ in kind.layers]
        ring.reset_traffic()
        given = {"position_ids": positions} if takes(runner_of(model), "position_ids") else {}
        with running_with(on_use=True):
            values = values_of(model(ids, use_cache=False, **given).logits)
        logits = values.of_states(values.part)
        assert moved(ring) == added(x.forward for x in parts)
        logits.sum().backward()
        assert moved(ring) == added(y for x in parts for y in (x.forward, x.backward))
        assert step.traffic.forward.sent > 0

    on_ranks(work, lambda: tiny_model(model_type, "eager"))


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next"])
def test_a_prefill_keeps_one_input_more(model_type):
    attention = attention_of_model(tiny_config(model_type), model_type)
    ids = torch.randint(3, VOCAB, (1, 24))

    def work(ring, model):
        documents = (((0, 24),),)
        ring.reset_traffic()
        layout = ra.prefill(model, ids).layout
        mixed = of_mixers(attention.mixers[0], documents, layout, kept=True)
        assert moved(ring) == added(x.forward for x in [*of_attention(attention, documents, layout, ring), *mixed])

    on_ranks(work, lambda: tiny_model(model_type, "eager"))


# ---- what mixers hold while states pass


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next", "bamba", "jamba"])
def test_the_peak_of_a_step_goes_down_with_the_ranks(model_type):
    tokens, models = 128, [tiny_model(model_type, "eager") for _ in range(4)]
    ids = torch.randint(3, VOCAB, (1, tokens))

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        for _ in range(3):  # The first two calls also look at the modules inside.
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
    """Keeps only its inputs, as a kernel does; its results have the shapes and gradients of a scan."""
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
    """There would be 16 times as many entries as in x."""

    def work(ring):
        return read_of_a_selective_scan(ring, 8192, 8, 16)

    for peak, inputs in run_simulated(work, 2, layout="contiguous"):
        assert peak <= 3 * inputs
    monkeypatch.setattr(states, "_AT_ONCE", 1 << 30)
    for peak, inputs in run_simulated(work, 2, layout="contiguous"):
        assert peak > 10 * inputs
