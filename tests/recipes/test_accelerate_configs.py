"""The files of recipes/accelerate say to `accelerate launch` what their comments say, and the one for a CPU runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "accelerate"
KINDS = {"multi_gpu": DistributedType.MULTI_GPU, "use_fsdp": DistributedType.FSDP}
KINDS["use_deepspeed"] = DistributedType.DEEPSPEED
# File: the launcher it chooses, processes, machines, precision.
EXPECTED = {
    "cpu-2.yaml": ("multi_gpu", 2, 1, "no"),
    "one-node-8.yaml": ("multi_gpu", 8, 1, "bf16"),
    "two-nodes-16.yaml": ("multi_gpu", 16, 2, "bf16"),
    "fsdp2.yaml": ("use_fsdp", 8, 1, "bf16"),
    "zero3.yaml": ("use_deepspeed", 8, 1, "bf16"),
}


def validated(name, *options):
    """What `accelerate launch --config_file NAME` would launch, once it has checked it; no GPU is looked for."""
    command = ["--config_file", str(FOLDER / name), *options, "script.py", "--ranks", "8"]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


def test_every_file_is_expected_here():
    assert {file.name for file in FOLDER.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_launch_accepts_the_file(name):
    kind, processes, machines, precision = EXPECTED[name]
    config, args = load_config_from_file(str(FOLDER / name)), validated(name)
    assert config.distributed_type == KINDS[kind]
    assert [other for other in KINDS if getattr(args, other)] == [kind]
    assert (args.num_processes, args.num_machines, args.machine_rank) == (processes, machines, 0)
    assert args.mixed_precision == precision
    assert args.use_cpu is (name == "cpu-2.yaml")
    # Rings shard the sequences; --ranks says over how many processes.
    assert not args.use_parallelism_config and args.parallelism_config_cp_size == 1
    options = vars(launch_command_parser().parse_args(["script.py"]))
    for key, value in {**config.fsdp_config, **config.deepspeed_config}.items():
        assert key in options and getattr(args, key) == value, "a key that no option is named after would be ignored"


SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
size, backend = torch.distributed.get_world_size(), torch.distributed.get_backend()
assert accelerator.num_processes == size == 2
total = accelerator.reduce(torch.ones(1), "sum")
line = f"rank {accelerator.process_index} of {size}, {backend} on {accelerator.device.type}, sum {total.item():.0f}\\n"
print(line, end="", flush=True)  # in one piece: both ranks write to the same pipe
accelerator.end_training()
"""


@pytest.mark.slow
def test_cpu_2_starts_two_gloo_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = dict(os.environ, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / "cpu-2.yaml")]
    # The file asks for port 0 itself; the option keeps tests that run side by side apart should it change.
    command = [*launcher, "--main_process_port", "0", str(script)]
    done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert ranks == [f"rank {rank} of 2, gloo on cpu, sum 2" for rank in range(2)]
