"""The model, texts and ring of the command `calibrate`, on one process or on all that a launcher started."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from .._version import __version__
from ..evaluation.calibration.calibrate import calibrate
from ..evaluation.calibration.result import Calibration
from ..evaluation.perplexity import perplexity
from ..evaluation.progress import progress_bar
from ..evaluation.texts import beginning_of, opening_tokens
from ..hf.config import patch_config
from ..hf.patch import patch_model
from .calibration_report import TextLosses
from .loading import load_model, load_tokenizer, ring_of_processes


class CalibrationRun:
    """A model on the device of this process, and the ring of all processes.

    Attributes:
        source: id or folder of the model.
        is_first: whether this process is the one that tells what came out.

    Raises:
        ValueError: a model that cannot be loaded.
    """

    def __init__(self, source: str, dtype: str, device_name: str | None, *, trust: bool = False) -> None:
        self.source, self.dtype = source, dtype
        self.ring, device = ring_of_processes(device_name)
        self.is_first = self.ring.rank == 0
        self._tokenizer = load_tokenizer(source, trust=trust)
        self._model = load_model(source, dtype, device, trust=trust)

    @property
    def opening(self) -> str:
        """The tokens with which each row opens, as text; empty for most models."""
        return " ".join(self._tokenizer.convert_ids_to_tokens(opening_tokens(self._tokenizer).tolist()))

    @property
    def versions(self) -> str:
        """The versions of what computes."""
        return f"hf_ring_attention {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"

    def rows_of(self, name: str, content: str, seq_len: int, count: int) -> list[Tensor]:
        """Returns rows [seq_len] of a text's tokens, spread evenly over it, behind those with which the model's texts open.

        Raises:
            ValueError: a text of fewer tokens.
        """
        part = beginning_of(content, seq_len) if count == 1 else content
        ids = self._tokenizer(part, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
        opening = opening_tokens(self._tokenizer)
        room = seq_len - len(opening)
        if len(ids) < room * count or room < 1:
            raise ValueError(
                f"{name} has {len(ids)} tokens, and {count} row(s) of {room} = {count * room} are needed: name a longer text, "
                f"fewer rows, or a smaller --seq-len"
            )
        starts = [(len(ids) - room) * row // max(1, count - 1) for row in range(count)]
        return [torch.cat([opening, ids[start : start + room]]) for start in starts]

    def calibrate(self, rows: Sequence[Tensor], **options: Any) -> Calibration:
        """Returns what `calibrate` chooses; the arguments are its."""
        return calibrate(self._model, rows, ring=self.ring, **options)

    def losses(
        self, rows: Mapping[str, Sequence[Tensor]], chosen_by: set[str], chosen: Calibration, patterns: Sequence[str]
    ) -> list[TextLosses]:
        """Measures texts under exact attention, under the patterns that were chosen, and under others.

        Args:
            chosen_by: the names of the texts by which they were chosen.
            patterns: the texts of others, each for all heads.
        """
        nlls: dict[str, dict[str, float]] = {name: {} for name in rows}
        compared: dict[str, Any] = {"exact": "exact", "calibrated": chosen, **{one: one for one in patterns}}
        for name, pattern in compared.items():
            patch_model(self._model, pattern, ring=self.ring)
            for text, of_text in progress_bar(
                f"perplexity, {name}", rows.items(), unit="text", silent=not self.is_first
            ):
                reports = [perplexity(self._model, row, ring=self.ring) for row in of_text]
                nlls[text][name] = sum(one.nll for one in reports) / sum(one.tokens for one in reports)
        return [TextLosses(name, name not in chosen_by, of_text) for name, of_text in nlls.items()]

    def config_with(self, chosen: Calibration) -> PretrainedConfig:
        """Returns the model's config with the patterns that were chosen."""
        return patch_config(copy.deepcopy(self._model.config), chosen)
