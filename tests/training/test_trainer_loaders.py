"""Loaders of a RingTrainer's subclasses: those that can be right are prepared by its ring, others refused by name."""

import random

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.tolerance import EXACT
from tests.support.training import assert_equal_runs, documents, process_environment, tiny_llama, trainer

pytestmark = pytest.mark.usefixtures("in_float64")

#: Four steps of two rows an epoch, or two of each of two rings: a checkpoint of the third step is in the middle of one.
ROWS = documents(7, 20, 61, seed=0, prompt=3)
EVAL_ROWS = documents(5, 20, 61, seed=3)
COLLATE = ra.PaddingCollator()
STEPS = 5
SAVING = {"steps": STEPS, "save_strategy": "steps", "save_steps": 3}


def loader_of(rows, **arguments):
    return DataLoader(rows, batch_size=2, collate_fn=COLLATE, **arguments)


class Plain(ra.RingTrainer):
    def get_train_dataloader(self):
        return loader_of(self.train_dataset, shuffle=True)

    def get_eval_dataloader(self, eval_dataset=None):
        return loader_of(self.eval_dataset if eval_dataset is None else eval_dataset)

    def get_test_dataloader(self, test_dataset):
        return loader_of(test_dataset)


class ByAccelerator(Plain):
    """As Transformers' documentation has it."""

    def get_train_dataloader(self):
        assert self.accelerator.num_processes == self.args.world_size
        return self.accelerator.prepare(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset=None):
        return self.accelerator.prepare_data_loader(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset):
        loader, model = self.accelerator.prepare(super().get_test_dataloader(test_dataset)), self.model
        return loader if model is self.accelerator.unwrap_model(model) else None


class ByRing(Plain):
    def get_train_dataloader(self):
        return self.ring.prepare_data_loader(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset=None):
        return self.ring.prepare_data_loader(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset):
        return self.ring.prepare_data_loader(super().get_test_dataloader(test_dataset))


class Own(ra.RingTrainer):
    """Calls what it overrides."""

    def get_train_dataloader(self):
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset=None):
        return super().get_eval_dataloader(eval_dataset)


class Dropping(Plain):
    """The loader's own drop_last, and not that of the arguments, ends an epoch."""

    def get_train_dataloader(self):
        return loader_of(self.train_dataset, shuffle=True, drop_last=True)


KINDS = [Plain, ByAccelerator, ByRing, Own]


def trained(rank, folder, ring_size, kinds=KINDS):
    runs = {}
    for kind in (ra.RingTrainer, *kinds):
        where = folder / kind.__name__
        how = {"ring_size": ring_size, "rows": ROWS, "eval_rows": EVAL_ROWS, "collator": COLLATE, "batch_size": 2}
        run, made = trainer(rank, where, trainer_class=kind, **how, **SAVING)
        if kind is ByRing:
            again, _ = trainer(rank, where, trainer_class=kind, **how, resume=str(where / "checkpoint-3"), **SAVING)
            assert_equal_runs(again, run, f"{kind.__name__}, resumed")
        run["evaluated"] = made.evaluate()["eval_loss"]
        run["others"] = made.evaluate(EVAL_ROWS[:3])["eval_loss"]
        run["predicted"] = made.predict(EVAL_ROWS).metrics["test_loss"]
        # For a user, who has no loop that skips rows, both are loaders of shards.
        for loader in (made.get_train_dataloader(), made.get_eval_dataloader()):
            assert "shift_labels" in next(iter(loader))
        runs[kind.__name__] = run
    return runs


def check(runs):
    expected = runs["RingTrainer"]
    for name, run in runs.items():
        assert_equal_runs(run, expected, name)
        for figure in ("evaluated", "others", "predicted"):
            assert run[figure] == pytest.approx(expected[figure], rel=EXACT), (name, figure)
    assert expected["predicted"] == pytest.approx(expected["evaluated"], rel=EXACT)


def test_loaders_of_a_subclass_on_one_process(tmp_path):
    check(trained(0, tmp_path, 1))


@pytest.mark.parametrize("ring_size", [1, 2])
def test_loaders_of_a_subclass_on_two_processes(ring_size, tmp_path):
    for runs in run_ranks(trained, 2, tmp_path, ring_size):
        check(runs)


def dropped(rank, folder, ring_size):
    _, made = trainer(
        rank, folder, ring_size=ring_size, rows=[*ROWS, *ROWS[:2]], collator=COLLATE, trainer_class=Dropping, steps=-1,
        num_train_epochs=2,
    )  # fmt: skip
    return made.state.global_step


def test_the_loaders_own_drop_last_ends_an_epoch(tmp_path):
    # Nine rows: four whole batches for one ring, two for each of two.
    assert dropped(0, tmp_path, 1) == 8
    assert run_ranks(dropped, 2, tmp_path, 1) == [4, 4]


