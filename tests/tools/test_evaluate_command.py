"""The evaluate command: a whole report, the same after a kill and from two processes, and one line for what is wrong."""

import json
import os
import signal

import huggingface_hub
import pytest

import hf_ring_attention as ra
from hf_ring_attention.evaluation.journal import SAMPLES_FILE, Journal
from hf_ring_attention.tools import cli, evaluation_run
from tests.support.checkpoints import save_calibration
from tests.support.evaluation import load, made_up_text, save_checkpoint
from tests.support.programs import run_program
from tests.support.ranks import CONTEXT, TIMEOUT

#: Perplexity, one task by depth and one without.
ASKED = (
    "--pattern exact --pattern window:64+4 --tasks perplexity,passkey,frequent_words --lengths 900,1000 --depths 0,1"
)
ASKED += " --samples 2"
PLOTS = "hf_ring_attention.tools.evaluation_plots"
MAIN = "from hf_ring_attention.tools.cli import main\nmain()\n"
FIGURES = 2 * 2 * (2 + 2 * 2 + 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder / "model")
    (folder / "book.txt").write_text(made_up_text(5))
    return folder


def words_of(folder, output, asked=ASKED):
    words = ["evaluate", "--model", str(folder / "model"), "--text", str(folder / "book.txt"), "--output", str(output)]
    return [*words, "--device", "cpu", *asked.split()]


