"""Files that are there completely or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file and give it its name when it is complete. A full disk leaves the old one, and no remains."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
