"""What a tar archive holds, read member by member with distrust and in bounded memory.

The formats are ustar and pax (POSIX.1-2001) and the GNU extensions for long names, large sizes and sparse files.
A reader of its own, since `tarfile` believes what a header says: a pax record of 4 GiB, say, would be read whole.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.errors import DuopackError, quoted
from pipeline.oci.limits import Budget

BLOCK = 512
MAX_EXTENDED = 1 << 20
"""Bytes of one extended header or long name."""
MAX_EXTENSIONS = 8
"""Extended headers before one member."""
MAX_PATH = 4096
MAX_DEPTH = 128
MAX_SPARSE_BLOCKS = 4096
MAX_SIZE = 16 << 40

Kind = Literal["file", "directory", "symlink", "hardlink", "device", "fifo", "unknown"]
_KINDS: dict[bytes, Kind] = {
    b"0": "file", b"\0": "file", b"7": "file", b"S": "file", b"1": "hardlink", b"2": "symlink",
    b"3": "device", b"4": "device", b"5": "directory", b"6": "fifo",
}  # fmt: skip

_NEVER = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})

Trouble = Literal["", "outside", "absolute", "unprintable", "too-long"]


class TarError(DuopackError):
    """The archive breaks the format, or would cost more than it may."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry. `path` is from the root, without a leading or trailing slash; the root itself is ''.

    `offset` is where the content begins in the archive, and `size` its bytes there. `expanded` is what a sparse
    file would have when unpacked. `trouble` says what is wrong with the name; `path` is then only for showing.
    """

    path: str
    kind: Kind
    size: int
    offset: int
    mode: int = 0o644
    link: str = ""
    expanded: int | None = None
    trouble: Trouble = ""

    @property
    def end(self) -> int:
        """Where the next header begins."""
        return self.offset + -(-self.size // BLOCK) * BLOCK


class Reader(Protocol):
    """Bytes read forward."""

    position: int
    size: int | None
    """All of them, when it is known before."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end."""
        ...

    def advance(self, position: int) -> bool:
        """Goes forward to `position`; False when the bytes end before."""
        ...


def members(reader: Reader, budget: Budget) -> Iterator[Member]:
    """The members in order, each once. After one is given its content may be read from `reader`.

    Ends at the end mark, or at the end of the bytes between two members, as tar programs do. Raises TarError
    where the archive is broken, and LimitError.
    """
    while (member := _next(reader, budget)) is not None:
        budget.member()
        yield member
        if not reader.advance(member.end):
            raise TarError(f"the archive ends inside '{quoted(member.path)}'")


def _next(reader: Reader, budget: Budget) -> Member | None:
    records: dict[str, str] = {}
    for _ in range(MAX_EXTENSIONS):
        budget.check_time()
        begin = reader.position
        block = reader.read(BLOCK)
        if not block or not any(block):
            _check_end(reader, block, bool(records))
            return None
        if len(block) < BLOCK:
            raise TarError(f"the archive ends inside the header at byte {begin}")
        _check_sum(block, begin)
        size, flag = _number(block[124:136], begin), block[156:157]
        if flag in b"xgXLK":
            _extend(records, flag, _body(reader, size, begin), begin)
            continue
        return _member(reader, block, records, size)
    raise TarError(
        f"more than {MAX_EXTENSIONS} extended headers precede the member at byte {reader.position}"
    )


def _check_end(reader: Reader, block: bytes, extended: bool) -> None:
    if extended:
        raise TarError("the archive ends after an extended header")
    if block and any(reader.read(BLOCK)):
        raise TarError(f"a lone block of zeros lies in the middle, at byte {reader.position - 2 * BLOCK}")


