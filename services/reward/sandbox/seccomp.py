"""The system calls that a sandboxed program is refused, as a filter made by libseccomp.

It closes what namespaces and resource limits leave open: memory that no limit counts
(memfd, System V shared memory), sockets that a network namespace does not hold (vsock), looking
into other processes, and parts of the kernel that no program graded here needs.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import lru_cache

from services.reward.grading.outcome import SandboxUnavailable

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_GREATER, _EQUAL, _MASKED_EQUAL = 6, 4, 7
_AF_UNIX = 1
_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag that clone takes
_REFUSED = """
    memfd_create memfd_secret shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl semget semop
    semtimedop semctl mq_open ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd
    kcmp unshare setns mount umount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig
    fsmount fspick mount_setattr bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
    io_uring_register keyctl add_key request_key kexec_load kexec_file_load init_module
    finit_module delete_module open_by_handle_at name_to_handle_at swapon swapoff reboot acct
    quotactl quotactl_fd iopl ioperm syslog lookup_dcookie fanotify_init settimeofday
    clock_settime clock_adjtime adjtimex vhangup vmsplice uselib _sysctl
"""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


@lru_cache(maxsize=1)
def filter_program() -> bytes:
    """The filter as bwrap takes it. SandboxUnavailable when libseccomp is missing or fails."""
    lib = _library()
    context = lib.seccomp_init(_ALLOW)
    if not context:
        raise SandboxUnavailable("libseccomp could not make a filter")
    try:
        for name in _REFUSED.split():
            _refuse(lib, context, name, errno.EPERM)
        # Its flags lie in memory, where no filter sees them: callers fall back to clone.
        _refuse(lib, context, "clone3", errno.ENOSYS)
        for bit in range(32):
            if _NAMESPACES >> bit & 1:
                compare = _Comparison(0, _MASKED_EQUAL, 1 << bit, 1 << bit)
                _refuse(lib, context, "clone", errno.EPERM, compare)
        for name in ("socket", "socketpair"):
            _refuse(lib, context, name, errno.EACCES, _Comparison(0, _EQUAL, 0, 0))
            _refuse(lib, context, name, errno.EACCES, _Comparison(0, _GREATER, _AF_UNIX, 0))
        return _exported(lib, context)
    finally:
        lib.seccomp_release(context)


def _library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise SandboxUnavailable(
            f"the sandbox needs libseccomp: {error}; install it: apt-get install libseccomp2"
        ) from None
    lib.seccomp_init.restype = ctypes.c_void_p
    lib.seccomp_release.argtypes = [ctypes.c_void_p]
    lib.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint,
        ctypes.POINTER(_Comparison),
    ]  # fmt: skip
    return lib


def _refuse(
    lib: ctypes.CDLL, context: int, name: str, code: int, compare: _Comparison | None = None
) -> None:
    number = lib.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # not on this processor, or younger than this libseccomp
        return
    count = 0 if compare is None else 1
    array = None if compare is None else ctypes.byref(compare)
    failed = lib.seccomp_rule_add_array(context, _ERRNO | code, number, count, array)
    if failed:
        raise SandboxUnavailable(f"libseccomp refuses the rule for {name}: {os.strerror(-failed)}")


def _exported(lib: ctypes.CDLL, context: int) -> bytes:
    descriptor = os.memfd_create("seccomp")
    try:
        if lib.seccomp_export_bpf(context, descriptor) != 0:
            raise SandboxUnavailable("libseccomp could not write its filter")
        return os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)
