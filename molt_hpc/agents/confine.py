"""Shut a process in: no network, bounded memory, CPU time and file size, no way out of its process group.

Started as a program it confines itself and runs a Python file:

    python -I confine.py --memory-mb 1024 --seconds 10 FILE

Only the standard library is used. The network is shut off by a seccomp filter, which needs no privileges and holds for all
children; a kernel that has none is an error, not a process without walls.
"""

import argparse
import ctypes
import platform
import resource
import runpy
import signal
import struct
import sys

ALLOW, DENY = 0x7FFF0000, 0x00050000 | 13  # SECCOMP_RET_ERRNO with EACCES
ARCHITECTURES = {"x86_64": (0xC000003E, {"socket": 41, "ptrace": 101, "setpgid": 109, "setsid": 112, "io_uring_setup": 425}),
                 "aarch64": (0xC00000B7, {"socket": 198, "ptrace": 117, "setpgid": 154, "setsid": 157, "io_uring_setup": 425})}
"""Audit number of each architecture, and its numbers of the system calls that are denied: sockets, and leaving the group that is killed."""
FILE_BYTES = 16 << 20


def confine(memory_mb: int, seconds: float) -> None:
    """Confine this process and its future children. Raises OSError if the kernel has no seccomp filters."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: not without its owner
    program = ctypes.create_string_buffer(_filter(*ARCHITECTURES[platform.machine()]))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    given = Program((len(program) - 1) // 8, ctypes.cast(program, ctypes.c_void_p))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(given), 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "the kernel refuses a seccomp filter: untrusted code cannot be run here")


def _filter(architecture: int, denied: dict[str, int]) -> bytes:
    """Classic BPF over (system call number, architecture)."""
    numbers = sorted(denied.values())
    last = len(numbers) + 5  # index of the instruction that denies; the one before allows
    code = [(0x20, 0, 0, 4), (0x15, 0, last - 2, architecture), (0x20, 0, 0, 0), (0x35, last - 4, 0, 0x40000000)]
    code += [(0x15, last - len(code) - 1 - i, 0, number) for i, number in enumerate(numbers)]
    code += [(0x06, 0, 0, ALLOW), (0x06, 0, 0, DENY)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-mb", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("file")
    args = parser.parse_args()
    confine(args.memory_mb, args.seconds)
    sys.argv = [args.file]
    runpy.run_path(args.file, run_name="__main__")


if __name__ == "__main__":
    main()
