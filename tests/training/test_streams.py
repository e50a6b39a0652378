"""Streams, whose lengths nobody knows: rings read what as many processes read, end together, and count each row once."""

import functools

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, default_data_collator

import hf_ring_attention as ra
from tests.support import stock
from tests.support.stock import over, run_program, save, saved, settings, weights
from tests.support.tolerance import EXACT
from tests.support.training import documents, process_environment, tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")

ROWS = documents(14, 24, 24, seed=0, prompt=3)
#: Figures are computed in float64.
assert_alike = functools.partial(stock.assert_alike, bound=EXACT, rel=EXACT)


def stream(*counts):
    """A stream of as many files, of these numbers of rows."""

    def rows(files):
        for first, count in files:
            yield from ROWS[first : first + count]

    starts = [sum(counts[:file]) for file in range(len(counts))]
    return IterableDataset.from_generator(rows, gen_kwargs={"files": [*zip(starts, counts, strict=True)]})


def count_rows(prediction):
    return {"rows": float(len(prediction.predictions)), "sum": float(prediction.label_ids.sum())}


def by_trainer(folder, ring_size, resume=None, eval_counts=(5,), **changes):
    """Three epochs of three batches a ring, and two steps; the last batch is short. Evaluates between them."""
    kind, ring = over(Trainer, ring_size)
    changes = {"steps": 6, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3, **changes}
    data = {"train_dataset": stream(3, 4, 2), "eval_dataset": stream(*eval_counts), "compute_metrics": count_rows}
    args = TrainingArguments(**settings(folder, **changes))
    model = saved(folder, type(tiny_llama()), tiny_llama)
    made = kind(model, args, data_collator=default_data_collator, **data, **ring)
    made.train(resume_from_checkpoint=resume)
    return weights(made.model), [entry for entry in made.state.log_history if "train_runtime" not in entry]


def test_a_trainer(tmp_path, programs):
    """Two rings of two are two processes."""
    save(tmp_path, tiny_llama)
    (expected, log), _ = programs.run(run_program, 2, by_trainer, str(tmp_path / "two"), None)
    assert [entry["eval_rows"] for entry in log if "eval_rows" in entry] == [5, 5]
    for found, own_log in programs.run(run_program, 4, by_trainer, str(tmp_path / "rings"), 2):
        assert_alike(found, own_log, expected, log)


def evaluated(folder, ring_size, rows):
    kind, ring = over(Trainer, ring_size)
    model = saved(folder, type(tiny_llama()), tiny_llama)
    made = kind(model, TrainingArguments(**settings(folder)), data_collator=default_data_collator, **ring)
    return made.evaluate(stream(rows))["eval_loss"]


def test_evaluation_counts_a_short_last_batch_once(tmp_path, programs):
    save(tmp_path, tiny_llama)
    for processes, rows in ((1, 13), (2, 5)):
        folder = str(tmp_path / "run")
        expected = run_program(0, evaluated, folder, None, rows)
        for loss in programs.run(run_program, processes, evaluated, folder, processes, rows):
            assert loss == pytest.approx(expected, rel=EXACT), processes


def interrupted(folder, ring_size):
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    saving |= {"gradient_accumulation_steps": 1, "steps": 4}
    whole, log = by_trainer(f"{folder}/whole", ring_size, **saving)
    again, own_log = by_trainer(f"{folder}/again", ring_size, resume=f"{folder}/whole/checkpoint-2", **saving)
    assert_alike(again, own_log, whole, log)


def test_a_run_goes_on_in_the_middle_of_a_stream(tmp_path, programs):
    for folder in ("whole", "again"):
        (tmp_path / folder).mkdir()
    save(tmp_path, tiny_llama)
    save(tmp_path / "run", tiny_llama)
    programs.run(run_program, 4, interrupted, str(tmp_path / "run"), 2)


def by_loop(folder, ring_size, sharded=False, dispatch=None, steps=None):
    """A loop of three epochs with accumulation: the weights, and the rows of each epoch that all rings read together."""
    dispatching = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=dispatching)
    ring = None if ring_size is None else ra.Ring.from_accelerator(accelerator, ring_size)
    model = ra.patch_model(saved(folder, type(tiny_llama()), tiny_llama), ring=ring)
    loader = DataLoader(stream(3, 4, 2), 2, collate_fn=default_data_collator)
    loader = ring.prepare_data_loader(loader) if sharded else accelerator.prepare(loader)
    assert accelerator.prepare(loader) is loader
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    epochs, skipped = [], rows_in(accelerator, accelerator.skip_first_batches(loader, 2))
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1] += rows_in(accelerator, [batch])
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    return weights(accelerator.unwrap_model(model)), epochs, skipped


