"""Compile a Triton kernel for a card that is not there, and read what the compiler made of it.

Needs neither a GPU nor a driver: Triton's wheel brings ptxas and cuobjdump. It does need a process without
TRITON_INTERPRET=1, because Triton decides at decoration time whether a kernel is interpreted or compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from moe_int8.dispatch import INTERPRETED

ARCHS = (80, 89, 90)  # A100, the Ada cards, H100 and H200
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # most that one block may ask for

CUOBJDUMP = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
INT8_MMA = r"\bIG?MMA\S*\.S8\.S8"

needs_compiler = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process, not compiled")


@dataclass(frozen=True)
class Facts:
    """What the compiler made: counts of instructions; `loop_`: of those in the innermost loop with an INT8 product."""

    shared_memory: int  # bytes a block
    registers: int  # a thread
    spill_bytes: int  # a thread
    spill_instructions: int
    fp32_fma: int  # contracted by the compiler; a kernel whose bits are fixed has none
    global_loads: int
    int8_mma: int
    async_copies: int
    loop_instructions: int
    loop_int8_mma: int
    loop_int_to_float: int
    loop_fp32_add: int
    loop_byte_shuffles: int


def compile_for(
    kernel: Any,
    arch: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    div16: Iterable[str] = (),
    **options: Any,
) -> Any:
    """Compile `kernel` as a launch would.

    Args:
        arch: compute capability, 80 for 8.0.
        types: argument -> "*i8", "*bf16", "*fp32", "i32", ...
        constants: argument -> value: the constexprs, strides that are 1, and pointers that are None.
        div16: the pointers and integers that are multiples of 16; a launch finds that out by itself, and without
            it the code is another one (no asynchronous copies).
        options: as at the launch: num_warps, num_stages, enable_fp_fusion.
    """
    names = kernel.arg_names
    if unknown := (set(types) | set(constants)) ^ set(names):
        raise ValueError(f"{kernel.__name__} has the arguments {names}, given or missing: {sorted(unknown)}")
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in div16},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def facts(compiled: Any) -> Facts:
    """Read a compiled kernel: resources and machine code from its cubin, contraction from its PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        resources = _cuobjdump("--dump-resource-usage", cubin.name)
        code = [
            (int(address, 16), text)
            for address, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", _cuobjdump("-sass", cubin.name))
        ]
    use = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", resources)}
    everything = [text for _, text in code]
    loop = _innermost_mma_loop(code)
    return Facts(
        shared_memory=compiled.metadata.shared,
        registers=use["REG"],
        spill_bytes=use["STACK"] + use["LOCAL"],
        spill_instructions=_count(r"\b(STL|LDL)\b", everything),
        fp32_fma=compiled.asm["ptx"].count("fma.rn.f32"),
        global_loads=_count(r"\bLDG\b", everything),
        int8_mma=_count(INT8_MMA, everything),
        async_copies=_count(r"\b(LDGSTS|UTMALDG)", everything),
        loop_instructions=len(loop),
        loop_int8_mma=_count(INT8_MMA, loop),
        loop_int_to_float=_count(r"\bI2FP?\b", loop),
        loop_fp32_add=_count(r"\b(FADD|FFMA)\b", loop),
        loop_byte_shuffles=_count(r"\b(PRMT|LOP3)\b", loop),
    )


def check_fits(found: Facts, arch: int) -> None:
    """Fail if the kernel asks for more shared memory than the card has, or spills."""
    assert found.shared_memory <= SHARED_MEMORY[arch], found
    assert found.spill_bytes == 0, found
    assert found.spill_instructions == 0, found


def check_not_contracted(found: Facts) -> None:
    """Fail if a product and a sum became one operation: the bits would differ from the CPU's."""
    assert found.fp32_fma == 0, found


def _cuobjdump(*arguments: str) -> str:
    return subprocess.run([CUOBJDUMP, *arguments], capture_output=True, text=True, check=True).stdout


def _count(pattern: str, lines: list[str]) -> int:
    return sum(bool(re.search(pattern, line)) for line in lines)


def _innermost_mma_loop(code: list[tuple[int, str]]) -> list[str]:
    """The instructions of the shortest backward branch around an INT8 matrix multiply; none without such a loop."""
    loops = []
    for address, text in code:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            body = [line for at, line in code if int(target[1], 16) <= at <= address]
            if _count(INT8_MMA, body):
                loops.append(body)
    return min(loops, key=len, default=[])
