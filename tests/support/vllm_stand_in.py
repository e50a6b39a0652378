"""A stand-in for vLLM, which is not installed: TRL's own VLLMGeneration runs; engines complete greedily by exact attention."""

import os
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import LlamaForCausalLM

PARTS = ("weights", "kv_cache")


class Engine:
    """vLLM's LLM in the process of a trainer; what it is asked while it sleeps is an error, and so are old weights."""

    def __init__(self, calls, model, **settings):
        launched = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        calls.append(("LLM", {"model": model, **settings, **launched}))
        self._calls, self._model, self._sleeps = calls, own_model(model), settings["enable_sleep_mode"]
        self._awake, self._lost = {*PARTS}, set()
        loader = SimpleNamespace(load_weights=self._load_weights)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=loader))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker),
            model_config=SimpleNamespace(max_model_len=self._model.config.max_position_embeddings),
        )

    def _load_weights(self, weights):
        assert "weights" in self._awake, "weights are loaded into an engine whose weights sleep"
        for name, x in weights:
            self._calls.append(("load_weights", name))
            put(self._model, name, x)
            self._lost.discard(name)

    def reset_prefix_cache(self):
        self._calls.append(("reset_prefix_cache", None))

    def wake_up(self, tags=PARTS):
        assert self._sleeps, "an engine wakes that was not made to sleep"
        self._calls.append(("wake_up", tuple(tags)))
        self._awake |= {*tags}

    def sleep(self, level=1):
        """Drops the cache; at level 2 the weights are gone too."""
        assert self._sleeps, "an engine sleeps that was not made for it"
        self._calls.append(("sleep", level))
        self._awake = set()
        if level == 2:
            for name, x in self._model.named_parameters():
                x.data.fill_(torch.nan)
                self._lost.add(name)

    def generate(self, prompts, sampling_params, use_tqdm):
        assert self._awake == {*PARTS}, f"an engine completes while {sorted({*PARTS} - self._awake)} sleep"
        assert not self._lost, f"an engine completes without new weights {sorted(self._lost)}"
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self._calls.append(("generate", {"prompts": ids, **vars(sampling_params)}))
        count, length = sampling_params.n, sampling_params.max_tokens
        return [
            SimpleNamespace(prompt_token_ids=prompt, outputs=completions(self._model, prompt, count, length))
            for prompt in ids
        ]


class Client:
    """TRL's client of a server, and the server; it completes the model of a folder, in the main process of the trainers."""

    def __init__(self, calls, model, **settings):
        calls.append(("VLLMClient", settings))
        self._calls, self._model, self._connected = calls, own_model(model), False

    def init_communicator(self, device):
        self._calls.append(("init_communicator", str(device)))
        self._connected = True

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, parameters):
        assert self._connected, "weights come before the communicator"
        found = []
        for name, x in parameters:
            put(self._model, name, x)
            found.append((name, str(x.dtype).removeprefix("torch."), list(x.shape)))
        assert found == metadata, "other weights than were announced"
        self._calls.append(("update_named_params", len(found)))

    def reset_prefix_cache(self):
        self._calls.append(("reset_prefix_cache", None))

    def image_features(self, images):
        self._calls.append(("image_features", images))
        return [None if group is None else {"mm_placeholders": {"image": [{}] * len(group)}} for group in images]

    def generate(self, prompts, features=None, n=1, max_tokens=16, **settings):
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts), "a group comes more than once"
        self._calls.append(("generate", {"prompts": prompts, "features": features, "n": n, **settings}))
        found = [x for prompt in prompts for x in completions(self._model, prompt, n, max_tokens)]
        return {
            "prompt_ids": prompts,
            "completion_ids": [x.token_ids for x in found],
            "logprobs": [[[one.logprob for one in step.values()] for step in x.logprobs] for x in found],
            "logprob_token_ids": [[[*step] for step in x.logprobs] for x in found],
        }


def own_model(path):
    """A copy of the model that was saved in a folder, with exact attention."""
    kind = {"dtype": torch.get_default_dtype(), "attn_implementation": "sdpa"}
    return LlamaForCausalLM.from_pretrained(path, **kind).eval()


def put(model, name, x):
    """Copies a tensor into a parameter."""
    parameter = model.get_parameter(name)
    assert parameter.shape == x.shape, name
    parameter.data.copy_(x)


@torch.no_grad()
def completions(model, prompt, count, length):
    """Greedy completions of a prompt; the i-th one begins with the i-th best token. Each ends with the end of a text."""
    found = []
    for place in range(count):
        ids, tokens, scores = torch.tensor([prompt]), [], []
        while len(tokens) < length and (not tokens or tokens[-1] != model.config.eos_token_id):
            likely = model(ids, logits_to_keep=1).logits[0, -1].log_softmax(-1)
            best = 0 if tokens else place
            token = int(likely.topk(best + 1).indices[best])
            tokens.append(token)
            scores.append({token: SimpleNamespace(logprob=float(likely[token]), rank=best + 1)})
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
        found.append(SimpleNamespace(token_ids=tokens, logprobs=scores))
    return found


@contextmanager
def stand_in(server=None):
    """Has TRL find a vLLM; yields the list of all calls that this process makes of it: (name, with what).

    Args:
        server: the folder of the model of a server.
    """
    from trl.generation import vllm_generation
    from trl.trainer import distillation_trainer

    calls = []
    found = {"is_vllm_available": lambda *_: True}
    of_vllm = {"LLM": partial(Engine, calls), "VLLMClient": partial(Client, calls, server), **found}
    of_vllm |= dict.fromkeys(("SamplingParams", "StructuredOutputsParams"), SimpleNamespace)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(vllm_generation, create=True, **of_vllm))
        stack.enter_context(mock.patch.multiple(distillation_trainer, **found))
        stack.enter_context(mock.patch.dict(os.environ))  # TRL sets what a launcher sets
        yield calls
