"""The model "ring_dilated" of lm-evaluation-harness: its tasks under any pattern, each sequence sharded over a ring.

Importing this module registers the name. On one process the harness's own class computes everything, with this attention. On a
ring the rows of likelihoods are sharded, and contexts are prefilled over the ring before they are continued.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, InitProcessGroupKwargs
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from ..compute.private import check_lm_eval
from ..hf.cache import cache_argument
from ..hf.config import fewest_last_of, layer_pattern, warn_once
from ..hf.generation import prefill
from ..hf.lm_loss import IGNORED
from ..hf.patch import patch_model
from ..hf.registration import IMPLEMENTATION
from ..hf.rings import attached_ring
from ..hf.wrappers import unwrapped, whole_model
from ..plan.patterns import Pattern, as_pattern
from ..ring.ring import Ring
from ..transport.agreement import digest
from .calibration.result import Calibration
from .hidden_states import layout_of_rows
from .progress import progress_bar
from .slices import logits_in_slices

logger = logging.getLogger(__name__)

#: Rings wait for each other where one has longer texts than another, so that a wait may be long.
_TIMEOUT = timedelta(days=7)


check_lm_eval(HFLM, importlib.metadata.version("lm_eval"))


@register_model("ring_dilated")
class RingLM(HFLM):
    """A causal language model under "ring_dilated", with all arguments of the harness's `hf`, and these.

    With N processes and a ring of R, N / R rings answer different requests, and the R ranks of each share every sequence.

    Args:
        pretrained: hub id or folder; or a model, which then has the ring of `patch_model`, if any.
        pattern: the text of a pattern, or the file of a calibration; None for what is saved in the model's config, else exact
            attention.
        ring_size: how many processes share a sequence. Several processes need it.
        ring_layout, ring_transport, ring_heads: as `layout`, `transport` and `heads` of `Ring`.
        logits_at_once: on a ring, for how many tokens of each batch row logits are formed at once.
        arguments: those of `hf`: batch_size, max_length, dtype, peft, add_bos_token, device, ...

    Raises:
        ValueError: on every process, before a model is loaded: a wrong pattern, a size of rings that does not divide the
            number of processes, or an argument of `hf` that a ring cannot obey. Later, on every rank of a ring: requests that
            differ between its ranks, a cache of answers, beams, or a context that is too long.
        NotImplementedError: a model that ring_dilated does not compute.

    Example:
        Import this module, then: `lm_eval.simple_evaluate(model="ring_dilated", model_args={"pretrained": "folder",
        "pattern": "window:512+4"}, tasks=["lambada_openai"])`; from a shell, `hf-ring-attention lm-eval --help` says how.
    """

    def __init__(
        self,
        pretrained: Any,
        pattern: str | None = None,
        ring_size: int | None = None,
        ring_layout: Any = "auto",
        ring_transport: Any = "auto",
        ring_heads: int | None = None,
        logits_at_once: int = 512,
        **arguments: Any,
    ) -> None:
        if logits_at_once < 1:
            raise ValueError(f"logits_at_once must be at least 1, got {logits_at_once}")
        chosen: Pattern | Calibration | None = None
        if isinstance(pattern, str) and pattern.endswith(".json"):
            chosen = Calibration.load(pattern)
        elif pattern is not None:
            chosen = as_pattern(pattern, "ring_dilated")
        if isinstance(pretrained, str):
            accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=_TIMEOUT)])
            # A device was not chosen where it is None; the harness would then take CUDA, whether there is one or not.
            arguments["device"] = arguments.get("device") or accelerator.device.type
            size = _size(ring_size, accelerator.num_processes)
            ways: dict[str, Any] = {"layout": ring_layout, "transport": ring_transport, "heads": ring_heads}
            ring = Ring.from_accelerator(accelerator, size, **ways)
        else:
            asked = {"ring_size": ring_size, "ring_heads": ring_heads}
            given = [name for name, value in asked.items() if value is not None]
            given += [
                name for name, v in (("ring_layout", ring_layout), ("ring_transport", ring_transport)) if v != "auto"
            ]
            if given:
                raise ValueError(
                    f"ring_dilated: {', '.join(given)} cannot change a model that is made already: give it its ring by "
                    f"ra.patch_model(model, ring=ring), and pass that model alone"
                )
            ring = attached_ring(unwrapped(pretrained)) or Ring.alone()
        self.ring, self.logits_at_once = ring, logits_at_once
        _check_arguments(arguments, ring)
        super().__init__(pretrained, **arguments)
        if ring.world_size > 1:
            whole_model(self._model, "ring_dilated")
        patch_model(self._model, chosen, ring=ring if ring.world_size > 1 else attached_ring(unwrapped(self._model)))
        # To the harness, a ring is one worker, which answers its own share of the requests.
        self._rank, self._world_size = ring.dp_rank, ring.dp_size

    # ---- what the harness asks of its workers

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all rings, one behind the other."""
        if self.world_size <= 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        of_rings = parts[:: self.ring.world_size]
        return torch.stack(of_rings) if tensor.dim() == 0 else torch.cat(of_rings)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Returns the objects of all rings, on every rank of the ring `dst`."""
        if self.world_size <= 1:
            return [obj]
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, obj if self.ring.rank == 0 else None)
        return objects[:: self.ring.world_size] if self.rank == dst else None

    def barrier(self) -> None:
        """Waits for all rings."""
        if self.world_size > 1:
            dist.barrier()

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuses a cache of answers on a ring: each rank would have its own, and they would answer different requests.

        Raises:
            ValueError: on a ring of several ranks.
        """
        if self.ring.world_size > 1:
            raise ValueError(
                f"ring_dilated: --use_cache keeps answers for each process by itself, and the {self.ring.world_size} ranks of "
                f"a ring must compute the same requests: leave it out, or take ring_size=1"
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Returns what results.json says of the model: what `hf` says, and its patterns and its ring."""
        ring, config = self.ring, unwrapped(self._model).config.get_text_config()
        layers = (getattr(config, IMPLEMENTATION, None) or {}).get("layers", {})
        return {
            **super().get_model_info(),
            "pattern": str(layer_pattern(config, None)),
            "pattern_of_layers": {layer: str(layer_pattern(config, int(layer))) for layer in layers},
            "ring": {
                "size": ring.world_size,
                "rings": ring.dp_size,
                "layout": ring.layout,
                "transport": ring.transport,
            },
        }

    # ---- requests

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._check_requests(requests)
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.ring.rank > 0)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        self._check_requests(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm or self.ring.rank > 0)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self._check_requests(requests)
        return super().generate_until(requests, disable_tqdm=disable_tqdm or self.ring.rank > 0)

    def _check_requests(self, requests: Sequence[Any]) -> None:
        """Raises ValueError on every rank if the ranks of a ring were asked different things."""
        with self.ring.agreement("requests of the harness") as call:
            call.same("the number of requests", len(requests))
            call.same("a checksum of the requests", digest(json.dumps([x.args for x in requests], default=str)))

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether it is what greedy decoding gives.

        On a ring, rows are sharded, and requests that share their tokens but for the last one share a row. Under a pattern
        with a `Last`, rows are computed one by one: the harness fills up shorter ones behind their tokens, and these would not
        be the last ones then.

        Args:
            requests: (texts, tokens of the context, tokens of the continuation).
        """
        one_by_one = self._has_last()
        if self.ring.world_size == 1 and one_by_one:
            answers: list[tuple[float, bool]] = []
            for request in progress_bar("likelihoods", requests, silent=disable_tqdm or self.rank != 0):
                answers += super()._loglikelihood_tokens([request], True)
            return answers
        if self.ring.world_size == 1:
            answered: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return answered
        by_row: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            by_row.setdefault(self._row_of(context, continuation), []).append(number)
        rows = sorted(by_row, key=lambda row: (-len(row), row))
        answers = [(0.0, False)] * len(requests)
        size = 1 if one_by_one else override_bs or self.batch_size
        silent = disable_tqdm or self.rank != 0 or self.ring.rank > 0
        bar = progress_bar("likelihoods", total=len(requests), silent=silent)
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            continuations = [[requests[number][2] for number in by_row[row]] for row in batch]
            scores = self._scores(batch, continuations)
            for row, of_row in zip(batch, scores, strict=True):
                for number, answer in zip(by_row[row], of_row, strict=True):
                    answers[number] = answer
                bar.update(len(of_row))
        bar.close()
        return answers

    def _has_last(self) -> bool:
        """Whether a layer has a pattern with a `Last`; the logger says once that batches have one row then."""
        found = fewest_last_of(unwrapped(self._model).config.get_text_config()) is not None
        if found and self.batch_size_per_gpu != 1:
            warn_once(
                f"ring_dilated: under a pattern with a Last, what tokens see depends on where their row ends, so the rows of "
                f"likelihoods are computed one by one: batch_size={self.batch_size_per_gpu} has no effect on them"
            )
        return found

    def _row_of(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that predict a continuation, of which the oldest are left out if there are too many."""
        if not context or not 0 < len(continuation) <= self.max_length:
            raise ValueError(
                f"a likelihood needs a context of at least 1 token and a continuation of 1 to {self.max_length} tokens "
                f"(max_length), got {len(context)} and {len(continuation)}"
            )
        surplus = len(context) + len(continuation) - 1 - self.max_length
        if surplus > 0 and self.ring.rank == 0:
            logger.warning(
                "a context of %d tokens and a continuation of %d need %d predicting tokens, and max_length is %d: the first %d "
                "tokens are left out", len(context), len(continuation), surplus + self.max_length, self.max_length, surplus
            )  # fmt: skip
        return (*context, *continuation)[-(self.max_length + 1) :][:-1]

    @torch.no_grad()
    def _scores(
        self, rows: list[tuple[int, ...]], continuations: list[list[list[int]]]
    ) -> list[list[tuple[float, bool]]]:
        """Returns the log-likelihood of each row's continuations, which end one token after the row, and if they are greedy."""
        model = unwrapped(self._model)
        length, most = max(map(len, rows)), max(map(len, continuations))
        # As in `hf`, rows are filled up behind their tokens, which see none of it.
        ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=self.device)
        labels = torch.full((len(rows), length, most), IGNORED)
        for row, (tokens, of_row) in enumerate(zip(rows, continuations, strict=True)):
            for column, continuation in enumerate(of_row):
                labels[row, len(tokens) - len(continuation) : len(tokens), column] = torch.tensor(continuation)
        layout = layout_of_rows(model, self.ring, ids)
        labels = self.ring.shard(labels, layout, fill=IGNORED).to(self.device)
        logps = torch.zeros(labels.shape, dtype=torch.float64, device=self.device)
        greedy = torch.zeros(labels.shape, dtype=torch.bool, device=self.device)
        kind = None
        chosen = (labels != IGNORED).any(-1)
        with self._autocast():
            for part, logits in logits_in_slices(model, self.ring, ids, chosen, self.logits_at_once):
                wanted = labels[:, part][chosen[:, part]]  # [k, most]
                logp = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
                kind = logp.dtype
                logps[:, part][chosen[:, part]] = logp.gather(1, wanted.clamp_min(0)).double()
                greedy[:, part][chosen[:, part]] = logp.argmax(-1, keepdim=True) == wanted
        whole = self.ring.unshard(logps, layout).cpu()
        alike = self.ring.unshard(greedy, layout).cpu()
        answers: list[list[tuple[float, bool]]] = []
        for row, (tokens, of_row) in enumerate(zip(rows, continuations, strict=True)):
            answers.append([])
            for column, continuation in enumerate(of_row):
                part = slice(len(tokens) - len(continuation), len(tokens))
                # The sum is rounded to the type of the logits, as in `hf`.
                total = float(whole[row, part, column].sum().to(kind))
                answers[-1].append((total, bool(alike[row, part, column].all())))
        return answers

    def _autocast(self) -> Any:
        kind = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=kind, enabled=kind is not None)

    @torch.no_grad()
    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Returns contexts [B, n] with what follows them; on a ring, all but their last token is prefilled over it."""
        if self.ring.world_size == 1:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        mask: Tensor = generation_kwargs.pop("attention_mask", torch.ones_like(context))
        with self.ring.agreement("generation for the harness"):
            _check_generation(generation_kwargs)
        if fewest_last_of(unwrapped(self._model).config.get_text_config()) is not None:
            warn_once(
                "ring_dilated: under a pattern with a Last, a ring reads a context without its last token first, and the last "
                "tokens of that see every key, so that what is generated may differ from one process's"
            )
        alone = context.shape[1] == 1  # A prefill takes at least one token, and a step another one.
        if alone:
            context, mask = F.pad(context, (1, 0), value=self.tokenizer.pad_token_id), F.pad(mask, (1, 0))
        with self._autocast():
            cache = prefill(self._model, context[:, :-1], mask[:, :-1])
        whole: Tensor = super()._model_generate(
            context, max_length + alone, stop, attention_mask=mask, **cache_argument(cache), **generation_kwargs
        )
        return whole[:, 1:] if alone else whole


def _size(ring_size: Any, processes: int) -> int | None:
    """Returns the size of rings, which a single process need not name; command lines give numbers as they are written."""
    if ring_size is None:
        return 1 if processes == 1 else None
    if isinstance(ring_size, int) and not isinstance(ring_size, bool):
        return ring_size
    raise ValueError(f"ring_dilated: ring_size must be a whole number, got {ring_size!r}")


def _check_arguments(arguments: Mapping[str, Any], ring: Ring) -> None:
    """Refuses arguments of the harness's `hf` that would be ignored, or that a ring cannot obey.

    Raises:
        ValueError: one of them is given.
    """
    implementation = arguments.get("attn_implementation", IMPLEMENTATION)
    if implementation != IMPLEMENTATION:
        raise ValueError(
            f"ring_dilated: attn_implementation={implementation!r} would have no effect, because this model computes with "
            f"'ring_dilated': leave it out, or take --model hf"
        )
    if ring.world_size * ring.dp_size > 1:
        for name in ("distributed_config", "tp_plan", "tp_size", "parallelize"):
            if arguments.get(name):
                raise ValueError(
                    f"ring_dilated: {name} divides a model among the {ring.world_size * ring.dp_size} processes, each of which "
                    f"has a whole model here: leave it out"
                )
    if ring.world_size > 1 and str(arguments.get("batch_size", 1)).startswith("auto"):
        raise ValueError(
            "ring_dilated: batch_size=auto tries sizes until one fits into the memory of one process, and the ranks of a ring "
            "must compute alike: give a number"
        )
    if ring.world_size > 1 and arguments.get("backend", "default") == "seq2seq":
        raise ValueError(
            "ring_dilated: backend=seq2seq asks for an encoder and a decoder, which a ring does not compute"
        )


def _check_generation(options: Mapping[str, Any]) -> None:
    """Refuses ways to generate that take another cache than that of a ring.

    Raises:
        ValueError: beams, several answers to one request, or another cache.
    """
    for name, plain in (("num_beams", 1), ("num_return_sequences", 1), ("num_beam_groups", 1), ("use_cache", True)):
        if options.get(name, plain) not in (plain, None):
            raise ValueError(
                f"ring_dilated: {name}={options[name]} was asked for, and on a ring each request has one answer, from the keys "
                f"and values that the ranks hold: set it to {plain}, or take ring_size=1"
            )
    for name in ("cache_implementation", "cache", "past_key_values", "assistant_model", "prompt_lookup_num_tokens"):
        if options.get(name) is not None:
            raise ValueError(f"ring_dilated: {name} would replace or bypass the cache of the ring: leave it out")
