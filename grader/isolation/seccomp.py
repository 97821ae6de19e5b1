"""A filter of system calls that lab code has no use for, put on after the last fork and before its first line runs."""

from __future__ import annotations

import errno

_CLONE_THREAD = 0x00010000
_MAP_SHARED_ANONYMOUS = 0x01 | 0x20

DENIED = (
    # processes: threads are allowed, a second process is not, and with it no fork bomb and no daemon
    "fork vfork execve execveat "
    # other processes' memory and files
    "ptrace process_vm_readv process_vm_writev process_madvise pidfd_open pidfd_getfd pidfd_send_signal kcmp tkill "
    "rt_sigqueueinfo rt_tgsigqueueinfo "
    # the network; a socket pair within the process is harmless
    "socket connect bind listen accept accept4 "
    # namespaces, mounts, kernel
    "unshare setns mount umount2 move_mount fsopen fsmount fspick open_tree mount_setattr pivot_root chroot bpf "
    "perf_event_open userfaultfd keyctl add_key request_key io_uring_setup io_uring_enter io_uring_register "
    "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl "
    "fanotify_init open_by_handle_at name_to_handle_at "
    # memory that no limit counts
    "memfd_create memfd_secret shmget shmat semget msgget"
).split()


def install(own_pid: int) -> None:
    """Filters this process for good.

    Args:
        own_pid: the one process that may be signalled.

    Raises:
        ImportError: if pyseccomp or libseccomp is missing.
        OSError: if the kernel refuses the filter.
    """
    import pyseccomp

    refuse = pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in DENIED:
        # Names that this machine's libseccomp or architecture does not know cannot be called either.
        if pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) >= 0:
            rules.add_rule(refuse, name)
    # glibc falls back to clone, whose flags can be looked at.
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    rules.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _CLONE_THREAD, 0))
    for name in ("kill", "tgkill"):
        rules.add_rule(refuse, name, pyseccomp.Arg(0, pyseccomp.NE, own_pid))
    # 0 is the process itself; another one's limits are not its business.
    rules.add_rule(refuse, "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))
    # Shared anonymous memory is not counted by RLIMIT_DATA.
    shared = pyseccomp.Arg(3, pyseccomp.MASKED_EQ, _MAP_SHARED_ANONYMOUS, _MAP_SHARED_ANONYMOUS)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOMEM), "mmap", shared)
    rules.load()
