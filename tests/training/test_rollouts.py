"""The ranks of a ring share the prompts that TRL's trainers complete, and all get the completions of one process."""

import asyncio
import logging
import threading
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset

from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.training.rollouts import SharedRollouts
from tests.support.ranks import run_simulated
from tests.support.stock import PATTERN, assert_alike, over, run_program, save, settings, texts, word_tokenizer
from tests.support.training import tiny_llama
from tests.support.vllm_stand_in import stand_in
from tests.training.test_stock_trainers import finished, greedy, language, length_of, tiny_teacher

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]


def counting(kind, found):
    """The Trainer; it notes how many prompts a process completes at a time."""

    class Counting(kind):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            found.append(len(prompt_ids))
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    return Counting


def kind_of(name):
    """A Trainer whose greedy completions of one prompt differ, or that has one copy of each."""
    return trl.DistillationTrainer if name == "Distillation" else greedy(name)


def trainer_of(folder, ring_size, name="GRPO", kind=None, **changes):
    """A Trainer that completes prompts of a few words, greedily; changes are of its arguments, and of those of its class."""
    kind, ring = over(kind or kind_of(name), ring_size)
    given = {"train_dataset": prompts(), "processing_class": word_tokenizer()}
    given |= (
        {"teacher_model": language(folder, tiny_teacher)} if name == "Distillation" else {"reward_funcs": length_of}
    )
    of_class = (*given, "eval_dataset", "tools", "environment_factory", "rollout_func")
    given |= {name: changes.pop(name) for name in of_class if name in changes}
    sizes = {"batch_size": 4, "max_completion_length": 6, "steps": 2, "generation_kwargs": {"do_sample": False}}
    sizes |= {} if name == "Distillation" else {"num_generations": 2}
    args = getattr(trl, f"{name}Config")(**settings(str(folder), **{**sizes, **changes}))
    return kind(model=language(folder), args=args, **given, **ring)


def prompts(count=12):
    return texts(count, "prompt", shortest=4, longest=9)


def completed(folder, ring_size, name, streaming):
    """Trains and evaluates; also returns how many prompts this process completed at a time."""
    counts = []
    data = {"train_dataset": prompts(), "eval_dataset": prompts(3)}
    data = {name: rows.to_iterable_dataset() if streaming else rows for name, rows in data.items()}
    changes = {"eval_strategy": "steps", "eval_steps": 2, **data}
    return *finished(trainer_of(folder, ring_size, name, counting(greedy(name), counts), **changes)), counts


