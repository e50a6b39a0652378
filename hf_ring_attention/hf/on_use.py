"""Hidden states and logits of whole rows that are formed when they are used.

A rank of a ring has a part of the last hidden states, and logits are often the largest tensor of all. So the decoder of a call
with labels returns an `OnUse`. A function of each token computes with this rank's part. The output layer is not called: its
logits are an `OnUse` too, which remembers the layer and the functions that the model applies behind it. Their `cross_entropy`
is a sum over tokens, so `lm_loss.py` computes it in slices. Every other use forms the whole tensor, on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compute.private import base_of, plain_tensors, tree_leaves, tree_map, version_of, without_numbers
from ..ring.ring import Ring
from .config import warn_once
from .forward_pass import SliceLoss, WholeRows, running, running_with
from .join import kept, whole_rows
from .lm_loss import IGNORED, INSTEAD, call_of, sum_in_slices, tensors_of

#: Functions of each number, whatever its token. The names of functions that write into their argument end with "_".
_OF_NUMBERS = frozenset(
    "abs add bfloat16 clamp clip clone contiguous detach div divide double exp float half masked_fill mul multiply neg "
    "negative pow relu sigmoid square sub subtract tanh to true_divide type __rdiv__ __rsub__ __rpow__ add_ clamp_ clip_ div_ "
    "divide_ exp_ masked_fill_ mul_ multiply_ neg_ pow_ sigmoid_ sub_ subtract_ tanh_ true_divide_".split()
)
#: Functions of the hidden states of each token, with weights as further arguments.
_OF_TOKENS = frozenset("linear layer_norm rms_norm gelu silu mish softplus leaky_relu".split())
#: Functions that choose tokens, or arrange them in another way.
_OF_PLACES = frozenset("__getitem__ flatten reshape view".split())
_X: Any = Tensor
#: Questions that need no numbers.
_FACTS = {
    *(x.__get__ for x in (_X.shape, _X.dtype, _X.device, _X.ndim, _X.requires_grad, _X.layout, _X.grad_fn, _X.is_leaf)),
    *(x.__get__ for x in (_X.is_cuda, _X.is_cpu, _X.is_sparse, _X.is_quantized, _X.is_meta, _X.is_nested)),
    *(_X.size, _X.dim, _X.ndimension, _X.numel, _X.nelement, _X.element_size, _X.is_floating_point, _X.is_complex),
    *(_X.get_device, _X.is_contiguous, _X.is_inference, _X.__len__, _X.requires_grad.__set__, base_of),
}
#: Operators whose result is a tensor with the same numbers.
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)


@dataclass(eq=False)
class Origin:
    """The call whose results are formed on use."""

    name: str  # the class of its model
    rows: WholeRows | None  # None for a model that is not patched, whose rows are whole
    ring: Ring
    keeps_logits: bool = True  # whether logits are formed on use too, and not by the output layer
    of_slice: SliceLoss | None = None  # the loss of a slice of tokens, in place of a cross entropy
    sliced: bool = False  # whether a loss was computed in slices


@dataclass(eq=False)
class Values:
    """What an `OnUse` has for each token of all rows, whichever tokens it shows."""

    origin: Origin
    part: Tensor  # [B, n local, width] the hidden states of this rank's tokens
    head: nn.Module | None  # the output layer; None for hidden states
    steps: tuple[Callable[[Tensor], Tensor], ...]  # the functions that were applied to its logits
    sample: Tensor  # [0, vocabulary] no logits, with the dtype, device and width of all
    recorded: bool  # whether gradients are recorded
    autocast: Callable[[], Any]  # makes the context of autocast in which the layer was called
    weights: tuple[Tensor, ...] = ()  # the tensors of the layer that need gradients
    versions: tuple[int, ...] = ()  # of the weights, when the layer was called
    scales: tuple[Tensor, ...] = ()  # the tensors of the steps that need gradients
    hooks: list[Callable[[Tensor], Any]] = field(default_factory=list)  # of FSDP, before backward reaches the layer
    formed: Tensor | None = None
    version: int = 0  # of `formed`, before anybody wrote into it

    @staticmethod
    def of_hidden(part: Tensor, origin: Origin) -> Values:
        """Returns hidden states, of which this rank has a part."""
        sample = part.detach().flatten(0, 1)[:0]
        return Values(origin, part, None, (), sample, torch.is_grad_enabled(), _autocast(part))

    def of_states(self, states: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Returns the values [..., vocabulary] of hidden states [..., width], by the layer or its forward."""
        if head is None and self.head is not None:
            head = call_of(self.head)
        with self.autocast(), running_with(on_use=False):
            values = states if head is None else head(states)
            for step in self.steps:
                values = step(values)
            return values

    def of_rows(self, part: Tensor) -> Tensor:
        """Returns the values [B, n, vocabulary] of whole rows from this rank's hidden states; all ranks call it together."""
        rows, ring = self.origin.rows, self.origin.ring
        return self.of_states(part if rows is None or rows.layout is None else whole_rows(part, rows, ring))

    def whole(self) -> Tensor:
        """Returns the values of whole rows, which are formed once."""
        if self.formed is None:
            self.check()
            with torch.set_grad_enabled(self.recorded):
                self.formed = self.of_rows(self.part)
            self.version = version_of(self.formed)
            for hook in self.hooks if self.formed.requires_grad else ():
                self.formed.register_hook(hook)
        return self.formed

    def check(self) -> None:
        """Refuses weights that have changed since the call of the layer: they would give other logits."""
        if any(version_of(x) != then for x, then in zip(self.weights, self.versions)):
            raise RuntimeError(
                f"{self.origin.name}: its weights have changed since the call that these logits are of: use logits before the "
                f"optimizer's step, for example by logits.argmax(-1)"
            )

    @property
    def is_current(self) -> bool:
        """Whether to go on from this rank's hidden states: nothing was written into what was formed, nor is it logits."""
        return self.formed is None or (self.head is None and version_of(self.formed) == self.version)

    def warn(self) -> None:
        """Logs once for a class that logits of whole rows are formed over a ring."""
        rows, ring, width = self.origin.rows, self.origin.ring, self.sample.shape[-1]
        if (
            self.formed is None
            and self.head is not None
            and rows is not None
            and ring.world_size > 1
            and ring.rank == 0
        ):
            size = rows.batch * rows.length * width * self.sample.element_size()
            warn_once(
                f"{self.origin.name}: the logits of whole rows were used, so every rank forms them: {size / 2**30:.3f} GiB; "
                f"only a cross entropy of them is computed in slices"
            )