def rows_in(accelerator, batches):
    """The rows of batches, by their labels: a sharded loader leaves them whole."""
    labels = [accelerator.gather_for_metrics(batch["labels"]) for batch in batches]
    every = [row["labels"] for row in ROWS]
    return [every.index(row) for batch in labels for row in batch.tolist()]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("ring_size", [2, 4])
def test_a_loop(ring_size, tmp_path, programs):
    save(tmp_path, tiny_llama)
    folder = str(tmp_path / "run")
    expected = programs.run(run_program, 4 // ring_size, by_loop, folder, None)[0]
    for found in programs.run(run_program, 4, by_loop, folder, ring_size):
        assert found[1:] == expected[1:]
        assert [sorted(rows) for rows in found[1]] == [[*range(9)]] * 3
        assert_alike(found[0], [], expected[0], [])


def test_a_loop_whose_processes_read_for_themselves(tmp_path, programs):
    """Rows are divided, and not files; the first ones fill up the last batches."""
    save(tmp_path, tiny_llama)
    ways = ((False, False), (True, None))  # A sharded loader does not dispatch.
    found = [programs.run(run_program, 4, by_loop, str(tmp_path / "run"), 2, *way) for way in ways]
    for of_whole, of_parts in zip(*found, strict=True):
        assert of_whole[1:] == of_parts[1:]
        assert_alike(of_whole[0], [], of_parts[0], [])
        _, epochs, skipped = of_whole
        assert all(sorted(rows[:9]) == [*range(9)] and rows[9:] == rows[:3] for rows in epochs)
        assert skipped == [8, 0, 1, 2]


def test_the_loader_of_rings_of_one_process_is_that_of_accelerate(tmp_path, programs):
    save(tmp_path, tiny_llama)
    ways = ((None,), (1, True))
    found = [programs.run(run_program, 2, by_loop, str(tmp_path / "run"), *way) for way in ways]
    for of_accelerate, of_ring in zip(*found, strict=True):
        assert of_accelerate[1:] == of_ring[1:]
        assert_alike(of_accelerate[0], [], of_ring[0], [])


def drawn(rank):
    """The random numbers of a rank after each batch, if the first process draws numbers for a batch of a stream."""
    process_environment(rank, 4)
    accelerator = Accelerator()
    ring = ra.Ring.from_accelerator(accelerator, 2)
    torch.manual_seed(ring.dp_rank)

    def noisy(rows):
        return {"noise": torch.rand(len(rows)), **default_data_collator(rows)}

    return [torch.rand(()).item() for _ in accelerator.prepare(DataLoader(stream(8), 2, collate_fn=noisy))]


def test_ranks_of_a_ring_draw_the_same_numbers(programs):
    """Dropout in a head needs them; another ring has numbers of its seed."""
    first, second, third, fourth = programs.run(drawn, 4)
    assert first == second != third == fourth


class OwnEpochs(Trainer):
    """Trainer's method cannot be replaced by a copy that skips the batches of rings."""

    def _run_epoch(self, *args, **options):
        return super()._run_epoch(*args, **options)


def refused(rank, folder):
    process_environment(rank, 2)
    kind, ring = over(OwnEpochs, 2)
    with pytest.raises(ValueError, match="overrides _run_epoch of Trainer, which counts processes"):
        kind(tiny_llama(), TrainingArguments(**settings(folder)), **ring)
    kind, ring = over(OwnEpochs, 1)
    kind(tiny_llama(), TrainingArguments(**settings(folder)), **ring)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    ring = ra.Ring.from_accelerator(accelerator, 2)
    model = ra.patch_model(tiny_llama(), ring=ring)
    loader = DataLoader(stream(3), collate_fn=default_data_collator)
    with pytest.raises(ValueError, match="dispatch_batches=True has one process read for all"):
        ring.prepare_data_loader(loader)
    assert model.training
    prepared = accelerator.prepare(loader)
    accelerator.dataloader_config.use_stateful_dataloader = True  # TorchData is not installed for all tests.
    with pytest.raises(ValueError, match="use_stateful_dataloader=True counts the batches of processes"):
        accelerator.skip_first_batches(prepared, 1)
    with pytest.raises(ValueError, match="split_batches=True, and batch sizes count the rows of a ring"):
        ra.Ring.from_accelerator(Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)), 2)


def test_what_would_be_wrong_is_refused(tmp_path, programs):
    programs.run(refused, 2, str(tmp_path))
