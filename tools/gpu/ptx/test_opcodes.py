"""Every row of opcodes.py against values computed by hand, and what the translator refuses."""

import itertools
import math
import struct
import tempfile
import unittest

from harness import Kernels, kernel
from opcodes import OPCODES, ROWS
from parse import Instruction, Refused, parse
from translate import translate

CODES = {
    "s16": "h",
    "u16": "H",
    "b16": "H",
    "s32": "i",
    "u32": "I",
    "b32": "I",
    "s64": "q",
    "u64": "Q",
    "b64": "Q",
    "f32": "f",
    "f64": "d",
}
REGISTER = {"16": "rs", "32": "r", "64": "rd", "f32": "f", "f64": "fd"}

# Opcode, operands, result. A number in hexadecimal gives the bits.
CASES = [
    ("add.s32", "s32 2147483647, s32 1", "s32 -2147483648"),
    ("add.u16", "u16 65535, u16 2", "u16 1"),
    ("sub.u64", "u64 0, u64 1", "u64 18446744073709551615"),
    ("mul.lo.s32", "s32 65537, s32 -65537", "s32 -131073"),
    ("mul.lo.s64", "s64 4294967296, s64 4294967297", "s64 4294967296"),
    ("mul.hi.s32", "s32 -1, s32 2", "s32 -1"),
    ("mul.hi.u32", "u32 4294967295, u32 2", "u32 1"),
    ("mul.hi.s64", "s64 -9223372036854775808, s64 4", "s64 -2"),
    ("mul.wide.s32", "s32 -65536, s32 65536", "s64 -4294967296"),
    ("mul.wide.u32", "u32 4294967295, u32 4294967295", "u64 18446744065119617025"),
    ("mul.wide.u16", "u16 65535, u16 65535", "u32 4294836225"),
    ("mad.lo.s32", "s32 65536, s32 65536, s32 7", "s32 7"),
    ("mad.lo.u32", "u32 3, u32 5, u32 4294967295", "u32 14"),
    ("div.s32", "s32 -7, s32 2", "s32 -3"),
    ("div.s32", "s32 -2147483648, s32 -1", "s32 -2147483648"),
    ("div.u32", "u32 4294967295, u32 2", "u32 2147483647"),
    ("rem.s32", "s32 -7, s32 2", "s32 -1"),
    ("rem.u32", "u32 4294967295, u32 10", "u32 5"),
    ("rem.s64", "s64 7, s64 -4", "s64 3"),
    ("abs.s32", "s32 -5", "s32 5"),
    ("neg.s64", "s64 4294967296", "s64 -4294967296"),
    ("min.s32", "s32 -1, s32 1", "s32 -1"),
    ("min.u32", "u32 4294967295, u32 1", "u32 1"),
    ("max.s32", "s32 -1, s32 1", "s32 1"),
    ("max.u32", "u32 4294967295, u32 1", "u32 4294967295"),
    ("bfi.b32", "b32 0xff, b32 0x0, u32 4, u32 8", "b32 0xff0"),
    ("bfi.b32", "b32 0x0, b32 0xffffffff, u32 28, u32 8", "b32 0x0fffffff"),
    ("bfi.b32", "b32 0x5, b32 0x7, u32 0, u32 32", "b32 0x5"),
    ("bfi.b32", "b32 0x5, b32 0x7, u32 0, u32 0", "b32 0x7"),
    ("bfi.b32", "b32 0x5, b32 0x7, u32 32, u32 4", "b32 0x7"),
    # 2^24 + 1 and 2^24 + 3 are halfway between two numbers: the even one is taken.
    ("add.f32", "f32 16777216, f32 1", "f32 16777216"),
    ("add.f32", "f32 16777216, f32 3", "f32 16777220"),
    ("add.f64", "f64 9007199254740992, f64 1", "f64 9007199254740992"),
    # Arithmetic of single precision makes one NaN of all; a move keeps its bits.
    ("add.f32", "f32 inf, f32 -inf", "f32 0x7fffffff"),
    ("sub.f32", "f32 1, f32 0xffc00001", "f32 0x7fffffff"),
    ("fma.rn.f32", "f32 0x7fc00001, f32 1, f32 1", "f32 0x7fffffff"),
    ("mul.f64", "f64 inf, f64 0", "f64 nan"),
    ("cvt.rn.f32.f64", "f64 nan", "f32 0x7fffffff"),
    ("mul.f32", "f32 0x00800000, f32 0.5", "f32 0x00400000"),
    ("mul.f64", "f64 3, f64 -0.5", "f64 -1.5"),
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, of which the last term is lost.
    ("mul.rn.f32", "f32 1.000244140625, f32 1.000244140625", "f32 1.00048828125"),
    ("mul.rn.f64", "f64 3, f64 -0.5", "f64 -1.5"),
    # (1 + 2^-12)^2 - (1 + 2^-11) = 2^-24, which a product that is rounded before the sum loses.
    ("fma.rn.f32", "f32 1.000244140625, f32 1.000244140625, f32 -1.00048828125", "f32 5.9604644775390625e-08"),
    ("fma.rn.f64", "f64 2, f64 3, f64 4", "f64 10"),
    ("fma.rm.f32", "f32 1, f32 1, f32 -9.313225746154785e-10", "f32 0.999999940395355224609375"),
    ("fma.rm.f32", "f32 -1, f32 1, f32 -9.313225746154785e-10", "f32 -1.00000011920928955078125"),
    ("div.rn.f32", "f32 1, f32 3", "f32 0x3eaaaaab"),
    ("div.rn.f64", "f64 1, f64 0", "f64 inf"),
    ("abs.f32", "f32 -0.0", "f32 0x00000000"),
    ("neg.f32", "f32 0", "f32 0x80000000"),
    ("max.f32", "f32 -3, f32 -2.5", "f32 -2.5"),
    ("max.f32", "f32 0x7fc00001, f32 -2", "f32 -2"),
    ("max.f32", "f32 1, f32 0xffc00000", "f32 1"),
    ("max.f32", "f32 0x7fc00001, f32 0xffc00000", "f32 0x7fffffff"),
    ("max.f32", "f32 -0.0, f32 0", "f32 0x00000000"),
    ("max.f64", "f64 2, f64 -inf", "f64 2"),
    ("copysign.f32", "f32 -1, f32 5", "f32 -5"),
    ("rcp.rn.f32", "f32 3", "f32 0x3eaaaaab"),
    ("rcp.approx.ftz.f32", "f32 4", "f32 0.25"),
    ("rcp.approx.ftz.f32", "f32 0x80000001", "f32 -inf"),
    ("rcp.approx.ftz.f32", "f32 0x7f000000", "f32 0"),
    ("sqrt.rn.f32", "f32 2", "f32 0x3fb504f3"),
    ("sqrt.rn.f32", "f32 -1", "f32 0x7fffffff"),
    ("lg2.approx.f32", "f32 8", "f32 3"),
    ("lg2.approx.f32", "f32 0x00000001", "f32 -149"),
    ("lg2.approx.f32", "f32 0", "f32 -inf"),
    ("ex2.approx.ftz.f32", "f32 3", "f32 8"),
    ("ex2.approx.ftz.f32", "f32 -127", "f32 0x00000000"),
    ("ex2.approx.ftz.f32", "f32 -inf", "f32 0"),
    ("ex2.approx.ftz.f32", "f32 nan", "f32 0x7fffffff"),
    ("selp.f32", "f32 1, f32 2, pred 1", "f32 1"),
    ("selp.b64", "b64 1, b64 2, pred 0", "b64 2"),
    ("and.b32", "b32 0xc, b32 0xa", "b32 0x8"),
    ("or.b64", "b64 0xc00000000, b64 0xa", "b64 0xc0000000a"),
    ("xor.b32", "b32 0xc, b32 0xa", "b32 0x6"),
    ("and.pred", "pred 1, pred 0", "pred 0"),
    ("or.pred", "pred 1, pred 0", "pred 1"),
    ("xor.pred", "pred 1, pred 1", "pred 0"),
    ("not.b32", "b32 0x0000ffff", "b32 0xffff0000"),
    ("not.pred", "pred 1", "pred 0"),
    ("shl.b32", "b32 1, u32 31", "b32 0x80000000"),
    ("shl.b32", "b32 1, u32 32", "b32 0"),
    ("shl.b64", "b64 1, u32 40", "b64 0x10000000000"),
    ("shr.b32", "b32 0x80000000, u32 31", "b32 1"),
    ("shr.u32", "u32 4294967295, u32 32", "u32 0"),
    ("shr.u64", "u64 0x8000000000000000, u32 63", "u64 1"),
    ("shr.s32", "s32 -8, u32 1", "s32 -4"),
    ("shr.s32", "s32 -8, u32 100", "s32 -1"),
    ("shr.s32", "s32 8, u32 100", "s32 0"),
    ("mov.f32", "f32 0x7fc00001", "f32 0x7fc00001"),
    ("mov.b32", "f32 1", "b32 0x3f800000"),
    ("mov.pred", "pred 1", "pred 1"),
    ("cvta.to.global.u64", "u64 123456789012", "u64 123456789012"),
    ("cvt.s64.s32", "s32 -5", "s64 -5"),
    ("cvt.u64.u32", "u32 4294967295", "u64 4294967295"),
    ("cvt.u32.u64", "u64 4294967298", "u32 2"),
    ("cvt.u32.u16", "u16 65535", "u32 65535"),
    ("cvt.s32.s16", "s16 -1", "s32 -1"),
    ("cvt.u16.u32", "u32 65537", "u16 1"),
    ("cvt.rn.f32.s32", "s32 16777217", "f32 16777216"),
    ("cvt.rn.f32.u32", "u32 4294967295", "f32 4294967296"),
    ("cvt.rn.f64.s32", "s32 -3", "f64 -3"),
    ("cvt.f64.f32", "f32 0x3eaaaaab", "f64 0x3fd5555560000000"),
    ("cvt.rn.f32.f64", "f64 16777217", "f32 16777216"),
    ("cvt.rn.f32.f64", "f64 1e300", "f32 inf"),
    ("cvt.rzi.u32.f64", "f64 3.99", "u32 3"),
    ("cvt.rzi.u32.f64", "f64 -1.5", "u32 0"),
    ("cvt.rzi.u32.f64", "f64 1e10", "u32 4294967295"),
    ("cvt.rzi.u32.f64", "f64 nan", "u32 0x80000000"),
    ("cvt.rzi.s32.f32", "f32 -3.9", "s32 -3"),
    ("cvt.rzi.s32.f32", "f32 2147483648", "s32 2147483647"),
    ("cvt.rzi.s32.f32", "f32 -1e10", "s32 -2147483648"),
    ("cvt.rzi.s32.f32", "f32 nan", "s32 0"),
    ("cvt.rzi.s64.f32", "f32 nan", "s64 -9223372036854775808"),
    ("cvt.sat.f32.f32", "f32 1.5", "f32 1"),
    ("cvt.sat.f32.f32", "f32 -1", "f32 0"),
    ("cvt.sat.f32.f32", "f32 0.25", "f32 0.25"),
    ("cvt.sat.f32.f32", "f32 nan", "f32 0"),
    # The first operand becomes the upper half. 1 + 2^-8 and 1 + 3 · 2^-8 are halfway between two bf16 numbers.
    ("cvt.rn.bf16x2.f32", "f32 1, f32 2", "b32 0x3f804000"),
    ("cvt.rn.bf16x2.f32", "f32 1.00390625, f32 1.01171875", "b32 0x3f803f82"),
    ("cvt.rn.bf16x2.f32", "f32 0xff800001, f32 -inf", "b32 0x7fffff80"),
]
# Whether each comparison holds for 1 and 2, 2 and 2, 2 and 1, NaN and 1.
COMPARISONS = {
    "eq": "0100",
    "ne": "1010",
    "lt": "1000",
    "le": "1100",
    "gt": "0010",
    "ge": "0110",
    "equ": "0101",
    "neu": "1011",
    "ltu": "1001",
    "leu": "1101",
    "gtu": "0011",
    "geu": "0111",
    "num": "1110",
    "nan": "0001",
}
for name, wanted in COMPARISONS.items():
    for (a, b), holds in zip([(1, 2), (2, 2), (2, 1), ("nan", 1)], wanted):
        CASES += [
            (f"setp.{name}.f32", f"f32 {a}, f32 {b}", f"pred {holds}"),
            (f"setp.{name}.f64", f"f64 {a}, f64 {b}", f"pred {holds}"),
        ]
        if a != "nan" and len(name) == 2:
            CASES += [(f"setp.{name}.s32", f"s32 {a}, s32 {b}", f"pred {holds}")]
