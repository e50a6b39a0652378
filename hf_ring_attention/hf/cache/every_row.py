"""A layer of a `PatternCache` that keeps every row as its module gives it, such as a latent one, and gives all of them back."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..model.config import patterns_of
from ..model.types import OTHER_VALUES
from .kept_rows import Arrival, Shared
from .pattern_layer import HeadRows, LayerCall, PatternLayer


class _GivenRows(HeadRows):
    """The rows of heads that are made of others, which their layer keeps: only their table."""

    def insert(self, new: Arrival, group: int, key: Tensor, value: Tensor) -> None:
        self.rebuild(new, key)
        self.table.insert(new, group)

    def rebuild(self, new: Arrival, *rows: Tensor) -> None:
        self.table.begin(new)
        self.table.append(new, rows[0].shape[2] - self.table.old.shape[2])


class EveryRowLayer(PatternLayer):
    """A layer that keeps every row as its module gives it, and gives all of them back.

    It serves modules that make other keys and values of these, as latent attention does for all heads.
    """

    kind = _GivenRows

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.stored: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        super().update(key_states, value_states)
        before, old = (self.stored, self._slots_before) if self.stored else ([key_states, value_states], 0)
        self.check_alike(before[0], key_states)
        self.check_alike(before[1], value_states)  # RoPE may turn keys into float32 under autocast.
        # The first rows are copied too: they may be a part of a larger tensor.
        keys = torch.cat([before[0][:, :, :old], key_states], 2)
        values = torch.cat([before[1][:, :, :old], value_states], 2)
        self.stored, self._newest = [keys, values], (weakref.ref(keys), weakref.ref(values))
        return keys, values

    @property
    def _slots_before(self) -> int:
        """The slots before the call."""
        table = self.rows[0].table
        table.begin(self.shared.arrival)
        return table.old.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        return self.stored

    @property
    def keys(self) -> Tensor | None:
        return self.stored[0] if self.stored else None

    @keys.setter
    def keys(self, value: Tensor | None) -> None: ...

    def _map(self, function: Any) -> None:
        self.stored = [function(x) for x in self.stored]

    def begin(self, call: LayerCall, key: Tensor) -> None:
        """Takes a call; layers that read these keys may have other patterns."""
        self._set_call(call)

    def new_rows(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of a call's new tokens, of all that the module attends to."""
        old = self._slots_before
        return key[:, :, old:], value[:, :, old:]


def why_every_row(config: Any) -> str | None:
    """Returns why the rows of a model cannot be dropped one by one; None if they can."""
    patterns = patterns_of(config)
    modes = [*zip(getattr(config, "kv_sharing_modes", None) or (), getattr(config, "layer_types", None) or ())]
    owners = {kind: patterns.get(n, patterns.get(None)) for n, (mode, kind) in enumerate(modes) if mode != "reuse"}
    if any(
        patterns.get(n, patterns.get(None)) != owners.get(kind)
        for n, (mode, kind) in enumerate(modes)
        if mode == "reuse"
    ):
        return "layers with other patterns share keys"
    return OTHER_VALUES.get(config.model_type)
