"""Random models, batches and rings against eager attention; `make fuzz` runs any number of them."""

from dataclasses import replace

import pytest
import torch

from ..fuzz import run_many
from ..support.random_batches import compared, found_by
from ..support.random_cases import SUPPORTED, WITHOUT_SHIFT, draw_case

pytestmark = pytest.mark.own_dtypes  # float64 where a case says so

CASES = 10


# Reentrant checkpointing says so of logits that are computed without gradients, beside a sliced loss that has them.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_random_cases_are_those_of_eager_attention(rng):
    report = run_many(rng.randrange(10**6), ["models"], cases=CASES)
    print(report)
    assert not report.failed, "\n".join(report.failed)
    assert report.outcomes["refused models"] < CASES / 3
    assert report.outcomes["equal models"] > CASES / 3


@pytest.mark.drawn(12)
@pytest.mark.parametrize("model_type", sorted(t for t, of in SUPPORTED.items() if of.ring and t not in WITHOUT_SHIFT))
def test_the_own_loss_of_a_type_over_a_ring(model_type):
    def suits(case):
        long_enough = case.dtype == torch.float64 and max(batch.shape[1] for batch in case.batches) > 12
        changed = case.patterns or case.changes or case.embeds is not None
        return case.ring is None and case.task == "train" and long_enough and not changed

    plain = next(filter(suits, map(draw_case, range(10**4))))
    batches = tuple(batch for batch in plain.batches if not (batch.as_eager or batch.holes))[:1]
    settings = {"loss": "model", "checkpointing": None, "train": False, "use_cache": False, "before": ""}
    case = replace(plain, model_type=model_type, batches=batches, patched=True, ring=(2, {}), **settings)
    assert compared(case, found_by(case)).kind == "equal"
