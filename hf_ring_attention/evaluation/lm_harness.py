"""The model "ring_dilated" of lm-evaluation-harness: its tasks under any pattern, each sequence sharded over a ring.

Importing this module registers the name for `lm_eval.simple_evaluate(model="ring_dilated", ...)`. The harness's own class `hf`
computes the answers. A ring is one worker to it: all ranks of a ring call the model with the same rows, and contexts are
prefilled over the ring before they are continued.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from ..compute.private import check
from ..hf.cache.prefill import prefill
from ..hf.loss.lm_loss import IGNORED
from ..hf.model.config import layer_pattern, patterns_of_layers
from ..hf.model.wrappers import attachment_of, cache_argument, unwrapped, whole_model
from ..hf.names import IMPLEMENTATION
from ..hf.patch import patch_model
from ..plan.branches import check_count
from ..ring.ring import Ring
from .adapters import complete_adapters
from .calibration.result import load_pattern
from .logits import label_nll

#: A ring may wait long for another one that has longer texts.
_TIMEOUT = timedelta(days=7)

check("lm_eval", {"HFLM": HFLM})


@register_model("ring_dilated")
class RingLM(HFLM):
    """A causal language model under "ring_dilated", with all arguments of the harness's `hf`, and these.

    With N processes and rings of R, N / R rings answer different requests, and the R ranks of each share every sequence.

    Args:
        pretrained: hub id or folder; or a model, which then keeps the ring of `patch_model`, if any.
        pattern: the text of a pattern, or the file of a calibration; None for the pattern in the model's config, else exact
            attention.
        ring_size: how many processes share a sequence. Several processes need it.
        ring_layout, ring_transport, ring_heads, ring_kernel: as `layout`, `transport`, `heads` and `kernel` of `Ring`.
        logits_at_once: on a ring, the tokens whose logits exist at once while the likelihood of a whole text is measured.
        arguments: of `hf`: batch_size, max_length, dtype, peft, add_bos_token, device, ...
    """

    def __init__(
        self,
        pretrained: Any,
        pattern: str | None = None,
        ring_size: int | None = None,
        ring_layout: Any = "auto",
        ring_transport: Any = "auto",
        ring_heads: int | None = None,
        ring_kernel: Any = "auto",
        logits_at_once: int = 512,
        **arguments: Any,
    ) -> None:
        check_count("ring_dilated", "logits_at_once", logits_at_once)
        chosen = None if pattern is None else load_pattern(pattern)
        if isinstance(pretrained, str):
            accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=_TIMEOUT)])
            # Without a device, the harness takes CUDA, whether the processes use it or not.
            arguments["device"] = arguments.get("device") or accelerator.device.type
            if ring_size is None and accelerator.num_processes == 1:
                ring_size = 1
            ways = {"layout": ring_layout, "transport": ring_transport, "heads": ring_heads, "kernel": ring_kernel}
            ring = Ring.from_accelerator(accelerator, ring_size, **ways)
        elif (ring_size, ring_layout, ring_transport, ring_heads, ring_kernel) != (None, "auto", "auto", None, "auto"):
            raise ValueError(
                "ring_dilated: a model that is loaded already has its ring from ra.patch_model(model, ring=ring): leave out "
                "ring_size, ring_layout, ring_transport, ring_heads and ring_kernel"
            )
        else:
            ring = attachment_of(unwrapped(pretrained)).ring or Ring.alone()
        self.ring, self._logits_at_once = ring, logits_at_once
        self._longest_continuation = 0
        _check_arguments(arguments, ring)
        super().__init__(pretrained, **arguments)
        if isinstance(pretrained, str):
            complete_adapters(self._model, pretrained)
        if ring.world_size > 1:
            whole_model(self._model, "ring_dilated")
        own = attachment_of(unwrapped(self._model)).ring
        patch_model(self._model, chosen, ring=ring if ring.world_size > 1 else own)
        # To the harness, a ring is one worker, which answers a share of the requests. Its accelerator counts rings, too.
        self._rank, self._world_size = ring.dp_rank, ring.dp_size
        if ring.accelerator is not None:
            self.accelerator = ring.accelerator

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Returns the objects of all rings, on every rank of the ring `dst`."""
        if self.world_size <= 1:
            return [obj]
        objects = gather_object([obj] if self.ring.rank == 0 else [])
        return objects if self.rank == dst else None

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuses a cache of answers on a ring: the ranks' caches would differ, so ranks would compute different requests."""
        if self.ring.world_size > 1:
            raise ValueError(
                "ring_dilated: --use_cache gives each process its own answers, but the ranks of a ring must compute the same "
                "requests: leave it out, or take ring_size=1"
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Returns the model's entry in results.json: the entry of `hf`, with patterns and ring."""
        ring, config = self.ring, unwrapped(self._model).config.get_text_config()
        sizes = {"size": ring.world_size, "rings": ring.dp_size, "layout": ring.layout, "transport": ring.transport}
        patterns = {str(layer): str(pattern) for layer, pattern in patterns_of_layers(config).items()}
        entry = {"pattern": str(layer_pattern(config, None)), "pattern_of_layers": patterns, "ring": sizes}
        return super().get_model_info() | entry

    # ---- requests; one rank of each ring shows its progress

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm or self.ring.rank > 0)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return super().generate_until(requests, disable_tqdm=disable_tqdm or self.ring.rank > 0)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Returns, for requests (texts, context, continuation), the log-likelihood, and whether greedy decoding gives it."""
        if self.ring.world_size > 1 and all(texts is None for texts, _, _ in requests):
            # Windows of a rolling likelihood have no texts, and nobody asks whether greedy decoding gives them.
            return [(self._likelihood(context, continuation), False) for _, context, continuation in requests]
        self._longest_continuation = max((len(continuation) for _, _, continuation in requests), default=0)
        answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(
            requests, disable_tqdm or self.ring.rank > 0, override_bs
        )
        return answers

    @torch.no_grad()
    def _likelihood(self, context: list[int], continuation: list[int]) -> float:
        """Returns the log-likelihood of a long continuation, whose logits are never held at once."""
        row = torch.tensor([(context + continuation)[-(self.max_length + 1) :]], device=self.device)
        labels = row[:, 1:].clone()
        labels[:, : -len(continuation)] = IGNORED
        with self._autocast():
            nll = label_nll(unwrapped(self._model), self.ring, row[:, :-1], labels, self._logits_at_once)
        return -float(nll[:, -len(continuation) :].sum())

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Returns logits [B, n, vocabulary]; of a single long row only the last ones, which predict continuations."""
        count = self._longest_continuation
        accepts = "logits_to_keep" in inspect.signature(unwrapped(self._model).forward).parameters
        if self.ring.world_size == 1 or len(inps) > 1 or not accepts or not 0 < count < inps.shape[1]:
            return super()._model_call(inps, attn_mask, labels)
        with torch.no_grad(), self._autocast():
            last: Tensor = self.model(inps, logits_to_keep=count, use_cache=False).logits
        return last

    def _autocast(self) -> Any:
        kind = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=kind, enabled=kind is not None)

    @torch.no_grad()
    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Returns contexts [B, n] with their continuations; a ring prefills all tokens of the context but the last."""
        if self.ring.world_size == 1:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        mask: Tensor = generation_kwargs.pop("attention_mask", torch.ones_like(context))
        single = context.shape[1] == 1  # A prefill takes at least one token, and a step another one.
        if single:
            context, mask = F.pad(context, (1, 0), value=self.tokenizer.pad_token_id), F.pad(mask, (1, 0))
        with self._autocast():
            cache = prefill(self._model, context[:, :-1], mask[:, :-1])
        cache.batch_repeat_interleave(generation_kwargs.get("num_beams", 1))
        whole: Tensor = super()._model_generate(
            context, max_length + single, stop, attention_mask=mask, **cache_argument(cache), **generation_kwargs
        )
        return whole[:, 1:] if single else whole


def _check_arguments(arguments: Mapping[str, Any], ring: Ring) -> None:
    """Refuses arguments of the harness's `hf` that would have no effect, or that a ring cannot obey."""
    implementation, processes = arguments.get("attn_implementation", IMPLEMENTATION), ring.world_size * ring.dp_size
    error = None
    if implementation != IMPLEMENTATION:
        error = f"attn_implementation={implementation!r} would have no effect: leave it out, or take --model hf"
    for name in ("distributed_config", "tp_plan", "tp_size", "parallelize") if processes > 1 else ():
        if arguments.get(name):
            error = f"{name} divides a model among the {processes} processes, but each has a whole one: leave it out"
    if ring.world_size > 1 and str(arguments.get("batch_size", 1)).startswith("auto"):
        error = "batch_size=auto tries what fits into one process, but the ranks of a ring must compute alike: give a number"
    if ring.world_size > 1 and arguments.get("backend", "default") == "seq2seq":
        error = "a ring computes decoders, got backend=seq2seq: leave it out"
    if error is not None:
        raise ValueError(f"ring_dilated: {error}")
