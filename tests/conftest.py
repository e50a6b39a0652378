"""Small tensors on one thread: more threads only wait for each other, above all on a busy machine. Nothing is compiled."""

import os

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
# An operator that were compiled, or loaded because another run compiled it, would fail.
os.environ.update(CC="no-compiler", CXX="no-compiler", TORCH_EXTENSIONS_DIR=os.path.join(os.devnull, "extensions"))

torch.set_num_threads(1)


@pytest.fixture
def in_float64(request):
    """See tests.support.tolerance; but for tests that are marked as being about other dtypes."""
    from tests.support.tolerance import float64

    with float64(request.node.get_closest_marker("own_dtypes") is None):
        yield
