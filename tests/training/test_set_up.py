"""Rings from the processes of a launcher and from the objects that Accelerate prepared; and what else a RingTrainer does."""

import logging
import math
import os
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, get_scheduler

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import differs_from_saved
from tests.support.tolerance import allowed
from tests.support.training import (
    PLAIN_STEPS,
    assert_equal_runs,
    differences,
    documents,
    padded,
    process_environment,
    tiny_llama,
    trainer,
)

pytestmark = pytest.mark.usefixtures("in_float64")


def test_a_ring_without_the_other_processes_that_were_started_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (ra.Ring, lambda: ra.Ring(transport="local")):
        with pytest.raises(ValueError, match=r"Ring: WORLD_SIZE=2 .*init_process_group.*Ring\.alone\(\)"):
            make()
    assert ra.Ring.alone().world_size == 1
    for started in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", started)
        assert ra.Ring().world_size == 1
    monkeypatch.delenv("WORLD_SIZE")
    assert ra.Ring().world_size == 1


class OneProcess:
    """An accelerator as `accelerate launch --cpu --num_processes 2` and a plain torchrun on a CPU leave it."""

    state = SimpleNamespace(num_processes=1)
    device = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2])
def test_an_accelerator_without_the_other_processes_names_what_brings_them(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 .*ACCELERATE_USE_CPU=true.*--multi_gpu --num_processes N"):
        ra.Ring.from_accelerator(OneProcess(), size=size)


def counted(rank, ring_size):
    """The counts and effects of an accelerator over rings of this size."""
    process_environment(rank, 4)
    accelerator = Accelerator()
    ring = ra.Ring.from_accelerator(accelerator, size=ring_size)
    model = ra.patch_model(tiny_llama(), ring=ring)
    rows = documents(9, 20, 30, seed=0)
    loader = DataLoader(rows, 2, collate_fn=padded)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = get_scheduler("linear", optimizer, 0, 8 * ring.dp_size)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    seen, rate = [], None
    for step, batch in enumerate(loader):
        seen += accelerator.gather_for_metrics(batch["input_ids"][:, 0].contiguous()).tolist()
        accelerator.backward(0 * model(**batch).loss)
        optimizer.step()
        schedule.step()
        rate = optimizer.param_groups[0]["lr"]
        if step == 1:
            after_two = rate
    names = accelerator.gather_for_metrics([f"ring {ring.dp_rank}"], use_gather_object=True)
    return {
        "numbers": (accelerator.num_processes, accelerator.process_index),
        "seen": seen == [row["input_ids"][0] for row in rows],
        "rate": after_two,
        "gather": accelerator.gather(torch.tensor([rank])).tolist(),
        "sum": accelerator.reduce(torch.tensor([1, 2])).tolist(),
        "names": names,
    }


def test_an_accelerator_counts_rings(programs):
    """Two rings of two; a schedule of 8 steps of both has done a quarter after two."""
    for rank, found in enumerate(programs.run(counted, 4, 2)):
        expected = {"numbers": (2, rank // 2), "seen": True, "rate": 0.75, "gather": [0, 2], "sum": [2, 4]}
        assert found == expected | {"names": ["ring 0", "ring 1"]}


def differing(rank, folder):
    """The errors of an accelerator over two rings of two where the ranks of a ring differ."""
    process_environment(rank, 4)
    accelerator = Accelerator()
    ra.Ring.from_accelerator(accelerator, size=2)
    if rank == 1:
        accelerator.set_trigger()
    found = {"trigger": [accelerator.check_trigger() for _ in range(2)], "last": accelerator.is_last_process}
    flags = {"flag": torch.tensor(rank == 3, dtype=torch.int32), "counts": torch.tensor([[rank], [1]])}
    sums = accelerator.reduce(flags)
    found["dtype"], found["sums"] = sums["flag"].dtype, [sums["flag"].item(), sums["counts"].flatten().tolist()]
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
        found["part"] = part
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder))):
        torch.ones(2) + 1
    return found | {"traces": len(os.listdir(folder)), "ring": accelerator.process_index}


