"""Hidden states and logits of whole rows that are formed when they are used.

A rank of a ring has a part of the last hidden states, and logits are often the largest tensor of all. So the decoder of a call
with labels returns an `OnUse`. A function of each token computes with this rank's part. The output layer is not called: its
logits are an `OnUse` too, which remembers the layer and the functions that the model applies behind it. Their `cross_entropy`
is a sum over tokens, so `lm_loss.py` computes it in slices. Every other use forms the whole tensor, on all ranks together.

To autograd, an `OnUse` is an ordinary tensor, with views, writes and hooks as torch has them; only its numbers come later.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import is_, itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...compute.private import (
    BASE,
    divides_weights,
    plain_tensors,
    preserved_version,
    saved_tensor_hooks,
    tree_leaves,
    tree_map,
    version_of,
    without_numbers,
)
from .lm_loss import WithGradients, sum_in_slices
from .values import Leaves, Origin, Values, autocast_of

#: Functions of each number, whatever its token.
_OF_NUMBERS = (
    "abs add bfloat16 clamp clip clone contiguous div divide double exp float half masked_fill mul multiply neg "
    "negative pow relu sigmoid square sub subtract tanh to true_divide type __rdiv__ __rsub__ __rpow__".split()
)
#: Functions of the hidden states of each token, with weights as further arguments.
_OF_TOKENS = "linear layer_norm rms_norm gelu silu mish softplus leaky_relu".split()
#: Functions that choose tokens, or arrange them in another way.
_OF_PLACES = "__getitem__ flatten reshape view".split()
_X: Any = Tensor
#: Questions that need no numbers.
_FACTS = {
    *(x.__get__ for x in (_X.shape, _X.dtype, _X.device, _X.ndim, _X.requires_grad, _X.layout, _X.grad_fn, _X.is_leaf)),
    *(x.__get__ for x in (_X.is_cuda, _X.is_cpu, _X.is_sparse, _X.is_quantized, _X.is_meta, _X.is_nested, BASE)),
    *(_X.size, _X.dim, _X.ndimension, _X.numel, _X.nelement, _X.element_size, _X.is_floating_point, _X.is_complex),
    *(_X.get_device, _X.is_contiguous, _X.is_inference, _X.__len__, _X.requires_grad.__set__, _X.requires_grad_),
    _X.grad.__get__,
}
#: Functions that ask for the gradient of a tensor.
_OF_GRADIENTS = {_X.register_hook, _X.retain_grad, torch.autograd.grad}
#: Functions that watch or share the numbers of a tensor: all that follows must go through it.
_WATCHERS = {*_OF_GRADIENTS, _X.data.__get__, _X.numpy, _X.__array__, _X.data_ptr, _X.untyped_storage}
_ATEN = torch.ops.aten
#: Operators that show the same numbers in another way.
_VIEWS = {_ATEN.view.default, _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.unsqueeze.default}
_OF_CROSS_ENTROPY = itemgetter(
    "target", "ignore_index", "label_smoothing", "reduction", "weight", "size_average", "reduce"
)
#: Stands for the tensor itself among the arguments of a function.
_ITSELF = object()
#: The answer of a rule that a function needs the whole tensor.
_FORM: Any = object()


@dataclass(eq=False)
class Memory:
    """The memory that an `OnUse` shares with its views."""

    numbers: Tensor  # of its tokens, among those of all rows
    owner: Callable[[], OnUse | None] = lambda: None  # the tensor itself, and not a view; None if it is gone
    formed: Tensor | None = None  # without gradients: autograd goes through the `OnUse`
    watched: bool = False  # whether others see all uses of it, or may write into it unseen
    used: bool = False  # whether something is computed from it, and not from what is formed


class OnUse(Tensor):
    """A tensor of whole rows, which is formed when it is used; all ranks use it together."""

    content: Values
    numbers: Tensor  # the number of each token among those of all rows, in the shape of this tensor without its last dimension
    memory: Memory
    shown: Callable[[Tensor], Tensor]  # makes this tensor of its memory
    node: Any  # the node of autograd that this module made it with

    @staticmethod
    def of_hidden(part: Tensor, origin: Origin) -> OnUse:
        """Returns the hidden states of whole rows, from this rank's part [B, n local, width]."""
        batch, length = part.shape[:2] if origin.rows is None else (origin.rows.batch, origin.rows.length)
        numbers = torch.arange(batch * length, device=part.device).view(batch, length)
        sample = part.detach().flatten(0, 1)[:0]
        return OnUse.of(Values(origin, part, numbers, sample, autocast_of(part), version_of(part)), numbers)

    @staticmethod
    def of(values: Values, numbers: Tensor) -> OnUse:
        """Returns the values of the tokens with these numbers."""
        values, numbers = values if torch.is_grad_enabled() else values.unrecorded(), numbers.contiguous()
        if inputs := values.inputs:
            # For functions that compute without `__torch_function__`.
            make, of_grad = partial(_bare, values, numbers), partial(values.of_gradient, inputs, numbers)
            made: OnUse = WithGradients.apply(make, of_grad, (), *inputs)
        else:
            made = _bare(values, numbers)
        made.memory.owner, made.node = weakref.ref(made), made.grad_fn
        return made

    @property
    def deferred(self) -> Values:
        """The values of its tokens, with gradients only if it has them."""
        return self.content if not self.content.inputs or self.grad_fn is not None else self.content.unrecorded()

    @property
    def is_ours(self) -> bool:
        """Whether autograd needs no function that returned this tensor; a function of FSDP 2 only marks a place."""
        node = self.grad_fn
        if node is None:  # A view that was made without gradients seems to require them.
            return not self.requires_grad or BASE.__get__(self) is not None
        return node is self.node or type(node).__name__ == "RegisterPostBackwardFunctionBackward"

    @property
    def is_current(self) -> bool:
        """Whether to go on from this rank's hidden states: nobody wrote or watches, nor is it formed logits."""
        memory = self.memory
        with plain_tensors():
            same = not memory.watched and version_of(self) == 0 and self.is_ours
        return same and (memory.formed is None or self.content.head is None)

    def form(self) -> Tensor:
        """Returns an ordinary tensor with the same memory, to autograd a view of this one."""
        owner = self.memory.owner()
        if owner is not None and self.memory.formed is None and owner.is_ours:
            owner.form_memory()
        with torch.inference_mode(self.is_inference()), torch.enable_grad(), plain_tensors():
            # The history of a view may be from before its owner was formed.
            late = bool(self.deferred.inputs) and self.grad_fn is self.node and not self.memory.watched
            base = owner if owner is not None and late else self
            result: Tensor = _ATEN.alias.default(base)
            return result if base is self else self.shown(result)

    def form_memory(self) -> None:
        """Forms the numbers of this tensor, which is no view, and gives it their history."""
        of_inference, plain = self.is_inference(), saved_tensors_hooks(lambda x: x, lambda x: x)
        # A function that is checkpointed finds it formed when it runs again.
        kept = contextlib.nullcontext() if saved_tensor_hooks() is None else plain
        with kept, torch.inference_mode(of_inference), torch.set_grad_enabled(self.requires_grad):
            formed = _in_new_memory(self.content, self.memory.numbers)
            # Whoever saved it for backward finds it unchanged.
            with plain_tensors(), contextlib.nullcontext() if of_inference else preserved_version(self):
                self.detach_().copy_(formed)
                self.node = self.grad_fn
                for hook in self.content.hooks if self.requires_grad else ():
                    self.register_hook(hook)

    def to_read(self) -> Tensor:
        """Returns an ordinary tensor that nobody writes into; over a ring, only its tokens travel if nothing is formed yet."""
        memory = self.memory
        if memory.formed is None and self.is_current and self.numbers.numel() < memory.numbers.numel():
            return self.deferred.of_tokens(self.deferred.part, self.numbers)
        return self.form()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"OnUse({[*self.shape]}, formed when it is used)"

    @classmethod
    @torch.compiler.disable(reason="it asks what was formed")
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        marks = func is Tensor.register_hook and divides_weights(args[1])
        if marks:  # It marks the beginning of backward, whatever is used.
            args[0].content.hooks.append(args[1])
        # Functions of autograd that return what they get, such as FSDP 2's, ask for a view of it by itself.
        if marks or func in _FACTS or (func is Tensor.view_as and args[1:] and args[0] is args[1]):
            with plain_tensors():
                return func(*args, **kwargs)
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, OnUse)]
        if len(found) == 1 and found[0].is_current:
            result = _by_rule(found[0], func, args, kwargs)
            if result is not _FORM:
                found[0].memory.used |= not (isinstance(result, OnUse) and result.memory is found[0].memory)
                return result
        call = tree_map(lambda o: o.form() if isinstance(o, OnUse) else o, (args, kwargs))
        for x in found if func in _WATCHERS else ():
            x.memory.watched = True
        if func not in _OF_GRADIENTS:
            return func(*call[0], **call[1])
        _check_gradient(args[1] if func is torch.autograd.grad else args[:1])
        with plain_tensors():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes with numbers, below autograd."""
        x, *others = args
        if func is _ATEN.detach.default:
            return _bare(x.content.unrecorded(), x.numbers, x.memory, x.shown)
        if func in _VIEWS:
            numbers = func(x.numbers[..., None].expand(x.shape), *others)
            if numbers.shape[-1:] == x.shape[-1:] and numbers.stride(-1) == 0:
                numbers = x.numbers if numbers.shape == x.shape else numbers[..., 0]
                shown = x.shown  # and not x, which may keep a graph
                return _bare(x.content, numbers, x.memory, lambda formed: func(shown(formed), *others))
        if func is _ATEN.copy_.default and isinstance(x, OnUse) and x.memory.formed is None:
            x.memory.formed = others[0].detach()
            return x
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs or {}))


def _check_gradient(asked: Any) -> None:
    """Refuses the gradients of tensors whose loss was computed in slices, which give them none."""
    if any(isinstance(x, OnUse) and x.memory.used and x.is_ours for x in tree_leaves(asked)):
        raise NotImplementedError(
            "the gradient of hidden states or logits was asked for, but their loss was computed in slices: call the model "
            "without labels, and compute the loss from its logits"
        )


def _bare(values: Values, numbers: Tensor, memory: Memory | None = None, shown: Any = lambda formed: formed) -> OnUse:
    """Returns an `OnUse` without gradients; it has new memory, or is a view."""
    width, sample = values.sample.shape[-1], values.sample
    strides, offset = [*map(width.__mul__, numbers.stride()), 1], width * numbers.storage_offset()
    shape = (*numbers.shape, width)
    made: OnUse = without_numbers(OnUse, shape, strides, offset, dtype=sample.dtype, device=sample.device)
    made.content, made.numbers, made.shown, made.node = values, numbers, shown, None
    made.memory = memory or Memory(numbers)
    return made


def _in_new_memory(values: Values, numbers: Tensor) -> Tensor:
    """Returns an ordinary tensor that anybody may write into: not a view, and not saved for backward."""
    values.warn()
    formed = values.of_tokens(values.part, numbers)
    saved = any(hasattr(formed.grad_fn, name) for name in ("_saved_result", "saved_tensors"))
    fresh = formed is not values.part and BASE.__get__(formed) is None and not saved
    return formed if fresh and formed.is_contiguous() else formed.clone(memory_format=torch.contiguous_format)


def _computed(x: Any) -> Any:
    """Returns the numbers of an `OnUse`, without gradients."""
    if not isinstance(x, OnUse):
        return x
    if x.memory.formed is None:
        with torch.inference_mode(x.is_inference()):
            x.memory.formed = _in_new_memory(x.content, x.memory.numbers).detach()
    return x.shown(x.memory.formed)


# ---- what does not form the tensor: rules of an `OnUse`, a function, and its arguments


def _by_rule(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a function whose argument need not be formed, else `_FORM`."""
    rule = _RULES.get(getattr(func, "__name__", ""))
    writes = "out" in kwargs or kwargs.get("inplace") or any(map(partial(is_, True), args))
    return _FORM if rule is None or writes else rule(x, func, args, kwargs)


