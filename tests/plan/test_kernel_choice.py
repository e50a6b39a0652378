"""Which kernel computes a call, from plain facts, each choice with its reason."""

import itertools
import re

import pytest

from hf_ring_attention.plan.kernel_choice import CallFacts, DeviceFacts, TileKinds, kernel_candidates, tile_kinds
from hf_ring_attention.plan.problem import HeldKeys
from tests.support.cases import problem_of
from tests.support.refusals import refused

H100 = {"type": "cuda", "capability": (9, 0), "has_flash": True, "has_cudnn": True}
LONG, SHORT, ROWS = TileKinds(rows=4096, full_rows=True), TileKinds(rows=128), TileKinds(rows=128, whole_rows=True)
LONG_ROWS, LONG_PARTS = TileKinds(rows=4096, full_rows=True, whole_rows=True), TileKinds(rows=4096)
FULL_ROWS, PART_ROWS = TileKinds(rows=128, whole_rows=True, full_rows=True), TileKinds(rows=4096, whole_rows=True)
ANY, FEW = TileKinds(), TileKinds(few_queries=True)
BANDS = TileKinds(whole_rows=True, full_rows=True, few_calls=True)
IN_PLACE = TileKinds(rows=128, whole_rows=True, few_calls=True)


def call(tiles=ANY, dtype="bfloat16", head_dim=128, value_dim=128, softcap=False):
    return CallFacts(dtype, head_dim, value_dim, softcap, tiles)


def candidates(setting, changes, of_call):
    """Of an H100 with changes."""
    return kernel_candidates(setting, DeviceFacts(**H100 | changes), of_call)


def names(changes, of_call, setting="auto"):
    return [decision.choice for decision in candidates(setting, changes, of_call)]


@pytest.mark.parametrize(
    ("changes", "of_call", "want"),
    [
        ({}, call(LONG), "cudnn flash fused efficient math"),
        ({}, call(LONG_ROWS), "cudnn flash fused efficient math"),
        ({}, call(ROWS), "fused flash efficient math"),
        ({}, call(FULL_ROWS), "flash fused efficient math"),
        ({}, call(LONG_PARTS), "fused flash efficient math"),
        ({}, call(PART_ROWS), "fused flash efficient math"),
        ({"deterministic": True}, call(ROWS), "flash efficient math"),
        ({"not_fused": "no compiler"}, call(ROWS), "flash efficient math"),
        ({}, call(SHORT), "fused flash efficient math"),
        ({}, call(ANY), "fused flash efficient math"),
        ({}, call(FEW), "flash efficient math"),
        ({"flash": "FA3"}, call(LONG), "flash cudnn fused efficient math"),
        ({"capability": (10, 3)}, call(LONG), "cudnn flash fused efficient math"),
        *(({"capability": x}, call(LONG), "flash fused efficient math") for x in ((8, 0), (8, 9), (12, 0))),
        ({"flash": "FA3"}, call(LONG_PARTS), "flash fused efficient math"),
        *(({"flash": "FA3"}, call(tiles), "fused flash efficient math") for tiles in (ANY, ROWS)),
        # Bands of one document a row, and documents in place, if an activated implementation is known to take them.
        *(({}, call(tiles), "fused flash efficient math") for tiles in (BANDS, IN_PLACE)),
        *(
            ({"flash": name, "capability": capability}, call(tiles), "flash fused efficient math")
            for name, capability in (("FA3", (9, 0)), ("FA4", (9, 0)), ("FA4", (10, 0)))
            for tiles in (BANDS, IN_PLACE)
        ),
        ({"flash": "FA4"}, call(BANDS, head_dim=192), "fused flash efficient math"),
        ({"flash": "FA4"}, call(IN_PLACE, value_dim=80, head_dim=80), "fused flash efficient math"),
        ({"flash": "FA3"}, call(BANDS, head_dim=192), "flash fused efficient math"),
        ({"flash": "other"}, call(BANDS), "fused flash efficient math"),
        ({"flash": "FA4"}, call(BANDS, "float32"), "efficient fused math"),
        ({"flash": "FA4"}, call(BANDS, softcap=True), "fused math"),
        ({"flash": "FA4", "deterministic": True}, call(BANDS), "flash efficient math"),
        # torch refuses these implementations on other devices.
        ({"flash": "FA3", "capability": (10, 0)}, call(LONG), "cudnn fused efficient math"),
        *(({"flash": "FA4", "capability": (8, 0)}, call(tiles), "fused efficient math") for tiles in (LONG, BANDS)),
        ({}, call(LONG, softcap=True), "fused math"),
        ({}, call(FEW, softcap=True), "math"),
        ({}, call(LONG, "float32"), "efficient fused math"),
        ({}, call(LONG, "float64"), "math"),
        ({}, call(LONG, head_dim=192), "flash fused efficient math"),
        ({}, call(LONG, value_dim=60), "flash fused efficient math"),
        ({}, call(ROWS, head_dim=512), "fused efficient math"),
        ({"deterministic": True}, call(LONG), "flash efficient math"),
        ({"not_fused": "no compiler"}, call(LONG), "cudnn flash efficient math"),
        ({"not_fused": "no compiler"}, call(ANY), "flash efficient math"),
        ({"not_fused": "no compiler", "has_flash": False}, call(ANY), "efficient math"),
        ({"not_fused": "no compiler", "has_flash": False, "has_cudnn": False}, call(LONG), "efficient math"),
        ({"not_fused": "no compiler"}, call(ANY, softcap=True), "math"),
        ({"capability": (7, 5), "not_fused": "old"}, call(LONG, "float16"), "efficient math"),
        ({"capability": (7, 5), "not_fused": "old"}, call(LONG), "math"),
        ({"capability": (8, 9), "not_fused": "old"}, call(ANY, head_dim=224), "efficient math"),
        ({"type": "cpu"}, call(ANY), "cpu_flash math"),
        ({"type": "cpu"}, call(ANY, "float64"), "cpu_flash math"),
        ({"type": "cpu"}, call(ANY, softcap=True), "math"),
        ({"type": "mps"}, call(ANY, "float32"), "math"),
    ],
)
def test_auto_takes_the_fastest_that_can_compute_the_call(changes, of_call, want):
    assert " ".join(names(changes, of_call)) == want


