"""The instructions of PTX that the kernels use, one row per family: operands, meaning in C++, and the section of the PTX ISA (9.0)
that defines it. Names that the meanings use and that are not C++ are in `ptx.hpp`.

A name in angle brackets stands for each of the names of that class below. `T` is the C++ type of the class, unless the row gives
another name (`<int:S>`).
"""

import itertools
import re
from dataclasses import dataclass

CLASSES = {
    "int": "s16 s32 s64 u16 u32 u64",
    "signed": "s16 s32 s64",
    "float": "f32 f64",
    "single": "f32",
    "number": "s16 s32 s64 u16 u32 u64 f32 f64",
    "bits": "b16 b32 b64",
    "logic": "b16 b32 b64 pred",
    "any": "s16 s32 s64 u16 u32 u64 f32 f64 b16 b32 b64",
    "memory": "s8 s16 s32 s64 u8 u16 u32 u64 f32 f64 b8 b16 b32 b64",
    "narrow": "s16 s32 u16 u32",
    "space": "global shared param",
}


@dataclass
class Row:
    pattern: str
    # A C++ signature, `T(T a, T b)`, or the operands in order: a register `to`, an address `[at]`, a list `{a}`, a typed
    # source `u32 a`, or a text that must be there.
    operands: str
    # A C++ expression for a signature; otherwise a statement with operands in braces.
    meaning: str
    section: str
    # All threads of a warp, or of the block, must execute it together: it must have no guard.
    together: bool = False

    @property
    def is_value(self):
        return self.operands.endswith(")")


def value(pattern, signature, meaning, section):
    return Row(pattern, signature, meaning, section)


def arithmetic(pattern, signature, meaning, section):
    """A value whose NaN has the bits that the ISA gives it."""
    return Row(pattern, signature, f"canonical<T>({meaning})", section)


def action(pattern, operands, meaning, section, together=False):
    return Row(pattern, operands, meaning, section, together)


