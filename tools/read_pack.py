"""Read and check a packfmt shard with the standard library alone, as docs/format.md says.

This is a second reader, written from the specification and sharing no code with the package: tests compare the two, and
a person who has lost packfmt but kept this file still has the images. It reads the file whole and hashes in plain
Python (ten megabytes a second or so), so it is for small packs.

    python tools/read_pack.py PACK          list the records and check every byte
    python tools/read_pack.py PACK --json   the same as one JSON object
    python tools/read_pack.py PACK --hex    every byte, with the name of the part it belongs to
"""

import hashlib
import json
import re
import struct
import sys
from itertools import pairwise

MAGIC = b"\x89packfmt\r\n\x1a\n"
TRAILER_MAGIC = b"packend\n"
MAX_DIRECTORY = 24 * 1024 * 1024
MAX_STRINGS, MAX_NUMBERS, MAX_NODES, MAX_DEPTH = 2**20, 2**20, 2**16, 64
SIZES = {"b1": 1, "u1": 1, "i1": 1, "u2": 2, "i2": 2, "f2": 2, "u4": 4, "i4": 4, "f4": 4, "u8": 8, "i8": 8, "f8": 8}
DTYPES = {("|" if size == 1 else "<") + name: size for name, size in SIZES.items()}
LETTERS = dict(zip(DTYPES, "?BbHheIifQqd", strict=True))  # struct's names for the same types


class PackError(ValueError):
    """The file breaks a rule of the format."""


# ---- XXH3, from the algorithm's specification ----

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P64_4, P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
MIX_1, MIX_2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
M32, M64 = 2**32 - 1, 2**64 - 1


def u32(data, at):
    return int.from_bytes(data[at : at + 4], "little")


def u64(data, at):
    return int.from_bytes(data[at : at + 8], "little")


def swap32(value):
    return int.from_bytes(value.to_bytes(4, "little"), "big")


def swap64(value):
    return int.from_bytes(value.to_bytes(8, "little"), "big")


def rotate(value, by):
    return (value << by | value >> (64 - by)) & M64


def fold(a, b):
    product = a * b
    return (product & M64) ^ (product >> 64)


def avalanche(h):
    h ^= h >> 37
    h = h * MIX_1 & M64
    return h ^ h >> 32


def avalanche_64(h):
    h ^= h >> 33
    h = h * P64_2 & M64
    h ^= h >> 29
    h = h * P64_3 & M64
    return h ^ h >> 32


def mix16(data, at, secret_at, seed):
    low = u64(data, at) ^ (u64(SECRET, secret_at) + seed & M64)
    high = u64(data, at + 8) ^ (u64(SECRET, secret_at + 8) - seed & M64)
    return fold(low, high)


