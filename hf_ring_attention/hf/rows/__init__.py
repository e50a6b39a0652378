"""Whole rows to parts, and parts to whole results."""
