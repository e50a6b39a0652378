"""Finds modules and hooks inside a decoder that look at other tokens or at a token's place; over a ring they see a rank's part.

A few tokens pass through the decoder, each a document of its own, and each layer computes them a second time at other places,
beside other tokens. Attention is left out. So a token's numbers must be the same both times.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...compute.private import code_of, divides_weights, forward_hooks, tree_leaves, tree_map
from ...ring.planned import refusals_of_all
from ...ring.ring import ring_alone
from ..forward_pass import ForwardPass, WholeRows, running_with
from ..model.wrappers import attachment_of, evaluating, takes, tokens_in

#: An odd number, which is rarely that of heads, experts or channels.
_TOKENS = 17
#: Which token stands at each place the second time: other tokens, in another order, and not the last one.
_ORDER = [3 * (place % 5) for place in reversed(range(_TOKENS))]
#: Relative differences that rounding and quantized weights explain, in dtypes of 4 bytes or more, and of fewer.
_TIGHT, _LOOSE = 1e-3, 0.05


def check_tokens_apart(now: ForwardPass, kwargs: Mapping[str, Any]) -> None:
    """Refuses a decoder in which a module or a hook depends on other tokens, in the first call over a ring.

    It looks again once there are other modules, hooks or active adapters. While a model trains, also in calls 2, 4, 8, ...:
    weights that begin as zeros hide what a module does.

    Args:
        kwargs: the arguments of the decoder, for whole rows or for this rank's part.
    """
    runner, attachment = now.runner, attachment_of(now.runner)
    hooks = forward_hooks(runner)
    offsets = [path for path, hook in hooks if isinstance(hook, partial) and "alora_offsets" in hook.keywords]
    attachment.trained += runner.training
    inside = hash((attachment.trained.bit_length(), *_fingerprint(runner, hooks)))
    if inside == attachment.inside and not offsets:
        return
    with refusals_of_all(now.ring):
        found = [f"{path} counts tokens from the end of the row (activated LoRA)" for path in offsets]
        found = found or _looking_at_tokens(now, kwargs)
        if found:
            raise NotImplementedError(
                f"{type(runner).__name__}: {found[0]}, and a rank has only a part of it: remove it, or use one process "
                f"(ring=None)"
            )
    attachment.inside = inside


def _fingerprint(runner: nn.Module, hooks: list[tuple[str, Any]]) -> list[Any]:
    """Returns what decides the computation inside a decoder: its modules, hooks and active adapters.

    Ranks that divide weights compute together. They must agree without asking, and some hooks are of one rank only.
    """
    modules = [*runner.modules()]
    of_peft: list[Any] = [module for module in modules if hasattr(type(module), "active_adapter")]
    functions = [hook.func if isinstance(hook, partial) else hook for _, hook in hooks]
    if any(divides_weights(hook) for hook in functions):
        functions = []
    return [
        *map(id, modules),
        *(str((module.active_adapter, module.disable_adapters)) for module in of_peft),
        *(code_of(function) or id(type(function)) for function in functions),
    ]


def _is_of_peft(module: nn.Module) -> bool:
    return hasattr(type(module), "active_adapter")


def _looking_at_tokens(now: ForwardPass, kwargs: Mapping[str, Any]) -> list[str]:
    """Returns the paths of the modules whose output for a token depends on other tokens or on its place, with a reason."""
    runner, tokens = now.runner, tokens_in(kwargs)
    assert tokens is not None
    documents = (tuple((place, place + 1) for place in range(_TOKENS)),) * len(tokens)
    rows = WholeRows(len(tokens), _TOKENS, documents, from_collator=True)
    alone: dict[str, Any] = {
        "ring": ring_alone(now.ring.kernel),
        "whole": True,
        "kept": None,
        "decoder": runner,
    }
    apart = replace(now, rows=rows, probes=True, join_last=None, origin=None, tokens=[], outer=now, **alone)
    watch = _Comparison(len(tokens))
    positions = None if now.rows is None else now.rows.positions
    last = 0 if positions is None else int(positions.max())
    with ExitStack() as stack:
        devices = [tokens.device] if tokens.is_cuda else []
        for context in (torch.no_grad(), torch.random.fork_rng(devices), evaluating(runner)):
            stack.enter_context(context)
        stack.enter_context(running_with(forward_pass=apart))
        for path, module in _layers_of(runner):
            stack.enter_context(watch.on(path, module))
        try:
            runner.forward(**_few_tokens(runner, kwargs, tokens, last))
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            *_, (raising, _) = traceback.walk_tb(error.__traceback__)
            ours = str(raising.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]
            if ours and isinstance(error, (NotImplementedError, ValueError)):  # It names its remedy.
                raise
            return [f"a module or a hook cannot compute {_TOKENS} tokens of the row ({error})"]
    return [f"{path} or a hook on it looks at the tokens of the row" for path in watch.found]


def _few_tokens(runner: Any, kwargs: Mapping[str, Any], tokens: Tensor, position: int) -> dict[str, Any]:
    """Returns the arguments of a decoder for a few random tokens, all at the greatest position of the rows."""
    places = torch.arange(_TOKENS, device=tokens.device) % tokens.shape[1]
    of_tokens = {name: x for name, x in kwargs.items() if isinstance(x, Tensor) and x.shape[:2] == tokens.shape[:2]}
    few: dict[str, Any] = {
        name: x for name, x in kwargs.items() if isinstance(x, (bool, int, str)) and not name.startswith("output_")
    }
    few |= {name: x.detach()[:, places] for name, x in of_tokens.items() if name != "attention_mask"}
    generator = torch.Generator().manual_seed(0)
    for name in {"input_ids", "inputs_embeds"} & few.keys():
        x = few[name]
        drawn = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x.device)
        if name == "inputs_embeds" and hasattr(runner, "reverse_embedding"):  # It reads them back as ids.
            words = runner.get_input_embeddings()
            few[name] = words((drawn[..., 0].sigmoid() * words.num_embeddings).long()).to(x.dtype)
            continue
        few[name] = (drawn * x.std() if x.is_floating_point() else drawn.sigmoid() * x.max()).to(x.dtype)
    axes = getattr(kwargs.get("position_ids"), "shape", tokens.shape)[:-1]
    few["position_ids"] = torch.full((*axes, _TOKENS), position, device=tokens.device)
    return few | ({"use_cache": False} if takes(runner, "use_cache") else {})


def _layers_of(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers of a decoder, and the modules beside them, with their paths."""
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if isinstance(module, nn.ModuleList) or not any(isinstance(x, nn.ModuleList) for x in child.modules()):
            yield inner, child
        else:
            yield from _layers_of(child, inner)


