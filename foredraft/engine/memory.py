"""How much memory there is, and whether the slots fit into it."""

import os
from pathlib import Path

import torch

from foredraft.engine.errors import ModelError


def check_memory(
    *, max_sessions: int, max_model_len: int, rows_per_session: int, bytes_per_row: int, device: torch.device
) -> None:
    """Raises ModelError, with the arithmetic, if the slots need more than what is free on `device`."""
    required = (max_sessions * rows_per_session + 1) * bytes_per_row
    free = free_bytes(device)
    if required > free:
        raise ModelError(
            f"{max_sessions} sessions of {max_model_len} tokens need {_gib(required)} for keys and values "
            f"({max_sessions} x {rows_per_session} rows x {bytes_per_row} bytes), but {_gib(free)} are free on "
            f"{device}; lower max_sessions or max_model_len"
        )


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
