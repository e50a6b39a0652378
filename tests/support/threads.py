"""Runs a function in several threads at once, and undoes what such threads leave behind."""

from concurrent.futures import ThreadPoolExecutor

import torch

from tests.support.tolerance import float64


def in_threads(work, count):
    """Calls work(number) in `count` threads, in float64; raises the first error of any of them."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(float64()(work), range(count)))


def forget_modes(monkeypatch):
    """Lets torch.compile compile, which compiles nothing under a mode that sees every operation.

    torch has one flag of such modes for all threads. It is left set by threads that end a mode in another order than they
    began it, as those of simulated ranks in the tests before.
    """
    for flag in ("_is_in_non_infra_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals"):
        monkeypatch.setattr(torch.utils._python_dispatch, flag, False, raising=False)
