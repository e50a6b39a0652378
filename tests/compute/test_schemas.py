"""Calls of CUDA's operators fit the signatures of all releases of torch, and of the implementations that may replace them."""

import inspect

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.support.schemas import SCHEMAS, bound

_fa3, _fa4 = (pytest.importorskip(f"torch.nn.attention._fa{n}") for n in (3, 4))


def test_the_installed_release_has_the_signatures_that_are_kept():
    version = TorchVersion(torch.__version__)
    release = max((x for x in SCHEMAS if TorchVersion(x) <= version), key=TorchVersion, default=None)
    if release is None:
        pytest.skip(f"torch {version} is older than the signatures that are kept")
    for name, schema in SCHEMAS[release].items():
        assert getattr(torch.ops.aten, name).default._schema == schema


def test_calls_that_do_not_fit_are_found():
    schema = SCHEMAS["2.11"]["_flash_attention_forward"]
    ten = (None,) * 10
    assert bound(schema, ten, {"scale": 1.0})["scale"] == 1.0
    for args, kwargs in [(ten[1:], {}), ((*ten, 1.0), {}), (ten, {"query": None}), (ten, {"num_splits": 1})]:
        with pytest.raises(AssertionError):
            bound(schema, args, kwargs)


@pytest.mark.parametrize("windows", [{}, {"window_size_left": 4, "window_size_right": 0}], ids=["no window", "window"])
@pytest.mark.parametrize(
    ("name", "function", "count"),
    [
        ("forward", _fa3._fa3_flash_attention_forward_impl_default, 10),
        ("backward", _fa3._fa3_flash_attention_backward_impl, 14),
        ("forward", _fa4._fa4_flash_attention_forward_impl, 10),
        ("backward", _fa4._fa4_flash_attention_backward_impl, 14),
    ],
)
def test_implementations_in_the_place_of_flash_attention_2_take_the_same_calls(name, function, count, windows):
    """torch.nn.attention.activate_flash_attention_impl puts these functions in the place of the operators."""
    signature = inspect.signature(function)
    signature.bind(*[None] * count, scale=0.5, **windows)
    schema = SCHEMAS["2.13"][f"_flash_attention_{name}"]
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert [*signature.parameters][:count] == positional[:count]
    assert len(positional) == count
