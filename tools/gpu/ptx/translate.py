"""Translates PTX to C++ on the project's emulator.

    translate.py FILE.ptx > FILE.cpp

Every opcode becomes a C++ function with the meaning that opcodes.py gives it, and every kernel a function that calls them in
order. The C++ names the lines of the CUDA source, so that messages do.
"""

import re
import sys
from pathlib import Path

from opcodes import OPCODES
from parse import Label, Refused, parse

SPECIAL = {
    f"%{register}.{axis}": f"emu::{place}.{axis}"
    for register, place in {"tid": "self->tid", "ntid": "block->dim", "ctaid": "block->index", "nctaid": "block->grid"}.items()
    for axis in "xyz"
}
ADDRESS = re.compile(r"\[([%$\w]+)(?:\+(-?\d+))?\]")


class Writer:
    """Writes one kernel."""

    def __init__(self, kernel, functions):
        self.kernel, self.functions = kernel, functions
        self.used, self.labels = {}, set()

    def register(self, text):
        """Returns the C++ name of a register."""
        match = re.fullmatch(r"%([a-z]+)(\d+)", text)
        kind, count = self.kernel.registers.get(match[1], ("", 0)) if match else ("", 0)
        if not match or int(match[2]) >= count:
            self.refuse(f"{text!r} is not a declared register")
        name = f"reg_{text[1:]}"
        self.used[name] = kind.replace("f", "b")
        return name

    def source(self, text, kind):
        """Returns a C++ expression of an operand that is read as `kind`."""
        if text in SPECIAL:
            return f"{kind}({SPECIAL[text]})"
        if text.startswith("%"):
            return f"get<{kind}>({self.register(text)})"
        if text in self.kernel.shared:
            return f"{kind}(at_{text})"
        if match := re.fullmatch(r"0([fd])([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
            bits, expected = {"f": ("b32", 8), "d": ("b64", 16)}[match[1]]
            if len(match[2]) == expected:
                return f"get<{kind}>({bits}(0x{match[2]}))"
        if re.fullmatch(r"-?\d+", text) and kind[0] != "f":
            return f"{kind}({int(text) % 2**64}u)"
        self.refuse(f"operand {text!r} is not of type {kind}")

    def address(self, text):
        """Returns a C++ expression of an address, which is the offset for shared memory."""
        match = ADDRESS.fullmatch(text)
        if not match:
            self.refuse(f"operand {text!r} is not an address")
        base, offset = match[1], int(match[2] or 0)
        if base in self.kernel.params:
            if self.now.opcode.split(".")[1] != "param":
                self.refuse(f"{base} is a parameter; only ld.param reads it")
            if offset >= self.kernel.params[base]:
                self.refuse(f"{base} has {self.kernel.params[base]} bytes; byte {offset} is read")
            start = f"u64(args[{list(self.kernel.params).index(base)}])"
        elif base in self.kernel.shared:
            start = f"at_{base}"
        else:
            start = self.source(base, "b32" if base.startswith("%r") and not base.startswith("%rd") else "b64")
        return f"Address({start} + {offset % 2**64}u)" if offset else f"Address({start})"

    def label(self, text):
        if text not in self.labels:
            self.refuse(f"there is no label {text!r}")
        return text.replace("$", "")

    def refuse(self, why):
        self.kernel.refuse(self.now.line, f"{self.now.opcode}: {why}")

    def statement(self, instruction):
        """Returns the C++ statement of an instruction."""
        self.now = instruction
        rows = OPCODES.get(instruction.opcode)
        if not rows:
            self.refuse("opcodes.py has no row for this opcode")
        braces = [text.startswith("{") for text in instruction.operands]
        for row, names in rows:
            wanted = specification(row)
            if [kind.startswith("{") for kind in wanted] == braces:
                break
        else:
            self.refuse(
                f"expected {' or '.join(row.operands or 'no operands' for row, _ in rows)}, got {', '.join(instruction.operands)}"
            )
        if row.is_value:
            result, *sources = zip(wanted, instruction.operands)
            sources = ", ".join(self.source(text, names.get(kind, kind)) for kind, text in sources)
            statement = f"set({self.register(result[1])}, {self.function(row, names)}({sources}))"
        else:
            fields = [self.field(kind, text, names) for kind, text in zip(wanted, instruction.operands)]
            statement = row.meaning.format(**names, **dict(filter(None, fields)))
        if instruction.guard:
            if row.together:
                self.refuse("a guard, although all threads must execute it together")
            guard = self.register(instruction.guard.lstrip("!"))
            statement = f"if ({'!' * instruction.guard.startswith('!')}{guard}) {statement}"
        return f"{statement};"

    def field(self, kind, text, names):
        """Returns name and C++ text of an operand of an action."""
        if kind.startswith("{"):
            fields = [self.field(kind[1:-1], part.strip(), names) for part in text[1:-1].split(",")]
            return fields[0][0], ", ".join(text for _, text in fields)
        if kind.startswith("["):
            return kind[1:-1], self.address(text)
        if kind == "to":
            return kind, self.register(text)
        if kind == "label":
            return kind, self.label(text)
        if kind.startswith("#") and text.isdigit():
            return kind[1:], text
        if " " in kind:
            type_name, name = kind.split()
            return name, self.source(text, names.get(type_name, type_name))
        if kind != text:
            self.refuse(f"expected {kind}, got {text}")
        return None

    def function(self, row, names):
        """Returns the name of the C++ function of an opcode, which it adds to those of the file."""
        name = "op_" + self.now.opcode.replace(".", "_")
        signature = row.operands
        for variable, chosen in names.items():
            signature = re.sub(rf"\b{variable}\b", chosen, signature)
        result, arguments = signature[:-1].split("(")
        using = "".join(f"using {variable} = {chosen}; " for variable, chosen in names.items())
        self.functions[name] = (
            f"inline {result} {name}({arguments}) {{ {using}return {result}({row.meaning}); }}  // {row.section}"
        )
        return name

    def write(self):
        """Returns the C++ text of the kernel."""
        kernel = self.kernel
        self.labels = {item.name for item in kernel.body if isinstance(item, Label)}
        lines, source = [], None
        for item in kernel.body:
            if isinstance(item, Label):
                lines.append(f"{item.name.replace('$', '')}:;")
                continue
            if item.source != source:
                source = item.source
                lines.append(f'#line {source[1]} "{source[0]}"')
            lines.append(self.statement(item))
        # Offsets of arrays in shared memory. The one whose size the launch determines is at 0.
        arrays = [
            f"const u32 at_{name} = {f'shared_offset({i}, {size})' if size else '0'};"
            for i, (name, size) in enumerate(kernel.shared.items())
        ]
        # A register that is read before it is written holds ones, which as a float is NaN.
        registers = [f"{kind} {name} = {kind}(-1);" for name, kind in self.used.items()]
        entry = f'"{kernel.file}", "{kernel.name}", kernel_{kernel.name}, {{{", ".join(map(str, kernel.params.values()))}}}'
        head = f"static void kernel_{kernel.name}(void** args) {{"
        tail = f"static emu::Register entry_{kernel.name}({entry}, {kernel.most_threads});"
        return "\n".join([head, *arrays, *registers, *lines, "}", tail])


def specification(row):
    """Returns the operands of a row: for a value, the type of the result and of each source."""
    if row.is_value:
        result, arguments = row.operands[:-1].split("(")
        return [result] + [argument.split()[0] for argument in arguments.split(", ")]
    return re.findall(r"\{[^}]*\}|\[\w+\]|(?:T|[bfu]\d+) \w+|\S+", row.operands)


def translate(text, file):
    """Returns the C++ text of a file of PTX. `file` names it in messages and in the table of kernels."""
    functions = {}
    kernels = [Writer(kernel, functions).write() for kernel in parse(text, file)]
    return "\n".join(['#include "ptx.hpp"', "namespace ptx {", *functions.values(), *kernels, "}  // namespace ptx", ""])


if __name__ == "__main__":
    path = Path(sys.argv[1])
    try:
        print(translate(path.read_text(), path.stem), end="")
    except Refused as refused:
        sys.exit(str(refused))
