"""Loaders of shards: every row once, the same on a ring; and collators, resuming, and what is refused."""

import itertools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
)
from transformers import Qwen3Config, Qwen3ForTokenClassification

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.training import SIZES, documents, process_environment, tiny_llama

COLLATE = ra.PaddingCollator()


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class SizedStream(Stream):
    def __len__(self):
        return len(self.rows)


class Groups(BatchSampler):
    """Batches in an order that each global generator has a part in."""

    def __init__(self, count):
        self.count, self.batch_size, self.drop_last = count, 2, False

    def __len__(self):
        return -(-self.count // 2)

    def __iter__(self):
        order = torch.randperm(self.count).tolist()
        random.shuffle(order)
        np.random.shuffle(order)  # noqa: NPY002
        return iter([order[start : start + 2] for start in range(0, self.count, 2)])


def numbered(count):
    """Rows that can be told apart: row i is i + 1, repeated; 12 tokens or a few more."""
    return [{"input_ids": [number + 1] * (12 + number % 3)} for number in range(count)]


def streamed(rows, shards=1):
    from datasets import Dataset as Table

    return Table.from_list(rows).to_iterable_dataset(num_shards=shards)


# ---- rows over rings


def epochs_of(rank, ring_size, name):
    """For each epoch of a loader: the row numbers of this rank's batches, and tokens with labels."""
    rows, arguments, skip = KINDS[name]
    process_environment(rank, dist.get_world_size())
    accelerator = Accelerator()
    ring = ra.Ring.from_accelerator(accelerator, size=ring_size, layout="contiguous")
    torch.manual_seed(rank)  # the order is process 0's
    loader = ring.prepare_data_loader(DataLoader(rows, collate_fn=COLLATE, **arguments))
    if skip:
        loader.skip_first_batches(skip)
    epochs = []
    for _ in range(2):
        batches = []
        for shard in loader:
            assert not hasattr(rows, "__len__") or len(batches) < len(loader)
            # What processes draw for themselves, by the length of their rows, parts their random states.
            count = shard["input_ids"].numel()
            torch.rand(count), np.random.rand(count), [random.random() for _ in range(count)]  # noqa: NPY002
            real = shard["input_ids"][shard.get("attention_mask", torch.ones_like(shard["input_ids"])) == 1]
            batches.append((sorted(set((real - 1).tolist())), int((shard["shift_labels"] != -100).sum())))
            end = accelerator.gradient_state.end_of_dataloader
        assert end
        epochs.append(batches)
    return epochs


KINDS = {
    "in order": (numbered(11), {"batch_size": 2}, 0),
    "shuffled": (numbered(11), {"batch_size": 2, "shuffle": True}, 0),
    "dropping": (numbered(11), {"batch_size": 2, "shuffle": True, "drop_last": True}, 0),
    "workers": (numbered(11), {"batch_size": 2, "shuffle": True, "num_workers": 1}, 0),
    "shuffled by its own sampler": (numbered(11), {"batch_size": 2, "sampler": SubsetRandomSampler(range(11))}, 0),
    "shuffled by groups": (numbered(11), {"batch_sampler": Groups(11)}, 0),
    "iterable": (Stream(numbered(11)), {"batch_size": 2}, 0),
    "iterable, sized": (SizedStream(numbered(11)), {"batch_size": 2}, 0),
    "iterable, sized, dropping": (SizedStream(numbered(11)), {"batch_size": 2, "drop_last": True}, 0),
    "iterable, dropping": (Stream(numbered(11)), {"batch_size": 2, "drop_last": True}, 0),
    "streamed": (streamed(numbered(11)), {"batch_size": 2}, 0),
    "streamed shards": (streamed(numbered(11), shards=4), {"batch_size": 2}, 0),
    "skipping": (numbered(11), {"batch_size": 2, "shuffle": True}, 1),
    "iterable, skipping": (Stream(numbered(11)), {"batch_size": 2}, 1),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", KINDS)
def test_every_row_is_read_once_by_one_ring(name):
    by_rank = run_ranks(epochs_of, 4, 2, name)
    skip = KINDS[name][2]
    for epoch in range(2):
        # All processes take as many batches.
        assert len({len(epochs[epoch]) for epochs in by_rank}) == 1
        rings = [by_rank[0][epoch], by_rank[2][epoch]]
        for ring, others in zip(rings, (by_rank[1][epoch], by_rank[3][epoch]), strict=True):
            for (rows, _), (theirs, _) in zip(ring, others, strict=True):
                assert not rows or not theirs or rows == theirs, "a ring's ranks have tokens of the same rows"
        # A rank may hold only the padding of a short row.
        rows = [
            set(a) | set(b)
            for first, second in ((0, 1), (2, 3))
            for (a, _), (b, _) in zip(by_rank[first][epoch], by_rank[second][epoch], strict=True)
        ]
        read = sorted(itertools.chain.from_iterable(rows))
        assert len(read) == len(set(read)), "no row is read twice"
        if "dropping" in name:
            # Two rows a batch, as many batches for each ring.
            assert len(read) == 8
        elif skip and epoch == 0:
            assert len(read) == 11 - 4
        else:
            assert read == list(range(11))
        if read == list(range(11)):
            labels = sum(count for epochs in by_rank for _, count in epochs[epoch])
            assert labels == sum(len(row["input_ids"]) - 1 for row in numbered(11))
    if ("shuffle" in KINDS[name][1] or "shuffled" in name) and not skip:
        assert by_rank[0][0] != by_rank[0][1], "each epoch has an order of its own"


def test_skipping_goes_on_in_the_same_order():
    for whole, skipping in zip(*(run_ranks(epochs_of, 4, 2, name) for name in ("shuffled", "skipping")), strict=True):
        assert len(whole[0]) == 3
        assert skipping == [whole[0][1:], whole[1]]


# ---- resuming


def test_a_state_goes_on_where_it_was_taken():
    def made():
        torch.manual_seed(5)
        rows = DataLoader(numbered(9), batch_size=2, shuffle=True, collate_fn=COLLATE)
        return ra.Ring.alone().prepare_data_loader(rows)

    loader = made()
    whole = [shard["input_ids"].tolist() for shard in loader] + [shard["input_ids"].tolist() for shard in loader]
    for count in range(10):
        first = made()
        batches = itertools.chain.from_iterable(iter(first) for _ in range(2))
        taken = [shard["input_ids"].tolist() for shard in itertools.islice(batches, count)]
        second = made()
        second.load_state_dict(first.state_dict())
        left = [shard["input_ids"].tolist() for shard in second]
        if len(taken) + len(left) < 10:
            left += [shard["input_ids"].tolist() for shard in second]
        assert taken + left == whole, count


# ---- content


def test_padding_and_packing_say_the_same_of_each_document():
    rows = documents(7, 3, 30, seed=2, prompt=2)
    padded = ra.shard_batch(ra.PaddingCollator(padding_side="left")(rows), ra.Ring.alone())
    packed = ra.shard_batch(ra.PackingCollator(64)(rows), ra.Ring.alone())
    for name in ("input_ids", "position_ids", "labels", "shift_labels"):
        by_document = []
        for row in range(len(rows)):
            by_document.append(padded[name][row][padded["attention_mask"][row] == 1].tolist())
        found = []
        for row in range(len(packed[name])):
            numbers = packed["seq_idx"][row]
            found += [packed[name][row][numbers == number].tolist() for number in range(int(numbers.max()) + 1)]
        assert sorted(by_document) == sorted(found), name
    # The last token of a document predicts nothing, and no token predicts the first of another.
    assert int((packed["shift_labels"] != -100).sum()) == sum(len(row["input_ids"]) - 2 for row in rows)


def test_what_is_no_token_is_passed_on():
    def collate(rows):
        return {**COLLATE(rows), "number": torch.tensor(3), "name": "text"}

    rows = DataLoader(numbered(2), batch_size=2, collate_fn=collate)
    (shard,) = ra.Ring.alone().prepare_data_loader(rows)
    assert shard["number"] == 3 and shard["name"] == "text"


def test_what_a_batch_says_nothing_of():
    rows = {**ra.PackingCollator()(documents(3, 3, 8, seed=2)), "attention_mask": None, "inputs_embeds": None}
    shifted = ra.shard_batch(rows, ra.Ring.alone())["shift_labels"]
    shard = ra.shard_batch({**rows, "labels": None, "shift_labels": shifted}, ra.Ring.alone())
    assert torch.equal(shard["labels"], shifted) and torch.equal(shard["shift_labels"], shifted)
    assert None not in shard.values()


def test_transformers_own_packing_is_understood():
    from transformers import DataCollatorWithFlattening

    rows = documents(4, 3, 30, seed=2)
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    ours = ra.PackingCollator()(rows)
    a, b = (ra.shard_batch(batch, ra.Ring.alone()) for batch in (theirs, ours))
    for name in ("input_ids", "position_ids", "shift_labels", "seq_idx"):
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.ones(1, 8, dtype=torch.int64)}, "no labels"),
        ({"labels": torch.ones(1, 8, dtype=torch.int64)}, "needs input_ids"),
        (
            {"input_ids": torch.ones(1, 8), "labels": torch.ones(1, 7)},
            r"labels of a batch must be .*\(1, 8\), got \(1, 7\)",
        ),
        ("text", "mapping"),
    ],
)
def test_batches_without_what_is_needed(batch, message):
    with pytest.raises(ValueError, match=message):
        ra.shard_batch(batch, ra.Ring.alone())


