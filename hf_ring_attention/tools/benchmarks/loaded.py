"""Imports what the processes of benchmarks use, so that the server that they are forked from loads it once."""

from . import choice, ideal, overlap, peak, ring_memory, scaling, speed, step_memory  # noqa: F401