def _body(reader: Reader, size: int, begin: int) -> bytes:
    if size > MAX_EXTENDED:
        raise TarError(f"the extended header at byte {begin} has {size} bytes; {MAX_EXTENDED} are accepted")
    body = reader.read(size)
    if len(body) < size or not reader.advance(begin + BLOCK + -(-size // BLOCK) * BLOCK):
        raise TarError(f"the archive ends inside the extended header at byte {begin}")
    return body


def _extend(records: dict[str, str], flag: bytes, body: bytes, begin: int) -> None:
    if flag == b"L":
        records["path"] = _text(body)
    elif flag == b"K":
        records["linkpath"] = _text(body)
    else:
        found = _pax(body, begin)
        if flag == b"g" and not found.keys().isdisjoint({"path", "linkpath", "size"}):
            raise TarError(f"the global header at byte {begin} gives every member one name or size")
        records |= found if flag != b"g" else {}


def _pax(body: bytes, begin: int) -> dict[str, str]:
    """The records `LENGTH KEY=VALUE\\n` that matter here; another key is passed over."""
    records, position = {}, 0
    while position < len(body):
        space = body.find(b" ", position, position + 8)
        digits = body[position:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        record = body[position : position + length]
        key, equals, value = record[space - position + 1 : -1].partition(b"=")
        if not equals or len(record) < length or not record.endswith(b"\n"):
            raise TarError(f"the extended header at byte {begin} is malformed")
        if key in {b"path", b"linkpath", b"size"} or key.startswith(b"GNU.sparse."):
            records[_text(key)] = _text(value)
        position += length
    return records


def _member(reader: Reader, block: bytes, records: dict[str, str], size: int) -> Member:
    flag = block[156:157]
    kind = _KINDS.get(flag, "unknown")
    expanded = None
    if flag == b"S":
        expanded = _number(block[483:495], reader.position)
        _pass_sparse_map(reader, bool(block[482]))
    if "size" in records:
        size = _decimal(records["size"], reader.position)
    sparse_size = records.get("GNU.sparse.realsize", records.get("GNU.sparse.size"))
    if sparse_size is not None:
        expanded = _decimal(sparse_size, reader.position)
    # Links and directories have no content, whatever size a header claims.
    size = size if kind in {"file", "unknown"} else 0
    name = records.get("GNU.sparse.name") or records.get("path") or _name(block)
    path, trouble = _normal(name)
    if reader.size is not None and reader.position + size > reader.size:
        missing = reader.position + size - reader.size
        raise TarError(f"'{quoted(name)}' would reach {missing} bytes beyond the end of the archive")
    return Member(
        path=path,
        kind="directory" if kind == "file" and name.endswith("/") else kind,
        size=size,
        offset=reader.position,
        mode=_number(block[100:108], reader.position) & 0o7777,
        link=records.get("linkpath", _text(block[157:257])) if kind in {"symlink", "hardlink"} else "",
        expanded=expanded,
        trouble=trouble,
    )


def _normal(name: str) -> tuple[str, Trouble]:
    """A name as a path from the root, and what is wrong with it."""
    parts = [part for part in name.split("/") if part not in {"", "."}]
    path = "/".join(parts)
    if len(name.encode("utf-8", "replace")) > MAX_PATH or len(parts) > MAX_DEPTH:
        return quoted(path), "too-long"
    if ".." in parts:
        return quoted(name), "outside"
    if not name.isprintable() and any(unicodedata.category(c) in _NEVER for c in name):
        return quoted(name), "unprintable"
    return path, "absolute" if name.startswith("/") and path else ""


def _name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _number(field: bytes, begin: int) -> int:
    """An octal number, or GNU's base-256 form, which the first bit tells."""
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    else:
        text = field.partition(b"\0")[0].strip()
        if text and (len(text) > 12 or set(text) - set(b"01234567")):
            raise TarError(f"the header at byte {begin} has '{quoted(_text(field))}' for a number")
        value = int(text or b"0", 8)
    return _sane(value, begin)


def _decimal(text: str, begin: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise TarError(f"the header before byte {begin} has '{quoted(text, 40)}' for a size")
    return _sane(int(text), begin)


def _sane(value: int, begin: int) -> int:
    if value > MAX_SIZE:
        raise TarError(f"the header at byte {begin} claims a number of {value}")
    return value


def _check_sum(block: bytes, begin: int) -> None:
    text = block[148:156].replace(b"\0", b" ").strip()
    claimed = int(text, 8) if text and not set(text) - set(b"01234567") else -1
    found = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    # Old programs summed signed bytes.
    if claimed != found and claimed != found - 256 * sum(byte > 127 for byte in block):
        raise TarError(f"there is no tar header at byte {begin}: its checksum is wrong")


def _pass_sparse_map(reader: Reader, more: bool) -> None:
    for _ in range(MAX_SPARSE_BLOCKS):
        if not more:
            return
        block = reader.read(BLOCK)
        if len(block) < BLOCK:
            raise TarError("the archive ends inside the map of a sparse file")
        more = bool(block[504])
    raise TarError("the map of a sparse file has no end")
