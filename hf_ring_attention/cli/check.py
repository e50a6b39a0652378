"""`hf-ring-attention check`: run by the launcher of a long job before that job, it finds in a minute what would go wrong."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from .options import Parser, Refusal, above_zero, at_least, model_source
from .output import stdout_left_alone, wrote_json


def add_check(parser: Parser) -> None:
    add = parser.add_argument
    add("--ranks", metavar="N", type=at_least(1), help="Ranks in a ring (default: all processes).")
    add("--model", metavar="ID_OR_FOLDER", type=model_source, help="The job's model, without its weights.")
    parser.add_pattern("The job's pattern (default: the model's, else exact).")
    text = "Seconds that processes wait for each other (default 60)."
    add("--timeout", metavar="SECONDS", type=above_zero(), default=60.0, help=text)
    parser.add_json()


def check_command(args: Namespace) -> int:
    """Check processes, links and attention before a long job, with its launcher.

    It prints one line for each check that is ok, and ends at the first failure, with status 1. At small sizes, it compares
    attention, a training step and generation with one process.

    Examples:
      hf-ring-attention check --model ./folder
      torchrun --nproc-per-node 8 -m hf_ring_attention check --model ./folder
      torchrun --nproc-per-node 8 -m hf_ring_attention check --ranks 4 \\
          --model Qwen/Qwen3-8B --pattern pyramid:512,3
      accelerate launch --config_file FILE -m hf_ring_attention check
    """
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if args.ranks is not None and count % args.ranks:
        raise Refusal(f"a number that divides the {count} processes was expected, got {args.ranks}", "--ranks")
    from ..transport.lost_processes import naming_lost_processes
    from .checks import CheckRun, Failure

    found: dict[str, str] = {}
    run = CheckRun(args, count, rank)
    try:
        with stdout_left_alone(args.json), naming_lost_processes():
            for text in run.checks():
                found[run.name] = text
                if rank == 0 and args.json != "":
                    print(f"ok  {run.name:18}  {text}", flush=True)
    except (Failure, OSError, RuntimeError, TypeError, ValueError, LookupError) as error:
        if not isinstance(error, Failure) or rank == 0:  # All processes have the same failure.
            print(f"FAILED  {run.name}, on process {rank}: {error}", file=sys.stderr, flush=True)
        if count > 1:
            sys.stdout.flush()
            os._exit(1)  # Threads of a process group that hang would keep it.
        return 1
    if rank == 0:
        wrote_json(found, args.json)
    run.end()
    return 0
