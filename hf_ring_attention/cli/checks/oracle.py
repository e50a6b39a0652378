"""Checks of attention over this very ring against its definition: outputs, all gradients, and the bytes that move."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from ...compute.kernels import choose_kernel
from ...compute.merge import accumulation_dtype
from ...compute.reference import reference_attention
from ...cost.models import attention_of_model, load_config
from ...plan.heads import heads_fit, heads_traffic
from ...plan.layouts import LayoutKind, SequenceLayout
from ...plan.patterns import Pattern
from ...plan.problem import Documents, Problem
from ...plan.traffic import RowBytes, collective_traffic, ring_traffic
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from .precision import largest
from .runner import CheckRun, NotApplicable, Verdict, processes

#: The bound of errors in float64, relative to the largest entry: some thousand of its roundings.
EXACT_IN_FLOAT64 = 1e-12
#: How much more than the definition in the same dtype attention may be off: two sums in other orders, and chance.
_FACTOR = 8
#: A pattern that shows something of all that is sparse in a row of a few tokens.
_SPARSE = "pyramid:4,2"
_NAMES = ("out", "dq", "dk", "dv")
_PLANNED = {"ring": ring_traffic, "collective": collective_traffic, "heads": heads_traffic}


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of attention: those of the model, since they decide the kernel, and whether heads divide among ranks."""

    query: int
    key_value: int
    width: int
    value_width: int


def heads_of(run: CheckRun) -> HeadSizes:
    """Returns the model's heads; without a model, or where its layers differ, some that divide among all ranks."""
    try:
        if run.options.model is not None:
            attention = attention_of_model(load_config(run.options.model), run.options.model)
            return HeadSizes(attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.value_dim)
    except ValueError:
        pass  # The check "model" has read the config already, so it is its layers that differ.
    return HeadSizes(2 * run.ring_size, run.ring_size, 16, 16)


