"""A file is there whole, the old one or the new one, whatever happens while it is written."""

import pytest

from hf_ring_attention.evaluation.whole_files import whole_file, write_whole


def test_a_file_is_replaced_whole(tmp_path):
    write_whole(tmp_path / "a.json", "old")
    write_whole(tmp_path / "a.json", "new €")
    assert [(path.name, path.read_text("utf-8")) for path in tmp_path.iterdir()] == [("a.json", "new €")]


def test_what_could_not_be_finished_leaves_the_old_file_alone(tmp_path):
    def fill_the_disk(part):
        part.write_text("ne")
        assert (tmp_path / "a.png").read_text() == "old" and part.parent == tmp_path
        raise OSError("the disk is full")

    write_whole(tmp_path / "a.png", "old")
    with pytest.raises(OSError, match="full"), whole_file(tmp_path / "a.png") as part:
        fill_the_disk(part)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.png", "old")]
