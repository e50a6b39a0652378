"""One layer of attention on a long row, forward and backward: torch's, a window, and both over a ring, without Transformers.

One process:   python recipes/layer.py
A ring of 2:   torchrun --nproc-per-node 2 recipes/layer.py
Eight GPUs:    torchrun --nproc-per-node 8 recipes/layer.py --tokens 262144 --heads 32 --kv-heads 8 --head-dim 128

Each process of a ring holds only its own tokens of the row. The printed memory is a process's peak, less what it held before
it made its tokens. The time is the shortest of two runs. On Linux, times in which other programs kept it waiting are marked.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from arguments import Help, at_least, new_file, pattern_source, token_count
from bench.timing import held_memory, reset_peak, return_memory_at_once

import hf_ring_attention as ra

#: A run is disturbed if its threads waited for a core for more than this share of its time, all together.
DISTURBED = 0.15


def waited() -> float:
    """Returns the seconds that the threads of this process have waited for a core while other threads ran; 0 outside Linux."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # A thread may end meanwhile.
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


def measure(name: str, ring: ra.Ring, tokens: int, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Returns the seconds and the peak memory of a pattern, or of "sdpa", on this process, and whether it was disturbed."""
    held = reset_peak(device.type)
    layout = ring.layout_for(tokens, "exact" if name == "sdpa" else name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def rows(heads: int) -> torch.Tensor:
        shape = 1, heads, layout.local_len, args.head_dim
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    q, k, v = rows(args.heads), rows(args.kv_heads), rows(args.kv_heads)
    dout = torch.randn(q.shape, dtype=dtype, device=device)
    start, before = time.perf_counter(), waited()
    if name == "sdpa":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=args.heads != args.kv_heads)
    else:
        out = ra.ring_attention(q, k, v, pattern=name, ring=ring, layout=layout)
    out.backward(dout)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, held_memory(device.type, peak=True)
    return {"seconds": seconds, "bytes": peak - held, "disturbed": waited() - before > DISTURBED * seconds}


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--tokens", type=token_count(2), default=32768, help="tokens of the row (default 32768)")
    add("--pattern", type=pattern_source, default="window:512+4", help="timed beside exact (default window:512+4)")
    add("--heads", type=at_least(1), default=2, help="query heads (default 2)")
    add("--kv-heads", type=at_least(1), default=1, help="key/value heads (default 1)")
    add("--head-dim", type=at_least(1), default=64, help="size of a head (default 64)")
    add("--json", type=new_file, help="file for the figures of the first process")
    args = parser.parse_args(argv)
    if args.heads % args.kv_heads:
        parser.error(f"argument --heads: {args.heads} does not divide by the {args.kv_heads} of --kv-heads")
    return args


def main() -> None:
    args, accelerator, figures = parse_args(), Accelerator(), []
    ring, device = ra.Ring(), accelerator.device
    return_memory_at_once()
    measure(args.pattern, ring, min(args.tokens, 1024), args, device)  # Connections and kernels are made.
    for name in ["sdpa" if ring.world_size == 1 else "exact", args.pattern]:
        runs = [measure(name, ring, args.tokens, args, device) for _ in range(2)]
        row = {"attention": name, "processes": ring.world_size, **min(runs, key=lambda run: run["seconds"])}
        row["bytes"] = max(run["bytes"] for run in runs)
        where = "1 process" if ring.world_size == 1 else f"ring of {ring.world_size}"
        text = f"{name:<14}{where:<12}{row['seconds']:>7.2f} s{row['bytes'] / 2**20:>7.0f} MiB a process"
        text += "  (busy machine)" * row["disturbed"]
        accelerator.print(text, flush=True)
        figures.append(row)
    if args.json and accelerator.is_main_process:
        args.json.write_text(json.dumps(figures))
    accelerator.end_training()


if __name__ == "__main__":
    with ra.naming_lost_processes():
        main()
