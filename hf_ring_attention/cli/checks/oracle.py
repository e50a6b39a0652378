"""Checks attention over this very ring against its definition: outputs and all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from ...compute.kernels import choose_kernel
from ...compute.reference import reference_attention
from ...cost.models import attention_of_model
from ...plan.heads import heads_fit
from ...plan.layouts import LayoutKind, SequenceLayout
from ...plan.patterns import Pattern
from ...plan.problem import Documents
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from .runner import CheckRun, NotApplicable, Verdict, processes

#: The bound of errors in float64, relative to the largest entry: some thousand of its roundings.
EXACT_IN_FLOAT64 = 1e-12
#: How much more than the definition in the same dtype attention may be off: two sums in other orders, and chance.
_FACTOR = 8
#: A pattern that shows something of all that is sparse in a row of a few tokens.
_SPARSE = "pyramid:4,2"
_NAMES = ("out", "dq", "dk", "dv")


class AttentionCase:
    """A row of random numbers, the same on every process, and attention of it by the definition and over a ring.

    Attributes:
        solutions: by dtype the results by the definition, in float64, and the bound of errors.
    """

    def __init__(
        self, heads: tuple[int, ...], pattern: Pattern, kind: LayoutKind, tokens: int, dtypes: Iterable[Any]
    ) -> None:
        self.pattern, self.kind, self.tokens = pattern, kind, tokens
        whole: Documents = (((0, tokens),),)
        pieces = tuple(itertools.pairwise([0, tokens // 3, tokens // 2, tokens - 2]))
        self.documents = (pieces, *whole) if kind == "documents" else whole
        generator = torch.Generator().manual_seed(0)
        queries, keys, width, value_width = heads
        self.tensors = [
            torch.randn(len(self.documents), count, tokens, size, generator=generator, dtype=torch.float64)
            for count, size in ((queries, width), (keys, width), (keys, value_width), (queries, value_width))
        ]
        self.solutions: dict[torch.dtype, tuple[list[Tensor], float]] = {}
        for dtype in dtypes:
            exact, bound = self.by_definition(dtype, torch.float64), EXACT_IN_FLOAT64
            if dtype != torch.float64:
                rounded = errors_between(self.by_definition(dtype, dtype), exact, exact)
                bound = _FACTOR * (_largest(rounded) + torch.finfo(dtype).eps)
            self.solutions[dtype] = exact, bound

    def by_definition(self, dtype: torch.dtype, computed_in: torch.dtype) -> list[Tensor]:
        """Returns out, dq, dk and dv of the tensors in `dtype`, by the definition."""
        *leaves, dout = (x.to(dtype).to(computed_in).detach() for x in self.tensors)
        leaves = [x.requires_grad_() for x in leaves]
        out, _ = reference_attention(*leaves, pattern=self.pattern, documents=self.documents, dtype=computed_in)
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]

    def over(self, ring: Ring, layout: SequenceLayout, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Returns this rank's part of the same, computed over a ring."""
        *leaves, dout = (ring.shard(x.to(dtype), layout, dim=2).to(device).detach() for x in self.tensors)
        leaves = [x.requires_grad_() for x in leaves]
        out = ring_attention(*leaves, pattern=self.pattern, ring=ring, layout=layout, documents=self.documents)
        return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]


def errors_between(results: list[Tensor], expected: list[Tensor], whole: list[Tensor]) -> dict[str, float]:
    """Returns the largest error of each tensor, relative to the largest entry of `whole`; gradients share one scale."""
    largest_output, *gradients = (float(x.abs().max()) for x in whole)
    scales = (largest_output, *[max(gradients)] * 3)
    return {name: float((x - y).abs().max()) / scale for name, x, y, scale in zip(_NAMES, results, expected, scales)}


def _largest(errors: dict[str, float]) -> float:
    """Returns the largest error; a NaN counts as the largest, which Python's max may pass over."""
    return float(torch.tensor(list(errors.values())).max())


def _heads(run: CheckRun) -> tuple[int, int, int, int]:
    """Returns (query heads, key/value heads, head size, value size): the model's, else some that divide among all ranks."""
    try:
        if run.options.model is not None:
            attention = attention_of_model(run.facts["config"], run.options.model)
            return attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.value_dim
    except ValueError:
        pass  # The layers differ.
    return 2 * run.ring_size, run.ring_size, 16, 16