def _detached(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with plain_tensors():
        return x.detach()


def _of_tokens(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a function of the hidden states of each token."""
    return _applied(x, func, args, kwargs) if x.deferred.head is None and args and args[0] is x else _FORM


def _of_numbers(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a function of each number, and of tensors that are the same for all tokens."""
    for o in _other_tensors(x, args, kwargs):
        same_for_all = o.numel() in (1, x.shape[-1]) and o.numel() == o.shape[-1:].numel() and o.dim() <= x.dim()
        if not same_for_all or (x.deferred.head is not None and not x.deferred.recorded and o.requires_grad):
            return _FORM
    return _applied(x, func, args, kwargs)


def _other_tensors(x: OnUse, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [o for o in tree_leaves((args, kwargs)) if isinstance(o, Tensor) and o is not x]


def _applied(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a function to this rank's hidden states, or remembers it as a step behind the output layer."""
    values = x.deferred
    # Others may write into their tensors, before this function is applied to logits.
    own = {id(o): o if values.head is None else o.clone() for o in _other_tensors(x, args, kwargs)}
    call = tree_map(lambda o: _ITSELF if o is x else own.get(id(o), o), (args, kwargs))
    autocast = autocast_of(values.part)

    def step(x: Tensor, leaves: Leaves) -> Tensor:
        args, kwargs = tree_map(lambda o: x if o is _ITSELF else leaves.get(id(o), o), call)
        with autocast():
            result: Tensor = func(*args, **kwargs)
        return result

    try:
        sample = step(values.sample, {})
    except RuntimeError:  # It is not a function of each token, or its error is right.
        return _FORM
    if not isinstance(sample, Tensor) or sample.shape[:-1] != values.sample.shape[:-1]:
        return _FORM
    if sample is values.sample and (func.__name__ != "contiguous" or x.numbers.is_contiguous()):
        return x
    changed = replace(values, sample=sample.detach())
    if values.head is None:
        part = step(values.part, {})
        return OnUse.of(replace(changed, part=part, recorded=True, version=version_of(part)), x.numbers)
    scales = (*values.scales, *(o for o in own.values() if o.requires_grad))
    return OnUse.of(replace(changed, steps=(*values.steps, step), scales=scales), x.numbers)


def _of_places(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Chooses tokens, if the last dimension stays as it is, and no token is chosen twice."""
    numbers = _numbers_at(x, func, args[1:], kwargs) if args and args[0] is x else None
    if numbers is None:
        return _FORM
    if numbers.untyped_storage().data_ptr() != x.numbers.untyped_storage().data_ptr():
        repeated = len(numbers.unique()) != numbers.numel()
        return _FORM if repeated else OnUse.of(x.deferred, numbers)
    if numbers.shape == x.numbers.shape:  # Models without logits_to_keep keep all.
        return x if torch.is_grad_enabled() or not x.requires_grad else x.detach()
    with plain_tensors():
        view: OnUse = func(*args, **kwargs)
        view.content, view.node = x.deferred, view.grad_fn
    return view


def _numbers_at(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the numbers of the tokens that a function chooses; None if it changes the last dimension."""
    keys = args[0] if args and isinstance(args[0], tuple) else args
    try:
        if func is not Tensor.__getitem__:
            # A last dimension without strides is still one if the function leaves it as it is.
            shown = func(x.numbers.to("meta")[..., None].expand(x.shape), *args, **kwargs)
            if shown.dim() < 2 or shown.shape[-1] != x.shape[-1] or shown.stride(-1) != 0:
                return None
            return x.numbers.reshape(shown.shape[:-1])
        if len(keys) <= x.numbers.dim() and not any(key is ... for key in keys):
            return x.numbers[keys]
        return x.numbers[keys[:-1]] if isinstance(keys[-1], slice) and keys[-1] == slice(None) else None
    except (RuntimeError, IndexError):  # The function itself raises its error.
        return None


def _cross_entropy(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a cross entropy of logits [m, vocabulary] and labels [m], computed in slices."""
    if func is not F.cross_entropy or not args or args[0] is not x:
        return _FORM
    call = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
    call.apply_defaults()
    target, ignored, smoothing, reduction, *others = _OF_CROSS_ENTROPY(call.arguments)
    values = x.deferred
    if others != [None] * 3 or reduction not in ("mean", "sum"):
        return _FORM
    if x.numbers.dim() != 1 or target.shape != x.numbers.shape or target.is_floating_point():
        return _FORM
    labels = target.new_full((values.numbers.numel(),), ignored)
    labels[x.numbers.to(target.device)] = target
    total = sum_in_slices(values, labels.view(values.numbers.shape), ignored, smoothing)
    for hook in values.hooks if total.requires_grad else ():
        total.register_hook(hook)
    total = total.to(values.sample)
    return total if reduction == "sum" else total / (target != ignored).sum().to(total.device)


#: The rules of functions by their names. Every other function forms the tensor.
_RULES = {
    "cross_entropy": _cross_entropy,
    "detach": _detached,
    **dict.fromkeys(_OF_PLACES, _of_places),
    **dict.fromkeys(_OF_NUMBERS, _of_numbers),
    **dict.fromkeys(_OF_TOKENS, _of_tokens),
}


def values_of(x: Tensor) -> Values | None:
    """Returns what logits [B, n, vocabulary] of whole rows are made of; None if they were formed."""
    return x.deferred if isinstance(x, OnUse) and x.numbers is x.content.numbers and x.is_current else None
