"""Completions of TRL's trainers over a ring: each rank completes a share of the prompts, and all ranks get all completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor

from ..hf.model.config import has_only_exact_attention, patterns_of, warn_once
from ..hf.model.wrappers import unwrapped
from ..ring.ring import Ring
from ..transport.agreement import digest

#: The arguments of a model that have its images.
_IMAGES = "pixel_values image_grid_thw image_position_ids image_sizes pixel_attention_mask spatial_shapes".split()


class SharedRollouts:
    """The part of a Trainer that completes prompts: the ranks of a ring have the same ones, a copy for each completion.

    A rank completes whole rows by itself, so a ring completes as many prompts at a time as it has ranks. A vLLM server has the
    prompts of each ring once, and divides the work itself.
    """

    ring: Ring
    args: Any
    accelerator: Any
    _rollouts = 0

    def _begin_rollouts(self) -> None:
        """Gives the ranks of a ring the same random numbers, where TRL has set a seed by process; shares `rollout_func`."""
        trainer: Any = self
        if hasattr(super(), "_generate_single_turn"):
            set_seed(self.args.seed + self.ring.dp_rank)
        own = getattr(self, "rollout_func", None)
        if own is not None and self.ring.world_size > 1:
            trainer.rollout_func = partial(self._shared_rollouts, own)

    def _shared_rollouts(self, own: Callable[..., dict[str, Any]], prompts: Sequence[Any], trainer: Any) -> Any:
        """Calls a `rollout_func` with whole groups; the lists in its results are joined, of other entries the first counts."""
        group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval

        def complete(chosen: Sequence[int]) -> dict[str, Any]:
            found = own([prompts[number] for number in chosen], trainer)
            count = len(found.get("completion_ids", chosen))
            if count != len(chosen):
                raise ValueError(
                    f"rollout_func returned {count} completions of {len(chosen)} prompts: return one for each"
                )
            return found

        return self._shared(prompts, complete, unit=1 if len(prompts) % group else group)

    def _generate_single_turn(self, prompt_ids: Any, images: Any, fields: Any, *args: Any, **kwargs: Any) -> Any:
        """Completes prompts, whose token numbers, images and processed images are given, as TRL does."""
        generate = super()._generate_single_turn  # type: ignore[misc]
        if self.ring.world_size == 1:
            return generate(prompt_ids, images, fields, *args, **kwargs)
        fields = {} if self.args.use_vllm else fields  # vLLM takes the images.
        choose = _fields_by_prompt(fields, images, len(prompt_ids))

        def complete(chosen: Sequence[int]) -> Any:
            own_images = None if images is None else [images[number] for number in chosen]
            own_fields = fields if choose is None else choose(chosen)
            return generate([prompt_ids[number] for number in chosen], own_images, own_fields, *args, **kwargs)

        return self._shared(prompt_ids, complete, unit=len(prompt_ids) if choose is None else 1)

    def _shared(self, prompts: Sequence[Any], complete: Callable[[Sequence[int]], Any], unit: int) -> Any:
        """Completes this rank's share of the prompts, chosen by their numbers, and returns the results of all ranks.

        Shares have as many units of so many prompts, as engines with tensor parallelism need it: the first prompts fill up the
        last shares. If a unit is all prompts, each rank completes all, and the results of the first one count.
        """
        ring, count = self.ring, len(prompts)
        with ring.agreement("prompts to complete") as call:
            known = re.sub(" at 0x[0-9a-fA-F]+", "", repr(prompts))  # without the addresses of images
            call.same("the prompts", digest(known), "get the same from tools and environments: seed what they draw")
            # Later random numbers, such as the order of completions, are the same as without a ring.
            with torch.random.fork_rng([]):
                call.message = int(torch.randint(2**48, ())) + self._rollouts * ring.world_size
        served = self.args.use_vllm and self.args.vllm_mode == "server"
        unit = count if served else unit
        size = -(-count // (unit * ring.world_size)) * unit
        chosen = [number % count for number in range(ring.rank * size, (ring.rank + 1) * size)]
        device = self.accelerator.device
        forked = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
        of_server = complete(chosen) if served else None  # If it fails, the others wait for the main process alone.
        with ring.agreement("completions") as completions, forked:
            torch.manual_seed(call.answers[0] + ring.rank)  # Copies of a prompt differ.
            completions.message = of_server if served else complete(chosen)
        self._rollouts += 1
        return _of_all_shares(completions.answers, count)

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> Any:
        """Returns the tokens of what tools answered; the answers of the first rank count, as tools may answer differently."""
        with self.ring.agreement("the answers of tools") as call:
            call.message = [message["content"] for message in tool_messages]
            parts = [part for content in call.message for part in content if isinstance(part, dict)]  # none of a text
            images = [part["image"].tobytes() for part in parts if hasattr(part.get("image"), "tobytes")]
            call.same("images that tools return", digest(images), "get the same: seed what tools draw")
        for message, content in zip(tool_messages, call.answers[0]):
            message["content"] = content  # TRL keeps these messages in the completions.
        return super()._get_tool_suffix_ids(tool_messages)  # type: ignore[misc]


def _of_all_shares(shares: Sequence[Any], count: int) -> Any:
    """Returns the results for all prompts: lists are joined, as are those in a tuple or a dict; of others the first counts."""

    def joined(parts: Sequence[Any]) -> Any:
        return [x for part in parts for x in part][:count] if isinstance(parts[0], list) else parts[0]

    first = shares[0]
    if isinstance(first, dict):
        return {name: joined([share[name] for share in shares]) for name in first}
    return tuple(map(joined, zip(*shares))) if isinstance(first, tuple) else joined(shares)


def _fields_by_prompt(
    fields: dict[str, Any], images: Any, count: int
) -> Callable[[Sequence[int]], dict[str, Any]] | None:
    """Returns a function that chooses the processed images of some prompts; None if TRL cannot divide them by prompts."""
    if not fields:
        return lambda chosen: {}
    from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

    def per_token(x: Any) -> bool:
        return isinstance(x, list) and len(x) > 0 and isinstance(x[0], list)

    fields = {k: x if isinstance(x, Tensor) or per_token(x) else torch.tensor(np.array(x)) for k, x in fields.items()}
    numbers = [len(x or ()) for x in images or [()] * count]
    pixels = fields.get("pixel_values")
    tiled = pixels is not None and pixels.ndim == 4 and len(pixels) != sum(numbers) and "image_grid_thw" not in fields
    undivided = tiled or "spatial_shapes" in fields
    counted: dict[str, Any] = {**fields, "num_images": numbers}
    # TRL takes the rows of Idefics, which have a mask of pixels, for images if there are as many.
    by_row = undivided or "pixel_attention_mask" in fields
    split = counted if by_row else split_pixel_values_by_grid(counted)
    if undivided or any(len(x) != count for x in split.values()):
        warn_once(f"every rank completes all prompts: {', '.join(fields)} of this model are not divided by prompts")
        return None

    def choose(chosen: Sequence[int]) -> dict[str, Any]:
        picked = {
            name: x[chosen] if isinstance(x, Tensor) else [x[number] for number in chosen] for name, x in split.items()
        }
        joined: dict[str, Any] = unsplit_pixel_values_by_grid(picked)
        seen = sum(joined.pop("num_images"))
        return {name: x for name, x in joined.items() if seen or name not in _IMAGES}

    return choose


def check_vllm(trainer: Any) -> None:
    """Refuses vLLM where it would complete other prompts than the ring's, or attend otherwise without a correction.

    Raises:
        ValueError: a Trainer that does not share its prompts; or a pattern, and no importance sampling correction.
    """
    name = type(trainer).__name__
    if trainer.ring.world_size > 1 and not hasattr(super(SharedRollouts, trainer), "_generate_single_turn"):
        raise ValueError(
            f"use_vllm does not work over a ring in {name}: each rank would complete every prompt. Leave it out"
        )
    config = unwrapped(trainer.model).config.get_text_config()
    if has_only_exact_attention(config):
        return
    if not getattr(trainer.args, "vllm_importance_sampling_correction", False):
        raise ValueError(
            f"vLLM completes without {patterns_of(config)}, and {name} does not correct it: set "
            f"vllm_importance_sampling_correction=True in GRPO, or leave use_vllm out"
        )
    if trainer.args.process_index == 0:
        warn_once(
            f"vLLM completes with exact attention, and the model trains with {patterns_of(config)}: TRL weighs tokens by "
            f"importance sampling; watch sampling/importance_sampling_ratio in the log"
        )


def check_generations(args: Any, rings: int) -> None:
    """Compares the numbers of TRL's completions with the rings; TRL has compared them with the number of processes."""
    generations, batch = args.num_generations, args.generation_batch_size
    if batch % generations:
        raise ValueError(
            f"num_generations={generations} does not divide generation_batch_size={batch} of {rings} rings: raise "
            f"per_device_train_batch_size or steps_per_generation"
        )
    generations, batch = args.num_generations_eval or generations, args.per_device_eval_batch_size
    if args.eval_strategy != "no" and batch * rings % generations:
        raise ValueError(
            f"num_generations={generations} of evaluations does not divide per_device_eval_batch_size={batch} times "
            f"{rings} rings: raise per_device_eval_batch_size"
        )
