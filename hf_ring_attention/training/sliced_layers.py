"""`sliced_layers`: norms and MLPs compute a slice of the tokens at a time, so wide and float32 tensors exist for a slice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..compute.private import gather_as_one
from ..hf.model.config import warn_once
from ..hf.model.support import SENSES
from ..hf.model.wrappers import class_of_transformers, decoder_of, inner_model, runner_of
from ..hf.patch import Model
from ..plan.branches import check_count

#: The names of MLPs or of their classes, and of modules with experts or of theirs; the classes of norms of each row of numbers.
_MLP = re.compile(r"(^(mlp|ffn|feed_forward)s?|(MLP|Mlp|FFN|FeedForward)(Block)?)$")
_EXPERTS = re.compile(r"experts|moe($|Block|Layer)", re.IGNORECASE)
_NORM = re.compile(r"(?<!MultiHead)(RMS|Layer|L2)Norm(1P|Gated)?$")

#: The attribute of a module that holds its `_SlicedForward`.
_SLICES = "_ring_dilated_slices"


def sliced_layers(model: Model, tokens_at_once: int | None = 32768) -> Model:
    """Makes the norms and MLPs of a model compute a slice of the tokens at a time, with the results of whole rows.

    Backward of an MLP with a gate holds 6 numbers of its inner width for each token of one slice (3 without a gate), and no
    longer for all tokens: 5.3 GiB for 32768 tokens of Llama 3.1 8B in bfloat16. Backward of an RMSNorm holds 24 bytes for each
    number of a slice in float32; a sliced norm saves only its input. Each slice is a non-reentrant checkpoint in one graph. So
    a parameter gets one gradient, and backward runs norms and MLPs once more, also inside the checkpoint of a layer. The idea
    is DeepSpeed's (TiledMLP of ALST, arXiv 2506.13996).

    Gradients of slices are added in the dtype of the weights, and dropout draws a mask for each slice. ZeRO-3 gathers the
    weights of an MLP together (as a leaf module), so that ranks may have different numbers of slices. Modules with experts
    compute whole rows, because routers may depend on all tokens; a warning names the first.

    Args:
        model: a model of Transformers with MLPs, or a wrapper of one; with ZeRO-3, before `deepspeed.initialize`.
        tokens_at_once: the most tokens in a slice of [B, n, width], in all B rows together. Fewer tokens are computed as
            before, without a checkpoint. A second call changes the number, and None undoes the first.

    Returns:
        The model. Its copies compute in slices too, and its weights are saved as before.

    Raises:
        ValueError: no Transformers model; or in a call, modules with inputs or outputs other than [B, n, width].
        NotImplementedError: a model without modules that are MLPs or experts; or in a call, an MLP with modules that FSDP or
            ZeRO-3 gathers alone, for which ranks with more slices would wait in vain.

    Example:
        >>> model, ids = tiny_llama(), torch.arange(1, 33)[None]
        >>> whole = model(ids).logits
        >>> torch.allclose(ra.sliced_layers(model, 10)(ids).logits, whole, atol=1e-5)  # slices of 10, 10, 10 and 2 tokens
        True
    """
    if tokens_at_once is not None:
        check_count("sliced_layers", "tokens_at_once", tokens_at_once)
    _, experts = slice_modules(inner_model(model, "sliced_layers"), tokens_at_once)
    if experts:
        path, name = next(iter(experts.items()))
        warn_once(
            f"sliced_layers: {path} ({name}) sends tokens to experts, which may depend on all tokens: experts compute whole "
            f"rows, norms and dense MLPs slices"
        )
    return model


def slice_modules(model: PreTrainedModel, tokens_at_once: int | None) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Does what `sliced_layers` says; returns these modules, and the classes of modules with experts, by their paths."""
    found, experts = _modules_of(model)
    for path, module in found.items():
        _check_gathered_together(path, module)
    for module in model.modules():  # Since the last call, a module or a function may have been put around it.
        slices: _SlicedForward | None = vars(module).get(_SLICES)
        if slices is not None:
            slices.tokens = tokens_at_once
            if tokens_at_once is None:
                slices.undo()
    for module in found.values() if tokens_at_once is not None else ():
        gather_as_one(module)
        if not any(_SLICES in vars(x) for x in module.modules()):
            module.forward = _SlicedForward(module, vars(module).get("forward"), tokens_at_once)
            setattr(module, _SLICES, module.forward)
    return found, experts


