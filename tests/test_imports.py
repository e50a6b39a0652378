"""What an import loads: nothing but itself at first, and Trainer, datasets and peft only for those who use them."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.ranks import TIMEOUT

HEAVY = ("torch", "transformers", "accelerate", "datasets", "peft", "transformers.trainer")


def loaded_by(script):
    """The modules of this package, and the heavy libraries, that a fresh Python has loaded after a script."""
    script = textwrap.dedent(script) + textwrap.dedent(
        f"""
        import json, sys
        own = sorted(name for name in sys.modules if name.split(".")[0] == "hf_ring_attention")
        print(json.dumps([own, [name for name in {HEAVY!r} if name in sys.modules]]))
        """
    )
    options = {"capture_output": True, "text": True, "timeout": TIMEOUT, "cwd": Path(__file__).parents[1]}
    done = subprocess.run([sys.executable, "-c", script], check=False, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_package_loads_nothing_but_itself():
    own, heavy = loaded_by("import hf_ring_attention")
    assert heavy == []
    modules = ("_version", "hf", "hf.on_import", "ring", "ring.callbacks")
    assert own == ["hf_ring_attention", *(f"hf_ring_attention.{module}" for module in modules)]


def test_patterns_and_plans_need_neither_torch_nor_transformers():
    own, heavy = loaded_by(
        """
        import hf_ring_attention as ra

        pattern = ra.Pattern.parse("pyramid:64,3")
        assert 0 < pattern.flop_share(4096) < 1
        ra.explain(pattern, seq_len=4096, world_size=4, num_heads=8, head_dim=64)
        ra.SequenceLayout("zigzag", 64, 2), ra.supported_models(), dir(ra)
        """
    )
    assert heavy == []
    assert "hf_ring_attention.plan.plans" in own


def test_operators_are_made_before_threads_use_them():
    """Two threads that make one at once would leave torch with a freed object, which crashes later."""
    loaded_by(
        """
        import torch
        from hf_ring_attention.hf.call import graph
        from hf_ring_attention.ring import operator, shards

        names = [name.partition("::")[2] for name in operator._LIBRARY._op_defs]
        made = vars(torch.ops.hf_ring_attention)
        assert len(names) >= 5 and all("default" in vars(made[name]) for name in names), names
        """
    )


#: The implementation is registered, whichever of the libraries was imported first.
REGISTERED = """
from transformers import LlamaConfig, LlamaModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

assert "ring_dilated" in ALL_ATTENTION_FUNCTIONS.valid_keys()
assert "ring_dilated" in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
import torch
model = LlamaModel._from_config(config, attn_implementation="ring_dilated")
assert model(torch.ones(1, 4, dtype=torch.int64)).last_hidden_state.shape == (1, 4, 8)
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


def test_who_evaluates_a_model_does_not_load_what_trains_one():
    _, heavy = loaded_by(
        "import hf_ring_attention as ra\nfrom transformers import LlamaConfig\n"
        # What registers may itself be what loads Transformers' attention interface, whose loading calls for it.
        "assert ra.patch_config(LlamaConfig(), 'window:64+4').ring_dilated\n"
        "ra.patch_model, ra.patch_config, ra.Ring, ra.perplexity, ra.prefill, ra.ring_attention\n"
        "import transformers.models.llama.modeling_llama\n" + REGISTERED
    )
    assert not {"datasets", "peft", "transformers.trainer"} & {*heavy}
    assert {"torch", "transformers"} <= {*heavy}


def test_models_losses_and_trainers_need_no_optional_package(tmp_path):
    own, heavy = loaded_by(
        f"import sys\nsys.modules |= dict.fromkeys({MISSING})\n"  # An import of these is a ModuleNotFoundError.
        "import transformers.modeling_utils\nimport hf_ring_attention as ra\nimport transformers\n"
        + REGISTERED
        + f"FOLDER = {str(tmp_path)!r}\n"
        + WITHOUT_THEM
    )
    assert "hf_ring_attention.training.trainer" in own
    assert "transformers.trainer" in heavy


def test_the_implementation_is_registered_if_transformers_is_imported_first():
    loaded_by("import transformers\nimport hf_ring_attention\nfrom transformers import AutoModel\n" + REGISTERED)


def test_imports_may_be_looked_up_anew_before_transformers_is_loaded():
    """As notebooks, test runners and libraries do."""
    loaded_by("import hf_ring_attention, importlib\nimportlib.invalidate_caches()\n" + REGISTERED)


def test_names_that_do_not_exist_are_said():
    import hf_ring_attention as ra

    with pytest.raises(AttributeError, match="No hf_ring_attention attribute Patern"):
        ra.Patern  # noqa: B018
    assert {*ra.__all__} <= {*dir(ra)}
    for name in ra.__all__:
        assert getattr(ra, name) is not None
