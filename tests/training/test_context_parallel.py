"""Accelerate's words for rings: a ParallelismConfig's cp_size, and the dimension "cp" of a device mesh."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import hf_ring_attention as ra
from tests.support.as_gpus import take_cpus_for_gpus
from tests.support.ranks import run_ranks
from tests.support.releases import at_least, needs
from tests.support.tolerance import EXACT
from tests.support.training import assert_equal_runs, documents, padded, process_environment, tiny_llama, trainer

pytestmark = pytest.mark.usefixtures("in_float64")

DATA = {"rows": documents(8, 20, 61, seed=0, prompt=3)}
EVAL_ROWS = documents(5, 20, 61, seed=3)


# ---- Trainer


def by_cp_size(rank, folder):
    """The run with cp_size, that with ring_size, and the error of two sizes."""
    config = ParallelismConfig(cp_size=2)
    runs = []
    for arguments in ({"ring_size": None, "parallelism_config": config}, {"ring_size": 2}):
        run, made = trainer(rank, folder, batch_size=2, eval_rows=EVAL_ROWS, **arguments, **DATA)
        assert (made.ring.world_size, made.ring.dp_size) == (2, 1)
        runs.append(run | {"losses": [*run["losses"], made.evaluate()["eval_loss"]]})
    with pytest.raises(ValueError) as refused:
        trainer(rank, folder, ring_size=1, parallelism_config=config, **DATA)
    trainer(rank, folder, ring_size=2, parallelism_config=config, **DATA)
    return *runs, str(refused.value)


def test_a_trainer_takes_cp_size_for_ring_size(tmp_path):
    alone, made = trainer(0, tmp_path, batch_size=2, eval_rows=EVAL_ROWS, **DATA)
    alone["losses"].append(made.evaluate()["eval_loss"])
    for one_word, other_word, error in run_ranks(by_cp_size, 2, tmp_path):
        assert one_word["losses"] == other_word["losses"]
        assert_equal_runs(one_word, alone, "cp_size")
        assert "ring_size=1 and cp_size=2" in error


def as_on_gpus(rank, world_size):
    """Lets Accelerate take CPUs for GPUs, since it refuses a ParallelismConfig on a CPU."""
    process_environment(rank, world_size)
    take_cpus_for_gpus()
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP is told no numbers of devices


def by_ddp(rank, folder):
    as_on_gpus(rank, 4)
    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    run, made = trainer(rank, folder, ring_size=None, use_cpu=False, parallelism_config=config, **DATA)
    assert (made.ring.world_size, made.ring.dp_size) == (2, 2) and isinstance(made.model_wrapped, DDP)
    return run["losses"]


def by_fsdp_and_environment(rank, folder):
    """`accelerate launch --use_parallelism_config` sets this; it takes FSDP 2 alone."""
    as_on_gpus(rank, 4)
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    os.environ.update(PARALLELISM_CONFIG_DP_SHARD_SIZE="2", PARALLELISM_CONFIG_CP_SIZE="2")
    run, made = trainer(rank, folder, ring_size=None, use_cpu=False, fsdp=True, **DATA)
    assert (made.ring.world_size, made.ring.dp_size) == (2, 2) and isinstance(made.model_wrapped, FSDPModule)
    return run["losses"]


@pytest.mark.parametrize("run", [by_ddp, by_fsdp_and_environment])
def test_a_trainer_takes_configs_of_several_rings(run, tmp_path):
    alone, _ = trainer(0, tmp_path, batch_size=2, **DATA)
    for losses in run_ranks(run, 4, tmp_path):
        assert losses == pytest.approx(alone["losses"], rel=EXACT)


# ---- Accelerate


def losses_of(accelerator, ring, prepare):
    """The losses of three steps over rows that all rings share."""
    model = ra.patch_model(tiny_llama(), ring=ring)
    torch.manual_seed(1)
    rows = DataLoader(DATA["rows"], batch_size=2 // ring.dp_size, collate_fn=padded)
    loader = accelerator.prepare_data_loader(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model, optimizer = prepare(model, optimizer)
    losses = []
    for batch, _ in zip(loader, range(3)):
        items = accelerator.reduce((batch["labels"][:, 1:] != -100).sum(), "sum")
        # A context parallel loop of Accelerate has this line, which may stay: it does nothing.
        with accelerator.maybe_context_parallel([batch["input_ids"]], [1], {batch["input_ids"]}):
            loss = model(**batch, num_items_in_batch=items).loss
        accelerator.backward(loss * accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "sum")))
    return losses


def by_accelerator(rank, sizes):
    """The losses, and the errors of a ring of another size, and of one that is made after the model was prepared."""
    as_on_gpus(rank, dist.get_world_size())
    wrapping = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=wrapping)
    errors = []
    with pytest.raises(ValueError) as refused:
        ra.Ring.from_accelerator(accelerator, size=1)
    errors.append(str(refused.value))
    ring = ra.Ring.from_accelerator(accelerator)
    assert ring.world_size == 2 and (ring.dp_rank, ring.rank) == divmod(rank, 2)
    losses = losses_of(accelerator, ring, accelerator.prepare)
    if at_least("accelerate", "1.13"):  # Before, a process that has a ParallelismConfig can make no second Accelerator.
        again = ra.Ring.from_accelerator(Accelerator())
        assert (again.rank, again.world_size, again.dp_rank) == (ring.rank, ring.world_size, ring.dp_rank)
    return losses, errors


@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"dp_shard_size": 2, "cp_size": 2}])
def test_a_loop_takes_cp_size_for_the_size_of_rings(sizes):
    process_environment(0, 1)
    alone = Accelerator()
    expected = losses_of(alone, ra.Ring.from_accelerator(alone, size=1), lambda *objects: objects)
    for losses, errors in run_ranks(by_accelerator, 2 * sizes.get("dp_shard_size", 1), sizes):
        assert losses == pytest.approx(expected, rel=EXACT)
        assert "dimension cp has 2 ranks, and rings of 1 were asked for" in errors[0]


def too_late(rank):
    """The errors of a model that Accelerate has prepared for its own context parallelism."""
    as_on_gpus(rank, 2)
    wrapping = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2), fsdp_plugin=wrapping)
    ring = ra.Ring(accelerator.torch_device_mesh["cp"])
    model = ra.patch_model(tiny_llama(), ring=ring)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    batch = padded(DATA["rows"][:1])
    errors = []
    for call in (lambda: model(**batch), lambda: ra.Ring.from_accelerator(accelerator)):
        with pytest.raises(ValueError) as refused:
            call()
        errors.append(str(refused.value))
    return errors


@needs("accelerate", "1.13", "hooks that drop the masks of a model")
def test_a_model_that_was_prepared_before_the_ring_is_refused():
    for of_call, of_ring in run_ranks(too_late, 2):
        assert "make the ring by Ring.from_accelerator before accelerator.prepare" in of_call
        assert "has prepared a model with cp_size=2" in of_ring


# ---- device meshes


class WithMesh(Accelerator):
    """What rings see of an accelerator; the sizes are those of a ParallelismConfig."""

    def __init__(self, mesh, **sizes):
        self.state = SimpleNamespace(
            num_processes=4,
            device=torch.device("cpu"),
            device_mesh=mesh,
            parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        )
        self.dataloader_config = DataLoaderConfiguration()


def rings_of_meshes(rank):
    """What of 4 processes each sees of rings on meshes, and the errors by name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    accelerator = WithMesh(mesh)
    places = {}
    for name, ring in {
        "group": ra.Ring(mesh.get_group("cp")),
        "dimension": ra.Ring(mesh["cp"]),
        "mesh": ra.Ring(mesh),
        "outer": ra.Ring(outer),
        "unnamed": ra.Ring(init_device_mesh("cpu", (4,))),
        "ring": ra.Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "any"))),
        "accelerator": ra.Ring.from_accelerator(accelerator),
        "size too": ra.Ring.from_accelerator(accelerator, 2),
    }.items():
        everyone = torch.cat(ring.gather(torch.tensor([rank]))).tolist()
        places[name] = (everyone, ring.dp_rank, ring.dp_size)
        assert everyone[ring.rank] == rank
    part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "cp"))
    calls = {
        "names": lambda: ra.Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))),
        "no names": lambda: ra.Ring(init_device_mesh("cpu", (2, 2))),
        "two names": lambda: ra.Ring(both),
        "size differs": lambda: ra.Ring.from_accelerator(WithMesh(mesh), 4),
        "size differs on one": lambda: ra.Ring.from_accelerator(WithMesh(mesh), 4 if rank == 3 else None),
        "mesh on some": lambda: ra.Ring.from_accelerator(WithMesh(mesh if rank < 2 else None), 2),
        "outer": lambda: ra.Ring.from_accelerator(WithMesh(outer)),
        "tensor": lambda: ra.Ring.from_accelerator(WithMesh(tensor)),
        "part": lambda: ra.Ring.from_accelerator(WithMesh(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))),
        "no cp": lambda: ra.Ring.from_accelerator(WithMesh(mesh["dp"], cp_size=2), 2),
        "tp_size": lambda: ra.Ring.from_accelerator(WithMesh(None, tp_size=2), 2),
        "sp_size": lambda: ra.Ring.from_accelerator(WithMesh(None, sp_size=2), 2),
    }
    if rank > 1:
        calls["not on it"] = lambda: ra.Ring(part)
    errors = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as refused:
            call()
        errors[name] = str(refused.value)
    return places, errors


