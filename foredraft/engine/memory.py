"""How much memory there is, and whether the slots fit into it."""

import logging
import os
from pathlib import Path

import torch

from foredraft.engine.errors import ModelError

logger = logging.getLogger(__name__)


def check_memory(
    *, max_sessions: int, max_model_len: int, rows_per_session: int, bytes_per_row: int, device: torch.device
) -> int:
    """How many bytes the slots leave free on `device`; raises ModelError, with the arithmetic, if they do not fit."""
    required = (max_sessions * rows_per_session + 1) * bytes_per_row
    free = free_bytes(device)
    if required > free:
        raise ModelError(
            f"{max_sessions} sessions of {max_model_len} tokens need {_gib(required)} for keys and values "
            f"({max_sessions} x {rows_per_session} rows x {bytes_per_row} bytes), but {_gib(free)} are free on "
            f"{device}; lower max_sessions or max_model_len"
        )
    return free - required


def may_pack(packed: int, left: int) -> bool:
    """Whether to take `packed` bytes for packed weights of the `left` ones; if not, says so in the log.

    Half of what is left stays for activations and for other servers on the machine.
    """
    if 2 * packed <= left:
        return True
    logger.info(
        "verifying and batching are slower than they could be: packed weights would take %s, and %s are free",
        _gib(packed),
        _gib(left),
    )
    return False


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on `device`, within the limit of the control group (container) if there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _read_meminfo("MemAvailable")
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _read_meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
