"""What the files under docker/ say: instructions, documents and the options that they set."""

import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from foredraft.config import load
from foredraft.settings import DraftSettings, OrchestratorSettings, Settings, TargetSettings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
KUBERNETES = DOCKER / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu", "gpu-tensor-parallel")
SETTINGS: dict[str, type[Settings]] = {
    "target": TargetSettings,
    "draft": DraftSettings,
    "orchestrator": OrchestratorSettings,
}
# What the dashboard shows and the autoscalers follow.
METRICS = frozenset(
    f"foredraft_{name}"
    for name in (
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "queue_depth",
        "batch_rows",
        "batch_tokens",
        "slots_used",
        "slots",
        "hits_total",
        "misses_total",
        "failovers_total",
        "idle_seconds_total",
        "requests_in_flight",
        "requests_total",
        "generated_tokens_total",
    )
)


def instructions() -> Iterator[tuple[str, list[str]]]:
    """The Dockerfile's instructions, with their words."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", (DOCKER / "Dockerfile").read_text()))
    for line in filter(None, map(str.strip, text.splitlines())):
        name, rest = line.split(maxsplit=1)
        yield name, shlex.split(rest) if name in ("COPY", "ENV", "FROM", "USER") else [rest]


def copied() -> list[str]:
    """What the Dockerfile copies from the repository."""
    copies = [words for name, words in instructions() if name == "COPY" and not words[0].startswith("--from")]
    return [source for words in copies for source in words[:-1]]


def image_environment() -> dict[str, str]:
    """The variables that the image sets."""
    return dict(word.split("=", 1) for name, words in instructions() if name == "ENV" for word in words)


def effective(service: str, environment: Mapping[str, str]) -> Settings:
    """The settings that a service takes from `environment`; raises ConfigError for what it would refuse."""
    with mock.patch.dict(os.environ, environment, clear=True):
        return load(SETTINGS[service], {})


@functools.cache
def compose() -> dict[str, Any]:
    """The compose file, its anchors and merges resolved."""
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text()))


@functools.cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    """The documents of an overlay; skips the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl to build overlays")
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(yaml.safe_load_all(output))


def of_kind(overlay: str, *kinds: str) -> dict[str, dict[str, Any]]:
    """The overlay's documents of these kinds by name."""
    return {d["metadata"]["name"]: d for d in rendered(overlay) if d["kind"] in kinds}


def workloads(overlay: str) -> dict[str, dict[str, Any]]:
    """The three services' Deployments and StatefulSets by name."""
    return of_kind(overlay, "Deployment", "StatefulSet")


def container_environment(overlay: str, service: str) -> dict[str, str]:
    """The variables that a service's container gets on top of the image's."""
    container = workloads(overlay)[service]["spec"]["template"]["spec"]["containers"][0]
    configs = of_kind(overlay, "ConfigMap")
    environment = image_environment()
    for source in container["envFrom"]:
        environment |= configs[source["configMapRef"]["name"]]["data"]
    return environment | {variable["name"]: variable["value"] for variable in container.get("env", [])}
