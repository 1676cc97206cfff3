"""The real servers as processes, started as a user starts them."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

READY_TIMEOUT = 240.0


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server process. `command` is a command of `foredraft`, options become flags; stderr goes to a file."""

    def __init__(self, command: str, log: Path, listen_option: str, **options: Any) -> None:
        options = {listen_option: f"127.0.0.1:{free_port()}", **options}
        self.address = str(options[listen_option])
        self.metrics_address = str(options.get(listen_option.replace("listen", "metrics_listen"), ""))
        flags = [part for name, value in options.items() for part in _flag(name, value)]
        self.log = log
        self._command = [sys.executable, "-m", "foredraft.cli", command, *flags]
        log.write_bytes(b"")
        self.start()

    def start(self) -> None:
        """Start a process with the same options; the one before must have ended."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(self._command, stderr=file, stdout=file, env=environment)

    def metrics(self) -> dict[str, float]:
        """Values by name; those of one name with different labels are summed. `*_metrics_listen` must be given."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as response:
            text = response.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0) + sample.value
        return values

    def wait_ready(self) -> "Server":
        """Return when the health service says SERVING; raise RuntimeError with the log if the process ends before."""
        deadline = time.perf_counter() + READY_TIMEOUT
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.perf_counter() < deadline:
                if self.process.poll() is not None:
                    raise RuntimeError(f"exit code {self.process.returncode}:\n{self.log.read_text()}")
                try:
                    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return self
                time.sleep(0.05)
        raise RuntimeError(f"not ready within {READY_TIMEOUT:g} s:\n{self.log.read_text()}")

    def stop(self) -> int:
        """Stop it as Kubernetes does, with SIGTERM, and return its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    return [flag, str(value)]


def target(log: Path, **options: Any) -> Server:
    """A target server; `model` must be given."""
    return Server("target-server", log, "target_listen", **{"threads": 1, **options})


def draft(log: Path, **options: Any) -> Server:
    """A draft server; n-grams unless `draft_model` is given."""
    return Server("draft-server", log, "draft_listen", **{"draft_threads": 1, **options})


def orchestrator(log: Path, target: Server, draft: Server | None, **options: Any) -> Server:
    """An orchestrator in front of them."""
    draft_address = "null" if draft is None else draft.address
    return Server("orchestrator", log, "listen", target=target.address, draft=draft_address, **options)
