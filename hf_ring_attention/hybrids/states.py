"""Passes the states of mixers from run to run of a document, over the ranks of a ring.

A *run* is a stretch of a document whose tokens follow each other on one rank. A run turns the state S before it into M S + U,
and its outputs are the outputs for S = 0 plus a part that reads S. So every rank computes M and U of its runs at once, one
small gather brings them to all ranks, and each rank combines those before its own runs. A causal convolution needs the last
inputs of the run before. The bytes do not depend on the length of runs.

Mixers call the functions that take states by name. So a clone of the mixer's forward runs, in which these names are functions
of this module. Nothing in Transformers changes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..compute.foreign_code import globals_called, rebound
from ..compute.merge import without_autocast
from ..hf.forward_pass import running
from ..plan.state_runs import StateRun, linked_runs
from ..ring.ring import Ring

#: The tokens of a run that read the entries of Mamba's state at once, [channels, N] for each of them.
_AT_ONCE = 64

#: A time step before softplus. Softplus makes it zero, so nothing decays.
_NO_TIME = -1e4


class StatesBehind:
    """Stands in for an empty cache, and takes the states behind the last run of each batch row.

    A mixer would store the inputs and states of this rank's runs. The functions that pass states store those of whole rows
    instead.
    """

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self._convolutions: list[tuple[int, dict[str, Any]]] = []
        self._states: list[tuple[Tensor, int, dict[str, Any]]] = []

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """Returns no inputs, and no state, as an empty cache does."""

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        """Returns the inputs of a convolution, as an empty cache does."""
        self._convolutions.append((layer_idx, kwargs))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        """Takes a state, which `_along` has computed for whole rows."""
        self._states.append((recurrent_states, layer_idx, kwargs))
        return recurrent_states

    def store_in(self, cache: Any) -> None:
        """Puts the states into an empty cache, in the mixer's own order."""
        for inputs, (layer_idx, kwargs) in zip(self.inputs, self._convolutions):
            cache.update_conv_state(inputs, layer_idx, **kwargs)
        for state, layer_idx, kwargs in self._states:
            cache.update_recurrent_state(state, layer_idx, **kwargs)


@dataclass
class Chain:
    """The runs that states pass along. Each rank computes its runs in one batch."""

    ring: Ring
    runs: list[StateRun]  # of all ranks, in the order of the whole rows; `StateRun.before` is an index into this list
    own: list[int]  # the indices of this rank's runs, in the order of its batch
    most: int  # the largest number of runs on a rank
    longest: int  # the tokens of this rank's batch; shorter runs have padding before them
    behind: StatesBehind | None  # takes the states behind rows of one document each, if they are needed
    rows: int  # the batch rows
    # Zero, made of everything that was gathered: all ranks must take part in a gather's backward, even if they read nothing.
    touched: Tensor | float = 0.0

    @property
    def valid(self) -> list[int]:
        """The tokens of each row of the batch; 0 for rows that only fill it up."""
        lengths = [self.runs[number].stop - self.runs[number].start for number in self.own]
        return lengths + [0] * (self.most - len(lengths))

    def gathered(self, x: Tensor) -> list[Tensor]:
        """Returns the value of each run, from this rank's x [most, ...] in the order of its batch."""
        whole = self.ring.side_by_side(x, 0)
        self.touched = self.touched + whole[:0].sum()
        places = [itertools.count(rank * self.most) for rank in range(self.ring.world_size)]
        return [whole[next(places[run.rank])] for run in self.runs]

    def own_of(self, by_run: list[Tensor], empty: Tensor) -> Tensor:
        """Returns the values of this rank's runs in the order of its batch, and `empty` for rows that fill it up."""
        rows = [by_run[number] for number in self.own] + [empty] * (self.most - len(self.own))
        return torch.stack(rows) + self.touched

    def mask(self, device: torch.device) -> Tensor:
        """Returns [most, longest] bool: True for tokens, which stand behind their padding."""
        places = torch.arange(self.longest, device=device)
        return places >= self.longest - torch.tensor(self.valid, device=device)[:, None]


def chain_of(ring: Ring, runs: Sequence[StateRun], rows: int, behind: StatesBehind | None = None) -> Chain | None:
    """Returns the chain of the runs that are not whole documents, or with `behind` of all runs; None for an empty chain."""
    linked, most = linked_runs(runs, behind is not None)
    if not linked:
        return None
    own = [number for number, run in enumerate(linked) if run.rank == ring.rank]
    longest = max((linked[number].stop - linked[number].start for number in own), default=1)
    return Chain(ring, linked, own, most, longest, behind, rows)


