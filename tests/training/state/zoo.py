"""Every kind of value a state may hold, made afresh by each call so that two processes can compare."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy
import torch

from stepwell.storage.format import dtypes


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Wind(enum.Flag):
    NORTH = enum.auto()
    EAST = enum.auto()


class Mode(enum.IntFlag):
    READ = 4
    WRITE = 2


class Pair(NamedTuple):
    left: Any
    right: Any


class Outer:
    class Inner(enum.Enum):
        ONLY = 0


def every_dtype() -> dict[str, torch.Tensor]:
    """One tensor of each element type this torch has."""
    made = {}
    for name in (*dtypes.NATIVE, *dtypes.AS_BYTES):
        kind = getattr(torch, name, None)
        if kind is None:
            continue
        if kind is torch.bool:
            made[name] = torch.tensor([[True, False], [False, True]])
        else:
            made[name] = torch.arange(3, 67, dtype=torch.uint8).view(kind)
    return made


def tensors() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    wave = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    weight = torch.nn.Parameter(torch.tensor([1.5, -0.0, math.inf, math.nan]))
    frozen = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    return {
        "0-dim": torch.tensor(3.25),
        "0-dim int": torch.tensor(7),
        "empty": torch.empty(0),
        "empty with shape": torch.empty(2, 0, 3, dtype=torch.int16),
        "strided": base[:, ::2],
        "transposed": base.t(),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "expanded 0-dim": torch.tensor(9).expand(3),
        "flipped": base.flip(0),
        "offset": base.reshape(-1)[5:9],
        "channels last": torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last),
        "conj": wave.conj(),
        "neg": wave.conj().imag,
        "parameter": weight,
        "frozen parameter": frozen,
        "requires grad": torch.tensor([2.0], requires_grad=True),
        "sub-byte strided": torch.arange(8, dtype=torch.uint8).view(torch.int4)[::2],
    }


def plain() -> dict[str, Any]:
    state_dict: OrderedDict[str, Any] = OrderedDict(b=torch.ones(2), a=1)
    state_dict._metadata = OrderedDict(x={"version": 2})  # type: ignore[attr-defined]
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**62, 2**63, -(2**63), 10**400],
        "floats": [0.0, -0.0, 1e-320, math.nan, math.inf, -math.inf, 0.1],
        "complex": [1j, complex(-0.0, math.nan), complex(math.inf, -1)],
        "text": ["", "a/b%2F", "gr\u00fc\u00df \U0001f40c", "nul\0", "\ud83d\ude00", "\udc80 lone", "$tensor"],
        "bytes": [b"", b"\0\xff", bytearray(b"abc")],
        "lists": [[], [[]], [1, [2, [3]]]],
        "tuples": ((), (1,), ((2,), [3])),
        "sets": [set(), {1, "1", (1, 2)}, frozenset({None, 1.5})],
        "deques": [deque(), deque([1, [2]], maxlen=3)],
        "keys": {0: "int", "0": "text", (0, "a"): "tuple", None: "none", 1.5: "float", b"0": "bytes"},
        "bool keys": {True: 1, False: 0},
        "key order": {"b": 1, "a": 2, "c": 3},
        "odd keys": {"$tensor": 1, "": 2, "a/b": torch.ones(1), "a%2Fb": torch.zeros(1), "\ud83d\ude00": 3},
        "look alike": {0: torch.zeros(1), "0": torch.ones(1), "0~2": torch.full((1,), 2.0)},
        "one tag": {"$dict": []},
        "huge key": {10**5000: 1},
        "enum keys": {Colour.RED: 1, Level.HIGH: 2},
        "ordered": OrderedDict([("z", 1), (2, "y")]),
        "state dict": state_dict,
        "counter": Counter({30: 1, 80: 2}),
        "defaultdicts": [defaultdict(list, a=[1]), defaultdict(None, b=2), defaultdict(int)],
        "enums": [Colour.RED, Colour.BLUE, Level.LOW, Outer.Inner.ONLY],
        "flags": [Wind.NORTH, Wind.NORTH | Wind.EAST, Wind(0), Mode.READ | Mode.WRITE, Mode(9)],
        "named tuples": [Pair(1, [torch.zeros(2)]), Pair(Pair(None, 2), "x")],
        "ranges": [range(3), range(2, 10**30, 3), slice(None, 3), slice(1, None, -1)],
        "torch": [torch.Size([2, 3]), torch.Size([]), torch.float16, torch.qint8, torch.device("cuda:1")],
        "__metadata__": torch.ones(1),
    }


def arrays() -> dict[str, Any]:
    grid = numpy.arange(12, dtype=numpy.float64).reshape(3, 4)
    read_only = numpy.arange(3)
    read_only.flags.writeable = False
    kinds = ["?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", ">i4",
             ">f8",
             "<M8[ns]", "<m8[s]", "S3", "<U4", "V3"]  # fmt: skip
    made = {kind: numpy.frombuffer(bytes(range(96)), dtype=kind).copy() for kind in kinds if kind not in ("?", "<U4")}
    scalars = [numpy.dtype(kind).type(1) for kind in kinds if kind[-1] not in "]" and kind not in ("S3", "<U4", "V3")]
    return {
        **made,
        "?": numpy.array([True, False]),
        "<U4": numpy.array(["ab", "", "\u00fcber"]),
        "0-dim": numpy.array(2.5),
        "empty": numpy.empty((0, 3), dtype=">i8"),
        "strided": grid[::2, ::-1],
        "fortran": numpy.asfortranarray(grid),
        "read only": read_only,
        "longdouble": numpy.array([1, 2], dtype=numpy.longdouble),
        "scalars": [*scalars, numpy.datetime64("2020-01-02", "D"), numpy.timedelta64(3, "s"), numpy.void(b"ab")],
        "scalar texts": [numpy.str_("a\0"), numpy.str_(""), numpy.bytes_(b"b\0"), numpy.bytes_(b"")],
        "scalar nan": numpy.float32("nan"),
    }


def zoo() -> dict[str, Any]:
    """All of it, and some of it nested in each other."""
    return {
        "dtypes": every_dtype(),
        "tensors": tensors(),
        "plain": plain(),
        "arrays": arrays(),
        "nested": [{"a": ({"b": [deque([{"c": torch.arange(3)}])]},)}, [[[[(((1,),),)]]]]],
    }


def ties() -> dict[str, Any]:
    """Values that are one object, or one memory, in several places."""
    weight, parameter, array = torch.arange(4.0), torch.nn.Parameter(torch.ones(3)), numpy.arange(5)
    return {
        "tensor": [weight, {"again": weight}, weight],
        "parameter": [parameter, parameter, parameter.detach()],
        "array": [array, array],
    }
