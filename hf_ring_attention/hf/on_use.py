"""Hidden states and logits of whole rows that are formed when they are used.

A rank of a ring has a part of the last hidden states, and logits are often the largest tensor of all. So the decoder of a call
with labels returns an `OnUse`. A function of each token computes with this rank's part. The output layer is not called: its
logits are an `OnUse` too, which remembers the layer and the functions that the model applies behind it. Their `cross_entropy`
is a sum over tokens, so `lm_loss.py` computes it in slices. Every other use forms the whole tensor, on all ranks together.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..compute.private import (
    BASE,
    divides_weights,
    plain_tensors,
    saved_tensor_hooks,
    tree_leaves,
    tree_map,
    version_of,
    without_numbers,
)
from .lm_loss import IGNORED, check_once, sum_in_slices
from .values import Origin, Values, autocast_of

#: Functions of each number, whatever its token.
_OF_NUMBERS = frozenset(
    "abs add bfloat16 clamp clip clone contiguous detach div divide double exp float half masked_fill mul multiply neg "
    "negative pow relu sigmoid square sub subtract tanh to true_divide type __rdiv__ __rsub__ __rpow__".split()
)
#: Functions of the hidden states of each token, with weights as further arguments.
_OF_TOKENS = frozenset("linear layer_norm rms_norm gelu silu mish softplus leaky_relu".split())
#: Functions that choose tokens, or arrange them in another way.
_OF_PLACES = frozenset("__getitem__ flatten reshape view".split())
_X: Any = Tensor
#: Questions that need no numbers.
_FACTS = {
    *(x.__get__ for x in (_X.shape, _X.dtype, _X.device, _X.ndim, _X.requires_grad, _X.layout, _X.grad_fn, _X.is_leaf)),
    *(x.__get__ for x in (_X.is_cuda, _X.is_cpu, _X.is_sparse, _X.is_quantized, _X.is_meta, _X.is_nested, BASE)),
    *(_X.size, _X.dim, _X.ndimension, _X.numel, _X.nelement, _X.element_size, _X.is_floating_point, _X.is_complex),
    *(_X.get_device, _X.is_contiguous, _X.is_inference, _X.__len__, _X.requires_grad.__set__, _X.requires_grad_),
}
#: Functions that watch or share the numbers of a tensor: whatever follows must go through it.
_WATCHERS = {_X.data.__get__, _X.register_hook, _X.retain_grad, _X.numpy, _X.__array__, _X.data_ptr, _X.untyped_storage}
#: Functions that ask for the gradient of a tensor.
_OF_GRADIENTS = {_X.register_hook, _X.retain_grad}
#: Operators whose result is a tensor with the same numbers.
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)


def _no_base() -> None:
    """The base of tensors with memory of their own."""


class OnUse(Tensor):
    """A tensor of whole rows, which is formed when it is used; all ranks use it together."""

    content: Values
    numbers: Tensor  # the number of each token among those of all rows, in the shape of this tensor without its last dimension
    base: Callable[[], OnUse | None]  # the tensor whose memory this one shares
    of_base: Callable[[Tensor], Tensor]  # makes this tensor of its base
    others: list[weakref.ref[OnUse]]  # the tensors whose base this one is
    formed: Tensor | None
    version: int  # of `formed`, before anybody wrote into it
    history: Any  # the node of autograd that made `formed`, when this tensor got its history
    used: bool  # whether something is computed from it, and not from what is formed

    @staticmethod
    def of_hidden(part: Tensor, origin: Origin) -> OnUse:
        """Returns the hidden states of whole rows, from this rank's part [B, n local, width]."""
        batch, length = part.shape[:2] if origin.rows is None else (origin.rows.batch, origin.rows.length)
        numbers, sample = torch.arange(batch * length, device=part.device), part.detach().flatten(0, 1)[:0]
        numbers, recorded = numbers.view(batch, length), torch.is_grad_enabled()
        return OnUse.of(
            Values(origin, part, numbers, None, (), sample, recorded, autocast_of(part), (version_of(part),)), numbers
        )

    @staticmethod
    def of(values: Values, numbers: Tensor, base: Any = _no_base, of_base: Any = None) -> OnUse:
        """Returns the values of the tokens with these numbers."""
        inputs = (values.part, *values.weights, *values.scales)
        made = _bare(values, numbers, base, of_base)
        if values.recorded and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            made = _Connected.apply(values, numbers, base, of_base, *inputs)
        if base() is not None:
            base().others.append(weakref.ref(made))
        return made

    def form(self) -> Tensor:
        """Returns an ordinary tensor, with its gradients; it is formed once."""
        if self.formed is None:
            values, base = self.content, self.base()
            values.warn()
            plain = saved_tensors_hooks(lambda x: x, lambda x: x)
            kept = contextlib.nullcontext() if saved_tensor_hooks() is None else plain
            # A function that is checkpointed finds it formed when it runs again.
            with kept, torch.inference_mode(values.part.is_inference()), torch.set_grad_enabled(values.recorded):
                self.formed = values.of_tokens(values.part, self.numbers) if base is None else self.of_base(base.form())
            if base is None and BASE.__get__(self.formed) is not None:
                self.formed = self.formed.clone()  # Hooks of views see other gradients, once something is written.
            self.version, self.history = version_of(self.formed), self.formed.grad_fn
            for hook in values.hooks if self.formed.requires_grad else ():
                self.formed.register_hook(hook)
            for other in [other() for other in self.others]:
                if other is not None:
                    other.form()
        return self.formed

    def to_read(self) -> Tensor:
        """Returns an ordinary tensor that nobody writes into; over a ring, only its tokens travel if nothing is formed yet."""
        base = self.base()
        if base is None or base.formed is not None or self.formed is not None or not self.is_current:
            return self.form()
        with torch.set_grad_enabled(self.content.recorded and torch.is_grad_enabled()):
            return self.content.of_tokens(self.content.part, self.numbers)

    @property
    def is_current(self) -> bool:
        """Whether to go on from this rank's hidden states: nothing was written into what was formed, nor is it logits."""
        base, formed = self.base(), self.formed
        same = formed is None or (self.content.head is None and version_of(formed) == self.version)
        return same and (base is None or base.is_current)

    def follow(self, watched: bool) -> None:
        """Gives this tensor the history of what was formed, and was written, for functions that torch does not announce."""
        whole = self.base() is None or self.content.recorded  # and no view that was made without gradients
        if self.formed is not None and whole and (watched or self.formed.grad_fn is not self.history):
            if not torch.is_grad_enabled():
                raise NotImplementedError("a view of hidden states or logits was written: write into a clone of it")
            self.history, self.version = self.formed.grad_fn, -1
            if self.formed.requires_grad:
                _Followed.apply(self, self.formed)
        for other in [other() for other in self.others]:
            if other is not None:
                other.follow(watched)

    def hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Registers a hook of FSDP, which marks the beginning of backward."""
        self.content.hooks.append(hook)
        if self.formed is not None and self.formed.requires_grad:
            self.formed.register_hook(hook)
        with plain_tensors():
            return self.register_hook(hook)

    def use(self, result: Any) -> None:
        """Notes that a result does not depend on what is formed of this tensor."""
        x: OnUse | None = None if isinstance(result, OnUse) and (result is self or result.base() is self) else self
        while x is not None:
            x.used, x = True, x.base()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"OnUse({[*self.shape]}, formed when it is used)"

    @classmethod
    @torch.compiler.disable(reason="it asks what was formed")
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with plain_tensors():
                return func(*args, **kwargs)
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, OnUse)]
        if any(map(is_wrapped, found)):
            with plain_tensors():
                return func(*args, **kwargs)
        if func is Tensor.register_hook and divides_weights(args[1]):
            return found[0].hook(args[1])
        if len(found) == 1 and found[0].is_current:
            result = _not_formed(found[0], func, args, kwargs)
            if result is not None:
                found[0].use(result)
                return result
        asked = args[1] if func is torch.autograd.grad else args[:1] if func in _OF_GRADIENTS else ()
        if any(isinstance(x, OnUse) and x.used for x in tree_leaves(asked)):
            raise NotImplementedError(
                "the gradient of hidden states or logits of a call with labels was asked for after their use: call "
                "retain_grad() before it"
            )
        result = func(*tree_map(_formed, args), **tree_map(_formed, kwargs))
        for x in found:
            while (base := x.base()) is not None:
                x = base
            x.follow(func in _WATCHERS and torch.is_grad_enabled())
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes with numbers only, for functions that torch does not announce above: `_Connected` has their gradients."""
        x, *others = args
        if func in _ALIASES and isinstance(x, OnUse) and others in ([], [[*x.shape]]):
            return _bare(x.content, x.numbers, lambda: x, Tensor.detach)
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs or {}))


