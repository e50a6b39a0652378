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

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotFormedError(f"this output has no {self._what}: {self._remedy}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, NotFormed))
        return cls._refuse(found)

    __hash__ = object.__hash__
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rmatmul__ = _refuse
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __neg__ = __pos__ = __abs__ = __invert__ = _refuse
    __and__ = __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __len__ = __iter__ = __contains__ = _refuse
    __bool__ = __int__ = __float__ = __complex__ = __index__ = _refuse
    __array__ = __array_ufunc__ = __array_function__ = _refuse


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
