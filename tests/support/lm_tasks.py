"""Tasks of lm-evaluation-harness of every kind, on texts drawn by a seed, that need nothing from a hub."""

import json
import random

GENERATED = {"output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{answer}}"}
#: Beams that no word can end: the harness (0.4.13) looks for its words in as many beams as a batch has rows, so its answers
#: would follow the size of the batch.
BEAMS = {"until": ["~" * 9], "min_new_tokens": 8, "max_gen_toks": 8, "do_sample": False, "num_beams": 3}
#: One task of each kind of request, by its name: what its file holds beside the data and the name, and its metrics.
KINDS = {
    "ring_likelihood": (
        {"output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{answer}}"},
        [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}, {"metric": "acc"}],
    ),
    "ring_rolling": (
        {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{context}}"},
        [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    ),
    "ring_choice": (
        {"output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_target": "{{right}}"}
        | {"doc_to_choice": "{{choices}}", "num_fewshot": 1, "fewshot_config": {"sampler": "first_n"}},
        [{"metric": "acc"}, {"metric": "acc_norm"}],
    ),
    "ring_generation": (
        {**GENERATED, "generation_kwargs": {"until": ["~"], "max_gen_toks": 12, "do_sample": False}},
        [{"metric": "exact_match"}],
    ),
    "ring_beams": ({**GENERATED, "generation_kwargs": BEAMS}, [{"metric": "exact_match"}]),
}
WORDS = "the a ring of keys sees far and near tokens while queries wait for their rows to come home again".split()


def write_tasks(folder, seed, documents=5, words=30):
    """Writes a folder for `--include_path`, with `KINDS` over the same documents; one of them has a single word."""
    rng = random.Random(seed)
    texts = [[rng.choice(WORDS) for _ in range(rng.randrange(2, words))] for _ in range(documents - 1)]
    lines = []
    for text in [*texts, ["a"]]:
        # Answers of one token share the row of their question; other answers differ in length.
        choices = [" x", " y", " " + " ".join(rng.choices(WORDS, k=2)), " " + rng.choice(WORDS)]
        document = {"context": " ".join(text), "answer": " " + rng.choice(WORDS), "choices": choices}
        lines.append(json.dumps({**document, "right": rng.randrange(4)}))
    data = folder / "documents.jsonl"
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    of_data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, (kind, metrics) in KINDS.items():
        task = {"task": name, **of_data, **kind, "metric_list": metrics}
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return folder
