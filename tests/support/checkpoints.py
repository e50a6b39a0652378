"""The folder of a tiny checkpoint: a Llama with random weights, and a tokenizer of bytes or of words; and a calibration."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_ring_attention as ra

WORDS = "the quick brown fox jumps over lazy dog".split()


def word_tokenizer(words, **tokens):
    """A tokenizer of words between spaces, by their places; the first one stands for any other."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def save_checkpoint_of_words(folder, change=lambda model: model, **sizes):
    """Saves a folder `model` with a tokenizer of `WORDS`, of which "the" is every other word, and two texts beside it.

    Args:
        change: a function that changes the model before it is saved.
    """
    word_tokenizer(WORDS).save_pretrained(folder / "model")
    torch.manual_seed(0)
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(WORDS), **tiny, **sizes)
    change(LlamaForCausalLM(config)).save_pretrained(folder / "model")
    (folder / "fox.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    (folder / "dog.txt").write_text("lazy dog over the quick fox " * 40)
    return folder


def save_tiny_checkpoint(folder, end_token=None, **sizes):
    """The same weights at every call for equal sizes; an end token, if there is one, ends texts and pads them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate([*letters, *filter(None, [end_token])])}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    of_bytes = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_token, pad_token=end_token)
    of_bytes.save_pretrained(folder)
    torch.manual_seed(0)
    tiny = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = LlamaConfig(
        vocab_size=len(tokens), eos_token_id=tokens.get(end_token), **{**tiny, "intermediate_size": 64, **sizes}
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def save_calibration(file, layers):
    """Writes a calibration of layers of a model, of two key/value heads; returns the name of its file."""
    patterns = {layer: ra.Pattern.parse(text) for layer, text in layers.items()}
    scores = dict.fromkeys(layers, ((0.0,), (0.0,)))
    menu = tuple(patterns.values())
    ra.Calibration(
        patterns, max(layers) + 1, 1.0, "flops", 100, None, menu, scores, texts=(), retrieval=0.0, seed=0
    ).save(file)
    return str(file)