ROWS = [
    # Whole numbers. The build asks for wrapping signed arithmetic.
    value("add.<int>", "T(T a, T b)", "a + b", "9.7.1.1"),
    value("sub.<int>", "T(T a, T b)", "a - b", "9.7.1.2"),
    value("mul.lo.<int>", "T(T a, T b)", "a * b", "9.7.1.3"),
    value("mul.hi.<int>", "T(T a, T b)", "Wide<T>(a) * b >> 8 * sizeof(T)", "9.7.1.3"),
    value("mul.wide.<narrow>", "Wide<T>(T a, T b)", "Wide<T>(a) * b", "9.7.1.3"),
    value("mad.lo.<int>", "T(T a, T b, T c)", "a * b + c", "9.7.1.4"),
    value("div.<int>", "T(T a, T b)", "divided(a, b)", "9.7.1.8"),
    value("rem.<int>", "T(T a, T b)", "a - divided(a, b) * b", "9.7.1.9"),
    value("abs.<signed>", "T(T a)", "a < 0 ? -a : a", "9.7.1.10"),
    value("neg.<signed>", "T(T a)", "-a", "9.7.1.11"),
    value("min.<int>", "T(T a, T b)", "a < b ? a : b", "9.7.1.12"),
    value("max.<int>", "T(T a, T b)", "a > b ? a : b", "9.7.1.13"),
    value("bfi.<bits>", "T(T a, T b, u32 c, u32 d)", "inserted(a, b, c & 255, d & 255)", "9.7.1.20"),
    # Floating-point numbers. Results are rounded to nearest even and subnormal numbers are kept unless the name says otherwise.
    arithmetic("add.<float>", "T(T a, T b)", "a + b", "9.7.3.3"),
    arithmetic("sub.<float>", "T(T a, T b)", "a - b", "9.7.3.4"),
    arithmetic("mul.<float>", "T(T a, T b)", "a * b", "9.7.3.5"),
    arithmetic("mul.rn.<float>", "T(T a, T b)", "a * b", "9.7.3.5"),
    arithmetic("fma.rn.<float>", "T(T a, T b, T c)", "std::fma(a, b, c)", "9.7.3.6"),
    arithmetic("fma.rm.<float>", "T(T a, T b, T c)", "rounded(FE_DOWNWARD, [&] { return std::fma(a, b, c); })", "9.7.3.6"),
    arithmetic("div.rn.<float>", "T(T a, T b)", "a / b", "9.7.3.8"),
    value("abs.<float>", "T(T a)", "std::fabs(a)", "9.7.3.9"),
    value("neg.<float>", "T(T a)", "-a", "9.7.3.10"),
    # A NaN is ignored beside a number, and −0 is less than +0.
    arithmetic("max.<float>", "T(T a, T b)", "a == b ? std::signbit(a) ? b : a : std::fmax(a, b)", "9.7.3.12"),
    value("copysign.<float>", "T(T a, T b)", "std::copysign(b, a)", "9.7.3.2"),
    arithmetic("rcp.rn.<float>", "T(T a)", "1 / a", "9.7.3.13"),
    arithmetic("rcp.approx.ftz.<single>", "T(T a)", "flushed(1 / flushed(a))", "9.7.3.13"),
    arithmetic("sqrt.rn.<float>", "T(T a)", "std::sqrt(a)", "9.7.3.15"),
    arithmetic("lg2.approx.<single>", "T(T a)", "std::log2(a)", "9.7.3.20"),
    arithmetic("ex2.approx.ftz.<single>", "T(T a)", "flushed(std::exp2(flushed(a)))", "9.7.3.21"),
    # Comparison and choice. A comparison with NaN is false, except for the unordered ones (`ltu`) and `nan`.
    value("setp.eq.<any>", "pred(T a, T b)", "a == b", "9.7.6.2"),
    value("setp.ne.<any>", "pred(T a, T b)", "a == a && b == b && a != b", "9.7.6.2"),
    value("setp.lt.<number>", "pred(T a, T b)", "a < b", "9.7.6.2"),
    value("setp.le.<number>", "pred(T a, T b)", "a <= b", "9.7.6.2"),
    value("setp.gt.<number>", "pred(T a, T b)", "a > b", "9.7.6.2"),
    value("setp.ge.<number>", "pred(T a, T b)", "a >= b", "9.7.6.2"),
    value("setp.equ.<float>", "pred(T a, T b)", "!(a < b || a > b)", "9.7.6.2"),
    value("setp.neu.<float>", "pred(T a, T b)", "a != b", "9.7.6.2"),
    value("setp.ltu.<float>", "pred(T a, T b)", "!(a >= b)", "9.7.6.2"),
    value("setp.leu.<float>", "pred(T a, T b)", "!(a > b)", "9.7.6.2"),
    value("setp.gtu.<float>", "pred(T a, T b)", "!(a <= b)", "9.7.6.2"),
    value("setp.geu.<float>", "pred(T a, T b)", "!(a < b)", "9.7.6.2"),
    value("setp.num.<float>", "pred(T a, T b)", "a == a && b == b", "9.7.6.2"),
    value("setp.nan.<float>", "pred(T a, T b)", "a != a || b != b", "9.7.6.2"),
    value("selp.<any>", "T(T a, T b, pred c)", "c ? a : b", "9.7.6.3"),
    # Bits. A shift by the width or more leaves zeros, or copies of the sign.
    value("and.<logic>", "T(T a, T b)", "a & b", "9.7.8.1"),
    value("or.<logic>", "T(T a, T b)", "a | b", "9.7.8.2"),
    value("xor.<logic>", "T(T a, T b)", "a ^ b", "9.7.8.3"),
    value("not.<bits>", "T(T a)", "~a", "9.7.8.4"),
    value("not.pred", "pred(pred a)", "!a", "9.7.8.4"),
    value("shl.<bits>", "T(T a, u32 n)", "n < 8 * sizeof(T) ? a << n : 0", "9.7.8.7"),
    value("shr.<bits>", "T(T a, u32 n)", "n < 8 * sizeof(T) ? a >> n : 0", "9.7.8.8"),
    value(
        "shr.<int>", "T(T a, u32 n)", "a >> (n < 8 * sizeof(T) - 1 ? n : 8 * sizeof(T) - 1) >> (n >= 8 * sizeof(T))", "9.7.8.8"
    ),
    # Moves and conversions.
    value("mov.<any>", "T(T a)", "a", "9.7.9.3"),
    value("mov.pred", "pred(pred a)", "a", "9.7.9.3"),
    action("mov.b32", "to {b16 a}", "{to} = joined<b32>({a})", "9.7.9.4"),
    action("mov.b64", "to {b32 a}", "{to} = joined<b64>({a})", "9.7.9.4"),
    action("mov.b32", "{to} b32 a", "split<b16>({a}, {to})", "9.7.9.4"),
    action("mov.b64", "{to} b64 a", "split<b32>({a}, {to})", "9.7.9.4"),
    value("cvta.to.global.u64", "u64(u64 a)", "a", "9.7.9.20"),
    value("cvt.<int>.<int:S>", "T(S a)", "a", "9.7.9.21"),
    value("cvt.rn.<float>.<int:S>", "T(S a)", "a", "9.7.9.21"),
    value("cvt.f64.f32", "f64(f32 a)", "a", "9.7.9.21"),
    arithmetic("cvt.rn.<single>.f64", "T(f64 a)", "T(a)", "9.7.9.21"),
    value("cvt.rzi.<int>.<float:S>", "T(S a)", "truncated<T>(a)", "9.7.9.21"),
    value("cvt.sat.<float>.<float>", "T(T a)", "a > 0 ? a < 1 ? a : 1 : 0", "9.7.9.21"),
    value("cvt.rn.bf16x2.f32", "b32(f32 a, f32 b)", "::bf16(b) | b32(::bf16(a)) << 16", "9.7.9.21"),
    # Memory. A generic address is a global one, since no kernel makes a generic address of shared memory.
    action("ld.<space>.<memory>", "to [at]", "load<{space}, {T}, 1>({at}, {to})", "9.7.9.8"),
    action("ld.<space>.v2.<memory>", "{to} [at]", "load<{space}, {T}, 2>({at}, {to})", "9.7.9.8"),
    action("ld.<space>.v4.<memory>", "{to} [at]", "load<{space}, {T}, 4>({at}, {to})", "9.7.9.8"),
    action("ld.<memory>", "to [at]", "load<global, {T}, 1>({at}, {to})", "9.7.9.8"),
    action("ld.v2.<memory>", "{to} [at]", "load<global, {T}, 2>({at}, {to})", "9.7.9.8"),
    action("ld.v4.<memory>", "{to} [at]", "load<global, {T}, 4>({at}, {to})", "9.7.9.8"),
    action("st.<space>.<memory>", "[at] T a", "store<{space}, {T}, 1>({at}, {a})", "9.7.9.11"),
    action("st.<space>.v2.<memory>", "[at] {T a}", "store<{space}, {T}, 2>({at}, {a})", "9.7.9.11"),
    action("st.<space>.v4.<memory>", "[at] {T a}", "store<{space}, {T}, 4>({at}, {a})", "9.7.9.11"),
    action("st.<memory>", "[at] T a", "store<global, {T}, 1>({at}, {a})", "9.7.9.11"),
    action("st.v2.<memory>", "[at] {T a}", "store<global, {T}, 2>({at}, {a})", "9.7.9.11"),
    action("st.v4.<memory>", "[at] {T a}", "store<global, {T}, 4>({at}, {a})", "9.7.9.11"),
    action("cp.async.cg.shared.global", "[to] [from] 16 u32 n", "copy({to}, {from}, {n})", "9.7.9.25.3.1"),
    action("cp.async.commit_group", "", "commit()", "9.7.9.25.3.2"),
    action("cp.async.wait_group", "#n", "wait({n})", "9.7.9.25.3.3"),
    action("cp.async.bulk.prefetch.L2.global", "[from] u32 bytes", "fetch_ahead({from}, {bytes})", "9.7.9.25.4.3"),
    action("atom.shared.add.u32", "to [at] u32 by", "added<u32>({at}, {by}, {to})", "9.7.13.5"),
    action("atom.shared.add.u64", "to [at] u64 by", "added<u64>({at}, {by}, {to})", "9.7.13.5"),
    # The previous value is returned. A counter that has reached its end becomes 0.
    action("atom.acq_rel.gpu.global.inc.u32", "to [at] u32 last", "counted({at}, {last}, {to})", "9.7.13.5"),
    # Control, barriers and exchange within a warp. All 32 lanes must take part: the mask is that of a whole warp.
    action("bra", "label", "goto {label}", "9.7.12.3"),
    action("bra.uni", "label", "goto {label}", "9.7.12.3"),
    action("ret", "", "return", "9.7.12.6"),
    # The kernels of a stream run one after the other here, so both only take notes.
    action("griddepcontrol.launch_dependents", "", "starts_next()", "9.7.13.15"),
    action("griddepcontrol.wait", "", "waits_for_previous()", "9.7.13.15"),
    action("bar.sync", "0", "barrier()", "9.7.13.1", together=True),
    action(
        "shfl.sync.bfly.b32",
        "{to} b32 a u32 mask u32 clamp u32 lanes",
        "exchange({a}, {mask}, {clamp}, {lanes}, {to})",
        "9.7.9.6",
        together=True,
    ),
    action("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "{to} [at]", "matrices<false>({at}, {to})", "9.7.14.5.15", together=True),
    action(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "{to} [at]", "matrices<true>({at}, {to})", "9.7.14.5.15", together=True
    ),
    action(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "{to} {b32 a} {b32 b} {f32 c}",
        "multiply({a}, {b}, {c}, {to})",
        "9.7.14.5.14",
        together=True,
    ),
]


def bound():
    """Returns the rows of each opcode, each with the names that its classes stand for."""
    opcodes = {}
    for row in ROWS:
        places = [
            (name, variable or ("space" if name == "space" else "T"))
            for name, variable in re.findall(r"<(\w+)(?::(\w))?>", row.pattern)
        ]
        variables = list(dict.fromkeys(variable for _, variable in places))
        choices = [CLASSES[next(name for name, own in places if own == variable)].split() for variable in variables]
        for chosen in itertools.product(*choices):
            names = dict(zip(variables, chosen))
            opcode = row.pattern
            for name, variable in places:
                opcode = re.sub(rf"<{name}(:{variable})?>", names[variable], opcode, count=1)
            opcodes.setdefault(opcode, []).append((row, names))
    return opcodes


OPCODES = bound()
