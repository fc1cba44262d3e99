"""glibc's allocator as engines want it: they allocate the same tensors at every token.

By default freed memory goes back to the system, and each page is cleared and mapped anew when
it is wanted again. Here it is kept. Only the largest blocks go back: among kept ones they would
leave ever new holes. (Training ranks have the default: rows of uneven lengths leave holes too,
0.5 GiB after forty steps of the quickstart.)
"""

from __future__ import annotations

# environment of a process to be started; read before its main()
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # as large as glibc allows
    "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
