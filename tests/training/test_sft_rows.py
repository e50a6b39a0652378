"""The rows of TRL's SFT over a ring: a warning names the tokens that it cuts off; packed rows that it would mix are refused."""

import pytest
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, default_data_collator

import hf_ring_attention as ra
from hf_ring_attention.hf.config import warn_once
from tests.support.stock import over, settings, texts, word_tokenizer
from tests.support.training import tiny_llama

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

#: Documents of at most this many tokens stay whole.
LONGEST = 16


def of_sft(folder, ring_size, rows, more=None, **changes):
    """TRL's Trainer, whose rows are prepared when it is made."""
    kind, ring = over(trl.SFTTrainer, ring_size)
    args = trl.SFTConfig(**settings(str(folder), **changes))
    more = {"processing_class": word_tokenizer(), **(more or {})}
    return kind(tiny_llama(), args, train_dataset=rows, **more, **ring)


def tokens(rows):
    return sum(len(row["input_ids"]) for row in rows)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"max_length": LONGEST},
        {"max_length": LONGEST, "packing": True},
        {"max_length": LONGEST, "packing": True, "packing_strategy": "bfd_split"},
        {"max_length": None},
    ],
    ids=str,
)
def test_tokens_that_are_cut_off_are_told(how, streaming, tmp_path, caplog):
    rows = texts(9, "text")
    whole = [len(word_tokenizer()(f"{text}<eos>").input_ids) for text in rows["text"]]
    rows = rows.to_iterable_dataset() if streaming else rows
    warn_once.cache_clear()
    made, stock = ([*of_sft(tmp_path, size, rows, **how).train_dataset] for size in (1, None))
    assert made == stock
    told = [record.getMessage() for record in caplog.records if "will be cut off" in record.getMessage()]
    cut = sum(whole) - tokens(stock)
    assert (cut > 0) == (how["max_length"] is not None and "packing_strategy" not in how)
    if not cut:
        assert not told
    elif streaming:  # Nobody knows how many documents follow its first long one.
        first = next(length for length in whole if length > LONGEST)
        assert told[0].startswith(f"{first - LONGEST} of {first} tokens will be cut off")
    else:
        assert [text.partition(", since")[0] for text in told] == [f"{cut} of {sum(whole)} tokens will be cut off"]


def test_packed_rows_that_would_lose_their_documents_are_refused(tmp_path):
    ids = texts(9, "text").map(lambda row: word_tokenizer()(row["text"]), remove_columns=["text"])
    rows = ra.pack_documents(ids, 32)
    kept = {"data_collator": default_data_collator}
    for more in ({}, kept, {"data_collator": DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)}):
        with pytest.raises(ValueError, match=r"packed, and this Trainer drops their position_ids: pass data_collator"):
            of_sft(tmp_path, 1, rows, more)
    trainer = of_sft(tmp_path, 1, rows, kept, remove_unused_columns=False)
    kind, ring = over(Trainer, 1)
    plain = kind(tiny_llama(), TrainingArguments(**settings(str(tmp_path))), train_dataset=rows, **kept, **ring)
    batches = [next(iter(x.get_train_dataloader())) for x in (trainer, plain)]
    assert all(batch.keys() == {"input_ids", "labels", "position_ids", "attention_mask"} for batch in batches)
