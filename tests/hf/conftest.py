"""Tiny models: threads gain nothing, and wait for each other where the machine is busy."""

import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
