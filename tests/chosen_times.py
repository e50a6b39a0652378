"""`python -m tests.chosen_times` compares the two ways to attend to chosen rows: seconds of CPU time, forward and backward.

Queries spread over a row, and each has chosen some of the keys before it. `compute/chosen.py` decides by the last column: a
gathered key costs as much as this many keys under a mask, for one query head.
"""

import time

import torch

from hf_ring_attention.compute.chosen import UnderMasks, attend_to_chosen, gathering_way

HEADS, QUERIES = 4, 256


def seconds(inputs, indices, gathered):
    """The least seconds of two calls, after one that warms up."""
    times = []
    for _ in range(3):
        start = time.process_time()
        way = gathering_way(*inputs) if gathered else UnderMasks
        attend_to_chosen(*inputs, indices, 0.1, way=way).sum().backward()
        times.append(time.process_time() - start)
    return min(times[1:])


def main():
    torch.set_num_threads(1)
    print(
        "| keys | chosen | key/value heads | masked | gathered | cost of a gathered key |\n|---:|---:|---:|---:|---:|---:|"
    )
    for n in (4096, 16384, 65536):
        for chosen in (128, 512, 2048):
            for kv_heads in (4, 1):
                sizes = ((HEADS, QUERIES, 96), (kv_heads, n, 96), (kv_heads, n, 64))
                inputs = [torch.randn(1, *size, requires_grad=True) for size in sizes]
                last = torch.linspace(chosen, n - 1, QUERIES).long()[:, None]
                scores = torch.rand(1, 1, QUERIES, n).masked_fill(torch.arange(n) > last, -1)
                indices = scores.topk(chosen, -1).indices.int()
                masked, gathered = (seconds(inputs, indices, way) for way in (False, True))
                cost = HEADS / kv_heads * gathered / chosen / (masked / (n / 2))
                print(f"| {n} | {chosen} | {kv_heads} | {masked:.2f} | {gathered:.2f} | {cost:.0f} |", flush=True)


if __name__ == "__main__":
    main()
