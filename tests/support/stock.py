"""Programs as their users have them, of Transformers' Trainer and of TRL, each changed in two lines for a ring."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset

import hf_ring_attention as ra
from tests.support import checkpoints
from tests.support.tolerance import distance
from tests.support.training import PLAIN_STEPS, process_environment

WORDS = 90
PATTERN = "window:12+2"


def word_tokenizer():
    """A tokenizer of words w0 to w89, with tokens for padding and for the end of a text."""
    words = [*(f"w{number}" for number in range(WORDS)), "<pad>", "<eos>"]
    return checkpoints.word_tokenizer(words, pad_token="<pad>", eos_token="<eos>", bos_token="w1")


def texts(count, *columns, shortest=9, longest=30, seed=0):
    """A data set of so many rows, with texts of random words in the columns."""
    generator = torch.Generator().manual_seed(seed)

    def text():
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return " ".join(f"w{int(x)}" for x in torch.randint(2, WORDS, (length,), generator=generator))

    return Dataset.from_list([{name: text() for name in columns} for _ in range(count)])


def settings(folder, steps=3, batch_size=2, **changes):
    """The arguments that all these Trainers share."""
    sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), batch_size)
    return {**PLAIN_STEPS, "output_dir": folder, "max_steps": steps, "seed": 3, "bf16": False, **sizes, **changes}


def weights(model):
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def over(trainer_class, ring_size):
    """The Trainer for rings of this size, as in the guide: one line, and one argument."""
    if ring_size is None:
        return trainer_class, {}

    class RingTrainer(ra.RingTrainerMixin, trainer_class):
        pass

    return RingTrainer, {"ring_size": ring_size}


def save(folder, *makers):
    """Saves tiny models with a pattern, from where programs load them: TRL loads its reference from there too."""
    for make in makers:
        ra.patch_model(make(None), PATTERN).save_pretrained(folder / make.__name__)
        word_tokenizer().save_pretrained(folder / make.__name__)


def saved(folder, auto, make):
    """The saved model."""
    return auto.from_pretrained(Path(folder).parent / make.__name__, dtype=torch.get_default_dtype())


def run_program(rank, program, folder, ring_size, *more):
    """The result of a program on this rank; all ranks share the folder."""
    process_environment(rank, dist.get_world_size() if dist.is_initialized() else 1)
    return program(folder, ring_size, *more)


def assert_alike(found, own_log, expected, log, bound=1e-6, rel=1e-4):
    """The weights, relative to the largest one of each, and all that was logged but times."""
    assert found.keys() == expected.keys() and len(own_log) == len(log)
    for name, x in found.items():
        assert distance(x, expected[name]) <= bound, (name, distance(x, expected[name]))
    for entry, other in zip(own_log, log, strict=True):
        for name in (name for name in other if "runtime" not in name and "per_second" not in name):
            assert entry[name] == pytest.approx(other[name], rel=rel, abs=rel / 100, nan_ok=True), name
