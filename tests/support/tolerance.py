"""How far two computations of the same thing may differ: by what float64 and the data say, not by what one machine gave.

Sums in another order, other vector instructions and other matrix products round otherwise, so no two machines have the
same float32 errors, and a constant that one of them passes is wrong for the next. There are two ways out:

**Computing in float64**, wherever all that takes part can. Inside `float64()` it does, also what asks for float32 by name,
as norms, softmax and rotary embeddings of Transformers do. Then equal computations differ by some hundred roundings of
float64 (the most among all model types, gradients included, is 330, or 7e-14), and different ones by at least one rounding
to float32 (6e-8) or, where a key is wrong, by more than 1e-3. `EXACT` lies between: a thousand times the former, a
five-hundredth of the smallest of the latter.

**A multiple of what rounding does to this input**, where float32 (or 16 bits) is the point, or is all that a program
offers: `allowed` takes the error of a plain computation in the same dtype against float64, on the machine and the input of
the test. The factor is 8. Each of two computations has an error of that size, so their difference may be twice it; and the
largest of a few random errors, in sums of another order, is at times some four times that of another draw. Where there are
so few numbers that the plain computation happens to have no error at all, one rounding stands in for it. Where a whole
program runs in float32 and in nothing else, it runs once more with every weight a rounding off (`nudge_`): what that does
to its figures, the same program may do to them on another machine, or on two processes.
"""

import threading
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Of computations in float64, relative to the largest entry.
EXACT = 1e-10
#: How much more than a plain computation in the same dtype may be off.
FACTOR = 8

_THREAD = threading.local()


class _Float64ForFloat32(TorchDispatchMode):
    """Whoever asks for float32 by name gets float64, also where backward computes layers again."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is not torch.ops.aten.view.dtype:  # the same bits, read as another dtype
            args = [torch.float64 if x is torch.float32 else x for x in args]
        return func(*args, **kwargs)


@contextmanager
def float64(on=True):
    """Inside, this thread computes in float64, and models are made so; `on=False` changes nothing.

    `run_ranks` and `run_simulated` of tests.support.ranks take it to the ranks they run.
    """
    if not on or is_float64():
        yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of all threads
    _THREAD.float64 = True
    try:
        with _Float64ForFloat32():
            yield
    finally:
        _THREAD.float64 = False
        torch.set_default_dtype(default)


def is_float64():
    """Whether this thread is inside `float64`."""
    return getattr(_THREAD, "float64", False)


def distance(found, expected):
    """The largest difference, relative to the largest entry of what is expected."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def largest(errors):
    """NaN, which no bound allows, if any is; Python's max may pass it over."""
    return float(torch.tensor(list(errors)).max())


def assert_exact(found, expected, what="they"):
    """Of computations in float64: their distance is within `EXACT`."""
    assert found.dtype == expected.dtype == torch.float64, f"{what}: computed in {found.dtype} and {expected.dtype}"
    error = distance(found, expected)
    assert error <= EXACT, f"{what} are {error} apart, of {EXACT}"


@torch.no_grad()
def nudge_(model, seed=0):
    """Moves every weight to about a neighbouring number of its dtype, up or down; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        up_or_down = 2 * torch.randint(2, parameter.shape, generator=generator) - 1
        parameter.mul_(1 + torch.finfo(parameter.dtype).eps * up_or_down)
    return model


def allowed(error, dtype=torch.float32):
    """The bound on an error, relative to the largest entry, of what rounds in `dtype`.

    Args:
        error: of a plain computation in `dtype` against float64, relative likewise.
    """
    return FACTOR * (error + torch.finfo(dtype).eps)
