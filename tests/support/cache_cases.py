"""Random calls with a `PatternCache` against a cache that keeps all rows: python -m tests.fuzz --only cache

A case draws a model with random heads and patterns by layer and by head, rows with padding, and what happens to a cache: pieces
of one token, of few and of many, beams, batch rows that are repeated or chosen, copies, tokens that are removed again, and
`generate` in its ways. Some caches come from a `prefill` of the first piece over a simulated ring. Logits and tokens have to
equal those of the same calls with a whole cache.
"""

import copy
import math
import random
from dataclasses import dataclass, replace
from unittest import mock

import torch
from transformers import DynamicCache

import hf_ring_attention as ra
from hf_ring_attention.hf.cache import pattern_layer
from hf_ring_attention.hf.model.types import MIXERS
from hf_ring_attention.hf.model.wrappers import cache_argument

from .cases import random_pattern_of
from .ranks import on_ranks
from .tiny_models import VOCAB, tiny_config, tiny_model
from .tolerance import EXACT, distance, float64

TYPES = (
    "cohere2", "deepseek_v3", "diffllama", "gemma2", "gemma3_text", "gemma3n_text", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "llama", "llama4_text", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
HYBRIDS = ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "olmo_hybrid", "qwen3_next")
UNGROUPED = ("deepseek_v3", "diffllama")
#: Rounding may choose other experts.
EXPERTS = ("deepseek_v3", "gpt_oss", "granitemoehybrid", "jamba", "llama4_text", "mixtral", "qwen3_next")
#: The ways of `generate`, by their names.
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "look-up": {"prompt_lookup_num_tokens": 3},
    "assisted": {},
    "pieces": {"prefill_chunk_size": 3},
}
#: Kernels and dtypes, each with the share of the cases that have it.
DTYPES = {torch.float64: 0.8, torch.float32: 0.1, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class CacheCase:
    """What is computed.

    Attributes:
        changes: of the tiny model's config.
        patterns: by layer; None for all layers.
        lengths: of the pieces, one after the other; a pair is (what happens to the cache, its argument).
        padding: of each batch row, at which tokens of all pieces.
        way: of `generate`, behind the pieces; None without it.
        few: the number of queries from which on a plan computes them.
        ring: the ranks that begin with a prefill; 1 for none.
        every: whether all rows stay.
    """

    seed: int
    model_type: str
    changes: dict
    patterns: dict
    dtype: torch.dtype
    batch: int
    steps: tuple
    padding: str
    way: str | None
    few: int
    kernel: str
    ring: int = 1
    every: bool = False


def draw_cache_case(seed: int) -> CacheCase:
    rng = random.Random(seed)
    model_type = rng.choice(HYBRIDS if rng.random() < 0.2 else TYPES)
    hybrid = model_type in HYBRIDS
    changes = {}
    if not hybrid and model_type not in ("gpt2", "gpt_neox", "gemma3n_text"):
        heads, groups = rng.choice([(2, 1), (4, 1), (4, 2), (4, 4), (8, 2)])
        if model_type not in UNGROUPED:
            changes = {"num_attention_heads": heads, "num_key_value_heads": groups}
    config = tiny_config(model_type, **changes).get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    patterns = {None: random_pattern_of(rng, kv_heads)} if rng.random() < 0.9 else {}
    # Layers that share keys have one pattern.
    if model_type != "gemma3n_text" and rng.random() < 0.5 and patterns:
        layer = rng.randrange(config.num_hidden_layers)
        patterns[layer] = random_pattern_of(rng, kv_heads)
    steps: list = [rng.choice([1, 2, rng.randint(3, 40)])]
    for _ in range(rng.randint(0, 6)):
        steps += [rng.choice([1, 1, rng.randint(2, 6), rng.randint(7, 30)])]
        what = rng.choice(["", "", "reorder", "repeat", "select", "copy", "crop", "record", "restrict"])
        if what and not (hybrid and what in ("crop", "record", "restrict", "repeat", "select")):
            steps.append((what, rng.randrange(2**31)))
    way = rng.choice([None, None, *WAYS])
    if way in ("look-up", "assisted"):
        steps = []  # Transformers gives such ways all tokens again, though a cache holds some.
    if hybrid and way in ("look-up", "assisted"):
        way = "greedy"
    case = CacheCase(
        seed=seed,
        model_type=model_type,
        changes=changes,
        patterns=patterns,
        dtype=torch.float64 if model_type in EXPERTS else rng.choices([*DTYPES], [*DTYPES.values()])[0],
        batch=1 if way in ("look-up", "assisted") else rng.randint(1, 3),
        steps=tuple(steps),
        padding=rng.choice(["", "", "left", "left", "right"]) if not hybrid else "",
        way=way,
        few=rng.choice([64, 64, 4, 1]),
        kernel=rng.choice(["auto", "auto", "auto", "math"]),
    )
    case = replace(case, every=rng.random() < 0.3)
    # Simulated ranks share one generator of samples, and a ring takes no padding between tokens.
    if not steps or case.padding == "right" or way in ("sampling", "several"):
        return case
    return replace(case, ring=rng.choice([1, 2, 4]))


def build(case):
    """The patched model of a case; with layers of large weights."""
    model = tiny_model(case.model_type, "eager", **copy.deepcopy(case.changes)).to(case.dtype)
    for layer, pattern in case.patterns.items():
        ra.patch_config(model.config, pattern, None if layer is None else [layer])
    return ra.patch_model(model, kernel=case.kernel)


class Run:
    """The calls of a case with one cache, and the logits of each."""

    def __init__(self, case, model, cache):
        self.case, self.model, self.cache = case, model, cache
        self.generator = torch.Generator().manual_seed(case.seed)
        self.ids = torch.empty(case.batch, 0, dtype=torch.int64)
        self.mask, self.logits, self.last = self.ids, [], 0
        self.recorded = None  # since which length
        self.recorded_calls = math.inf  # how many more calls are recorded

    def piece(self, n):
        self.recorded_calls -= 1
        self.recorded = None if self.recorded_calls < 0 else self.recorded
        rows = len(self.ids)
        ids, mask = torch.randint(3, VOCAB, (rows, n), generator=self.generator), torch.ones(rows, n, dtype=torch.int64)
        pads, at = torch.randint(0, n, (rows, 1), generator=self.generator), torch.arange(n)
        if self.case.padding == "left" and not self.mask.shape[1]:
            mask = (at >= pads).long()
        if self.case.padding == "right" and n > 1:  # and so padding inside of rows, once others follow
            mask = (at < n - pads).long()
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -n:]
        padded = None if self.mask.all() and self.case.seed % 2 else self.mask
        if self.cache is None:
            self.cache = ra.prefill(self.model, ids, padded, "dynamic" if self.case.every else None)
            self.logits.append(None)
            return
        inputs = {"position_ids": positions, "use_cache": True, **cache_argument(self.cache)}
        self.logits.append(self.model(ids, attention_mask=padded, **inputs).logits[mask.bool()])
        self.last = n

    def happen(self, what, number):
        """Something happens to the cache and to the rows."""
        rows, rng = len(self.ids), random.Random(number)
        if what == "copy":
            self.cache = copy.deepcopy(self.cache)
            return
        if what == "record":
            # A whole cache needs no recording.
            getattr(self.cache, "activate_past_recording", lambda: None)()
            begins = self.recorded is None or self.recorded_calls < math.inf
            self.recorded = self.ids.shape[1] if begins else self.recorded
            self.recorded_calls = math.inf
            return
        if what in ("crop", "restrict"):
            most = self.last if self.recorded is None else self.ids.shape[1] - self.recorded
            count = rng.randint(0, max(0, min(most, self.ids.shape[1] - 1))) if what == "crop" else 0
            if self.few_last or self.recorded is not None or count == 0:
                self.cache.crop(-count)
                length = self.ids.shape[1] - count
                self.ids, self.mask = self.ids[:, :length], self.mask[:, :length]
                if self.recorded is not None:
                    self.recorded, self.recorded_calls = length, 1
                self.last = 0
            return
        chosen = [rng.randrange(rows) for _ in range(rows)]
        if what == "repeat":
            self.cache.batch_repeat_interleave(2)
            chosen = [row for row in range(rows) for _ in range(2)]
        elif what == "select":
            chosen = chosen[: rng.randint(1, rows)]
            self.cache.batch_select_indices(torch.tensor(chosen))
        else:
            self.cache.reorder_cache(torch.tensor(chosen))
        self.ids, self.mask = self.ids[chosen], self.mask[chosen]

    @property
    def few_last(self):
        """Whether the last call was one of few queries behind others, whose rows are all there."""
        return self.last < self.case.few and self.last < self.ids.shape[1] and self.case.kernel != "fused"

    def generate(self, way, assistant):
        """Generates behind the pieces, as another turn."""
        more = torch.randint(3, VOCAB, (len(self.ids), 4), generator=self.generator)
        ids, mask = torch.cat([self.ids, more], 1), torch.cat([self.mask, torch.ones_like(more)], 1)
        ways = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **WAYS[way]}
        rows = max(ways.get("num_beams", 1), ways.get("num_return_sequences", 1))
        if rows > 1 and self.ids.shape[1]:
            self.cache.reorder_cache(torch.arange(len(ids)).repeat_interleave(rows))
        if way == "assisted":
            ways["assistant_model"] = assistant
        ways |= {"return_dict_in_generate": True, "output_logits": True, **cache_argument(self.cache)}
        torch.manual_seed(self.case.seed)
        output = self.model.generate(ids, attention_mask=mask, **ways)
        self.logits.append(torch.stack(output.logits))
        self.tokens = output.sequences

    def all(self, assistant):
        for step in self.case.steps:
            if isinstance(step, int):
                self.piece(step)
            else:
                self.happen(*step)
        if self.case.way is not None:
            self.generate(self.case.way, assistant)
        return self


