"""Stand-ins for results that a call did not form: any use raises an error that names the reason."""

from __future__ import annotations

from typing import Any


class NotFormedError(RuntimeError, AttributeError):
    """A result was used that its call did not form.

    It is an AttributeError too, so that libraries which look for the methods of a tensor find none.
    """


class NotFormed:
    """A stand-in for a result that was not formed: any use raises an error with the reason.

    It is no tensor, so that libraries that cast, gather or copy the tensors of an output leave it as it is.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self._what, self._remedy = what, remedy

    def __repr__(self) -> str:
        return f"NotFormed({self._what}: {self._remedy})"

    def __reduce__(self) -> Any:
        return NotFormed, (self._what, self._remedy)

    def __getattr__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotFormedError(f"this output has no {self._what}: {self._remedy}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, NotFormed)).__getattr__()


#: Python looks these up in the class, and not by `__getattr__`.
_OPERATORS = (
    "eq ne lt le gt ge neg pos abs invert bool int float complex index len iter getitem setitem delitem contains array "
    "array_ufunc array_function and or xor rand ror rxor add sub mul truediv floordiv mod pow matmul radd rsub rmul "
    "rtruediv rfloordiv rmod rpow rmatmul iadd isub imul itruediv"
)
for _operator in _OPERATORS.split():
    setattr(NotFormed, f"__{_operator}__", NotFormed.__getattr__)


def logits_not_formed() -> NotFormed:
    """Returns the stand-in for the logits of a call whose loss was computed in slices."""
    return NotFormed(
        "logits",
        "its loss was computed in slices of tokens, so the logits of all tokens never existed at once: call the model without "
        "labels, which returns logits, and compute the loss from them",
    )


def cache_not_formed() -> NotFormed:
    """Returns the stand-in for the cache of a call over a ring."""
    return NotFormed(
        "cache",
        "each rank of a ring computed a part of its rows: pass use_cache=True to compute whole rows with a cache on every "
        "rank, or fill a sharded cache with ra.prefill",
    )
