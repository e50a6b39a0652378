"""Transformers' Trainer, and those of TRL, over rings: each ring of processes is one data-parallel replica."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import seed_worker

from ..compute.private import check_trainer, check_trl
from ..hf.config import settings_of, use_settings
from ..hf.patch import patch_model
from ..hf.support import untrainable
from ..hf.wrappers import unwrapped
from ..ring.ring import Ring
from ..transport.lost_processes import naming_lost_processes
from .arguments import RingTrainingArguments, cp_size_of, parallelism_beside_rings
from .counting import count_rings_by_name
from .sharded_weights import whole_norm

logger = logging.getLogger(__name__)
check_trainer(Trainer)

if TYPE_CHECKING:
    _Trainer = Trainer  # type checkers see the methods of the class that the mixin is mixed into
else:
    _Trainer = object


class RingTrainerMixin(_Trainer):
    """Makes a Trainer shard its sequences over rings: `class RingDPOTrainer(ra.RingTrainerMixin, DPOTrainer): pass`.

    The model is patched to "ring_dilated" with the pattern of its config; so is a reference model. Collators, losses, metrics
    and evaluation are the Trainer's own: its accelerator counts rings (`Ring.from_accelerator`), batch sizes are those of a
    ring, and the model takes whole rows. TRL's trainers that generate give the ranks of a ring the same completions.

    Args:
        ring_size, ring_layout, ring_transport, ring_heads, offload_activations: as in `RingTrainingArguments`, for Trainers
            with arguments of their own.

    Raises:
        ValueError: on every process, at set-up: no ring size for several processes, or one that does not divide their number; a
            model with attention dropout; or a setting that rings would change (NEFTune, vLLM, DataParallel).
        NotImplementedError: a model that ring_dilated does not compute.

    Example:
        >>> from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
        >>> class MyRingTrainer(ra.RingTrainerMixin, Trainer):
        ...     pass
        >>> args = TrainingArguments("output", use_cpu=True, disable_tqdm=True, report_to=[])
        >>> rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2
        >>> trainer = MyRingTrainer(tiny_llama(), args, ring_size=1)
        >>> trainer.evaluate(rows)["eval_loss"] > 0
        {'eval_loss': ...}
        True
    """

    ring: Ring
    _SETTINGS = ("ring_size", "ring_layout", "ring_transport", "ring_heads", "offload_activations")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ring_settings = {name: kwargs.pop(name) for name in self._SETTINGS if name in kwargs}
        self._step_loss: Tensor | float = 0.0
        self._told_not_finite = False
        super().__init__(*args, **kwargs)
        error = _wrong_settings(self) or count_rings_by_name(self, self.ring)
        self.ring.agree("the set-up of a Trainer", {}, error, everywhere=True)
        self._patch_beside()
        check_trl(type(self))
        if hasattr(super(), "_generate_single_turn"):
            # TRL has set a seed by process; the ranks of a ring draw the same numbers.
            set_seed(self.args.seed + self.ring.dp_rank)

    def ring_setting(self, name: str) -> Any:
        """Returns a setting of this Trainer, or else of its arguments."""
        default = getattr(RingTrainingArguments, name)
        return self.ring_settings.get(name, getattr(self.args, name, default))

    def _ring_size(self) -> int | None:
        """Returns the ring size, or else the cp_size of the arguments; 1 for a process alone that has neither.

        `Ring.from_accelerator` refuses None for several processes, unless the environment has set a cp_size.
        """
        size: int | None = self.ring_setting("ring_size")
        if size is None and cp_size_of(self.args) > 1:
            return cp_size_of(self.args)
        return 1 if size is None and self.accelerator.state.num_processes == 1 else size

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, and then the ring, and patches the model."""
        with _swapped(self.args, parallelism_config=parallelism_beside_rings(self.args)):
            super().create_accelerator_and_postprocess()
        self.ring = Ring.from_accelerator(
            self.accelerator,
            self._ring_size(),
            layout=self.ring_setting("ring_layout"),
            transport=self.ring_setting("ring_transport"),
            heads=self.ring_setting("ring_heads"),
        )
        if self.model is not None:
            patch_model(self.model, ring=self.ring)
        steps, args = getattr(self.args, "steps_per_generation", None), self.args
        if steps is not None and hasattr(args, "generation_batch_size"):  # TRL counted processes.
            args.generation_batch_size = args.per_device_train_batch_size * self.ring.dp_size * steps

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Makes the model, and patches it."""
        return patch_model(super().call_model_init(trial), ring=self.ring)

    def _patch_beside(self) -> None:
        """Gives the models that score beside the trained one the same ring; a reference model gets its pattern too."""
        config = unwrapped(self.model).config.get_text_config()
        for name in ("ref_model", "teacher_model"):
            model = unwrapped(getattr(self, name, None))
            if not isinstance(model, PreTrainedModel):
                continue
            settings = settings_of(config)
            if name == "ref_model" and settings is not None and settings_of(model.config.get_text_config()) is None:
                use_settings(model.config, settings)
            patch_model(model, ring=self.ring)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the number of rows of an optimizer step, those of all rings."""
        return super().get_total_train_batch_size(args) // self.ring.world_size

    def store_flos(self) -> None:
        """Adds up the operations of all rings, whose ranks have each counted whole rows."""
        self.current_flos = self.current_flos // self.ring.world_size
        super().store_flos()

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Returns Trainer's loader, whose workers draw the same numbers on all ranks of a ring."""
        loader: Any = super()._get_dataloader(*args, **kwargs)
        base = getattr(loader, "base_dataloader", loader)
        if base.num_workers and base.worker_init_fn is not None:
            base.worker_init_fn = partial(seed_worker, num_workers=base.num_workers, rank=self.ring.dp_rank)
        return loader

    def compute_loss_context_manager(self) -> ExitStack:
        """Returns Trainer's context, which also offloads activations if the setting asks for it."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self.ring_setting("offload_activations"):
            stack.enter_context(save_on_cpu(pin_memory=self.args.device.type != "cpu"))
        return stack

    # ---- steps that are not finite

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Trains on a batch as Trainer does, and adds its loss to the loss of the optimizer step."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self._step_loss = self._step_loss + loss
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the norm of whole gradients; tells of one that is not finite, or of such a loss."""
        norm = whole_norm(super()._get_grad_norm(*args, **kwargs))
        loss, self._step_loss = float(self.accelerator.reduce(torch.as_tensor(self._step_loss), "mean")), 0.0
        number = 0.0 if norm is None else float(norm)  # DeepSpeed may not tell it
        if not is_finite_step(self.accelerator, loss, number):
            self.when_not_finite(loss, number)
        return norm

    def when_not_finite(self, loss: float, grad_norm: float) -> None:
        """Warns once in a run. All processes call it before the optimizer takes such a step; override it to stop instead."""
        if not self._told_not_finite and self.is_world_process_zero():
            logger.warning(
                "step %d: loss %g, gradient norm %g: training goes on, but the weights may become NaN, and logs may leave such "
                "losses out (logging_nan_inf_filter): stop, and lower the learning rate",
                self.state.global_step + 1,
                loss,
                grad_norm,
            )
        self._told_not_finite = True

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as Trainer does; if communication fails, the error names the processes that are gone."""
        self._told_not_finite, self._step_loss = False, 0.0
        with naming_lost_processes():
            return super().train(*args, **kwargs)

    # ---- TRL's trainers that generate

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generates completions; those of a ring's first rank are those of all its ranks."""
        completions = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        return self.ring.agree("completions", {}, tell=completions if self.ring.rank == 0 else None)[0]


