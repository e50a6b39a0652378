"""Random attention problems, and the comparison of outputs and all gradients with the oracle."""

import itertools
import operator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from hf_ring_attention.plan.layouts import SequenceLayout, merged_pieces
from hf_ring_attention.plan.problem import Problem
from hf_ring_attention.transport import table
from tests.support.ranks import run_simulated
from tests.support.tolerance import allowed, largest

#: All transports of several ranks; and those that take any numbers of heads (tests/ring/test_heads.py is about the other one).
EVERY_TRANSPORT = tuple(name for name in table.TRANSPORTS if name != "local")
TRANSPORTS = tuple(name for name in EVERY_TRANSPORT if name != "heads")
#: Of attention alone, in float64: some thousand of its roundings.
EXACT_ATTENTION = 1e-12


def random_pattern(rng):
    """Any legal pattern, small: up to 4 dilated branches and 2 sinks."""
    while True:
        factors = [rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.randint(0, 3))]
        chain = [*itertools.accumulate([1, *factors], operator.mul)]
        overlap = rng.choice(["once", "count"])
        if overlap == "count":
            chain = [rng.choice([1, 2, 3, 4, 6]) for _ in chain] + [1]
            rng.shuffle(chain)
        branches = []
        for dilation in chain:
            kind = rng.choice([ra.Segment, ra.Window])
            length = None if kind is ra.Segment and rng.random() < 0.3 else dilation * rng.randint(1, 12)
            branches.append(kind(length, dilation, rng.choice(["all", "dilated"])))
        for _ in range(rng.choice([0, 0, 1, 2])):
            branches.insert(rng.randint(0, len(branches)), ra.Sink(rng.randint(1, 9)))
        try:
            return ra.Pattern(tuple(branches), overlap)
        except ValueError:
            continue


def random_pattern_of(rng, num_kv_heads):
    """Any legal pattern for this number of key/value heads; some differ by head."""
    if rng.random() < 0.7:
        return random_pattern(rng)
    patterns = [random_pattern(rng) for _ in range(rng.randint(2, 3))]
    return ra.Pattern.by_kv_head([rng.choice(patterns) for _ in range(num_kv_heads)])


def random_documents(rng, batch, seq_len):
    """None, or documents with gaps (padding) between them, other ones in each batch row."""
    if rng.random() < 0.4:
        return None
    rows = []
    for _ in range(batch):
        cuts = sorted(rng.sample(range(seq_len + 1), min(seq_len + 1, rng.choice([2, 3, 4, 6]))))
        rows.append([pair for pair in itertools.pairwise(cuts) if rng.random() < 0.8])
    return rows


