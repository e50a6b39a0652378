"""Models, rows, patterns, tasks, rings and histories against eager attention: every two of them come together."""

import itertools
import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import hf_ring_attention as ra
from tests.support.pairs import pairs_of
from tests.support.random_batches import compared, found_by
from tests.support.random_cases import SUPPORTED, Case, first_of, random_rows
from tests.support.random_rows import KINDS, random_batch
from tests.support.tiny_models import HEADS, tiny_config

pytestmark = [
    pytest.mark.own_dtypes,  # all cases compute in float64
    # Reentrant checkpointing warns of logits that are computed without gradients, beside a sliced loss with gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]

#: With windows, softcaps, chunks, sinks, recurrent layers, latent keys and experts.
MODELS = ["cohere2", "deepseek_v3", "gemma2", "gpt2", "gpt_oss", "llama", "llama4_text", "mistral", "mixtral", "olmo3"]
MODELS += ["qwen3_5_text"]
CHANGES = {"llama4_text": {"attention_chunk_size": 7}}
BY_HEAD = "a window in half of the heads"
TEXTS = ["exact", "window:4+2", "pyramid:4,2", "longnet:4/1,all/2", BY_HEAD]
TASKS = {
    "train": {"task": "train"},
    "own loss": {"task": "train", "loss": "model"},
    "checkpointed": {"task": "train", "checkpointing": False, "train": True},
    "reentrant": {"task": "train", "checkpointing": True, "train": True},
    "perplexity": {"task": "perplexity"},
    "generate": {"task": "generate"},
    "prefilled": {"task": "generate", "prefilled": True},
}
RINGS = [None, (2, {"transport": "ring"}), (3, {"transport": "collective"}), (2, {"transport": "heads"})]
RINGS += [(2, {"layout": "documents"}), (3, {"layout": "zigzag"})]
SETTINGS = {
    "model_type": [name for name in MODELS if name in SUPPORTED],
    "rows": sorted(kind for kind, of in KINDS.items() if not (of.needs or of.as_eager)),
    "pattern": TEXTS,
    "task": [*TASKS],
    "ring": RINGS,
    "before": ["", "patched", "refused"],
}


def case_of(model_type, rows, pattern, task, ring, before):
    rng = random.Random(f"{model_type} {rows} {pattern} {task} {ring} {before}")
    settings = {"loss": "logits", "checkpointing": None, "train": False, "prefilled": False, **TASKS[task]}
    batch = random_rows(rng)
    if settings["task"] == "train":
        with patch.dict(KINDS, {rows: KINDS[rows]}, clear=True):
            batch = random_batch(rng, first_of(model_type))
    if pattern == BY_HEAD:
        heads = getattr(tiny_config(model_type), "num_key_value_heads", HEADS)
        pattern = ";".join(f"kv{head}={'window:4' if head % 2 else 'exact'}" for head in range(heads))
    # Rings refuse padding inside of documents; on one process it has no result under a pattern.
    patterns = {} if pattern == "exact" or batch.holes else {None: ra.Pattern.parse(pattern)}
    changes = CHANGES.get(model_type, {})
    fixed = {"seed": 1, "changes": changes, "dtype": torch.float64, "patched": True, "use_cache": False}
    fixed |= {"embeds": None, "generated": (3, 2, {}), "batches": (batch,)}
    return Case(model_type=model_type, patterns=patterns, ring=ring, before=before, **fixed, **settings)


ALL = [*pairs_of(SETTINGS)]


def test_every_pair_is_there():
    found = {pair for settings in ALL for pair in itertools.combinations([(x, str(y)) for x, y in settings.items()], 2)}
    two = itertools.combinations(SETTINGS.values(), 2)
    assert len(found) == sum(len(values) * len(others) for values, others in two) and len(ALL) < 130


@pytest.mark.parametrize("settings", ALL, ids=lambda x: "-".join(map(str, x.values())))
def test_every_pair_is_that_of_eager_attention(settings):
    case = case_of(**settings)
    assert compared(case, found_by(case)) == "equal" or case.refusable


@pytest.mark.parametrize("wrong", ["a window that is too short by a token", "documents that see each other"])
def test_what_is_wrong_is_noticed(wrong):
    case = case_of("mistral", "restarts", "exact", "train", None, "patched")
    batch = case.batches[0]
    assert len(batch.documents[0]) > 1 and "seq_idx" not in batch.inputs
    if wrong.startswith("documents"):
        positions = torch.arange(batch.shape[1]).expand(batch.shape)
        joined = {**batch.inputs, "position_ids": positions}
        other = replace(case, batches=(replace(batch, inputs=joined),))
    else:
        case, other = (replace(case, changes={"sliding_window": window}) for window in (3, 2))
    assert compared(case, found_by(case)) == "equal"
    with pytest.raises(AssertionError, match="errors"):
        compared(case, found_by(other))
