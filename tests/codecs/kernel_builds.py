"""Compiles every kernel for a GPU, without one, and prints the PTX: `python -m tests.codecs.kernel_builds`."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stepwell.codecs import kernels
from stepwell.codecs.device_tables import UNCODABLE
from stepwell.codecs.signature import COLUMNS, FACTOR

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    **dict.fromkeys(("tiles", "slots", "counts", "stats", "owners", "places"), "*i64"),
    **dict.fromkeys(("wanted", "modes", "keys", "low", "high", "powers", "sums"), "*i32"),
    **dict.fromkeys(("reference", "values", "scales", "found"), "*fp32"),
    **dict.fromkeys(("part_rows", "count"), "i32"),
    "packed": "*u8",
}


def build(kernel: triton.JITFunction, **constants: int) -> str:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    text: str = triton.compile(source, target=HOPPER, options=kernels.BUILD).asm["ptx"]
    return text


def main() -> None:
    for align in (1, 16):
        shape = {"COLUMNS": COLUMNS, "WIDTH": kernels.WIDTH, "ALIGN": align}
        print(build(kernels.count_keys, **shape))
        print(build(kernels.find_ranges, **shape))
        for kind, bits in ((kernels.LC, 2), (kernels.LC, 4), (kernels.TERNARY, 2), (kernels.UNIFORM, 8)):
            print(build(kernels.encode, KIND=kind, BITS=bits, FACTOR=FACTOR, **shape))
        print(build(kernels.settle, MOST=UNCODABLE, FACTOR=FACTOR, **shape))
    print(build(kernels.gather, WIDTH=kernels.WIDTH))


if __name__ == "__main__":
    main()
