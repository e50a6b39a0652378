"""The bounds of tests: tests in float64 stay in float64 throughout, and a NaN exceeds every bound."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import run_simulated
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import EXACT, allowed, assert_exact, float64, is_float64, largest
from tests.support.training import assert_equal_runs


def dtypes_in(model):
    """Of all that the model's modules give, in a forward pass and where backward computes it again."""
    seen = set()
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.add(getattr(output, "dtype", None)))
    ids = torch.arange(20).view(2, 10)
    checkpoint(lambda: model(input_ids=ids, use_cache=False).logits.sum(), use_reentrant=False).backward()
    gradients = {parameter.grad.dtype for parameter in model.parameters()}
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    return (seen | gradients) - {None}


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt2"])
def test_models_compute_in_float64_throughout(model_type):
    with float64():
        assert dtypes_in(tiny_model(model_type, "eager")) == {torch.float64}
        assert run_simulated(lambda ring: dtypes_in(tiny_model(model_type, "eager")), 2) == [{torch.float64}] * 2
        x = torch.randn(3)
        assert torch.softmax(x, 0, dtype=torch.float32).dtype == x.float().dtype == torch.float64
        assert x.view(torch.float32).shape == (6,), "bits are read as they were"
    assert dtypes_in(tiny_model(model_type, "eager")) == {torch.float32}


def test_float64_is_a_matter_of_the_thread_that_asks_for_it():
    seen = []
    with float64():
        for target in (is_float64, float64()(is_float64)):
            thread = threading.Thread(target=lambda target=target: seen.append(target()))
            thread.start()
            thread.join()
        with float64(False), float64():
            assert is_float64()
        assert is_float64() and torch.get_default_dtype() == torch.float64
    assert seen == [False, True]
    assert not is_float64() and torch.get_default_dtype() == torch.float32


def test_one_rounding_to_float32_is_more_than_allowed_in_float64():
    x = torch.rand(1000, dtype=torch.float64)
    assert_exact(x + 300 * torch.finfo(torch.float64).eps * x, x)
    with pytest.raises(AssertionError, match=r"they are .* apart"):
        assert_exact(x.float().double(), x)
    with pytest.raises(AssertionError, match=r"computed in torch\.float32"):
        assert_exact(x.float(), x)
    assert allowed(0) > EXACT


def test_an_error_that_is_no_number_is_not_allowed():
    assert not largest([0.0, torch.nan, 1e-20]) <= 1
    run = {"losses": [1.0, 2.0], "norms": [1.0], "parameters": {"a": torch.ones(2), "b": torch.ones(2)}}
    assert_equal_runs(run, run, "the same")
    for changes in (
        {"losses": [1.0, torch.nan]},
        {"parameters": {**run["parameters"], "b": torch.tensor([1, torch.nan])}},
    ):
        with pytest.raises(AssertionError, match="nan off"):
            assert_equal_runs({**run, **changes}, run, "another")
