"""Compiles CUDA C++ to PTX with NVRTC, without a card.

    nvrtc.py NVRTC SOURCE.cu > FILE.ptx

NVRTC is a folder below which the Python wheel was unpacked. Headers are read from the folder of the source.
"""

import ctypes
import sys
from pathlib import Path

# The architecture whose PTX is run. All of them get the same text but for the names of the target.
ARCHITECTURE = "compute_90"


class Failed(Exception):
    """A text that does not compile, or an NVRTC that cannot be used."""


class Nvrtc:
    def __init__(self, folder):
        libraries = sorted(Path(folder).glob("nvidia/*/lib"))
        if not libraries:
            raise Failed(f"{folder} has no nvidia/*/lib; tools/gpu/fetch_nvrtc creates it")
        for name in ("libnvrtc-builtins.so.[0-9]*", "libnvrtc.so.[0-9]*"):
            self.library = ctypes.CDLL(str(next(libraries[0].glob(name))), mode=ctypes.RTLD_GLOBAL)

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise Failed(f"{name}: {self.library.nvrtcGetErrorString(status).decode()}")

    def text(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()

    def ptx(self, source, architecture=ARCHITECTURE):
        """Returns the PTX of a file."""
        headers = sorted(source.parent.glob("*.cuh"))
        texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
        names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
        # The options of crates/gpu/src/nvrtc.rs.
        options = [f"--gpu-architecture={architecture}", "-std=c++17", "-lineinfo"]
        options = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        program = ctypes.c_void_p()
        self.call(
            "nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
        )
        try:
            self.call("nvrtcCompileProgram", program, len(options), options)
            return self.text(program, "PTX")
        except Failed as failed:
            raise Failed(f"{source}: {failed}\n{self.text(program, 'ProgramLog')}") from None
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


if __name__ == "__main__":
    try:
        print(Nvrtc(sys.argv[1]).ptx(Path(sys.argv[2])), end="")
    except Failed as failed:
        sys.exit(str(failed))
