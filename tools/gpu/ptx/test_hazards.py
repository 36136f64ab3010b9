"""What hazards.cpp finds, and what it lets pass, in kernels written for it. Each has two arrays of 256 bytes."""

import tempfile
import unittest

from harness import Kernels, kernel

# %r3 is the place of the thread's word in shared memory, %rd5 and %rd6 those of its words in the arrays.
OWN = "shl.b32 %r3, %r1, 2;\ncvt.u64.u32 %rd3, %r3;\nadd.s64 %rd5, %rd1, %rd3;\nadd.s64 %rd6, %rd2, %rd3;\n"
# %r4 is the place of the word of the thread 32 further, in the other of two warps.
OTHER = OWN + "xor.b32 %r4, %r3, 128;\ncvt.u64.u32 %rd4, %r4;\nadd.s64 %rd7, %rd2, %rd4;\n"
COPY = "shl.b32 %r5, %r1, 4;\ncp.async.cg.shared.global [%r5],[%rd1],16,16;\n"
COMMIT = "cp.async.commit_group;\n"
START = "griddepcontrol.launch_dependents;\n"
WAIT = "griddepcontrol.wait;\n"

FIRST = "setp.eq.s32 %p1, %r1, 0;\n"
# The count is in shared memory, so that all threads of the block know it.
PART = FIRST + """mov.u32 %r7, %ctaid.x;
mul.wide.u32 %rd3, %r7, 4;
add.s64 %rd3, %rd2, %rd3;
@!%p1 st.global.u32 [%rd3], %r7;
"""
COUNT = FIRST + """mov.u32 %r8, 2;
@!%p1 bra $counted;
atom.acq_rel.gpu.global.inc.u32 %r9, [%rd1], %r8;
st.shared.u32 [0], %r9;
$counted:
"""
PARTS = """ld.shared.u32 %r9, [0];
setp.eq.s32 %p2, %r9, 2;
@%p2 ld.global.v2.u32 {%r10,%r11}, [%rd2];
@%p2 ld.global.u32 %r10, [%rd2+8];
"""