class Doubling(DataLoader):
    """A loader that gives something else than its parts would."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: Doubling(numbered(4), collate_fn=COLLATE), "Doubling.*__iter__"),
        (lambda: DataLoader(numbered(4), collate_fn=COLLATE, num_workers=1, in_order=False), "in_order=False"),
        (lambda: DataLoader(numbered(4), batch_size=None, collate_fn=COLLATE), "batch_size=None"),
    ],
)
def test_what_a_rings_loader_would_not_do_is_refused(loader, message):
    with pytest.raises(ValueError, match=message):
        ra.Ring.alone().prepare_data_loader(loader())


def test_a_loader_of_another_pattern_is_not_the_same():
    ring = ra.Ring.alone()
    window = ra.Pattern([ra.Window(4)])
    loader = ring.prepare_data_loader(DataLoader(numbered(4), collate_fn=COLLATE), pattern=window)
    assert ring.prepare_data_loader(loader) is loader and ring.prepare_data_loader(loader, pattern=window) is loader
    with pytest.raises(ValueError, match="for another pattern"):
        ring.prepare_data_loader(loader, pattern=ra.Pattern.exact())


def test_torchs_own_collator_of_lists_is_named():
    """It makes of lists a list for each token."""
    rows = DataLoader([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2, batch_size=2)
    with pytest.raises(ValueError, match=r"input_ids .* list.*ra.PaddingCollator"):
        list(ra.Ring.alone().prepare_data_loader(rows))


class Pair(list):
    """A batch of a sampler that tells its dataset more than indices."""

    kind = "pair"


class OfPairs(Dataset):
    def __len__(self):
        return 4

    def __getitems__(self, batch):
        assert batch.kind == "pair"
        return [numbered(4)[index] for index in batch]


def test_a_datasets_own_batches_reach_it_as_its_sampler_makes_them():
    rows = DataLoader(OfPairs(), batch_sampler=[Pair([0, 1]), Pair([2, 3])], collate_fn=COLLATE)
    shards = list(ra.Ring.alone().prepare_data_loader(rows))
    assert [[int(row[0]) for row in shard["input_ids"]] for shard in shards] == [[1, 2], [3, 4]]


def test_a_batch_samplers_drop_last_drops_what_does_not_go_to_all_rings():
    ring = ra.Ring.alone()
    ring.dp_size = 2
    sampler = BatchSampler(range(10), 2, drop_last=True)
    loader = ring.prepare_data_loader(DataLoader(numbered(10), batch_sampler=sampler, collate_fn=COLLATE))
    assert len(loader) == 2


# ---- bad input over processes


class ByProcess(Dataset):
    """Rows that differ between processes."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"input_ids": [index + self.rank + 1] * 12}


