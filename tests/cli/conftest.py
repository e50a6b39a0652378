"""Commands run in this process."""

import pytest

from hf_ring_attention.cli.main import main


@pytest.fixture
def command(capsys):
    """Runs a command, which must end well, and returns its standard output."""

    def run(words):
        with pytest.raises(SystemExit) as end:
            main(words.split() if isinstance(words, str) else [*map(str, words)])
        assert not end.value.code
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(capsys):
    """Runs a command, which must refuse its arguments, and returns the one line in which it does."""

    def run(words):
        with pytest.raises(SystemExit) as end:
            main(words.split() if isinstance(words, str) else [*map(str, words)])
        assert end.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run
