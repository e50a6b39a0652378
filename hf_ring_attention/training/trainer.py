"""Transformers' Trainer, and TRL's trainers, over rings: each ring of processes is one data-parallel replica."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import skip_first_batches
from accelerate.utils import gather, gather_object
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, seed_worker

from ..compute.foreign_code import globals_called, rebound
from ..compute.private import PROBED, check, checkpoint_options, checkpointing_of, set_checkpointing
from ..hf.model.config import differs_from_saved, settings_of, use_settings, warn_once
from ..hf.model.support import attention_dropout
from ..hf.model.wrappers import unwrapped
from ..hf.patch import patch_model
from ..ring.mesh import without_cp
from ..ring.operator import keep_attention
from ..ring.ring import Ring
from ..transport.lost_processes import naming_lost_processes
from .packing import warn_of_cuts
from .rollouts import SharedRollouts, check_generations, check_vllm

logger = logging.getLogger(__name__)
check("transformers.Trainer")

if TYPE_CHECKING:
    _Trainer = Trainer  # type checkers see the methods of the class that the mixin is mixed into
else:
    _Trainer = object


@dataclass
class RingTrainingArguments(TrainingArguments):
    """`TrainingArguments` of a `RingTrainer`; batch sizes count the rows of a ring.

    Args:
        ring_size: processes that share each sequence, a divisor of their number; rings are data parallel. Several processes
            need it: 1 makes each process a separate ring. `parallelism_config=ParallelismConfig(cp_size=N)` means
            ring_size=N; Accelerate's own context parallelism, which needs FSDP 2 and drops masks, then takes no part.
        ring_layout: "auto", "contiguous", "zigzag" or "documents".
        ring_transport: "auto", "ring", "collective", "heads" or "local".
        ring_heads: with "heads", how many neighbouring processes exchange heads; None for all of a ring.
        ring_kernel: "auto", "fused", "flash", "cudnn", "efficient" or "math", as for `Ring`.
        offload_activations: whether tensors that the forward pass saves wait in host memory; with
            activation_checkpointing, these are the inputs of the layers.
        ring_keep_attention: whether checkpointing keeps the results of attention (`ra.keep_attention`), so that backward
            recomputes layers without attention and its messages.

    Example:
        >>> args = ra.RingTrainingArguments("output", ring_layout="zigzag", use_cpu=True, report_to=[])
        >>> args.ring_layout, args.ring_transport
        ('zigzag', 'auto')
    """

    ring_size: int | None = field(default=None, metadata={"help": "processes that share each sequence"})
    ring_layout: str = field(default="auto", metadata={"help": "auto, contiguous, zigzag or documents"})
    ring_transport: str = field(default="auto", metadata={"help": "auto, ring, collective, heads or local"})
    ring_heads: int | None = field(default=None, metadata={"help": "neighbours that exchange heads; default: all"})
    ring_kernel: str = field(default="auto", metadata={"help": "auto, fused, flash, cudnn, efficient or math"})
    offload_activations: bool = field(default=False, metadata={"help": "keep saved activations in host memory"})
    ring_keep_attention: bool = field(default=True, metadata={"help": "checkpointing keeps the results of attention"})
    makes_rings = False

    @property
    def place_model_on_device(self) -> bool | None:
        """As in `TrainingArguments`; each Trainer reads it, and one that makes no rings gets a ValueError."""
        if (self.ring_size or 1) > 1 and not self.makes_rings:
            raise ValueError(
                f"ring_size={self.ring_size}, and this Trainer makes no rings: take ra.RingTrainer or mixin"
            )
        return super().place_model_on_device


class RingTrainerMixin(SharedRollouts, _Trainer):
    """Makes a Trainer shard its sequences over rings: `class RingDPOTrainer(ra.RingTrainerMixin, DPOTrainer): pass`.

    The model is patched to "ring_dilated" with the pattern of its config; so is a reference model. Collators, losses, metrics
    and evaluation are the Trainer's own: its accelerator counts rings (`Ring.from_accelerator`), batch sizes count the rows of
    a ring, and the model takes whole rows. The ranks of a ring share the prompts that TRL's trainers complete.

    Args:
        ring_size, ring_layout, ring_transport, ring_heads, ring_kernel, ring_keep_attention, offload_activations: as in
            `RingTrainingArguments`, for Trainers with another class of arguments.

    Raises:
        ValueError: on every process, at set-up: no ring size for several processes, or one that does not divide their number; a
            model with attention dropout; or a setting that rings would change (NEFTune, DataParallel).
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
    _SETTINGS = tuple(RingTrainingArguments.__annotations__)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ring_settings = {name: kwargs.pop(name) for name in self._SETTINGS if name in kwargs}
        self._step_loss: Tensor | float = 0.0
        self._told_not_finite = False
        check_trl(type(self))
        super().__init__(*args, **kwargs)
        self.accelerator.counts_processes = False
        with self.ring.agreement("the set-up of a Trainer", everywhere=True):
            _check_settings(self)
            for user in (self, *vars(self).values()):  # some have helpers that gather
                _count_rings_by_name(user, self.accelerator)
        self._patch_beside()
        self._begin_rollouts()

    def ring_setting(self, name: str) -> Any:
        """Returns a setting of this Trainer, or else of its arguments."""
        default = getattr(RingTrainingArguments, name)
        return self.ring_settings.get(name, getattr(self.args, name, default))

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, and then the ring, and patches the model."""
        args, config = self.args, cast(Any, self.args.parallelism_config)
        cp_size = getattr(config, "cp_size", 1)
        if cp_size > 1:
            # Accelerate takes a cp_size with FSDP 2 alone, Trainer would cut each row once more, and on a CPU Accelerate
            # refuses any config.
            args.parallelism_config = None if config.total_size == cp_size else without_cp(config)
        try:
            super().create_accelerator_and_postprocess()
        finally:
            args.parallelism_config = config
        size = self.ring_setting("ring_size")
        if size is None and (cp_size > 1 or self.accelerator.state.num_processes == 1):
            size = cp_size
        settings = {name: self.ring_setting(f"ring_{name}") for name in ("layout", "transport", "heads", "kernel")}
        self.ring = Ring.from_accelerator(self.accelerator, size, **settings)
        cast(Any, args).makes_rings = True
        if self.model is not None:
            patch_model(self.model, ring=self.ring)
        if getattr(args, "use_vllm", False):
            check_vllm(self)
            self.accelerator.counts_processes = True  # TRL makes an engine in each process.
        steps = getattr(args, "steps_per_generation", None)
        if steps is not None and hasattr(args, "generation_batch_size"):  # TRL counted processes.
            before, rows = args.generation_batch_size, args.per_device_train_batch_size * self.ring.dp_size * steps
            args.generation_batch_size = rows
            if rows != before and steps != args.gradient_accumulation_steps and args.process_index == 0:
                warn_once(f"generation_batch_size is {rows}, not {before} (by processes): set steps_per_generation")

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Makes the model, and patches it."""
        return patch_model(super().call_model_init(trial), ring=self.ring)

    def _patch_beside(self) -> None:
        """Gives the models that score beside the trained one the same ring; its copies get its pattern too."""
        copies = "ref_model", hasattr(self.args, "teacher_model_kind") and "teacher_model"  # of SDPO and SDFT
        settings = settings_of(unwrapped(self.model).config.get_text_config())
        for name in ("ref_model", "teacher_model"):
            model = unwrapped(getattr(self, name, None))
            if isinstance(model, PreTrainedModel):
                own = settings_of(model.config.get_text_config())
                if name in copies and settings is not None and own is None:
                    use_settings(model.config, settings)
                patch_model(model, ring=self.ring)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Scores a data set by the reference under its pattern. TRL does it at set-up, and keeps the scores in a file."""
        self._patch_beside()
        trainer: Any = self
        settings = settings_of(unwrapped(trainer.ref_model or self.model).config.get_text_config())
        trainer._precompute_model_hash = f"{trainer._precompute_model_hash.split()[0]} {settings}"
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def add_callback(self, callback: Any) -> None:
        """Adds a callback; one of TRL gathers from rings."""
        super().add_callback(callback)
        _count_rings_by_name(self.callback_handler.callbacks[-1], self.accelerator)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """Prepares rows as TRL does; where its SFT would cut documents, it warns of the tokens that are lost."""
        prepare = super()._prepare_dataset  # type: ignore[misc]
        packing, *_ = rest
        longest = args.max_length if packing is False or getattr(args, "packing_strategy", "") == "bfd" else None
        if not isinstance(packing, bool) or longest is None:
            return prepare(dataset, processing_class, args, *rest)
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        documents = prepare(dataset, processing_class, whole, False, *rest[1:])
        documents = warn_of_cuts(documents, longest) if args.process_index == 0 else documents
        return prepare(documents, processing_class, args, packing, None, *rest[2:])

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the number of rows of an optimizer step in all rings."""
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
        """Returns Trainer's context, which also offloads activations if the setting asks for it, and keeps attention."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self.ring_setting("offload_activations"):
            stack.enter_context(save_on_cpu(pin_memory=self.args.device.type != "cpu"))
        if self.ring_setting("ring_keep_attention"):
            reason = _keep_attention_in(cast(nn.Module, self.model))  # TRL's trainers switch checkpointing off and on.
            if reason is not None and self.is_world_process_zero():
                warn_once(f"ring_keep_attention=True: backward still computes attention again, because {reason}")
        return stack

    # ---- steps that are not finite

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Trains on a batch as Trainer does, and adds its loss to the loss of the optimizer step."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self._step_loss = self._step_loss + loss
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the norm of whole gradients; tells of one that is not finite, or of such a loss."""
        norm = super()._get_grad_norm(*args, **kwargs)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # FSDP 2 has the norm of a part.
        loss, self._step_loss = float(self.accelerator.reduce(torch.as_tensor(self._step_loss), "mean")), 0.0
        number, scaler = 0.0 if norm is None else float(norm), self.accelerator.scaler  # DeepSpeed may have no norm.
        # In float16 gradients may overflow: the step is skipped, and the loss is scaled by half as much, until none does.
        skipped = self.accelerator.mixed_precision == "fp16" and (scaler is None or scaler.get_scale() >= 1)
        if not (math.isfinite(loss) and (math.isfinite(number) or skipped)):
            self.when_not_finite(loss, number)
        return norm

    def when_not_finite(self, loss: float, grad_norm: float) -> None:
        """Warns once in a run. All processes call it before the optimizer takes such a step; override it to stop instead."""
        if not self._told_not_finite and self.is_world_process_zero():
            step = self.state.global_step + 1
            logger.warning(
                f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}: training goes on, but the weights may become NaN, "
                f"and logs may leave such losses out (logging_nan_inf_filter): stop, and lower the learning rate"
            )
        self._told_not_finite = True

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as Trainer does; if communication fails, the error names the processes that are gone."""
        self._told_not_finite, self._step_loss = False, 0.0
        last = resume_from_checkpoint
        if last is True:
            last = get_last_checkpoint(self.args.output_dir or "")
        if last and differs_from_saved(unwrapped(self.model).config, Path(last)) and self.is_world_process_zero():
            logger.warning(f"{last} was trained under another pattern than the model's, under which training goes on")
        with naming_lost_processes():
            return super().train(resume_from_checkpoint, *args, **kwargs)


def _keep_attention_in(model: nn.Module) -> str | None:
    """Has the layers that checkpoint keep attention; returns the reason why some cannot, if any."""
    reason = None
    for module in model.modules():
        checkpoint = checkpointing_of(module)
        if checkpoint is None:
            continue
        options = checkpoint_options(checkpoint)
        if options is None:
            reason = "layers checkpoint by their own function"
        elif options.get("use_reentrant") is not False:
            reason = "checkpointing is reentrant: set use_reentrant=False"
        elif "context_fn" not in options:
            set_checkpointing(module, partial(checkpoint, context_fn=keep_attention))
        elif options["context_fn"] is not keep_attention:
            reason = "checkpointing has a context_fn already"
    return reason


def check_trl(trainer_class: Any) -> None:
    """Raises ImportError if a Trainer of TRL lacks a private name that `training/trainer.py` overrides."""
    # Its subclasses may have its name, also those of trl.experimental.
    kinds = {
        f"trl.{kind.__name__}": kind for kind in trainer_class.__mro__ if kind.__module__.startswith("trl.trainer.")
    }
    for name in kinds.keys() & PROBED.keys():
        (place,) = PROBED[name]
        check(name, {place: kinds[name].__init__ if place.endswith("__init__") else kinds[name]})


def _check_settings(trainer: Any) -> None:
    """Raises ValueError for a Trainer whose settings mean something else over rings."""
    args, ring_size, model = trainer.args, trainer.ring.world_size, unwrapped(trainer.model)
    if (dropout := attention_dropout(model.config.get_text_config())) is not None:
        raise ValueError(
            f"{type(model).__name__} has attention dropout ({dropout}), and ring_dilated has none: set it to 0 in the config "
            f"before the model is made"
        )
    cp_size = getattr(args.parallelism_config, "cp_size", 1)
    if cp_size not in (1, ring_size):
        raise ValueError(
            f"ring_size={ring_size} and cp_size={cp_size} of the parallelism_config name the same number: give one of them"
        )
    if getattr(args, "steps_per_generation", None) is not None:
        check_generations(args, trainer.ring.dp_size)
    for rows in (trainer.train_dataset, trainer.eval_dataset):
        if "position_ids" in (getattr(rows, "column_names", None) or ()) and not _keeps_positions(trainer):
            raise ValueError(
                "the rows are packed, and this Trainer drops their position_ids: pass data_collator=default_data_collator and "
                "remove_unused_columns=False, or documents and packing=True with packing_strategy='bfd_split'"
            )
    over_ring, batching = ring_size > 1, getattr(args, "use_transformers_continuous_batching", False)
    rebalanced = args.world_size > 1 and getattr(args, "train_sampling_strategy", None) == "batch_rebalance"
    refused = {
        f"DataParallel over {args.n_gpu} GPUs": args.n_gpu > 1 and "start a process for each: accelerate launch",
        "neftune_noise_alpha": over_ring and args.neftune_noise_alpha and "its noise depends on the length of a row",
        "use_transformers_continuous_batching": over_ring and batching and "its cache does not know the ring",
        "train_sampling_strategy='batch_rebalance'": rebalanced and "it divides rows of processes",
    }
    for setting, reason in refused.items():
        if reason:
            raise ValueError(f"{setting} does not work over a ring: {reason}. Leave it out")


def _keeps_positions(trainer: Any) -> bool:
    """Returns whether positions of packed rows reach the model: columns may be left out, and TRL's collator makes others."""
    trainer._set_signature_columns_if_needed()
    kept = not trainer.args.remove_unused_columns or "position_ids" in trainer._signature_columns
    return kept and not type(trainer.data_collator).__module__.startswith("trl.")