@dataclass
class _Comparison:
    """Calls each watched part a second time, with its tokens at other places, and compares all modules inside."""

    batch: int
    found: list[str] = field(default_factory=list)  # the paths of modules that depend on other tokens

    @contextmanager
    def on(self, path: str, part: nn.Module) -> Iterator[None]:
        """Watches the calls of a part of the decoder, a module that is called once."""
        runs: list[dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]] = []
        arguments: Any = None

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal arguments
            arguments = arguments or self._changed((args, kwargs), Tensor.clone)
            runs.append({})

        def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if len(runs) > 2:  # Its second call was compared already.
                return
            number = sum(name == other for other, _ in runs[-1])
            runs[-1][name, number] = self._of_tokens((args, kwargs)), self._of_tokens(output)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if len(runs) == 1:
                args, kwargs = self._changed(arguments, _moved)
                module(*args, **kwargs)
                self._compare(path, *runs)
                for run in runs:
                    run.clear()

        handles = [part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)]
        adapted = tuple(f"{name}." for name, module in part.named_modules() if _is_of_peft(module))
        for name, module in part.named_modules():
            if not name.startswith(adapted):  # Some adapters warn of hooks on the layer that they adapt.
                of_path = partial(record, f"{path}.{name}".rstrip("."))
                handles.append(module.register_forward_hook(of_path, with_kwargs=True))
        handles.append(part.register_forward_hook(after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _compare(self, path: str, first: Mapping[Any, Any], second: Mapping[Any, Any]) -> None:
        """Notes the first module whose inputs agree and whose outputs differ; those of the part itself agree."""
        for call, (given, output) in first.items():
            other_given, other_output = second.get(call, ([], []))
            if (call[0] == path or _agree(given, other_given)) and not _agree(output, other_output):
                self.found.append(call[0])
                return

    def _is_of_tokens(self, x: Any) -> bool:
        return isinstance(x, Tensor) and tuple(x.shape[:2]) == (self.batch, _TOKENS)

    def _of_tokens(self, values: Any) -> list[Tensor]:
        return [x.clone() for x in tree_leaves(values) if self._is_of_tokens(x)]

    def _changed(self, values: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return tree_map(lambda x: change(x) if self._is_of_tokens(x) else x, values)


def _moved(x: Tensor) -> Tensor:
    return torch.cat([x[:, place : place + 1] for place in _ORDER], 1)  # also of divided tensors


def _agree(first: list[Tensor], second: list[Tensor]) -> bool:
    """Returns whether tokens have the same numbers after they were moved, up to rounding."""
    return len(first) != len(second) or not any(_differ(_moved(x), y) for x, y in zip(first, second))


def _differ(x: Tensor, y: Tensor) -> bool:
    if not x.is_floating_point() or x.shape != y.shape:
        return False
    bound = _TIGHT if x.element_size() >= 4 else _LOOSE
    lengths, apart = (z.flatten(2).float().norm(dim=2) for z in (x, x - y))
    return bool((apart > bound * (lengths + lengths.mean())).any())
