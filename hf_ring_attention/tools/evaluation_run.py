"""Runs an evaluation from a command line: loads what was named, opens the folder of the report, and writes it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from ..cost.models import attention_of_model
from ..evaluation.bootstrap import DRAWS
from ..evaluation.evaluator import Evaluator
from ..evaluation.inputs import EvaluationInputs
from ..evaluation.jobs import SCORING, EvaluationPlan, Job, jobs_of, task_notes
from ..evaluation.journal import Journal, journal_of
from ..evaluation.progress import progress_bar
from ..evaluation.results import results_of
from ..evaluation.texts import EvaluationText
from ..evaluation.whole_files import write_whole
from ..hf.registration import IMPLEMENTATION
from ..ring.ring import Ring
from .checks.machine import cores_of_process, installed_versions
from .evaluation_report import report_text
from .loading import device_or_best, load_model, load_tokenizer, read_config

RESULTS_FILE, REPORT_FILE = "results.json", "report.md"


@dataclass(frozen=True)
class EvaluationRequest:
    """What the command line asks for.

    Attributes:
        ring_size: processes that share each sequence; None for all of them.
        device: "cpu" or "cuda"; None for the latter if there is one.
        trust_remote_code: whether the code runs that the model brings.
    """

    model: str
    texts: tuple[EvaluationText, ...]
    plan: EvaluationPlan
    output: Path
    ring_size: int | None
    layout: Any
    transport: Any
    dtype: str
    device: str | None
    trust_remote_code: bool


def make_ring(request: EvaluationRequest) -> tuple[Ring, Any]:
    """Returns the ring of this process, and the device that it computes on.

    Raises:
        ValueError: processes that do not form rings of this size, or a transport that cannot serve them.
    """
    where = device_or_best(request.device)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    options = {"layout": request.layout, "transport": request.transport}
    if processes == 1:
        if request.ring_size not in (None, 1):
            raise ValueError(
                f"--ring-size {request.ring_size}: there is 1 process. Start {request.ring_size} or a multiple, with torchrun "
                f"--nproc-per-node {request.ring_size} -m hf_ring_attention evaluate, or leave the option out"
            )
        return Ring(**options), where
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=where == "cpu")
    return Ring.from_accelerator(accelerator, request.ring_size or processes, **options), accelerator.device


def stamp_of(model: str) -> str:
    """Returns what tells weights from others: of a folder names, sizes and times of files, of the hub the commit."""
    folder = Path(model)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model, "config.json")
        return f"commit {Path(cached).parent.name} of the hub" if isinstance(cached, str) else "of the hub"
    stamps = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()) if path.is_file()
    ]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def _machine(device: Any, processes: int) -> str:
    cuda = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"a CPU of {cores_of_process()} cores"
    return f"{name}, {processes} process{'es' * (processes > 1)} of {torch.get_num_threads()} thread(s)"


class EvaluationRun:
    """A run of `hf-ring-attention evaluate` on this process, and its report.

    Raises:
        ValueError: on every process, what cannot be evaluated.
        OSError: a folder that cannot be written to.
    """

    def __init__(self, request: EvaluationRequest) -> None:
        self.request, self.plan = request, request.plan
        self.config = read_config(request.model, trust=request.trust_remote_code)
        text_config = self.config.get_text_config()
        self.inputs = EvaluationInputs(
            load_tokenizer(request.model, trust=request.trust_remote_code),
            request.texts,
            self.plan,
            positions=getattr(text_config, "max_position_embeddings", None),
            own_pattern=getattr(text_config, IMPLEMENTATION, None) is not None,
        )
        self.flop_share = {
            name: {
                str(length): attention_of_model(self.config, request.model, self.inputs.patterns.get(name)).flop_share(
                    length
                )
                for length in self.plan.lengths
            }
            for name in self.plan.patterns
        }
        self.ring, self.device = make_ring(request)
        self.notes = task_notes(self.plan, self.inputs.names, str(self.inputs.words), self.inputs.opening)
        #: The main process writes.
        self.main = self.ring.rank == 0 and self.ring.dp_rank == 0

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the figures, by which a folder knows its run again."""
        return {
            "model": self.request.model,
            "files of the model": stamp_of(self.request.model),
            "dtype": self.request.dtype,
            **self.plan.to_dict(),
            "what the patterns stand for": self.inputs.texts_of_patterns,
            "texts open with": self.inputs.opening,
            "texts": [[text.name, text.checksum] for text in self.inputs.texts],
            "words": str(self.inputs.words),
            "package versions": installed_versions(),
        }

    def launch(self) -> dict[str, Any]:
        """Returns what is told of this start."""
        processes = self.ring.world_size * self.ring.dp_size
        return {
            "command": shlex.join(["hf-ring-attention", *sys.argv[1:]]),
            "date": time.time(),
            "machine": _machine(self.device, processes),
            "processes": processes,
            "ring_size": self.ring.world_size,
            "transport": self.request.transport,
        }

    def run(self) -> dict[str, Any] | None:
        """Computes what the folder lacks and writes the report; returns the results on the main process."""
        with ExitStack() as stack:
            journal = None
            with self.ring.agreement("opening the folder of an evaluation", everywhere=True):
                if self.main:
                    journal = stack.enter_context(journal_of(self.request.output, self.settings, self.launch()))
            trust = self.request.trust_remote_code
            model = load_model(self.request.model, self.request.dtype, self.device, trust=trust)
            evaluator = Evaluator(model, self.inputs, self.ring)
            if journal is None:
                evaluator.run(None)
                return None
            bar, before = stack.enter_context(progress_bar("evaluating", unit="job")), None

            def tell(done: int, total: int, job: Job) -> None:
                nonlocal before
                bar.total = total
                bar.set_description(f"{job.task} {job.length} {job.patterns[0]}", refresh=False)
                bar.update(done - bar.n)
                if before not in (None, job.task) and journal.records:
                    self.write(journal, pictures={})
                before = job.task

            evaluator.run(journal, tell)
            return self.write_with_pictures(journal)

    def results(self, journal: Journal) -> dict[str, Any]:
        """Returns what results.json holds."""
        first, tasks = journal.launches[0], {task: self.inputs.counts(task) for task in SCORING}
        in_all = sum(len(job.keys) for job in jobs_of(self.plan, tasks))
        versions = installed_versions()
        facts = {
            "config": {
                "model": "ring_dilated",
                "model_args": f"pretrained={self.request.model},dtype={self.request.dtype}",
                "batch_size": self.plan.batch,
                "device": str(self.device),
                "dtype": self.request.dtype,
                "random_seed": self.plan.seed,
                "patterns": list(self.plan.patterns),
                "lengths": list(self.plan.lengths),
                "draws": DRAWS,
                "package_versions": versions,
            },
            "git_hash": None,
            "date": first["date"],
            "transformers_version": versions["transformers"],
            "model_source": "hf",
            "model_name": self.request.model,
            "command": first["command"],
            "machine": first["machine"],
            "launches": journal.launches,
            "complete": len(journal.records) == in_all,
            "records": len(journal.records),
            "records_in_all": in_all,
            "flop_share": self.flop_share,
        }
        return results_of(self.plan, journal.records, facts, self.notes)

    def write(self, journal: Journal, pictures: Mapping[str, str]) -> dict[str, Any]:
        """Writes results.json and report.md of what is there."""
        results = self.results(journal)
        write_whole(self.request.output / RESULTS_FILE, json.dumps(results, indent=1))
        write_whole(self.request.output / REPORT_FILE, report_text(results, pictures))
        return results

    def write_with_pictures(self, journal: Journal) -> dict[str, Any]:
        """Writes the whole report."""
        from .evaluation_plots import plot_evaluation

        return self.write(journal, plot_evaluation(self.results(journal), self.request.output))