@pytest.mark.parametrize(
    ("changes", "of_call", "reason"),
    [
        ({}, call(), "^one launch takes all tiles$"),
        ({}, call(LONG), "^all tiles are full or causal, of 1024 rows or more$"),
        ({"not_fused": "no compiler"}, call(), "^it takes bands by its windows.*; not fused: no compiler$"),
        ({}, call(FEW), "not fused: fewer than 64 queries to a cache"),
        ({"flash": "FA3"}, call(LONG), "FA3"),
    ],
)
def test_reasons_name_what_was_refused_before(changes, of_call, reason):
    assert re.search(reason, candidates("auto", changes, of_call)[0].reason)


@pytest.mark.parametrize(
    ("setting", "changes", "of_call", "reason"),
    [
        ("flash", {}, call(softcap=True), "it does not cap scores"),
        ("cudnn", {}, call(LONG, softcap=True), "it does not cap scores"),
        ("flash", {}, call(dtype="float32"), "it does not compute float32"),
        ("efficient", {}, call(dtype="float64"), "it does not compute float64"),
        ("flash", {}, call(head_dim=264), "its heads have at most 256 numbers, and these have 264"),
        ("flash", {"capability": (8, 6)}, call(head_dim=200), "no backward pass for heads of 200 numbers"),
        ("flash", {"capability": (7, 0)}, call(dtype="float16"), "compute capability 8.0, and the device has 7.0"),
        ("efficient", {"capability": (7, 5)}, call(), "bfloat16 needs compute capability 8.0"),
        ("flash", {"has_flash": False}, call(), "torch was built without it"),
        ("flash", {"flash": "FA4", "capability": (12, 0)}, call(), "FA4 needs compute capability 9.x or 10.x, and the"),
        ("cudnn", {"has_cudnn": False}, call(LONG), "torch has no cuDNN 9.15.1 or newer"),
        ("cudnn", {"deterministic": True}, call(LONG), "it is not deterministic"),
        ("cudnn", {}, call(ANY), "full and causal tiles of 64 rows or more"),
        ("cudnn", {}, call(LONG, head_dim=132), "multiples of 8 up to 128, got 132 and 128"),
        ("fused", {"deterministic": True}, call(), "torch.use_deterministic_algorithms is on"),
        ("fused", {"not_fused": "triton is not installed"}, call(), "triton is not installed"),
        *(
            (name, {"type": "cpu"}, call(LONG), "it computes on CUDA devices, and the")
            for name in ("flash", "efficient")
        ),
    ],
)
def test_a_kernel_that_was_asked_for_is_never_replaced(setting, changes, of_call, reason):
    said = refused(reason, candidates, setting, changes, of_call)
    assert said.startswith(f"kernel={setting!r} cannot compute this call: ")