@pytest.mark.drawn
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("rings", "ring_size"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_rings_complete_what_as_many_processes_complete(name, rings, ring_size, streaming, tmp_path, programs):
    save(tmp_path, tiny_llama)
    stock = programs.run(run_program, rings, completed, tmp_path / "stock", None, name, streaming)
    expected, log, counts = stock[0]
    assert counts == [4, 4, 4, *[2] * (rings == 1)]
    found = programs.run(run_program, rings * ring_size, completed, tmp_path / "rings", ring_size, name, streaming)
    for own, own_log, own_counts in found:
        assert_alike(own, own_log, expected, log)
        assert own_counts == [-(-count // ring_size) for count in counts]


def sampled(folder, ring_size, seeds):
    """Two times four sampled completions of one prompt, for each seed; then again after each process drew other numbers."""
    found, by_chance = [], {"temperature": 2.0, "min_new_tokens": 6}
    for seed in seeds:
        trainer = trainer_of(folder, ring_size, kind=trl.GRPOTrainer, seed=seed, generation_kwargs=by_chance)
        for drawn in (0, dist.get_rank()):
            torch.rand(drawn)
            prompts = [[5, 6, 7, 8]] * 4
            found += [trainer._generate_single_turn(prompts, None, {}, 4)[0] for _ in range(2)]
    return found


def test_sampled_completions_differ_between_copies_and_rings_and_not_between_ranks(tmp_path, programs):
    save(tmp_path, tiny_llama)
    rings = programs.run(run_program, 4, sampled, str(tmp_path / "rings"), 2, (3, 10, 20))
    assert rings[0] == rings[1] and rings[2] == rings[3]
    for calls in (rings[0], rings[2]):
        assert all(len({*map(tuple, call)}) == 4 for call in calls)
    # None comes twice: not from the other ring, nor from another call or seed.
    assert len({tuple(x) for calls in rings[::2] for call in calls for x in call}) == 2 * 3 * 4 * 4


def refused(folder, ring_size):
    """The errors of a rank if another one fails in the second step, and if prompts differ between ranks."""

    class Failing(trl.GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            if self.state.global_step == 1 and dist.get_rank() == 1:
                raise ValueError("no room")
            return super()._generate_single_turn(*args, **kwargs)

    trainer = trainer_of(folder, ring_size, kind=Failing)
    with pytest.raises(ValueError) as failed:
        trainer.train()
    with pytest.raises(ValueError) as differing:
        trainer._generate_single_turn([[5, 6, 7 + dist.get_rank()]] * 2, None, {}, 2)
    return str(failed.value), str(differing.value)


def test_an_error_of_one_rank_and_other_prompts_end_all_ranks(tmp_path, programs):
    save(tmp_path, tiny_llama)
    first, second = programs.run(run_program, 2, refused, str(tmp_path / "ring"), 2)
    assert first[0] == "rank 1 of the ring refused the call: no room" and second[0] == "no room"
    for _, error in (first, second):
        assert error.startswith("the ranks of the ring disagree on the prompts: rank 0: ")


# ---- tools, environments, custom rollouts

#: Renders all that a conversation has, word by word.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} "
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def this_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def look_up(word: str) -> str:
    """Looks up a word; each rank finds something else.

    Args:
        word: The word.
    """
    return f"w{20 + len(word) + 7 * this_rank()}"


async def ask(word: str) -> str:
    """Asks for a word; the answer depends on the rank, and one rank gets none.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    if this_rank() == 1:
        raise TimeoutError("no answer")
    return f"w{40 + len(word) + this_rank()} w3"


class Shop:
    """An environment with a state; each rank sells at other prices."""

    def reset(self, **row):
        """Begins a sale."""
        self.paid = 0.0
        return " w7"

    def buy(self, word: str) -> str:
        """Buys a word.

        Args:
            word: The word.
        """
        self.paid += 1 + len(word) * (1 + this_rank())
        return f"w{50 + this_rank()}"

    def get_reward(self):
        return self.paid


def parsed(tokenizer, ids, prefix=None, tools=None):
    """A message; some call a tool, and some more than one."""
    words = tokenizer.decode(ids).split()
    arguments = {"word": words[0]}
    called = [tool for place, tool in enumerate(tools) if (sum(ids) + place) % 4 > 1]
    calls = [{"type": "function", "function": {"name": tool.__name__, "arguments": arguments}} for tool in called]
    return {"role": "assistant", "content": " ".join(words), "tool_calls": calls}


def with_tools(folder, ring_size, name, environment, changes):
    """Trains on conversations with tools; also returns the texts of the conversations that were scored."""
    from trl.trainer import distillation_trainer, grpo_trainer

    heard = []

    def score(completions, **columns):
        heard.extend([message["content"] for message in completion] for completion in completions)
        return [float(len(completion) + len(completion[-1]["content"]) % 3) for completion in completions]

    tokenizer = word_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {}
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in prompts()]
    sizes = {"batch_size": 6, "max_completion_length": 24, "max_tool_calling_iterations": 2}
    given = {"processing_class": tokenizer, "train_dataset": Dataset.from_list(rows), **sizes}
    given |= {"environment_factory": Shop} if environment else {"tools": [look_up, ask][: 2 if name == "GRPO" else 1]}
    given |= {"reward_funcs": score} if name == "GRPO" else {}
    given["generation_kwargs"] = {"max_new_tokens": 5, "do_sample": False}
    with (
        mock.patch.object(grpo_trainer, "parse_response", parsed),
        mock.patch.object(distillation_trainer, "parse_response", parsed),
        stand_in(),
    ):
        return *finished(trainer_of(folder, ring_size, name, **{**given, **changes})), heard


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "environment", "changes"),
    [
        ("GRPO", False, {}),
        ("GRPO", True, {}),
        ("GRPO", False, {"use_vllm": True, "generation_kwargs": {"max_tokens": 5}}),
        ("Distillation", False, {}),
    ],
    ids=["tools", "environment", "vllm", "distillation"],
)
def test_what_tools_answer_the_first_rank_counts(name, environment, changes, tmp_path, programs):
    """As if one process had asked; the tools of other ranks answer otherwise."""
    save(tmp_path, tiny_llama, tiny_teacher)
    ((expected, log, heard),) = programs.run(
        run_program, 1, with_tools, tmp_path / "one", None, name, environment, changes
    )
    assert all(entry["tools/call_frequency"] > 0 for entry in log[:2])
    if name == "GRPO":
        lengths = {len(texts) for texts in heard}
        assert min(lengths) == 1 and max(lengths) >= 5, lengths
    for own, own_log, own_heard in programs.run(
        run_program, 2, with_tools, tmp_path / "ring", 2, name, environment, changes
    ):
        assert_alike(own, own_log, expected, log)
        assert own_heard == heard


def with_rollouts(folder, ring_size):
    """Trains on completions of a custom function; also returns how many prompts it got, and what the rewards got."""
    counts, heard = [], []

    def complete(prompts, trainer):
        """Completes each group once, as some do."""
        counts.append(len(prompts))
        ids = [ids for ids in trainer.processing_class(text=prompts[::2])["input_ids"] for _ in range(2)]
        found = {"prompt_ids": ids, "completion_ids": [[5 + x % 7 for x in row[:4]] for row in ids]}
        found["logprobs"] = [[0.0] * len(row) for row in found["completion_ids"]]
        return {**found, "env_mask": [[1, 0, 1, 1] for _ in ids], "last": [row[-1] for row in ids], "note": "seen"}

    def score(prompts, last, note, **columns):
        heard.extend(zip(prompts, last, note, strict=True))
        return [float(number % 2 + x % 5) for number, x in enumerate(last)]

    trainer = trainer_of(folder, ring_size, reward_funcs=score, rollout_func=complete, batch_size=6)
    trained = finished(trainer)

    def short(prompts, trainer):
        found = complete(prompts, trainer)
        return {**found, "completion_ids": found["completion_ids"][1:]}

    if ring_size is not None:
        with pytest.raises(ValueError, match="rollout_func returned 3 completions of 4 prompts: return one for each"):
            trainer_of(folder, ring_size, rollout_func=short, batch_size=6).train()
    return *trained, counts[:2], heard


def test_custom_rollouts_are_shared(tmp_path, programs):
    """By whole groups of prompts."""
    save(tmp_path, tiny_llama)
    ((expected, log, counts, heard),) = programs.run(run_program, 1, with_rollouts, tmp_path / "one", None)
    assert counts == [6, 6] and all(note == "seen" for *_, note in heard)
    for own, own_log, own_counts, own_heard in programs.run(run_program, 2, with_rollouts, tmp_path / "ring", 2):
        assert_alike(own, own_log, expected, log)
        assert own_counts == [4, 4] and own_heard == heard


# ---- images


class Completing:
    """In place of TRL's Trainer: it keeps its arguments, and completes a prompt with its number of tokens."""

    def _generate_single_turn(self, prompt_ids, images, fields, **more):
        self.asked = (prompt_ids, images, fields, more)
        first, failed, late = more.get("fails", (False, None, None))
        if first:
            raise OSError("no server")
        if failed is not None and not failed.wait(20):
            late.append("the first rank waits for this one")
        return [[len(ids)] for ids in prompt_ids], None


class Sharing(SharedRollouts, Completing):
    """A Trainer of a rank."""

    def __init__(self, ring, **args):
        self.ring, self.args = ring, SimpleNamespace(**{"use_vllm": False, "vllm_mode": "colocate", **args})
        self.accelerator = SimpleNamespace(device=torch.device("cpu"))


#: Prompts of several lengths, and the images of each.
PROMPTS = [[9] * length for length in (3, 5, 4, 6, 7)]
IMAGES = [["a"], None, ["b", "c"], ["d"], None]


def pixels_of(image, rows=1):
    return torch.full((rows, 3, 2, 2), float(ord(image)))


def flat(numbers):
    """As LLaVA has images: one row each, and their sizes."""
    images = [image for number in numbers for image in IMAGES[number] or ()]
    sizes = torch.tensor([[ord(image), 2] for image in images])
    return {"pixel_values": torch.cat([*map(pixels_of, images)]), "image_sizes": sizes} if images else {}


def as_arrays(numbers):
    """The same without sizes, as some processors return it."""
    return {name: x.numpy() for name, x in flat(numbers).items() if name == "pixel_values"}


def in_patches(numbers):
    """As Qwen2-VL has images: patches by a grid, and kinds of tokens for each prompt."""
    images = [image for number in numbers for image in IMAGES[number] or ()]
    grids = torch.tensor([[1, ord(image) - ord("a") + 1, 2] for image in images])
    kinds = {"mm_token_type_ids": [[number] * len(PROMPTS[number]) for number in numbers]}
    if not images:
        return kinds
    patches = [pixels_of(x, int(grid.prod())).flatten(1) for x, grid in zip(images, grids)]
    return {"pixel_values": torch.cat(patches), "image_grid_thw": grids, **kinds}


def with_positions(numbers):
    """As Gemma has images: patches of one number, with positions, and kinds of tokens."""
    found = flat(numbers)
    kinds = {"token_type_ids": [[number] * len(PROMPTS[number]) for number in numbers]}
    return (
        {"pixel_values": found["pixel_values"], "image_position_ids": found["image_sizes"], **kinds} if found else kinds
    )


def in_tiles(numbers):
    """As InternVL has images: several tiles each."""
    images = [image for number in numbers for image in IMAGES[number] or ()]
    return {"pixel_values": torch.cat([pixels_of(image, 2) for image in images])}


def in_shapes(numbers):
    """As LFM2-VL has images: tiles of patches, and their shapes."""
    tiles = in_tiles(numbers)["pixel_values"].flatten(2)
    mask, shapes = torch.ones(tiles.shape[:2]), torch.tensor([[1, 3]] * len(tiles))
    return {"pixel_values": tiles, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def in_rows(numbers):
    """As Idefics has images: a row for each prompt, with a mask of pixels."""
    pixels = torch.tensor([[ord("".join(IMAGES[number] or "-")[0]), number] for number in numbers])
    return {"pixel_values": pixels[..., None, None, None].expand(-1, -1, 3, 2, 2), "pixel_attention_mask": pixels}


def assert_same_fields(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        if isinstance(x, list) and isinstance(x[0], list):
            assert found[name] == x, name
        else:
            torch.testing.assert_close(found[name], torch.as_tensor(x), rtol=0, atol=0)


def asked(processor, ring_size, numbers=range(5), **args):
    """What each rank was asked for, when these prompts were completed; all get the completions in order."""
    chosen = [PROMPTS[number] for number in numbers], [IMAGES[number] for number in numbers], processor(numbers)

    def complete(ring):
        trainer = Sharing(ring, **args)
        found = trainer._generate_single_turn(*chosen, num_generations=2)
        assert found == ([[len(ids)] for ids in chosen[0]], None)
        return trainer.asked

    return run_simulated(complete, ring_size)


@pytest.mark.parametrize("processor", [flat, as_arrays, in_patches, with_positions], ids=lambda x: x.__name__)
@pytest.mark.parametrize("shares", [[(0, 1, 2), (3, 4, 0)], [(0, 1), (2, 3), (4, 0)], [(0,), (1,), (2,), (3,), (4,)]])
def test_a_rank_gets_the_images_of_its_prompts(processor, shares):
    """Also of a prompt with none or two, and of none but such prompts."""
    for numbers, (ids, images, fields, more) in zip(shares, asked(processor, len(shares)), strict=True):
        assert ids == [PROMPTS[number] for number in numbers]
        assert images == [IMAGES[number] for number in numbers] and more == {"num_generations": 2}
        assert_same_fields(fields, processor(numbers))


def test_rows_of_images_stay_with_their_prompts():
    """Also if there are as many images as prompts."""
    for rank, (_, _, fields, _) in enumerate(asked(in_rows, 2, range(4))):
        assert_same_fields(fields, in_rows(range(2 * rank, 2 * rank + 2)))


def test_an_error_of_a_server_does_not_wait_for_ranks_that_wait_for_it():
    """The main process alone asks the server; in TRL the others wait for its broadcast."""
    failed, late = threading.Event(), []

    def complete(ring):
        trainer = Sharing(ring, use_vllm=True, vllm_mode="server")
        try:
            trainer._generate_single_turn(PROMPTS, None, {}, fails=(ring.rank == 0, failed, late))
        finally:
            failed.set()

    with pytest.raises(OSError, match="no server"):
        run_simulated(complete, 2)
    assert not late


@pytest.mark.parametrize("processor", [in_tiles, in_shapes], ids=lambda x: x.__name__)
def test_images_that_are_not_divided_by_prompts_go_to_all_ranks(processor, caplog):
    warn_once.cache_clear()
    for ids, images, fields, _ in asked(processor, 2):
        assert ids == PROMPTS and images == IMAGES
        assert_same_fields(fields, processor(range(5)))
    assert "every rank completes all prompts: pixel_values" in caplog.text


def test_vllm_processes_images_itself():
    for number, (ids, images, fields, _) in enumerate(asked(flat, 2, range(4), use_vllm=True)):
        assert ids == PROMPTS[2 * number :][:2] and images == IMAGES[2 * number :][:2] and fields == {}
    for ids, images, fields, _ in asked(flat, 2, range(4), use_vllm=True, vllm_mode="server"):
        assert ids == PROMPTS[:4] and images == IMAGES[:4] and fields == {}


# ---- vLLM


def save_exact(folder):
    """Saves the model without a pattern, which vLLM computes as it is trained."""
    tiny_llama(None).save_pretrained(folder / "tiny_llama")
    word_tokenizer().save_pretrained(folder / "tiny_llama")


def by_vllm(folder, ring_size, name, changes):
    """Trains on completions of vLLM; also returns all calls of it, and how many prompts this process completed at a time."""
    counts = []
    kind = getattr(trl, f"{name}Trainer") if changes.get("vllm_mode") == "server" else kind_of(name)
    with stand_in(folder.parent / "tiny_llama") as calls:
        changes = {"use_vllm": True, "generation_kwargs": {}, **changes}
        return *finished(trainer_of(folder, ring_size, name, counting(kind, counts), **changes)), calls, counts


def of_kind(calls, kind):
    return [what for name, what in calls if name == kind]


def completed_prompts(calls):
    return [what["prompts"] for what in of_kind(calls, "generate")]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("GRPO", {}),
        ("GRPO", {"vllm_enable_sleep_mode": True}),
        ("GRPO", {"vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True}),
        ("RLOO", {}),
        ("RLOO", {"vllm_enable_sleep_mode": True, "vllm_tensor_parallel_size": 2}),
        ("Distillation", {"vllm_enable_sleep_mode": True}),
    ],
    ids=["GRPO", "asleep", "tensors", "RLOO", "RLOO-tensors", "distillation"],
)
def test_an_engine_in_each_process_completes_a_share(name, changes, tmp_path, programs):
    """The engines get the numbers of processes, and the weights once for each step."""
    save(tmp_path, tiny_teacher, *([tiny_llama] if name == "GRPO" else []))
    if name != "GRPO":
        save_exact(tmp_path)
    stock = {**changes, "vllm_tensor_parallel_size": 1}
    ((expected, log, calls, counts),) = programs.run(run_program, 1, by_vllm, tmp_path / "one", None, name, stock)
    assert counts == [4, 4]
    whole = completed_prompts(calls)
    together = changes.get("vllm_tensor_parallel_size", 1)
    for rank, found in enumerate(programs.run(run_program, 2, by_vllm, tmp_path / "ring", 2, name, changes)):
        own, own_log, own_calls, own_counts = found
        assert_alike(own, own_log, expected, log)
        assert own_counts == [2, 2]
        shares = whole if together == 2 else [prompts[2 * rank :][:2] for prompts in whole]
        # After the first step weights may differ by rounding, and prompts do not depend on them.
        assert completed_prompts(own_calls) == shares
        (engine,) = of_kind(own_calls, "LLM")
        launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        assert engine.items() >= {**launched, "seed": rank // together, "tensor_parallel_size": together}.items()
        assert own_calls.count(("reset_prefix_cache", None)) == 2
        assert sorted(of_kind(own_calls, "load_weights")) == sorted([*expected] * 2)
        asleep = changes.get("vllm_enable_sleep_mode", False)
        assert of_kind(own_calls, "sleep") == [2, 2, 2] * asleep
        assert of_kind(own_calls, "wake_up") == [("weights",), ("kv_cache",)] * 2 * asleep


@pytest.mark.parametrize(
    ("rings", "changes"),
    [(1, {}), (2, {}), (2, {"batch_size": 2, "num_generations": 4}), (1, {"steps_per_generation": 2})],
    ids=["one", "two", "group-of-both", "two-steps"],
)
def test_a_server_gets_each_group_once(rings, changes, tmp_path, programs):
    save(tmp_path, tiny_llama)
    changes = {"vllm_mode": "server", "vllm_server_base_url": "http://stand-in:8000", **changes}
    (expected, log, calls, _), *_ = programs.run(run_program, rings, by_vllm, tmp_path / "stock", None, "GRPO", changes)
    (groups, *_), count = completed_prompts(calls), changes.get("num_generations", 2)
    batch = changes.get("batch_size", 4) * changes.get("steps_per_generation", 1)
    assert len(groups) == rings * batch // count
    found = programs.run(run_program, 2 * rings, by_vllm, tmp_path / "rings", 2, "GRPO", changes)
    for rank, (own, own_log, own_calls, own_counts) in enumerate(found):
        assert_alike(own, own_log, expected, log)
        assert set(own_counts) == {batch}
        assert own_calls == (calls if rank == 0 else [])


def refusals(folder, ring_size):
    """Has vLLM refused where it would attend otherwise, or complete the prompts of each rank; also returns what was logged."""
    from trl.experimental import sdpo

    logged, handler = [], logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("hf_ring_attention").addHandler(handler)
    warn_once.cache_clear()
    vllm = {"use_vllm": True, "generation_kwargs": {}}
    with stand_in() as calls:
        for name, more in (("RLOO", {}), ("GRPO", {"vllm_importance_sampling_correction": False})):
            with pytest.raises(
                ValueError, match=r"vLLM completes without the pattern window:12\+2, and Ring.*does not correct it: set"
            ):
                trainer_of(folder, ring_size, name, **vllm, **more)
        kind, ring = over(sdpo.SDPOTrainer, ring_size)
        args = sdpo.SDPOConfig(**settings(str(folder), batch_size=4, num_generations=2, use_vllm=True))
        rows = texts(4, "prompt", "privileged_context")
        given = {"train_dataset": rows, "processing_class": word_tokenizer(), **ring}
        with pytest.raises(
            ValueError, match="use_vllm does not work over a ring in RingTrainer: each rank would complete"
        ):
            kind(language(folder), length_of, args, **given)
        assert not calls and not logged
        for _ in range(2):
            trainer_of(folder, ring_size, **vllm)
        assert len(of_kind(calls, "LLM")) == 2
    logging.getLogger("hf_ring_attention").removeHandler(handler)
    return logged


def test_vllm_that_would_complete_otherwise_is_refused_or_corrected(tmp_path, programs):
    save(tmp_path, tiny_llama)
    for rank, logged in enumerate(programs.run(run_program, 2, refusals, tmp_path / "ring", 2)):
        of_vllm = [text for text in logged if text.startswith("vLLM completes with exact attention")]
        assert len(of_vllm) == (rank == 0)
        assert not of_vllm or f"the model trains with the pattern {PATTERN}: TRL weighs tokens" in of_vllm[0]


def test_without_vllm_trl_names_it(tmp_path, monkeypatch):
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *_: False)
    save(tmp_path, tiny_llama)
    with pytest.raises(ImportError, match="vLLM is not available"):
        run_program(0, partial(trainer_of, use_vllm=True), tmp_path / "one", 1)


# ---- passes


def passes(folder, ring_size, changes):
    """How often the model that trains, and its reference, compute a batch outside of completions."""
    trainer = trainer_of(folder, ring_size, beta=0.1, steps=4, **changes)
    counts, complete = {"policy": 0, "reference": 0}, trainer.model.generate
    outside = [True]

    def generate(*args, **kwargs):
        outside[0] = False
        try:
            return complete(*args, **kwargs)
        finally:
            outside[0] = True

    trainer.model.generate = generate
    models = {"policy": trainer.model, "reference": trainer.accelerator.unwrap_model(trainer.ref_model)}
    for name, model in models.items():

        def count(*_, name=name):
            counts[name] += outside[0]

        model.model.register_forward_pre_hook(count)
    trainer.train()
    return counts


@pytest.mark.parametrize(
    ("changes", "policy", "reference"),
    [
        ({}, 4, 4),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, 8, 8),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 1}, 8, 4),
    ],
    ids=["each-step", "aligned", "old-scores"],
)
def test_a_rank_computes_as_many_passes_as_one_process(changes, policy, reference, tmp_path, programs):
    save(tmp_path, tiny_llama)
    expected = [{"policy": policy, "reference": reference}]
    assert programs.run(run_program, 1, passes, tmp_path / "one", None, changes) == expected
    assert programs.run(run_program, 2, passes, tmp_path / "ring", 2, changes) == expected * 2
