"""Random programs that change an output layer, its mode or its adapters between a call and the use of its logits."""

import copy
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.ranks import on_ranks
from tests.support.tolerance import EXACT, distance, float64, gradients_distance

CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
IDS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
LORA = {"r": 2, "init_lora_weights": False}
HEADS = {
    "plain": None,
    "LoRA": LoraConfig(target_modules=["q_proj", "lm_head"], **LORA),
    "dropout": LoraConfig(target_modules=["q_proj", "lm_head"], lora_dropout=0.4, **LORA),
    "DoRA": LoraConfig(target_modules=["q_proj", "lm_head"], use_dora=True, **LORA),
    "a copy": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **LORA),
}
#: What an error about changed layers says.
REFUSED = "changed after the call"


def made(head="plain"):
    """A model with such an output layer, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(copy.deepcopy(CONFIG), attn_implementation="eager")
        if HEADS[head] is not None:
            model = get_peft_model(model, copy.deepcopy(HEADS[head]))
            model.add_adapter("other", copy.deepcopy(HEADS[head]))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def _weights(model):
    return [*model.get_output_embeddings().parameters()]


def _step(kind, **settings):
    def step(model, rng):
        for x in model.parameters():
            x.grad = torch.full_like(x, 0.1) if x.requires_grad else None
        kind([x for x in model.parameters() if x.requires_grad], lr=0.1, **settings).step()

    return step


def _data(change):
    """Writes into a weight of the layer without a new version."""

    def write(model, rng):
        x = rng.choice(_weights(model)).data
        x.copy_(change(x.clone(), rng))

    return write


def _one_number(x, rng):
    x.view(-1)[rng.randrange(x.numel())] += 1
    return x


def _one_row(x, rng):
    x[rng.randrange(len(x))] *= 2
    return x


def _given(model, rng):
    head = model.get_output_embeddings()
    holder = next(x for x in head.modules() if isinstance(x, nn.Linear))
    holder.weight = nn.Parameter(holder.weight.detach() * rng.choice([1, 2]))


def _another_layer(model, rng):
    layer = nn.Linear(32, 97, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, layer.weight.numel()).sin().view_as(layer.weight))
    model.set_output_embeddings(layer)


def _hooked(model, rng):
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output * 2)


def _scaled(model, rng):
    for x in model.modules():
        if hasattr(x, "scaling") and isinstance(x.scaling, dict):
            x.scaling = {name: 2 * value for name, value in x.scaling.items()}


def _no_dropout(model, rng):
    for x in model.modules():
        if isinstance(x, nn.Dropout):
            x.p = 0.0


@torch.no_grad()
def _in_place(model, rng):
    rng.choice(_weights(model)).mul_(2)


CHANGES = {
    "nothing": lambda model, rng: None,
    "train": lambda model, rng: model.train(),
    "eval": lambda model, rng: model.eval(),
    "fused AdamW": _step(torch.optim.AdamW, fused=True),
    "SGD": _step(torch.optim.SGD, foreach=False),
    "scaled data": _data(lambda x, rng: x * rng.choice([-1, 0.5, 2])),
    "shifted data": _data(lambda x, rng: x + 1e-3),
    "moved data": _data(lambda x, rng: x.roll(rng.choice([1, 2, 8]), rng.randrange(x.dim()))),
    "flipped data": _data(lambda x, rng: x.flip(rng.randrange(x.dim()))),
    "one number": _data(_one_number),
    "one row": _data(_one_row),
    "in place": _in_place,
    "given weights": _given,
    "another layer": _another_layer,
    "a hook": _hooked,
    "frozen": lambda model, rng: model.requires_grad_(False),
    "other dtype": lambda model, rng: model.get_output_embeddings().float().double(),
}
#: Changes of a model with adapters.
OF_ADAPTERS = {
    "adapters off": lambda model, rng: model.base_model.disable_adapter_layers(),
    "adapters on": lambda model, rng: model.base_model.enable_adapter_layers(),
    "other adapter": lambda model, rng: model.set_adapter("other"),
    "first adapter": lambda model, rng: model.set_adapter("default"),
    "merged": lambda model, rng: model.merge_adapter(),
    "added": lambda model, rng: model.add_adapter("third", copy.deepcopy(model.peft_config["default"])),
    "deleted": lambda model, rng: model.delete_adapter("other"),
    "scaled": _scaled,
    "no dropout": _no_dropout,
}
USES = {
    "logsumexp": lambda logits: logits.logsumexp(-1).mean(),
    "a row": lambda logits: logits[:1, 3:].square().mean(),
    "last": lambda logits: logits[:, -1].softmax(-1).square().mean(),
    "sum": lambda logits: (logits * 0.1).square().sum(),
    "loss": lambda logits: F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()),
}


@dataclass(frozen=True)
class Program:
    """A program: changes, a call, changes, and a use of its logits, whose gradients it asks for if they are recorded."""

    number: int
    head: str
    before: tuple[str, ...]
    behind: tuple[str, ...]
    use: str
    recorded: bool
    world_size: int

    @staticmethod
    def draw(number):
        rng = random.Random(number)
        head = rng.choice([*HEADS])
        changes = [*CHANGES] + ([] if head == "plain" else 2 * [*OF_ADAPTERS])
        behind = tuple(rng.choices(changes, k=rng.choice([0, 1, 1, 2])))
        # An adapter that is added has random weights, which must not count.
        before = tuple(rng.choices([x for x in changes if x != "added"], k=rng.choice([0, 0, 1])))
        return Program(number, head, before, behind, rng.choice([*USES]), rng.random() < 0.5, rng.choice([1, 1, 2]))

    def run(self):
        """What came of it on a ring; the stock model decides what is right."""
        with float64():
            return self._run()

    def _run(self):
        try:
            expected = self.answer(made(self.head))
        except (RuntimeError, ValueError) as error:  # of the stock model itself
            return f"impossible ({type(error).__name__}),"
        found = on_ranks(self.answer_or_refusal, lambda: made(self.head), self.world_size)
        if any(x == "refused" for x in found):
            assert found == ["refused"] * self.world_size
            return "refused"
        if self.world_size > 1 and self.draws:  # Its ranks draw other numbers than one process.
            assert all(distance(x[0], found[0][0]) <= EXACT for x in found)
            return "random"
        for value, gradients in found:
            assert distance(value, expected[0]) <= EXACT
            assert not gradients or gradients_distance(gradients, expected[1]) <= EXACT
        return "equal"

    @property
    def draws(self):
        return self.head == "dropout" and "train" in self.before

    def answer(self, model, ring=None):
        rng, changes = random.Random(self.number), CHANGES | OF_ADAPTERS
        for name in self.before:
            changes[name](model, rng)
        torch.manual_seed(self.number)
        with torch.set_grad_enabled(self.recorded):
            logits = model(**BATCH).logits
            for name in self.behind:
                changes[name](model, rng)
            model.zero_grad()
            value = USES[self.use](logits)
        if value.requires_grad:
            value.backward()
        gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        if ring is not None:
            gradients = {name: torch.stack(ring.gather(x)).mean(0) for name, x in gradients.items()}
        return value.detach(), gradients

    def answer_or_refusal(self, ring, model):
        try:
            return self.answer(model, ring)
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            return "refused"