def run(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    printed = capsys.readouterr()
    assert not end.value.code, printed.err
    return printed.out


def told(results):
    """All that must be equal in the results of equal runs: times and machines differ."""
    apart = ("seconds", "date", "command", "machine", "launches")
    return {name: value for name, value in results.items() if name not in apart}


def records_of(output):
    """The records, without times, and whether their order is that of the jobs."""
    lines = [json.loads(line) for line in (output / SAMPLES_FILE).read_text().splitlines()]
    return [{name: x for name, x in line.items() if "seconds" not in name} for line in lines]


@pytest.fixture(scope="module")
def report(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "report"
    with pytest.raises(SystemExit) as end:
        cli.main(words_of(folder, output))
    assert not end.value.code
    return output


def test_the_report_has_all_figures_in_the_harness_layout(report, folder):
    results = json.loads((report / "results.json").read_text())
    assert results["complete"] and results["records"] == FIGURES == len(records_of(report))
    assert set(results["results"]) == {
        f"{t}_{n}" for t in ("perplexity", "passkey", "frequent_words") for n in (900, 1000)
    }
    for key in ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "group_subtasks"):
        assert results[key].keys() == results["results"].keys()
    for key in ("config", "date", "git_hash", "transformers_version", "model_name", "model_source"):
        assert key in results
    assert results["n-samples"]["passkey_1000"] == {"original": 4, "effective": 4}
    model, tokenizer = load(folder / "model", None)
    ids = tokenizer((folder / "book.txt").read_text(), return_tensors="pt").input_ids
    for pattern in ("exact", "window:64+4"):
        ra.patch_model(model, pattern)
        reports = [ra.perplexity(model, ids[:, first : first + 900]) for first in (0, 900)]
        nll, tokens = sum(x.nll for x in reports), sum(x.tokens for x in reports)
        figures = results["results"]["perplexity_900"]
        assert figures[f"perplexity,{pattern}"] == pytest.approx(2.718281828459045 ** (nll / tokens), rel=1e-6)
        low, high = results["intervals"]["perplexity_900"][f"perplexity,{pattern}"]
        assert low <= figures[f"perplexity,{pattern}"] <= high
    records = [r for r in records_of(report) if (r["task"], r["length"], r["pattern"]) == ("passkey", 900, "exact")]
    assert results["results"]["passkey_900"]["string_match_all,exact"] == sum(r["match"] for r in records) / 4
    assert results["results"]["passkey_900"]["answer_rank,exact"] == sum(r["rank"] for r in records) / 4


def test_the_report_says_what_was_done(report):
    text = (report / "report.md").read_text()
    for part in (
        "| passkey | ranked first | 900 |",
        "window:64+4",
        "haystack: repeated noise",
        "text: book.txt",
        "Seed 0.",
    ):
        assert part in text
    assert "Not complete" not in text
    pictures = sorted(path.name for path in report.glob("*.png"))
    assert pictures == [
        "loss_by_position.png",
        "pareto.png",
        "passkey_generated.png",
        "passkey_likelihood.png",
        "tasks_generated.png",
        "tasks_likelihood.png",
    ]
    assert all(f"({name})" in text for name in pictures)
    assert "N/A" not in text and "None" not in text and "nan" not in text


def killed_while_writing(words, after):
    """Runs the command in a process that is killed in the middle of writing its records number `after`."""
    append = Journal.append

    def die(journal, records):
        if len(journal.records) < after:
            return append(journal, records)
        with (journal.folder / SAMPLES_FILE).open("ab") as file:
            file.write(json.dumps(dict(records[0])).encode()[:-20])
        os.kill(os.getpid(), signal.SIGKILL)

    Journal.append = die
    cli.main(words)


def test_a_run_that_was_killed_goes_on_to_the_same_report(folder, report, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(f"{PLOTS}.plot_evaluation", lambda *_: {})  # They take longer than all else.
    output = tmp_path / "report"
    for after in (3, 17):
        process = CONTEXT.Process(target=killed_while_writing, args=(words_of(folder, output), after))
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode == -signal.SIGKILL
        lines = (output / SAMPLES_FILE).read_text().splitlines()
        assert len(lines) == after + 1
        with pytest.raises(ValueError, match=r"delimiter|Unterminated|Expecting"):
            json.loads(lines[-1])
    assert not json.loads((output / "results.json").read_text())["complete"]
    assert "of 32 records are there" in (output / "report.md").read_text()
    run(words_of(folder, output), capsys)
    assert records_of(output) == records_of(report)
    before, after = (json.loads((path / "results.json").read_text()) for path in (report, output))
    assert len(after["launches"]) == 3 and told(after) == told(before)


def test_two_processes_write_the_report_of_one(folder, report, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(f"import {PLOTS} as plots\nplots.plot_evaluation = lambda *_: {{}}\n{MAIN}")
    output = tmp_path / "report"
    environment = dict(os.environ, ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
    words = [*words_of(folder, output), "--ring-size", "2", "--json"]
    done = run_program(script, *words, processes=2, environment=environment, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    printed, alone = json.loads(done.stdout), json.loads((report / "results.json").read_text())
    assert printed == json.loads((output / "results.json").read_text())
    assert printed["machine"].startswith("a CPU of") and "2 processes" in printed["machine"]
    assert printed["results"].keys() == alone["results"].keys()
    for name, figures in alone["results"].items():
        assert printed["results"][name].keys() == figures.keys()
        for key, value in figures.items():
            found = printed["results"][name][key]
            assert found == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), (name, key)


WRONG = {
    "an unknown task": ("--tasks paskey", "or ruler for niah_single"),
    "a wrong depth": (
        "--tasks passkey --depths 0,1.5",
        "a number from 0, the beginning, to 1, the end, was expected, got '1.5'",
    ),
    "beyond the model": (
        "--tasks passkey --lengths 16k",
        "the model has positions for 8192 tokens, and a length is 16384",
    ),
    "an unknown pattern": ("--tasks passkey --pattern windw:3", "windw:3"),
    "own without one": ("--tasks passkey --pattern own", "pattern 'own': the model's config has no pattern"),
    "tokens without a stride": ("--tasks perplexity --tokens 4k", "--tokens cuts whole texts, which --stride scores"),
    "a ring without processes": ("--tasks perplexity --ring-size 2", "--ring-size 2: there is 1 process. Start 2"),
    "no room": ("--tasks common_words --lengths 600", "common_words: a question takes"),
    "a ring alone": ("--tasks perplexity --transport ring", "transport='ring'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_before_any_work(folder, tmp_path, capsys, case):
    asked, message = WRONG[case]
    with pytest.raises(SystemExit) as end:
        cli.main(words_of(folder, tmp_path / "report", asked))
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2
    assert error.startswith("hf-ring-attention evaluate: ") and message in error
    assert not (tmp_path / "report").exists()


def test_folders_of_other_runs_and_models_without_tokenizers_are_refused(folder, report, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(words_of(folder, report, ASKED.replace("--samples 2", "--samples 3")))
    assert "has the report of another run: samples was 2 and is 3." in capsys.readouterr().err
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((folder / "model" / name).read_bytes())
    words = words_of(folder, tmp_path / "report")
    words[words.index("--model") + 1] = str(tmp_path / "bare")
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2 and "evaluate: " in capsys.readouterr().err.splitlines()[-1]


def test_own_is_the_pattern_that_the_model_was_saved_with(folder, tmp_path, capsys):
    model, tokenizer = load(folder / "model", None)
    ra.patch_config(ra.patch_model(model, "window:64+4").config, "window:16+2", layers=[1])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = "--pattern own --pattern window:64+4 --tasks perplexity --lengths 1k --samples 2 --stride 300 --tokens 2k --json"
    words = words_of(tmp_path, tmp_path / "report", asked)
    words[words.index("--text") + 1] = str(folder / "book.txt")
    results = json.loads(run(words, capsys))
    figures, share = results["results"]["perplexity_1024"], results["flop_share"]
    assert figures["perplexity,own"] != figures["perplexity,window:64+4"]
    heads = {"num_heads": 4, "num_kv_heads": 2}
    first, second = (ra.Pattern.parse(x).flop_share(1024, **heads) for x in ("window:64+4", "window:16+2"))
    assert share["own"]["1024"] == pytest.approx((first + second) / 2)
    assert share["window:64+4"]["1024"] == pytest.approx(first)
    (record,) = [r for r in records_of(tmp_path / "report") if r["pattern"] == "own"]
    assert record["tokens"] == 2047, "with a stride, each token but the first is scored once"
    assert "one piece of text" in results["remarks"][0]


def test_a_calibration_is_named_by_its_file(folder, tmp_path, capsys):
    """The figures of the model that was saved with it; with another calibration in the file, the run is another one."""
    text = "kv0=window:64+4;kv1=window:16+2"
    save_calibration(tmp_path / "chosen.json", {0: "exact", 1: text})
    model, tokenizer = load(folder / "model", None)
    ra.patch_model(model, ra.Calibration.load(tmp_path / "chosen.json")).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    file = str(tmp_path / "chosen.json")
    asked = f"--pattern own --pattern exact --pattern {file} --tasks perplexity --lengths 1k --samples 1 --json"
    words = words_of(tmp_path, tmp_path / "report", asked)
    words[words.index("--text") + 1] = str(folder / "book.txt")
    results = json.loads(run(words, capsys))
    figures, share = results["results"]["perplexity_1024"], results["flop_share"]
    assert figures["perplexity,own"] == figures[f"perplexity,{file}"] != figures["perplexity,exact"]
    heads = {"num_heads": 4, "num_kv_heads": 2}
    assert share["own"] == share[file]
    assert share[file]["1024"] == pytest.approx((1 + ra.Pattern.parse(text).flop_share(1024, **heads)) / 2)

    save_calibration(tmp_path / "chosen.json", {0: "exact", 1: "exact"})
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert (
        end.value.code == 2 and "the report of another run: what the patterns stand for was" in capsys.readouterr().err
    )
    (tmp_path / "chosen.json").write_text("{}")
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2 and "this is no calibration" in capsys.readouterr().err


def test_a_calibration_of_another_model_is_refused_before_any_job(folder, tmp_path, capsys):
    file = save_calibration(tmp_path / "three.json", {0: "exact", 1: "exact", 2: "exact"})
    with pytest.raises(SystemExit) as end:
        cli.main(
            words_of(folder, tmp_path / "report", f"--pattern exact --pattern {file} --tasks perplexity --lengths 900")
        )
    assert end.value.code == 2 and "the calibration is of a model of 3 layers, and" in capsys.readouterr().err
    assert not (tmp_path / "report" / "samples.jsonl").exists()


def test_a_model_of_the_hub_is_told_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached, stamps = tmp_path / "models--me--model", []
    (cached / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        (cached / "refs" / "main").write_text(commit)
        stamps.append(evaluation_run.stamp_of("me/model"))
    assert stamps == [f"commit {letter * 40} of the hub" for letter in "ab"]


def test_a_calibration_is_read_once(folder, tmp_path, monkeypatch):
    """A file that is replaced while the run computes changes nothing."""
    append, file = Journal.append, tmp_path / "chosen.json"
    save_calibration(file, {0: "exact", 1: "exact"})

    def replace(journal, records):
        append(journal, records)
        save_calibration(file, {0: "window:4", 1: "window:4"})

    monkeypatch.setattr(Journal, "append", replace)
    monkeypatch.setattr(f"{PLOTS}.plot_evaluation", lambda *_: {})
    asked = f"--pattern {file} --pattern exact --tasks perplexity --lengths 900 --samples 2"
    with pytest.raises(SystemExit) as end:
        cli.main(words_of(folder, tmp_path / "report", asked))
    assert not end.value.code
    of_pattern = {}
    for record in records_of(tmp_path / "report"):
        of_pattern.setdefault(record["pattern"], []).append(record["nll"])
    assert len(of_pattern["exact"]) == 2 and of_pattern[str(file)] == of_pattern["exact"]
