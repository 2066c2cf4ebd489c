"""What `import_speed.py` imports besides text: traces, memory snapshots, event files, offline runs; and their peers.

Each is written in the form of its own library: see docs/importing-profiles.md for the sources of the formats.
"""

import json
import pickle
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from flowledger.record.importers.wire import masked_crc32c

Peer = Callable[[Path], int]
_RUNTIME = '{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":1,"tid":1,"ts":{t}.500,"dur":3.000,"args":{{"External id":{i},"cbid":211,"correlation":{i}}}}}'
_OPERATOR = '{{"ph":"X","cat":"cpu_op","name":"aten::linear","pid":1,"tid":1,"ts":{t}.250,"dur":5.125,"args":{{"External id":{i},"Record function id":0,"Concrete Inputs":["","",""],"Input type":["c10::BFloat16","c10::BFloat16",""],"Input Dims":[[4,4096],[4096,4096],[]],"Ev Idx":{i}}}}}'
_KERNEL = '{{"ph":"X","cat":"kernel","name":"void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)","pid":0,"tid":7,"ts":{t}.000,"dur":8.000,"args":{{"External id":{i},"queued":0,"device":0,"context":1,"stream":7,"correlation":{i},"registers per thread":230,"shared memory":98304,"blocks per SM":0.6,"grid":[32,4,1],"block":[256,1,1],"est. achieved occupancy %":12}}}}'
_GATHER = '{{"ph":"X","cat":"kernel","name":"ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)","pid":0,"tid":22,"ts":{t}.000,"dur":30.000,"args":{{"External id":{i},"device":0,"stream":22,"Collective name":"_allgather_base","In msg nelems":1048576,"Out msg nelems":8388608,"Group size":8,"dtype":"BFloat16","Process Group Name":"0","Process Group Description":"default_pg","Process Group Ranks":"[0, 1, 2, 3, 4, 5, 6, 7]"}}}}'
_ARROW = '{{"ph":"f","id":{i},"pid":0,"tid":7,"ts":{t}.000,"cat":"ac2g","name":"ac2g","bp":"e"}}'
_STEP = '{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#{step}","pid":1,"tid":1,"ts":{t}.000,"dur":49999.000}}'


def torch_trace(draw: random.Random) -> Iterator[bytes]:
    """A GPU rank's trace as Kineto writes it, an event of five a kernel."""
    yield b'{"schemaVersion":1,"distributedInfo":{"backend":"nccl","rank":3,"world_size":8},"baseTimeNanoseconds":1700000000000000000,"traceEvents":[\n'
    number = 0
    while True:
        forms = [_OPERATOR, _RUNTIME, _KERNEL, _ARROW]
        forms += [_GATHER] if number % 10 == 0 else []
        forms += [_STEP] if number % 5000 == 0 else []
        yield "".join(f"{form.format(i=number, t=number * 10, step=number // 5000)},\n" for form in forms).encode()
        number += 1


def peer_trace(path: Path) -> int:
    return sum(event.get("cat") == "kernel" for event in json.loads(path.read_bytes())["traceEvents"])


WORDS = ("action", "addr", "size", "stream", "time_us", "frames", "alloc", "free_requested", "free_completed")


def memory_snapshot(draw: random.Random) -> Iterator[bytes]:
    """A history of allocations and releases, as pickle's protocol 4 has it: words once, then their numbers."""
    words = b"".join(b"\x8c" + bytes((len(word),)) + word.encode() + b"\x940" for word in WORDS)
    yield b"\x80\x04" + words + b"]\x940"  # number 9: a list of no frames
    yield b"}(\x8c\x08segments]\x8c\x0ddevice_traces](]("
    now, address = 1_700_000_000_000_000, 0x7F00_0000_0000
    while True:
        size = draw.randrange(512, 1 << 24)
        for action in (6, 7, 8):
            now += 3
            yield (
                b"}(h\x00h" + bytes((action,)) + b"h\x01\x8a\x07" + struct.pack("<Q", address)[:7] + b"h\x02J" + struct.pack("<i", size)
                + b"h\x03K\x00h\x04\x8a\x08" + struct.pack("<q", now) + b"h\x05h\x09u"
            )  # fmt: skip
        address += 1 << 24


def peer_snapshot(path: Path) -> int:
    with path.open("rb") as file:
        return sum(map(len, pickle.load(file)["device_traces"]))


def _field(number: int, value: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes((value & 0x7F | 0x80,)), value >> 7
    return out + bytes((value,))


def tensorboard(draw: random.Random) -> Iterator[bytes]:
    """A record a scalar, as SummaryWriter writes it."""
    step = 0
    while True:
        step += 1
        for name in range(100):
            value = _field(1, f"actor/number_{name}".encode()) + b"\x15" + struct.pack("<f", draw.random())
            event = b"\x09" + struct.pack("<d", 1.7e9 + step) + b"\x10" + _varint(step) + _field(5, _field(1, value))
            length = struct.pack("<Q", len(event))
            yield length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))


def peer_events(path: Path) -> int:
    """The records, without what is in them."""
    data, at, found = path.read_bytes(), 0, 0
    while at + 12 <= len(data):
        at += 16 + struct.unpack_from("<Q", data, at)[0]
        found += 1
    return found


def wandb(draw: random.Random) -> Iterator[bytes]:
    """A record a call of `log`, each with a hundred numbers."""
    yield b":W&B\xe1\xbe\x00"
    place, step = 7, 0
    while True:
        step += 1
        items = {"_step": step, **{f"actor/number_{name}": draw.random() for name in range(100)}}
        listed = (
            _field(2, name.encode()) + b"\x82\x01" + _varint(len(str(value))) + str(value).encode()
            for name, value in items.items()
        )
        record = _field(2, b"".join(_field(1, item) for item in listed))
        for kind, piece in _pieces(record, place):
            if not kind:
                yield piece
            else:
                yield struct.pack("<IHB", zlib.crc32(piece, zlib.crc32(bytes((kind,)))), len(piece), kind) + piece
            place += len(piece) + (7 if kind else 0)


def _pieces(record: bytes, place: int) -> Iterator[tuple[int, bytes]]:
    """(type, content) of what a record is cut into, 0: the empty end of a block."""
    first = True
    while True:
        room = 32768 - place % 32768
        if room < 7:
            yield 0, bytes(room)
            place += room
            continue
        piece, record = record[: room - 7], record[room - 7 :]
        yield (1 if first else 4) if not record else (2 if first else 3), piece
        place, first = place + 7 + len(piece), False
        if not record:
            return


def peer_wandb(path: Path) -> int:
    """The pieces, without what is in them."""
    data, at, found = path.read_bytes(), 7, 0
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        at += room if room < 7 else 7 + struct.unpack_from("<H", data, at + 4)[0]
        found += 1
    return found


# name -> (its writer, the file's name, its peer, what ends a file)
PROFILES: dict[str, tuple[Callable[[random.Random], Iterator[bytes]], str, Peer, bytes]] = {
    "torch_trace": (torch_trace, "rank3.pt.trace.json", peer_trace, b"{}]}"),
    "memory_snapshot": (memory_snapshot, "snapshot_rank3.pickle", peer_snapshot, b"eeu."),
    "tensorboard": (tensorboard, "events.out.tfevents.1", peer_events, b""),
    "wandb": (wandb, "run-1.wandb", peer_wandb, b""),
}
