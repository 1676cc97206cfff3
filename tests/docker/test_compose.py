"""The compose file, and Prometheus and Grafana beside it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from foredraft.config import ENV_PREFIX
from tests.docker.files import (
    DOCKER,
    KUBERNETES,
    METRICS,
    SETTINGS,
    compose,
    effective,
    image_environment,
    instructions,
)


def service(name: str) -> dict[str, Any]:
    return dict(compose()["services"][name])


def environment(name: str) -> dict[str, str]:
    return {**image_environment(), **service(name)["environment"]}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_services_accept_their_options(name: str) -> None:
    effective(name, environment(name))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_services_have_no_rights_and_outlive_their_requests(name: str) -> None:
    definition = service(name)
    assert definition["read_only"] is True
    assert definition["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in definition["security_opt"]
    assert int(definition["stop_grace_period"].removesuffix("s")) > effective(name, environment(name)).grace_s


def test_the_orchestrator_looks_where_target_and_draft_listen() -> None:
    for name in ("target", "draft"):
        host, port = environment("orchestrator")[ENV_PREFIX + name.upper()].split(":")
        assert host == name
        assert effective(name, environment(name)).listen.endswith(f":{port}")  # type: ignore[attr-defined]


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for definition in compose()["services"].values() for port in definition.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_images_are_built_from_stages_that_exist_and_others_are_pinned() -> None:
    stages = {words[-1] for name, words in instructions() if name == "FROM"}
    for definition in compose()["services"].values():
        if "build" in definition:
            assert definition["build"]["target"] in stages
            assert (DOCKER / definition["build"]["context"] / definition["build"]["dockerfile"]).is_file()
        else:
            assert re.search(r":v?\d+\.\d+\.\d+$", definition["image"])


def test_mounted_files_exist_and_volumes_are_declared() -> None:
    for definition in compose()["services"].values():
        for volume in definition.get("volumes", []):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in compose()["volumes"]


def test_prometheus_asks_every_service_where_it_shows_its_metrics() -> None:
    [job] = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    asked = {address for group in job["static_configs"] for address in group["targets"]}
    listens = {"target": "TARGET_METRICS_LISTEN", "draft": "DRAFT_METRICS_LISTEN", "orchestrator": "METRICS_LISTEN"}
    shown = {f"{n}:{environment(n)[ENV_PREFIX + v].rpartition(':')[2]}" for n, v in listens.items()}
    assert asked == shown


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DOCKER / "grafana" / "foredraft.json").read_text()))


def test_the_dashboard_shows_metrics_that_exist_and_all_of_them() -> None:
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    shown = set(re.findall(r"foredraft_\w+", " ".join(expressions)))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == METRICS


def test_the_dashboard_reads_the_provisioned_data_source() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    used = {panel["datasource"]["uid"] for panel in dashboard()["panels"] if panel["type"] != "row"}
    assert used == {source["uid"]}
    [provider] = yaml.safe_load((provisioning / "dashboards" / "foredraft.yaml").read_text())["providers"]
    mounts = [volume.split(":")[1] for volume in service("grafana")["volumes"]]
    assert provider["options"]["path"] in {str(Path(mount).parent) for mount in mounts}


def test_the_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_autoscalers_metrics_exist_and_the_adapter_passes_them_on() -> None:
    autoscalers = yaml.safe_load_all((KUBERNETES / "components" / "autoscaling" / "autoscalers.yaml").read_text())
    used = {metric["pods"]["metric"]["name"] for document in autoscalers for metric in document["spec"]["metrics"]}
    [rule] = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    [pattern] = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert used <= METRICS
    assert used == {name for name in METRICS if re.fullmatch(pattern, name)}