class Attention:
    """An attention problem, the same on every process, and its solution by the definition."""

    def __init__(self, heads: HeadSizes, pattern: Pattern, documents: Documents, tokens: int) -> None:
        self.heads, self.pattern, self.documents, self.tokens = heads, pattern, documents, tokens
        generator = torch.Generator().manual_seed(0)
        sizes = ((heads.query, heads.width), (heads.key_value, heads.width), (heads.key_value, heads.value_width))
        self.tensors = [
            torch.randn(len(documents), count, tokens, width, generator=generator, dtype=torch.float64)
            for count, width in (*sizes, (heads.query, heads.value_width))
        ]

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

    def planned_bytes(self, ring: Ring, layout: SequenceLayout, transport: str, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the bytes that the plan says a rank sends and receives."""
        problem = Problem(
            self.pattern,
            layout,
            self.documents,
            num_heads=self.heads.query,
            num_kv_heads=self.heads.key_value,
            settings=ring.settings,
        )
        widths = self.heads.width + self.heads.value_width
        sizes = RowBytes(widths * dtype.itemsize, widths * accumulation_dtype(dtype).itemsize)
        planned = _PLANNED[transport](problem, ring.rank, sizes)
        return planned.forward.sent + planned.backward.sent, planned.forward.received + planned.backward.received


class TransportOracle:
    """The problems that every transport is given, with their solutions, which are computed once.

    Attributes:
        dtypes: float64, and that of the model.
    """

    def __init__(self, run: CheckRun) -> None:
        self.run, self.heads = run, heads_of(run)
        self.dtypes = tuple(dict.fromkeys((torch.float64, run.state["dtype"])))
        #: The bytes of each call: (transport, layout, planned, counted).
        self.bytes: list[tuple[str, str, tuple[int, int], tuple[int, int]]] = []

    @cached_property
    def problems(self) -> list[tuple[str, Attention]]:
        """The problems, each with the kind of its layout: one document a row, and packed rows with padding."""
        tokens = max(50, 2 * self.run.ring_size + 5)
        cuts = [0, tokens // 3, tokens // 2, tokens - 2]
        whole: Documents = (((0, tokens),),)
        packed: Documents = (tuple(itertools.pairwise(cuts)), *whole)
        patterns = dict.fromkeys((Pattern.parse(self.run.state["pattern"]), Pattern.parse(_SPARSE)))
        return [
            (kind, Attention(self.heads, pattern, packed if kind == "documents" else whole, tokens))
            for pattern in patterns
            for kind in get_args(LayoutKind)
        ]

    @cached_property
    def solutions(self) -> list[dict[torch.dtype, tuple[list[Tensor], float]]]:
        """For each problem and dtype the solution, and how far off the definition is in that dtype."""
        answers = []
        for _, problem in self.problems:
            by_dtype = {}
            for dtype in self.dtypes:
                exact = problem.by_definition(dtype, torch.float64)
                bound = EXACT_IN_FLOAT64
                if dtype != torch.float64:
                    rounded = _errors_between(problem.by_definition(dtype, dtype), exact, exact)
                    bound = _FACTOR * (largest(rounded.values()) + torch.finfo(dtype).eps)
                by_dtype[dtype] = exact, bound
            answers.append(by_dtype)
        return answers

    def errors(self, transport: str, size: int | None = None) -> dict[str, Any]:
        """Returns this rank's largest error by dtype with its bound, and the tensors that are beyond it."""
        worst: dict[str, tuple[float, float]] = {}
        beyond: list[tuple[str, str, str, float, float]] = []
        for (kind, problem), solution in zip(self.problems, self.solutions):
            group: Any = self.run.group
            if self.run.ring_size == 1:
                ring = Ring.alone()
            else:
                ring = Ring(group, layout=kind, transport=transport, heads=size)  # type: ignore[arg-type]
            layout = ring.layout_for(problem.tokens, problem.pattern, problem.documents)
            for dtype in self.dtypes:
                exact, bound = solution[dtype]
                ring.reset_traffic()
                own = problem.over(ring, layout, dtype, self.run.device)
                if ring.world_size > 1:
                    counted = (ring.traffic().sent_bytes, ring.traffic().received_bytes)
                    self.bytes.append((transport, kind, problem.planned_bytes(ring, layout, transport, dtype), counted))
                errors = _errors_between(own, [ring.shard(x, layout, dim=2) for x in exact], exact)
                name = str(dtype).removeprefix("torch.")
                worst[name] = max(worst.get(name, (0.0, bound)), (largest(errors.values()), bound))
                beyond += [(x, layout.kind, name, e, bound) for x, e in errors.items() if not e <= bound]
        kernel = choose_kernel(self.run.device, self.dtypes[-1], self.heads.width, self.heads.value_width).kernel
        return {"errors": worst, "beyond": beyond, "kernel": kernel.name}


def _errors_between(found: list[Tensor], expected: list[Tensor], whole: list[Tensor]) -> dict[str, float]:
    """Returns the largest error of each tensor, relative to the largest entry of `whole`; gradients share theirs."""
    largest_output, *gradients = (float(x.abs().max()) for x in whole)
    scales = (largest_output, *[max(gradients)] * 3)
    return {name: float((x - y).abs().max()) / scale for name, x, y, scale in zip(_NAMES, found, expected, scales)}


def oracle_of(run: CheckRun) -> TransportOracle:
    """Returns the problems of this run, made when they are first asked for."""
    if "oracle" not in run.state:
        run.state["oracle"] = TransportOracle(run)
    oracle: TransportOracle = run.state["oracle"]
    return oracle


def check_transport(run: CheckRun, transport: str, neighbours: bool = False) -> dict[str, Any]:
    """Compares a transport with the definition.

    Args:
        neighbours: with "heads", whether only neighbours exchange heads, and rings go round the groups of them.
    """
    oracle, size = oracle_of(run), None
    if transport == "heads":
        heads = (oracle.heads.query, oracle.heads.key_value)
        parts = [n for n in range(2, run.ring_size) if run.ring_size % n == 0]
        divisors = [n for n in parts if heads_fit(*heads, n)]
        told = f"{heads[0]} query and {heads[1]} key/value heads"
        if neighbours and not parts:
            raise NotApplicable(f"a ring of {run.ring_size} has no parts of 2 ranks or more")
        if neighbours and not divisors:
            raise NotApplicable(f"{told} do not divide among a part of {run.ring_size} ranks")
        if not neighbours and not heads_fit(*heads, run.ring_size):
            raise NotApplicable(f"{told} do not divide among {run.ring_size} ranks")
        size = divisors[-1] if neighbours else None
    return oracle.errors(transport, size) | {"size": size}


def judge_transport(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    beyond = {rank: answer["beyond"] for rank, answer in enumerate(answers) if answer["beyond"]}
    if beyond:
        # A wrong output makes the gradients of other ranks wrong too, so those with one are named alone.
        causes = {rank: found for rank, found in beyond.items() if any(name == "out" for name, *_ in found)} or beyond
        name, layout, dtype, error, bound = next(iter(causes.values()))[0]
        text = (
            f"{processes([*causes])}: {name} is {error:.1e} from the definition, of {bound:.1e}, in {layout}, {dtype}"
        )
        return Verdict("failed", text, figures={"processes": [*causes], "beyond": causes})
    worst = {name: max(answer["errors"][name] for answer in answers) for name in answers[0]["errors"]}
    shown = ", ".join(f"{name} {error:.1e} of {bound:.1e}" for name, (error, bound) in worst.items())
    groups = f"groups of {answers[0]['size']}, " if answers[0]["size"] else ""
    text = f"{groups}outputs and gradients off by {shown}; kernel {answers[0]['kernel']}"
    return Verdict("ok", text, figures={"errors": worst, "kernel": answers[0]["kernel"]})


def check_bytes(run: CheckRun) -> list[tuple[str, str, tuple[int, int], tuple[int, int]]]:
    """Returns the bytes of the calls that the oracle made."""
    if run.ring_size == 1:
        raise NotApplicable("a ring of one process moves nothing")
    return oracle_of(run).bytes


def judge_bytes(run: CheckRun, answers: list[list[tuple[str, str, tuple[int, int], tuple[int, int]]]]) -> Verdict:
    for rank, calls in enumerate(answers):
        for transport, layout, planned, counted in calls:
            if planned != counted:
                text = (
                    f"process {rank} sent {counted[0]} and received {counted[1]} bytes by {transport} in {layout}, planned "
                    f"were {planned[0]} and {planned[1]}"
                )
                return Verdict("failed", text, figures={"processes": [rank]})
    total, count = sum(counted[0] for calls in answers for *_, counted in calls), len(answers[0])
    return Verdict("ok", f"{total} bytes in {count} calls, each as planned", figures={"bytes": total, "calls": count})
