"""Random cases against what they must give, for as long as there is time: python -m tests.fuzz --minutes 30

Every case follows from a separate number. "attention": calls of a ring, against the definition
(`tests.support.ring_cases`). "fused": the same by the fused kernels in Triton's interpreter, if Triton is installed.
"models": models, batches and rings, against eager attention (`tests.support.random_batches`). "cache": calls with a
`PatternCache`, against a cache of all rows (`tests.support.cache_cases`). "layers": programs that change the output layer
between a call and the use of its logits (`tests.support.changed_layers`). A case that fails prints the line that repeats it
and its error, and the others go on; the exit status is 1 if there was any.
"""

import argparse
import importlib.util
import itertools
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported.

import torch
from tqdm import tqdm
from transformers.utils import logging

from tests.support.cache_cases import draw_cache_case, run_cache_case
from tests.support.changed_layers import Program
from tests.support.random_batches import compared, found_by
from tests.support.random_cases import draw_case
from tests.support.ring_cases import RingCase, draw_fused_case, draw_ring_case

#: What draws a case from its number, and what runs it and returns what came of it.
KINDS = {
    "attention": (draw_ring_case, RingCase.run),
    "models": (draw_case, lambda case: compared(case, found_by(case))),
    "cache": (draw_cache_case, run_cache_case),
    "layers": (Program.draw, Program.run),
}
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    KINDS["fused"] = (draw_fused_case, RingCase.run)


@dataclass
class Report:
    """What came of cases: how many there were by their outcome, and the lines that repeat failures."""

    seed: int
    outcomes: Counter = field(default_factory=Counter)
    failed: list = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self):
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        count = sum(self.outcomes.values()) + len(self.failed)
        return f"{count} cases of seed {self.seed} in {self.seconds:.0f} s: {len(self.failed)} failed ({outcomes})"


def run_many(seed, kinds, minutes=float("inf"), cases=None):
    """Runs cases of these kinds in turn until the minutes or the cases are over, and prints those that fail."""
    report, start = Report(seed), time.perf_counter()
    rng, numbers = random.Random(seed), itertools.count() if cases is None else range(cases)
    often = 0.1 if sys.stderr.isatty() else 30.0  # seconds; a log need not be filled with bars
    bar = tqdm(numbers, desc=f"seed {seed}, 0 failed", unit=" cases", mininterval=often)
    for kind, _ in zip(itertools.cycle(kinds), bar):
        draw, run = KINDS[kind]
        number = rng.randrange(2**31)
        try:
            report.outcomes[f"{run(draw(number))} {kind}"] += 1
        except Exception as error:  # whatever it is, it is told, and the other cases are run
            report.failed.append(f"python -m tests.fuzz --case {kind}:{number}")
            told = "".join(traceback.format_exception_only(error)).strip()[:2000]
            bar.write(f"{report.failed[-1]}\n{told}")
            bar.set_description(f"seed {seed}, {len(report.failed)} failed")
        report.seconds = time.perf_counter() - start
        if report.seconds > minutes * 60:
            break
    bar.close()
    return report


def repeat(name):
    """Runs the case of a name, such as "attention:123", and describes it; it raises what the case does."""
    kind, _, number = name.partition(":")
    draw, run = KINDS[kind]
    case = draw(int(number))
    print(case, flush=True)
    print(run(case))


def main(arguments=None):
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--cases", type=int, help="how many at most")
    parser.add_argument("--seed", type=int, help="decides all cases; drawn and printed by default")
    parser.add_argument("--only", choices=KINDS, help="one kind of cases")
    parser.add_argument("--case", metavar="KIND:NUMBER", help="repeats one case, and describes it")
    options = parser.parse_args(arguments)
    if options.case is not None:
        repeat(options.case)
        return 0
    seed = random.randrange(10**6) if options.seed is None else options.seed
    report = run_many(seed, [options.only] if options.only else list(KINDS), options.minutes, options.cases)
    for line in report.failed:
        print(f"failed: {line}")
    print(report)
    return 1 if report.failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # Those of other libraries would tear the bar; under pytest they are errors.
    sys.exit(main())
