"""Checks the job's model: its config; a tiny model of its type trains a step over the ring, and generates over it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, PretrainedConfig

from ...cost.models import load_config
from ...hf.cache import cache_argument, prefill
from ...hf.config import fewest_last_of
from ...hf.hybrid_types import MIXERS
from ...hf.patch import patch_model
from ...hf.support import check_config
from ...plan.patterns import Pattern
from ...ring.ring import Ring
from ..models import why_not
from .runner import CheckRun, NotApplicable, Verdict, processes
from .tiny_models import VOCAB, model_with_large_weights, shrunk_config

_LEARNING_RATE = 1e-3
_NEW_TOKENS = 3
#: How far figures may be from one process's, relative to them. Models round some parts to float32; a wrong or a missing key
#: moves figures a hundred times as far.
FAR = 1e-4


def measure_config(run: CheckRun) -> dict[str, Any]:
    """Reads the config of the job's model, and keeps it with its dtype and pattern for later checks."""
    config: PretrainedConfig = LlamaConfig() if run.options.model is None else load_config(run.options.model)
    text = config.get_text_config()
    saved = (getattr(text, "ring_dilated", None) or {}).get("pattern")
    pattern = run.options.pattern or ("exact" if saved is None else str(Pattern.from_dict(saved)))
    check_config(text)
    reason = why_not(config.model_type, run.ring_size)
    if reason:
        raise NotImplementedError(reason)
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    run.facts.update(config=config, type=config.model_type, pattern=pattern, dtype=dtype)
    return {
        "type": config.model_type,
        "layers": getattr(text, "num_hidden_layers", None),
        "dtype": str(dtype).removeprefix("torch."),
        "pattern": pattern,
        "digest of the config": hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest(),
    }


def judge_config(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    own, model = answers[0], run.options.model
    name = f"no --model: a tiny {own['type']}" if model is None else f"{model}: {own['type']} of {own['layers']} layers"
    return Verdict("ok", f"{name}, {own['dtype']}, pattern {own['pattern']}")


def measure_train_step(run: CheckRun) -> dict[str, Any]:
    """Takes a step of SGD with the tiny model over the ring, and with the same model on this process alone."""
    ids = _rows_of_check(run)
    mask = torch.ones_like(ids)
    mask[1, -ids.shape[1] // 3 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    together = _steps(_tiny(run, _ring(run)), batch, averaged=dist.is_initialized())
    return {"together": together, "alone": _steps(_tiny(run, Ring.alone()), batch), "type": run.facts["type"]}


def _steps(model: Any, batch: dict[str, torch.Tensor], averaged: bool = False) -> tuple[float, float, float]:
    """Returns (the loss, the norm of its gradients, the loss after a step); gradients may be averaged, as DDP does."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    parameters = list(model.parameters())
    # An expert that no token of this rank went to has no gradient.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for gradient in gradients if averaged else ():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter -= _LEARNING_RATE * gradient
        after = model(**batch, use_cache=False).loss
    return float(loss.detach()), float(torch.stack([x.norm() for x in gradients]).norm()), float(after)


def judge_train_step(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    names = ("the loss", "the norm of the gradients", "the loss after the step")
    pairs = [[*zip(answer["together"], answer["alone"])] for answer in answers]
    for name, figures_of_ranks in zip(names, zip(*pairs)):
        wrong = [rank for rank, (x, y) in enumerate(figures_of_ranks) if not abs(x - y) <= FAR * abs(y)]
        if wrong:
            x, y = figures_of_ranks[wrong[0]]
            text = f"{name} is {x:.12g} on {processes(wrong)}, and one process has {y:.12g}"
            return Verdict("failed", text)
    loss, norm, after = answers[0]["together"]
    apart = max(abs(x - y) / abs(y) for of_rank in pairs for x, y in of_rank)
    far = "the same as" if apart == 0 else f"{apart:.0e} from"
    steps = f"loss {loss:.4f}, gradient norm {norm:.4f}, then loss {after:.4f}"
    return Verdict("ok", f"tiny {answers[0]['type']}: {steps}; {far} one process's")


def measure_generation(run: CheckRun) -> dict[str, Any]:
    """Generates tokens with the tiny model after a sharded prefill, and compares their logits with one process.

    That process has no cache, so that an error in caches shows. But if the last tokens of a document see every key, a pass over
    all tokens has other last tokens than the steps had, so that process takes the same steps.
    """
    ids = _rows_of_check(run)
    model, alone = _tiny(run, _ring(run)), _tiny(run, Ring.alone())
    result = _generated(model, ids, cache_argument(_prefilled(model, ids)))
    # Some mixers take steps that are approximations, and take them here, too.
    arguments: dict[str, Any] = {} if alone.config.model_type in MIXERS else {"use_cache": False}
    if fewest_last_of(alone.config.get_text_config()) is not None:
        arguments = cache_argument(_prefilled(alone, ids))
    logits, expected = (torch.stack(x.logits, 1) for x in (result, _generated(alone, ids, arguments)))
    apart = float((logits - expected).abs().max() / expected.abs().max())
    return {"apart": apart, "type": run.facts["type"]}


def _prefilled(model: Any, ids: torch.Tensor) -> Any:
    """Returns the cache of a document: all tokens of a row but the last two."""
    try:
        return prefill(model, ids[:, :-2])
    except NotImplementedError as refused:
        raise NotApplicable(str(refused)) from None


def _generated(model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
    count = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
    outputs = {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **arguments, **count, **outputs)


def judge_generation(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    wrong = [rank for rank, answer in enumerate(answers) if not answer["apart"] <= FAR]
    apart = max(answer["apart"] for answer in answers)
    if wrong:
        text = f"logits of generated tokens are {apart:.0e} from one process's on {processes(wrong)}"
        return Verdict("failed", text)
    text = (
        f"tiny {answers[0]['type']}: {_NEW_TOKENS} tokens after a prefill, with logits {apart:.0e} from one process's"
    )
    return Verdict("ok", text)


def _rows_of_check(run: CheckRun) -> torch.Tensor:
    """Returns two rows of a few tokens, some for each process of a ring."""
    tokens = min(max(20, 2 * run.ring_size + 3), 100)
    return torch.randint(3, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(1)).to(run.device)


def _ring(run: CheckRun) -> Ring:
    return Ring.alone() if run.ring_size == 1 else Ring(run.group)


def _tiny(run: CheckRun, ring: Ring) -> Any:
    """Returns the tiny model in float64 with the job's pattern and the same weights at each call, in evaluation mode.

    Raises:
        NotApplicable: a config that has no small form, or whose small form has no attention.
    """
    try:
        model = model_with_large_weights(shrunk_config(run.facts["config"]), "eager").to(run.device, torch.float64)
        return patch_model(model, run.facts["pattern"], ring)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise NotApplicable(f"there is no tiny model of type {run.facts['type']!r}: {reason}") from None
