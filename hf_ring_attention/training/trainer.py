"""Transformers' Trainer on sharded sequences, with the losses, gradients, evaluation and checkpoints of one device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import concatenate, recursively_apply, send_to_device
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.data import DataLoader
from transformers import Trainer

from ..compute.private import check_trainer
from ..hf.patch import patch_model
from ..plan.layouts import SequenceLayout
from ..ring.ring import Ring
from ..transport.lost_processes import naming_lost_processes
from . import trainer_checks
from .arguments import RingTrainingArguments, cp_size_of, parallelism_beside_rings
from .collators import PackingCollator, PaddingCollator
from .columns import TOKEN_COLUMNS
from .fill import tokens_and_slots
from .loaders import LoaderPreparer, RingDataLoader
from .losses import sliced_loss
from .next_tokens import shift_labels_of
from .shard_iterators import Shards
from .sharded_weights import whole_norm
from .shards import IGNORED, layout_of_shard

logger = logging.getLogger(__name__)
check_trainer(Trainer)

if TYPE_CHECKING:
    _Trainer = Trainer  # type checkers see the methods of the class that the mixin is mixed into
else:
    _Trainer = object


class RingTrainerMixin(_Trainer):
    """Makes a Trainer shard its sequences over rings: `class RingSFTTrainer(RingTrainerMixin, SFTTrainer)`.

    The model is patched to "ring_dilated" with the pattern of its config. The Trainer's own collator makes batches, which
    are then cut (`shard_batch`). If you define `get_train_dataloader`, or the methods for evaluation and test, they may
    return a torch DataLoader, which the ring prepares. If you define `compute_loss`, it gets shards: `inputs["shift_labels"]`
    are the labels of next tokens, and the loss must be the sum over them divided by `num_items_in_batch`, times the number
    of processes. The model computes its loss for `loss_tokens_at_once` tokens at a time, without logits: for a loss that
    needs them, call the model without labels, or set `loss_tokens_at_once` to 0. Evaluation sums over tokens, and also gives
    perplexity and tokens. Training logs the fill of its rows, unless `include_num_input_tokens_seen` is "no".

    Args:
        ring_size, ring_layout, ring_transport, ring_heads, ring_deal, loss_tokens_at_once, offload_activations: as in
            `RingTrainingArguments`, for Trainers with arguments of their own.

    Raises:
        ValueError: on every process, at set-up: no ring size for several processes, or one that does not divide their
            number; a model with attention dropout, with a loss function of its own or another loss than that of next tokens
            (masked language models, classifiers, preferences); or a result that would be computed from a shard alone:
            label smoothing, `compute_loss_func`, `include_for_metrics`, NEFTune, counts of padding or of single processes.
        NotImplementedError: a model that ring_dilated does not compute.

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> class MyRingTrainer(ra.RingTrainerMixin, Trainer):
        ...     pass
        >>> args = TrainingArguments("output", use_cpu=True, disable_tqdm=True, report_to=[])
        >>> trainer = MyRingTrainer(tiny_llama(), args, data_collator=ra.PaddingCollator(), ring_size=1)
        >>> trainer.evaluate([{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6]}])["eval_tokens"]
        {'eval_loss': ...}
        4
    """

    ring: Ring
    _SETTINGS = (
        "ring_size", "ring_layout", "ring_transport", "ring_heads", "ring_deal", "loss_tokens_at_once",
        "offload_activations",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ring_settings = {name: kwargs.pop(name) for name in self._SETTINGS if name in kwargs}
        self._shards: Shards | None = None
        self._training_loader: RingDataLoader | None = None
        self._in_training_loop = False
        self._preprocess_checked = False
        self._step_loss: Tensor | float = 0.0
        self._told_not_finite = False
        self._nll: Tensor | None = None
        self._scored: Tensor | int = 0
        self._tokens = self._slots = 0
        self._shard_preprocess: Callable[..., Any] | None = None
        super().__init__(*args, **kwargs)
        self.ring.agree_everywhere("the set-up of a Trainer", {}, trainer_checks.wrong_settings(self, RingTrainerMixin))
        trainer_checks.warn_of_methods(self, RingTrainerMixin)
        trainer_checks.keep_the_smallest_perplexity(self)
        self._reads_all_logits = trainer_checks.reads_all_logits(self)
        # The attributes of the object replace the methods of subclasses too, which come before those of this class.
        for name in ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"):
            setattr(self, name, partial(self._loader_of_ring, getattr(self, name), name == "get_train_dataloader"))

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
        return 1 if size is None and self.accelerator.num_processes == 1 else size

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

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Makes the model, and patches it."""
        return patch_model(super().call_model_init(trial), ring=self.ring)

    # ---- batches

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Returns Trainer's own loader, prepared by the ring."""
        with self._preparing_by_the_ring(kwargs.get("is_training", False)):
            return super()._get_dataloader(*args, **kwargs)

    def _preparing_by_the_ring(self, training: bool) -> AbstractContextManager[None]:
        """Returns a context in which Trainer's own methods prepare loaders by the ring; predictions keep their order."""
        deal = self.ring_setting("ring_deal") if training else "count"
        name = "the loader of training" if training else "the loader of an evaluation"
        preparer = LoaderPreparer(self.accelerator, self.ring, deal, self.args.gradient_accumulation_steps, name)
        return _swapped(self, accelerator=preparer)

    def _loader_of_ring(self, getter: Callable[..., Any], training: bool, *args: Any, **kwargs: Any) -> Any:
        """Returns the loader of a user's `get_..._dataloader`, prepared by the ring if it is not yet.

        Trainer's loop gets the loader of whole sequences, since it may have to skip some; other callers get shards.
        """
        with self._preparing_by_the_ring(training):
            loader = self.accelerator.prepare_data_loader(getter(*args, **kwargs))
        if not (training and self._in_training_loop):
            return loader
        self._training_loader = loader
        return loader.rows

    def _set_signature_columns_if_needed(self) -> None:
        """Makes Trainer keep the columns that this package's collators read, and that models do not take."""
        super()._set_signature_columns_if_needed()
        if isinstance(self.data_collator, (PaddingCollator, PackingCollator)):
            columns: Any = self._signature_columns
            columns += [name for name in TOKEN_COLUMNS if name not in columns]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Returns the shards of the next batches, and how many labels they have on all processes together."""
        if self._shards is None or self._shards.source is not epoch_iterator:
            if self._training_loader is None:
                raise ValueError(
                    f"{type(self).__name__} trains on a loader that its ring did not prepare: define get_train_dataloader in a "
                    f"subclass, where it may return a torch DataLoader"
                )
            self._shards = self._training_loader.shards(epoch_iterator)
        batches, items = super().get_batch_samples(self._shards, num_batches, device)
        loader = self.accelerator.gradient_state.active_dataloader
        if loader is not None:  # Accelerate would leave rows out of an epoch's last batch, and shards are not rows
            loader.remainder = -1
        # A step without any label has the loss 0, and not 0 / 0.
        return batches, max(items, 1) if isinstance(items, int) else None if items is None else items.clamp(min=1)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the number of rows of an optimizer step, those of all rings."""
        return super().get_total_train_batch_size(args) // self.ring.world_size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Counts tokens, without the padding that fills a row up to its layout, and the slots of rows, for `log`."""
        kind = self.args.include_num_input_tokens_seen
        if kind == "no":
            return
        tokens, slots = self.accelerator.gather(tokens_and_slots(inputs)[None]).sum(0).tolist()
        self.state.num_input_tokens_seen += tokens if kind == "non_padding" else slots
        self._tokens, self._slots = self._tokens + tokens, self._slots + slots

    # ---- losses

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Computes Trainer's loss; the model's own for a slice of tokens at a time, unless outputs are asked for."""
        # A loss that is computed from logits needs those of all tokens.
        by_logits = return_outputs or self.label_smoother is not None or self.compute_loss_func is not None
        by_logits = by_logits or self._reads_all_logits
        at_once = 0 if by_logits else self.ring_setting("loss_tokens_at_once")
        with sliced_loss(model, at_once) if at_once else nullcontext():
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )

    def compute_loss_context_manager(self) -> ExitStack:
        """Returns Trainer's context, which also offloads activations if the setting asks for it."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self.ring_setting("offload_activations"):
            stack.enter_context(save_on_cpu(pin_memory=self.args.device.type != "cpu"))
        return stack

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
        if not trainer_checks.is_finite_step(self.accelerator, loss, number):
            self.when_not_finite(loss, number)
        return norm

    def when_not_finite(self, loss: float, grad_norm: float) -> None:
        """Warns once in a run. All processes call it before the optimizer takes such a step; override it to stop instead."""
        if not self._told_not_finite:
            self._told_not_finite = True
            trainer_checks.warn_of_step(self, loss, grad_norm)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as Trainer does; if communication fails, the error names the processes that are gone."""
        self._in_training_loop, self._told_not_finite, self._step_loss = True, False, 0.0
        try:
            with naming_lost_processes():
                return super().train(*args, **kwargs)
        finally:
            self._in_training_loop = False
            self._shards = None  # this also ends the workers of an epoch that was not read to its end
            self._training_loader = None

    # ---- evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Any, Any]:
        """Returns the loss of a batch of shards, and the logits and labels of its whole sequences if they are asked for."""
        inputs = self._prepare_inputs(inputs)
        tokens = (shift_labels_of(inputs, "evaluation") != IGNORED).sum()
        tokens = self.accelerator.gather(tokens).sum()
        with torch.no_grad(), self.compute_loss_context_manager():
            answer = self.compute_loss(
                model,
                dict(inputs),
                return_outputs=not prediction_loss_only,
                num_items_in_batch=tokens.clamp(min=1),
            )
        loss, outputs = (answer, {}) if prediction_loss_only else answer
        loss = loss.detach().mean()
        # The share of a process was multiplied by the number of processes, for gradients that are averaged.
        self._nll = self._nll + loss.double() * tokens / self.accelerator.num_processes
        self._scored = self._scored + tokens
        if prediction_loss_only:
            return loss, None, None
        logits, labels = outputs["logits"] if hasattr(outputs, "keys") else outputs[1], inputs["labels"]
        if (
            self._shard_preprocess is not None
        ):  # before shards are joined, so that logits of whole sequences never exist
            logits = self._preprocessed(logits, labels)
        mask, layout = inputs.get("attention_mask"), layout_of_shard(inputs, self.ring)
        rows = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
        if mask is not None:  # a ring that had no rows left took part with rows of padding
            rows = self._whole_rows(mask, layout).any(1)
        logits, labels = recursively_apply(lambda x: self._whole_rows(x, layout)[rows], (logits, labels))
        return loss, logits, labels

    def _preprocessed(self, logits: Tensor, labels: Tensor) -> Any:
        """Returns what the user's function makes of a shard; its first call is checked on all ranks."""
        preprocess: Any = self._shard_preprocess
        if self.ring.world_size == 1 or self._preprocess_checked:
            return preprocess(logits, labels)
        result, error = trainer_checks.preprocessed_by_token(preprocess, logits, labels)
        self.ring.agree_everywhere("preprocess_logits_for_metrics", {}, error)
        self._preprocess_checked = True
        return result

    def _whole_rows(self, shards: Tensor, layout: SequenceLayout) -> Tensor:
        if self.ring.world_size == 1:
            return shards.detach()
        whole: Tensor = self.ring.joined(shards.detach(), layout)
        return whole

    def _gather_rows(self, x: Any) -> Any:
        """Returns the rows of all rings, one ring after the other; each ring's come from its first rank."""
        by_process = self.ring.agree_everywhere(
            "gathering what was evaluated", {}, tell=send_to_device(x, "cpu") if self.ring.rank == 0 else None
        )
        return concatenate([rows for rows in by_process if rows is not None])

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs as Trainer does, and the fill of the rows since the last loss of training: the share that is no padding.

        The steps per second of an evaluation are left out, since Trainer counts them as if each process read its own rows.
        """
        self._leave_out_steps(logs)
        if "loss" in logs and self._slots:
            logs["fill"] = round(self._tokens / self._slots, 4)
            self._tokens = self._slots = 0
        super().log(logs, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts as Trainer does, from data with labels; the metrics lack steps per second, as in `log`."""
        output = super().predict(*args, **kwargs)
        self._leave_out_steps(output.metrics)
        return output

    def _leave_out_steps(self, figures: dict[str, Any] | None) -> None:
        if figures is not None and self.ring.world_size > 1:
            for name in [x for x in figures if x.endswith("_steps_per_second") and not x.startswith("train_")]:
                del figures[name]

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any] | RingDataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluates as Trainer does; the loss is the sum over all tokens divided by their number."""
        dataloader = self.ring.prepare_data_loader(dataloader)
        self._nll, self._scored = torch.zeros((), dtype=torch.float64, device=self.args.device), 0
        self._preprocess_checked = False
        self.gather_function = self._gather_rows  # Trainer resets it after the loop
        own = self.preprocess_logits_for_metrics
        with _swapped(self, preprocess_logits_for_metrics=None, _shard_preprocess=own), naming_lost_processes():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            nll, tokens = float(self.accelerator.gather(self._nll).sum()), int(self._scored)
        if tokens == 0:
            raise ValueError(
                f"{description}: no token has a label: every label is -100; evaluate documents with labels"
            )
        loss = nll / tokens
        metrics: Any = output.metrics
        metrics[f"{metric_key_prefix}_loss"] = loss
        metrics[f"{metric_key_prefix}_perplexity"] = math.inf if loss >= 700 else math.exp(loss)
        metrics[f"{metric_key_prefix}_tokens"] = tokens
        return output


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


class RingTrainer(RingTrainerMixin, Trainer):
    """Transformers' Trainer with sequences sharded over rings of `args.ring_size` processes, by `RingTrainerMixin`.

    Example:
        >>> options = {"max_steps": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": []}
        >>> args = ra.RingTrainingArguments("output", **options)
        >>> documents = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6, 7]}]
        >>> trainer = ra.RingTrainer(tiny_llama(), args, train_dataset=documents, data_collator=ra.PaddingCollator())
        >>> trainer.train().global_step
        {'train_runtime': ...}
        2
    """

    def __init__(self, model: Any = None, args: RingTrainingArguments | None = None, **kwargs: Any) -> None:
        super().__init__(model, RingTrainingArguments("tmp_trainer") if args is None else args, **kwargs)
