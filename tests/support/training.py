"""Small training runs, on one process or on several ranks, and what must be equal between them."""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import hf_ring_attention as ra
from hf_ring_attention.compute.private import checkpoint_activations
from tests.support.tolerance import EXACT, allowed, distance, largest

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
#: The argument of training that recomputes activations in backward: Transformers 5.23 gave it a new name.
CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")[
    hasattr(TrainingArguments, "activation_checkpointing")
]
PATTERN = ra.Pattern.pyramid(8, levels=2, ratio=2, sinks=2)


def tiny_llama(pattern=PATTERN, seed=0, **changes):
    """A model of 2 layers whose weights are large enough for its losses to differ."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}, attn_implementation="ring_dilated"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    if pattern is not None:
        ra.patch_config(model.config, pattern)
    return model


def documents(count, shortest, longest, seed, prompt=0):
    """Tokenized documents of uneven lengths; the first `prompt` tokens of each are not learned from."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(1, 97, (length,), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def process_environment(rank, world_size):
    """What a launcher would set, for Accelerate to find the process group that is there."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if world_size > 1:  # of one process Accelerate would make a group, on a port that others may have
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")


def figures_of(model, losses, norms):
    """What a run is compared by, from whole parameters."""
    parameters = {}
    for name, parameter in model.named_parameters():
        x = parameter.detach()
        parameters[name] = (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()
    return {"losses": losses, "norms": norms, "parameters": parameters}


def loop(
    rank,
    *,
    ring_size=1,
    transport="auto",
    heads=None,
    layout="auto",
    rows,
    collator,
    batch_size=1,
    steps=3,
    accumulate=1,
    checkpointing=False,
    wrap="ddp",
    tokens_at_once=7,
    shuffle=True,
    pattern=PATTERN,
    loss_of=ra.next_token_loss,
    model=None,
):
    """An Accelerate loop as the recipe has it; `wrap` is what holds the parameters of the model, a `tiny_llama` without one."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    process_environment(rank, world_size)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate)  # the losses are not scaled by it
    ring = ra.Ring.from_accelerator(accelerator, size=ring_size, layout=layout, transport=transport, heads=heads)
    model = tiny_llama(pattern) if model is None else model
    ra.patch_model(model, ring=ring)
    if checkpointing:
        checkpoint_activations(model)
    torch.manual_seed(1)
    loader = ring.prepare_data_loader(DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collator))
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for part in (*model.model.layers, model.lm_head):  # each call of the head gathers its weights
            fully_shard(part)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    losses, norms = [], []
    batches = iter(loader)
    for _ in range(steps):
        shards = []
        for _ in range(accumulate):
            shard = next(batches, None)
            if shard is None:
                batches = iter(loader)
                shard = next(batches)
            shards.append(shard)
        tokens = ra.count_tokens(shards)
        total = 0
        for number, shard in enumerate(shards):
            last = number == len(shards) - 1
            if wrap == "fsdp2":
                model.set_requires_gradient_sync(last)
            context = accelerator.no_sync(model) if wrap == "ddp" and not last else torch.enable_grad()
            with context:
                loss = loss_of(model, shard, tokens, tokens_at_once=tokens_at_once)
                loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total, "mean")))
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    return figures_of(accelerator.unwrap_model(model), losses, norms)


def differences(run, other):
    """The largest ones of the lists of figures (losses, norms), and of the final parameters, relative to the other run."""
    found = {}
    for name in (name for name, figures in other.items() if isinstance(figures, list)):
        found[name] = largest(abs(a - b) / abs(b) for a, b in zip(run[name], other[name], strict=True))
    assert run["parameters"].keys() == other["parameters"].keys()
    found["parameters"] = largest(distance(run["parameters"][name], x) for name, x in other["parameters"].items())
    return found


def assert_equal_runs(run, other, what, bounds=None):
    """Within the bounds on `differences`; without any, of runs in float64."""
    for name, error in differences(run, other).items():
        bound = EXACT if bounds is None else bounds[name]
        figures = "" if name == "parameters" else f": {run[name]} and {other[name]}"
        assert error <= bound, f"{what}: {name} are {error} off, of {bound}{figures}"


def trainer(
    rank,
    folder,
    *,
    ring_size=1,
    transport="auto",
    heads=None,
    layout="auto",
    rows,
    collator,
    eval_rows=None,
    batch_size=1,
    steps=3,
    accumulate=1,
    checkpointing=False,
    trainer_class=None,
    resume=None,
    model=None,
    **arguments,
):
    """The same run by a `RingTrainer`; the Trainer comes with its figures."""
    process_environment(rank, dist.get_world_size() if dist.is_initialized() else 1)
    args = ra.RingTrainingArguments(
        str(folder),
        **{
            "ring_size": ring_size,
            "ring_transport": transport,
            "ring_heads": heads,
            "ring_layout": layout,
            "loss_tokens_at_once": 7,
            "per_device_train_batch_size": batch_size,
            "per_device_eval_batch_size": batch_size,
            "max_steps": steps,
            "gradient_accumulation_steps": accumulate,
            CHECKPOINTING: checkpointing,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "optim": "sgd",
            "optim_args": "momentum=0.9",
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1e9,
            "seed": 1,
            **arguments,
        },
    )
    model = tiny_llama() if model is None else model
    made = (trainer_class or ra.RingTrainer)(
        model, args, train_dataset=rows, eval_dataset=eval_rows, data_collator=collator
    )
    made.train(resume_from_checkpoint=resume)
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    losses = [entry["loss"] for entry in steps]
    return figures_of(model, losses, [entry["grad_norm"] for entry in steps]), made


def bounds_of(nudged, run):
    """On the differences from a run, by what nudged weights did to it."""
    found = differences(nudged, run)
    assert found["parameters"] > 0, "the nudged weights were not used"
    return {name: allowed(error) for name, error in found.items()}
