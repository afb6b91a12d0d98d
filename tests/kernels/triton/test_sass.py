"""The reader of machine code: what is a loop, and which accesses to local memory repeat."""

from __future__ import annotations

from tests.kernels.triton import sass


def listing(*texts: str) -> str:
    """As `cuobjdump -sass` prints it; each instruction takes 16 bytes, and two addresses each are
    comments.
    """
    return "\n".join(
        f"        /*{16 * i:04x}*/    {text} ;    /* 0x00 */" for i, text in enumerate(texts)
    )


# a loop over splits (0x20 to 0xc0) around one over tiles (0x40 to 0x90), in which one adds a center
# (0x60 to 0x70)
SPLITS = listing(
    "MOV R1, c[0x0][0x28]",  # 00
    "STL [R1], R2",  # 10: once a program
    "LDG.E R4, [R2.64]",  # 20
    "@P0 STL [R1+0x4], R3",  # 30: once a split
    "LDSM.16.M88.4 R8, [R5]",  # 40
    "HMMA.16816.F32 R12, R8, R10, R12",  # 50
    "LDL.LU R6, [R1+0x4]",  # 60: repeats
    "@!P1 BRA 0x60",  # 70
    "STL.64 [R1+0x8], R6",  # 80: repeats
    "@P2 BRA 0x40",  # 90
    "LDL R7, [R1]",  # a0: once a split
    "STG.E [R2.64], R7",  # b0
    "@P3 BRA 0x20",  # c0
    "EXIT",  # d0
    "BRA 0xe0",  # e0: the end of every kernel
)


def test_a_loop_ends_in_a_jump_backwards():
    found = sass.loops(sass.instructions(SPLITS))
    assert found == [sass.Loop(0x20, 0xC0), sass.Loop(0x40, 0x90), sass.Loop(0x60, 0x70)]


def test_the_loop_over_tiles_is_the_smallest_that_multiplies():
    code = sass.instructions(SPLITS)
    assert sass.tile_loops(code) == [sass.Loop(0x40, 0x90)]


def test_what_runs_once_a_split_does_not_repeat():
    assert sass.spills(sass.instructions(SPLITS)) == (2, 3)


def test_all_of_a_kernel_without_loops_repeats():
    assert sass.spills(
        sass.instructions(listing("STL [R1], R2", "LDL R2, [R1]", "EXIT", "BRA 0x30"))
    ) == (2, 0)


def test_a_loop_that_does_not_multiply_repeats():
    once_and_twice = listing("LDL R1, [R1]", "LDL R2, [R1]", "STL [R1], R2", "@P0 BRA 0x10", "EXIT")
    assert sass.spills(sass.instructions(once_and_twice)) == (2, 1)
