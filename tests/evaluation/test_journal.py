"""A journal keeps what was written whole, and takes no other run's folder."""

import json
import resource

import pytest

from hf_ring_attention.evaluation.journal import RUN_FILE, SAMPLES_FILE, journal_of

SETTINGS = {"model": "m", "patterns": ["exact"], "seed": 0}


def write(folder, *records, settings=SETTINGS):
    with journal_of(folder, settings, {"command": "test"}) as journal:
        before = list(journal.records)
        journal.append(records)
        return before, journal


def test_records_come_back_in_their_order(tmp_path):
    write(tmp_path / "a" / "report", {"number": 1}, {"number": 2})
    before, journal = write(tmp_path / "a" / "report", {"number": 3})
    assert before == [{"number": 1}, {"number": 2}]
    assert journal.records == [{"number": number} for number in (1, 2, 3)]
    assert len(journal.launches) == 2
    assert json.loads((tmp_path / "a" / "report" / RUN_FILE).read_text())["settings"] == SETTINGS


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_the_beginning_of_a_line_is_cut_off_and_the_next_one_stands_alone(tmp_path, cut):
    write(tmp_path, {"number": 1}, {"number": 2})
    file = tmp_path / SAMPLES_FILE
    file.write_bytes(file.read_bytes()[:-cut])
    before, _ = write(tmp_path, {"number": 3})
    assert before == [{"number": 1}]
    assert file.read_text() == '{"number": 1}\n{"number": 3}\n'


def test_a_damaged_line_is_named(tmp_path):
    write(tmp_path, {"number": 1}, {"number": 2})
    (tmp_path / SAMPLES_FILE).write_text('{"number": 1}\n{"numb\n{"number": 2}\n')
    with pytest.raises(ValueError, match=r"samples.jsonl, line 2, is no JSON .* delete that line"):
        write(tmp_path)


def test_a_damaged_run_is_named(tmp_path):
    write(tmp_path, {"number": 1})
    (tmp_path / RUN_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"run.json is no JSON .*: name another folder"):
        write(tmp_path)


def test_a_disk_that_takes_a_part_of_a_line_keeps_none_of_it(tmp_path):
    with journal_of(tmp_path, SETTINGS, {}) as journal:
        journal.append([{"number": 1}])
        file = tmp_path / SAMPLES_FILE
        whole, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                journal.append([{"number": 2}])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert file.read_bytes() == whole and journal.records == [{"number": 1}]
        journal.append([{"number": 3}])
    assert write(tmp_path)[0] == [{"number": 1}, {"number": 3}]


def test_the_folder_of_another_run_is_refused_with_the_difference(tmp_path):
    write(tmp_path, {"number": 1})
    message = r'another run: patterns was \["exact"\] and is \["own"\]; chat was null and is true. Name another folder'
    with pytest.raises(ValueError, match=message):
        write(tmp_path, settings={**SETTINGS, "patterns": ["own"], "chat": True})
    assert write(tmp_path)[0] == [{"number": 1}], "nothing was changed"


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"has files that no evaluation wrote \(thesis.tex\): name a new one"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    with journal_of(tmp_path, SETTINGS, {}), pytest.raises(ValueError, match="another process writes to the folder"):
        write(tmp_path)
    write(tmp_path)
