"""One of the other ranks of a target that several devices share: `python -m target_service.follower SETTINGS`.

It is started by `ranks`, with the environment that torchrun gives. SETTINGS are the target's, as JSON.
"""

import logging
import os
import sys
import threading

import torch
from torch import distributed

from foredraft.engine.errors import ModelError
from foredraft.engine.loading import load_part
from foredraft.engine.parallel import follow, join
from foredraft.serving.logs import configure_logging
from foredraft.settings import TargetSettings

logger = logging.getLogger(__name__)


def main(settings: TargetSettings) -> int:
    """Follows rank 0 until it says that it is over; returns the exit code."""
    threading.Thread(target=end_with_leader, daemon=True).start()
    rank, size = int(os.environ["RANK"]), settings.tensor_parallel_size
    torch.set_num_threads(settings.threads or 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False
    )
    group = join(device, rank, size, store)
    try:
        model = load_part(settings.model, dtype=settings.dtype, device=settings.device, tensor_parallel_size=size)
        logger.info("rank %d has its part of %s", rank, settings.model)
        follow(model, group)
    except (ModelError, RuntimeError) as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
        return 1
    distributed.destroy_process_group()
    return 0


def end_with_leader() -> None:
    """End this process when standard input ends: it does when rank 0, which holds it, is gone."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    settings = TargetSettings.model_validate_json(sys.argv[1])
    configure_logging(settings.log_level, settings.log_format)
    sys.exit(main(settings))
