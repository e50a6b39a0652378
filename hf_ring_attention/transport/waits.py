"""Names what failed in communication, and logs for whom a rank waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

#: Seconds after which a wait is logged, and between two looks at the waits.
SILENCE, LOOKS_EVERY = 5.0, 1.0


class _Watch:
    """The waits under way, and a thread that looks at them: a wait costs an entry in a table, and is seen if it lasts."""

    def __init__(self) -> None:
        self.waits: dict[int, tuple[str, Callable[[], str], float]] = {}  # by thread: what waits, for whom, since when
        self.thread, self._starting = threading.Thread(), threading.Lock()

    def start(self) -> None:
        """Starts the thread if it does not run."""
        with self._starting:
            if not self.thread.is_alive():
                self.thread = threading.Thread(target=self._look, name="hf_ring_attention waits", daemon=True)
                self.thread.start()

    def _look(self) -> None:
        logged: list[Any] = []
        while True:
            time.sleep(LOOKS_EVERY)
            late = [wait for wait in [*self.waits.values()] if time.monotonic() - wait[2] > SILENCE]
            for action, whom, _ in (wait for wait in late if wait not in logged):
                logger.warning("%s: %s did not answer for %g s; still waiting", action, whom(), SILENCE)
            logged = late


_WATCH = _Watch()


def named(who: str, ranks: Sequence[int], several: str = "") -> str:
    """Returns "rank 1"; for more ranks "ranks 1, 2", after the word `several`; for none "another rank"."""
    if len(ranks) < 2:
        return f"{who} {ranks[0]}" if ranks else f"another {who}"
    return f"{several}{who}{'es' if who.endswith('s') else 's'} {', '.join(map(str, ranks))}"


@contextmanager
def naming_errors(action: str, whom: Callable[[], str] = lambda: "another rank") -> Iterator[None]:
    """Names what failed in a RuntimeError of torch.distributed; logs once what lasts for some seconds, and `whom` it waits for.

    Only the outermost action of a thread is logged.
    """
    thread = threading.get_ident()
    outermost = thread not in _WATCH.waits
    if outermost:
        _WATCH.waits[thread] = action, whom, time.monotonic()
        if not _WATCH.thread.is_alive():  # as in a process that was forked
            _WATCH.start()
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{action}: {error}") from error
    finally:
        if outermost:
            del _WATCH.waits[thread]
