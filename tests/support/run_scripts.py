"""Runs programs one after another on the processes that torchrun started, each in a child that begins afresh.

    torchrun --nproc-per-node 2 tests/support/run_scripts.py FILE:PORT ... alone:FILE

The libraries that take seconds are imported once and children are forked. A child prints to FILE.RANK.out, and its errors to
FILE.RANK.err. `alone:FILE` runs on the first process only, as if nobody had started several.
"""

import contextlib
import os
import runpy
import sys
import traceback

import datasets
import torch
import transformers
import trl

import hf_ring_attention as ra

#: Most of these names load their modules when they are first used.
LIBRARIES = (
    datasets.load_dataset, transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, transformers.AutoTokenizer,
    trl.SFTTrainer, trl.DPOTrainer, ra.RingTrainerMixin, ra.pack_documents, ra.perplexity, ra.prefill, ra.patch_model,
)  # fmt: skip

#: What torchrun tells a process, which a process that was started alone does not have.
TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(script, name):
    """A program's own process: what it prints goes to files, and its exit status is 1 where it raised."""
    with (
        open(f"{name}.out", "w") as out,
        open(f"{name}.err", "w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            sys.argv = [script]
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


def main():
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    # Each program has a store of its own, at a port of its own, as if a launcher had started it.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    statuses = []
    for argument in sys.argv[1:]:
        script, alone = argument.removeprefix("alone:"), argument.startswith("alone:")
        if alone and rank != "0":
            continue
        if not alone:
            script, _, port = script.rpartition(":")
        child = os.fork()
        if not child:
            if alone:
                for key in TOLD:
                    os.environ.pop(key, None)
                name = f"{script}.alone"
            else:
                os.environ["MASTER_PORT"] = port
                name = f"{script}.{rank}"
            os._exit(run(script, name))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
