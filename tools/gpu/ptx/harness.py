"""Runs PTX that a test wrote: translates it, compiles it with g++ and launches its kernels."""

import ctypes
import subprocess
from pathlib import Path

from translate import translate

HERE = Path(__file__).parent
EMULATOR = HERE.parents[2] / "crates/gpu/emu"
FLAGS = "-std=c++17 -O1 -fPIC -w -fwrapv -ffp-contract=off -fno-strict-aliasing -DEMULATED".split()
HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n.extern .shared .align 128 .b8 shared[];\n"
KINDS = {"p": "pred", "rs": "b16", "r": "b32", "rd": "b64", "f": "f32", "fd": "f64"}
REGISTERS = "".join(f".reg .{kind} %{prefix}<40>;\n" for prefix, kind in KINDS.items())


def kernel(name, body):
    """Returns the PTX of a kernel of two pointers, which it has in %rd1 and %rd2, and its thread's number, in %r1."""
    params = ",\n".join(f".param .u64 {name}_param_{i}" for i in range(2))
    load = "".join(f"ld.param.u64 %rd{i + 1}, [{name}_param_{i}];\n" for i in range(2))
    return f".visible .entry {name}(\n{params}\n)\n{{\n{REGISTERS}{load}mov.u32 %r1, %tid.x;\n{body}\nret;\n}}\n"


class Kernels:
    """A library of the kernels of a PTX text, in `folder`."""

    def __init__(self, text, folder, hazards=False):
        folder = Path(folder)
        (folder / "test.cpp").write_text(translate(HEADER + text, "test"))
        sources = [folder / "test.cpp", EMULATOR / "emu.cpp"] + [HERE / "hazards.cpp"] * hazards
        flags = FLAGS + ["-DHAZARDS"] * hazards
        library = folder / f"kernels{'-race' * hazards}.so"
        subprocess.run(["g++", *flags, f"-I{EMULATOR}", f"-I{HERE}", "-shared", "-o", library, *sources], check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.emulated_launch.restype = ctypes.c_char_p
        self.library.emulated_early.argtypes = [ctypes.c_bool]
        self.hazards, self.kept = hazards, []

    def array(self, data, defined=True):
        """Returns memory with this content, aligned to 16 bytes and known to the checks."""
        whole = ctypes.create_string_buffer(len(data) + 32)
        at = -(-ctypes.addressof(whole) // 16) * 16
        ctypes.memmove(at, data, len(data))
        array = (ctypes.c_char * len(data)).from_address(at)
        # It is never freed, so that no later array is in its place.
        self.kept.append(whole)
        if self.hazards:
            # The numbers of events are those of hazards.cpp: allocated, written.
            for event in (0, 2) if defined else (0,):
                self.library.emulated_memory(ctypes.c_uint64(at), ctypes.c_size_t(len(data)), event)
        return array

    def launch(self, name, arrays, threads=32, blocks=1, shared=0, schedule=0, early=False):
        """Returns the message of the failure, or None."""
        pointers = [ctypes.c_uint64(ctypes.addressof(array)) for array in arrays]
        arguments = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(pointer) for pointer in pointers))
        sizes = (ctypes.c_size_t * len(pointers))(*[8] * len(pointers))
        grid = (ctypes.c_uint * 3)(blocks, 1, 1)
        self.library.emulated_early(early)
        failure = self.library.emulated_launch(
            b"test",
            name.encode(),
            grid,
            threads,
            ctypes.c_size_t(shared),
            arguments,
            sizes,
            ctypes.c_size_t(len(pointers)),
            ctypes.c_uint64(schedule),
        )
        return failure and failure.decode()
