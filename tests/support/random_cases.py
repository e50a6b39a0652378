"""Random cases of models, batches and rings for `random_batches`, each from a separate number."""

import random
from dataclasses import dataclass

import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.model.types import MIXERS
from hf_ring_attention.plan.heads import heads_fit

from .cases import random_pattern
from .random_rows import Batch, Document, random_batch, rows_of
from .releases import what_lacks
from .tiny_models import HEADS, VOCAB, WIDTH, tiny_config

SUPPORTED = {
    model.model_type: model
    for model in ra.supported_models()
    if model.status == "supported" and what_lacks(model.model_type) is None
}
#: Half of the cases are of these.
COMMON = (
    "bert", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "llama", "mistral", "mixtral", "modernbert-decoder", "olmo3", "opt", "phi3", "qwen2", "qwen3", "roberta", "smollm3",
)  # fmt: skip
#: Types whose query and key heads are equally many, and those whose heads stay as they are.
UNGROUPED = {
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3",
    "sarvam_mla", "youtu",
}  # fmt: skip
FIXED_HEADS = {"diffllama", "helium", "mimo_v2_flash"}
#: Types whose layers may be of either kind, in any order.
MIXED_LAYERS = {
    "cohere2", "gemma2", "gemma3_text", "gpt_oss", "modernbert-decoder", "olmo3", "qwen2", "qwen3", "smollm3",
}  # fmt: skip
#: Types with layers of chunks, which Transformers counts from the first token of a row, and this package from a document's.
CHUNKED = {"llama4", "llama4_text"}
#: Types whose window, if any, applies to all layers.
ONE_WINDOW = {"mistral", "mixtral", "phi3", "starcoder2"}
#: Types that number a row's first token behind the id of padding, which is 0 in tiny models.
NUMBERED_BEHIND_PADDING = {
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
#: Types that number tokens by the attention mask, and those that take no position_ids at all.
NUMBERED_BY_MASK = {"opt"}
SELF_NUMBERED = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart",
}  # fmt: skip
#: Types whose outer model makes masks or positions before the inner one is called.
READY_MADE = {"fuyu", "gemma3", "gemma4"}
#: Types whose mixers let padding into their states in eager attention.
LET_PADDING_IN = {"recurrent_gemma"}
#: Types whose loss does not predict next tokens, and that take no position_ids.
WITHOUT_SHIFT = SELF_NUMBERED | {"whisper"}
#: Types whose `generate` does not number rows beside padding.
UNNUMBERED = WITHOUT_SHIFT | {"moss_transcribe_diarize"}
#: Types whose caches Transformers does not make as their configs want them.
CACHELESS = {"hrm_text"}
#: Types whose steps of one token differ from whole rows in Transformers itself, in float64: by 1e-8 (minimax) or 1e-3.
OTHER_STEPS = {"minimax", "nemotron_h", "zamba2"}
#: Types that are also given embeddings instead of tokens.
EMBEDDED = {"gpt2", "gpt_neox", "llama", "mistral", "olmo3", "opt", "qwen3", "smollm3"}


