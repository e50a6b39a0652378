"""Commands run in this process."""

import pytest

from hf_ring_attention.cli.main import main


def _ended(words):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as end:
        main(words.split() if isinstance(words, str) else [*map(str, words)])
    return end.value.code or 0


@pytest.fixture
def command(capsys):
    """Runs a command, which must end well, and returns its standard output."""

    def run(words):
        assert _ended(words) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(capsys):
    """Runs a command, which must refuse its arguments, and returns the one line in which it does."""

    def run(words):
        assert _ended(words) == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run
