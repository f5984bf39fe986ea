"""The golden chain of format 1: every record of it is read for ever, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.storage.chain.replay import restore
from tests.golden.make_chain import RECORDS

FOLDER = Path(__file__).parent / "chain1"


@pytest.mark.parametrize("entropy", ["zstd", "huffman"])
def test_every_record_is_read(entropy: str) -> None:
    known = json.loads((FOLDER / f"{entropy}.json").read_text())
    for number in range(1, RECORDS + 1):
        found = restore(FOLDER / entropy, until=number)
        assert found.number == found.step == number and found.stopped is None
        assert found.note == b"note %d" % number
        assert {name: value.tobytes().hex() for name, value in found.leaves.items()} == known[str(number)]