def first_of(model_type: str) -> int:
    """The position id of a row's first token."""
    return 1 if model_type in NUMBERED_BEHIND_PADDING else 0


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the task that is computed with them.

    Attributes:
        task: "train", "generate" or "perplexity".
        changes: of the tiny model's config.
        batches: of one optimizer step; one batch for other tasks.
        patched: by `ra.patch_model`; else the model names "ring_dilated", and its first call patches it.
        ring: (world size, settings of the ring), or None for one process.
        prefilled: whether generation goes on from `ra.prefill`.
        patterns: by layer, None for all layers without a window; {} for the exact one.
        loss: "logits": in float64 from the logits; "model": the model's own, which a ring computes in slices.
        checkpointing: None, or whether it is the reentrant one.
        embeds: float32 embeddings in place of each batch's tokens, or None.
        generated: (new tokens, tokens of the question behind a prefill, further arguments of `generate`).
        before: what happened to the model before: "", "patched" already, or a call that was "refused".
    """

    seed: int
    task: str
    model_type: str
    changes: dict
    dtype: torch.dtype
    batches: tuple[Batch, ...]
    patched: bool
    ring: tuple[int, dict] | None
    prefilled: bool
    patterns: dict
    loss: str
    checkpointing: bool | None
    train: bool
    use_cache: bool | None
    embeds: tuple[torch.Tensor, ...] | None
    generated: tuple[int, int, dict]
    before: str

    @property
    def first(self) -> int:
        """The position id of a row's first token."""
        return first_of(self.model_type)

    @property
    def cache(self) -> dict:
        """The arguments of a forward pass about caches."""
        return {} if self.use_cache is None else {"use_cache": self.use_cache}

    @property
    def refusable(self) -> bool:
        """Whether a refusal is right; every other case has to be computed."""
        ranks = 1 if self.ring is None else self.ring[0]
        told = any(batch.apart for batch in self.batches)
        config = tiny_config(self.model_type, **self.changes).get_text_config()
        windows = getattr(config, "sliding_window", None) is not None or self.model_type in CHUNKED
        return (
            (ranks > 1 and not SUPPORTED[self.model_type].ring)
            # Padding inside of documents, and positions that mean one document or several, as the model has it.
            or any(batch.holes or (batch.as_eager and ranks > 1) for batch in self.batches)
            # Collators that count from 0, for a model that does not.
            or (bool(self.first) and told)
            # Documents, or prefilled rows beside padding, that the model would number wrongly.
            or (self.model_type in SELF_NUMBERED and (told or self.task == "generate"))
            or (self.model_type in UNNUMBERED and self.prefilled)
            # Its mixers keep their state in the model, which no sharded cache goes on from.
            or (self.model_type == "recurrent_gemma" and self.prefilled)
            # Masks or positions that they make themselves, and that do not know the documents.
            or (self.model_type in READY_MADE and told)
            # Its layers share attention that has no number, so none has a pattern of its own.
            or (self.model_type == "zamba" and bool({*self.patterns} - {None}))
            # A cache whose keys are rotated as in shorter rows, or that has dropped keys that a pattern sees.
            or ("rope_parameters" in self.changes and self.prefilled)
            or (self.task == "generate" and bool(self.patterns) and windows)
            or (self.model_type in MIXERS and self.begins_with_one_padded_token)
        )

    @property
    def begins_with_one_padded_token(self) -> bool:
        """Whether a cache is filled one token at a time, and a row begins with padding."""
        mask = self.batches[0].inputs.get("attention_mask")
        if self.task != "generate" or mask is None:
            return False
        first = self.before_question if self.prefilled else self.generated[2].get("prefill_chunk_size")
        return first == 1 and not bool(mask[:, 0].all())

    @property
    def before_question(self) -> int:
        """How many tokens of a row are prefilled."""
        length = self.batches[0].shape[1]
        return length - min(self.generated[1], length - 1)


# ---- drawing