CASES += [
    ("setp.lt.s32", "s32 -1, s32 1", "pred 1"),
    ("setp.lt.u32", "u32 4294967295, u32 1", "pred 0"),
    ("setp.lt.s64", "s64 -1, s64 1", "pred 1"),
]


def packed(text):
    """Returns type and bytes of a number such as `f32 1.5` or `b32 0xff`."""
    kind, number = text.split()
    code = CODES.get(kind, "I")
    if number.startswith("0x"):
        return kind, int(number, 16).to_bytes(struct.calcsize(code), "little")
    return kind, struct.pack(code, float(number) if kind[0] == "f" else int(number))


def case_kernel(name, opcode, operands, result):
    """Returns a kernel that reads the operands, 8 bytes each, and stores the result."""
    body, registers = [], []
    for i, text in enumerate(operands.split(", ")):
        kind, _ = packed(text)
        if kind == "pred":
            body += [f"ld.global.u32 %r{i + 10}, [%rd1+{8 * i}];", f"setp.ne.s32 %p{i + 10}, %r{i + 10}, 0;"]
            registers.append(f"%p{i + 10}")
        else:
            registers.append(f"%{REGISTER.get(kind) or REGISTER[kind[1:]]}{i + 10}")
            body.append(f"ld.global.{kind} {registers[-1]}, [%rd1+{8 * i}];")
    kind, _ = packed(result)
    if kind == "pred":
        body += [f"{opcode} %p1, {', '.join(registers)};", "selp.u32 %r2, 1, 0, %p1;", "st.global.u32 [%rd2], %r2;"]
    else:
        to = f"%{REGISTER.get(kind) or REGISTER[kind[1:]]}9"
        body += [f"{opcode} {to}, {', '.join(registers)};", f"st.global.{kind} [%rd2], {to};"]
    return kernel(name, "\n".join(body))


