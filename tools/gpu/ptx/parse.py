"""Reads PTX: the kernels of a file, with their parameters, registers, shared arrays and instructions.

Covered is the text that NVRTC writes for kernels that call no functions. Anything else is a `Refused`, which names the file, the
kernel and the line.
"""

import re
from dataclasses import dataclass, field

# Bytes of each PTX type.
SIZE = {kind + bits: int(bits) // 8 for kind in "sub" for bits in ("8", "16", "32", "64")} | {"f32": 4, "f64": 8}


class Refused(Exception):
    """PTX that is not understood."""


@dataclass
class Instruction:
    line: int
    opcode: str
    operands: list[str]
    # The predicate register that guards it, with `!` in front if it must be false.
    guard: str | None
    # Place in the CUDA source: file and line.
    source: tuple[str, int] | None


@dataclass
class Label:
    name: str


@dataclass
class Kernel:
    file: str
    name: str
    # Bytes of each parameter, by name and in order.
    params: dict[str, int] = field(default_factory=dict)
    most_threads: int = 1024
    # Registers by prefix: their PTX type and number. `%r<5>` declares `%r0` to `%r4`.
    registers: dict[str, tuple[str, int]] = field(default_factory=dict)
    # Bytes of each array in shared memory; 0 for the one whose size the launch determines.
    shared: dict[str, int] = field(default_factory=dict)
    body: list[Instruction | Label] = field(default_factory=list)

    def refuse(self, line, why):
        raise Refused(f"{self.file}, kernel {self.name}, line {line}: {why}")


PARAM = re.compile(r"\.param (?:\.align \d+ )?\.(\w+) (\w+)(?:\[(\d+)\])?")
REGISTERS = re.compile(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;")
SHARED = re.compile(r"(?:\.extern )?\.shared \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d*)\])?;")
PLACE = re.compile(r"\.loc\s+(\d+) (\d+)")
INSTRUCTION = re.compile(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
# Alignment that the emulator gives to static arrays in shared memory.
STATIC_ALIGN = 16


def operands(text):
    """Splits at commas outside of braces and brackets. A pair of results, `%r1|%p1`, becomes a list."""
    text = re.sub(r"(%\w+)\|(%\w+)", r"{\1,\2}", text)
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


def parse(text, file):
    """Returns the kernels of a PTX text."""
    lines = [line.partition("//")[0].strip() for line in text.splitlines()]
    if lines.count("{") != lines.count("}"):
        raise Refused(
            f"{file}: {lines.count('{')} lines open a block and {lines.count('}')} close one; the text may be truncated"
        )
    names = dict(re.findall(r'^\s*\.file\s+(\d+) "(?:[^"]*/)?([^"/]+)"', text, re.M))
    # Arrays that stand in front of the kernels belong to those that name them.
    kernels, of_file, at = [], {}, 0
    while at < len(lines):
        if match := re.match(r"\.visible \.entry (\w+)\(", lines[at]):
            kernel = Kernel(file, match[1])
            first, at = at, read_kernel(kernel, lines, at + 1, names)
            body = "\n".join(lines[first:at])
            kernel.shared |= {name: size for name, size in of_file.items() if name in body}
            kernels.append(kernel)
        elif match := SHARED.match(lines[at]):
            of_file |= shared_array(match)
        elif re.match(r"\.(visible |weak )?\.?func\b", lines[at]):
            raise Refused(f"{file}, line {at + 1}: a function; kernels must not call any")
        at += 1
    return kernels


def shared_array(match):
    """Returns the name and the number of bytes of an array in shared memory."""
    _, kind, name, count = match.groups()
    return {name: SIZE[kind] * int(1 if count is None else count or 0)}


def read_kernel(kernel, lines, at, names):
    """Fills `kernel` from the line behind its name on. Returns the index of its last line."""
    while lines[at] != "{":
        if match := PARAM.match(lines[at]):
            kind, name, count = match.groups()
            kernel.params[name] = SIZE[kind] * int(count or 1)
        elif match := re.match(r"\.maxntid (\d+)", lines[at]):
            kernel.most_threads = int(match[1])
        elif lines[at] not in ("", ")") and not lines[at].startswith(".minnctapersm"):
            kernel.refuse(at + 1, f"unknown directive {lines[at]!r}")
        at += 1
    source = None
    while lines[at := at + 1] != "}":
        line = lines[at]
        if match := re.match(r"(\$\w+):", line):
            kernel.body.append(Label(match[1]))
            line = line[match.end() :].strip()
        if match := PLACE.match(line):
            source = (names.get(match[1], kernel.file), int(match[2]))
        elif match := REGISTERS.match(line):
            kernel.registers[match[2]] = match[1], int(match[3])
        elif match := SHARED.match(line):
            if int(match[1]) > STATIC_ALIGN:
                kernel.refuse(
                    at + 1, f"shared array {match[3]} is aligned to {match[1]} bytes, at most {STATIC_ALIGN} are supported"
                )
            kernel.shared |= shared_array(match)
        elif line.startswith(".") and not line.startswith(".pragma"):
            kernel.refuse(at + 1, f"unknown directive {line!r}")
        elif line and not line.startswith(".pragma"):
            for statement in filter(None, map(str.strip, line.split(";"))):
                kernel.body.append(instruction(kernel, statement, at + 1, source))
    return at


def instruction(kernel, statement, line, source):
    match = INSTRUCTION.fullmatch(statement)
    if not match:
        kernel.refuse(line, f"not an instruction: {statement!r}")
    guard, opcode, rest = match.groups()
    return Instruction(line, opcode, operands(rest), guard, source)
