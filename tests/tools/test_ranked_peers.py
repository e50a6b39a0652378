"""Attention and training steps over ranks beside other implementations: compared with the oracle, counted, and written."""

import csv
import importlib.util

import pytest
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.tools.bench_plots import plot_peers
from hf_ring_attention.tools.benchmarks import parallel_steps, peers, ranked_peers
from hf_ring_attention.tools.benchmarks.contestants import OURS, TORCHSCALE, contestants_of, dilated_segments
from hf_ring_attention.tools.benchmarks.harness import CallShape, launch
from hf_ring_attention.tools.output import Sheet, write_tables

SHAPE = CallShape(heads=4, kv_heads=4, head_dim=8)
PATTERNS = ["exact", "longnet:32/1,128/4"]


@pytest.fixture(scope="module")
def rows():
    """Rows of 130 tokens, which two ranks share evenly in order, and pad in zigzag."""
    return ranked_peers.measure_over_ranks(SHAPE, 130, PATTERNS, 1, 2)


def test_every_transport_is_the_oracle_and_has_its_figures(rows):
    ours = [row for row in rows if row["attention"].startswith(OURS)]
    assert [(row["pattern"], row["attention"].split(", ")[1], row["ranks"]) for row in ours] == [
        (pattern, name, 1 if name == "local" else 2)
        for pattern in PATTERNS
        for name in ("local", "ring", "collective", "heads")
    ]
    for row in ours:
        assert row["skipped"] is None and 0 < row["error"] < 1e-5
        assert min(row[name] for name in ("forward", "both", "forward_ratio", "both_ratio", "of_floor")) > 0
        assert (row["sent_bytes"] is None) == (row["ranks"] == 1) and row["peak_bytes"] >= 0
        assert row["ranks"] == 1 or row["sent_bytes"] > 0
        assert row["attention"] != f"{OURS}, ring" or (row["forward_ratio"], row["both_ratio"]) == (1, 1)


def count_both_ways(shape, tokens):
    """The bytes of a ring's forward and backward, by its own counter and by that of peers."""
    ring = ra.Ring(transport="ring")
    layout = ring.layout_for(tokens, "exact")
    q, k, v, dout = (x.detach() for x in shape.tensors(layout.local_len))
    with ranked_peers.CountSent() as counter:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        ra.ring_attention(q, k, v, pattern="exact", ring=ring, layout=layout).backward(dout)
    assert dist.get_world_size() == 2
    return counter.sent_bytes, ring.traffic().sent_bytes


def test_bytes_of_peers_are_counted_as_ours():
    """But for the numbers by which ranks agree on a call, which are no rows."""
    counted, own = launch(count_both_ways, 2, SHAPE, 128)
    assert own > 10_000 and 0 <= counted - own <= 64


def wrong_gradients(shape, tokens):
    """The rows where the gradients of the ring, and the outputs of the collective transport, are twice as large."""
    attend = ranked_peers.ring_attention

    def wrong(q, k, v, *, ring, **rest):
        out = attend(q, k, v, ring=ring, **rest)
        if ring.transport == "ring":
            return 2 * out - out.detach()
        return 2 * out if ring.transport == "collective" else out

    ranked_peers.ring_attention = wrong  # in this process alone, which ends with the call
    return ranked_peers.rows_over_ranks(shape, tokens, ["exact"], 1)


def test_what_has_wrong_gradients_has_no_backward_and_what_has_wrong_outputs_no_row():
    by_name = {row["attention"]: row for row in launch(wrong_gradients, 2, SHAPE, 64)}
    ring, collective, heads = (by_name[f"{OURS}, {name}"] for name in ("ring", "collective", "heads"))
    assert ring["no_backward"] == "gradients are 1.0 off" and ring["both"] is None and ring["forward"] > 0
    assert ring["skipped"] is None and ring["error"] < 1e-5
    assert "its relative error is 1.0e+00" in collective["skipped"] and collective["forward"] is None
    assert heads["skipped"] is None and heads["both"] > 0 and heads["no_backward"] == ""


def test_simulated_ranks_have_errors_and_bytes_and_no_seconds():
    rows = ranked_peers.simulated_rows(SHAPE, 96, ["longnet:32/1,96/4"], 4)
    assert [row["attention"] for row in rows] == [f"{OURS}, {name}" for name in ("ring", "collective", "heads")]
    for row in rows:
        assert row["simulated"] and row["ranks"] == 4 and row["error"] < 1e-5 and row["sent_bytes"] > 0
        assert row["forward"] is row["both"] is row["of_floor"] is row["skipped"] is None


