"""The reader contract for LMDB environments: a folder, and its data file alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.reader import ReaderContract
from contracts.test_mapped_contract import write

from packfmt.record import Record


class TestLMDB(ReaderContract):
    mapped_columns = False

    def make(self, tmp_path: Path, records: Sequence[Record], **options: Any) -> str:
        return write(tmp_path / "out.lmdb", records, **options)


class TestLoneFile(TestLMDB):
    def make(self, tmp_path: Path, records: Sequence[Record], **options: Any) -> str:
        folder = write(tmp_path / "out.lmdb", records, **options)
        alone = tmp_path / "alone.mdb"
        shutil.move(Path(folder, "data.mdb"), alone)
        shutil.rmtree(folder)
        return str(alone)
