"""Commands run in this process."""

import pytest

from hf_ring_attention.cli.main import main


@pytest.fixture
def ended(capsys):
    """Runs a command; returns its exit status, and what it printed to stdout and to stderr."""

    def run(words):
        with pytest.raises(SystemExit) as end:
            main(words.split() if isinstance(words, str) else [*map(str, words)])
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def command(ended):
    """Runs a command, which must end well, and returns its standard output."""

    def run(words):
        status, printed, _ = ended(words)
        assert status == 0
        return printed

    return run


@pytest.fixture
def refusal(ended):
    """Runs a command, which must refuse its arguments, and returns the one line in which it does."""

    def run(words):
        status, _, told = ended(words)
        assert status == 2
        return told.splitlines()[-1]

    return run
