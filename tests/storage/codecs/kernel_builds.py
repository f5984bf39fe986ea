"""Compiles every kernel for a GPU, without one, and prints the PTX: `python -m tests.storage.codecs.kernel_builds`."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stepwell.storage.codecs.device import kernels
from stepwell.storage.codecs.device.kernel_tables import UNCODABLE
from stepwell.storage.codecs.signature import COLUMNS, FACTOR

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    **dict.fromkeys(("tiles", "slots", "counts", "stats", "owners", "inner", "places", "ends"), "*i64"),
    **dict.fromkeys(("wanted", "ranges", "picks", "rules", "words", "trouble", "powers", "sums", "numbers"), "*i32"),
    **dict.fromkeys(("reference", "base"), "*fp32"),
    **dict.fromkeys(("part_rows", "count", "groups", "copies", "number"), "i32"),
    **dict.fromkeys(("packed", "marks", "values"), "*u8"),
    **dict.fromkeys(("nbytes", "most"), "i64"),
    "error": "*fp64",
}


def build(kernel: triton.JITFunction, options: dict[str, object] = kernels.BUILD, **constants: int) -> str:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    text: str = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return text


def main() -> None:
    for align in (1, 16):
        shape = {"COLUMNS": COLUMNS, "WIDTH": kernels.WIDTH, "ALIGN": align}
        sums = {"MOST": UNCODABLE, "FACTOR": FACTOR, **shape}
        for most in (0, 3, 7):
            options = dict(kernels.COUNT_TOP if most else kernels.COUNT_ALL)
            held = {name: options.pop(name) for name in ("ROWS", "PIECE")}
            print(build(kernels.count, {**options, **kernels.BUILD}, MOST=most, **held, **shape))
        for kind, bits in ((kernels.LC, 2), (kernels.LC, 4), (kernels.TERNARY, 2), (kernels.UNIFORM, 8)):
            print(build(kernels.encode, kernels.ENCODE_BUILD, KIND=kind, BITS=bits, **sums))
        print(build(kernels.settle, **sums))
    for most in (3, 7):
        print(build(kernels.pick, MOST=most))
    print(build(kernels.spread))
    print(build(kernels.compare, WIDTH=kernels.WIDTH))
    print(build(kernels.mark, BLOCK=kernels.BLOCK))
    print(build(kernels.gather, BLOCK=kernels.BLOCK))


if __name__ == "__main__":
    main()