class Values(unittest.TestCase):
    def test_each_opcode_returns_the_value_computed_by_hand(self):
        texts = [case_kernel(f"case_{i}", *case) for i, case in enumerate(CASES)]
        with tempfile.TemporaryDirectory() as folder:
            kernels = Kernels("".join(texts), folder)
        for i, (opcode, operands, result) in enumerate(CASES):
            with self.subTest(opcode=opcode, operands=operands):
                data = b"".join(packed(text)[1].ljust(8, b"\0") for text in operands.split(", "))
                kind, wanted = packed(result)
                out = kernels.array(b"\xaa" * 8)
                self.assertIsNone(kernels.launch(f"case_{i}", [kernels.array(data), out], threads=1))
                got = out.raw[: len(wanted)]
                if result.endswith("nan"):
                    self.assertTrue(math.isnan(struct.unpack(CODES[kind], got)[0]), got.hex())
                else:
                    self.assertEqual(got.hex(), wanted.hex())
                self.assertEqual(out.raw[len(wanted) :], b"\xaa" * (8 - len(wanted)))

    def test_each_row_has_a_case(self):
        covered = {id(row) for opcode, _, _ in CASES for row, _ in OPCODES[opcode]}
        self.assertEqual([row.pattern for row in ROWS if row.is_value and id(row) not in covered], [])


