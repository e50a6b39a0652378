"""Processes that stay for the programs of this folder."""

import pytest

from tests.support.ranks import RankPool


@pytest.fixture(scope="package")
def programs():
    """`programs.run(function, world_size, *args)`, for functions that begin with `process_environment`."""
    with RankPool() as pool:
        yield pool
