"""The fused kernels compile for GPUs: they spill no registers on sm_90, and tensor cores compute their products."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.fused import needs_triton
from tests.support.releases import at_least

pytestmark = needs_triton

KERNELS = ("forward", "dq", "dkdv")
FEW, MANY = "few", "many"
#: Targets, kernels, the widths of heads, kinds of launches, and whether kernels add to the results of others.
WANTED = [(target, kernel, 128, 128, MANY, 0) for target in ("sm_80", "sm_90", "gfx942") for kernel in KERNELS]
WANTED += [("sm_90", kernel, *widths, MANY, 0) for widths in ((64, 64), (192, 128)) for kernel in KERNELS]
WANTED += [("sm_90", kernel, 128, 128, FEW, 0) for kernel in ("forward", "dq")]
WANTED += [("sm_90", kernel, 128, 128, MANY, 1) for kernel in KERNELS]
WANTED += [("sm_90", "dkdv", 128, 128, "few keys", 0)]
#: Those of chosen rows, with the query heads of a key/value head.
CHOSEN = [(x, kernel, 192, 128, 1, 0) for x in ("sm_80", "sm_90", "gfx942") for kernel in ("chosen", "chosen back")]
WANTED += [*CHOSEN, ("sm_90", "chosen back", 128, 128, 16, 0)]
SHARED = {"sm_80": 163, "sm_90": 227, "gfx942": 64}


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """Facts of the programs that are tested; another process compiles them, since Triton's interpreter serves this one."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = [",".join(map(str, test.callspec.params["wanted"])) for test in tests]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_fused", *names],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {facts["wanted"]: facts for facts in map(json.loads, ran.stdout.splitlines())}


#: Every run has this number, the forward kernel of usual heads on sm_90, and another one.
KEPT = {3}
CASES = [pytest.param(x, marks=[] if i in KEPT else [pytest.mark.drawn(20)]) for i, x in enumerate(WANTED)]


@pytest.mark.parametrize("wanted", CASES, ids=lambda wanted: "-".join(map(str, wanted)))
def test_registers_memory_and_products(wanted, compiled):
    target, facts = wanted[0], compiled[",".join(map(str, wanted))]
    assert facts["shared"] <= SHARED[target]
    assert facts["products"] > 0
    chosen = wanted[1].startswith("chosen")
    assert {"slb", "slh", *(["chosen"] if chosen else [])} <= {*facts["general"]}, (
        "other numbers of tokens would compile again"
    )
    if chosen:
        assert facts["spills"] <= 48
        return
    # Older releases of Triton spill a few registers on other devices; here some addresses, outside of the loops over keys.
    outside = 24 if wanted[1:3] == ("forward", 64) else 0
    newest = target == "sm_90" and at_least("triton", "3.9")
    assert facts["spills"] <= (outside if newest else 80)  # by Triton 3.6 in dq of the widest heads
    # Warp groups multiply 64 rows at once. Key items of the widest heads have 32 keys, or they would spill; sinks are fewer.
    if target == "sm_90" and (wanted[1], wanted[2]) != ("dkdv", 192) and "few keys" not in wanted:
        assert facts["of whole warp groups"] > 0
