"""Which bytes travel for an assignment or an update, and how many? A JSON head and safetensors, never pickle.

A message is: 8 bytes (little endian) with the length of the head, the head as JSON, and one safetensors file with every
tensor under `section/name`. Sizes in `bytes_up` and `bytes_down` are the lengths of exactly these messages.
"""

from fedstrata.wire.messages import decode_assignment, decode_update, encode
from fedstrata.wire.packing import NotHeld, WireError, bytes_of, carries, pack, unpack
from fedstrata.wire.sizes import size, size_of_all, size_of_rows, slot_sizes

__all__ = [
    "NotHeld",
    "WireError",
    "bytes_of",
    "carries",
    "decode_assignment",
    "decode_update",
    "encode",
    "pack",
    "size",
    "size_of_all",
    "size_of_rows",
    "slot_sizes",
    "unpack",
]