class FailingOn(ByProcess):
    def __getitem__(self, index):
        if self.rank == 1 and index == 2:
            raise KeyError("row 2 is broken")
        return {"input_ids": [index + 1] * 12}


def bad_loaders(rank):
    process_environment(rank, dist.get_world_size())
    accelerator = Accelerator()
    errors = {}

    def expect(name, function):
        try:
            function()
        except (ValueError, KeyError, RuntimeError, AttributeError) as error:
            errors[name] = f"{type(error).__name__}: {error}"

    for size in (3, 0, "2", rank + 1):
        expect(f"size {size if isinstance(size, str) or size != rank + 1 else 'differs'}",
               lambda size=size: ra.Ring.from_accelerator(accelerator, size=size))  # fmt: skip
    ring = ra.Ring.from_accelerator(accelerator, size=2)
    rows = numbered(4)
    expect("no model", lambda: list(ring.prepare_data_loader(DataLoader(rows, collate_fn=COLLATE))))
    ra.patch_model(tiny_llama(), ring=ring)  # nobody holds it
    model = ra.patch_model(tiny_llama(), ring=ring)
    expect("different rows", lambda: list(ring.prepare_data_loader(DataLoader(ByProcess(rank), collate_fn=COLLATE))))
    expect("failing", lambda: list(ring.prepare_data_loader(DataLoader(FailingOn(rank), collate_fn=COLLATE))))
    expect("lengths", lambda: ring.prepare_data_loader(DataLoader(numbered(4 + rank), collate_fn=COLLATE)))
    expect("prepared", lambda: ring.prepare_data_loader(accelerator.prepare(DataLoader(rows, collate_fn=COLLATE))))
    sampler = DistributedSampler(rows, num_replicas=2, rank=rank)
    expect("sampler", lambda: ring.prepare_data_loader(DataLoader(rows, sampler=sampler, collate_fn=COLLATE)))
    expect("no loader", lambda: ring.prepare_data_loader(rows))
    expect("one rank alone", lambda: ring.prepare_data_loader(rows if rank else DataLoader(rows, collate_fn=COLLATE)))
    expect("skipping", lambda: accelerator.skip_first_batches(
        ring.prepare_data_loader(DataLoader(rows, collate_fn=COLLATE)), 1))  # fmt: skip
    shard = ra.shard_batch(COLLATE(rows), ring)
    dropping = ra.patch_model(tiny_llama(attention_dropout=0.1), ring=ring)
    expect("dropout at set-up", lambda: ring.prepare_data_loader(DataLoader(rows, collate_fn=COLLATE)))
    dropping.config.attention_dropout = 0.0  # its layers have it still
    dropping.train()
    expect("dropout", lambda: ra.next_token_loss(dropping, shard, ra.count_tokens([shard])))
    expect("a mean of a shard", lambda: model(**shard).loss)
    classifier = Qwen3ForTokenClassification(Qwen3Config(**SIZES))
    expect("another loss", lambda: ra.next_token_loss(classifier, shard, 1))
    dispatching = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    expect("dispatching", lambda: ra.Ring.from_accelerator(dispatching, size=2))
    expect("dispatched loader", lambda: ring.prepare_data_loader(
        dispatching.prepare(DataLoader(rows, collate_fn=COLLATE))))  # fmt: skip
    rings = ra.Ring.from_accelerator(accelerator, size=1)
    ra.patch_model(model, ring=rings)
    expect("few batches", lambda: rings.prepare_data_loader(
        DataLoader(rows, batch_size=4, drop_last=True, collate_fn=COLLATE)))  # fmt: skip
    # A ring without rows takes part all the same.
    assert len(list(rings.prepare_data_loader(DataLoader(Stream(rows), 4, collate_fn=COLLATE)))) == 1
    return errors