def _bare(values: Values, numbers: Tensor, base: Any = _no_base, of_base: Any = None) -> OnUse:
    """Returns an `OnUse` without gradients."""
    sample = values.sample
    made: OnUse = without_numbers(OnUse, (*numbers.shape, sample.shape[-1]), dtype=sample.dtype, device=sample.device)
    made.content, made.numbers, made.base, made.of_base = values, numbers, base, of_base
    made.others, made.formed, made.version, made.history, made.used = [], None, 0, None, False
    return made


def _computed(x: Any) -> Any:
    """Returns the numbers of an `OnUse`; a result of autograd's functions keeps them, since others may write into them."""
    if not isinstance(x, OnUse):
        return x
    if x.formed is not None:
        with torch.no_grad():
            x.follow(False)
        return x.formed.detach()
    values, base = x.content, x.base()
    values.warn()
    numbers = values.of_tokens(values.part, x.numbers).detach() if base is None else x.of_base(_computed(base))
    if is_wrapped(x):
        x.formed = numbers
    return numbers


def is_wrapped(x: OnUse) -> bool:
    """Returns whether autograd must go through a function that returned this tensor; one of FSDP 2 only marks a place."""
    with plain_tensors():
        known = ("_ConnectedBackward", "_FollowedBackward", "RegisterPostBackwardFunctionBackward")
        return x.requires_grad and type(x.grad_fn).__name__ not in known


