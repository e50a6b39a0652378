"""Random models, batches and rings against eager attention; `make fuzz` runs any number of them."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from ..fuzz import repeat_line, seeds_of
from ..support.random_batches import compared, found_by, run_case
from ..support.random_cases import draw_case

pytestmark = pytest.mark.own_dtypes  # float64 where a case says so

CASES = 60


# Reentrant checkpointing says so of logits that are computed without gradients, beside a sliced loss that has them.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_random_cases_are_those_of_eager_attention():
    seed = random.randrange(10**6)
    kinds = Counter()
    for case_seed in seeds_of(seed, CASES):
        try:
            kinds[run_case(case_seed).kind] += 1
        except BaseException:
            print(f"wrong: {repeat_line('models', case_seed)}")
            raise
    print(f"{CASES} cases of seed {seed}: {dict(kinds)}")
    assert kinds["refused"] < CASES / 3
    assert kinds["equal"] > CASES / 3


def drawn(wanted):
    """A case that is computed on one process, of those that are `wanted`."""
    return next(case for case in map(draw_case, seeds_of(1, 10**4)) if case.ring is None and wanted(case))


def long_enough(case):
    return case.task == "train" and case.dtype == torch.float64 and max(b.shape[1] for b in case.batches) > 12


def test_a_logit_that_is_a_little_off_is_noticed():
    case = drawn(long_enough)
    found = found_by(case)
    compared(case, found)
    found.logits[0][case.batches[0].valid()] += 1e-5
    with pytest.raises(AssertionError, match="errors"):
        compared(case, found)


def test_a_gradient_that_is_a_little_off_is_noticed():
    case = drawn(long_enough)
    found = found_by(case)
    largest = max(found.gradients.values(), key=lambda gradient: gradient.abs().max())
    largest *= 1 + 1e-4
    with pytest.raises(AssertionError, match="errors"):
        compared(case, found)


def test_a_window_that_is_too_short_by_a_token_is_noticed():
    case = drawn(lambda case: long_enough(case) and case.model_type == "mistral" and not case.patterns)
    wide, narrow = (replace(case, changes={**case.changes, "sliding_window": window}) for window in (3, 2))
    compared(wide, found_by(wide))
    with pytest.raises(AssertionError, match="errors"):
        compared(wide, found_by(narrow))


def test_documents_that_see_each_other_are_noticed():
    def packed(case):
        return long_enough(case) and case.batches[0].name.startswith("restarts") and case.patched and not case.shards

    case = drawn(packed)
    compared(case, found_by(case))
    with pytest.raises(AssertionError):
        compared(case, found_by(replace(case, patched=False, use_cache=None)))
