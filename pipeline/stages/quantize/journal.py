"""Which files of an unfinished result are whole: a run with the same inputs goes on behind them."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pipeline.files import disk_errors, write_atomically

NAME: Final = ".duopack-journal.json"


class Journal:
    """One directory's. An entry is any JSON object; it counts only while its file has the size that it had."""

    def __init__(self, directory: Path, inputs: str) -> None:
        """Opens the journal; without one for the same inputs the directory is emptied first."""
        self._directory = directory
        self._path = directory / NAME
        self._inputs = inputs
        self._entries: dict[str, dict[str, Any]] = {}
        if not self._read():
            with disk_errors(directory):
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True)
        self._clear()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> dict[str, Any] | None:
        """What was noted of a file that is still there."""
        entry = self._entries.get(name)
        with suppress(OSError):
            if entry and (self._directory / name).stat().st_size == entry["size"]:
                content: dict[str, Any] = entry["content"]
                return content
        return None

    def add(self, name: str, content: dict[str, Any]) -> None:
        """Notes a file that is whole and synced."""
        size = (self._directory / name).stat().st_size
        self._entries[name] = {"size": size, "content": content}
        text = json.dumps({"inputs": self._inputs, "entries": self._entries})
        write_atomically(self._path, text.encode())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _clear(self) -> None:
        """Removes what is not noted: a file that a killed run was writing."""
        with disk_errors(self._directory):
            for path in self._directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != NAME and path.name not in self._entries:
                    path.unlink()

    def _read(self) -> bool:
        with suppress(OSError, ValueError, TypeError, KeyError):
            values = json.loads(self._path.read_bytes())
            if values["inputs"] == self._inputs:
                self._entries = dict(values["entries"])
                return True
        return False
