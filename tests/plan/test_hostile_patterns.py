"""Patterns from files and command lines: numbers that no model has are refused before any work, in little time and memory."""

import json
import re
import subprocess
import sys

from hf_ring_attention.plan.branches import Segment, Sink, Window
from hf_ring_attention.plan.patterns import Pattern
from tests.support.refusals import refused

#: Tokens are counted with 64 bits.
LARGEST = 2**63 - 1
LONG = "1" * 5000
#: Texts, and parts of their errors.
TEXTS = {
    "pyramid:8,40000": "levels must be at most 63, got 40000",
    "pyramid:8,63,9000000000000000000": r"window \* ratio \*\* \(levels - 1\) must be at most \d+, got a number of 39\d\d bits",
    "kv0-30000000=exact": "at most 65536 key/value heads were expected, got head 30000000",
    f"kv{'0-65535,' * 20000}0=exact": "it names key/value head 0 twice",
    "kv65535=exact": r"it leaves out the key/value heads \[0, 1, 2, 3, 4, 5, 6, 7\]\.\.\.",
    f"window:{LONG}": "at most 19 digits was expected",
    "window:9223372036854775808": "length must be at most 9223372036854775807, got 9223372036854775808",
    "longnet:8/1,all/9223372036854775808": "dilation must be at most",
    f"exact@{'x' * 100000}": "behind @ stands count or once",
    "x" * 100000: "is not known",
}
PROGRAM = """
import json, resource, sys
from hf_ring_attention.plan.patterns import Pattern

resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
errors = []
for text in json.load(sys.stdin):
    try:
        Pattern.parse(text)
        errors.append(None)
    except ValueError as error:
        errors.append(str(error))
print(json.dumps(errors))
"""


def test_texts_are_refused_in_little_time_and_memory():
    options = {"input": json.dumps([*TEXTS]), "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = dict(zip(TEXTS, json.loads(done.stdout), strict=True))
    assert not {text[:40]: error for text, error in errors.items() if not re.search(TEXTS[text], error or "")}
    assert all(len(error) < 2000 for error in errors.values()), "a wrong text is repeated in part"


def test_the_largest_numbers_are_patterns():
    for branch in (Window(LARGEST), Segment(LARGEST), Sink(LARGEST), Segment(None, LARGEST)):
        pattern = Pattern((Window(2), branch), overlap="count")
        assert Pattern.parse(str(pattern)) == pattern
        assert 0 < pattern.flop_share(50) <= 2
    assert Pattern.parse("window:1099511627776+4").flop_share(50) == 1
    assert len(Pattern.parse("pyramid:1,63,2,0").branches) == 63
    heads = Pattern.parse(f"kv0-65534=exact;kv65535=window:{2**40}")
    assert heads.num_kv_heads == 65536 and str(heads) == f"kv0-65534=exact;kv65535=window:{2**40}"


def test_heads_inside_heads_are_refused():
    refused("kvNUMBERS=PATTERN was expected", Pattern.from_dict, {"pattern": "kv0=" * 100000 + "exact"})
