"""The codecs by name, with their options: what a user chooses, and what a chain's own document says.

Owns:    names, options and their limits; `parse` is the registry's way in, `text` its way out.
Not:     what the codecs do (`lossless`, `tables`).
Holds:   `parse(spec.text)` equals `spec`; an option out of its limits is refused here, with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import ClassVar, Final, Literal, get_type_hints

from stepwell.errors import ConfigError

Scope = Literal["tensor", "global"]
Entropy = Literal["zstd", "huffman"]
_FORM: Final = re.compile(r"([a-z]+)(?:\((.*)\))?")


@dataclass(frozen=True)
class Spec:
    """One codec. `is_exact`: what is read is what was given. `is_delta`: it codes the difference to what readers have,
    and may leave parts of it to a later record. `is_floats`: it is for float32 only, the others are for any bytes.
    """

    name: ClassVar[str]
    is_exact: ClassVar[bool] = True
    is_delta: ClassVar[bool] = False
    is_floats: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """As it stands in a chain's document, such as `lc(bits=3,scope=tensor,entropy=zstd)`."""
        options = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{self.name}({options})" if options else self.name


@dataclass(frozen=True)
class Raw(Spec):
    """The bytes as they are."""

    name: ClassVar[str] = "raw"


@dataclass(frozen=True)
class Zstd(Spec):
    """The bytes, all first ones of the elements before all second ones and so on, then zstd."""

    name: ClassVar[str] = "zstd"
    level: int = 3

    def __post_init__(self) -> None:
        _within(self, "level", self.level, 1, 19)


@dataclass(frozen=True)
class XorCodec(Spec):
    """Lossless difference: XOR with what readers have, then as `zstd`. For weights in bfloat16 that have no master."""

    name: ClassVar[str] = "xor"
    level: int = 3

    def __post_init__(self) -> None:
        _within(self, "level", self.level, 1, 19)


@dataclass(frozen=True)
class Hold(Spec):
    """Nothing: readers keep what the base has. For moments of chains that are of the parameters only."""

    name: ClassVar[str] = "hold"
    is_exact: ClassVar[bool] = False


@dataclass(frozen=True)
class Top(Spec):
    """Sign, exponent and `mantissa` bits of each value, as differences of these numbers. Only zero becomes zero.

    For moments: the relative error is at most 2^-(mantissa + 1), and a second moment stays above zero.
    """

    name: ClassVar[str] = "top"
    is_exact: ClassVar[bool] = False
    is_floats: ClassVar[bool] = True
    mantissa: int = 3

    def __post_init__(self) -> None:
        _within(self, "mantissa", self.mantissa, 0, 7)


@dataclass(frozen=True)
class LC(Spec):
    """LC-Checkpoint (ICML 2020): differences in buckets by sign and exponent, of which the 2^bits - 1 largest get a
    symbol. `scope`: buckets of each tensor, or of all together as in the paper. `entropy`: Huffman as in the paper, or
    zstd over packed symbols, which is smaller and faster.
    """

    name: ClassVar[str] = "lc"
    is_exact: ClassVar[bool] = False
    is_delta: ClassVar[bool] = True
    is_floats: ClassVar[bool] = True
    bits: int = 3
    scope: Scope = "tensor"
    entropy: Entropy = "zstd"

    def __post_init__(self) -> None:
        _within(self, "bits", self.bits, 2, 3)
        _one_of(self, "scope", self.scope, ("tensor", "global"))
        _one_of(self, "entropy", self.entropy, ("zstd", "huffman"))


@dataclass(frozen=True)
class Ternary(Spec):
    """Differences of at least `threshold` times their root mean square become plus or minus one magnitude."""

    name: ClassVar[str] = "ternary"
    is_exact: ClassVar[bool] = False
    is_delta: ClassVar[bool] = True
    is_floats: ClassVar[bool] = True
    threshold: float = 1.0
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        _within(self, "threshold", self.threshold, 0.1, 8.0)
        _one_of(self, "scope", self.scope, ("tensor", "global"))


@dataclass(frozen=True)
class Uniform(Spec):
    """Differences in multiples of `step` times their root mean square, at most 127 of them."""

    name: ClassVar[str] = "uniform"
    is_exact: ClassVar[bool] = False
    is_delta: ClassVar[bool] = True
    is_floats: ClassVar[bool] = True
    step: float = 1.0
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        _within(self, "step", self.step, 0.01, 8.0)
        _one_of(self, "scope", self.scope, ("tensor", "global"))


REGISTRY: Final[dict[str, type[Spec]]] = {
    kind.name: kind for kind in (Raw, Zstd, XorCodec, Hold, Top, LC, Ternary, Uniform)
}


def parse(text: str) -> Spec:
    """The codec a text names; options that are left out have their defaults. Raises ConfigError."""
    form = _FORM.fullmatch(text.replace(" ", ""))
    kind = REGISTRY.get(form[1]) if form else None
    if form is None or kind is None:
        raise ConfigError(f"{text!r} names no codec; there are {', '.join(REGISTRY)}", found=text)
    types = get_type_hints(kind)
    options: dict[str, object] = {}
    for item in filter(None, (form[2] or "").split(",")):
        key, _, value = item.partition("=")
        if key not in {field.name for field in fields(kind)} or key in options:
            raise ConfigError(f"{text!r}: {kind.name} has no option {key!r}, or it is given twice", found=text)
        try:
            options[key] = types[key](value) if types[key] in (int, float) else value
        except ValueError:
            raise ConfigError(f"{text!r}: {value!r} is no number", found=text) from None
    return kind(**options)


def _within(spec: Spec, key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN is in no limits
        raise ConfigError(f"{spec.name}({key}={value}): from {least} to {most}", key=key, found=value)


def _one_of(spec: Spec, key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{spec.name}({key}={value!r}): one of {', '.join(known)}", key=key, found=value)
