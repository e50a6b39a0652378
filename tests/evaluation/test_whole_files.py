"""A file is there whole, the old one or the new one, whatever happens while it is written."""

import pytest

from hf_ring_attention.evaluation.whole_files import whole_file, write_whole


def test_a_file_is_replaced_whole_or_left_alone(tmp_path):
    def fill_the_disk(part):
        part.write_text("ne")
        assert (tmp_path / "a").read_text("utf-8") == "new €" and part.parent == tmp_path
        raise OSError("the disk is full")

    for text in ("old", "new €"):
        write_whole(tmp_path / "a", text)
    with pytest.raises(OSError, match="full"), whole_file(tmp_path / "a") as part:
        fill_the_disk(part)
    assert [(path.name, path.read_text("utf-8")) for path in tmp_path.iterdir()] == [("a", "new €")]
