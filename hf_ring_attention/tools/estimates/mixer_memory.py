"""What the mixers of hybrids save and work with, measured on torch's meta device, where tensors have no data.

A mixer runs forward and backward at a few lengths, and the bytes are a polynomial of the length: most grow with the tokens, the
reference scan of Mamba 2 in Transformers also with the square of its chunks, and states do not grow. Over a ring the mixer
runs along a chain of states, as `hybrids/states.py` makes it. What runs is Transformers' own code, which needs no kernels.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ...hf.forward_pass import running_with
from ...hybrids.states import Chain, can_pass, chain_of
from ...plan.layouts import SequenceLayout
from ...plan.state_runs import runs_of
from .live_bytes import LiveBytes

#: The tokens of a chunk of delta rules, which are no attribute of their mixers: the default of the functions they call.
_CHUNK_OF_DELTA_RULES = 64
#: Lengths at which a mixer runs, in chunks: the first chunks share more than later ones do.
_LENGTHS_IN_CHUNKS = (4, 8, 12)
#: Tokens, for mixers that compute one token after another, or all alike.
_LENGTHS_IN_TOKENS = (32, 64, 96)


@dataclass(frozen=True)
class GrowthOfBytes:
    """The bytes of a run, by its tokens and by the runs of the whole ring.

    Attributes:
        constant: those that do not grow.
        by_token, by_square: those for each token, and for each token with each other one.
        by_run: those for each run of the ring, whose states a rank combines.
    """

    constant: Fraction
    by_token: Fraction
    by_square: Fraction
    by_run: Fraction

    def at(self, tokens: int, own_runs: int, all_runs: int) -> int:
        """Returns the bytes of `own_runs` runs of so many tokens each, in a ring that has `all_runs` together."""
        run = self.constant + tokens * (self.by_token + tokens * self.by_square)
        return math.ceil(own_runs * run + all_runs * self.by_run)


@dataclass(frozen=True)
class MixerGrowth:
    """What a mixer saves, and the most that exists at once while it computes, what it has saved included.

    The hidden states that it reads, their gradient's source, its parameters and the gradients of these are not counted.
    """

    saved: GrowthOfBytes
    peak: GrowthOfBytes


class MeasuredMixer:
    """A mixer on torch's meta device, which is measured once for each dtype, and for passing states or not.

    Attributes:
        kind: the name of its class.
        chunk: the tokens that it computes together; runs are padded to a multiple of them.
        passes: whether its states pass from rank to rank; rows are gathered for it if not.
    """

    def __init__(self, mixer: nn.Module, width: int) -> None:
        self.kind, self.passes = type(mixer).__name__, can_pass(mixer)
        own = getattr(mixer, "chunk_size", None) or getattr(mixer, "block_size", None)
        delta_rule = self.kind.endswith(("DeltaNet", "DeltaAttention"))
        self.chunk: int = own if isinstance(own, int) else _CHUNK_OF_DELTA_RULES if delta_rule else 1
        self._mixer, self._width = mixer, width
        self._known: dict[tuple[str, bool], MixerGrowth] = {}
        for parameter in mixer.parameters():  # Their gradients are a line of their own.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def growth(self, dtype: str, passing_states: bool) -> MixerGrowth:
        """Returns what a run holds.

        Args:
            dtype: the name of that of the hidden states and of the parameters.
            passing_states: whether states pass from rank to rank.

        Raises:
            ValueError: a mixer whose code does not run on the meta device.
        """
        key = (dtype, passing_states)
        if key not in self._known:
            unit = self.chunk * -(-64 // self.chunk)
            lengths = _LENGTHS_IN_TOKENS if self.chunk == 1 else tuple(unit * chunks for chunks in _LENGTHS_IN_CHUNKS)
            try:
                measured = [self.bytes_at(length, dtype, 2 if passing_states else 1) for length in lengths]
                more_runs = self.bytes_at(lengths[0], dtype, 3) if passing_states else measured[0]
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"estimate: what {self.kind} saves is measured on torch's meta device, where its code does not run: "
                    f"{error}"
                ) from error
            saved, peak = (
                _through(lengths, [one[i] for one in measured], more_runs[i] - measured[0][i]) for i in (0, 1)
            )
            self._known[key] = MixerGrowth(saved, peak)
        return self._known[key]

    def bytes_at(self, tokens: int, dtype: str, ranks: int) -> tuple[int, int]:
        """Returns the bytes that autograd saves of a run, and the most that exist at once, as `MixerGrowth` has them."""
        number, mixer = getattr(torch, dtype), self._mixer.to(getattr(torch, dtype))
        hidden = torch.empty(1, tokens, self._width, dtype=number, device="meta", requires_grad=True)
        gradient = torch.empty_like(hidden, requires_grad=False)
        given = {x.untyped_storage() for x in (hidden, *mixer.parameters())}
        kept: set[torch.UntypedStorage] = set()

        def keep(x: Tensor) -> Tensor:
            if x.untyped_storage() not in given:
                kept.add(x.untyped_storage())
            return x

        with LiveBytes() as live, torch.device("meta"):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                out = self._run(hidden, ranks)
            saved = sum(storage.nbytes() for storage in kept)
            kept.clear()
            out.backward(gradient)
        return saved, live.peak

    def _run(self, hidden: Tensor, ranks: int) -> Tensor:
        forward, tokens = type(self._mixer).forward, hidden.shape[1]
        parameters = inspect.signature(forward).parameters
        first, *others = list(parameters)[1:]
        arguments: dict[str, Any] = {
            name: None for name in others if parameters[name].default is inspect.Parameter.empty
        }
        arguments = {name: None for name in arguments if parameters[name].kind is not inspect.Parameter.VAR_KEYWORD}
        if "position_ids" in parameters:
            arguments["position_ids"] = torch.arange(tokens, device="meta")[None]
        if "use_cache" in parameters:
            arguments["use_cache"] = False
        if ranks == 1:
            out = forward(self._mixer, **{first: hidden}, **arguments)
        else:
            with running_with(chain=_chain_of_ranks(tokens, ranks)):
                out = forward(self._mixer, **{first: hidden}, **arguments)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


class _FirstOfRing:
    """Stands in for a ring on the meta device; what it gathers takes no memory, which the plan counts as buffers."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def side_by_side(self, x: Tensor, dim: int) -> Tensor:
        """Returns x of all ranks, [1, ...] -> [ranks, ...]."""
        return x.expand(self.world_size, *x.shape[1:])


def _chain_of_ranks(tokens: int, ranks: int) -> Chain:
    """Returns the chain of a document of which each rank has one run."""
    layout = SequenceLayout("contiguous", tokens * ranks, ranks)
    ring: Any = _FirstOfRing(ranks)
    chain = chain_of(ring, runs_of((((0, tokens * ranks),),), layout), 1)
    assert chain is not None
    return chain


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _through(lengths: tuple[int, ...], sizes: list[int], by_run: int) -> GrowthOfBytes:
    """Returns the polynomial of degree two through three sizes, the first two of whose rings have two runs."""
    (a, b, c), (x, y, z) = lengths, sizes
    first, second = Fraction(y - x, b - a), Fraction(z - y, c - b)
    square = (second - first) / (c - a)
    by_token = first - square * (a + b)
    return GrowthOfBytes(x - a * by_token - a * a * square - 2 * by_run, by_token, square, Fraction(by_run))