def xxh3_64(data, seed=0):
    """XXH3 with 64 bits of ``data`` (bytes), as an int."""
    n = len(data)
    if n == 0:
        return avalanche_64(seed ^ u64(SECRET, 56) ^ u64(SECRET, 64))
    if n <= 3:
        mixed = data[0] << 16 | data[n >> 1] << 24 | data[-1] | n << 8
        return avalanche_64(mixed ^ ((u32(SECRET, 0) ^ u32(SECRET, 4)) + seed & M64))
    if n <= 8:
        seed ^= swap32(seed & M32) << 32
        h = (u32(data, n - 4) + (u32(data, 0) << 32)) ^ ((u64(SECRET, 8) ^ u64(SECRET, 16)) - seed & M64)
        h ^= rotate(h, 49) ^ rotate(h, 24)
        h = h * MIX_2 & M64
        h ^= (h >> 35) + n
        h = h * MIX_2 & M64
        return h ^ h >> 28
    if n <= 16:
        low = u64(data, 0) ^ ((u64(SECRET, 24) ^ u64(SECRET, 32)) + seed & M64)
        high = u64(data, n - 8) ^ ((u64(SECRET, 40) ^ u64(SECRET, 48)) - seed & M64)
        return avalanche(n + swap64(low) + high + fold(low, high) & M64)
    if n <= 128:
        acc = n * P64_1
        for i in range((n - 1) // 32 + 1):
            acc += mix16(data, 16 * i, 32 * i, seed) + mix16(data, n - 16 * (i + 1), 32 * i + 16, seed)
        return avalanche(acc & M64)
    if n <= 240:
        acc = n * P64_1 + sum(mix16(data, 16 * i, 16 * i, seed) for i in range(8))
        acc = avalanche(acc & M64)
        acc += sum(mix16(data, 16 * i, 16 * i - 125, seed) for i in range(8, n // 16))
        return avalanche(acc + mix16(data, n - 16, 119, seed) & M64)
    secret = seeded_secret(seed)
    return merge(long_lanes(data, secret), secret, 11, n * P64_1 & M64)


def seeded_secret(seed):
    words = struct.unpack("<24Q", SECRET)
    return struct.pack("<24Q", *((word - seed if i % 2 else word + seed) & M64 for i, word in enumerate(words)))


def long_lanes(data, secret):
    """The eight lanes after all of an input of more than 240 bytes."""
    lanes = [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1]
    keys = [struct.unpack_from("<8Q", secret, 8 * i) for i in range(16)]
    scramble = struct.unpack_from("<8Q", secret, 128)
    n = len(data)
    for number in range((n - 1) // 64):
        accumulate(lanes, struct.unpack_from("<8Q", data, 64 * number), keys[number % 16])
        if number % 16 == 15:
            lanes = [((lane ^ lane >> 47) ^ key) * P32_1 & M64 for lane, key in zip(lanes, scramble, strict=True)]
    accumulate(lanes, struct.unpack_from("<8Q", data, n - 64), struct.unpack_from("<8Q", secret, 121))
    return lanes


def accumulate(lanes, words, keys):
    for i in range(8):
        mixed = words[i] ^ keys[i]
        lanes[i ^ 1] = lanes[i ^ 1] + words[i] & M64
        lanes[i] = lanes[i] + (mixed & M32) * (mixed >> 32) & M64


def merge(lanes, secret, at, start):
    for i in range(0, 8, 2):
        start += fold(lanes[i] ^ u64(secret, at + 8 * i), lanes[i + 1] ^ u64(secret, at + 8 * i + 8))
    return avalanche(start & M64)


def xxh3_128(data):
    """XXH3 with 128 bits and seed 0 of ``data`` (bytes), as 16 bytes: the high half first, each big-endian."""
    high, low = xxh3_128_halves(data)
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def xxh3_128_halves(data):
    n = len(data)
    if n == 0:
        return avalanche_64(u64(SECRET, 80) ^ u64(SECRET, 88)), avalanche_64(u64(SECRET, 64) ^ u64(SECRET, 72))
    if n <= 3:
        low = data[0] << 16 | data[n >> 1] << 24 | data[-1] | n << 8
        high = swap32(low)
        high = (high << 13 | high >> 19) & M32
        return (
            avalanche_64(high ^ u32(SECRET, 8) ^ u32(SECRET, 12)),
            avalanche_64(low ^ u32(SECRET, 0) ^ u32(SECRET, 4)),
        )
    if n <= 8:
        keyed = (u32(data, 0) | u32(data, n - 4) << 32) ^ u64(SECRET, 16) ^ u64(SECRET, 24)
        product = keyed * (P64_1 + 4 * n)
        low = product & M64
        high = (product >> 64) + 2 * low & M64
        low ^= high >> 3
        low ^= low >> 35
        low = low * MIX_2 & M64
        return avalanche(high), low ^ low >> 28
    if n <= 16:
        first, last = u64(data, 0), u64(data, n - 8)
        product = (first ^ last ^ u64(SECRET, 32) ^ u64(SECRET, 40)) * P64_1
        low = (product & M64) + (n - 1 << 54) & M64
        last ^= u64(SECRET, 48) ^ u64(SECRET, 56)
        high = (product >> 64) + last + (last & M32) * (P32_2 - 1) & M64
        product = (low ^ swap64(high)) * P64_2
        return avalanche((product >> 64) + high * P64_2 & M64), avalanche(product & M64)
    if n <= 240:
        return middle_128(data)
    lanes = long_lanes(data, SECRET)
    return merge(lanes, SECRET, 117, ~(n * P64_2) & M64), merge(lanes, SECRET, 11, n * P64_1 & M64)


def middle_128(data):
    n = len(data)
    low, high = n * P64_1 & M64, 0

    def mix32(first, second, secret_at):
        nonlocal low, high
        low = (low + mix16(data, first, secret_at, 0) & M64) ^ (u64(data, second) + u64(data, second + 8) & M64)
        high = (high + mix16(data, second, secret_at + 16, 0) & M64) ^ (u64(data, first) + u64(data, first + 8) & M64)

    if n <= 128:
        for i in reversed(range((n - 1) // 32 + 1)):
            mix32(16 * i, n - 16 * (i + 1), 32 * i)
    else:
        for at in range(0, 128, 32):
            mix32(at, at + 16, at)
        low, high = avalanche(low), avalanche(high)
        for at in range(128, n - 31, 32):
            mix32(at, at + 16, at - 125)
        mix32(n - 16, n - 32, 103)
    return -avalanche(low * P64_1 + high * P64_4 + n * P64_2 & M64) & M64, avalanche(low + high & M64)


# ---- the format ----


def require(condition, problem):
    if not condition:
        raise PackError(problem)


def align(position):
    return -(-position // 64) * 64


def read_pack(path):
    """Read a shard and check every rule and every byte of it.

    Returns:
        a dict: ``count``, ``records`` (list of bytes), ``columns`` (name to a list of values), ``classes``,
        ``metadata``, ``set`` (of a shard of several: id, number and count; else None), ``content_id`` (hexadecimal),
        ``checksums``, ``described`` (name to dtype, shape and kind), and ``parts`` (name, offset, size).

    Raises:
        PackError: the file breaks a rule.
    """
    with open(path, "rb") as file:
        data = file.read()
    check_header(data)
    count, records_end, directory_at, directory_size, content_id = read_trailer(data)
    described, classes, metadata, sections, member = read_directory(data[directory_at : directory_at + directory_size])
    check_sections(data, count, records_end, directory_at, described, sections)
    require(not any(data[directory_at + directory_size : -96]), "bytes other than zero between directory and trailer")

    index = {}
    for name in ("offset", "length", "checksum"):
        at, size, _ = sections["index." + name]
        index[name] = struct.unpack_from(f"<{size // 8}Q", data, at)
    records = read_records(data, count, records_end, index)
    columns = {name: read_column(data, count, name, column, sections) for name, column in described.items()}
    require(all(columns["key"]), "a key is empty")
    require(len(set(columns["key"])) == count, "two records have the same key")
    require(xxh3_128(content(data, described, sections)) == content_id, "the content id is not that of the content")
    return {
        "count": count,
        "records": records,
        "columns": columns,
        "classes": classes,
        "metadata": metadata,
        "set": member,
        "content_id": content_id.hex(),
        "checksums": list(index["checksum"]),
        "described": described,
        "parts": name_parts(len(data), index, sections, (directory_at, directory_size)),
    }


def name_parts(file_size, index, sections, directory):
    """(name, offset, size) of everything in the file, in file order; what is between is padding."""
    parts = [("header", 0, 64)]
    records = zip(index["offset"], index["length"], strict=True)
    parts += [(f"record {i}", at, size) for i, (at, size) in enumerate(records)]
    parts += sorted(((name, at, size) for name, (at, size, _) in sections.items()), key=lambda part: part[1:])
    return [*parts, ("directory", *directory), ("trailer", file_size - 96, 96)]


def check_header(data):
    require(data[:12] == MAGIC, "no packfmt shard: wrong signature")
    require(len(data) >= 160, f"truncated: {len(data)} bytes, header and trailer take 160")
    version, incompatible, _, zero, checksum = struct.unpack_from("<IQQ24sQ", data, 12)
    require(checksum == xxh3_64(data[:56]), "the header does not match its checksum")
    require(version == 1, f"version {version}, expected 1")
    require(incompatible == 0, f"unknown incompatible features {incompatible:#x}")
    require(zero == bytes(24), "bytes other than zero in the header's reserved field")


def read_trailer(data):
    trailer = data[-96:]
    magic, version, zero, count, records_end, at, size, _, file_size, content_id, reserved, own = struct.unpack(
        "<8sIIQQQQQQ16s8sQ", trailer
    )
    require(magic == TRAILER_MAGIC, "no trailer: truncated or appended to")
    require(own == xxh3_64(trailer[:88]), "the trailer does not match its checksum")
    require(version == 1 and zero == 0 and reserved == bytes(8), "the trailer's version or reserved bytes are wrong")
    require(file_size == len(data), f"{len(data)} bytes long, the trailer says {file_size}")
    require(64 <= records_end <= at and size <= MAX_DIRECTORY, "the trailer's numbers are out of range")
    require(align(at + size) + 96 == file_size, "the directory does not end where the trailer starts")
    require(xxh3_64(data[at : at + size]) == u64(trailer, 48), "the directory does not match its checksum")
    return count, records_end, at, size, content_id


def check_amounts(raw):
    """The directory's bounds, which are looked at before it is parsed."""
    strings = numbers = nodes = depth = 0
    for token in re.finditer(rb'"(?:[^"\\]|\\.)*"|[][{},:]', raw):
        kind = token[0][:1]
        strings += kind == b'"'
        numbers += kind == b"," and raw[token.start() - 1 : token.start()] != b'"'
        nodes += kind in b"[{:"
        depth += (kind in b"[{") - (kind in b"]}")
        few = strings <= MAX_STRINGS and numbers <= MAX_NUMBERS and nodes <= MAX_NODES
        require(few and depth <= MAX_DEPTH, "the directory holds too much, or is nested too deep")


def read_directory(raw):
    check_amounts(raw)

    def unique(pairs):
        require(len(dict(pairs)) == len(pairs), "the directory gives a name twice")
        return dict(pairs)

    def constant(text):
        raise PackError(f"the directory holds {text}")

    def finite(text):
        value = float(text)
        require(abs(value) != float("inf"), f"the directory holds {text}, more than a float64 can")
        return value

    try:
        directory = json.loads(
            raw.decode("ascii"), object_pairs_hook=unique, parse_constant=constant, parse_float=finite
        )
    except PackError:
        raise
    except (ValueError, RecursionError) as error:
        raise PackError(f"the directory is no ASCII JSON: {error}") from error
    require(isinstance(directory, dict), "the directory is no JSON object")
    for name, kind in {"classes": list, "columns": dict, "metadata": dict, "sections": dict}.items():
        require(isinstance(directory.get(name), kind), f"the directory's {name!r} is missing or of the wrong type")
    require(all(isinstance(name, str) for name in directory["classes"]), "a class name is no string")
    for name, column in directory["columns"].items():
        check_column(name, column)
    require(directory["columns"].get("key", {}).get("kind") == "text", "no column 'key' of kind 'text'")
    sections = {name: read_section(name, section) for name, section in directory["sections"].items()}
    member = directory.get("set")
    require("set" not in directory or is_member(member), f"the directory's 'set' is {member!r}")
    return directory["columns"], directory["classes"], directory["metadata"], sections, member


def is_member(member):
    """Whether this says which shard of which set the file is."""
    if not isinstance(member, dict):
        return False
    set_id, number, count = member.get("id"), member.get("number"), member.get("count")
    good = isinstance(set_id, str) and len(set_id) == 32 and set(set_id) <= set("0123456789abcdef")
    return good and type(number) is int and type(count) is int and 0 <= number < count < 2**64


def check_column(name, column):
    require(name, "a column has an empty name")
    require(isinstance(column, dict), f"column {name!r} is no object")
    dtype, shape, kind = column.get("dtype"), column.get("shape"), column.get("kind")
    require(isinstance(dtype, str) and dtype in DTYPES, f"column {name!r} has dtype {dtype!r}")
    require(isinstance(shape, list) and len(shape) <= 31, f"column {name!r} has shape {shape!r}")
    for axis, size in enumerate(shape):
        good = (type(size) is int and 0 < size < 2**31) or (size is None and axis == 0)
        require(good, f"column {name!r} has shape {shape!r}")
    require(row_size(column) < 2**31, f"a row of column {name!r} takes 2 GiB or more")
    require(kind in ("array", "text", "bytes"), f"column {name!r} has kind {kind!r}")
    require(kind == "array" or (dtype, shape) == ("|u1", [None]), f"column {name!r} of kind {kind!r} is not |u1 [null]")


def read_section(name, section):
    require(isinstance(section, dict), f"section {name!r} is no object")
    offset, size, checksum = section.get("offset"), section.get("size"), section.get("checksum")
    for number in (offset, size):
        require(type(number) is int and 0 <= number < 2**64, f"section {name!r} has the place {offset!r}, {size!r}")
    good = isinstance(checksum, str) and len(checksum) == 16 and set(checksum) <= set("0123456789abcdef")
    require(good, f"section {name!r} has the checksum {checksum!r}")
    return offset, size, int(checksum, 16)


def ragged(column):
    return column["shape"][:1] == [None]


def row_size(column):
    size = DTYPES[column["dtype"]]
    for extent in column["shape"]:
        size *= extent or 1
    return size


def check_sections(data, count, records_end, directory_at, described, sections):
    """Sections stand in the one allowed order, without overlap or hole, and match their checksums."""
    expected = [("index.offset", 8 * count), ("index.length", 8 * count), ("index.checksum", 8 * count)]
    for name in sorted(described):
        column = described[name]
        if ragged(column):
            expected.append((f"rows.{name}", 8 * count + 8))
            size = sections.get(f"column.{name}", (0, 0, 0))[1]
            require(size % row_size(column) == 0, f"column {name!r} is no whole number of rows")
            expected.append((f"column.{name}", size))
        else:
            expected.append((f"column.{name}", count * row_size(column)))
    require(set(sections) == {name for name, _ in expected}, "sections are missing, or belong to no column")
    end = records_end
    for name, size in expected:
        require(sections[name][:2] == (align(end), size), f"section {name!r} is not {size} bytes at {align(end)}")
        require(align(end) + size <= directory_at, f"section {name!r} reaches into the directory")
        require(not any(data[end : align(end)]), f"bytes other than zero before section {name!r}")
        end = align(end) + size
        require(xxh3_64(data[align(end - size) : end]) == sections[name][2], f"section {name!r} is damaged")
    require(align(end) == directory_at, f"the directory is at {directory_at}, must be at {align(end)}")
    require(not any(data[end:directory_at]), "bytes other than zero before the directory")


def read_records(data, count, records_end, index):
    records = []
    end = 64
    for i in range(count):
        offset, length = index["offset"][i], index["length"][i]
        require(offset == end, f"record {i} is at {offset}, the one before it ends at {end}")
        end = offset + length
        require(end <= records_end, f"record {i} ends at {end}, the records end at {records_end}")
        records.append(data[offset:end])
        require(xxh3_64(records[-1], i) == index["checksum"][i], f"record {i} does not match its checksum")
    require(end == records_end, f"the last record ends at {end}, the records end at {records_end}")
    return records


def read_column(data, count, name, column, sections):
    at, size, _ = sections[f"column.{name}"]
    raw = data[at : at + size]
    if not ragged(column):
        step = row_size(column)
        return [nested(raw[step * i : step * (i + 1)], column["dtype"], column["shape"]) for i in range(count)]
    rows = struct.unpack_from(f"<{count + 1}Q", data, sections[f"rows.{name}"][0])
    step = row_size(column)
    require(rows[0] == 0 and rows[-1] * step == size, f"the rows of column {name!r} do not span its values")
    require(all(a <= b for a, b in pairwise(rows)), f"the rows of column {name!r} go back")
    values = []
    for first, last in pairwise(rows):
        value = raw[step * first : step * last]
        if column["kind"] == "text":
            value = value.decode("utf-8", "surrogateescape")
        elif column["kind"] == "array":
            value = nested(value, column["dtype"], [last - first, *column["shape"][1:]])
        values.append(value)
    return values


def nested(raw, dtype, shape):
    """The numbers in ``raw`` as nested lists of this shape, or as one number where the shape is empty."""
    values = list(struct.unpack(f"<{len(raw) // DTYPES[dtype]}{LETTERS[dtype]}", raw))
    for extent in reversed(shape[1:]):
        values = [values[i : i + extent] for i in range(0, len(values), extent)]
    return values if shape else values[0]


def content(data, described, sections):
    """What the content id is the XXH3-128 of."""
    parts = [section_bytes(data, sections["index.checksum"])]
    for name in sorted(described):
        column = described[name]
        head = [name, column["kind"], column["dtype"], column["shape"]]
        parts.append(json.dumps(head, separators=(",", ":")).encode("ascii"))
        if ragged(column):
            parts.append(section_bytes(data, sections[f"rows.{name}"]))
        parts.append(section_bytes(data, sections[f"column.{name}"]))
    return b"".join(parts)


def section_bytes(data, section):
    return data[section[0] : section[0] + section[1]]


def as_json(value):
    """The same with what JSON lacks spelled out: bytes as hexadecimal, NaN and infinities as words."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return [as_json(item) for item in value] if isinstance(value, list) else value


def hex_dump(data, parts):
    """Lines of up to 16 bytes; a part starts a new line under its name."""
    lines = []
    end = 0
    for name, at, size in [*parts, ("end", len(data), 0)]:
        if at > end:
            lines += ["", f"# {at - end} zero bytes of padding at {end:#x}"]
        if name != "end":
            lines += ["", f"# {name}: {size} bytes at {at:#x}"]
        for start in range(at, at + size, 16):
            row = data[start : min(start + 16, at + size)]
            shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
            lines.append(f"{start:06x}  {row.hex(' '):47}  {shown}")
        end = at + size
    return "\n".join(lines[1:])


def main(arguments):
    options = {argument for argument in arguments if argument.startswith("--")}
    paths = [argument for argument in arguments if argument not in options]
    if len(paths) != 1 or not options <= {"--json", "--hex"}:
        print(__doc__)
        return 2
    try:
        pack = read_pack(paths[0])
    except (PackError, OSError) as error:
        print(f"{paths[0]}: {error}", file=sys.stderr)
        return 1
    if "--hex" in options:
        with open(paths[0], "rb") as file:
            print(hex_dump(file.read(), pack["parts"]))
    elif "--json" in options:
        pack["records"] = [{"size": len(r), "sha256": hashlib.sha256(r).hexdigest()} for r in pack["records"]]
        pack["columns"] = {name: as_json(values) for name, values in pack["columns"].items()}
        print(json.dumps(pack, indent=1))
    else:
        print(f"{paths[0]}: whole. {pack['count']} records, content id {pack['content_id']}")
        for name, column in sorted(pack["described"].items()):
            print(f"column {name!a}: {column['kind']} {column['dtype']} {column['shape']}")
        if pack["set"]:
            print("shard {number} of {count}, counted from 0, of the set {id}".format_map(pack["set"]))
        print(f"classes: {pack['classes']!a}\nmetadata: {json.dumps(pack['metadata'])}")
        for i, (record, key) in enumerate(zip(pack["records"], pack["columns"]["key"], strict=True)):
            print(f"{i} {key!a} {len(record)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