def _count_rings_by_name(user: Any, accelerator: Any) -> None:
    """Gives a Trainer, helper or callback of TRL copies of its methods that count by name; refuses one that is overridden.

    The copies belong to this object, and the libraries stay as they are. TRL computes advantages from the rewards of all
    processes, which would count a ring's completions once for each of its ranks. Trainer goes on in the middle of a stream.
    """
    by_rings: dict[str, tuple[Any, Any]] = {  # the functions that count processes, and those that count rings
        "gather": (gather, accelerator.gather),
        "gather_object": (gather_object, lambda x: gather_object(x if accelerator.ring.rank == 0 else [])),
        "skip_first_batches": (skip_first_batches, accelerator.skip_first_batches),
    }
    libraries = ("trl.", "transformers.trainer") if accelerator.ring.world_size > 1 else ()
    kinds = [kind for kind in type(user).__mro__ if kind.__module__.startswith(libraries)]
    for name, method, owner in [(*entry, kind) for kind in kinds for entry in vars(kind).items()]:
        if not inspect.isfunction(method):
            continue
        space = inspect.unwrap(method).__globals__
        own = {x: by_rings[x][1] for x in globals_called(method) & by_rings.keys() if space.get(x) is by_rings[x][0]}
        if not own:
            continue
        if getattr(type(user), name) is not method:
            raise ValueError(
                f"{type(user).__name__} overrides {name} of {owner.__name__}, which counts processes and not rings: rename "
                f"the override, or use one process for each sequence (ring_size=1)"
            )
        setattr(user, name, MethodType(rebound(method, own), user))


class RingTrainer(RingTrainerMixin, Trainer):
    """Transformers' Trainer with sequences sharded over rings of `args.ring_size` processes, by `RingTrainerMixin`.

    Args:
        args, kwargs: as for Trainer, `RingTrainingArguments` among them.

    Example:
        >>> options = {"max_steps": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": []}
        >>> args = ra.RingTrainingArguments("output", **options)
        >>> rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2
        >>> trainer = ra.RingTrainer(tiny_llama(), args, train_dataset=rows)
        >>> trainer.train().global_step
        {'train_runtime': ...}
        2
    """
