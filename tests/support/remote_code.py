"""A tiny model with remote code, which leaves a file behind when it runs."""

import json

from tests.support.checkpoints import save_tiny_checkpoint

CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def save_with_code(folder, monkeypatch):
    """Saves the model in a folder; returns the file that its code leaves behind."""
    # Transformers imports the code from a copy here.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
    marker = folder / "ran"
    save_tiny_checkpoint(folder / "model", hidden_size=32, intermediate_size=64, max_position_embeddings=512)
    (folder / "model" / "own.py").write_text(CODE.format(marker=str(marker)))
    file = folder / "model" / "config.json"
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    own = {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    return marker