def _cases(run: CheckRun, heads: tuple[int, ...]) -> list[AttentionCase]:
    """Returns the job's pattern and a sparse one in each layout, in float64 and in the job's dtype."""
    tokens, dtypes = max(50, 2 * run.ring_size + 5), dict.fromkeys((torch.float64, run.facts["dtype"]))
    patterns = dict.fromkeys((Pattern.parse(run.facts["pattern"]), Pattern.parse(_SPARSE)))
    kinds: tuple[LayoutKind, ...] = get_args(LayoutKind)
    return [AttentionCase(heads, pattern, kind, tokens, dtypes) for pattern in patterns for kind in kinds]


def measure_transport(run: CheckRun, transport: str, neighbours: bool) -> dict[str, Any]:
    """Compares a transport with the definition, and returns this rank's largest error and its bound by dtype.

    Args:
        neighbours: with "heads", whether only neighbours exchange heads, and rings go round the groups of them.
    """
    queries, keys, *widths = heads = _heads(run)
    size = _group_size(run.ring_size, queries, keys, neighbours) if transport == "heads" else None
    if "cases" not in run.facts:  # All transports have the same.
        run.facts["cases"] = _cases(run, heads)
    worst: dict[str, list[float]] = {}
    beyond: list[tuple[str, str, str, float, float]] = []
    for case in run.facts["cases"]:
        ring = Ring.alone()
        if run.ring_size > 1:
            group: Any = run.group
            ring = Ring(group, layout=case.kind, transport=transport, heads=size)  # type: ignore[arg-type]
        layout = ring.layout_for(case.tokens, case.pattern, case.documents)
        for dtype, (exact, bound) in case.solutions.items():
            results = case.over(ring, layout, dtype, run.device)
            errors = errors_between(results, [ring.shard(x, layout, dim=2) for x in exact], exact)
            kind = str(dtype).removeprefix("torch.")
            worst[kind] = max(worst.get(kind, [0.0, bound]), [_largest(errors), bound])
            beyond += [(x, layout.kind, kind, error, bound) for x, error in errors.items() if not error <= bound]
    kernel = choose_kernel(run.device, run.facts["dtype"], *widths)
    return {"errors": worst, "beyond": beyond, "kernel": kernel.name, "size": size}


def _group_size(ring_size: int, queries: int, keys: int, neighbours: bool) -> int | None:
    """Returns how many neighbours exchange heads; None for all ranks.

    Raises:
        NotApplicable: heads that do not divide among them.
    """
    parts = [n for n in range(2, ring_size) if ring_size % n == 0] if neighbours else [ring_size]
    if not parts:
        raise NotApplicable(f"a ring of {ring_size} has no parts of 2 ranks or more")
    sizes = [n for n in parts if heads_fit(queries, keys, n)]
    if not sizes:
        among = f"a part of {ring_size}" if neighbours else str(ring_size)
        raise NotApplicable(f"{queries} query and {keys} key/value heads do not divide among {among} ranks")
    return sizes[-1] if neighbours else None


def judge_transport(run: CheckRun, answers: list[dict[str, Any]], *_: Any) -> Verdict:
    beyond = {rank: answer["beyond"] for rank, answer in enumerate(answers) if answer["beyond"]}
    if beyond:
        # A wrong output makes the gradients of other ranks wrong too, so only ranks with one are named.
        causes = {rank: errors for rank, errors in beyond.items() if any(name == "out" for name, *_ in errors)}
        causes = causes or beyond
        name, layout, dtype, error, bound = next(iter(causes.values()))[0]
        where = f"in {layout}, {dtype}"
        text = f"{processes([*causes])}: {name} is {error:.1e} from the definition, of {bound:.1e}, {where}"
        return Verdict("failed", text)
    worst = {name: max(tuple(answer["errors"][name]) for answer in answers) for name in answers[0]["errors"]}
    shown = ", ".join(f"{name} {error:.1e} of {bound:.1e}" for name, (error, bound) in worst.items())
    groups = f"groups of {answers[0]['size']}, " if answers[0]["size"] else ""
    text = f"{groups}outputs and gradients off by {shown}; kernel {answers[0]['kernel']}"
    return Verdict("ok", text)