def _modules_of(model: PreTrainedModel) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Returns the MLPs and norms of a model's decoder by their paths, and the classes of modules with experts.

    A norm has no modules inside, and at most one weight for each number of a row: its rows are independent.
    """
    mlps: dict[str, nn.Module] = {}
    norms: dict[str, nn.Module] = {}
    experts: dict[str, str] = {}

    def inside(path: str, of: Iterable[str]) -> bool:
        return path.startswith(tuple(f"{outer}." for outer in of))

    # A head is left out: the loss computes it in slices, and one of its norms by itself would form all logits.
    of_tokens = {*runner_of(model).modules()}
    for path, module in decoder_of(model).named_modules():
        if module not in of_tokens or isinstance(module, (nn.ModuleList, FullyShardedDataParallel)):
            continue
        if any(word in path for word in SENSES):
            continue
        # The name of a module in a list, or in FSDP's wrapper, is the name of the list or wrapper.
        outer = re.sub(r"(\.(\d+|_fsdp_wrapped_module))+$", "", path)
        names = class_of_transformers(module).__name__, outer.rpartition(".")[2]
        if _NORM.search(names[0]) and not [*module.children()]:
            if not inside(path, (*mlps, *experts)) and all(x.dim() < 2 for x in module.parameters()):
                norms[path] = module
        elif any(map(_EXPERTS.search, names)):
            experts[path] = names[0]
            mlps = {other: mlp for other, mlp in mlps.items() if not inside(path, [other])}
        elif any(map(_MLP.search, names)) and not inside(path, (*mlps, *experts)):
            mlps[path] = module
    if not mlps and not experts:
        raise NotImplementedError(
            f"sliced_layers: {type(model).__name__} has no module named mlp, ffn or feed_forward: use checkpointing and a "
            f"larger ring"
        )
    return mlps | norms, experts


def _check_gathered_together(mlp: str, module: nn.Module) -> None:
    """Refuses an MLP with modules whose weights FSDP or ZeRO-3 gathers in each of their calls; ZeRO-3 numbers such modules."""
    for path, inner in module.named_modules():
        if inner is not module and (
            isinstance(inner, (FSDPModule, FullyShardedDataParallel)) or hasattr(inner, "ds_id")
        ):
            raise NotImplementedError(
                f"sliced_layers: each slice would gather the weights of {path}: shard {mlp} or its layer as one, or call "
                f"sliced_layers before deepspeed.initialize"
            )


class _SlicedForward:
    """The forward of a module in slices of `tokens` tokens, None for whole rows, by its `own`, None for that of its class."""

    def __init__(self, module: nn.Module, own: Callable[..., Tensor] | None, tokens: int | None) -> None:
        self.module, self.own, self.tokens = module, own, tokens

    def undo(self) -> None:
        """Takes itself off the module, unless another function has been put around it since."""
        if vars(self.module).get("forward") is self:
            del self.module.forward
            delattr(self.module, _SLICES)
            if self.own is not None:
                self.module.forward = self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        own = partial(type(self.module).forward, self.module) if self.own is None else self.own
        if self.tokens is None:
            return own(*args, **kwargs)
        name, values = class_of_transformers(self.module).__name__, (*args, *kwargs.values())
        _check_gathered_together(name, self.module)  # also for a single slice: all ranks refuse together
        shapes = {x.shape[:-1] for x in values if isinstance(x, Tensor)}
        if len(shapes) != 1 or () in shapes:
            raise ValueError(
                f"sliced_layers: expected inputs of one shape x width, got {sorted(map(tuple, shapes))} for {name}"
            )
        (shape,), positional, keywords = shapes, len(args), tuple(kwargs)

        def compute(*values: Any) -> Tensor:  # A checkpoint keeps the variables that are used here: no tensors.
            values = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in values)  # Some MLPs view them anew.
            out = own(*values[:positional], **dict(zip(keywords, values[positional:])))
            tokens = next(x.shape[:-1] for x in values if isinstance(x, Tensor))
            if not isinstance(out, Tensor) or out.shape[:-1] != tokens:
                got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(f"sliced_layers: expected a tensor of {tuple(tokens)} x width from {name}, got {got}")
            return out

        # Norms of heads get [B, n, H, D] or [B, H, n, D]: rows that are cut are longer than these have heads.
        batch, dim = (shape[0], max(range(1, len(shape)), key=lambda x: shape[x])) if len(shape) > 1 else (1, 0)
        length = max(1, self.tokens // max(1, batch))
        if length >= shape[dim]:
            return compute(*values)
        run = partial(checkpoint, compute, use_reentrant=False) if torch.is_grad_enabled() else compute
        slices = zip(*(x.split(length, dim) if isinstance(x, Tensor) else repeat(x) for x in values))
        with _without_cached_casts(next(x.device.type for x in values if isinstance(x, Tensor))):
            return torch.cat([run(*of_slice) for of_slice in slices], dim)


def _without_cached_casts(device: str) -> AbstractContextManager[Any]:
    """Returns autocast as it is, without its cache: slices would share a cast of a weight, and add gradients in its dtype."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    dtype, on = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype, on, cache_enabled=False)