def draw_case(seed: int) -> Case:
    rng = random.Random(seed)
    model_type = rng.choice(COMMON if rng.random() < 0.5 else list(SUPPORTED))
    task = rng.choices(["train", "generate", "perplexity"], [8, 1, 1])[0]
    task = "train" if task == "generate" and model_type in CACHELESS else task
    changes = random_changes(rng, model_type, task)
    by_length, first = "rope_parameters" in changes, first_of(model_type)
    batches = (random_rows(rng),)
    if task == "train":
        count = 1 if by_length else rng.choice([1, 1, 2])
        batches = tuple(random_batch(rng, first, by_length) for _ in range(count))
    ring = random_ring(rng, model_type, changes)
    patched = ring is not None or rng.random() < 0.6
    if model_type in CHUNKED and any(batch.as_eager for batch in batches):
        changes = {**changes, "attention_chunk_size": 512}  # longer than any row
    prefilled = task == "generate" and patched and rng.random() < (0.3 if ring is None else 0.7)
    patterns = random_patterns(rng, model_type, task, changes, batches) if patched else {}
    embeds = random_embeddings(rng, seed, model_type, task, batches)
    how = random_generation(rng, model_type, batches, patterns, prefilled)
    return Case(
        seed=seed,
        task=task,
        model_type=model_type,
        changes=changes,
        # In float32, a small cap of logits makes ties.
        dtype=torch.float64 if rng.random() < 0.9 or changes.get("final_logit_softcapping") == 1 else torch.float32,
        batches=batches,
        patched=patched,
        ring=ring,
        prefilled=prefilled,
        patterns=patterns,
        embeds=embeds,
        generated=(rng.randint(1, 5), rng.randint(1, 3), how),
        before=rng.choice(["", "", "patched", "refused"]) if patched else "",
        **random_training(rng, model_type, task, batches, ring, embeds is not None),
    )


def random_ring(rng, model_type, changes):
    if rng.random() > (0.6 if SUPPORTED[model_type].ring else 0.1):
        return None
    layout = rng.choice(["auto", "contiguous", "zigzag", "documents", "documents"])
    world_size = rng.choice([2, 2, 3, 4, rng.randint(5, 8)])
    ways = [{"transport": transport} for transport in ("auto", "ring", "collective")]
    # Other cases keep the heads of the type, which may not divide among the ranks.
    heads = changes.get("num_attention_heads", 1), changes.get("num_key_value_heads", 1)
    ways += [
        {"transport": "heads", "heads": size}
        for size in range(2, world_size + 1)
        if world_size % size == 0 and heads_fit(*heads, size)
    ]
    return world_size, {"layout": layout, **rng.choice(ways)}


def random_patterns(rng, model_type, task, changes, batches):
    """By layer; none for a case that is computed exactly, as most are."""
    # A cache holds tokens that once were the last, and so saw more keys than in a row without a cache.
    as_they_are = "rope_parameters" in changes or any(batch.as_eager or batch.holes for batch in batches)
    as_they_are = as_they_are or (task == "generate" and model_type in OTHER_STEPS)
    if as_they_are or model_type in SELF_NUMBERED or rng.random() > 0.2:
        return {}
    patterns = {None: random_pattern(rng)}
    if rng.random() < 0.3:
        patterns[rng.randrange(changes.get("num_hidden_layers", 2))] = random_pattern(rng)
    return patterns


def random_embeddings(rng, seed, model_type, task, batches):
    if task != "train" or model_type not in EMBEDDED or rng.random() > 0.15:
        return None
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*batch.shape, WIDTH, generator=generator, dtype=torch.float32) for batch in batches)


def random_generation(rng, model_type, batches, patterns, prefilled):
    """Further arguments of `generate`, of which eager attention goes the same."""
    ways = (
        [{}, {}] if model_type == "minimax" else [{}, {}, {"prefill_chunk_size": 3}]
    )  # It refuses a prompt in pieces.
    if prefilled:  # there is a cache already, beside which Transformers does less
        return rng.choice(ways)
    if model_type not in CHUNKED:
        ways.append({"cache_implementation": "static"})
    if not patterns:  # With patterns, only greedy tokens have an expected result.
        ways.append({"num_beams": 2})
        if batches[0].shape[0] == 1 and model_type not in MIXERS:  # Transformers does not go back to a former state.
            ways.append({"prompt_lookup_num_tokens": 2})
    return rng.choice(ways)