ERRORS = {
    "names": "dimensions ('dp', 'sp')",
    "no names": "dimensions None",
    "two names": "dimensions ('ring', 'cp')",
    "size differs": "cp has 2 ranks, and rings of 4 were asked for",
    "size differs on one": "rings of 4 were asked for",
    "mesh on some": "disagree on the accelerator's device mesh",
    "outer": "not neighbours in the world",
    "tensor": "tp is neither cp nor one of dp, dp_replicate, dp_shard",
    "part": "the device mesh has 2 of 4 processes",
    "no cp": "cp_size=2, and its device mesh has no dimension cp",
    "tp_size": "tp_size=2",
    "sp_size": "sp_size=2",
    "not on it": "is not on the device mesh it was given",
}


def test_rings_on_device_meshes():
    for rank, (places, errors) in enumerate(run_ranks(rings_of_meshes, 4)):
        first = rank // 2 * 2
        inner = [first, first + 1]
        outer = [rank % 2, rank % 2 + 2]
        for name in ("group", "dimension", "mesh"):
            assert places[name] == (inner, 0, 1), name
        for name in ("accelerator", "size too"):
            assert places[name] == (inner, rank // 2, 2), name
        assert places["outer"] == places["ring"] == (outer, 0, 1)
        assert places["unnamed"] == ([0, 1, 2, 3], 0, 1)
        left_out = {"not on it"} if rank < 2 else set()
        assert errors.keys() == ERRORS.keys() - left_out
        for name, error in errors.items():
            assert ERRORS[name] in error, name
