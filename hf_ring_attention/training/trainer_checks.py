"""Checks of a Trainer's settings and methods, at the time when it is made."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ..hf.support import untrainable
from ..hf.wrappers import unwrapped, whole_model
from .arguments import cp_size_of, is_perplexity
from .next_tokens import check_next_token_loss

logger = logging.getLogger(__name__)


def wrong_settings(trainer: Any, mixin: type[Any]) -> ValueError | None:
    """Returns the error of a Trainer whose model or settings would give wrong results on shards; None if all is right.

    Args:
        mixin: `RingTrainerMixin`.
    """
    model, args = unwrapped(trainer.model), trainer.args
    error = untrainable(model)
    if error is not None:
        return error
    own_loss = type(trainer).compute_loss is mixin.compute_loss and trainer.compute_loss_func is None
    try:
        if own_loss:
            check_next_token_loss(model)
        if trainer.ring.world_size > 1:
            whole_model(trainer.model, type(trainer).__name__)
    except ValueError as error:
        return error
    cp_size = cp_size_of(args)
    if cp_size not in (1, trainer.ring.world_size):
        return ValueError(
            f"ring_size={trainer.ring.world_size} and cp_size={cp_size} of the parallelism_config are two names of one "
            f"number, the processes that share each sequence: give one of them, or the same twice"
        )
    at_once = trainer.ring_setting("loss_tokens_at_once")
    if not isinstance(at_once, int) or at_once < 0:
        return ValueError(f"loss_tokens_at_once must be a number of tokens, or 0 for all at once, got {at_once!r}")
    if getattr(args, "predict_with_generate", False):
        return ValueError(
            f"predict_with_generate: {type(trainer).__name__} evaluates losses and logits, and generates nothing: set "
            f"predict_with_generate=False, and call model.generate after training"
        )
    name = type(model).__name__
    sharded, several = trainer.ring.world_size > 1, args.world_size > 1
    counting = getattr(args, "include_num_input_tokens_seen", "no")
    sampling = getattr(args, "train_sampling_strategy", None)
    for wrong, setting, remedy in (
        (args.n_gpu > 1, f"DataParallel over {args.n_gpu} GPUs", "start a process for each: accelerate launch"),
        (
            several and own_loss and not trainer.model_accepts_loss_kwargs,
            f"the loss of {name}, which takes no num_items_in_batch,",
            "override compute_loss",
        ),
        (several and args.label_smoothing_factor, "label_smoothing_factor", "set it to 0"),
        (
            sharded and trainer.compute_loss_func is not None,
            "compute_loss_func",
            "override compute_loss, whose inputs have shift_labels",
        ),
        (
            several and not args.average_tokens_across_devices,
            "average_tokens_across_devices=False",
            "set it to True",
        ),
        (several and args.include_for_metrics, f"include_for_metrics={args.include_for_metrics}", "leave it out"),
        (sharded and args.neftune_noise_alpha, "neftune_noise_alpha", "leave it out"),
        (several and sampling == "batch_rebalance", "train_sampling_strategy='batch_rebalance'", "use another one"),
        (several and counting == "all", "include_num_input_tokens_seen='all'", "use 'non_padding'"),
    ):
        if wrong:
            return ValueError(
                f"{setting} would be computed from the shard of a row that each process has, and not from the whole sequence, "
                f"so its result would be wrong: {remedy}"
            )
    return None


def warn_of_methods(trainer: Any, mixin: type[Any]) -> None:
    """Warns of methods that a Trainer has from classes below the mixin, and that get shards or are never called.

    Args:
        mixin: `RingTrainerMixin`.
    """
    own = type(trainer).__name__
    for name, meaning in (
        (
            "compute_loss",
            "gets shards of rows: its loss must be the sum over inputs['shift_labels'] divided by num_items_in_batch, "
            "times the number of processes (as super().compute_loss is); define compute_loss in %s if it is",
        ),
        (
            "prediction_step",
            "is not called: %s evaluates shards by compute_loss alone; define prediction_step there",
        ),
    ):
        if getattr(type(trainer), name) is not getattr(mixin, name):
            continue
        below = type(trainer).__mro__[type(trainer).__mro__.index(mixin) + 1 :]
        owner = next(kind for kind in below if name in vars(kind))
        known = owner.__module__.startswith("transformers.") or owner.__module__ == "trl.trainer.sft_trainer"
        if not known and (name == "prediction_step" or trainer.ring.world_size > 1) and trainer.is_world_process_zero():
            logger.warning(f"%s.%s {meaning}", owner.__name__, name, own)


def keep_the_smallest_perplexity(trainer: Any) -> None:
    """Has a Trainer keep the checkpoint of the smallest perplexity, where its arguments are not `RingTrainingArguments`.

    Transformers has set greater_is_better=True in these, and whether the user also did cannot be told.
    """
    args = trainer.args
    if args.greater_is_better and is_perplexity(args.metric_for_best_model):
        args.greater_is_better = False
        if trainer.is_world_process_zero():
            logger.warning(
                "metric_for_best_model=%r came with greater_is_better=True, which keeps the worst checkpoint: set to False; "
                "pass greater_is_better=False",
                args.metric_for_best_model,
            )


def is_finite_step(accelerator: Any, loss: float, norm: float) -> bool:
    """Returns whether the optimizer may take a step with this loss of all processes, and this norm of whole gradients.

    In float16 gradients may overflow: the step is skipped, and the loss is scaled by half as much, until none does.
    """
    scaler = accelerator.scaler
    skipped = accelerator.mixed_precision == "fp16" and (scaler is None or scaler.get_scale() >= 1)
    return math.isfinite(loss) and (math.isfinite(norm) or skipped)


def warn_of_step(trainer: Any, loss: float, norm: float) -> None:
    """Warns of a step whose loss or gradient norm is not finite."""
    if trainer.is_world_process_zero():
        logger.warning(
            "step %d: loss %g, gradient norm %g: training goes on, but the weights may become NaN, and logs may leave such "
            "losses out (logging_nan_inf_filter): stop, and lower the learning rate",
            trainer.state.global_step + 1,
            loss,
            norm,
        )


def reads_all_logits(trainer: Any) -> bool:
    """Returns whether a Trainer is TRL's SFTTrainer of a release that reads the logits of all tokens at each step, and says so.

    Since 1.15, TRL forms none. Before, its metrics are computed from those of the whole shard.
    """
    reads = any(kind.__module__ == "trl.trainer.sft_trainer" for kind in type(trainer).__mro__)
    if not reads or Version(version("trl")) >= Version("1.15"):
        return False
    if trainer.ring_setting("loss_tokens_at_once") and trainer.is_world_process_zero():
        logger.warning(
            "TRL %s reads the logits of all tokens of a shard, so they are formed at once, as with loss_tokens_at_once=0: TRL "
            "1.15 or later does without them",
            version("trl"),
        )
    return True


def preprocessed_by_token(
    preprocess: Callable[..., Any], logits: Tensor, labels: Tensor
) -> tuple[Any, ValueError | None]:
    """Returns what a user's function makes of the logits of a shard, and its error.

    Each token's result must follow from that token's logits and label alone, so the results of the shard's halves must be
    halves of the result.
    """
    result, failure, half = None, None, labels.shape[1] // 2
    try:
        result = preprocess(logits, labels)
        fits = isinstance(result, Tensor) and result.shape[:2] == labels.shape[:2]
        for part in (slice(0, half), slice(half, None)) if fits and half else ():
            alone = preprocess(logits[:, part], labels[:, part])
            fits = fits and torch.allclose(alone.float(), result[:, part].float(), rtol=1e-3, equal_nan=True)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        failure, fits = error, False
    if fits:
        return result, None
    reason = "it failed: " + str(failure) if failure else "its result depends on other tokens, or has another shape"
    return None, ValueError(
        f"preprocess_logits_for_metrics sees shards of rows, so it must make each token's result from that token's logits "
        f"and label, [rows, tokens, ...], as lambda logits, labels: logits.argmax(-1) does; for {list(labels.shape)} tokens "
        f"{reason}: leave it out, and compute_metrics gets the logits of whole sequences"
    )
