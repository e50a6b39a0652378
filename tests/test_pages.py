"""The pages of recipes/guide that are made from code show the code as it is."""

import pytest

import hf_ring_attention as ra
from tests import pages


def test_the_page_of_public_names_is_made_from_the_docstrings():
    text = pages.api_page()
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert len(headings) == len(ra.__all__) - 1  # without the version
    assert pages.API.read_text(encoding="utf-8") == text, "run `make docs`"


def test_a_public_name_without_a_place_is_refused(monkeypatch):
    monkeypatch.setitem(pages.SECTIONS, "Cost", "explain Explanation estimate")
    with pytest.raises(ValueError, match=r"each public name once: \['Estimate'\]"):
        pages.api_page()
