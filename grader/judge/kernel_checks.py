"""What a kernel's record must show: the launches and bytes promised, and no access that a GPU would punish."""

from __future__ import annotations

from torch import Tensor

from labkit.instruments.access_log import AccessLog


def check_accesses(what: str, log: AccessLog) -> None:
    """Fail if a kernel touched memory outside its tensors, or did what a GPU refuses or answers otherwise.

    Raises:
        AssertionError: naming the first of each.
    """
    for found in (*log.stray, *log.flags):
        raise AssertionError(f"{what}: {found}")


def check_traffic(what: str, log: AccessLog, *, launches: int, loaded: int, stored: int, advice: str = "") -> None:
    """Fail unless a call started so many kernels and moved so many bytes, exactly.

    Args:
        what: the call, in words; starts every message.
        log: its record.
        launches: kernels wanted.
        loaded: bytes that they may read from global memory, and must.
        stored: bytes that they write there.
        advice: what to look at; ends the message.

    Raises:
        AssertionError: saying by tensor what was moved.
    """
    advice = f" {advice}" if advice else ""
    started = [launch.kernel for launch in log.launches]
    if len(started) != launches:
        raise AssertionError(f"{what} must start {launches} kernels, it started {len(started)}: {started}.{advice}")
    if (log.bytes_loaded, log.bytes_stored) != (loaded, stored):
        shares = ", ".join(
            f"{tensor.name} {tensor.bytes_loaded} in, {tensor.bytes_stored} out"
            for launch in log.launches
            for tensor in launch.tensors
        )
        raise AssertionError(
            f"{what} must load {loaded} and store {stored} bytes, it loaded {log.bytes_loaded} and stored "
            f"{log.bytes_stored} ({shares}).{advice}"
        )


def check_unwritten(what: str, *outputs: Tensor) -> None:
    """Fail unless outputs of NaN are still that: to be asked after a call whose launches were kept from running.

    Raises:
        AssertionError: something else than a kernel wrote the answer.
    """
    for output in outputs:
        written = int((~output.isnan()).sum())
        if written:
            raise AssertionError(
                f"{what} gave {written} of {output.numel()} numbers although its kernels were kept from running: "
                "the kernel must do the work, not torch around it"
            )
