"""Writing a pack as an LMDB environment."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lmdb

from packfmt import format as layout
from packfmt.errors import CorruptError
from packfmt.record import Column
from packfmt.storage.base import Buffer
from packfmt.storage.folders import PendingFolder
from packfmt.storage.lmdb import CHUNK, DATA_FILE, chunk_key, record_key
from packfmt.storage.recording import RecordingWriter

__all__ = ["LMDBWriter"]

MAP_SIZE = 64 << 20  # bytes to start with; doubled whenever it is full. Windows makes the file as large at once
BATCH = 16 << 20  # bytes of values written in one transaction; they are in memory twice while it lasts
NAMES = (DATA_FILE, "lock.mdb")  # what a folder that may be overwritten holds
DATA_FORMAT: dict[str, Any] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}  # that of LMDB 0.9
REFUSALS = (  # of the system, as LMDB passes them on
    errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOMEM,
    errno.EMFILE, errno.ENFILE,
)  # fmt: skip


class LMDBWriter(RecordingWriter):
    """Writes an environment as ``LMDBReader`` describes it: a folder with ``data.mdb``. Publishes on ``close``.

    The same records give the same bytes. Every transaction is synchronised to the disk, and nothing is written through
    a writable map.

    Args:
        path: the folder's final name.
        columns, classes, metadata: as ``RecordingWriter``.
        force: replace an existing pack.

    Raises:
        FileExistsError: the target exists and ``force`` is off, or it is a folder that holds anything but LMDB's files.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        super().__init__(path, columns=columns, classes=classes, metadata=metadata)
        self._target = PendingFolder(Path(self.path), force=force, names=NAMES)
        self._data_file = self._target.temporary / DATA_FILE
        self._batch: list[tuple[bytes, bytes]] = []
        self._batch_size = 0
        self._map_size = MAP_SIZE
        self._header_written = False
        try:
            self._environment = lmdb.open(
                os.fsencode(self._target.temporary),  # as str it would have to be UTF-8
                map_size=self._map_size,
                mode=0o666,
                lock=False,  # nobody else knows the folder
                max_spare_txns=0,
                **DATA_FORMAT,
            )
        except BaseException as error:  # Ctrl-C too
            self._target.discard()
            if isinstance(error, lmdb.Error):
                raise _explain(error, self.path, "LMDB cannot write here") from error
            raise

    @property
    def files(self) -> tuple[str, ...]:
        return (os.path.join(self.path, DATA_FILE),)

    def _store(self, data: Buffer) -> None:
        self._add(record_key(len(self)), data)

    def _put(self, offset: int, chunks: Iterable[bytes]) -> None:
        if not self._header_written:  # now, so that all keys are written in order
            self._header_written = True
            self._add(chunk_key(0), layout.encode_header())
        pending = bytearray()
        for chunk in chunks:
            pending += chunk
            while len(pending) >= CHUNK:
                self._add(chunk_key(offset), pending[:CHUNK])
                del pending[:CHUNK]
                offset += CHUNK
        if pending:
            self._add(chunk_key(offset), pending)

    def _add(self, key: bytes, value: Buffer) -> None:
        self._batch.append((key, bytes(value)))
        self._batch_size += len(key) + len(self._batch[-1][1])
        if self._batch_size >= BATCH:
            self._commit()

    def _commit(self) -> None:
        try:
            while not self._fits():
                self._map_size *= 2
                self._environment.set_mapsize(self._map_size)
        except lmdb.Error as error:
            raise self._commit_error(error) from error
        self._batch.clear()
        self._batch_size = 0

    def _fits(self) -> bool:
        """Write the batch. False where the map is full: then the transaction is undone, and the batch still here."""
        try:
            with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti(self._batch, append=True)
        except lmdb.MapFullError:
            return False
        return True

    def _commit_error(self, error: lmdb.Error) -> Exception:
        doing = f"cannot write {self._batch_size} bytes"
        found = _explain(error, self.path, doing)
        if isinstance(found, OSError) and found.errno == errno.EIO and hasattr(os, "statvfs"):
            disk = os.statvfs(self._target.temporary)
            if disk.f_bavail * disk.f_frsize < self._batch_size:  # LMDB calls a short write EIO
                return OSError(errno.ENOSPC, f"{doing}: {os.strerror(errno.ENOSPC)}", self.path)
        return found

    def _complete(self) -> None:
        self._commit()
        try:
            pages, page_size = self._environment.info()["last_pgno"] + 1, self._environment.stat()["psize"]
        except lmdb.Error as error:
            raise _explain(error, self.path, "LMDB cannot finish it") from error
        self._environment.close()
        # The file ends where its last page does: LMDB leaves room behind it, or leaves pages out that it freed.
        os.truncate(self._data_file, pages * page_size)
        self._target.finish()

    def _publish(self) -> None:
        self._target.publish()

    def _discard(self) -> None:
        self._batch.clear()
        self._environment.close()
        self._target.discard()


def _explain(error: lmdb.Error, path: str, doing: str) -> OSError | CorruptError:
    """The error to raise for one of LMDB's: OSError where the system refused."""
    code = getattr(error, "code", 0)  # py-lmdb before version 3 gives the text alone
    code = code or next((known for known in REFUSALS if os.strerror(known) in str(error)), 0)
    if code > 0:
        return OSError(code, f"{doing}: {os.strerror(code)}", path)
    return CorruptError(f"{doing}: {error}; restore it from a copy", path=path)