def random_pieces(rng, seq_len, world_size, batch):
    """A layout "documents" of any pieces, other ones in each batch row."""
    local_len = -(-seq_len // world_size)
    rows = []
    for _ in range(batch):
        tokens = [rank for rank in range(world_size) for _ in range(local_len)]
        for _ in range(rng.randint(0, len(tokens))):  # the more exchanges, the shorter the pieces
            i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
            tokens[i], tokens[j] = tokens[j], tokens[i]
        held = [[range(i, i + 1) for i, rank in enumerate(tokens) if rank == own] for own in range(world_size)]
        rows.append(tuple(map(merged_pieces, held)))
    return SequenceLayout("documents", seq_len, world_size, tuple(rows))


def problem_of(pattern, layout, rows=None, heads=(1, 1), **more):
    """A call in integers.

    Args:
        layout: a layout, its arguments, or the tokens of one rank.
        rows: the documents of each batch row; None for one row of one document.
        heads: query heads, and key/value heads.
    """
    pattern = ra.Pattern.parse(pattern) if isinstance(pattern, str) else pattern
    if not isinstance(layout, SequenceLayout):
        layout = SequenceLayout(*(layout if isinstance(layout, tuple) else ("contiguous", layout, 1)))
    documents = tuple(map(tuple, [[(0, layout.seq_len)]] if rows is None else rows))
    return Problem(pattern, layout, documents, num_heads=heads[0], num_kv_heads=heads[1], **more)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An attention problem of whole sequences, the same on every rank.

    Attributes:
        documents: as `ra.ring_attention` takes them; None for rows of one document.
        sinks: whether there is a learned sink logit for each head.
        seed: of the numbers in its tensors.
    """

    pattern: ra.Pattern
    batch: int = 1
    seq_len: int = 40
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    causal: bool = True
    documents: list | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 5

    @property
    def options(self):
        """Arguments of both `ra.ring_attention` and the definition beside tensors."""
        names = ("pattern", "causal", "scale", "documents", "softcap")
        return {name: getattr(self, name) for name in names}

    @property
    def rows(self):
        """The documents [(start, stop)] of each batch row."""
        return self.documents or [[(0, self.seq_len)]] * self.batch

    def problem(self, layout, settings=None):
        """The same in integers, as plans are made of it."""
        more = {} if settings is None else {"settings": settings}
        heads = self.num_heads, self.num_kv_heads
        return problem_of(self.pattern, layout, self.rows, heads, causal=self.causal, **more)

    @cached_property
    def tensors(self):
        """q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv], the gradient of the output [B, H, n, Dv], and the sinks [H] or
        None.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        widths = (self.head_dim, self.head_dim, self.value_dim, self.value_dim)
        tensors = [draw(self.batch, count, self.seq_len, width) for count, width in zip(heads, widths)]
        return *tensors, draw(self.num_heads) if self.sinks else None

    @cached_property
    def definition(self):
        """[out, lse, dq, dk, dv, and the sinks' gradient if there are sinks] by the oracle, in float64."""
        return self.by_definition(torch.float64)

    @cached_property
    def rounded(self):
        """The same as the oracle gives it if it is computed in the dtype of the case."""
        return self.definition if self.dtype == torch.float64 else self.by_definition(self.dtype)

    @cached_property
    def rounding(self):
        """The errors of the oracle itself in that dtype."""
        return relative_errors(self.rounded, self.definition)

    def by_definition(self, dtype):
        *whole, dout, logits = self.tensors
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (*whole, *([] if logits is None else [logits]))]
        sinks = None if logits is None else leaves[3]
        out, lse = reference_attention(*leaves[:3], sinks=sinks, dtype=dtype, **self.options)
        out.backward(dout.to(dtype))
        return [out.detach(), lse.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def case_of(text, **changes):
    """The case of a pattern's text, with these changes of the usual sizes."""
    return Case(pattern=ra.Pattern.parse(text), **changes)


def random_cases(rng, count, dtype=torch.float64, max_len=40):
    return [random_case(rng, dtype, max_len) for _ in range(count)]


def random_case(rng, dtype=torch.float64, max_len=40, heads=None, **changes):
    """Any case, with sequences of at most `max_len` tokens.

    Args:
        heads: query heads, and key/value heads; None for any.
        changes: what is not drawn.
    """
    num_kv_heads, head_dim = rng.randint(1, 4), rng.choice([4, 7, 8, 16])
    num_heads, num_kv_heads = heads or (num_kv_heads * rng.randint(1, 3), num_kv_heads)
    batch, seq_len = changes.get("batch", rng.randint(1, 3)), changes.get("seq_len", rng.randint(1, max_len))
    drawn = {
        "pattern": random_pattern_of(rng, num_kv_heads),
        "batch": batch,
        "seq_len": seq_len,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_dim": rng.choice([head_dim, head_dim, 3, 9]),
        "causal": rng.random() < 0.6,
        "documents": random_documents(rng, batch, seq_len),
        "scale": rng.choice([None, 0.3]),
        "softcap": rng.choice([None, None, 1.5]),
        "sinks": rng.random() < 0.3,
        "dtype": dtype,
        "seed": rng.randrange(2**31),
    }
    return Case(**{**drawn, **changes})


def fitting_heads(rng, ranks):
    """Heads that divide among the ranks: key/value heads for each of them, or one for several."""
    num_kv_heads = rng.choice([n for n in range(1, 3 * ranks + 1) if 0 in (ranks % n, n % ranks)])
    return max(ranks, num_kv_heads) * rng.choice([1, 2, 3]), num_kv_heads


def errors_of(ring, calls, layouts, device="cpu", attention=ra.ring_attention):
    """The largest error of out, lse, dq, dk, dv and the sinks' gradient, relative to the largest value (of any gradient).

    Every rank has the same whole tensors, of which it gives its part, and compares the unsharded results.

    Args:
        calls: cases of the same tensors, computed one after the other, so that their gradients add up.
        layouts: the layout of each call.
    """
    *whole, dout, logits = (None if x is None else x.to(device, copy=True) for x in calls[0].tensors)
    leaves = [x.requires_grad_() for x in whole]
    sinks = None if logits is None else logits.requires_grad_()
    outputs = []
    for case, layout in zip(calls, layouts, strict=True):
        local = [ring.shard(x, layout, dim=2) for x in leaves]
        out, lse = attention(*local, **case.options, sinks=sinks, ring=ring, layout=layout, return_lse=True)
        assert out.dtype == case.dtype
        out.backward(ring.shard(dout, layout, dim=2))
        outputs.append([ring.unshard(x.detach().cpu(), layout, dim=2) for x in (out, lse)])
    # Of a token's gradient, all ranks but the one that holds it have zeros.
    grads = [sum(ring.gather(x.grad.cpu())) for x in leaves]
    assert all(x.dtype == calls[0].dtype for x in grads)
    if sinks is not None:
        grads.append(torch.stack(ring.gather(sinks.grad.cpu())).double().sum(0))
    got, want = [*map(torch.cat, zip(*outputs)), *grads], together([case.definition for case in calls])
    without_keys = want[1] == -torch.inf
    assert torch.equal(got[1] == -torch.inf, without_keys), "queries without a key"
    assert torch.all(got[0][without_keys] == 0), "output of queries without a key"
    return relative_errors(got, want)


def together(results):
    """The results of several calls in one: outputs and log-sum-exps side by side, gradients added up."""
    outs, lses, *grads = zip(*results)
    return [torch.cat(outs), torch.cat(lses), *map(sum, grads)]


def relative_errors(got, want):
    """By name; gradients share a scale. A log-sum-exp rounds as its largest value does, or absolutely if that is below 1.

    So do outputs and gradients if the largest is so small that a dtype's smallest number is more than its rounding.
    """
    smallest = torch.finfo(got[0].dtype).tiny / torch.finfo(got[0].dtype).eps
    of_out, *of_gradients = (float(x.abs().max()) for x in (want[0], *want[2:]))
    of_lse = max([1.0, *want[1][want[1] != -torch.inf].abs().tolist()])
    scales = [max(of_out or 1.0, smallest), of_lse] + [max(max(of_gradients) or 1.0, smallest)] * 4
    found = {}
    for name, x, exact, scale in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, want, scales):
        there = exact != -torch.inf  # of rows with keys
        found[name] = float((x - exact)[there].abs().max()) / scale if there.any() else 0.0
    return found


