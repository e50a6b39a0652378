"""What an import loads: nothing but itself at first, and Trainer, datasets and peft only for those who use them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import TIMEOUT

HEAVY = ("torch", "transformers", "accelerate", "datasets", "peft", "transformers.trainer")


#: Runs scripts, each in a process of its own, and writes what it has loaded: modules of this package, and heavy libraries.
#: Their processes begin with torch, if it is named, which takes longest.
PROGRAM = f"""
import json, os, sys

for name in sys.argv[2:]:
    __import__(name)
for number, script in enumerate(json.load(sys.stdin)):
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, script
        continue
    exec(script, {{"FOLDER": sys.argv[1]}})
    own = sorted(name for name in sys.modules if name.split(".")[0] == "hf_ring_attention")
    with open(os.path.join(sys.argv[1], str(number)), "w") as file:
        json.dump([own, [name for name in {HEAVY!r} if name in sys.modules]], file)
    os._exit(0)
"""


def loaded_by(scripts, folder, *first):
    options = {"input": json.dumps(scripts), "capture_output": True, "text": True, "cwd": Path(__file__).parents[1]}
    command = [sys.executable, "-c", PROGRAM, str(folder), *first]
    done = subprocess.run(command, check=False, timeout=TIMEOUT, **options)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / str(number)).read_text()) for number in range(len(scripts))]


PLANS = """
import hf_ring_attention as ra

pattern = ra.Pattern.parse("pyramid:64,3")
assert 0 < pattern.flop_share(4096) < 1
ra.explain(pattern, seq_len=4096, ring_size=4, num_heads=8, head_dim=64)
ra.SequenceLayout("zigzag", 64, 2), ra.supported_models(), dir(ra)
"""


def test_the_package_loads_nothing_but_itself_and_plans_need_neither_torch_nor_transformers(tmp_path):
    (own, heavy), (of_plans, heavy_of_plans) = loaded_by(["import hf_ring_attention", PLANS], tmp_path)
    assert heavy == heavy_of_plans == []
    modules = ("_version", "hf", "hf.on_import", "ring", "ring.callbacks")
    assert own == ["hf_ring_attention", *(f"hf_ring_attention.{module}" for module in modules)]
    assert "hf_ring_attention.plan.plans" in of_plans


#: The implementation is registered, whichever of the libraries was imported first.
REGISTERED = """
from transformers import LlamaConfig, LlamaModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

assert "ring_dilated" in ALL_ATTENTION_FUNCTIONS.valid_keys()
assert "ring_dilated" in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
"""
COMPUTES = """
config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
import torch
model = LlamaModel._from_config(config, attn_implementation="ring_dilated")
assert model(torch.ones(1, 4, dtype=torch.int64)).last_hidden_state.shape == (1, 4, 8)
"""
#: Two threads that make an operator at once would leave torch with a freed object, which crashes later.
OPERATORS = """
from hf_ring_attention.hf.call import graph
from hf_ring_attention.ring import operator, shards

names = [name.partition("::")[2] for name in operator._LIBRARY._op_defs]
made = vars(torch.ops.hf_ring_attention)
assert len(names) >= 5 and all("default" in vars(made[name]) for name in names), names
"""
#: Images for GPUs often lack these: datasets with what only it brings, and what extras and tests bring.
MISSING = ("datasets", "pyarrow", "deepspeed", "gguf", "hypothesis", "matplotlib", "peft", "rich", "trl")
WITHOUT_THEM = """
for name in ra.__all__:
    getattr(ra, name)
from accelerate import Accelerator
from tests.support.training import documents, padded, tiny_llama
from transformers import default_data_collator

model, ring = ra.patch_model(tiny_llama(), "window:8+2"), ra.Ring.alone()
rows = documents(6, 20, 30, seed=0)
batch = padded(rows[:2])
ra.patch_model(model, ring=ring)(**batch).loss.backward()
ra.distillation_loss(model, batch).backward()
ra.perplexity(model, batch["input_ids"])
columns = ra.pack_documents({"input_ids": [row["input_ids"] for row in rows]}, 64)
packed = [dict(zip(columns, row)) for row in zip(*columns.values())]
assert len(packed) > 1
options = {"max_steps": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": []}
args = ra.RingTrainingArguments(FOLDER, eval_strategy="steps", eval_steps=1, **options)
data = {"train_dataset": packed, "eval_dataset": packed, "data_collator": default_data_collator}
assert ra.RingTrainer(model, args, **data).train().global_step == 2
assert ra.Ring.from_accelerator(Accelerator(cpu=True), size=1).world_size == 1
"""


#: What registers may itself be what loads Transformers' attention interface, whose loading calls for it.
EVALUATES = """
import hf_ring_attention as ra
from transformers import LlamaConfig

assert ra.patch_config(LlamaConfig(), "window:64+4").ring_dilated
ra.patch_model, ra.patch_config, ra.Ring, ra.perplexity, ra.prefill, ra.ring_attention
import transformers.models.llama.modeling_llama
"""
FIRST = "import transformers.modeling_utils\nimport hf_ring_attention as ra\nimport transformers\n"
SCRIPTS = {
    "evaluates": EVALUATES + REGISTERED + COMPUTES,
    # An import of what is missing is a ModuleNotFoundError.
    "trains": f"import sys\nsys.modules |= dict.fromkeys({MISSING})\n" + FIRST + REGISTERED + COMPUTES + WITHOUT_THEM,
    # Notebooks, test runners and libraries look imports up anew.
    "anew": "import hf_ring_attention, importlib\nimportlib.invalidate_caches()\n" + REGISTERED + COMPUTES,
    "transformers first": "import torch, transformers\nimport hf_ring_attention\n" + REGISTERED + OPERATORS,
}


def test_what_trains_and_optional_packages_are_loaded_only_if_used_and_attention_is_registered(tmp_path):
    answers = loaded_by([*SCRIPTS.values()], tmp_path, "torch")
    (_, evaluates), (own, trains) = answers[:2]
    assert not {"datasets", "peft", "transformers.trainer"} & {*evaluates}
    assert {"torch", "transformers"} <= {*evaluates}
    assert "hf_ring_attention.training.trainer" in own
    assert "transformers.trainer" in trains


def test_names_that_do_not_exist_are_said():
    import hf_ring_attention as ra

    with pytest.raises(AttributeError, match="No hf_ring_attention attribute Patern"):
        ra.Patern  # noqa: B018
    assert {*ra.__all__} <= {*dir(ra)}
    for name in ra.__all__:
        assert getattr(ra, name) is not None