def random_training(rng, model_type, task, batches, ring, embedded):
    """How losses are computed, and in which mode."""
    losses = ["logits"] if model_type in WITHOUT_SHIFT else ["logits", "model"]
    # The reentrant kind finds gradients only if its inputs ask for some, and not of keys that layers share.
    reentrant = not embedded
    checkpointing = rng.choice([False, reentrant]) if task == "train" and rng.random() < 0.25 else None
    if model_type == "gemma3n_text":  # which asks for one number in float32, where backward computes it again
        checkpointing = None
    without_cache = model_type in CACHELESS or any(batch.as_eager for batch in batches)
    cached = not (ring or without_cache or checkpointing is not None) and rng.random() < 0.3
    return {
        "loss": rng.choice(losses),
        "checkpointing": checkpointing,
        "train": checkpointing is not None or rng.random() < 0.4,
        "use_cache": None if cached else False,
    }


def length_dependent(model_type, changes):
    """RoPE whose frequencies depend on the longest row of the batch."""
    if model_type == "llama":
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        return {"max_position_embeddings": 8, "rope_parameters": rope}
    pairs = WIDTH // changes.get("num_attention_heads", HEADS) // 2
    factors = {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    return {"rope_parameters": rope, "original_max_position_embeddings": 16}


def random_changes(rng, model_type, task):
    """Changes of a tiny config that the type allows."""
    config = tiny_config(model_type).get_text_config()
    changes = {}
    if model_type in UNGROUPED:
        heads = rng.choice([2, 4, 8])
        changes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    elif model_type not in FIXED_HEADS and SUPPORTED[model_type].ring and rng.random() < 0.7:
        heads, kv_heads = rng.choice([(2, 1), (2, 2), (4, 1), (4, 4), (8, 2), (8, 4)])
        changes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    window = rng.choice([2, 3, 5, 9, 40] + [1] * (task != "generate"))  # caches of one token keep all of them
    if model_type in MIXED_LAYERS and rng.random() < 0.7:
        kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(rng.randint(1, 3))]
        changes |= {"layer_types": kinds, "num_hidden_layers": len(kinds), "sliding_window": window}
        if hasattr(config, "no_rope_layers"):
            changes["no_rope_layers"] = [rng.randint(0, 1) for _ in kinds]
        if hasattr(config, "use_sliding_window"):
            changes["use_sliding_window"] = True
    elif model_type in ONE_WINDOW:
        changes["sliding_window"] = rng.choice([None, window])
    elif model_type == "moshi":  # whose caches have a window that its masks do not
        changes["sliding_window"] = 40
    elif isinstance(getattr(config, "sliding_window", None), int) and config.sliding_window and rng.random() < 0.5:
        changes["sliding_window"] = window
    if model_type in CHUNKED:
        changes["attention_chunk_size"] = rng.choice([2, 3, 5, 9, 40])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            changes[name] = rng.choice([1.0, 5.0, 30.0])
    if "logits_scaling" in config.to_dict():
        changes["logits_scaling"] = rng.choice([1.0, 1.02, 4.0])
    for name in ("router_jitter_noise", "input_jitter_noise"):  # training adds it at random
        if hasattr(config, name):
            changes[name] = 0.0
    if model_type == "llama":
        changes |= {"attention_bias": rng.random() < 0.5, "tie_word_embeddings": rng.random() < 0.3}
    if model_type in ("llama", "phi3") and rng.random() < 0.1:
        changes |= length_dependent(model_type, changes)
    return changes


def random_rows(rng):
    """Rows of one document each, for generation and perplexity: padded on the left, or not at all."""
    longest, count = rng.choice([4, 9, 20]), rng.randint(1, 3)
    lengths = [rng.randint(2, longest) for _ in range(count)]
    if rng.random() < 0.5:
        lengths = lengths[:1] * count
    ids = [tuple(rng.randrange(3, VOCAB) for _ in range(length)) for length in lengths]
    inputs = rows_of([Document(row, row, {}) for row in ids], "left")
    length = max(lengths)
    documents = [[(length - own, length)] for own in lengths]
    if min(lengths) == length and rng.random() < 0.5:
        del inputs["attention_mask"]
    return Batch("rows", inputs, documents)