@pytest.mark.parametrize("setting", ["fused", "flash", "cudnn", "efficient", "math"])
def test_a_kernel_that_was_asked_for_is_the_only_one(setting):
    [decision] = candidates(setting, {}, call(SHORT))
    assert (decision.choice, decision.reason) == (setting, "it was asked for")
    assert names({}, call(FEW), "fused") == ["fused"]


def kinds(pattern, seq_len, world_size=1, documents=None, causal=True, held=None, rank=0):
    layout = "zigzag" if world_size > 1 else "contiguous", seq_len, world_size
    return tile_kinds(problem_of(pattern, layout, documents, (4, 2), causal=causal, held=held), rank)


def test_the_kinds_of_tiles():
    causal, full, both = ("causal",), ("full",), ("causal", "full")
    assert kinds("exact", 4096) == (4096, True, False, True, True, causal)
    assert kinds("exact", 4096, causal=False) == (4096, True, False, True, True, full)
    documents = ((0, 1500), (1500, 4000)), ((0, 4096),)
    assert kinds("exact", 4096, documents=documents) == (1500, True, False, False, True, causal)
    assert kinds("exact", 4096, documents=(((0, 10), (10, 4000)),)) == (10, True, False, False, True, causal)
    for rank in range(4):
        # The pieces of the last rank are neighbours.
        assert kinds("exact", 32768, 4, rank=rank) == (8192 if rank == 3 else 4096, False, False, True, False, both)
    # The border of documents is within 100 tokens of the border of a piece.
    assert min(kinds("exact", 32768, 4, (((0, 4196), (4196, 32768)),), rank=rank).rows for rank in range(4)) == 100
    assert kinds("window:4096", 4096) == kinds("exact", 4096)
    assert kinds("branches:segment=8192", 4096) == kinds("exact", 4096)
    others = "window:1024", "window:4092+4", "pyramid:512,3", "longnet:2048/1,all/4", "kv0=exact;kv1=window:512"
    for pattern in others:
        few_calls = pattern.startswith("window")
        assert kinds(pattern, 4096) == (0, True, False, True, few_calls, ())
        assert kinds(pattern, 4096, 4) == (0, False, False, True, False, ())


def test_flash_takes_packed_rows_in_few_calls_in_place():
    """It takes so many documents at once as padding allows; bands of packed rows are a call for each length."""

    def packed(count, seq_len=8192):
        starts = [number * number for number in range(count)]
        return (tuple(itertools.pairwise((*starts, seq_len))),)

    for count, few in ((60, True), (80, False)):
        assert kinds("exact", 8192, documents=packed(count)).few_calls == few
        assert kinds("exact", 8192, documents=packed(count), causal=False).few_calls == few
        assert not kinds("window:8", 8192, documents=packed(count)).few_calls
    assert kinds("window:8", 64, documents=(((0, 32), (32, 64)),)).few_calls  # of one length


def test_few_queries_to_a_cache():
    for num_queries, few in ((1, True), (63, True), (64, False), (4096, False)):
        held = HeldKeys.whole(4096, num_queries, 4096)
        assert kinds("exact", 4096, held=held) == TileKinds(few_queries=few)
