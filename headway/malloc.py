"""glibc's allocator as processes want it that allocate the same large tensors every step.

By default freed memory goes back to the system, and each page is cleared and mapped anew when
it is wanted again: a tenth of a training step on a CPU. Here it is kept. Only the largest
blocks go back: among kept ones they would leave ever new holes.
"""

from __future__ import annotations

# environment of a process to be started; read before its main()
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # as large as glibc allows
    "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
