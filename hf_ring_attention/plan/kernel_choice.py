"""The choice of a kernel from plain facts, with its reason; `compute/kernels.py` finds the facts and makes the kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .choices import ASKED_FOR, Decision
from .joins import FLASH_IN_PLACE, sequences_in_place
from .patterns import Pattern
from .plans import TileBatch, plan_rank, tiles_from
from .problem import Problem

#: cuDNN compiles a program for each shape of tiles, and torch keeps all of them, which pays for long tiles that have the same
#: lengths in each call. Older releases refuse fewer than 64 rows.
LONG_TILE, FEWEST_CUDNN_ROWS = 1024, 64
#: One program of the fused kernel reads all keys of a head: with fewer queries there are too few programs for a device.
FEW_QUERIES = 64
#: A window with sinks is four batches of tiles on one rank: the window's triangle and band, and the same of the sinks.
FEW_CALLS = 4
#: The major compute capabilities for which torch takes the implementations of FlashAttention that may replace its own.
FLASH_CAPABILITIES = {"FA3": (9,), "FA4": (9, 10)}
#: FA4 compiles bands for heads of these sizes on both: flash-attn-4 4.0.0b18, for sm_90 and sm_100, forward and backward.
FA4_WIDTHS = (32, 64, 96, 128)

_HALVES = ("float16", "bfloat16")


class TileKinds(NamedTuple):
    """The tiles of a rank's part of a call, as far as kernels differ in them."""

    rows: int = 0  # of the shortest tile of exact attention; 0 for other patterns
    whole_rows: bool = False  # whether one rank holds whole rows, without a cache
    few_queries: bool = False  # whether fewer than FEW_QUERIES queries read keys from a cache
    full_rows: bool = False  # whether each row is one document, so that only the layout decides their lengths
    few_calls: bool = False  # whether they are few kernel calls for FlashAttention: bands, or documents in place
    shapes: tuple[str, ...] = ()  # "causal", "full" or both, of exact attention

    def __str__(self) -> str:
        if self.few_queries:
            return "few queries to a cache"
        of_row = "one document a row, " if self.full_rows else ""
        if self.rows >= LONG_TILE:
            return f"{of_row}full and causal tiles of {LONG_TILE} rows or more"
        if self.rows and self.whole_rows:
            return f"{of_row}{'' if self.few_calls else 'many '}exact documents on one rank"
        return "few shapes of tiles on one rank" if self.few_calls else "tiles of any shape"


#: Tiles that may have any shape.
ANY_TILES = TileKinds()


class DeviceFacts(NamedTuple):
    """The facts of a device and of the installed libraries that decide which kernels run there."""

    type: str
    capability: tuple[int, int] = (0, 0)
    has_flash: bool = False  # whether torch was built with FlashAttention
    has_cudnn: bool = False  # whether torch has cuDNN 9.15.1 or newer
    flash: str | None = None  # the implementation that torch.nn.attention has activated in place of FlashAttention-2
    deterministic: bool = False  # whether torch must use deterministic algorithms
    not_fused: str | None = None  # why the fused kernel cannot run here


class CallFacts(NamedTuple):
    """The facts of a call that decide its kernel."""

    dtype: str
    head_dim: int
    value_dim: int
    has_softcap: bool
    tiles: TileKinds

    def __str__(self) -> str:
        capped = ", capped scores" if self.has_softcap else ""
        return f"{self.tiles}, {self.dtype}, head sizes {self.head_dim} and {self.value_dim}{capped}"


@lru_cache(maxsize=256)
def tile_kinds(problem: Problem, rank: int) -> TileKinds:
    """Returns the kinds of a rank's tiles. With the heads transport, tiles are at least as long as these."""
    held = problem.held
    if held is not None:
        return TileKinds(few_queries=held.num_queries < FEW_QUERIES)
    longest = max((stop - start for row in problem.documents for start, stop in row), default=0)
    whole_rows = problem.layout.world_size == 1
    full_rows = all(row == ((0, problem.layout.seq_len),) for row in problem.documents)
    is_exact = problem.pattern.within(longest) == Pattern.exact()
    few_calls = whole_rows and _are_few_calls(problem, tiles_from(problem, rank, rank))
    if not is_exact:
        return TileKinds(0, whole_rows, False, full_rows, few_calls)
    plan = plan_rank(problem, rank)
    tiles = plan.own + plan.remote
    rows = (0 if batch.shape == "band" else min(batch.num_queries, batch.num_keys) for batch in tiles)
    shapes = tuple(sorted({batch.shape for batch in tiles}))
    return TileKinds(min(rows, default=0), whole_rows, False, full_rows, few_calls, shapes)


def _are_few_calls(problem: Problem, batches: tuple[TileBatch, ...]) -> bool:
    """Returns whether FlashAttention takes the tiles of a rank with whole rows in few calls, without copies of rows."""
    count, heads = len(problem.documents), range(problem.num_kv_heads)
    if sequences_in_place(batches, FLASH_IN_PLACE, count, problem.layout.local_len, heads) is not None:
        return True
    return len(batches) <= FEW_CALLS and all(batch.as_one(count, heads) is not None for batch in batches)