def check_cases(ring, cases, tolerance=None, device="cpu"):
    """Compares each case with the oracle on this ring, whose ranks all have the same cases."""
    for case in cases:
        check_calls(ring, [case], [ring.layout_for(case.seq_len, case.pattern, case.rows)], tolerance, device)


def check_simulated(cases, world_size, settings=None, tolerance=None, device="cpu", **options):
    """`check_cases` on simulated ranks.

    Args:
        settings: other values of the settings of the ring.
        options: of the ring.
    """
    for case in cases:  # what ranks share, before their threads would each compute it
        assert case.definition and case.rounding

    def check(ring):
        ring.settings = replace(ring.settings, **(settings or {}))
        check_cases(ring, cases, tolerance, device)

    run_simulated(check, world_size, **options)


def check_calls(ring, calls, layouts, tolerance=None, device="cpu", attention=ra.ring_attention):
    """Compares calls in a row with the oracle, as `errors_of` has them.

    Without a tolerance the bound is `EXACT_ATTENTION` in float64, and what `allowed` gives in other dtypes.
    """
    errors, dtype, bound = errors_of(ring, calls, layouts, device, attention), calls[0].dtype, tolerance
    if bound is None and dtype == torch.float64:
        bound = EXACT_ATTENTION
    elif bound is None:
        exact, rounded = (together([getattr(case, name) for case in calls]) for name in ("definition", "rounded"))
        bound = allowed(largest(relative_errors(rounded, exact).values()), dtype)
    assert largest(errors.values()) <= bound, f"{ring}: {errors}, of {bound}, in {calls}"
