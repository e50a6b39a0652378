"""Checks attention over this very ring against its definition: outputs and all gradients."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ...compute.reference import reference_attention
from ...cost.models import attention_of_model
from ...plan.heads import heads_fit
from ...plan.layouts import LayoutKind
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


class AttentionCase(NamedTuple):
    """Rows of random numbers, the same on every process, and attention of them by the definition."""

    documents: Documents
    tensors: list[Tensor]  # q, k, v and the gradient of the output
    expected: list[Tensor]  # out, dq, dk and dv by the definition, in float64
    bound: float  # of errors, as `largest_errors` returns them


@lru_cache(maxsize=64)  # All transports have the same cases.
def attention_case(
    heads: tuple[int, ...], pattern: Pattern, kind: LayoutKind, tokens: int, dtype: torch.dtype
) -> AttentionCase:
    """Returns one row of one document; or two rows with several documents in all, if the layout is of the kind "documents"."""
    documents: Documents = (((0, tokens),),)
    if kind == "documents":
        documents = (tuple(itertools.pairwise([0, tokens // 3, tokens // 2, tokens - 2])), *documents)
    generator = torch.Generator().manual_seed(0)
    queries, keys, width, value_width = heads
    tensors = [
        torch.randn(len(documents), count, tokens, size, generator=generator, dtype=torch.float64).to(dtype)
        for count, size in ((queries, width), (keys, width), (keys, value_width), (queries, value_width))
    ]

    def by_definition(computed_in: torch.dtype) -> list[Tensor]:
        *leaves, dout = (x.to(computed_in).detach() for x in tensors)
        leaves = [x.requires_grad_() for x in leaves]
        out, _ = reference_attention(*leaves, pattern=pattern, documents=documents, dtype=computed_in)
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]

    expected, bound = by_definition(torch.float64), EXACT_IN_FLOAT64
    if dtype != torch.float64:
        rounded = largest_errors(by_definition(dtype), expected, expected)
        bound = _FACTOR * (max(rounded.values()) + torch.finfo(dtype).eps)
    return AttentionCase(documents, tensors, expected, bound)


def largest_errors(results: list[Tensor], expected: list[Tensor], whole: list[Tensor]) -> dict[str, float]:
    """Returns the largest error of each tensor, relative to the largest entry of `whole`; gradients share one scale.

    A NaN is an infinite error.
    """
    largest_output, *gradients = (float(x.abs().max()) for x in whole)
    scales = zip(("out", "dq", "dk", "dv"), (largest_output, *[max(gradients)] * 3))
    errors = ((x - y).abs().nan_to_num(nan=torch.inf).max() for x, y in zip(results, expected))
    return {name: float(error) / scale for (name, scale), error in zip(scales, errors)}


def _heads(run: CheckRun) -> tuple[int, int, int, int]:
    """Returns (query heads, key/value heads, head size, value size): the model's, else some that divide among all ranks."""
    try:
        if run.options.model is not None:
            attention = attention_of_model(run.facts["config"], run.options.model)
            return attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.value_dim
    except ValueError:
        pass  # The layers differ.
    return 2 * run.ring_size, run.ring_size, 16, 16


def measure_transport(run: CheckRun, transport: str, neighbours: bool) -> dict[str, Any]:
    """Compares a transport with the definition, and returns this rank's largest error and its bound by dtype.

    The job's pattern, those of its layers and a sparse one are computed in each layout, in float64 and in the job's dtype. With
    "heads", only `neighbours` may exchange heads; rings then go round the groups of them.
    """
    queries, keys, *_ = heads = _heads(run)
    size = _group_size(run.ring_size, queries, keys, neighbours) if transport == "heads" else None
    worst: dict[str, list[float]] = {}
    beyond: list[tuple[str, str, str, float, float]] = []
    patterns = dict.fromkeys((Pattern.parse(run.facts["pattern"]), Pattern.parse(_SPARSE), *run.facts["of layers"]))
    dtypes, tokens = dict.fromkeys((torch.float64, run.facts["dtype"])), max(50, 2 * run.ring_size + 5)
    for pattern, kind, dtype in itertools.product(patterns, get_args(LayoutKind), dtypes):
        case = attention_case(heads, pattern, kind, tokens, dtype)
        setting: Any = {"layout": kind, "transport": transport, "heads": size}
        ring = Ring.alone() if run.ring_size == 1 else Ring(run.group, **setting)
        layout = ring.layout_for(tokens, pattern, case.documents)
        *leaves, dout = (ring.shard(x, layout, dim=2).to(run.device).detach() for x in case.tensors)
        leaves = [x.requires_grad_() for x in leaves]
        out = ring_attention(*leaves, pattern=pattern, ring=ring, layout=layout, documents=case.documents)
        assert isinstance(out, torch.Tensor)
        results = [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]
        errors = largest_errors(results, [ring.shard(x, layout, dim=2) for x in case.expected], case.expected)
        name = str(dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, [0.0, case.bound]), [max(errors.values()), case.bound])
        beyond += [(x, layout.kind, name, far, case.bound) for x, far in errors.items() if not far <= case.bound]
    [kernel] = ring.kernels().values()  # of the last case, in the job's dtype
    return {"errors": worst, "beyond": beyond, "kernel": kernel.choice, "size": size}


def _group_size(ring_size: int, queries: int, keys: int, neighbours: bool) -> int | None:
    """Returns how many neighbours exchange heads; None for all ranks."""
    parts = [n for n in range(2, ring_size) if ring_size % n == 0] if neighbours else [ring_size]
    if not parts:
        raise NotApplicable(f"a ring of {ring_size} has no parts of 2 ranks or more")
    sizes = [n for n in parts if heads_fit(queries, keys, n)]
    if not sizes:
        among = f"a part of {ring_size}" if neighbours else str(ring_size)
        raise NotApplicable(f"{queries} query and {keys} key/value heads do not divide among {among} ranks")
    return sizes[-1] if neighbours else None


def judge_transport(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    """Returns a failure if any process is beyond a bound."""
    beyond = {rank: answer["beyond"] for rank, answer in enumerate(answers) if answer["beyond"]}
    if beyond:
        # A wrong output makes the gradients of other ranks wrong too, so only ranks with one are named.
        causes = {rank: errors for rank, errors in beyond.items() if any(name == "out" for name, *_ in errors)}
        causes = causes or beyond
        name, layout, dtype, error, bound = next(iter(causes.values()))[0]
        far = f"{name} is {error:.1e} from the definition, of {bound:.1e}, in {layout}, {dtype}"
        return Verdict("failed", f"{processes([*causes])}: {far}")
    worst = {name: max(tuple(answer["errors"][name]) for answer in answers) for name in answers[0]["errors"]}
    shown = ", ".join(f"{name} {error:.1e} of {bound:.1e}" for name, (error, bound) in worst.items())
    groups = f"groups of {answers[0]['size']}, " if answers[0]["size"] else ""
    return Verdict("ok", f"{groups}outputs and gradients off by {shown}; kernel {answers[0]['kernel']}")