REFUSALS = (ValueError, NotImplementedError, RuntimeError)


def prefilled_runs(case):
    """The calls on each rank of a ring, which begin with a prefill."""

    def work(ring, model):
        with torch.no_grad():
            return Run(case, model, None).all(None)

    return on_ranks(work, lambda: build(case), case.ring, kernel=case.kernel, layout=("auto", "zigzag")[case.seed % 2])


def run_cache_case(case):
    """Runs a case with both caches, and returns "equal" or "refused", if both refuse it."""
    few, outcomes = mock.patch.object(pattern_layer, "FEW_QUERIES", case.few), []
    with few, torch.no_grad(), float64(case.dtype == torch.float64):
        model = build(case)
        assistant = tiny_model(case.model_type, "eager", **copy.deepcopy(case.changes)).to(case.dtype)
        # A whole cache keeps all rows, but for states of mixers.
        config = {"config": model.config.get_text_config()} if case.model_type in MIXERS else {}
        for cache in (DynamicCache(**config), ra.PatternCache(model, every_row=case.every)):
            try:
                prefilled = outcomes and case.ring > 1
                outcomes.append(prefilled_runs(case) if prefilled else [Run(case, model, cache).all(assistant)])
            except REFUSALS as refused:
                outcomes.append(refused)
    refusals = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if len(refusals) == 2:
        return "refused"
    assert not refusals, f"only one of the caches refuses it: {outcomes}"
    pieces = sum(isinstance(step, int) for step in case.steps)
    bound = {torch.float64: EXACT, torch.float32: 2e-3, torch.bfloat16: 0.2}[case.dtype]
    [expected], runs = outcomes
    for found in runs:
        for number, (x, y) in enumerate(zip(found.logits, expected.logits, strict=True)):
            x = y if x is None else x
            if case.dtype == torch.float64 or number < pieces:  # Rounding may choose other tokens.
                assert x.shape == y.shape
                error = distance(x.double(), y.double()) if x.numel() else 0.0
                assert error <= bound, f"logits of call {number} are {error} apart"
        if case.way is not None and case.dtype == torch.float64:
            assert torch.equal(found.tokens, expected.tokens), "other tokens"
    return "equal" if case.dtype == torch.float64 else "rounded"