class OnUse(Tensor):
    """A tensor of whole rows, which is formed when it is used; all ranks use it together."""

    content: Values
    numbers: Tensor  # the number of each token among those of all rows, in the shape of this tensor without its last dimension
    views: tuple[Callable[[Tensor], Tensor], ...]  # the functions that chose the tokens
    shown: Tensor | None  # the tokens, once they are formed

    @staticmethod
    def of_hidden(part: Tensor, origin: Origin) -> OnUse:
        """Returns the hidden states of whole rows, from this rank's part [B, n local, width]."""
        batch, length = part.shape[:2] if origin.rows is None else (origin.rows.batch, origin.rows.length)
        numbers = torch.arange(batch * length, device=part.device).view(batch, length)
        return OnUse.of(Values.of_hidden(part, origin), numbers)

    @staticmethod
    def of(values: Values, numbers: Tensor, views: tuple[Callable[[Tensor], Tensor], ...] = ()) -> OnUse:
        """Returns the values of the tokens with these numbers."""
        inputs = (values.part, *values.weights, *values.scales)
        if values.recorded and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            made: OnUse = _Connected.apply(values, numbers, views, *inputs)
            return made
        return _bare(values, numbers, views)

    def form(self) -> Tensor:
        """Returns an ordinary tensor, with its gradients."""
        values, rows = self.content, self.content.origin.rows
        few = rows is not None and rows.layout is not None and 2 * self.numbers.numel() < rows.batch * rows.length
        if self.shown is None and few and values.head is None and values.formed is None:
            assert rows is not None
            with torch.set_grad_enabled(values.recorded):
                self.shown = kept(values.part, rows, values.origin.ring, self.numbers)
        elif self.shown is None:
            with torch.set_grad_enabled(values.recorded):
                self.shown = _viewed(values.whole(), self.views)
        return self.shown

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
        if any(map(_is_wrapped, found)):
            with plain_tensors():
                return func(*args, **kwargs)
        if len(found) == 1 and found[0].content.is_current:
            result = _not_formed(found[0], func, args, kwargs)
            if result is not None:
                return result
        for x in found:
            x.content.warn()
        return func(*tree_map(_formed, args), **tree_map(_formed, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes with numbers only, for functions that torch does not announce above: `_Connected` has their gradients."""
        x, *others = args
        if func in _ALIASES and isinstance(x, OnUse) and others in ([], [[*x.shape]]):
            return _bare(x.content, x.numbers, x.views)

        def computed(x: Any) -> Any:
            if not isinstance(x, OnUse):
                return x
            x.content.warn()
            formed = x.content.formed
            return _viewed(x.content.of_rows(x.content.part) if formed is None else formed, x.views).detach()

        return func(*tree_map(computed, args), **tree_map(computed, kwargs or {}))


def _bare(values: Values, numbers: Tensor, views: Any) -> OnUse:
    """Returns an `OnUse` without gradients."""
    sample = values.sample
    made: OnUse = without_numbers(OnUse, (*numbers.shape, sample.shape[-1]), dtype=sample.dtype, device=sample.device)
    made.content, made.numbers, made.views, made.shown = values, numbers, views, None
    return made


def _viewed(x: Tensor, views: tuple[Callable[[Tensor], Tensor], ...]) -> Tensor:
    for view in views:
        x = view(x)
    return x


def _is_wrapped(x: OnUse) -> bool:
    """Returns whether a function of autograd has returned this tensor, so the gradient goes through its backward.

    One function of FSDP 2 only marks the place where backward has passed a module.
    """
    with plain_tensors():
        known = ("_ConnectedBackward", "RegisterPostBackwardFunctionBackward")
        return x.requires_grad and type(x.grad_fn).__name__ not in known


def _formed(x: Any) -> Any:
    return x.form() if isinstance(x, OnUse) else x


def _autocast(x: Tensor) -> Callable[[], Any]:
    """Returns a function that makes the context of autocast that is active now."""
    device = x.device.type
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled)


class _Connected(torch.autograd.Function):
    """Gives an `OnUse` its place in autograd's graph, for functions that compute without `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, values: Values, numbers: Tensor, views: Any, *inputs: Tensor) -> OnUse:
        ctx.values, ctx.views = values, views
        ctx.set_materialize_grads(False)
        return _bare(values, numbers, views)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        values: Values = ctx.values
        if grad is None:  # DDP returns all outputs of a model by one function.
            return (None,) * len(ctx.needs_input_grad)
        part = values.part.detach().requires_grad_(values.part.requires_grad)
        with torch.enable_grad():
            out = _viewed(values.of_rows(part), ctx.views)
        inputs = [part, *values.weights, *values.scales]
        wanted = [x for x in inputs if x.requires_grad]
        gradients = iter(torch.autograd.grad(out, wanted, grad, materialize_grads=True))
        return None, None, None, *(next(gradients) if x.requires_grad else None for x in inputs)


# ---- what does not form the tensor


def _not_formed(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a function whose argument need not be formed; None for others."""
    name, values = getattr(func, "__name__", ""), x.content
    if func is Tensor.register_hook:
        hook = args[1]
        if not getattr(getattr(hook, "func", hook), "__module__", "").startswith("torch.distributed.fsdp"):
            x.form()
            values.version = -1  # From now on, gradients go through the formed tensor.
            return None
        if values.head is None:
            return func(values.part, hook) if values.part.requires_grad else None
        values.hooks.append(hook)
        with plain_tensors():
            return func(*args)
    if func is F.cross_entropy and args and args[0] is x:
        return _cross_entropy(x, *args[1:], **kwargs)
    place = next((place for place, arg in enumerate(args) if arg is x), None)
    if place is None or "out" in kwargs:
        return None
    if name in _OF_PLACES and place == 0:
        return _of_places(x, func, args[1:], kwargs)
    others = [o for o in tree_leaves((args, kwargs)) if isinstance(o, Tensor) and o is not x]
    width, writes = x.shape[-1], name.endswith("_") and not name.endswith("__")
    of_numbers = name in _OF_NUMBERS and all(
        o.numel() in (1, width) and o.numel() == o.shape[-1:].numel() and o.dim() <= x.dim() for o in others
    )
    if values.head is None:
        if writes or not (of_numbers or (name in _OF_TOKENS and place == 0)):
            return None
        part = func(*args[:place], values.part, *args[place + 1 :], **kwargs)
        return OnUse.of(Values.of_hidden(part, values.origin), x.numbers, x.views)
    if not of_numbers or (writes and (x.views or any(o.requires_grad for o in others))):
        return None

    def step(logits: Tensor) -> Tensor:
        result: Tensor = func(*args[:place], logits, *args[place + 1 :], **kwargs)
        return result

    changes: dict[str, Any] = {"steps": (*values.steps, step), "sample": step(values.sample).detach()}
    if writes:  # All that show these values change.
        values.steps, values.sample = changes["steps"], changes["sample"]
        return x
    changes["scales"] = (*values.scales, *(o for o in others if o.requires_grad))
    if not torch.is_grad_enabled() or name == "detach":  # Such values keep no graph alive.
        changes |= {"recorded": False, "part": values.part.detach()}
    return OnUse.of(replace(values, **changes), x.numbers, x.views)


def _of_places(x: OnUse, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OnUse | None:
    """Returns chosen tokens; None if the last dimension does not stay as it is, or a token may be chosen twice."""
    if func is Tensor.__getitem__:
        keys = args[0] if isinstance(args[0], tuple) else args
        if len(keys) == x.dim() or any(key is ... for key in keys):
            if not isinstance(keys[-1], slice) or keys[-1] != slice(None):
                return None
            keys = keys[:-1]
        places = [key for key in keys if isinstance(key, Tensor) and key.dtype != torch.bool]
        if any(isinstance(key, list) for key in keys) or any(len(key.unique()) != key.numel() for key in places):
            return None
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
        func = Tensor.reshape if func is Tensor.view else func  # Chosen tokens may not be contiguous here.
    if numbers.shape == x.numbers.shape:  # Models without logits_to_keep keep all.
        return x

    def view(values: Tensor) -> Tensor:
        result: Tensor = func(values, *args, **kwargs)
        return result

    return OnUse.of(x.content, numbers, (*x.views, view))


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
    values, rows = x.content, x.content.origin.rows
    batch, length = values.part.shape[:2] if rows is None else (rows.batch, rows.length)
    labels = target.new_full((batch * length,), ignore_index)
    labels[x.numbers.to(target.device)] = target
    total = sum_in_slices(values, labels.view(batch, length), ignore_index, label_smoothing)
    total = total.to(x.device, x.dtype)
    return total if reduction == "sum" else total / (target != ignore_index).sum().to(total.device)


def values_of(x: Tensor) -> Values | None:
    """Returns what logits [B, n, vocabulary] of whole rows are made of; None if they were formed."""
    return x.content if isinstance(x, OnUse) and not x.views and x.content.is_current else None


# ---- the output layer


class HeadForward:
    """The forward of an output layer, by its `own` forward, None for the forward of its class.

    It runs inside the hooks of FSDP and ZeRO, which gather the layer's weights for its call.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module, self.own = module, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = partial(type(self.module).forward, self.module) if self.own is None else self.own
        on_use = bool(args) and isinstance(args[0], OnUse)
        if on_use or INSTEAD in kwargs or (not torch.compiler.is_dynamo_compiling() and running().on_use):
            return _head(self.module, own, *args, **kwargs)
        return own(*args, **kwargs)


def wrap_head(head: nn.Module) -> None:
    """Has an output layer return logits that are formed on use for hidden states that are."""
    own = vars(head).get("forward")
    if not isinstance(own, HeadForward):
        head.forward = HeadForward(head, own)


@torch.compiler.disable(reason="it asks what was formed")
def _head(module: nn.Module, own: Callable[..., Any], states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns logits that are formed on use, or the result of the function that runs in place of the layer."""
    instead = kwargs.pop(INSTEAD, None)

    def forward(states: Tensor) -> Any:
        return own(states, *args, **kwargs)

    if instead is not None:
        return instead(forward)
    if not isinstance(states, OnUse):
        states = OnUse.of_hidden(states, Origin("the model", None, Ring.alone()))
    hidden = states.content
    if _is_wrapped(states):
        return forward(states)
    if not (hidden.is_current and hidden.origin.keeps_logits):
        return forward(states.form())
    token = hidden.part[:1, :1].detach()
    sample = forward(token)  # It has the dtype and the width of all logits.
    if not isinstance(sample, Tensor) or sample.shape[:-1] != token.shape[:-1]:
        raise NotImplementedError(
            f"{type(module).__name__} is no output layer: it makes no logits of each token by itself"
        )
    recorded, weights = hidden.recorded and torch.is_grad_enabled(), tuple(tensors_of(module))
    values = replace(
        hidden,
        part=hidden.part if recorded else hidden.part.detach(),
        head=module,
        sample=sample.detach().flatten(0, 1)[:0],
        recorded=recorded,
        autocast=_autocast(hidden.part),
        weights=weights,
        versions=tuple(map(version_of, weights)),
        hooks=[],
        formed=None,
    )
    return OnUse.of(values, states.numbers, states.views)