def reason_against(name: str, device: DeviceFacts, call: CallFacts) -> str | None:
    """Returns why a kernel cannot compute a call; None if it can."""
    widest, capability, is_old = max(call.head_dim, call.value_dim), device.capability, device.capability < (8, 0)
    and_has = f"and the device has {capability[0]}.{capability[1]}"
    needs_new = f"needs compute capability 8.0, {and_has}"
    majors = FLASH_CAPABILITIES.get(device.flash or "", capability[:1])
    needs_other = f"{device.flash} needs compute capability {' or '.join(f'{x}.x' for x in majors)}, {and_has}"
    # FlashAttention-2 has no backward pass for some widths on some devices.
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    odd_widths = bool(call.head_dim % 8 or call.value_dim % 8) or widest > 128
    no_bfloat16 = is_old and call.dtype == "bfloat16"
    is_short = call.tiles.rows < FEWEST_CUDNN_ROWS
    off_gpu = device.type != "cuda", f"it computes on CUDA devices, and the tensors are on {device.type}"
    capped = call.has_softcap, "it does not cap scores"
    dtype = f"it does not compute {call.dtype}"
    of_halves = [off_gpu, capped, (call.dtype not in _HALVES, dtype), (is_old, f"it {needs_new}")]
    obstacles: dict[str, list[tuple[bool, str | None]]] = {
        "cpu_flash": [capped],
        "fused": [
            (device.deterministic, "it adds gradients in any order, and torch.use_deterministic_algorithms is on"),
            (device.not_fused is not None, device.not_fused),
        ],
        "flash": [
            *of_halves,
            (capability[0] not in majors, needs_other),
            (not device.has_flash, "torch was built without it"),
            (widest > 256, f"its heads have at most 256 numbers, and these have {widest}"),
            (is_small and 192 < widest <= 224, f"it has no backward pass for heads of {widest} numbers on this device"),
        ],
        "cudnn": [
            *of_halves,
            # Older ones access memory beyond tiles of other lengths than multiples of 128 (pytorch#169849).
            (not device.has_cudnn, "torch has no cuDNN 9.15.1 or newer"),
            (device.deterministic, "it is not deterministic, and torch.use_deterministic_algorithms is on"),
            (odd_widths, f"head sizes must be multiples of 8 up to 128, got {call.head_dim} and {call.value_dim}"),
            (is_short, f"it takes full and causal tiles of {FEWEST_CUDNN_ROWS} rows or more, and some tiles are not"),
        ],
        "efficient": [off_gpu, capped, (call.dtype == "float64", dtype), (no_bfloat16, f"bfloat16 {needs_new}")],
    }
    return next((reason for holds, reason in obstacles.get(name, ()) if holds), None)


def kernel_candidates(setting: str, device: DeviceFacts, call: CallFacts) -> list[Decision]:
    """Returns the kernels that can compute a call, the fastest first: with "auto" several, else the one that was asked for.

    Raises:
        ValueError: the kernel that was asked for cannot compute the call.
    """
    found: dict[str, Decision] = {}
    refused: list[str] = []
    for name, reason in _by_speed(device, call) if setting == "auto" else [(setting, ASKED_FOR)]:
        against = reason_against(name, device, call)
        if against is not None and setting != "auto":
            raise ValueError(f"kernel={setting!r} cannot compute this call: {against}; use kernel='auto'")
        if against is None and setting == "auto" and name == "fused" and call.tiles.few_queries:
            against = f"fewer than {FEW_QUERIES} queries to a cache leave most of the device idle"
        if against is not None:
            refused.append(f"not {name}: {against}")
        else:
            found.setdefault(name, Decision(name, "; ".join([reason, *dict.fromkeys(refused)])))
    return [*found.values()]


def _by_speed(device: DeviceFacts, call: CallFacts) -> list[tuple[str, str]]:
    """Returns kernels and the reasons for them, the fastest first; not all of them can compute the call.

    All of this was measured on an H100, but for implementations that replace FlashAttention-2: these come first since the
    user activated them. For windows and packed rows they are not measured on a GPU yet; `make gpu` times them.
    """
    half = call.dtype in _HALVES
    is_long = half and call.tiles.rows >= LONG_TILE
    # Elsewhere torch too prefers flash. cuDNN compiles a program for each new shape.
    for_cudnn = is_long and call.tiles.full_rows and device.capability[0] in (9, 10)
    # Flash takes a launch for each length of the documents of packed rows.
    one_document = half and call.tiles.rows > 0 and call.tiles.full_rows and (is_long or call.tiles.whole_rows)
    by_activated = is_long or one_document or (half and call.tiles.few_calls and _takes_bands(device, call))
    activated = device.flash is not None and by_activated
    on_gpu = [
        (activated, "flash", f"torch.nn.attention has activated {device.flash}"),
        (for_cudnn, "cudnn", f"all tiles are full or causal, of {LONG_TILE} rows or more"),
        (one_document, "flash", "its calls take long tiles, or whole rows in place"),
        (half, "fused", "one launch takes all tiles"),
        (half, "flash", "it takes bands by its windows, and the documents of whole rows in place"),
        (True, "efficient", "it takes bands in stretches"),
        (call.dtype == "float32", "fused", "one launch takes all tiles"),  # Its blocks of float32 are small.
    ]
    on_cpu = [(True, "cpu_flash", "it is torch's flash attention for CPUs")]
    table = [*{"cuda": on_gpu, "cpu": on_cpu}.get(device.type, ()), (True, "math", "it computes everything")]
    return [(name, reason) for applies, name, reason in table if applies]


def _takes_bands(device: DeviceFacts, call: CallFacts) -> bool:
    """Returns whether the implementation in the place of FlashAttention-2 is known to take windows and packed rows."""
    widest = max(call.head_dim, call.value_dim)
    return device.flash == "FA3" or (device.flash == "FA4" and widest in FA4_WIDTHS)
