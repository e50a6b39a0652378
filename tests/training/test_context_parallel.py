"""Accelerate's words for rings: a ParallelismConfig's cp_size, and the dimension "cp" of a device mesh."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP

import hf_ring_attention as ra
from tests.support.as_gpus import take_cpus_for_gpus
from tests.support.ranks import RankPool, run_ranks
from tests.support.tolerance import EXACT
from tests.support.training import assert_equal_runs, documents, padded, process_environment, tiny_llama, trainer

pytestmark = pytest.mark.usefixtures("in_float64")

DATA = {"rows": documents(8, 20, 61, seed=0, prompt=3), "steps": 2}


def by_cp_size(rank, folder):
    """The run with cp_size; two sizes are refused."""
    config = ParallelismConfig(cp_size=2)
    run, made = trainer(rank, folder, batch_size=2, ring_size=None, parallelism_config=config, **DATA)
    assert (made.ring.world_size, made.ring.dp_size) == (2, 1)
    with pytest.raises(ValueError, match="ring_size=1 and cp_size=2"):
        trainer(rank, folder, ring_size=1, parallelism_config=config, **DATA)
    return run


def test_a_trainer_takes_cp_size_for_ring_size(tmp_path, programs):
    alone, _ = trainer(0, tmp_path, batch_size=2, **DATA)
    for run in programs.run(by_cp_size, 2, tmp_path):
        assert_equal_runs(run, alone, "cp_size")


@pytest.fixture(scope="module")
def gpus():
    """Processes that stay, for functions that begin with `as_on_gpus`."""
    with RankPool() as pool:
        yield pool


def as_on_gpus(rank, world_size):
    """Lets Accelerate take CPUs for GPUs, since it refuses a ParallelismConfig on a CPU."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))]:
        del os.environ[name]  # An earlier run may have set it.
    process_environment(rank, world_size)
    take_cpus_for_gpus()
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP gets no device numbers.


def of_several_rings(rank, folder, by_environment):
    """`accelerate launch --use_parallelism_config` sets the variables, and takes FSDP 2 alone."""
    as_on_gpus(rank, 4)
    how = {"parallelism_config": ParallelismConfig(dp_shard_size=2, cp_size=2)}
    if by_environment:
        how, os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = {"fsdp": True}, "true"
        os.environ.update(PARALLELISM_CONFIG_DP_SHARD_SIZE="2", PARALLELISM_CONFIG_CP_SIZE="2")
    run, made = trainer(rank, folder, ring_size=None, use_cpu=False, **how, **DATA)
    assert (made.ring.world_size, made.ring.dp_size) == (2, 2)
    assert isinstance(made.model_wrapped, FSDPModule if by_environment else DDP)
    return run["losses"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("by_environment", [False, True])
def test_a_trainer_takes_configs_of_several_rings(by_environment, tmp_path, gpus):
    alone, _ = trainer(0, tmp_path, batch_size=2, **DATA)
    for losses in gpus.run(of_several_rings, 4, tmp_path, by_environment):
        assert losses == pytest.approx(alone["losses"], rel=EXACT)


def accelerator_of(rank, **sizes):
    """An Accelerator with FSDP 2 and a ParallelismConfig."""
    as_on_gpus(rank, dist.get_world_size())
    wrapping = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    return Accelerator(parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=wrapping)


def too_late(rank):
    """A model that Accelerate has prepared for its context parallelism is refused."""
    accelerator = accelerator_of(rank, cp_size=2)
    ring = ra.Ring(accelerator.torch_device_mesh["cp"])
    model = ra.patch_model(tiny_llama(), ring=ring)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"make the ring by Ring\.from_accelerator before accelerator\.prepare"):
        model(**padded(DATA["rows"][:1]))
    with pytest.raises(ValueError, match="has prepared a model with cp_size=2"):
        ra.Ring.from_accelerator(accelerator)


def test_a_model_that_was_prepared_before_the_ring_is_refused():
    run_ranks(too_late, 2)


class WithMesh(Accelerator):
    """The part of an accelerator that rings see; `sizes` are fields of a ParallelismConfig."""

    def __init__(self, mesh, **sizes):
        config = ParallelismConfig(**sizes) if sizes else None
        of_processes = {"num_processes": 4, "device": torch.device("cpu")}
        self.state = SimpleNamespace(**of_processes, device_mesh=mesh, parallelism_config=config)
        self.dataloader_config = DataLoaderConfiguration()
        self._dataloaders, self._schedulers = [], []


def rings_of_meshes(rank):
    """What of 4 processes each sees of rings on meshes; others are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    places = {}
    for name, ring in {
        "group": ra.Ring(mesh.get_group("cp")),
        "dimension": ra.Ring(mesh["cp"]),
        "mesh": ra.Ring(mesh),
        "outer": ra.Ring(outer),
        "unnamed": ra.Ring(init_device_mesh("cpu", (4,))),
        "ring": ra.Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "any"))),
        "accelerator": ra.Ring.from_accelerator(WithMesh(mesh)),
        "size too": ra.Ring.from_accelerator(WithMesh(mesh), 2),
    }.items():
        everyone = torch.cat(ring.gather(torch.tensor([rank]))).tolist()
        places[name] = (everyone, ring.dp_rank, ring.dp_size)
        assert everyone[ring.rank] == rank
    part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "cp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    some = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    refused = [
        (other, (), "dimensions ('dp', 'sp')"),
        (init_device_mesh("cpu", (2, 2)), (), "dimensions None"),
        (both, (), "dimensions ('ring', 'cp')"),
        (WithMesh(mesh), (4,), "cp has 2 ranks, and rings of 4 were asked for"),
        (WithMesh(mesh), (4 if rank == 3 else None,), "rings of 4 were asked for"),
        (WithMesh(mesh if rank < 2 else None), (2,), "disagree on the accelerator's device mesh"),
        (WithMesh(outer), (), "not neighbours in the world"),
        (WithMesh(tensor), (), "tp is neither cp nor one of dp, dp_replicate, dp_shard"),
        (WithMesh(some), (), "the device mesh has 2 of 4 processes"),
        (WithMesh(mesh["dp"], cp_size=2), (2,), "cp_size=2, and its device mesh has no dimension cp"),
        (WithMesh(None, tp_size=2), (2,), "tp_size=2"),
        (WithMesh(None, sp_size=2), (2,), "sp_size=2"),
        *([(part, (), "is not on the device mesh it was given")] if rank > 1 else []),
    ]
    for given, size, message in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            (ra.Ring.from_accelerator if isinstance(given, WithMesh) else ra.Ring)(given, *size)
    return places


def test_rings_on_device_meshes(programs):
    for rank, places in enumerate(programs.run(rings_of_meshes, 4)):
        first = rank // 2 * 2
        inner = [first, first + 1]
        for name in ("group", "dimension", "mesh"):
            assert places[name] == (inner, 0, 1), name
        for name in ("accelerator", "size too"):
            assert places[name] == (inner, rank // 2, 2), name
        assert places["outer"] == places["ring"] == ([rank % 2, rank % 2 + 2], 0, 1)
        assert places["unnamed"] == ([0, 1, 2, 3], 0, 1)