def _along(
    chain: Chain, steps: Sequence[Any], behind: Callable[[Any, Tensor], Tensor], empty: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns the states before each run of this rank's batch, and the states behind each batch row if `chain.behind` is set.

    Each run has a step, the M and U that change its state: `behind(step, state before)` is the state behind. A document
    begins with the `empty` state.
    """
    states: list[Tensor] = []
    for run in chain.runs:
        states.append(empty if run.before < 0 else behind(steps[run.before], states[run.before]))
    if chain.behind is None:
        return chain.own_of(states, empty), None
    last = {run.row: number for number, run in enumerate(chain.runs)}
    rows = [behind(steps[last[row]], states[last[row]]) if row in last else empty for row in range(chain.rows)]
    return chain.own_of(states, empty), torch.stack(rows)


def _convolution(
    function: Any, chain: Chain, hidden_states: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """A causal convolution of x [runs, channels, n]; each run begins with the last inputs of the run before it."""
    reach = weight.shape[-1] - (chain.behind is None)  # Caches hold one input more than a convolution looks back.
    x = hidden_states.masked_fill(~chain.mask(hidden_states.device)[:, None], 0)
    tails = chain.gathered(F.pad(x, (reach, 0))[..., x.shape[-1] :])

    def behind(number: int, state: Tensor) -> Tensor:
        length = min(chain.runs[number].stop - chain.runs[number].start, reach)
        return torch.cat([state[..., length:], tails[number][..., reach - length :]], -1)

    before, rows_behind = _along(chain, range(len(tails)), behind, x.new_zeros(x.shape[1], reach))
    if chain.behind is not None and rows_behind is not None:
        chain.behind.inputs.append(rows_behind)
    rows = []
    for number, length in enumerate(chain.valid):
        padding = x.shape[-1] - length
        rows.append(torch.cat([x[number, :, :padding], before[number], x[number, :, padding:]], -1))
    out: Tensor = function(torch.stack(rows), weight, *args, **kwargs)
    return out[..., reach:]


def _delta_rule(
    function: Any, chain: Chain, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, value [runs, n, heads, Dv], state [heads, Dk, Dv].

    The state gets Dk more columns, which begin as the identity and take no values. Behind the run they are M, and their outputs
    are the parts that each query reads of the state before the run.
    """
    tokens = chain.mask(value.device)[:, :, None]
    beta = beta.masked_fill(~tokens, 0)
    g = g.masked_fill(~tokens if g.dim() == 3 else ~tokens[..., None], 0)
    heads, width, depth = value.shape[2], value.shape[3], key.shape[-1]
    dtype = torch.promote_types(value.dtype, torch.float32)
    identity = F.pad(torch.eye(depth, dtype=dtype, device=value.device), (width, 0))
    kwargs |= {"initial_state": identity.expand(len(value), heads, -1, -1).contiguous(), "output_final_state": True}
    out, final = function(query, key, F.pad(value, (0, depth)), g=g, beta=beta, **kwargs)
    steps = chain.gathered(final)

    def behind(step: Tensor, state: Tensor) -> Tensor:
        return step[..., width:] @ state + step[..., :width]

    with without_autocast(final):
        before, rows_behind = _along(chain, steps, behind, torch.zeros_like(final[0, ..., :width]))
        read = torch.einsum("bthk,bhkv->bthv", out[..., width:].to(before.dtype), before)
    return (out[..., :width] + read).to(out.dtype), rows_behind


def _decays(dt: Tensor, bias: Tensor | None, softplus: bool, limits: tuple[float, float] | None) -> Tensor:
    """Returns the time steps as a scan takes them, in float32 at least."""
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if softplus else dt
    return dt if limits is None else dt.clamp(*limits)


def _along_decays(chain: Chain, final: Tensor, decay: Tensor) -> tuple[Tensor, Tensor | None]:
    """Does `_along` for states whose entries decay independently.

    `final` has the states [runs, ...] behind this rank's runs for zero states before them, and `decay`, which broadcasts to
    it, the factor that a run multiplies the state before it with.
    """
    finals, decays = chain.gathered(final), chain.gathered(decay)
    steps = list(zip(decays, finals))
    return _along(chain, steps, lambda step, state: step[0] * state + step[1], torch.zeros_like(final[0]))


def _state_space(
    function: Any, chain: Chain, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The scan of Mamba 2, x [runs, n, heads, P], state [heads, P, N]; all entries of a head decay alike."""
    tokens = chain.mask(dt.device)[:, :, None]
    kwargs |= {"return_final_states": True, "initial_states": None}
    out, final = function(x.masked_fill(~tokens[..., None], 0), dt, A, B, C, *args, **kwargs)
    limits = kwargs.get("dt_limit")
    time = _decays(dt, kwargs.get("dt_bias"), kwargs.get("dt_softplus", False), limits).masked_fill(~tokens, 0)
    decay = (time * A.to(time.dtype)).cumsum(1)
    before, rows_behind = _along_decays(chain, final, decay[:, -1].exp()[..., None, None])
    groups = C.shape[2]  # of heads, which share B and C
    with without_autocast(before):
        read = torch.einsum("btgn,bgrpn->btgrp", C.to(before.dtype), before.unflatten(1, (groups, -1))).flatten(2, 3)
    read = read * decay.exp()[..., None].to(before.dtype)
    gate = kwargs.get("z")
    out = (out + (read if gate is None else read * F.silu(gate))).to(out.dtype)
    return out if rows_behind is None else (out, rows_behind)


def _selective(
    function: Any, chain: Chain, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The selective scan of Mamba, x [runs, channels, n], state [channels, N]; each entry decays by itself.

    The kernel of mamba-ssm returns the state without its gradient. So N more tokens stand behind the run. They take no time and
    add nothing, and each reads one entry: their outputs are the state, with its gradient.
    """
    tokens, entries = chain.mask(dt.device)[:, None, :], A.shape[-1]
    dtype = torch.promote_types(dt.dtype, torch.float32)
    softplus, bias, z = kwargs.get("delta_softplus", False), kwargs.get("delta_bias"), kwargs.pop("z", None)
    readers = torch.eye(entries, dtype=C.dtype, device=C.device).expand(len(C), -1, -1)
    out, final = function(
        F.pad(x.masked_fill(~tokens, 0), (0, entries)),
        F.pad(dt, (0, entries), value=_NO_TIME if softplus else 0),
        A,
        F.pad(B, (0, entries)),
        torch.cat([C, readers], -1),
        *args,
        **{**kwargs, "z": None, "return_last_state": True},
    )
    out, state = out.to(dtype).split([dt.shape[-1], entries], -1)
    final = final.detach().to(dtype) + (state - state.detach())
    bias = None if bias is None else bias[..., None]
    time = _decays(dt, bias, softplus, None).masked_fill(~tokens, 0).cumsum(-1)
    A = A.to(time.dtype)
    before, rows_behind = _along_decays(chain, final, (A * time[..., -1:]).exp())
    pieces = zip(time.split(_AT_ONCE, -1), C.to(time.dtype).split(_AT_ONCE, -1))
    read = torch.cat([_read_by_entries(A, before.to(time.dtype), *piece) for piece in pieces], -1)
    out = (out + read if z is None else (out + read) * F.silu(z)).to(x.dtype)
    return out if rows_behind is None else (out, rows_behind)


def _read_by_entries(A: Tensor, before: Tensor, time: Tensor, C: Tensor) -> Tensor:
    """Returns the parts [runs, channels, n] that the outputs of some tokens read of the state before their run.

    All entries of all these tokens exist at once, here and in backward, which computes them again. A is [channels, N], before
    [runs, channels, N], time [runs, channels, n] since the beginning of the run, and C [runs, N, n].
    """

    def read(A: Tensor, before: Tensor, time: Tensor, C: Tensor) -> Tensor:
        with without_autocast(before):
            return torch.einsum("bint,bin,bnt->bit", (A[:, :, None] * time[:, :, None]).exp(), before, C)

    if not torch.is_grad_enabled():
        return read(A, before, time, C)
    out: Tensor = checkpoint(read, A, before, time, C, use_reentrant=False, preserve_rng_state=False)
    return out


def _left_out(function: Any, chain: Chain, *args: Any, **kwargs: Any) -> None:
    """Stands for a kernel that fuses several steps; as it returns None, mixers take the steps one by one."""


#: The functions that pass states, by the names that mixers call.
_PASSERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "chunk_kimi_delta_attention": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective,
    "mamba2_split_conv1d_scan_combined": _left_out,
    "mamba_inner_fn": _left_out,
}

#: Mixers that update their states without a function that they call by name; ranks gather rows for them.
_NOT_PASSED = ("MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock")


@functools.cache
def passing_forward(mixer_class: type) -> Callable[..., Any] | None:
    """Returns a clone of a mixer's forward that passes states along the running chain; None if its states cannot pass."""
    forward = inspect.unwrap(vars(mixer_class)["forward"])
    names, space = globals_called(forward) & _PASSERS.keys(), forward.__globals__
    if mixer_class.__name__ in _NOT_PASSED or not all(callable(space.get(name)) for name in names):
        return None
    states = {name for name in names if _PASSERS[name] not in (_convolution, _left_out)}
    # A "ShortConv" is a convolution without another state.
    if "causal_conv1d_fn" not in names or not (states or mixer_class.__name__.endswith("ShortConv")):
        return None
    return rebound(forward, {name: functools.partial(_pass, space, name) for name in names})


def _pass(space: dict[str, Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of Transformers, and passes states along the running chain."""
    return _PASSERS[name](space[name], running().chain, *args, **kwargs)
