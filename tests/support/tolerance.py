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

import torch

from tests.support.precision import EXACT as EXACT
from tests.support.precision import distance as distance
from tests.support.precision import float64 as float64
from tests.support.precision import is_float64 as is_float64
from tests.support.precision import largest as largest

#: How much more than a plain computation in the same dtype may be off.
FACTOR = 8


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
