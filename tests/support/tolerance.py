"""How far two computations of the same thing may differ: bounds from float64 and the data, not from one machine.

Sums in another order, other vector instructions and other matrix products round otherwise, so no two machines have the
same float32 errors, and a constant that one of them passes is wrong for the next. There are two ways out:

**Computing in float64**, wherever all that takes part can. Inside `float64()` it does, also what asks for float32 by name,
as norms, softmax and rotary embeddings of Transformers do. Then equal computations differ by some hundred roundings of
float64 (the most among all model types, gradients included, is 330, or 7e-14), and different ones by at least one rounding
to float32 (6e-8) or, if a key is wrong, by more than 1e-3. `EXACT` lies between: a thousand times the former, a
five-hundredth of the smallest of the latter.

**A multiple of what rounding does to this input**, if float32 (or 16 bits) is the point, or is all that a program
offers: `allowed` takes the error of a plain computation in the same dtype against float64, on the machine and the input of
the test. The factor is 8. Each of two computations has an error of that size, so their difference may be twice it; and
in another draw, the largest of a few random errors is at times some four times as large. If the numbers are too few
for the plain computation to show any error, one rounding stands in for it. If a whole
program runs in float32 and in nothing else, it runs once more with every weight a rounding off (`nudge_`): what that does
to its figures, the same program may do to them on another machine, or on two processes.
"""

import threading
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: How far two computations in float64 may be apart, relative to the largest entry.
EXACT = 1e-10
#: How much more than a plain computation in the same dtype may be off.
FACTOR = 8

_THREAD = threading.local()

_DEFAULTS_LOCK = threading.Lock()
#: The default dtype before any thread was in float64, and one entry for each thread that is.
_DEFAULTS = []


class _Float64ForFloat32(TorchFunctionMode):
    """A mode in which calls that ask for float32 get float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad, torch.nn.functional.cross_entropy):
            # Backward may compute layers again, and a loss its logits; this mode is off inside of calls.
            with _Float64ForFloat32InOperations():
                return func(*args, **kwargs)
        if func is Tensor.float:
            return Tensor.double(*args, **kwargs)
        return func(*_in_float64(func is Tensor.view, args, kwargs), **kwargs)


class _Float64ForFloat32InOperations(TorchDispatchMode):
    """The same for the operations that calls are made of."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return func(*_in_float64(func is torch.ops.aten.view.dtype, args, kwargs), **kwargs)


def _in_float64(reads_bits, args, kwargs):
    """Returns the arguments with float64 for float32, and changes `kwargs`; not of views that read bits as another dtype."""
    if reads_bits:
        return args
    if kwargs.get("dtype") is torch.float32:
        kwargs["dtype"] = torch.float64
    return [torch.float64 if x is torch.float32 else x for x in args]


@contextmanager
def float64(on=True):
    """Makes this thread compute and make models in float64 while the context lasts; `on=False` changes nothing.

    Threads that are started meanwhile must enter this context themselves.
    """
    if not on or is_float64():
        yield
        return
    # All threads share the default: the first thread that enters sets it, and the last thread that leaves restores it.
    with _DEFAULTS_LOCK:
        if not _DEFAULTS:
            _DEFAULTS.append(torch.get_default_dtype())
        _DEFAULTS.append(torch.float64)
        torch.set_default_dtype(torch.float64)
    _THREAD.float64 = True
    try:
        with _Float64ForFloat32():
            yield
    finally:
        _THREAD.float64 = False
        with _DEFAULTS_LOCK:
            _DEFAULTS.pop()
            if len(_DEFAULTS) == 1:
                torch.set_default_dtype(_DEFAULTS.pop())


def is_float64():
    """Returns whether this thread is inside `float64`."""
    return getattr(_THREAD, "float64", False)


def distance(result, expected):
    """Returns the largest difference, relative to the largest entry of `expected`."""
    result, expected = result.detach(), expected.detach()
    return float((result - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def largest(errors):
    """Returns the largest error, or NaN if any is NaN: no bound allows NaN, and Python's max may pass it over."""
    return float(torch.tensor(list(errors)).max())


def gradients_distance(found, expected, floor=1e-2):
    """The largest of the distances of gradients by name, each relative to the gradient's largest entry.

    Some gradients should be zero, such as the gradients of key biases, or of all queries if each sees one key: they count
    relative to the `floor`, a share of the largest entry of all gradients.
    """
    least = max((floor * float(x.abs().max()) for x in expected.values()), default=0.0) or 1.0
    errors = ((found[n] - x).abs().max() / x.abs().max().clamp_min(least) for n, x in expected.items())
    return largest([0.0, *map(float, errors)])


def assert_exact(found, expected, what="they"):
    """Of computations in float64: their distance is within `EXACT`."""
    assert found.dtype == expected.dtype == torch.float64, f"{what}: computed in {found.dtype} and {expected.dtype}"
    error = distance(found, expected)
    assert error <= EXACT, f"{what} are {error} apart, of {EXACT}"


@torch.no_grad()
def nudge_(model, seed=0):
    """Moves every weight to about a neighbouring number of its dtype, up or down; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    # Drawing a number for each weight of a real model would take seconds. These are repeated, from other places for each
    # tensor, and their count is a prime, so that the rows of no matrix are moved alike.
    up_or_down = 2 * torch.randint(2, (65537,), generator=generator, dtype=torch.int8) - 1
    for parameter in model.parameters():
        up_or_down = up_or_down.roll(1001)
        signs = up_or_down.repeat(-(-parameter.numel() // len(up_or_down)))[: parameter.numel()].view(parameter.shape)
        parameter.addcmul_(parameter, signs.to(parameter.dtype), value=torch.finfo(parameter.dtype).eps)
    return model


def allowed(error, dtype=torch.float32):
    """The bound on an error, relative to the largest entry, of what rounds in `dtype`.

    Args:
        error: of a plain computation in `dtype` against float64, relative likewise.
    """
    return FACTOR * (error + torch.finfo(dtype).eps)
