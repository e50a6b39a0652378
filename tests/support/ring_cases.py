"""Whole cases of attention: tensors, the ring that shares them, the kernels, and the number of calls; each from a number."""

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

import hf_ring_attention as ra
from hf_ring_attention.compute.fused.settings import Settings
from hf_ring_attention.compute.merge import accumulation_dtype
from hf_ring_attention.plan.choices import decide_call
from hf_ring_attention.plan.heads import group_size, heads_traffic
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.problem import RingSettings
from hf_ring_attention.plan.traffic import RowBytes, collective_traffic, ring_traffic

from .cases import Case, check_calls, fitting_heads, random_case, random_pieces
from .fused import computed_by_fused, random_settings_of_kernels
from .ranks import PROMPTLY, run_simulated

DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16)
#: The interpreter rounds products of bfloat16 wrongly, so that they are garbage.
FUSED_DTYPES = (torch.float32, torch.float32, torch.float16)
LAYOUTS = ("auto", "contiguous", "zigzag", "documents")
LONGEST = 24  # tokens of a sequence
WORLD_SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)  # Large ones take more time each, so they come less often.
PLANNED = {"ring": ring_traffic, "collective": collective_traffic, "heads": heads_traffic}


@dataclass(frozen=True)
class RingCase:
    """Calls of a simulated ring.

    Attributes:
        calls: one, or two with the same tensors, whose gradients add up.
        ring: the settings of the ring.
        pieces: the layout of each call, if the ring does not choose it.
        checkpointing: whether backward computes each call again.
        kernels: the settings of the fused kernels that compute the calls; None for the kernels of the device.
    """

    calls: tuple[Case, ...]
    world_size: int
    ring: dict
    settings: RingSettings
    pieces: tuple[SequenceLayout, ...] | None = None
    checkpointing: bool = False
    kernels: Settings | None = None

    def run(self):
        """Compares outputs, log-sum-exps, all gradients and the bytes that each rank moves with the expected values.

        Returns "equal", in float64, or "rounded".

        Raises:
            AssertionError: one of them is wrong.
        """
        for case in self.calls:  # what ranks share, before their threads would each compute it
            assert case.definition and case.rounded
        with nullcontext() if self.kernels is None else computed_by_fused(self.kernels):
            run_simulated(self.check, self.world_size, timeout=PROMPTLY, **self.ring)
        return "equal" if self.calls[0].dtype == torch.float64 else "rounded"

    def check(self, ring):
        """Does so on one rank."""
        ring.settings = self.settings
        attention = partial(checkpoint, ra.ring_attention, use_reentrant=False, preserve_rng_state=False)
        layouts = self.pieces or [ring.layout_for(case.seq_len, case.pattern, case.rows) for case in self.calls]
        check_calls(ring, self.calls, layouts, attention=attention if self.checkpointing else ra.ring_attention)
        moved, planned = ring.traffic(), [self.planned(ring, *call) for call in zip(self.calls, layouts)]
        bytes_moved, bytes_planned = (moved.sent_bytes, moved.received_bytes), tuple(map(sum, zip(*planned)))
        assert bytes_moved == bytes_planned, f"{ring} sent and received {bytes_moved} bytes, not {bytes_planned}"

    def planned(self, ring, case, layout):
        """The bytes that a rank is to send and to receive in the passes of a call, and to compare its outputs."""
        problem, width = case.problem(layout, self.settings), case.head_dim + case.value_dim
        narrow, wide = case.dtype.itemsize, accumulation_dtype(case.dtype).itemsize
        sizes = RowBytes(width * narrow, width * wide)
        problem, decision = decide_call(ring.transport, problem, sizes)
        # Outputs and log-sum-exps are unsharded.
        compared = (self.world_size - 1) * case.batch * case.num_heads * layout.local_len
        compared *= case.value_dim * narrow + wide
        if decision.choice == "local":
            return compared, compared
        more = 0
        if decision.choice == "heads":
            # Plans count outputs only: a log-sum-exp goes in one message with its output, in one dtype.
            size = group_size(problem)
            rows = case.batch * case.num_heads // size * layout.local_len * (size - 1)
            more = rows * (wide + case.value_dim * (wide - narrow))
        traffic, forwards = PLANNED[decision.choice](problem, ring.rank, sizes), 1 + self.checkpointing
        return tuple(compared + forwards * (a + more) + b for a, b in zip(traffic.forward, traffic.backward))


def draw_ring_case(seed: int) -> RingCase:
    """The case of a number."""
    rng = random.Random(seed)
    world_size, dtype = rng.choice(WORLD_SIZES), rng.choice(DTYPES)
    transport = rng.choice(["auto", "ring", "ring", "collective", "heads"] + ["local"] * (world_size == 1))
    ring = {"layout": rng.choice(LAYOUTS), "transport": transport}
    settings, heads = random_settings(rng), None
    if transport == "heads":
        ring["heads"] = rng.choice([None, *(size for size in range(1, world_size + 1) if world_size % size == 0)])
        settings = replace(settings, heads=ring["heads"])
        heads = fitting_heads(rng, ring["heads"] or world_size)
    case, pieces = random_case(rng, dtype, LONGEST, heads), None
    calls = (case,) if rng.random() < 0.75 else (case, other_call(rng, case))
    if rng.random() < 0.15:
        pieces = tuple(random_pieces(rng, case.seq_len, world_size, case.batch) for _ in calls)
    return RingCase(calls, world_size, ring, settings, pieces, checkpointing=rng.random() < 0.25)


def draw_fused_case(seed, world_sizes=(1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 8)):
    """The case of a number by the fused kernels: small, since the interpreter takes a millisecond for each block of keys."""
    rng = random.Random(seed)
    world_size, num_kv_heads = rng.choice(world_sizes), rng.choice([1, 1, 2, 3])
    heads, dtype = (num_kv_heads * rng.choice([1, 2, 3, 4]), num_kv_heads), rng.choice(FUSED_DTYPES)
    case = random_case(rng, dtype, 32 if world_size == 1 else 20, heads, batch=rng.randint(1, 2))
    transport = rng.choice(["local"] if world_size == 1 else ["auto", "ring", "ring", "collective"])
    ring, settings = {"layout": rng.choice(LAYOUTS), "transport": transport}, random_settings(rng)
    return RingCase((case,), world_size, ring, settings, kernels=random_settings_of_kernels(rng))


def random_settings(rng):
    """The usual ones; or head groups however small they are, and rows that go both ways more or less readily."""
    if rng.random() < 0.5:
        return RingSettings()
    groups = {"rows_of_a_head_group": rng.choice([1, 20]), "head_groups": rng.randint(1, 8)}
    return RingSettings(large_payload=10**9, both_ways_below=rng.choice([0, 0.75, 2]), **groups)


def other_call(rng, case):
    """One with the tensors of a case, which differs in all else."""
    other = random_case(rng, heads=(case.num_heads, case.num_kv_heads), batch=case.batch, seq_len=case.seq_len)
    return replace(
        case, **{name: getattr(other, name) for name in ("documents", "pattern", "causal", "scale", "softcap")}
    )