def _formed(x: Any) -> Any:
    return x.form() if isinstance(x, OnUse) else x


class _Connected(torch.autograd.Function):
    """Gives an `OnUse` its place in autograd's graph, for functions that compute without `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, values: Values, numbers: Tensor, base: Any, of_base: Any, *inputs: Tensor) -> OnUse:
        ctx.values, ctx.numbers = values, numbers
        ctx.set_materialize_grads(False)
        return _bare(values, numbers, base, of_base)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # Its history is that of `_Followed`.
            return (None,) * len(ctx.needs_input_grad)
        check_once()
        values: Values = ctx.values
        part, *scales = (x.detach().requires_grad_(x.requires_grad) for x in (values.part, *values.scales))
        with torch.enable_grad():
            out = values.of_tokens(part, ctx.numbers, tuple(scales))
        inputs = [part, *values.weights, *scales]
        wanted = [x for x in inputs if x.requires_grad]
        gradients = iter(torch.autograd.grad(out, wanted, grad, materialize_grads=True))
        return None, None, None, None, *(next(gradients) if x.requires_grad else None for x in inputs)


class _Followed(torch.autograd.Function):
    """Gives an `OnUse` the history of an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, x: OnUse, formed: Tensor) -> OnUse:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


# ---- what does not form the tensor


