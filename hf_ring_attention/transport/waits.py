"""Names what failed in communication, and logs for whom a rank waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

#: Seconds after which a wait is logged.
PATIENCE = 5.0
#: Seconds between two looks at the waits. A wait costs no more than an entry in a table, and is seen if it lasts.
LOOKS_EVERY = 1.0


#: The waits under way, by their threads: (what waits, for whom, since when).
_WAITS: dict[int, tuple[str, Callable[[], str], float]] = {}
_looking = threading.Thread()
_STARTING = threading.Lock()


def _look() -> None:
    logged: list[Any] = []
    while True:
        time.sleep(LOOKS_EVERY)
        late = [wait for wait in [*_WAITS.values()] if time.monotonic() - wait[2] > PATIENCE]
        for action, whom, _ in (wait for wait in late if wait not in logged):
            logger.warning("%s: %s did not answer for %g s; still waiting", action, whom(), PATIENCE)
        logged = late


def _start_looking() -> None:
    global _looking
    with _STARTING:
        if not _looking.is_alive():
            _looking = threading.Thread(target=_look, name="hf_ring_attention waits", daemon=True)
            _looking.start()


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
    outermost = thread not in _WAITS
    if outermost:
        _WAITS[thread] = action, whom, time.monotonic()
        if not _looking.is_alive():  # also in a process that was forked
            _start_looking()
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{action}: {error}") from error
    finally:
        if outermost:
            del _WAITS[thread]