KERNELS = {
    # Between threads of a block.
    "own_words": OWN + "st.shared.u32 [%r3], %r1;\nld.shared.u32 %r6, [%r3];\nst.global.u32 [%rd6], %r6;",
    "other_warp": OTHER + "st.shared.u32 [%r3], %r1;\nbar.sync 0;\nld.shared.u32 %r6, [%r4];",
    "no_barrier": OTHER + "st.shared.u32 [%r3], %r1;\nld.shared.u32 %r6, [%r4];",
    "no_barrier_after": OTHER + "st.shared.u32 [%r3], %r1;\nbar.sync 0;\nld.shared.u32 %r6, [%r4];\nst.shared.u32 [%r3], %r6;",
    "all_write_one": "st.shared.u32 [0], %r1;",
    "other_lane": OWN + "xor.b32 %r4, %r3, 4;\nst.shared.u32 [%r3], %r1;\nld.shared.u32 %r6, [%r4];",
    "global_other_warp": OTHER + "st.global.u32 [%rd6], %r1;\nbar.sync 0;\nld.global.u32 %r6, [%rd7];",
    "global_no_barrier": OTHER + "st.global.u32 [%rd6], %r1;\nld.global.u32 %r6, [%rd7];",
    # Between blocks; %r7 is the block.
    "blocks_write_one": "mov.u32 %r7, %ctaid.x;\nst.global.u32 [%rd2], %r7;",
    "blocks_read_one": "ld.global.u32 %r6, [%rd1];",
    "block_reads_what_another_wrote": "mov.u32 %r7, %ctaid.x;\nsetp.eq.s32 %p1, %r7, 0;\n@%p1 st.global.u32 [%rd2], %r7;\n@!%p1 ld.global.u32 %r6, [%rd2];",
    "block_writes_what_others_read": "mov.u32 %r7, %ctaid.x;\nld.global.u32 %r6, [%rd2];\nsetp.eq.s32 %p1, %r7, 2;\n@%p1 st.global.u32 [%rd2], %r7;",
    # Atomic operations; %p1 is set in the first thread.
    "atomic_sum": FIRST + "@%p1 st.shared.u32 [0], %r1;\nbar.sync 0;\natom.shared.add.u32 %r6, [0], %r1;\nbar.sync 0;\nld.shared.u32 %r6, [0];",
    "atomic_no_barrier_before": FIRST + "@%p1 st.shared.u32 [0], %r1;\natom.shared.add.u32 %r6, [0], %r1;",
    "atomic_no_barrier_after": FIRST
    + "@%p1 st.shared.u32 [0], %r1;\nbar.sync 0;\natom.shared.add.u32 %r6, [0], %r1;\nld.shared.u32 %r6, [0];",
    "atomic_undefined": "atom.shared.add.u32 %r6, [0], %r1;",
    # Each of three blocks stores a part, in its last thread, and counts in its first; the one that counts last reads all parts.
    "counted": PART + "bar.sync 0;\n" + COUNT + "bar.sync 0;\n" + PARTS,
    "counted_without_release": PART + COUNT + "bar.sync 0;\n" + PARTS,
    "counted_without_acquire": PART + "bar.sync 0;\n" + COUNT + PARTS,
    "stored_after_count": "bar.sync 0;\n" + COUNT + PART + "bar.sync 0;\n" + PARTS,
    # Launches that start early.
    "write_early": START + WAIT + "st.global.u32 [%rd2], %r1;",
    "write_before_wait": START + "st.global.u32 [%rd2], %r1;\n" + WAIT,
    "read_early": START + WAIT + "ld.global.u32 %r6, [%rd2];",
    "read_before_wait": START + "ld.global.u32 %r6, [%rd2];\n" + WAIT,
    "start_before_wait": START + WAIT,
    "start_after_wait": WAIT + START,
    "no_wait": START,
    # Bounds.
    "behind_an_array": "ld.global.u32 %r6, [%rd1+256];",
    "over_the_end": "ld.global.u64 %rd3, [%rd1+248];\nld.global.v2.u64 {%rd3,%rd4}, [%rd1+240];\nst.global.u16 [%rd2+254], %rs1;\nst.global.u32 [%rd2+256], %r1;",
    "no_array": "mov.u64 %rd3, 4096;\nld.global.u32 %r6, [%rd3];",
    "null": "mov.u64 %rd3, 0;\nst.global.u32 [%rd3], %r1;",
    "behind_shared": "st.shared.u32 [252], %r1;\nst.shared.u32 [256], %r1;",
    "before_shared": "mov.u32 %r6, 0;\nst.shared.u32 [%r6+-4], %r1;",
    "behind_static": ".shared .align 4 .b8 words[64];\nmov.u32 %r6, words;\nst.shared.u32 [%r6+60], %r1;\nst.shared.u32 [%r6+64], %r1;",
    "misaligned": "ld.shared.v2.u32 {%r6,%r7}, [4];",
    # Memory that nothing has written.
    "undefined_shared": "st.shared.u32 [0], %r1;\nld.shared.u64 %rd3, [0];",
    "undefined_global": "ld.global.u32 %r6, [%rd2];",
    "defined_by_itself": OWN + "st.global.u32 [%rd6], %r1;\nld.global.u32 %r6, [%rd6];",
    # Asynchronous copies, of one thread.
    "copy_waited": COPY + COMMIT + "cp.async.wait_group 0;\nld.shared.u32 %r6, [%r5];",
    "copy_not_waited": COPY + COMMIT + "cp.async.wait_group 1;\nld.shared.u32 %r6, [%r5];",
    "copy_not_committed": COPY + "cp.async.wait_group 0;\nld.shared.u32 %r6, [%r5];",
    "copy_over_copy": COPY + COPY,
    # Two warps: the other warp reads after the wait, with a barrier and without.
    "copy_read_by_another": COPY
    + COMMIT
    + "cp.async.wait_group 0;\nbar.sync 0;\nxor.b32 %r6, %r5, 512;\nld.shared.u32 %r7, [%r6];",
    "copy_no_barrier": COPY + COMMIT + "cp.async.wait_group 0;\nxor.b32 %r6, %r5, 512;\nld.shared.u32 %r7, [%r6];",
}