def _not_formed(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a function whose argument need not be formed; None for others."""
    name, values = getattr(func, "__name__", ""), x.content
    if func is F.cross_entropy and args and args[0] is x:
        return _cross_entropy(x, *args[1:], **kwargs)
    place = next((place for place, arg in enumerate(args) if arg is x), None)
    if place is None or "out" in kwargs or kwargs.get("inplace") or any(arg is True for arg in args):
        return None
    if name in _OF_PLACES and place == 0:
        return _of_places(x, func, args[1:], kwargs)
    others = [o for o in tree_leaves((args, kwargs)) if isinstance(o, Tensor) and o is not x]
    of_numbers = name in _OF_NUMBERS and all(
        o.numel() in (1, x.shape[-1]) and o.numel() == o.shape[-1:].numel() and o.dim() <= x.dim() for o in others
    )
    if not of_numbers and not (values.head is None and name in _OF_TOKENS and place == 0):
        return None
    if values.head is not None and not values.recorded and any(o.requires_grad for o in others):
        return None
    # Others may write into their tensors, before this function is applied to logits.
    own = {id(o): o if values.head is None else o.clone() for o in others}
    before, after, kwargs = tree_map(lambda o: own.get(id(o), o), (args[:place], args[place + 1 :], kwargs))
    autocast = autocast_of(values.part)

    def step(x: Tensor, scales: Mapping[int, Tensor]) -> Tensor:
        put = partial(tree_map, lambda o: scales.get(id(o), o))
        with autocast():
            result: Tensor = func(*put(before), x, *put(after), **put(kwargs))
        return result

    try:
        sample = step(values.sample, {})
    except RuntimeError:  # It is no function of each token, or says itself what is wrong.
        return None
    if not isinstance(sample, Tensor) or sample.shape[:-1] != values.sample.shape[:-1]:
        return None
    if sample is values.sample and (name != "contiguous" or x.numbers.is_contiguous()):
        return x
    changed, numbers = replace(values, sample=sample.detach()), x.numbers.contiguous()
    if values.head is None:
        part = step(values.part, {})
        changed = replace(changed, part=part, recorded=torch.is_grad_enabled(), versions=(version_of(part),))
    else:
        scales = (*values.scales, *(o for o in own.values() if o.requires_grad))
        changed = replace(changed, steps=(*values.steps, step), scales=scales)
        if not torch.is_grad_enabled() or name == "detach":
            changed = changed.unrecorded()
    return OnUse.of(changed, numbers, *((weakref.ref(x), Tensor.detach) if name == "detach" else ()))


def _of_places(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OnUse | None:
    """Returns chosen tokens; None if the last dimension does not stay as it is, or a token may be chosen twice."""
    if func is Tensor.__getitem__:
        keys = args[0] if isinstance(args[0], tuple) else args
        if len(keys) == x.dim() or any(key is ... for key in keys):
            if not isinstance(keys[-1], slice) or keys[-1] != slice(None):
                return None
            keys = keys[:-1]
        try:
            numbers = x.numbers[keys]
        except IndexError:  # The function itself says what is wrong.
            return None
    else:
        if any(isinstance(arg, torch.dtype) for arg in args):
            return None
        try:
            # A last dimension without strides is still one if the function leaves it as it is.
            shown = func(x.numbers.to("meta")[..., None].expand(x.shape), *args, **kwargs)
        except RuntimeError:  # The function itself says what is wrong.
            return None
        if shown.dim() < 2 or shown.shape[-1] != x.shape[-1] or shown.stride(-1) != 0:
            return None
        numbers = x.numbers.reshape(shown.shape[:-1])
    values = x.content
    copied = numbers.untyped_storage().data_ptr() != x.numbers.untyped_storage().data_ptr()
    if copied and len(numbers.unique()) != numbers.numel():
        return None
    if not (copied or numbers.shape != x.numbers.shape or (x.requires_grad and not torch.is_grad_enabled())):
        return x  # Models without logits_to_keep keep all.
    if not torch.is_grad_enabled():
        values = values.unrecorded()
    if copied:
        return OnUse.of(values, numbers)

    def view(values: Tensor) -> Tensor:
        result: Tensor = func(values, *args, **kwargs)
        return result

    return OnUse.of(values, numbers, lambda: x, view)


def _cross_entropy(
    x: OnUse,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Returns a cross entropy of logits [m, vocabulary] and labels [m], in slices; None for others."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not plain or x.dim() != 2 or target.shape != x.shape[:1] or target.is_floating_point():
        return None
    values = x.content
    labels = target.new_full((values.numbers.numel(),), ignore_index)
    labels[x.numbers.to(target.device)] = target
    total = sum_in_slices(values, labels.view(values.numbers.shape), ignore_index, label_smoothing)
    for hook in values.hooks if total.requires_grad else ():
        total.register_hook(hook)
    total = total.to(x.device, x.dtype)
    return total if reduction == "sum" else total / (target != ignore_index).sum().to(total.device)


def values_of(x: Tensor) -> Values | None:
    """Returns what logits [B, n, vocabulary] of whole rows are made of; None if they were formed."""
    return x.content if isinstance(x, OnUse) and x.numbers is x.content.numbers and x.is_current else None