@pytest.mark.skipif(
    not importlib.util.find_spec("ring_attention_pytorch"), reason="ring-attention-pytorch is not installed"
)
def test_ring_attention_pytorch_is_compared_by_its_outputs():
    rows = ranked_peers.measure_over_ranks(CallShape(4, 2, 8), 128, ["exact"], 1, 2)
    (row,) = (row for row in rows if row["attention"].startswith(ranked_peers.PEER_RING))
    assert row["skipped"] is None and row["error"] < 1e-5 and row["forward_ratio"] > 0 and row["sent_bytes"] > 0


def test_a_peer_that_is_not_installed_says_how_to_install_it(rows):
    if importlib.util.find_spec("ring_attention_pytorch") is None:
        (row,) = (row for row in rows if row["attention"] == ranked_peers.PEER_RING)
        assert row["skipped"].endswith(": pip install ring-attention-pytorch") and row["forward"] is None


@pytest.mark.parametrize(
    ("text", "heads", "segments"),
    [
        ("longnet:32/1,64/4", (8, 8), [(32, 1), (64, 4)]),
        ("longnet:32/1,all/4", (8, 8), [(32, 1), (None, 4)]),
        ("longnet:32/1,64/4", (8, 4), None),  # groups of heads
        ("longnet:32/1,64/4", (6, 6), None),  # 6 heads and 4 phases
        ("longnet:32/1,64/2,128/4", (8, 8), None),  # two orders of the heads
        ("window:8", (8, 8), None),
        ("exact", (8, 8), None),  # it counts no key twice, but neither has it a second segment
    ],
)
def test_torchscale_takes_part_where_an_order_of_heads_makes_it_the_same(text, heads, segments):
    found = dilated_segments(ra.Pattern.parse(text), *heads)
    assert found == segments or (text == "exact" and found in (None, [(None, 1)]))


@pytest.mark.skipif(not importlib.util.find_spec("torchscale"), reason="torchscale is not installed")
@pytest.mark.parametrize("text", ["longnet:32/1,128/4", "longnet:16/1,48/2", "longnet:32/1,64/4,all/4"])
def test_torchscale_is_the_oracle(text):
    tensors = SHAPE.tensors(200)
    found, _ = contestants_of(text, 200, SHAPE)
    (peer,) = (one for one in found if one.name.startswith(TORCHSCALE))
    assert peers.Oracle(text, tensors).error_of(peer, tensors)[0] < 1e-5


def test_training_steps_have_the_losses_of_one_process():
    rows = parallel_steps.measure_steps(SHAPE, 64, 1, 2)
    assert [row["attention"] for row in rows] == [
        f"train step of 64 tokens: {name}" for name in (parallel_steps.ONE_PROCESS, *parallel_steps.HOLDERS.values())
    ]
    for row in rows:
        assert row["both"] > 0 and row["peak_bytes"] > 0
        assert row["skipped"] is None and row["error"] < 1e-5
    one, whole, fsdp2, zero = (row["peak_bytes"] for row in rows)
    # A model of 2 MiB and its gradients; a rank that has all of them holds more than one that has half.
    assert one > 2 * 2**20 and fsdp2 < whole and zero < whole


def test_a_step_with_other_losses_is_not_shown(monkeypatch):
    """In one process, in which models with a ring of one rank return twice their loss."""
    rows = launch(steps_with_a_wrong_loss, 1, SHAPE)
    assert [row["skipped"] is None for row in rows] == [True, False, False, False]
    assert "its losses are 1.0e+00 off" in rows[1]["skipped"]


def steps_with_a_wrong_loss(shape):
    patch_model = parallel_steps.patch_model

    def twice(module, args, output):
        output.loss = 2 * output.loss

    def patched(model, *args, **settings):
        model.register_forward_hook(twice)
        return patch_model(model, *args, **settings)

    parallel_steps.patch_model = patched  # in this process alone, which ends with the call
    return parallel_steps.steps_over_ranks(shape, 32, 1)


def test_tables_are_csv_and_markdown(tmp_path):
    sheet = Sheet(
        "a title", ("pattern", "s", "note"), [("exact", 1.5, "a|b"), ("window:8", "-", "c, d")], ["one", "two"], left=1
    )
    table, text = write_tables(sheet, tmp_path / "peers")
    with table.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["pattern", "s", "note"], ["exact", "1.5", "a|b"], ["window:8", "-", "c, d"]]
    assert text.read_text(encoding="utf-8") == (
        "a title\n\n| pattern | s | note |\n| --- | ---: | ---: |\n| exact | 1.5 | a\\|b |\n| window:8 | - | c, d |\n\n"
        "- one\n- two\n"
    )


def test_the_picture_has_what_was_timed(tmp_path, rows):
    pytest.importorskip("matplotlib")
    plot_peers(rows, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 5000