def bf16(x):
    return struct.pack("<f", x)[2:]


ACTIONS = {
    "halves": """
        ld.global.b64 %rd5, [%rd1];
        mov.b64 {%r2,%r3}, %rd5;
        mov.b64 %rd6, {%r3,%r2};
        mov.b32 {%rs1,%rs2}, %r2;
        mov.b32 %r4, {%rs2,%rs1};
        st.global.b64 [%rd2], %rd6;
        st.global.b32 [%rd2+8], %r4;""",
    "vectors": """
        ld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%rd1];
        st.global.v2.u32 [%rd2], {%r5,%r4};
        ld.v2.f32 {%f1,%f2}, [%rd1+8];
        st.v4.f32 [%rd2+16], {%f1,%f2,%f2,%f1};
        ld.v4.u32 {%r2,%r3,%r4,%r5}, [%rd1];
        st.v2.u32 [%rd2+32], {%r2,%r4};
        ld.u32 %r6, [%rd1+12];
        st.u32 [%rd2+40], %r6;""",
    "narrow": """
        ld.global.s16 %r2, [%rd1];
        ld.global.u16 %r3, [%rd1];
        ld.global.s8 %rs4, [%rd1+1];
        st.global.u32 [%rd2], %r2;
        st.global.u32 [%rd2+4], %r3;
        st.global.u16 [%rd2+8], %rs4;
        st.global.u16 [%rd2+10], %r2;""",
    "branches": """
        mov.u32 %r2, 0;
        $again:
        add.s32 %r2, %r2, 3;
        setp.lt.s32 %p1, %r2, 10;
        @%p1 bra $again;
        @!%p1 bra $out;
        bra.uni $again;
        mov.u32 %r2, 1;
        $out:
        st.global.u32 [%rd2], %r2;""",
    "butterfly": """
        mul.wide.u32 %rd3, %r1, 4;
        add.s64 %rd1, %rd1, %rd3;
        add.s64 %rd2, %rd2, %rd3;
        ld.global.b32 %r2, [%rd1];
        mov.u32 %r5, 31;
        mov.u32 %r6, -1;
        shfl.sync.bfly.b32 %r3|%p1, %r2, 5, %r5, %r6;
        @%p1 st.global.b32 [%rd2], %r3;""",
    "half_a_warp": "shfl.sync.bfly.b32 %r3|%p1, %r1, 1, 31, 65535;",
    # Thread i writes word i of shared memory, and reads that of the thread behind it.
    "barrier": """
        griddepcontrol.launch_dependents;
        griddepcontrol.wait;
        shl.b32 %r2, %r1, 2;
        mov.u32 %r3, shared;
        add.s32 %r4, %r3, %r2;
        st.shared.u32 [%r4], %r1;
        bar.sync 0;
        add.s32 %r5, %r1, 1;
        and.b32 %r5, %r5, 63;
        shl.b32 %r5, %r5, 2;
        ld.shared.u32 %r6, [%r5];
        cvt.u64.u32 %rd3, %r2;
        add.s64 %rd4, %rd2, %rd3;
        st.global.u32 [%rd4], %r6;""",
    # Thread i copies 16 bytes of row i; odd threads copy none, and get zeros.
    "copies": """
        .shared .align 16 .b8 rows[512];
        shl.b32 %r2, %r1, 4;
        mov.u32 %r3, rows;
        add.s32 %r4, %r3, %r2;
        mul.wide.u32 %rd3, %r1, 16;
        add.s64 %rd4, %rd1, %rd3;
        and.b32 %r5, %r1, 1;
        xor.b32 %r5, %r5, 1;
        shl.b32 %r5, %r5, 4;
        cp.async.bulk.prefetch.L2.global [%rd4],16;
        cp.async.cg.shared.global [%r4],[%rd4],16,%r5;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.v4.u32 {%r6,%r7,%r8,%r9}, [%r4];
        add.s64 %rd5, %rd2, %rd3;
        st.global.v4.u32 [%rd5], {%r6,%r7,%r8,%r9};""",
    # 64 threads add their numbers to two words, and count to 2 again and again.
    "atomic": """
        setp.eq.s32 %p1, %r1, 0;
        mov.u32 %r2, 0;
        mov.u64 %rd3, 4294967295;
        @%p1 st.shared.u32 [0], %r2;
        @%p1 st.shared.u64 [8], %rd3;
        bar.sync 0;
        cvt.u64.u32 %rd4, %r1;
        atom.shared.add.u32 %r3, [0], %r1;
        atom.shared.add.u64 %rd5, [8], %rd4;
        mov.u32 %r4, 2;
        atom.acq_rel.gpu.global.inc.u32 %r5, [%rd1], %r4;
        bar.sync 0;
        ld.shared.u32 %r6, [0];
        ld.shared.u64 %rd6, [8];
        shl.b32 %r7, %r1, 2;
        cvt.u64.u32 %rd7, %r7;
        add.s64 %rd8, %rd2, %rd7;
        st.global.u32 [%rd8], %r5;
        st.global.u32 [%rd2+256], %r6;
        st.global.u64 [%rd2+264], %rd6;""",
    "misaligned": "ld.global.v2.u32 {%r2,%r3}, [%rd1+4];",
    "by_zero": "mov.u32 %r2, 0;\ndiv.s32 %r3, %r1, %r2;\nst.global.u32 [%rd2], %r3;",
    # Thread i brings 16 bytes, row i of four matrices, and stores what it receives.
    **{
        name: f"""
        shl.b32 %r2, %r1, 4;
        mul.wide.u32 %rd3, %r1, 16;
        add.s64 %rd4, %rd1, %rd3;
        ld.global.v4.u32 {{%r6,%r7,%r8,%r9}}, [%rd4];
        st.shared.v4.u32 [%r2], {{%r6,%r7,%r8,%r9}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4.{kind}shared.b16 {{%r10,%r11,%r12,%r13}},[%r2];
        add.s64 %rd5, %rd2, %rd3;
        st.global.v4.u32 [%rd5], {{%r10,%r11,%r12,%r13}};"""
        for name, kind in [("matrices", ""), ("transposed", "trans.")]
    },
    # Thread i has 40 bytes: four registers of A, two of B, four of C. It stores four of D.
    "product": """
        mul.wide.u32 %rd3, %r1, 40;
        add.s64 %rd4, %rd1, %rd3;
        ld.global.v2.b32 {%r2,%r3}, [%rd4];
        ld.global.v2.b32 {%r4,%r5}, [%rd4+8];
        ld.global.v2.b32 {%r6,%r7}, [%rd4+16];
        ld.global.v2.f32 {%f1,%f2}, [%rd4+24];
        ld.global.v2.f32 {%f3,%f4}, [%rd4+32];
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4},{%r2,%r3,%r4,%r5},{%r6,%r7},{%f1,%f2,%f3,%f4};
        mul.wide.u32 %rd5, %r1, 16;
        add.s64 %rd6, %rd2, %rd5;
        st.global.v4.f32 [%rd6], {%f1,%f2,%f3,%f4};""",
}


