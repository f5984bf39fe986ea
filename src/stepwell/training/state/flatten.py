"""State trees to leaves and back.

Owns:    which values become leaves (tensors, arrays), how leaves are named, and how the tree refers to them.
Not:     plain values (format.tree), bytes (snapshot, restore).
Holds:   tensors that share memory, type, shape and strides are one leaf and come back as one tensor; what cannot be
         stored as plain bytes, or would come back as something else, is refused with its path.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any
from urllib.parse import quote

import torch
from torch.nn.parameter import is_lazy

from stepwell.errors import DamagedError, StateError
from stepwell.storage.format import dtypes, tree
from stepwell.storage.format.box import Box
from stepwell.training.state.shards import ShardPart, is_distributed, part_of

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SAFE_IN_NAMES = "._-+~ ()[],:@"
_MOST_QUOTED = 1 << 14
"""Parts of names that are remembered: quoting one takes as long as all else that is done for a leaf."""
_CANNOT_COPY = {getattr(torch, name) for name in dtypes.SUB_BYTE if hasattr(torch, name)}
"""Types that torch can hold but has no copy for."""
_TEXT_DEPTH = 2
"""How deep the parts lie that stay: a module, or the `state` of an optimizer."""
_ARRAY_TYPE = re.compile(r"[<>|][a-zA-Z]\d*(\[[0-9a-zA-Z]+\])?")
"""How numpy writes an element type without fields or objects: `<f8`, `|b1`, `<M8[ns]`."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of the state: the live one, under a name that is unique in the shard.

    tensor:  what this rank stores of it, which may be rows of `held`
    held:    what this process holds of it, where that is more, or a part of a tensor of `global_shape`
    box:     which part of that tensor `tensor` is
    origin:  the distributed tensor of which this process holds a part
    """

    name: str
    path: tree.Path
    tensor: torch.Tensor
    held: torch.Tensor | None = None
    global_shape: tuple[int, ...] | None = None
    box: Box | None = None
    is_private: bool = False
    origin: torch.Tensor | None = None

    @property
    def local(self) -> torch.Tensor:
        """All that this process holds of it."""
        return self.tensor if self.held is None else self.held

    @property
    def dtype(self) -> str:
        """stepwell's (torch's) name of the element type."""
        return dtype_name(self.tensor.dtype)


Copy = tuple[str, str, torch.Tensor]
"""A tensor of which other ranks have copies: which ranks (`0-2`), its name, and what is here."""


@dataclass(frozen=True)
class Flat:
    """A state taken apart: typed JSON whose `$tensor` entries name the leaves.

    Two states with the same `fixed` begin with the same `fixed_count` leaves: the same tensors, in the same places;
    of these `fixed_copies` are held by other ranks too, and of the others `copies`. `fixed_elsewhere` and `elsewhere`
    are leaves of which other ranks store everything, and `partners` all ranks that store something of what is here;
    None: there are no other ranks.
    """

    tree: Any
    leaves: list[Leaf]
    fixed: object = None
    fixed_count: int = 0
    fixed_copies: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    fixed_elsewhere: list[Leaf] = field(default_factory=list)
    elsewhere: list[Leaf] = field(default_factory=list)
    partners: tuple[int, ...] | None = None
    texts: Callable[[], Mapping[int, str]] = dict
    """JSON of parts of the tree that stay, by their identity."""

    def text(self) -> str:
        """The tree as JSON. What stays is not written again."""
        return _text(self.tree, self.texts(), _TEXT_DEPTH)


def _text(tree: Any, known: Mapping[int, str], depth: int) -> str:
    if id(tree) in known:
        return known[id(tree)]
    if depth and isinstance(tree, dict):
        pairs = (f"{json.dumps(key)}:{_text(value, known, depth - 1)}" for key, value in tree.items())
        return "{" + ",".join(pairs) + "}"
    return json.dumps(tree, separators=(",", ":"))


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def leaf_name(path: tree.Path) -> str:
    """How a leaf is named after its place in the tree."""
    return "/".join(map(_quoted, path))


@lru_cache(maxsize=_MOST_QUOTED)
def _quoted(part: str) -> str:
    return quote(part, safe=_SAFE_IN_NAMES, errors="surrogatepass")


def flatten(state: dict[str, Any]) -> Flat:
    """Take a state apart. Copies nothing but numpy arrays that torch cannot look into. Raises StateError."""
    collector = Collector()
    return Flat({name: collector.encode(value, (name,)) for name, value in state.items()}, collector.leaves)


def unflatten(encoded: Any, leaf: Callable[[str], torch.Tensor]) -> Any:
    """Put a state together; `leaf` gives the tensor of a name. Raises DamagedError or StateError."""
    return tree.decode(encoded, _Builder(leaf).intern)


class Collector:
    """Collects leaves while the tree is encoded. Holds every tensor, so that no address is used twice."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._names = {"__metadata__"}  # safetensors keeps this one for itself
        self._known: dict[tuple[object, ...], str] = {}

    def fork(self) -> Collector:
        """Another one that knows the same leaves."""
        other = Collector()
        other.leaves, other._names, other._known = list(self.leaves), set(self._names), dict(self._known)
        return other

    def encode(self, value: Any, path: tree.Path) -> Any:
        """Typed JSON of a value; its tensors are collected. Raises StateError."""
        return tree.encode(value, path, self.extern)

    def extern(self, value: Any, path: tree.Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if isinstance(value, torch.dtype):
            return {"$dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray:
            return self._array(numpy, value, path)
        if numpy is not None and isinstance(value, numpy.generic):
            return self._scalar(numpy, value, path)
        return NotImplemented

    def _tensor(self, value: torch.Tensor, path: tree.Path) -> Any:
        if is_distributed(value):
            return self._distributed(value, path)
        _check_plain(value, path)
        stored = value.detach()
        if stored.is_conj() or stored.is_neg():
            stored = stored.resolve_conj().resolve_neg()
        if stored.dtype in _CANNOT_COPY and not stored.is_contiguous():
            stored = stored.view(torch.uint8).contiguous().view(stored.dtype)
        return _reference(self._add(stored, path), value)

    def _distributed(self, value: torch.Tensor, path: tree.Path) -> Any:
        part = part_of(value, tree.show(path))
        _check_plain(part.local, path)
        return _reference(self._add(part.local.detach(), path, part, value), value)

    def _array(self, numpy: Any, value: Any, path: tree.Path) -> Any:
        _check_array_type(numpy, value, path)
        # One that lies otherwise than row by row comes back so: sums over it have other bits.
        is_woven = value.ndim > 1 and all(step >= 0 and not step % value.itemsize for step in value.strides)
        flat = value if is_woven else numpy.ascontiguousarray(value)
        if value.dtype.isnative and value.dtype.name in dtypes.NATIVE:
            tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy(order="K"))
        else:
            tensor = torch.frombuffer(bytearray(flat.tobytes()), dtype=torch.uint8) if flat.nbytes else torch.empty(0)
        name = self._add(tensor, path)
        return {"$ndarray": {"leaf": name, "dtype": value.dtype.str, "shape": list(value.shape)}}

    def _scalar(self, numpy: Any, value: Any, path: tree.Path) -> Any:
        if type(value) is numpy.str_:  # numpy's conversions lose trailing zeros, and its types an empty text
            return {"$npstr": tree.encode("".join(value), path, self.extern)}
        if type(value) is numpy.bytes_:
            return {"$npbytes": base64.b64encode(bytes(list(value))).decode()}
        _check_array_type(numpy, value, path)
        return {"$npscalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}

    def _add(
        self, tensor: torch.Tensor, path: tree.Path, part: ShardPart | None = None, origin: torch.Tensor | None = None
    ) -> str:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in self._known:
            return self._known[key]
        name = base = leaf_name(path)
        number = 1
        while name in self._names:
            number += 1
            name = f"{base}~{number}"
        self._names.add(name)
        self._known[key] = name
        if part is None:
            self.leaves.append(Leaf(name, path, tensor))
        else:
            self.leaves.append(Leaf(name, path, tensor, tensor, part.shape, part.box, origin=origin))
        return name


def _reference(name: str, value: torch.Tensor) -> Any:
    """How the tree refers to a tensor's leaf."""
    if isinstance(value, torch.nn.Parameter) or value.requires_grad:
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        return {"$tensor": {"leaf": name, "kind": kind, "requires_grad": value.requires_grad}}
    return {"$tensor": name}


def _check_plain(value: torch.Tensor, path: tree.Path) -> None:
    reason = None
    if is_lazy(value):
        raise StateError(
            f"{tree.show(path)}: cannot store a lazy parameter without a shape; run one forward pass first",
            path=tree.show(path),
            found="lazy",
        )
    if type(value) not in _PLAIN_TYPES:
        reason = f"a tensor of type {type(value).__module__}.{type(value).__qualname__}"
    elif value.layout is not torch.strided:
        reason = f"a tensor with layout {value.layout}"
    elif value.is_nested:
        reason = "a nested tensor"
    elif value.is_quantized:
        reason = f"a quantised tensor ({value.dtype})"
    elif value.device.type == "meta":
        reason = "a tensor on the meta device"
    elif not dtypes.is_known(dtype_name(value.dtype)):
        reason = f"a tensor of type {value.dtype}"
    if reason is not None:
        raise StateError(
            f"{tree.show(path)}: cannot store {reason}; turn it into a plain dense tensor in state_dict()",
            path=tree.show(path),
            found=reason,
        )


def _check_array_type(numpy: Any, value: Any, path: tree.Path) -> None:
    """Refuse objects, and types whose text does not say all: structured ones, and those of other packages."""
    kind = value.dtype
    if kind.hasobject or not kind.itemsize or not _ARRAY_TYPE.fullmatch(kind.str) or numpy.dtype(kind.str) != kind:
        raise StateError(
            f"{tree.show(path)}: cannot store a numpy value of type {kind}; turn it into arrays of plain numbers",
            path=tree.show(path),
            found=str(kind),
        )


class _Builder:
    """Gives values back for the tags of `Collector`."""

    def __init__(self, leaf: Callable[[str], torch.Tensor]) -> None:
        self._leaf = leaf
        self._given: dict[tuple[object, ...], Any] = {}

    def intern(self, tag: str, payload: Any) -> Any:
        if tag == "$tensor":
            return self._tensor(payload)
        if tag == "$ndarray":
            return self._array(payload)
        if tag == "$size":
            return torch.Size(payload)
        if tag == "$dtype":
            return dtype_from(payload)
        if tag == "$device":
            return torch.device(payload)
        if tag in ("$npscalar", "$npstr", "$npbytes"):
            return self._scalar(tag, payload)
        return NotImplemented

    def _tensor(self, payload: Any) -> torch.Tensor:
        if isinstance(payload, str):
            return self._leaf(payload)
        name, kind, requires_grad = payload["leaf"], payload["kind"], payload["requires_grad"]
        key = (name, kind, requires_grad)
        if key not in self._given:  # tied parameters come back as one object, a detached alias stays detached
            plain = self._leaf(name).detach()
            is_parameter = kind == "parameter"
            self._given[key] = (
                torch.nn.Parameter(plain, requires_grad) if is_parameter else plain.requires_grad_(requires_grad)
            )
        found: torch.Tensor = self._given[key]
        return found

    def _array(self, payload: Any) -> Any:
        """A view of the leaf's bytes: a tree that names a leaf a million times must not copy it as often."""
        name, text, shape = payload["leaf"], payload["dtype"], tuple(payload["shape"])
        key = (name, text, shape)
        if key not in self._given:
            tensor = self._leaf(name).detach().cpu()
            if not tensor.is_contiguous() and tuple(tensor.shape) == shape:
                self._given[key] = tensor.numpy().view(_numpy_dtype(text))
                return self._given[key]
            data = tensor.contiguous().reshape(-1)
            raw = data.view(torch.uint8).numpy() if data.numel() else data.numpy().view("uint8")
            self._given[key] = raw.view(_numpy_dtype(text)).reshape(shape)
        return self._given[key]

    def _scalar(self, tag: str, payload: Any) -> Any:
        import numpy

        if tag == "$npstr":
            return numpy.str_(tree.decode(payload, self.intern))
        if tag == "$npbytes":
            return numpy.bytes_(base64.b64decode(payload, validate=True))
        (found,) = numpy.frombuffer(base64.b64decode(payload[1], validate=True), dtype=_numpy_dtype(payload[0]))
        return found


def _numpy_dtype(text: str) -> Any:
    """The type behind numpy's text for it. Only plain texts: numpy would also build huge or structured types."""
    import numpy

    if not _ARRAY_TYPE.fullmatch(text) or numpy.dtype(text).hasobject:
        raise DamagedError(f"array type {text!r} is not one that stepwell writes", found=text)
    return numpy.dtype(text)


def dtype_from(name: str) -> torch.dtype:
    """torch.float32 for `float32`. Raises DamagedError for a name that is no element type."""
    found = vars(torch).get(name)  # not getattr: torch imports modules for some names
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"unknown element type {name!r}: written by a newer torch?", found=name)
    return found
