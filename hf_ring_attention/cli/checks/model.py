"""Checks the job's model: its config; a tiny model of its type trains a step over the ring, and generates over it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PretrainedConfig

from ...cost.models import load_config
from ...hf.cache import cache_argument, prefill
from ...hf.config import fewest_last_of, layer_pattern, patterns_of_layers
from ...hf.model_types import MIXERS
from ...hf.models import why_not
from ...hf.patch import patch_model
from ...hf.support import check_config
from ...ring.ring import Ring
from ..output import plural
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
    pattern = run.options.pattern or str(layer_pattern(text, None))
    check_config(text)
    if reason := why_not(config.model_type, run.ring_size):
        raise NotImplementedError(reason)
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    own = [] if run.options.pattern else [*dict.fromkeys(patterns_of_layers(text).values())]
    run.facts.update(
        {"config": config, "type": config.model_type, "pattern": pattern, "of layers": own, "dtype": dtype}
    )
    return {
        "type": config.model_type,
        "layers": getattr(text, "num_hidden_layers", None),
        "dtype": str(dtype).removeprefix("torch."),
        "pattern": pattern,
        "digest of the config": hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest(),
    }


def judge_config(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    """Returns the model's type, dtype and patterns."""
    own, model, count = answers[0], run.options.model, len(run.facts["of layers"])
    of_layers = f", and {plural(count, 'pattern')} of single layers" if count else ""
    name = f"no --model: a tiny {own['type']}" if model is None else f"{model}: {own['type']} of {own['layers']} layers"
    return Verdict("ok", f"{name}, {own['dtype']}, pattern {own['pattern']}{of_layers}")


def measure_train_step(run: CheckRun) -> dict[str, Any]:
    """Takes a step of SGD with the tiny model over the ring, and with the same model on this process alone."""
    ids = _rows_of_check(run)
    mask = torch.ones_like(ids)
    mask[1, -ids.shape[1] // 3 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    together, alone = (_figures_of_step(model, batch, averaged) for model, averaged in zip(_models(run), (True, False)))
    loss, norm, after = together.values()
    return {
        "shown": f"loss {loss:.4f}, gradient norm {norm:.4f}, then loss {after:.4f}",
        "apart": {name: abs(together[name] - figure) / abs(figure) for name, figure in alone.items()},
    }


def _figures_of_step(model: Any, batch: dict[str, torch.Tensor], averaged: bool) -> dict[str, float]:
    """Returns the figures of a step by their names; gradients may be averaged, as DDP does."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    parameters = list(model.parameters())
    # An expert gets a gradient only if a token of this rank went to it.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for gradient in gradients if averaged and dist.is_initialized() else ():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter -= _LEARNING_RATE * gradient
        after = model(**batch, use_cache=False).loss
    norm = torch.stack([x.norm() for x in gradients]).norm()
    figures = {"the loss": loss, "the norm of the gradients": norm, "the loss after the step": after}
    return {name: float(x.detach()) for name, x in figures.items()}


def measure_generation(run: CheckRun) -> dict[str, Any]:
    """Generates tokens with the tiny model after a sharded prefill, and compares their logits with one process.

    That process runs without a cache, so that an error in caches shows. But if the last tokens of a document see every key, a
    pass over all tokens has other last tokens than the steps had, so that process takes the same steps.
    """
    ids, (model, alone) = _rows_of_check(run), _models(run)
    logits = _logits_of_new_tokens(model, ids, cache_argument(_prefilled(model, ids)))
    # Some mixers take steps that are approximations, and take them here, too.
    arguments: dict[str, Any] = {} if alone.config.model_type in MIXERS else {"use_cache": False}
    if fewest_last_of(alone.config.get_text_config()) is not None:
        arguments = cache_argument(_prefilled(alone, ids))
    expected = _logits_of_new_tokens(alone, ids, arguments)
    apart = float((logits - expected).abs().max() / expected.abs().max())
    return {"shown": f"{_NEW_TOKENS} tokens after a prefill", "apart": {"a logit": apart}}


def _prefilled(model: Any, ids: torch.Tensor) -> Any:
    """Returns the cache of a document: all tokens of a row but the last two."""
    try:
        return prefill(model, ids[:, :-2])
    except NotImplementedError as refused:
        raise NotApplicable(str(refused)) from None


def _logits_of_new_tokens(model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    arguments |= {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
    arguments |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    return torch.stack(model.generate(ids, **arguments).logits, 1)


def judge_figures(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    """Returns a failure if a figure of any process is far from one process's."""
    for name in answers[0]["apart"]:
        apart = [answer["apart"][name] for answer in answers]
        wrong = [rank for rank, x in enumerate(apart) if not x <= FAR]
        if wrong:
            return Verdict("failed", f"{name} is {apart[wrong[0]]:.0e} from one process's on {processes(wrong)}")
    most = max(x for answer in answers for x in answer["apart"].values())
    far = f"{most:.0e} from" if most else "the same as"
    return Verdict("ok", f"tiny {run.facts['type']}: {answers[0]['shown']}; {far} one process's")


def _rows_of_check(run: CheckRun) -> torch.Tensor:
    """Returns two rows of a few tokens, some for each process of a ring."""
    tokens = min(max(20, 2 * run.ring_size + 3), 100)
    return torch.randint(3, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(1)).to(run.device)


def _models(run: CheckRun) -> list[Any]:
    """Returns the tiny model over the ring and on this process alone, in float64 with the job's pattern and equal weights."""
    rings = [Ring.alone() if run.ring_size == 1 else Ring(run.group), Ring.alone()]
    try:
        models = [model_with_large_weights(shrunk_config(run.facts["config"]), "eager") for _ in rings]
        return [patch_model(x.to(run.device, torch.float64), run.facts["pattern"], y) for x, y in zip(models, rings)]
    except (AttributeError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise NotApplicable(f"there is no tiny model of type {run.facts['type']!r}: {reason}") from None
