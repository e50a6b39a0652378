"""The own loss of every type over a ring, and that the oracle of random cases (`make fuzz`) notices what is wrong."""

from dataclasses import replace

import pytest
import torch

from ..support.random_batches import compared, found_by
from ..support.random_cases import SUPPORTED, WITHOUT_SHIFT, draw_case
from ..support.releases import skip_without
from ..support.tiny_models import tiny_config

pytestmark = pytest.mark.own_dtypes  # float64 only in the cases that ask for it


@pytest.mark.drawn(12)
@pytest.mark.parametrize("model_type", sorted(t for t, of in SUPPORTED.items() if of.ring and t not in WITHOUT_SHIFT))
def test_the_own_loss_of_a_type_over_a_ring(model_type):
    skip_without(tiny_config(model_type).get_text_config().model_type)

    def suits(case):
        long_enough = case.dtype == torch.float64 and max(batch.shape[1] for batch in case.batches) > 12
        changed = case.patterns or case.changes or case.embeds is not None
        return case.ring is None and case.task == "train" and long_enough and not changed

    plain = next(filter(suits, map(draw_case, range(10**4))))
    batches = tuple(batch for batch in plain.batches if not (batch.as_eager or batch.holes))[:1]
    settings = {"loss": "model", "checkpointing": None, "train": False, "use_cache": False, "before": ""}
    case = replace(plain, model_type=model_type, batches=batches, patched=True, ring=(2, {}), **settings)
    assert compared(case, found_by(case)) == "equal"


def drawn(wanted):
    """A case that is computed on one process, of those that are `wanted`."""
    return next(case for case in map(draw_case, range(10**4)) if case.ring is None and wanted(case))


def long_enough(case):
    return case.task == "train" and case.dtype == torch.float64 and max(b.shape[1] for b in case.batches) > 12


def test_a_window_that_is_too_short_by_a_token_is_noticed():
    case = drawn(lambda case: long_enough(case) and case.model_type == "mistral" and not case.patterns)
    wide, narrow = (replace(case, changes={**case.changes, "sliding_window": window}) for window in (3, 2))
    compared(wide, found_by(wide))
    with pytest.raises(AssertionError, match="errors"):
        compared(wide, found_by(narrow))


def test_documents_that_see_each_other_are_noticed():
    def packed(case):
        batch = case.batches[0]
        several = batch.name.startswith("restarts") and len(batch.documents[0]) > 1
        return long_enough(case) and several and "attention_mask" not in batch.inputs

    case = drawn(packed)
    compared(case, found_by(case))
    batch = case.batches[0]
    joined = {**batch.inputs, "position_ids": torch.arange(batch.shape[1]).expand(batch.shape)}
    with pytest.raises(AssertionError, match="errors"):
        compared(case, found_by(replace(case, batches=(replace(batch, inputs=joined), *case.batches[1:]))))