class Rows(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Streamed(ra.RingTrainer):
    def get_train_dataloader(self):
        return loader_of(Rows())


def streamed(rank, folder, ring_size):
    how = {"ring_size": ring_size, "rows": ROWS, "collator": COLLATE, "trainer_class": Streamed, **SAVING}
    whole, _ = trainer(rank, folder, **how)
    again, _ = trainer(rank, folder, **how, resume=str(folder / "checkpoint-3"))
    assert_equal_runs(again, whole, "resumed")
    return whole["losses"]


def test_a_stream_of_a_subclass_is_resumed(tmp_path):
    alone = streamed(0, tmp_path / "alone", 1)
    for losses in run_ranks(streamed, 2, tmp_path / "two", 2):
        assert losses == pytest.approx(alone, rel=EXACT)


class Augmented(Dataset):
    """Rows in which random tokens are others at every reading."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        ids = ROWS[index]["input_ids"]
        return {"input_ids": [token if random.random() < 0.8 else random.randrange(1, 97) for token in ids]}


def augmented(rank, folder, ring_size):
    runs = []
    for workers in (0, 2):
        how = {
            "ring_size": ring_size, "rows": Augmented(), "collator": COLLATE, "batch_size": 2,
            "dataloader_num_workers": workers, **SAVING,
        }  # fmt: skip
        whole, _ = trainer(rank, folder, **how)
        again, _ = trainer(rank, folder, **how, resume=str(folder / "checkpoint-3"))
        assert_equal_runs(again, whole, f"resumed, {workers} workers")
        runs.append(whole)
    assert_equal_runs(*runs, "with workers and without")
    return runs[0]


def test_a_resumed_run_draws_the_augmentation_of_the_uninterrupted_one(tmp_path):
    alone = augmented(0, tmp_path / "alone", 1)
    for run in run_ranks(augmented, 2, tmp_path / "two", 2):
        assert_equal_runs(run, alone, "over a ring")


# ---- what is refused


class NoLoader(ra.RingTrainer):
    def get_eval_dataloader(self, eval_dataset=None):
        return [COLLATE(EVAL_ROWS)]


class PreparedBefore(ra.RingTrainer):
    """By an accelerator that knows of no ring."""

    def get_eval_dataloader(self, eval_dataset=None):
        return Accelerator(cpu=True).prepare(loader_of(EVAL_ROWS))

    get_train_dataloader = get_eval_dataloader


class OfAnotherRing(ra.RingTrainer):
    def get_eval_dataloader(self, eval_dataset=None):
        return ra.Ring.alone().prepare_data_loader(loader_of(EVAL_ROWS))


class OnOneProcess(ra.RingTrainer):
    """Wrong on the last process alone."""

    def get_train_dataloader(self):
        loader = loader_of(ROWS)
        return Accelerator(cpu=True).prepare(loader) if self.args.process_index == self.args.world_size - 1 else loader


class SetFromOutside(ra.RingTrainer):
    """Its loader is put in place of the method."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.get_train_dataloader = lambda: loader_of(ROWS)


REFUSED = [
    (SetFromOutside, "train", "define get_train_dataloader in a subclass"),
    (NoLoader, "evaluate", "expected a torch DataLoader, got list"),
    (PreparedBefore, "evaluate", "was prepared already, by Accelerate"),
    (PreparedBefore, "train", "was prepared already, by Accelerate"),
    (OfAnotherRing, "evaluate", "was prepared already, by another ring"),
    (OnOneProcess, "train", "was prepared already, by Accelerate"),
]


def arguments(folder, ring_size):
    process_environment(dist.get_rank() if dist.is_initialized() else 0, 2 if dist.is_initialized() else 1)
    return ra.RingTrainingArguments(str(folder), ring_size=ring_size, use_cpu=True, report_to=[], disable_tqdm=True)


def refused(rank, folder, ring_size):
    errors = []
    how = {"ring_size": ring_size, "rows": ROWS, "eval_rows": EVAL_ROWS, "collator": COLLATE, "steps": 1}
    for kind, method, _ in REFUSED:
        errors.append("none")
        try:
            if method == "train":
                trainer(rank, folder, trainer_class=kind, **how)
            else:
                made = kind(tiny_llama(), arguments(folder, ring_size), eval_dataset=EVAL_ROWS, data_collator=COLLATE)
                made.evaluate()
        except ValueError as error:
            errors[-1] = str(error)
    return errors


def test_loaders_that_would_be_wrong_are_refused_by_name(tmp_path):
    ranks = [refused(0, tmp_path, 1), *run_ranks(refused, 2, tmp_path, 2)]
    for errors in ranks:
        for (kind, method, text), error in zip(REFUSED, errors, strict=True):
            assert text in error, (kind.__name__, method)
