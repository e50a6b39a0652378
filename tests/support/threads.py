"""Runs a function in several threads at once."""

import threading

from tests.support.tolerance import float64


def in_threads(work, count):
    """Calls work(number) in `count` threads, in float64; raises the first error of any of them."""
    errors = []

    def caught(number):
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=float64()(caught), args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
