"""Names what failed in communication, and logs for whom a rank waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

#: Seconds after which a wait is logged.
PATIENCE = 5.0
#: Seconds between two looks at the waits. A wait costs no more than an entry in a table, and is seen if it lasts.
LOOKS_EVERY = 1.0


@dataclass
class _Wait:
    action: str
    whom: Callable[[], str]
    since: float = field(default_factory=time.monotonic)
    logged: bool = False


#: The waits under way, by their threads.
_WAITS: dict[int, _Wait] = {}
_looking = threading.Thread()
_STARTING = threading.Lock()


def _look() -> None:
    while True:
        time.sleep(LOOKS_EVERY)
        for wait in [*_WAITS.values()]:
            if not wait.logged and time.monotonic() - wait.since > PATIENCE:
                wait.logged = True
                logger.warning("%s: %s did not answer for %g s; still waiting", wait.action, wait.whom(), PATIENCE)


def _start_looking() -> None:
    global _looking
    with _STARTING:
        if not _looking.is_alive():
            _looking = threading.Thread(target=_look, name="hf_ring_attention waits", daemon=True)
            _looking.start()


def named(who: str, ranks: Sequence[int], several: str = "") -> str:
    """Returns "rank 1", or "ranks 1, 2" with what is to stand before `several`."""
    if not ranks:
        return f"another {who}"
    plural = "processes" if who == "process" else f"{who}s"
    return f"{who} {ranks[0]}" if len(ranks) == 1 else f"{several}{plural} {', '.join(map(str, ranks))}"


@contextmanager
def naming_errors(action: str, whom: Callable[[], str] = lambda: "another rank") -> Iterator[None]:
    """Names what failed in a RuntimeError of torch.distributed; logs once what lasts for some seconds, and `whom` it waits for.

    Only the outermost action of a thread is logged.
    """
    thread = threading.get_ident()
    outermost = thread not in _WAITS
    if outermost:
        _WAITS[thread] = _Wait(action, whom)
        if not _looking.is_alive():  # also in a process that was forked
            _start_looking()
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{action}: {error}") from error
    finally:
        if outermost:
            del _WAITS[thread]
