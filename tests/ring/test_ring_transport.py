"""The transports on their own account: bytes, requests, calls that interleave, checkpoints, compilers."""

import ast
import itertools
import math
import random
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from hf_ring_attention.plan.problem import Problem, RingSettings
from hf_ring_attention.plan.traffic import RowBytes, collective_traffic, exchanged, ring_traffic
from tests.support.cases import EXACT_ATTENTION, check_random_cases, random_case
from tests.support.ranks import run_ranks, run_simulated
from tests.support.tolerance import largest

TRANSPORTS = {"ring": ring_traffic, "collective": collective_traffic}
PATTERNS = {"exact": ra.Pattern.exact(), "pyramid": ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)}
HEADS, KV_HEADS, WIDTH = 4, 2, 8
ORDERS = ("first in, first out", "first in, last out")
#: The rings of two calls at once, by name, and the lengths of their rows.
CALLS = {
    "one ring": (("ring", "ring"), (17, 23)),
    "one ring, equal shapes": (("ring", "ring"), (17, 17)),
    "one exchange each": (("collective", "collective"), (17, 17)),
    "two transports": (("ring", "collective"), (17, 17)),
    "two groups": (("ring", "other group"), (17, 23)),
}
GRADIENTS = [names for count in (1, 2) for names in itertools.combinations("qkv", count)]
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Call:
    """A call on whole rows made from a seed: this rank's part of it, and of what the oracle says."""

    def __init__(self, ring, seed, seq_len, pattern="pyramid"):
        self.ring, self.pattern = ring, PATTERNS[pattern]
        self.layout = ring.layout_for(seq_len, self.pattern)
        generator = torch.Generator().manual_seed(seed)
        q, k, v, dout = (
            torch.randn(2, heads, seq_len, WIDTH, generator=generator, dtype=torch.float64)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        exact = [x.clone().requires_grad_() for x in (q, k, v)]
        out, _ = reference_attention(*exact, pattern=self.pattern)
        out.backward(dout)
        self.leaves = dict(zip("qkv", (self.shard(x).requires_grad_() for x in (q, k, v))))
        self.dout = self.shard(dout)
        self.want = {"out": out.detach(), **dict(zip("qkv", (x.grad for x in exact)))}

    def shard(self, x):
        return self.ring.shard(x, self.layout, dim=2)

    def forward(self):
        self.out = ra.ring_attention(*self.leaves.values(), pattern=self.pattern, ring=self.ring, layout=self.layout)
        return self

    def backward(self):
        self.out.backward(self.dout)
        return self

    def error(self, *names):
        """The largest of "out" and of the gradients of "q", "k" and "v"; of all of them, where none is named."""
        got = {"out": self.out.detach(), **{name: x.grad for name, x in self.leaves.items()}}
        return largest(
            float((got[name] - self.shard(self.want[name])).abs().max() / self.want[name].abs().max())
            for name in names or got
        )


def traffic_errors(ring, seed, count):
    """Cases whose bytes are not those of `routes`, and how many moved any: on this rank."""
    wrong, moved = [], 0
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        dtype = rng.choice([torch.float32, torch.bfloat16])
        case = random_case(rng, dtype)
        layout = ring.layout_for(case["seq_len"], case["pattern"])
        options = {name: case[name] for name in ("pattern", "causal", "scale", "documents")}
        widths = (("num_heads", "head_dim"), ("num_kv_heads", "head_dim"), ("num_kv_heads", "value_dim"))
        tensors = [
            torch.randn(case["batch"], case[heads], layout.local_len, case[width]).to(dtype).requires_grad_()
            for heads, width in widths
        ]
        ring.reset_traffic()
        out = ra.ring_attention(*tensors, **options, ring=ring, layout=layout)
        traffic = ring.traffic()
        forward, hops, waited = (traffic.sent_bytes, traffic.received_bytes), traffic.hops, traffic.waited_seconds
        out.sum().backward()
        traffic = ring.traffic()
        both = (traffic.sent_bytes, traffic.received_bytes)

        documents = case["documents"] or [[(0, case["seq_len"])]] * case["batch"]
        problem = Problem(
            case["pattern"],
            layout,
            tuple(map(tuple, documents)),
            case["num_heads"],
            case["num_kv_heads"],
            case["causal"],
            settings=ring.settings,
        )
        width = case["head_dim"] + case["value_dim"]
        want = TRANSPORTS[ring.transport](problem, ring.rank, RowBytes(width * dtype.itemsize, width * 4))
        want_both = tuple(a + b for a, b in zip(want.forward, want.backward))
        # Every rank takes part in a collective, also one that has nothing to send and needs nothing.
        used = any(want.forward) if ring.transport == "ring" else any(map(sum, exchanged(problem)))
        right = forward == want.forward and both == want_both and (hops > 0) == used == (traffic.hops > 0)
        if not right or not 0 <= waited <= traffic.waited_seconds or (not used and traffic.waited_seconds):
            wrong.append(
                f"{ring}, case {number}: {forward}, {both}, {hops} hops, {traffic}, not {want}: {dtype}, {case}"
            )
        moved += sum(forward) > 0
    return wrong, moved


class CountedWork:
    """A work of torch.distributed that counts how often it is waited for."""

    def __init__(self, work):
        self.work, self.waits = work, 0

    def wait(self):
        self.waits += 1
        if self.waits == 1:  # gloo's would wait for another message
            self.work.wait()


@contextmanager
def counted_works():
    """Yields the works begun inside, and the rows that torch.distributed is given to send."""
    works, sent = [], []

    def exchange(operations, begin=dist.batch_isend_irecv):
        # What is not floating point belongs to the comparison of calls, which is no traffic.
        sent.extend(x.tensor for x in operations if x.op is dist.isend and x.tensor.is_floating_point())
        begun = [CountedWork(work) for work in begin(operations)]
        works.extend(begun)
        return begun

    def all_to_all(received, rows, *args, begin=dist.all_to_all_single, **options):
        sent.append(rows)
        works.append(CountedWork(begin(received, rows, *args, **options)))
        return works[-1]

    with (
        mock.patch.object(dist, "batch_isend_irecv", exchange),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
    ):
        yield works, sent


def waits(ring, seed):
    """Of every work of a forward pass, the waits there, and of every work until the end of backward; bytes that differ."""
    ring.reset_traffic()
    with counted_works() as (works, sent):
        call = Call(ring, seed, 31).forward()
        in_forward = [work.waits for work in works]
        call.backward()
        in_both = [work.waits for work in works]
    return in_forward, in_both, sum(x.nbytes for x in sent) - ring.traffic().sent_bytes


class Layer(torch.nn.Module):
    """Projections about an attention, in float64; the same weights on every rank."""

    def __init__(self, ring, layout, width=16):
        super().__init__()
        self.ring, self.layout = ring, layout
        self.queries = torch.nn.Linear(width, HEADS * WIDTH).double()
        self.keys, self.values = (torch.nn.Linear(width, KV_HEADS * WIDTH).double() for _ in "kv")
        self.outputs = torch.nn.Linear(HEADS * WIDTH, width).double()

    def forward(self, x):
        q, k, v = (
            projection(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for projection in (self.queries, self.keys, self.values)
        )
        out = ra.ring_attention(q, k, v, pattern=PATTERNS["pyramid"], ring=self.ring, layout=self.layout)
        return x + self.outputs(out.transpose(1, 2).flatten(2))


def run(function, layers, x):
    """[output, gradients of x and of all weights]."""
    x = x.detach().clone().requires_grad_()
    layers.zero_grad()
    y = function(x)
    (y * torch.cos(torch.arange(y.numel())).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layers.parameters())]


def difference(got, want):
    return largest(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


def layers_and_rows(ring, seed, count):
    torch.manual_seed(seed)
    layout = ra.SequenceLayout("zigzag", 23, ring.world_size)
    layers = torch.nn.ModuleList(Layer(ring, layout) for _ in range(count))
    return layers, ring.shard(torch.randn(2, 23, 16, dtype=torch.float64), layout)


def checkpointing_error(ring, seed, use_reentrant):
    """Of two layers whose activations are computed again in backward, against the same two as they are."""
    layers, x = layers_and_rows(ring, seed, 2)
    again = mock.Mock(side_effect=ra.ring_attention)

    def plain(x):
        return layers[1](layers[0](x))

    def checkpointed(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    want = run(plain, layers, x)
    with mock.patch.object(ra, "ring_attention", again):
        got = run(checkpointed, layers, x)
    assert again.call_count == 4
    return difference(got, want)


def compiled(ring, seed):
    """(largest error against eager, graphs compiled, the refusal of one graph for all)."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    (layer,), x = layers, _ = layers_and_rows(ring, seed, 1)
    want = run(layer, layers, x)
    backend = CompileCounterWithBackend("aot_eager")
    got = run(torch.compile(layer, backend=backend), layers, x)
    torch._dynamo.reset()
    try:
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    except torch._dynamo.exc.Unsupported as error:
        return difference(got, want), backend.frame_count, str(error)
    return difference(got, want), backend.frame_count, None


def interleaved(rings, lengths, seed, order):
    """The error of two calls, both forward and then both backward."""
    calls = [Call(ring, seed + i, length) for i, (ring, length) in enumerate(zip(rings, lengths, strict=True))]
    for call in calls:
        call.forward()
    for call in calls if order == ORDERS[0] else reversed(calls):
        call.backward()
    return largest(call.error() for call in calls)


def without_gradients(ring, seed, name):
    """The error of a call that records none, and then of one of the same shapes that does."""
    call = Call(ring, seed, 19 + len(name))
    with MODES[name]():
        call.forward()
        assert not call.out.requires_grad
        error = call.error("out")
    return error, call.forward().backward().error()


def some_gradients(ring, seed, names):
    """The error where only these of q, k and v take gradients."""
    call = Call(ring, seed, 20)
    for name, x in call.leaves.items():
        x.requires_grad_(name in names)
    call.forward().backward()
    assert all((x.grad is None) == (name not in names) for name, x in call.leaves.items())
    return call.error("out", *names)


def on_each_rank(rank, seed):
    """What rings of the first 2 and of the first 3 ranks find, and two rings of 2 side by side."""
    pairs, triples = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 1, 2]) for _ in range(2)]
    found = {}
    for world_size, group in ((2, pairs[0]), (3, triples[0])):
        if rank >= world_size:
            continue
        for name in TRANSPORTS:
            ring = ra.Ring(group, transport=name)
            found["traffic", world_size, name] = traffic_errors(ring, f"{seed}-{world_size}", 25)
            found["waits", world_size, name] = waits(ring, seed)
            for use_reentrant in (False, True):
                found["checkpointing", world_size, name, use_reentrant] = checkpointing_error(ring, seed, use_reentrant)
            for mode in MODES:
                found["mode", world_size, name, mode] = without_gradients(ring, seed, mode)
            for names in GRADIENTS:
                found["gradients", world_size, name, names] = some_gradients(ring, seed, names)
    if rank < 3:
        rings = {name: ra.Ring(triples[0], transport=name) for name in TRANSPORTS}
        rings["other group"] = ra.Ring(triples[1], transport="ring")
        for (name, (both, lengths)), order in itertools.product(CALLS.items(), ORDERS):
            found["interleaved", name, order] = interleaved([rings[x] for x in both], lengths, seed, order)
    if rank < 2:
        found["compiled"] = compiled(ra.Ring(pairs[0], transport="ring"), seed)
    ring = ra.Ring(pairs[rank // 2], transport="ring")
    found["side by side"] = check_random_cases(
        ring, seed=f"{seed}-{rank // 2}", count=10, tolerance=math.inf, max_len=(25, 60)[rank // 2]
    )
    return found


@pytest.fixture(scope="module")
def answers():
    """What each of 4 ranks found, and the seed: one launch serves most tests here."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return run_ranks(on_each_rank, 4, seed), f"seed {seed}"


def check_traffic(findings, seed):
    wrong, moved = zip(*findings)
    assert not any(wrong), f"{seed}: {wrong}"
    assert sum(moved) > 0, f"{seed}: no case moved anything"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_those_of_the_plan(answers, world_size, transport):
    found, seed = answers
    check_traffic([answer["traffic", world_size, transport] for answer in found[:world_size]], seed)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_of_a_simulated_ring(transport, layout):
    seed = random.randrange(2**32)
    found = run_simulated(lambda ring: traffic_errors(ring, seed, 15), 5, layout=layout, transport=transport)
    check_traffic(found, f"seed {seed}")


def test_bytes_of_head_groups():
    """All payloads, however small, in as many head groups as there can be."""
    seed = random.randrange(2**32)

    def errors(ring):
        ring.settings = RingSettings(rows_of_a_head_group=1, large_payload=10**9)
        return traffic_errors(ring, seed, 15)

    found = run_simulated(errors, 5, transport="ring")
    check_traffic(found, f"seed {seed}")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_request_is_waited_for_once(answers, world_size, transport):
    """In the pass that began it; and what torch.distributed was handed is what `traffic` says."""
    found, seed = answers
    for answer in found[:world_size]:
        in_forward, in_both, more_bytes = answer["waits", world_size, transport]
        assert 0 < len(in_forward) < len(in_both), seed
        assert set(in_forward) == set(in_both) == {1}, seed
        assert more_bytes == 0, seed


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradient_checkpointing(answers, world_size, transport, use_reentrant):
    found, seed = answers
    for answer in found[:world_size]:
        assert answer["checkpointing", world_size, transport, use_reentrant] <= EXACT_ATTENTION, seed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("calls", CALLS)
def test_two_calls_at_once(answers, calls, order):
    found, seed = answers
    for answer in found[:3]:
        assert answer["interleaved", calls, order] <= EXACT_ATTENTION, seed


def test_two_rings_side_by_side(answers):
    found, seed = answers
    for answer in found:
        assert answer["side by side"] <= EXACT_ATTENTION, seed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_without_gradients(answers, world_size, transport, mode):
    """And what was planned there serves calls with gradients."""
    found, seed = answers
    for answer in found[:world_size]:
        assert largest(answer["mode", world_size, transport, mode]) <= EXACT_ATTENTION, seed


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_on_one_rank(mode):
    seed = random.randrange(2**32)
    assert largest(without_gradients(ra.Ring(), seed, mode)) <= EXACT_ATTENTION, f"seed {seed}"


@pytest.mark.parametrize("names", GRADIENTS, ids="".join)
def test_some_gradients(answers, names):
    found, seed = answers
    for world_size, transport in itertools.product((2, 3), TRANSPORTS):
        for answer in found[:world_size]:
            assert answer["gradients", world_size, transport, names] <= EXACT_ATTENTION, f"{seed}, {transport}"


@pytest.mark.parametrize("names", GRADIENTS, ids="".join)
def test_some_gradients_on_one_rank(names):
    seed = random.randrange(2**32)
    assert some_gradients(ra.Ring(), seed, names) <= EXACT_ATTENTION, f"seed {seed}"


def check_compiled(found, seed):
    """The break is at the attention: there are graphs on both sides of it."""
    error, graphs, refusal = found
    assert error <= EXACT_ATTENTION, seed
    assert graphs == 2, seed
    assert refusal is not None, "a break at ring_attention was expected"
    assert "ring_attention" in refusal, refusal


# Dynamo asks every tensor that comes in for its gradient, and warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_on_one_rank():
    seed = random.randrange(2**32)
    check_compiled(compiled(ra.Ring(), seed), f"seed {seed}")


def test_compiled_on_two_ranks(answers):
    found, seed = answers
    for answer in found[:2]:
        check_compiled(answer["compiled"], seed)


def waiting_calls(source):
    """Names of calls that wait for all ranks or for a device."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", None) for call in calls)
    return [name for name in names if name in ("barrier", "monitored_barrier", "synchronize")]


@pytest.mark.parametrize(
    "module",
    [
        *("compute/kernels", "compute/rows", "compute/binding", "compute/merge"),
        *("transport/transports", "transport/communicators", "transport/schedules", "transport/row_sets"),
        *("ring/engine", "ring/attention", "ring/calls"),
    ],
)
def test_nothing_waits_for_all_ranks_or_for_the_device(module):
    assert waiting_calls("dist.barrier(); x.cuda.synchronize(); barrier()") == ["barrier", "synchronize", "barrier"]
    assert waiting_calls((Path(ra.__file__).parent / f"{module}.py").read_text()) == []