class Actions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            cls.kernels = Kernels("".join(kernel(name, body) for name, body in ACTIONS.items()), folder)

    def run_kernel(self, name, data, size, threads=32, shared=0):
        out = self.kernels.array(bytes(size))
        self.assertIsNone(self.kernels.launch(name, [self.kernels.array(data), out], threads, shared=shared, schedule=7))
        return out.raw

    def failure(self, name):
        return self.kernels.launch(name, [self.kernels.array(bytes(64)), self.kernels.array(bytes(64))])

    def test_each_action_is_in_a_kernel(self):
        kernels = parse("".join(kernel(name, body) for name, body in ACTIONS.items()), "actions")
        opcodes = {item.opcode for one in kernels for item in one.body if isinstance(item, Instruction)}
        covered = {row.pattern for opcode in opcodes for row, _ in OPCODES[opcode]}
        self.assertEqual([row.pattern for row in ROWS if not row.is_value and row.pattern not in covered], [])

    def test_registers_are_split_and_joined(self):
        data = struct.pack("<IHH", 0x11112222, 0x4444, 0x3333)
        self.assertEqual(
            self.run_kernel("halves", data, 12, 1), struct.pack("<II", 0x33334444, 0x11112222) + struct.pack("<I", 0x22221111)
        )

    def test_vectors_keep_their_order(self):
        data = struct.pack("<4I", 1, 2, 3, 4)
        self.assertEqual(struct.unpack("<11I", self.run_kernel("vectors", data, 44, 1)), (4, 3, 0, 0, 3, 4, 4, 3, 1, 3, 4))

    def test_narrow_loads_extend_by_their_sign(self):
        out = self.run_kernel("narrow", b"\x01\x80", 12, 1)
        self.assertEqual(struct.unpack("<iIhH", out), (-32767, 32769, -128, 32769))

    def test_branches_follow_their_predicate(self):
        self.assertEqual(struct.unpack("<I", self.run_kernel("branches", b"", 4, 1)), (12,))

    def test_a_butterfly_exchanges_lanes(self):
        out = struct.unpack("<32I", self.run_kernel("butterfly", struct.pack("<32I", *range(100, 132)), 128))
        self.assertEqual(list(out), [100 + (lane ^ 5) for lane in range(32)])

    def test_a_barrier_joins_warps(self):
        out = struct.unpack("<64I", self.run_kernel("barrier", b"", 256, 64, 256))
        self.assertEqual(list(out), [(thread + 1) % 64 for thread in range(64)])

    def test_atomic_operations_return_the_value_before(self):
        out = struct.unpack("<66IQ", self.run_kernel("atomic", bytes(4), 272, 64, 16))
        self.assertEqual(sorted(out[:64]), [0] * 22 + [1] * 21 + [2] * 21)
        self.assertEqual((out[64], out[66]), (2016, 2016 + 4294967295))

    def test_copies_arrive_and_absent_ones_are_zeros(self):
        data = bytes(range(256)) * 2
        wanted = b"".join(data[16 * i : 16 * i + 16] if i % 2 == 0 else bytes(16) for i in range(32))
        self.assertEqual(self.run_kernel("copies", data, 512), wanted)

    def test_matrices_are_distributed_as_the_isa_lists_them(self):
        """9.7.14.5.15: of each matrix, a lane has elements 2·(lane % 4) and the next of row lane / 4."""
        data = struct.pack("<256H", *range(256))
        for name, row_stride, column_stride in [("matrices", 8, 1), ("transposed", 1, 8)]:
            out = struct.unpack("<256H", self.run_kernel(name, data, 512, shared=512))
            places = itertools.product(range(32), range(4), range(2))
            wanted = [64 * m + lane // 4 * row_stride + (2 * (lane % 4) + i) * column_stride for lane, m, i in places]
            self.assertEqual(list(out), wanted, name)

    def test_products_equal_plain_sums(self):
        """9.7.14.5.14 lists the row and column of each element of the fragments."""
        a = [[(5 * i + 3 * k) % 17 - 8 for k in range(16)] for i in range(16)]
        b = [[(7 * k + 2 * j) % 13 - 6 for j in range(8)] for k in range(16)]
        c = [[100 * i + j for j in range(8)] for i in range(16)]
        data = b""
        for lane in range(32):
            group, inner = lane // 4, 2 * (lane % 4)
            data += b"".join(bf16(a[group + i // 2 % 2 * 8][inner + i % 2 + i // 4 * 8]) for i in range(8))
            data += b"".join(bf16(b[inner + i % 2 + i // 2 * 8][group]) for i in range(4))
            data += struct.pack("<4f", *(c[group + i // 2 * 8][inner + i % 2] for i in range(4)))
        out = struct.unpack("<128f", self.run_kernel("product", data, 512))
        for lane, i in itertools.product(range(32), range(4)):
            row, column = lane // 4 + i // 2 * 8, 2 * (lane % 4) + i % 2
            self.assertEqual(out[4 * lane + i], c[row][column] + sum(a[row][k] * b[k][column] for k in range(16)))

    def test_failures_name_the_thread(self):
        self.assertRegex(
            self.failure("misaligned"),
            r"^block 0,0,0, warp 0, thread 0, .*: global access of 8 bytes at an address that is not a multiple of 8$",
        )
        self.assertIn("division of whole numbers by zero", self.failure("by_zero"))
        self.assertIn("only whole warps", self.failure("half_a_warp"))


class Refusals(unittest.TestCase):
    def refused(self, body, expected):
        text = kernel("bad", body)
        line = 1 + text[: text.index(body.splitlines()[-1])].count("\n")
        with self.assertRaises(Refused) as caught:
            translate(text, "file")
        self.assertIn(f"file, kernel bad, line {line}: {expected}", str(caught.exception))

    def test_an_unknown_opcode(self):
        self.refused("atom.global.add.f32 %f1, [%rd1], %f2;", "atom.global.add.f32: opcodes.py has no row for this opcode")

    def test_operands_that_do_not_fit(self):
        self.refused("add.s32 %r2, %r3;", "add.s32: expected T(T a, T b), got %r2, %r3")
        self.refused("add.s32 %r2, %r3, %r4, %r5;", "add.s32: expected T(T a, T b), got %r2, %r3, %r4, %r5")
        self.refused("add.s32 %r2, %r3, %zz4;", "add.s32: '%zz4' is not a declared register")
        self.refused("add.s32 %r2, %r3, %r40;", "add.s32: '%r40' is not a declared register")
        self.refused("add.f32 %f2, %f3, 1;", "add.f32: operand '1' is not of type f32")
        self.refused("add.s32 %r2, %r3, 0f3F80;", "add.s32: operand '0f3F80' is not of type s32")
        self.refused("mov.u64 %rd4, elsewhere;", "mov.u64: operand 'elsewhere' is not of type u64")
        self.refused("ld.global.u32 %r2, %rd1;", "ld.global.u32: operand '%rd1' is not an address")
        self.refused("ld.global.u32 %r2, [bad_param_0];", "ld.global.u32: bad_param_0 is a parameter; only ld.param reads it")
        self.refused("ld.param.u32 %r2, [bad_param_0+8];", "ld.param.u32: bad_param_0 has 8 bytes; byte 8 is read")
        self.refused("ld.global.u32 {%r2,%r3}, [%rd1];", "ld.global.u32: expected to [at], got {%r2,%r3}, [%rd1]")
        self.refused("bar.sync 1;", "bar.sync: expected 0, got 1")
        self.refused("bra $nowhere;", "bra: there is no label '$nowhere'")

    def test_a_guard_where_all_threads_must_take_part(self):
        self.refused("@%p1 bar.sync 0;", "bar.sync: a guard, although all threads must execute it together")

    def test_what_is_no_instruction(self):
        self.refused(".local .align 4 .b8 depot[8];", "unknown directive '.local .align 4 .b8 depot[8];'")
        self.refused("ADD;", "not an instruction: 'ADD'")
        with self.assertRaisesRegex(Refused, "a function; kernels must not call any"):
            translate(".func helper()\n{\nret;\n}\n", "file")
        with self.assertRaisesRegex(Refused, "the text may be truncated"):
            translate(kernel("bad", "")[:-3], "file")


if __name__ == "__main__":
    unittest.main()
