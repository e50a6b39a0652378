"""What the processes of benchmarks use, for the server that they are forked from to load once."""

from . import choice, ideal, overlap, peak, ring_memory, speed  # noqa: F401
