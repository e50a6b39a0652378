"""Runs a function in several threads at once."""

from concurrent.futures import ThreadPoolExecutor

from tests.support.tolerance import float64


def in_threads(work, count):
    """Calls work(number) in `count` threads, in float64; raises the first error of any of them."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(float64()(work), range(count)))