EXPECTED = {
    "size 3": "2 processes cannot form rings of 3",
    "size 0": "rings of 0",
    "size 2": "rings of '2'",
    "size differs": "disagree on the size of rings: process 0: 1, process 1: 2",
    "no model": "no model was patched with this ring",
    "different rows": "ring 0 read different rows at batch 0",
    "failing": "row 2 is broken",
    "lengths": "disagree on the number of its rows: process 0: 4, process 1: 5",
    "prepared": "was prepared already",
    "sampler": "DistributedSampler",
    "no loader": "expected a torch DataLoader, got list",
    "one rank alone": "expected a torch DataLoader, got list",
    "skipping": "loader.skip_first_batches(n)",
    "dropout at set-up": "LlamaForCausalLM has attention dropout (attention_dropout=0.1)",
    "dropout": "attention dropout 0.1 was asked for",
    "a mean of a shard": "without num_items_in_batch",
    "another loss": "Qwen3ForTokenClassification does not compute the loss of next tokens",
    "dispatching": "dispatch_batches=True",
    "dispatched loader": "dispatches batches from one process",
    "few batches": "1 batches of 4 rows for 2 rings",
}


def test_every_process_says_what_is_wrong():
    for errors in run_ranks(bad_loaders, 2):
        for name, text in EXPECTED.items():
            assert text in errors.get(name, "no error"), name
        assert len(errors) == len(EXPECTED)
