"""Calls that are refused, in one line each."""

import re

import pytest


def refused(message, call, *args, **options):
    """The error of a call, a ValueError that has this text in it, or that fits it as a regular expression."""
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    text = str(error.value)
    assert message in text or re.search(message, text, re.DOTALL), text
    return text