def test_ranks_of_a_ring_that_differ(tmp_path, programs):
    for rank, found in enumerate(programs.run(differing, 4, tmp_path)):
        expected = {"trigger": [True, False], "last": rank == 3, "traces": 4, "ring": rank // 2}
        expected |= {"dtype": torch.int32, "sums": [1, [4, 2]], "part": [["a", "b"], ["c", "c"]][rank // 2]}
        assert found == expected


def prepared_first(rank):
    """The rates of a schedule that was prepared before two rings of two; a loader is refused then."""
    process_environment(rank, 4)
    accelerator = Accelerator()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    schedule = get_scheduler("linear", optimizer, 0, 8)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    ra.Ring.from_accelerator(accelerator, size=2)
    rates = []
    for _ in range(3):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    late = Accelerator()
    late.prepare(DataLoader(torch.arange(8)))
    with pytest.raises(ValueError, match=r"accelerator\.prepare has divided .* among 4 processes: make the ring first"):
        ra.Ring.from_accelerator(late, size=2)
    assert ra.Ring.from_accelerator(late, size=1).dp_size == 4
    return rates


def test_what_was_prepared_before_the_ring(programs):
    for rates in programs.run(prepared_first, 4):
        assert rates == [0.75, 0.5, 0.25]


def orders(rank, ring_size, with_generator):
    """The first tokens that this process reads in two epochs, shuffled by its random state."""
    process_environment(rank, 4)
    accelerator = Accelerator()
    ra.Ring.from_accelerator(accelerator, size=ring_size)
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank) if with_generator else None
    rows = torch.arange(16)[:, None].expand(16, 8)
    loader = accelerator.prepare(DataLoader(rows, 2, shuffle=True, generator=generator))
    return accelerator.process_index, [[x for batch in loader for x in batch[:, 0].tolist()] for _ in range(2)]


@pytest.mark.parametrize(("ring_size", "with_generator"), [(2, False), (4, True)])
def test_ranks_of_a_ring_read_the_same_rows_whatever_their_random_states(ring_size, with_generator, programs):
    read = programs.run(orders, 4, ring_size, with_generator)
    of_rings = dict(read)
    assert all(rows == of_rings[ring] for ring, rows in read)
    for epoch in range(2):
        assert sorted(x for rows in of_rings.values() for x in rows[epoch]) == list(range(16))
        assert of_rings[0][0] != of_rings[0][1]


def test_the_kernel_of_a_trainer(tmp_path):
    options = {"use_cpu": True, "disable_tqdm": True, "report_to": []}
    args = ra.RingTrainingArguments(str(tmp_path), ring_kernel="math", **options)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2
    for made in (ra.RingTrainer(tiny_llama(), args), ra.RingTrainer(tiny_llama(), args, ring_kernel="auto")):
        made.evaluate(rows)
        wanted = "math" if made.ring.kernel == "math" else "cpu_flash"
        assert {decision.choice for decision in made.ring.kernels().values()} == {wanted}
    assert made.ring.kernel == "auto"
    with pytest.raises(ValueError, match=r"kernel must be one of 'auto', .*, got 'cutlass'"):
        ra.RingTrainer(tiny_llama(), args, ring_kernel="cutlass")


def test_a_trainer_that_makes_no_rings_is_refused(tmp_path):
    """Whoever changes the arguments alone would train data-parallel; one process and rings of one are as they were."""
    options = {"use_cpu": True, "disable_tqdm": True, "report_to": []}
    for size in (None, 1):
        Trainer(tiny_llama(), ra.RingTrainingArguments(str(tmp_path), ring_size=size, **options))
    args = ra.RingTrainingArguments(str(tmp_path), ring_size=2, **options)
    with pytest.raises(
        ValueError, match=r"ring_size=2, and this Trainer makes no rings: take ra\.RingTrainer or mixin"
    ):
        Trainer(tiny_llama(), args)
    assert args.to_dict()["ring_size"] == 2


@pytest.mark.parametrize("adapters", [False, True], ids=["model", "adapters"])
def test_a_run_that_goes_on_under_another_pattern_is_told(adapters, tmp_path, caplog):
    def run(pattern, resume, steps):
        caplog.clear()
        model = ra.patch_model(tiny_llama(pattern=None), pattern)
        if adapters:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2))
        args = ra.RingTrainingArguments(
            str(tmp_path), **{**PLAIN_STEPS, "save_strategy": "steps"}, max_steps=steps, save_steps=1
        )
        rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
        ra.RingTrainer(model, args, train_dataset=rows).train(resume_from_checkpoint=resume)
        return [x.getMessage() for x in caplog.records if "another pattern" in x.getMessage()]

    assert not run("window:4", None, 1) and not run("window:4", True, 2)
    (warning,) = run("exact", True, 3)
    assert warning.startswith(f"{tmp_path}/checkpoint-2 was trained under another pattern")
    assert not run("exact", f"{tmp_path}/checkpoint-3", 4), "exact is saved without a pattern"


