"""Small training runs, on one process or on several ranks, and what must be equal between them."""

import itertools
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attention as ra
from tests.support.tolerance import EXACT, allowed, distance, largest

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
#: Arguments of a Trainer: plain steps on the CPU, whose figures are logged.
PLAIN_STEPS = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
PLAIN_STEPS |= {"optim": "sgd", "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 1e9}
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
        ids = torch.randint(1, 97, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * min(prompt, length) + ids[prompt:]})
    return rows


def process_environment(rank, world_size):
    """Sets a launcher's variables, so that Accelerate finds the process group, and clears the traces of an earlier run."""
    AcceleratorState._reset_state(reset_partial_state=True)  # It keeps the mixed precision of the first accelerator.
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # TrainingArguments may have set it.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if world_size > 1:  # of one process Accelerate would make a group, on a port that others may have
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")


def figures_of(model, losses, norms):
    """The figures by which runs are compared, with whole parameters."""
    parameters = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def whole(x):
    """The tensor itself, which FSDP 2 divides among processes."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


FILLS = {"input_ids": 0, "labels": -100, "attention_mask": 0}


def padded(rows, left=False):
    """A batch of documents with their labels, padded as Transformers' collators pad them."""
    length = max(len(row["input_ids"]) for row in rows)
    columns = {name: [] for name in FILLS}
    for row in rows:
        values = {**row, "attention_mask": [1] * len(row["input_ids"])}
        for name, fill in FILLS.items():
            padding = [fill] * (length - len(row["input_ids"]))
            columns[name].append([*padding, *values[name]] if left else [*values[name], *padding])
    return {name: torch.tensor(column) for name, column in columns.items()}


def packed(rows, length):
    """Rows of so many tokens, of documents that follow each other, with positions that count each."""
    found, room = [], 0
    for document in rows:
        count = len(document["input_ids"])
        if count > room:
            found.append({"input_ids": [], "labels": [], "position_ids": [], "attention_mask": []})
            room = length
        room -= count
        found[-1]["input_ids"] += document["input_ids"]
        found[-1]["labels"] += [-100, *document["labels"][1:]]
        found[-1]["position_ids"] += range(count)
        found[-1]["attention_mask"] += [1] * count
    fills = {**FILLS, "position_ids": 0}
    return [{name: x + [fills[name]] * (length - len(x)) for name, x in row.items()} for row in found]


def loop(
    rank,
    *,
    rows,
    ring_size=1,
    collator=padded,
    batch_size=1,
    steps=3,
    accumulate=1,
    checkpointing=False,
    wrap="ddp",
    shuffle=True,
    pattern=PATTERN,
    loss_of=None,
    model=None,
    sharded_loader=False,
    workers=0,
    decay=False,
    **ring_settings,
):
    """An Accelerate program as its users write it; `wrap` holds the parameters of the model, a `tiny_llama` without one.

    Args:
        loss_of: (model, batch, number of labels) -> the loss of a batch; None for the model's own.
        decay: whether the learning rate falls; Trainer keeps it.
        sharded_loader: whether the loader's workers cut the rows, and not the model.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    process_environment(rank, world_size)
    # The losses are not scaled by the number of accumulated batches.
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, dataloader_config=order)
    ring = ra.Ring.from_accelerator(accelerator, size=ring_size, **ring_settings)
    model = tiny_llama(pattern) if model is None else model
    ra.patch_model(model, ring=ring)
    if checkpointing:
        model.activation_checkpointing_enable()
    torch.manual_seed(1)
    loader = DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collator, num_workers=workers)
    loader = ring.prepare_data_loader(loader) if sharded_loader else accelerator.prepare(loader)
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for part in (*model.model.layers, model.lm_head):  # each call of the head gathers its weights
            fully_shard(part)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    # Accelerate steps a schedule once for each replica that has read a batch.
    replicas = accelerator.num_processes
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + 0.1 * step / replicas) if decay else 1
    )
    if wrap == "ddp":
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    model.train()
    losses, norms = [], []
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epochs without end
    for _ in range(steps):
        of_step = list(itertools.islice(batches, accumulate))
        labels = sum((batch["labels"][:, 1:] != -100).sum() for batch in of_step)
        items = accelerator.reduce(labels, "sum")
        total = 0
        for number, batch in enumerate(of_step):
            last = number == len(of_step) - 1
            if wrap == "fsdp2":
                model.set_requires_gradient_sync(last)
            context = accelerator.no_sync(model) if wrap == "ddp" and not last else torch.enable_grad()
            with context:
                if loss_of is None:
                    loss = model(**batch, num_items_in_batch=items).loss
                else:
                    loss = loss_of(model, batch, items)
                (loss * accelerator.num_processes).backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total, "sum")))
        norms.append(float(whole(norm)))
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
    rows,
    ring_size=1,
    collator=padded,
    eval_rows=None,
    batch_size=1,
    steps=3,
    accumulate=1,
    checkpointing=False,
    trainer_class=ra.RingTrainer,
    resume=None,
    model=None,
    **arguments,
):
    """The same run by a `RingTrainer`; the Trainer comes with its figures."""
    process_environment(rank, dist.get_world_size() if dist.is_initialized() else 1)
    arguments = {
        f"ring_{name}" if name in ("transport", "heads", "layout") else name: x for name, x in arguments.items()
    }
    sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), batch_size)
    sizes |= {"ring_size": ring_size, "max_steps": steps, "gradient_accumulation_steps": accumulate}
    momentum = {"optim_args": "momentum=0.9", "activation_checkpointing": checkpointing, "seed": 1}
    args = ra.RingTrainingArguments(str(folder), **{**PLAIN_STEPS, **sizes, **momentum, **arguments})
    model = tiny_llama() if model is None else model
    made = trainer_class(model, args, train_dataset=rows, eval_dataset=eval_rows, data_collator=collator)
    made.train(resume_from_checkpoint=resume)
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    return figures_of(model, [entry["loss"] for entry in steps], [entry["grad_norm"] for entry in steps]), made


def bounds_of(nudged, run):
    """On the differences from a run, by what nudged weights did to it."""
    found = differences(nudged, run)
    assert found["parameters"] > 0, "the nudged weights were not used"
    return {name: allowed(error) for name, error in found.items()}


def checkpointed_step(model, inputs, wrap=None, checkpoints=True):
    """The loss of a step in training mode, and the gradients by name: the ranks' mean under DDP and FSDP 2."""
    model.train()
    if checkpoints and model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable()
    called, named = model, model.named_parameters
    if wrap == "ddp":
        called = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # Indexers get none.
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for stack in [x for x in model.modules() if isinstance(x, torch.nn.ModuleList)]:
            for layer in stack:
                fully_shard(layer)
        fully_shard(model)
    loss = called(**inputs).loss
    loss.backward()
    gradients = {name: x.grad for name, x in named() if x.grad is not None}
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in gradients.items()}
    return loss.detach(), whole
