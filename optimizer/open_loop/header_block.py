"""HTTP/2 header blocks (HPACK, RFC 7541), as much of them as a gRPC status takes.

To be read with a dynamic table of size 0, which the connection asks for. Names of the static table are passed over,
and so is what Huffman's code shortens: gRPC's C++ server never does so.
"""

from __future__ import annotations

from collections.abc import Iterator

HUFFMAN, INDEXED, INDEXING, TABLE_SIZE = 0x80, 0x80, 0x40, 0x20  # bits


def literal(name: bytes, value: bytes) -> bytes:
    """A field that is not to be indexed."""
    return b"\0" + _counted(name) + _counted(value)


def literals(block: bytes) -> dict[bytes, bytes]:
    """The fields whose names and values stand in the block itself. Raises IndexError where it is cut off."""
    return {name: value for name, value in _fields(block) if name}


def _fields(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(block):
        first = block[at]
        if first & INDEXED:
            _, at = _integer(block, at, 7)
        elif not first & INDEXING and first & TABLE_SIZE:
            _, at = _integer(block, at, 5)
        else:
            index, at = _integer(block, at, 6 if first & INDEXING else 4)
            name, at = (b"", at) if index else _string(block, at)
            value, at = _string(block, at)
            yield name, value


def _counted(text: bytes) -> bytes:
    """With its length before it: seven bits in each byte but the first, which holds up to 126 alone."""
    if len(text) < 0x7F:
        return bytes([len(text)]) + text
    length, rest = b"\x7f", len(text) - 0x7F
    while rest > 0x7F:
        length, rest = length + bytes([rest & 0x7F | 0x80]), rest >> 7
    return length + bytes([rest]) + text


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    coded = block[at] & HUFFMAN
    length, at = _integer(block, at, 7)
    if at + length > len(block):
        raise IndexError("a string is cut off")
    return b"" if coded else block[at : at + length], at + length


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """The number in the last ``bits`` of a byte, and in those after it where it needs more; where it ends."""
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    shift = 0
    while value >= most:
        more, at = block[at], at + 1
        value, shift = value + ((more & 0x7F) << shift), shift + 7
        if not more & 0x80:
            break
    return value, at
