"""Reads a store with nothing but docs/formats.md: read_store.py DIR...

Verifies every checksum and prints what the last commit holds as JSON; exit code 77 where there is no
libxxhash to be loaded.
"""
import ctypes
import json
import struct
import sys

try:
    XXHASH = ctypes.CDLL("libxxhash.so.0")
except OSError:
    sys.exit(77)
XXHASH.XXH3_64bits.restype = ctypes.c_uint64
XXHASH.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

KINDS = ["weight", "residual", "moment1", "moment2", "gradient", "boundary", "other"]
SLOTS = ["two", "one", "scratch"]
SPAN = 262144


def checksum(data):
    return XXHASH.XXH3_64bits(data, len(data))


def read_superblock(arena, position):
    data = arena[position * SPAN:(position + 1) * SPAN]
    magic, version, size, order = struct.unpack_from("<8sIIQ", data)
    if magic != b"STRATASB" or version != 1 or order != 0x0102030405060708 or size > SPAN:
        return None
    if struct.unpack_from("<Q", data, size - 8)[0] != checksum(data[:size - 8]):
        return None
    names = ("drive drives generation commit committed file_size written map_size map_sum flags "
             "records metadata alignment").split()
    block = dict(zip(names, struct.unpack_from("<IIQQQQQQQIIII", data, 40)))
    block["id"] = data[24:40].hex()
    end = 128 + 24 * block["records"]
    block["metadata"] = data[end:end + block["metadata"]]
    block["records"] = [struct.unpack_from("<QQI", data, at) for at in range(128, end, 24)]
    return block


def read_map(arena, block):
    padded = -(-block["map_size"] // block["alignment"]) * block["alignment"]
    for offset in (2 * SPAN, 2 * SPAN + padded):
        data = arena[offset:offset + block["map_size"]]
        assert checksum(data) == block["map_sum"], "map"
    chunk_size, alignment, chunks, record_count, drives = struct.unpack_from("<QQQII", data)
    at, records = 32 + 24 * drives, []
    for _ in range(record_count):
        size, unit, kind, slots = struct.unpack_from("<QiBBxx", data, at)
        parts = [struct.unpack_from("<QQQQ", data, at + 16 + 32 * d) for d in range(drives)]
        records.append((size, unit, kind, slots, parts))
        at += 16 + 32 * drives
    return chunk_size, records, data[at:at + chunks]


def read_record(arenas, blocks, index, record, chunk_size, drive_of_chunk):
    size, _, _, slots, parts = record
    slot = blocks[0]["records"][index][2]
    tables = []
    for arena, block, part in zip(arenas, blocks, parts):
        count = drive_of_chunk.count(block["drive"])
        table = arena[part[2 + slot]:part[2 + slot] + 8 * count]
        assert count == 0 or checksum(table) == block["records"][index][1], "table"
        tables.append(struct.unpack("<%dQ" % count, table))
    content, seen = b"", [0] * len(arenas)
    for drive in drive_of_chunk:
        at = parts[drive][slot if slots == 0 else 0] + seen[drive] * chunk_size
        chunk = arenas[drive][at:at + min(chunk_size, size - len(content))]
        assert checksum(chunk) == tables[drive][seen[drive]], "chunk"
        content += chunk
        seen[drive] += 1
    return content


def main(directories):
    found = []
    for directory in directories:
        with open(directory + "/arena.strata", "rb") as file:
            arena = file.read()
        found.append((arena, [b for b in (read_superblock(arena, i) for i in (0, 1)) if b]))
    found.sort(key=lambda each: each[1][0]["drive"])
    names = [{(b["id"], b["generation"], b["commit"]) for b in blocks} for _, blocks in found]
    name = max(set.intersection(*names), key=lambda each: each[1])
    arenas = [arena for arena, _ in found]
    blocks = [next(b for b in blocks if b["generation"] == name[1]) for _, blocks in found]
    assert [b["drive"] for b in blocks] == list(range(blocks[0]["drives"])), "drives"
    chunk_size, records, chunks = read_map(arenas[0], blocks[0])
    listed, first = [], 0
    for index, record in enumerate(records):
        size, unit, kind, slots, _ = record
        count = -(-size // chunk_size)
        entry = {"unit": unit, "kind": KINDS[kind], "slots": SLOTS[slots], "size_bytes": size,
                 "generation": blocks[0]["records"][index][0]}
        if entry["generation"]:
            content = read_record(arenas, blocks, index, record, chunk_size,
                                  chunks[first:first + count])
            assert len(content) == size
            entry["xxh3_64"] = "%016x" % checksum(content)
        first += count
        listed.append(entry)
    print(json.dumps({"store": name[0], "generation": blocks[0]["committed"],
                      "in_flux": bool(blocks[0]["flags"] & 1),
                      "metadata": blocks[0]["metadata"].hex(), "records": listed}))


main(sys.argv[1:])