def test_adapters_that_save_no_pattern_are_not_compared(tmp_path):
    for task, differs in (("CAUSAL_LM", True), (None, False)):
        model = ra.patch_model(tiny_llama(pattern=None), "window:4")
        get_peft_model(model, LoraConfig(task_type=task, target_modules=["q_proj"], r=2)).save_pretrained(tmp_path)
        assert differs_from_saved(ra.patch_model(model, "window:8").config, tmp_path) is differs
        assert differs_from_saved(ra.patch_model(model, "window:4").config, tmp_path) is False


# ---- what else a RingTrainer does: virtual tokens, 16 bits, steps that are not finite; and refusals

ROWS = documents(8, 20, 61, seed=0, prompt=3)
EVAL_ROWS = documents(5, 20, 61, seed=3)
DATA = {"rows": ROWS, "batch_size": 2, "steps": 5}


def with_prompts(rank, folder, ring_size):
    """Virtual tokens before each row, whose labels PEFT fills up."""
    torch.manual_seed(3)
    model = get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    return trainer(rank, folder, ring_size=ring_size, model=model, **DATA)[0]


def test_virtual_tokens(tmp_path, programs):
    """LoRA is in test_equality.py."""
    alone = with_prompts(0, tmp_path / "alone", 1)
    for figures in programs.run(with_prompts, 2, tmp_path / "ring", 2):
        assert_equal_runs(figures, alone, "with_prompts")


def in_bfloat16(rank, folder, ring_size):
    return trainer(rank, folder, ring_size=ring_size, bf16=True, **DATA)[0]


@pytest.mark.own_dtypes
def test_training_in_bfloat16(tmp_path, programs):
    """As far from a run without bfloat16 as one process is."""
    exact = trainer(0, tmp_path, ring_size=1, **DATA)[0]
    bounds = {name: allowed(error) for name, error in differences(in_bfloat16(0, tmp_path, 1), exact).items()}
    for figures in programs.run(in_bfloat16, 2, tmp_path, 2):
        assert_equal_runs(figures, exact, "bfloat16", bounds)


class Diverging(ra.RingTrainer):
    """The loss of the last process is NaN from its third step on."""

    def compute_loss(self, model, inputs, **options):
        answer = super().compute_loss(model, inputs, **options)
        loss, *outputs = answer if isinstance(answer, tuple) else (answer,)
        last = self.args.process_index == self.args.world_size - 1
        loss = loss * torch.nan if self.state.global_step >= 2 and last else loss
        return (loss, *outputs) if outputs else loss


class Stopping(Diverging):
    def when_not_finite(self, loss, grad_norm):
        raise ArithmeticError(f"step {self.state.global_step + 1}: {loss} {grad_norm}")


def diverging(rank, folder, ring_size):
    """The error of each process, and whether all weights are finite then; and the warnings of a Trainer that goes on."""
    model, told = tiny_llama(), []
    try:
        trainer(rank, folder, ring_size=ring_size, trainer_class=Stopping, model=model, **DATA)
    except ArithmeticError as error:
        told.append(str(error))
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hf_ring_attention").addHandler(handler)
    made = trainer(rank, folder, ring_size=ring_size, trainer_class=Diverging, eval_rows=EVAL_ROWS, **DATA)[1]
    logging.getLogger("hf_ring_attention").removeHandler(handler)
    assert made.state.global_step == 5
    figures = made.evaluate()
    assert math.isnan(figures["eval_loss"])
    return finite, told


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("world_size", "ring_size"), [(2, 2), (2, 1)])
def test_a_loss_that_is_not_finite_is_told_on_all_processes_together(world_size, ring_size, tmp_path, programs):
    for rank, (finite, told) in enumerate(programs.run(diverging, world_size, tmp_path, ring_size)):
        assert finite and told[0] == "step 3: nan nan"
        warned = [text for text in told[1:] if "training goes on" in text]
        assert len(warned) == (rank == 0) and all("step 3: loss nan, gradient norm nan" in text for text in warned)


REFUSED = {
    "2 processes cannot form rings of 3: use a divisor of 2": {"ring_size": 3},
    "neftune_noise_alpha does not work over a ring": {"neftune_noise_alpha": 5},
    "attn_pdrop=0.1": {"model": GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=97))},
}


def refused(rank, folder):
    for message, settings in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            trainer(rank, folder, **{"ring_size": 2, **DATA, **settings})


def test_what_would_be_wrong_is_refused_on_every_rank(tmp_path, programs):
    programs.run(refused, 2, tmp_path)
