"""Each run has the same tests with the same inputs, on one thread: more threads only wait for each other, above all on a
busy machine. Nothing is compiled."""

import gc
import math
import os
import random

import numpy as np
import pytest
import torch

try:
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers
except ModuleNotFoundError:  # `make gpu` installs nothing, and tests marked cuda draw from `rng`.
    settings = None

os.environ.setdefault("OMP_NUM_THREADS", "1")
# An operator that were compiled, or loaded because another run compiled it, would fail. Triton compiles what starts a kernel,
# so without a GPU its interpreter runs kernels; it must be chosen before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.update(CC="no-compiler", CXX="no-compiler", TORCH_EXTENSIONS_DIR=os.path.join(os.devnull, "extensions"))
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
gc.disable()  # until all modules have been imported, which leaves no garbage worth looking for

# Hypothesis draws by the seed of the run alone: not by failures of earlier runs, which it would keep, and not by the time that
# it takes. Derandomized, as it is by default in CI, it would draw by the code of a test instead.
if settings:
    draws = {"database": None, "deadline": None, "derandomize": False, "print_blob": True}
    settings.register_profile("tests", **draws, suppress_health_check=list(HealthCheck))
    settings.load_profile("tests")
    # Nor does it draw constants of the modules that happen to be loaded, which depend on the tests that ran before.
    pytest.MonkeyPatch().setattr(providers, "_get_local_constants", providers.Constants)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="of the inputs that tests draw (default 0)")
    parser.addoption("--order", type=int, help="run the files of tests in a random order, by this number")
    parser.addoption("--all", action="store_true", help="run all cases of the tests of which each run has one in four")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.option.hypothesis_seed = str(config.option.seed)


def pytest_report_header(config):
    order = "" if config.option.order is None else f"; files in random order {config.option.order}"
    return f"seed {config.option.seed}: --seed N draws other inputs{order}"


def pytest_collection_modifyitems(config, items):
    """Of tests marked `drawn` one case in four stays, or in n for `drawn(n)`, and whichever a command names by `::` or `-k`.

    Folders with the longest files come first, so that no worker has one of them left when the others are done.
    """
    items.sort(key=lambda item: item.path.parent.name not in ("training", "recipes", "tests"))
    if (order := config.option.order) is not None:
        items.sort(key=lambda item: random.Random(f"{order} {item.nodeid.partition('::')[0]}").random())
    if config.option.all or config.option.keyword or any("::" in word for word in config.args):
        return
    cases = {}
    for item in items:
        if marker := item.get_closest_marker("drawn"):
            cases.setdefault((item.nodeid.partition("[")[0], *marker.args), []).append(item)
    left_out = set()
    for (name, *share), of_test in cases.items():
        rng = random.Random(f"{config.option.seed} {name}")
        left_out.update(rng.sample(of_test, len(of_test) - math.ceil(len(of_test) / (share or [4])[0])))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """All modules have been imported: whoever collects garbage later, as Trainer does after each run, passes them over."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def fresh_inputs(request):
    """Seeds the generators for each test by its name, so that no earlier test matters."""
    generator = random.Random(f"{request.config.option.seed} {request.node.nodeid}")
    random.seed(generator.random())
    np.random.seed(generator.randrange(2**32))  # noqa: NPY002
    # Not `torch.manual_seed`, which keeps a traceback for each kind of device that was not used yet.
    torch.default_generator.manual_seed(generator.randrange(2**63))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(generator.randrange(2**63))


@pytest.fixture(autouse=True)
def no_modes():
    """Lets torch.compile compile, which compiles nothing under a mode that sees every operation.

    torch has one flag of such modes for all threads. It stays set if threads end their modes in another order than they began
    them; simulated ranks of any earlier test may do so.
    """
    for flag in ("_is_in_non_infra_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals"):
        if hasattr(torch.utils._python_dispatch, flag):
            setattr(torch.utils._python_dispatch, flag, False)


@pytest.fixture
def rng():
    """A generator for a test's inputs, from the seed of the run."""
    return random.Random(random.random())


@pytest.fixture
def saved_figures(monkeypatch):
    """The figures that were saved."""
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    figures, save = [], figure_class.savefig

    def remember(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(figure_class, "savefig", remember)
    return figures


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A file, a JSON file without a calibration, and an empty folder, by name. The current folder is the empty folder."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "calibration.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return {"file": tmp_path / "file", "calibration": tmp_path / "calibration.json", "empty": tmp_path / "empty"}


@pytest.fixture(scope="session")
def ranks():
    """Processes that stay, for functions that leave nothing behind: `ranks.run(function, world_size, *args)`."""
    from tests.support.ranks import RankPool

    with RankPool() as pool:
        yield pool


@pytest.fixture
def checked_operators(monkeypatch):
    """Has torch's operators for CUDA checked, and played by others: `checked_operators(dtype, played_by=...)`."""
    from hf_ring_attention.compute import cuda_kernels
    from tests.support.cuda_operators import CheckedOperators

    def check(*dtypes, played_by=torch.ops.aten):
        operators = CheckedOperators(played_by, dtypes)
        monkeypatch.setattr(cuda_kernels, "aten", operators)
        return operators

    return check


@pytest.fixture
def computed_by(monkeypatch):
    """Has every call of attention computed by a kernel."""
    from hf_ring_attention.ring import planned

    return lambda kernel: monkeypatch.setattr(planned, "choose_kernel", lambda *_: kernel)


@pytest.fixture
def bench_in_this_process(monkeypatch):
    """Has programs of recipes/bench fork their ranks from the server of all tests, which has imported more than theirs."""
    from tests.support.ranks import PRELOADED, start_server

    monkeypatch.setattr("timing.PRELOADED", [PRELOADED])
    start_server()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        names = " ".join(report.nodeid for report in terminalreporter.stats.get("failed", [])[:1])
        seed = terminalreporter.config.option.seed
        terminalreporter.write_line(f"repeat with the same inputs: python -m pytest -n 0 --seed {seed} {names}")


@pytest.fixture
def in_float64(request):
    """See tests.support.tolerance; but for tests that are marked as being about other dtypes."""
    from tests.support.tolerance import float64

    with float64(request.node.get_closest_marker("own_dtypes") is None):
        yield
