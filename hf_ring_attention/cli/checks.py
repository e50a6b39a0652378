"""The checks of `hf-ring-attention check`. Every process runs each of them, and they exchange what they found.

The first failure ends the run, since its cause would make later checks fail too. A process that is gone or stalls is named by
the others (`transport/lost_processes.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import socket
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from ..compute.reference import reference_attention
from ..cost.models import attention_of_model, load_config
from ..hf.cache.prefill import prefill
from ..hf.model.config import layer_pattern, patterns_of_layers
from ..hf.model.models import why_not
from ..hf.model.support import check_config
from ..hf.model.wrappers import cache_argument
from ..hf.patch import patch_model
from ..plan.heads import heads_fit
from ..plan.layouts import LayoutKind
from ..plan.patterns import Pattern
from ..plan.traffic import TransportKind, short_bytes
from ..ring.attention import ring_attention
from ..ring.ring import Ring
from .output import plural, short_seconds

#: Packages, and environment variables by the beginnings of their names, that decide results or speed.
_PACKAGES = ("hf-ring-attention", "torch", "transformers", "accelerate", "numpy")
_DECISIVE = (
    "OMP_", "MKL_", "NVIDIA_", "CUDA_L", "CUBLAS_", "NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "ACCELERATE_MIXED",
)  # fmt: skip
#: Parts of the names of variables that may differ between hosts.
_OF_A_HOST = ("IFNAME", "_HCA", "DEBUG", "TOPO_FILE")
#: A pattern that shows something of all that is sparse in a row of a few tokens.
_SPARSE = "pyramid:4,2"
#: The bound of errors in float64, relative to the largest number; in other dtypes, how many times the definition's own error.
_IN_FLOAT64, _FACTOR = 1e-12, 8
#: How far a tiny model may be from one process. A wrong or missing key moves it a hundred times as far.
_FAR = 1e-4
_SMALL, _LARGE = 8, 4 << 20  # bytes of messages
_NEW_TOKENS = 3


class Failure(Exception):
    """Ends the check on all processes; its message has the cause and the remedy."""


@dataclass
class CheckRun:
    """One run of all checks on this process."""

    options: Namespace
    count: int  # of processes
    rank: int
    name: str = "launch"  # of the check under way
    device: Any = None  # from "launch" on
    group: Any = None  # of a ring, None for all processes
    pattern: Any = None  # of the job, from "model" on
    patterns: Any = ()  # also those of its layers, and a sparse one
    heads: tuple[int, ...] = ()  # query heads, key/value heads, and the sizes of keys and values
    dtype: Any = None

    @property
    def size(self) -> int:
        """The ranks of a ring."""
        return self.options.ranks or self.count

    def checks(self) -> Iterator[str]:
        """Yields the figures of each check, whose name is `name` by then, once all processes agree."""
        steps: list[tuple[str, Any]] = [("launch", self._launch), ("versions", self._versions)]
        steps += [("environment", self._environment), *([("links", self._links)] if self.size > 1 else [])]
        steps += [("model", self._model)]
        transports = ["local"] if self.size == 1 else [x for x in get_args(TransportKind) if x not in ("auto", "local")]
        steps += [(f"oracle {x}", lambda transport=x: self._oracle(transport)) for x in transports]
        for name, check in [*steps, ("train step", self._train_step), ("generation", self._generation)]:
            self.name = name
            text = check()
            if text is not None:
                yield text

    def end(self) -> None:
        """Leaves the other processes."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def of_all(self, x: Any) -> list[Any]:
        """Returns the values of all processes."""
        found = [x] * self.count
        if self.count > 1:
            dist.all_gather_object(found, x)
        return found

    def alike(self, values: dict[str, Any], remedy: str) -> None:
        """Raises for a value that differs between processes."""
        first, *others = self.of_all(values)
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise Failure(
                        f"{name} is {other.get(name)} on process {rank} and {first.get(name)} on process 0: {remedy}"
                    )

    def _launch(self) -> str:
        cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        if not cpu and local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} needs more than {torch.cuda.device_count()} GPUs: start one process per GPU"
            )
        state = PartialState(cpu=cpu, timeout=timedelta(seconds=self.options.timeout))
        self.device = state.device
        self.group = dist.new_subgroups(group_size=self.size)[0] if 1 < self.size < self.count else None
        machines = self.of_all((socket.gethostname(), str(self.device)))
        devices = [x for x in machines if not x[1].startswith("cpu")]
        if len(devices) not in (0, len(machines)):
            raise Failure(
                f"some processes found no GPU: {machines}: repair that driver, or set ACCELERATE_USE_CPU=true on all"
            )
        if len({*devices}) < len(devices):
            raise Failure(f"processes share a GPU: {machines}: start one process per GPU, by LOCAL_RANK")
        hosts, rings = plural(len({host for host, _ in machines}), "host"), plural(self.count // self.size, "ring")
        name = torch.cuda.get_device_name() if devices else f"{platform.machine()} CPU"
        processes = f"{self.count} process{'es' * (self.count > 1)}"
        return f"{processes} on {hosts}, {name}, {rings} of {self.size}"

    def _versions(self) -> str:
        values: dict[str, Any] = {"python": platform.python_version()}
        for package in _PACKAGES:
            with suppress(PackageNotFoundError):
                values[package] = version(package)
        self.alike(values, "install the same on all hosts")
        return ", ".join(f"{name} {value}" for name, value in values.items())

    def _environment(self) -> str:
        names = [x for x in sorted(os.environ) if x.startswith(_DECISIVE) and not any(part in x for part in _OF_A_HOST)]
        values = {name: os.environ[name] for name in names}
        self.alike(
            values | {"torch's threads": torch.get_num_threads()}, "set one value on all before the launcher starts"
        )
        shown = [f"{name}={value}" for name, value in values.items()] or ["no variable set"]
        return ", ".join([plural(torch.get_num_threads(), "thread"), *shown])

    def _links(self) -> str:
        """Measures messages to the next rank, one link of a ring after the other."""
        place, first = self.rank % self.size, self.rank // self.size * self.size
        texts = []
        for length in (_SMALL, _LARGE):
            message, seconds = torch.zeros(length, dtype=torch.uint8, device=self.device), [0.0]
            for number in range(self.size):
                here, there = (first + x % self.size for x in (number, number + 1))
                for _ in range(6) if self.rank in (here, there) else ():
                    start = time.perf_counter()
                    for sender, receiver in ((here, there), (there, here)):
                        if self.rank == sender:
                            dist.send(message, receiver)
                        else:
                            dist.recv(message, sender)
                    message[0].item()  # On a GPU, it waits for the message.
                    seconds += [(time.perf_counter() - start) / 2] if number == place else []
            times = self.of_all(statistics.median(seconds[2:]))  # The first message also connects.
            usual, slowest = statistics.median(times), max(times)
            texts.append(f"{short_bytes(length)} in {short_seconds(usual)}, slowest {short_seconds(slowest)}")
            texts[-1] += f" from process {times.index(slowest)}"
        return "; ".join(texts)

    def _model(self) -> str:
        name = self.options.model
        config: PretrainedConfig = LlamaConfig() if name is None else load_config(name)
        text = config.get_text_config()
        check_config(text)
        if reason := why_not(config.model_type, self.size):
            raise NotImplementedError(reason)
        digest = hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()
        self.alike({"digest of the config": digest}, "copy the same folder to all hosts")
        pattern = Pattern.parse(self.options.pattern or str(layer_pattern(text, None)))
        patterns = {} if self.options.pattern else patterns_of_layers(text)
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
        heads = 2 * self.size, self.size, 16, 16
        if name is not None:
            with suppress(ValueError):  # The layers differ.
                attention = attention_of_model(config, name)
                heads = attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.value_dim
        self.pattern, self.dtype, self.heads = pattern, dtype, heads
        self.patterns = [*dict.fromkeys((pattern, Pattern.parse(_SPARSE), *patterns.values()))]
        of_layers = f", and {plural(len({*patterns.values()}), 'pattern')} of single layers" if patterns else ""
        what = "a tiny llama" if name is None else f"{name}: {config.model_type}"
        return f"{what}, {str(dtype).removeprefix('torch.')}, pattern {pattern}{of_layers}"

    def ring(self, **settings: Any) -> Ring:
        """Makes a ring of this process's group."""
        return Ring.alone() if self.size == 1 else Ring(self.group, **settings)

    def _oracle(self, transport: str) -> str | None:
        """Compares outputs and all gradients with the definition, in each layout, in float64 and in the job's dtype."""
        if transport == "heads" and not heads_fit(self.heads[0], self.heads[1], self.size):
            return None
        tokens, worst = max(50, 2 * self.size + 5), 0.0
        for pattern, kind, dtype in itertools.product(
            self.patterns, get_args(LayoutKind), dict.fromkeys((torch.float64, self.dtype))
        ):
            documents: Any = (((0, tokens),),)
            if kind == "documents":
                documents = (tuple(itertools.pairwise([0, tokens // 3, tokens // 2, tokens - 2])), *documents)
            whole = _random_tensors(self.heads, len(documents), tokens, dtype)

            def by_definition(computed_in: torch.dtype, whole: Any = whole, call: Any = (pattern, documents)) -> Any:
                *leaves, dout = (x.to(computed_in).detach().requires_grad_() for x in whole)
                out, _ = reference_attention(*leaves, pattern=call[0], documents=call[1], dtype=computed_in)
                return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]

            expected, bound = by_definition(torch.float64), _IN_FLOAT64
            if dtype != torch.float64:
                bound = _FACTOR * (max(_errors(by_definition(dtype), expected, expected)) + torch.finfo(dtype).eps)
            ring = self.ring(layout=kind, transport=transport)
            layout = ring.layout_for(tokens, pattern, documents)
            *leaves, dout = (ring.shard(x, layout, dim=2).to(self.device).detach().requires_grad_() for x in whole)
            out: Any = ring_attention(*leaves, pattern=pattern, ring=ring, layout=layout, documents=documents)
            found = [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]
            errors = _errors(found, [ring.shard(x, layout, dim=2) for x in expected], expected)
            # A wrong output makes the gradients of other ranks wrong too, so it is judged before.
            for error, what in zip(errors, ("attention", "gradients of attention")):
                self._judge(
                    error, bound, f"{what} by {pattern} in {layout.kind}, {dtype}: {{:.1e}} from the definition"
                )
            worst = max(worst, max(errors) / bound)
        (kernel,) = ring.kernels().values()  # of the last case, in the job's dtype
        return f"outputs and gradients off by at most {worst:.0%} of their bounds; kernel {kernel.choice}"

    def _judge(self, error: float, bound: float, text: str) -> None:
        """Raises for an error beyond its bound on any process, also for a NaN."""
        errors = self.of_all(error)
        wrong = [rank for rank, x in enumerate(errors) if not x <= bound]
        if wrong:
            where = f"process{'es' * (len(wrong) > 1)} {', '.join(map(str, wrong[:8]))}"
            raise Failure(
                f"{text.format(errors[wrong[0]])} on {where}: do not train, run `make test` there, and report this"
            )

    def _models(self) -> tuple[list[Any], Tensor]:
        """Returns a tiny Llama over the ring and on this process, in float64 with equal weights; and two rows of tokens."""
        heads, models = self.pattern.num_kv_heads or 2, []
        sizes: Any = {"hidden_size": 16 * heads, "num_attention_heads": 2 * heads, "num_key_value_heads": heads}
        sizes |= {"vocab_size": 97, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
        config = LlamaConfig(**sizes)
        for ring in (self.ring(), Ring.alone()):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model: Any = LlamaForCausalLM(config).eval()
            models.append(patch_model(model.to(self.device, torch.float64), self.pattern, ring))
        generator = torch.Generator().manual_seed(1)
        return models, torch.randint(3, 97, (2, max(20, 2 * self.size + 3)), generator=generator).to(self.device)

    def _train_step(self) -> str:
        (model, whole), ids = self._models()
        mask = torch.ones_like(ids)
        mask[1, -ids.shape[1] // 3 :] = 0
        batch, results = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}, []
        for one in (model, whole):
            loss = one(input_ids=ids, **batch, use_cache=False).loss
            loss.backward()
            gradients = [x.grad for x in one.parameters()]
            for gradient in gradients if one is model and self.count > 1 else ():
                dist.all_reduce(gradient)
                gradient /= self.count
            results.append([loss.detach(), *gradients])
        return self._compared(results[0], results[1], f"loss {results[0][0]:.4f}")

    def _generation(self) -> str:
        (model, whole), ids = self._models()
        options: Any = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
        options |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
        # Without a cache, an error in caches shows.
        ways: Any = (model, cache_argument(prefill(model, ids[:, :-2]))), (whole, {"use_cache": False})
        found = [torch.stack(one.generate(ids, **options, **way).logits, 1) for one, way in ways]
        return self._compared(found[:1], found[1:], f"{_NEW_TOKENS} tokens after a prefill")

    def _compared(self, found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> str:
        far = max(_largest(x - y) / _largest(y) for x, y in zip(found, expected))
        self._judge(far, _FAR, f"{what} of a tiny model: {{:.0e}} from one process's")
        return f"tiny llama: {what}, {far:.0e} from one process's"


def _largest(x: Tensor) -> float:
    """Returns the largest absolute number; infinity for a NaN, which `max` could pass over."""
    return float(x.abs().nan_to_num(nan=float("inf")).max())


def _random_tensors(heads: tuple[int, ...], rows: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k, v and the gradient of the output, the same on every process."""
    generator, (queries, keys, width, value_width) = torch.Generator().manual_seed(0), heads
    sizes = ((queries, width), (keys, width), (keys, value_width), (queries, value_width))
    return [torch.randn(rows, n, tokens, d, generator=generator, dtype=torch.float64).to(dtype) for n, d in sizes]


def _errors(found: list[Tensor], expected: list[Tensor], whole: list[Tensor]) -> tuple[float, float]:
    """Returns the largest error of the output by its largest number, and of gradients by the largest of all."""
    most, *gradients = map(_largest, whole)
    output, *others = (_largest(x - y) for x, y in zip(found, expected))
    return output / most, max(others) / max(gradients)