@contextmanager
def _swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes other values inside the context."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def is_finite_step(accelerator: Any, loss: float, norm: float) -> bool:
    """Returns whether the optimizer may take a step with this loss of all processes, and this norm of whole gradients.

    In float16 gradients may overflow: the step is skipped, and the loss is scaled by half as much, until none does.
    """
    scaler = accelerator.scaler
    skipped = accelerator.mixed_precision == "fp16" and (scaler is None or scaler.get_scale() >= 1)
    return math.isfinite(loss) and (math.isfinite(norm) or skipped)


def _wrong_settings(trainer: Any) -> ValueError | None:
    """Returns the error of a Trainer whose settings mean something else over rings; None if all is right."""
    args, sharded = trainer.args, trainer.ring.world_size > 1
    error = untrainable(unwrapped(trainer.model))
    if error is not None:
        return error
    cp_size = cp_size_of(args)
    if cp_size not in (1, trainer.ring.world_size):
        return ValueError(
            f"ring_size={trainer.ring.world_size} and cp_size={cp_size} of the parallelism_config are two names of one "
            f"number, the processes that share each sequence: give one of them, or the same twice"
        )
    generations, batch = getattr(trainer, "num_generations", None), getattr(args, "generation_batch_size", None)
    if generations and batch and batch % generations:
        return ValueError(
            f"generation_batch_size is {batch} over {trainer.ring.dp_size} rings, and num_generations={generations} does not "
            f"divide it: raise per_device_train_batch_size or steps_per_generation"
        )
    for wrong, setting, reason in (
        (args.n_gpu > 1, f"DataParallel over {args.n_gpu} GPUs", "start a process for each: accelerate launch"),
        (sharded and args.neftune_noise_alpha, "neftune_noise_alpha", "its noise depends on the length of a row"),
        (
            sharded and getattr(args, "use_vllm", False),
            "use_vllm",
            "vLLM would complete each prompt once for each rank",
        ),
        (
            args.world_size > 1 and getattr(args, "train_sampling_strategy", None) == "batch_rebalance",
            "train_sampling_strategy='batch_rebalance'",
            "it divides rows among processes",
        ),
    ):
        if wrong:
            return ValueError(f"{setting} is not what it seems over a ring: {reason}: leave it out")
    return None


class RingTrainer(RingTrainerMixin, Trainer):
    """Transformers' Trainer with sequences sharded over rings of `args.ring_size` processes, by `RingTrainerMixin`.

    Example:
        >>> options = {"max_steps": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": []}
        >>> args = ra.RingTrainingArguments("output", **options)
        >>> rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2
        >>> trainer = ra.RingTrainer(tiny_llama(), args, train_dataset=rows)
        >>> trainer.train().global_step
        {'train_runtime': ...}
        2
    """

    def __init__(self, model: Any = None, args: RingTrainingArguments | None = None, **kwargs: Any) -> None:
        super().__init__(model, RingTrainingArguments("tmp_trainer") if args is None else args, **kwargs)