class Hazards(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            cls.kernels = Kernels("".join(kernel(name, body) for name, body in KERNELS.items()), folder, hazards=True)

    def failure(self, name, threads=1, blocks=1, shared=256, defined=(True, False), schedule=0):
        arrays = [self.kernels.array(bytes(256), known) for known in defined]
        return self.kernels.launch(name, arrays, threads, blocks, shared, schedule)

    def passes(self, name, **launch):
        for schedule in range(3):
            self.assertIsNone(self.failure(name, schedule=schedule, **launch), name)

    def fails(self, name, expected, **launch):
        for schedule in range(3):
            self.assertRegex(self.failure(name, schedule=schedule, **launch) or "no failure", expected, name)

    def test_threads_of_a_block(self):
        self.passes("own_words", threads=64)
        self.passes("other_warp", threads=64)
        self.passes("global_other_warp", threads=64)
        self.fails("no_barrier", "read of shared memory that block 0, warp ., thread .* wrote|nothing has written", threads=64)
        self.fails(
            "no_barrier_after",
            "write of shared memory that block 0, warp ., thread .* read, without a barrier|read of shared memory that block 0, .* wrote",
            threads=64,
        )
        self.fails(
            "all_write_one",
            "^block 0,0,0, warp 0, thread .*: write of shared memory that block 0, warp 0, thread .* wrote",
            threads=2,
        )
        self.fails("other_lane", "read of shared memory that block 0, warp 0, thread .* wrote|nothing has written", threads=32)
        self.fails("global_no_barrier", "read of global memory that block 0, .* wrote|nothing has written", threads=64)

    def test_blocks(self):
        self.passes("blocks_write_one", blocks=1)
        self.passes("blocks_read_one", blocks=3)
        self.fails(
            "blocks_write_one",
            "^block (1|0),0,0, warp 0, thread 0, .*: write of global memory that block (0|1), warp 0, thread 0 wrote",
            blocks=2,
        )
        self.fails(
            "block_reads_what_another_wrote",
            "^block [01],0,0, .*: (read of global memory that block 0|write of global memory that block 1), warp 0, thread 0|nothing has written",
            blocks=2,
        )
        self.fails(
            "block_writes_what_others_read",
            "^block [012],0,0, .*: (write of global memory that (several blocks|block .*) read|read of global memory that block 2, .* wrote)",
            blocks=3,
            defined=(True, True),
        )

    def test_atomic_operations(self):
        self.passes("atomic_sum", threads=64)
        self.fails("atomic_no_barrier_before", "(read|write) of shared memory that", threads=64)
        self.fails("atomic_no_barrier_after", "(read|write) of shared memory that block 0, .*, without a barrier", threads=64)
        self.fails("atomic_undefined", "read of shared memory that nothing has written")

    def test_counters_order_blocks(self):
        self.passes("counted", threads=2, blocks=3)
        self.fails("counted_without_release", "read of global memory that block ., warp 0, thread 1 wrote", threads=2, blocks=3)
        self.fails("counted_without_acquire", "(read of|nothing has written)", threads=2, blocks=3)
        self.fails("stored_after_count", "read of global memory that", threads=2, blocks=3)

    def in_turn(self, *names):
        """Launches kernels on the same arrays, all but the first early. Returns the failure of the last one."""
        arrays = [self.kernels.array(bytes(256)) for _ in range(2)]
        launches = [self.kernels.launch(name, arrays, shared=256, threads=1, early=i > 0) for i, name in enumerate(names)]
        self.assertEqual(launches[:-1], [None] * (len(names) - 1))
        return launches[-1] or "no failure"

    def test_launches_that_start_early(self):
        read = "read of global memory that a launch before this one may still access"
        write = read.replace("read", "write")
        self.assertEqual(self.in_turn("write_early", "read_early"), "no failure")
        self.assertEqual(self.in_turn("read_early", "read_before_wait"), "no failure")
        self.assertRegex(self.in_turn("write_early", "read_before_wait"), read)
        self.assertRegex(self.in_turn("read_early", "write_before_wait"), write)
        # A launch in between ends those before it only if it starts the next one after its own wait.
        self.assertRegex(self.in_turn("write_early", "start_before_wait", "read_before_wait"), read)
        self.assertEqual(self.in_turn("write_early", "start_after_wait", "read_before_wait"), "no failure")
        self.assertRegex(self.in_turn("start_after_wait", "write_early", "read_before_wait"), read)
        self.assertRegex(self.in_turn("write_early", "no_wait"), "ended without waiting")
        self.assertIsNone(self.failure("no_wait"))

    def test_bounds(self):
        self.fails("behind_an_array", "read of global memory at .*, which belongs to no array")
        self.fails("over_the_end", "write of global memory at .*, which belongs to no array")
        self.fails("no_array", "read of global memory at 0x1000, which belongs to no array")
        self.fails("null", "write of global memory at .*, which belongs to no array")
        self.fails("behind_shared", "access of 4 bytes at 256 in shared memory, of which the launch has 256")
        self.fails("before_shared", "access of 4 bytes at 4294967292 in shared memory")
        self.fails("behind_static", "access of 4 bytes at 320 in shared memory")
        self.fails("misaligned", "shared access of 8 bytes at an address that is not a multiple of 8")

    def test_undefined_memory(self):
        self.fails("undefined_shared", "read of shared memory that nothing has written")
        self.fails("undefined_global", "read of global memory that nothing has written, at byte 0 of an array of 256 bytes")
        self.passes("defined_by_itself", threads=64)

    def test_asynchronous_copies(self):
        self.passes("copy_waited")
        self.fails("copy_not_waited", "read of shared memory to which thread 0 copies, which it has not waited for")
        self.fails("copy_not_committed", "read of shared memory to which thread 0 copies")
        self.fails("copy_over_copy", "write of shared memory to which thread 0 copies")
        self.passes("copy_read_by_another", threads=64, shared=1024)
        self.fails("copy_no_barrier", "read of shared memory", threads=64, shared=1024)


if __name__ == "__main__":
    unittest.main()
