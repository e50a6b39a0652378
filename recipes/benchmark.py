"""Time and memory of attention by pattern, against torch's scaled_dot_product_attention in the same run.

One device:    python recipes/benchmark.py
Small CPU:     python recipes/benchmark.py --tokens 8192 --longnet 512/1,2048/4,8192/16

The floor is the FLOPs: a pattern with 1/12 of exact attention's query-key pairs can be 12 times as fast at most. The
last column of the first table says how much of that is reached. Runs alternate between the two, and medians are shown.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time

import common
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.tools.arguments import (
    at_least,
    check,
    check_heads,
    device,
    missing_extra,
    new_file,
    pattern_text,
)
from hf_ring_attention.tools.benchmarks.harness import peak_memory, reset_peak_memory


def tensors(args, requires_grad=True):
    device = torch.device(args.device)
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, args.dtype)

    def make(heads):
        shape = (1, heads, args.tokens, args.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype, requires_grad=requires_grad)

    return make(args.heads), make(args.kv_heads), make(args.kv_heads), make(args.heads).detach()


def exact(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def timed(function, device):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def forward_backward(attention, q, k, v, dout, device):
    """(forward, backward) seconds."""
    forward, out = timed(lambda: attention(q, k, v), device)
    backward, _ = timed(lambda: out.backward(dout), device)
    for x in (q, k, v):
        x.grad = None
    return forward, backward


def speed(args, patterns, console):
    from rich.progress import track
    from rich.table import Table

    q, k, v, dout = tensors(args)
    runs = {name: [] for name in ["sdpa", *patterns]}
    for number in track(range(args.repeats + 1), "speed", console=console, transient=True):
        for name, found in runs.items():
            pattern = patterns.get(name)
            attention = exact if pattern is None else lambda *x, p=pattern: ra.ring_attention(*x, pattern=p)
            if name == "sdpa" and number == 0 and args.device == "cpu":
                continue  # nothing to warm up there, and it is by far the slowest
            seconds = forward_backward(attention, q, k, v, dout, args.device)
            if number > 0:
                found.append(seconds)
    config = LlamaConfig(num_attention_heads=args.heads, num_key_value_heads=args.kv_heads)
    median = {
        name: (
            statistics.median(forward for forward, _ in found),
            statistics.median(backward for _, backward in found),
        )
        for name, found in runs.items()
    }
    table = Table(title=f"{args.tokens} tokens, {args.heads}/{args.kv_heads} heads x {args.head_dim}, {args.dtype}")
    for heading in ("attention", "forward s", "backward s", "FLOP ratio", "speed-up", "of the floor"):
        table.add_column(heading, justify="left" if heading == "attention" else "right", overflow="fold")
    rows = []
    for name, (forward, backward) in median.items():
        ratio = 1.0 if name == "sdpa" else 1 / common.flop_share(patterns[name], args.tokens, config)
        gain = sum(median["sdpa"]) / (forward + backward)
        rows.append(
            {"attention": name, "forward": forward, "backward": backward, "flop_ratio": ratio, "speed_up": gain}
        )
        table.add_row(name, f"{forward:.3f}", f"{backward:.3f}", f"{ratio:.2f}", f"{gain:.2f}", f"{gain / ratio:.2f}")
    console.print(table)
    return rows


def model_forward(args, console):
    """Exact attention inside a model, against sdpa, at 4096 tokens: what the plugin costs where it changes nothing."""
    from rich.progress import track

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype)).eval()
    ids = torch.randint(0, 1024, (1, 4096), device=args.device)
    seconds = {"sdpa": [], "ring_dilated": []}
    with torch.no_grad():
        for number in track(range(args.model_repeats + 2), "model", console=console, transient=True):
            names = list(seconds) if number % 2 else list(seconds)[::-1]
            for name in names:
                model.set_attn_implementation(name)
                taken, _ = timed(lambda: model(ids, use_cache=False), args.device)
                if number > 1:
                    seconds[name].append(taken)
    ratio = statistics.median(ring / sdpa for sdpa, ring in zip(*seconds.values()))
    console.print(
        f"exact attention in a 4-layer model at 4096 tokens: sdpa {statistics.median(seconds['sdpa']):.3f} s, ring_dilated "
        f"{statistics.median(seconds['ring_dilated']):.3f} s, median of {args.model_repeats} paired ratios {ratio:.3f}"
    )
    return ratio


def decode(args, patterns, console):
    """Seconds a token with `decode_tokens` tokens in the cache of a real model, against sdpa on a copy of the same cache.

    The floor is the bytes: all weights once, and of the cache the keys and values that the pattern shows; Transformers'
    dynamic cache copies itself at each token besides, for every implementation.
    """
    from rich.progress import track
    from rich.table import Table

    model = common.load_model(args.model)
    model.to(args.device, getattr(torch, args.dtype)).eval()
    tokens, rows = args.decode_tokens, []
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), generator=generator).to(args.device)
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        console.print(f"filling a cache with {tokens} tokens")
        cache = model.base_model(ids[:, :tokens], use_cache=True).past_key_values
        for name in track(patterns, "decode", console=console, transient=True):
            ra.patch_config(model.config, patterns[name])
            caches = {"sdpa": copy.deepcopy(cache), "ring_dilated": copy.deepcopy(cache)}
            seconds = {implementation: [] for implementation in caches}
            for number in range(args.decode_repeats + 3):
                for implementation in list(seconds) if number % 2 else list(seconds)[::-1]:
                    model.set_attn_implementation(implementation)
                    step = {"past_key_values": caches[implementation], "use_cache": True}
                    taken, _ = timed(lambda step=step: model(ids[:, -1:], **step), args.device)
                    if number > 2:
                        seconds[implementation].append(taken)
            ratio = statistics.median(ring / sdpa for sdpa, ring in zip(*seconds.values()))
            medians = {implementation: statistics.median(found) for implementation, found in seconds.items()}
            rows.append({"pattern": name, **medians, "ratio": ratio})
    table = Table(title=f"a token with {tokens} in the cache, median of {args.decode_repeats} paired steps")
    for heading in ("pattern", "sdpa, ms", "ring_dilated, ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "pattern" else "right", overflow="fold")
    for row in rows:
        cells = f"{1e3 * row['sdpa']:.1f}", f"{1e3 * row['ring_dilated']:.1f}", f"{row['ratio']:.3f}"
        table.add_row(row["pattern"], *cells)
    console.print(table)
    return rows


def memory(args, patterns, console):
    """Peak bytes of forward and backward, inputs and gradients included, each in a process of its own."""
    from rich.progress import track
    from rich.table import Table

    rows = []
    for name in track(["sdpa", *patterns], "memory", console=console, transient=True):
        command = [sys.executable, __file__, "--peak-of", name, *args.passed]
        rows.append({"attention": name, "bytes": int(subprocess.run(command, check=True, capture_output=True).stdout)})
    table = Table(title=f"peak memory of forward + backward, {args.tokens} tokens")
    for heading in ("attention", "MiB", "of sdpa's"):
        table.add_column(heading, justify="left" if heading == "attention" else "right", overflow="fold")
    for row in rows:
        share = row["bytes"] / rows[0]["bytes"]
        table.add_row(row["attention"], f"{row['bytes'] / 2**20:.0f}", f"{share:.2f}")
    console.print(table)
    return rows


def peak(args, patterns):
    device = torch.device(args.device)
    # What the first kernel calls load is not the attention's.
    small = torch.randn(1, args.kv_heads, 64, args.head_dim, device=device, requires_grad=True)
    exact(small, small, small).sum().backward()
    before = reset_peak_memory(device)
    q, k, v, dout = tensors(args)
    pattern = patterns.get(args.peak_of)
    out = exact(q, k, v) if pattern is None else ra.ring_attention(q, k, v, pattern=pattern)
    out.backward(dout)
    print(peak_memory(device) - before)


PARTS = ("speed", "memory", "model", "decode")


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least(1), default=32768)
    parser.add_argument("--heads", type=at_least(1), default=8)
    parser.add_argument("--kv-heads", type=at_least(1), help="as many as heads, if not given")
    parser.add_argument("--head-dim", type=at_least(1), default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--device", type=device, metavar="{cpu,cuda}", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--longnet", default="2048/1,8192/4,32768/16", help="LENGTH/RATE,... of the LongNet pattern")
    parser.add_argument("--pyramid", default="512,3", help="WINDOW,LEVELS of the pyramid pattern")
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="runs of each, after a first that does not count"
    )
    parser.add_argument("--model-repeats", type=at_least(1), default=15, help="paired runs of the model")
    parser.add_argument("--decode-tokens", type=at_least(1), default=8192, help="tokens in the cache of a real model")
    parser.add_argument("--decode-repeats", type=at_least(1), default=30, help="paired steps")
    parser.add_argument("--model", default=common.BUNDLED, help=f"of the decode part: {common.MODEL_HELP}")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=new_file, help="file for the figures")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.kv_heads = check_heads(parser, args.heads, args.kv_heads)
    for name in ("longnet", "pyramid"):
        check(parser, f"--{name}", pattern_text, f"{name}:{getattr(args, name)}")
    if "decode" in args.only and not args.peak_of:
        check(parser, "--model", common.model_source, args.model)
    missing = missing_extra("the tables", "rich")
    if missing:
        parser.error(missing)
    return args


def main() -> None:
    args = parse_args()
    args.passed = sys.argv[1:]
    names = f"longnet:{args.longnet}", f"pyramid:{args.pyramid}", "exact"
    patterns = {name: ra.Pattern.parse(name) for name in names}
    if args.peak_of:
        peak(args, patterns)
        return
    from rich.console import Console

    console = Console()
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    console.print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    figures = {"machine": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    if "speed" in args.only:
        figures["speed"] = speed(args, {k: v for k, v in patterns.items() if k != "exact"}, console)
    if "memory" in args.only:
        figures["memory"] = memory(args, patterns, console)
    if "model" in args.only:
        figures["model_ratio"] = model_forward(args, console)
    if "decode" in args.only:
        figures["decode"] = decode(args, patterns, console)
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
