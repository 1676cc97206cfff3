"""The Kubernetes manifests: valid by the API's schemas, built as they are deployed, and as careful as promised."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from foredraft.config import ENV_PREFIX
from foredraft.serving.tls import ClientTls, ServerTls
from foredraft.v1 import draft_pb2, generation_pb2, target_pb2
from tests.docker.files import (
    DOCKER,
    KUBERNETES,
    OVERLAYS,
    SETTINGS,
    container_environment,
    effective,
    of_kind,
    rendered,
    workloads,
)

# The oldest version whose kubelet sleeps in preStop without a feature gate, and the newest with a schema here.
VERSIONS = ("1.30", "1.37")
COMPONENT = "app.kubernetes.io/component"
HEALTH_NAMES = {
    "target": target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    "draft": draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    "orchestrator": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
}


def validate(document: dict[str, Any], version: str) -> None:
    pytest.importorskip("kubernetes_validate").validate(document, version, strict=True)


def pods(overlay: str) -> dict[str, dict[str, Any]]:
    """The pod templates of all workloads, jobs included, by name."""
    found = of_kind(overlay, "Deployment", "StatefulSet", "Job")
    return {name: document["spec"]["template"] for name, document in found.items()}


def containers(overlay: str) -> dict[str, dict[str, Any]]:
    templates = pods(overlay)
    return {
        f"{name}/{container['name']}": container
        for name, template in templates.items()
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_document_of_an_overlay_is_valid(overlay: str, version: str) -> None:
    for document in rendered(overlay):
        validate(document, version)


def test_the_base_is_valid_without_kubectl_too() -> None:
    for directory in (KUBERNETES / "base", KUBERNETES / "components" / "autoscaling"):
        names = yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]
        assert names
        for name in names:
            for document in yaml.safe_load_all((directory / name).read_text()):
                validate(document, VERSIONS[0])


def test_every_file_is_used_by_its_kustomization() -> None:
    for kustomization in KUBERNETES.rglob("kustomization.yaml"):
        content = yaml.safe_load(kustomization.read_text())
        used = {*content.get("resources", []), *(patch.get("path") for patch in content.get("patches", []))}
        used |= {file for generator in content.get("configMapGenerator", []) for file in generator.get("envs", [])}
        assert {file.name for file in kustomization.parent.iterdir()} - used == {"kustomization.yaml"}


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_services_accept_their_options(overlay: str, name: str) -> None:
    effective(name, container_environment(overlay, name))


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_plaintext_is_for_the_demo_only(overlay: str, name: str) -> None:
    environment = container_environment(overlay, name)
    assert ("FOREDRAFT_INSECURE" in environment) == (overlay == "cpu-demo")
    assert ("FOREDRAFT_TLS_CERT" in environment) == (overlay != "cpu-demo")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_files_that_options_name_are_mounted(overlay: str) -> None:
    for name in SETTINGS:
        container = workloads(overlay)[name]["spec"]["template"]["spec"]["containers"][0]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for value in (variable["value"] for variable in container.get("env", [])):
            assert not value.startswith("/") or any(value.startswith(f"{mount}/") for mount in mounts)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_as_a_user_without_rights_or_token(overlay: str) -> None:
    for template in pods(overlay).values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["serviceAccountName"] in of_kind(overlay, "ServiceAccount")
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
    assert all(not account["automountServiceAccountToken"] for account in of_kind(overlay, "ServiceAccount").values())
    for container in containers(overlay).values():
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_says_what_it_needs_and_where_its_image_is_from(overlay: str) -> None:
    for container in containers(overlay).values():
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        assert re.search(r":\d+\.\d+\.\d+$", container["image"])


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_probes_ask_the_plaintext_health_port_by_grpc(overlay: str, name: str) -> None:
    container = workloads(overlay)[name]["spec"]["template"]["spec"]["containers"][0]
    prefix = "" if name == "orchestrator" else f"{name.upper()}_"
    listens = container_environment(overlay, name)[f"{ENV_PREFIX}{prefix}HEALTH_LISTEN"]
    assert listens.startswith("0.0.0.0:")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == int(listens.rpartition(":")[2])
    assert container["readinessProbe"]["grpc"]["service"] == HEALTH_NAMES[name]
    assert container["startupProbe"]["grpc"]["service"] == HEALTH_NAMES[name]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_orchestrator_waits_for_its_start_as_long_as_the_target_may_load(overlay: str) -> None:
    patience = {
        name: probe["periodSeconds"] * probe["failureThreshold"]
        for name, document in workloads(overlay).items()
        for probe in [document["spec"]["template"]["spec"]["containers"][0]["startupProbe"]]
    }
    assert patience["target"] >= (3600 if overlay == "gpu-tensor-parallel" else 600)
    assert patience["orchestrator"] >= patience["target"]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_pods_live_longer_than_their_servers_drain(overlay: str, name: str) -> None:
    spec = workloads(overlay)[name]["spec"]["template"]["spec"]
    waits = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits > 0
    grace_s = effective(name, container_environment(overlay, name)).grace_s
    assert spec["terminationGracePeriodSeconds"] > waits + grace_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_budgets_and_policies_select_the_pods_they_mean(overlay: str) -> None:
    labels = {name: document["spec"]["template"]["metadata"]["labels"] for name, document in workloads(overlay).items()}
    budgets, services = of_kind(overlay, "PodDisruptionBudget"), of_kind(overlay, "Service")
    for name in SETTINGS:
        assert budgets[name]["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
        assert services[name]["spec"]["selector"].items() <= labels[name].items()
        [port] = services[name]["spec"]["ports"]
        assert effective(name, container_environment(overlay, name)).listen.endswith(f":{port['port']}")  # type: ignore[attr-defined]
    assert all(services[name]["spec"]["clusterIP"] == "None" for name in ("target", "draft", "orchestrator-pods"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_orchestrator_finds_replicas_through_headless_services(overlay: str) -> None:
    environment = container_environment(overlay, "orchestrator")
    for name in ("target", "draft"):
        [port] = of_kind(overlay, "Service")[name]["spec"]["ports"]
        assert environment[ENV_PREFIX + name.upper()] == f"dns:///{name}:{port['port']}"


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector matches these labels."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def peers(overlay: str, name: str, direction: str) -> set[tuple[str, int]]:
    """(who, port) for all that a workload's pods may talk with; `who` is a workload or a namespace or network."""
    labels = pods(overlay)[name]["metadata"]["labels"]
    policies = [
        p["spec"] for p in of_kind(overlay, "NetworkPolicy").values() if selects(p["spec"]["podSelector"], labels)
    ]
    assert any({"Ingress", "Egress"} <= set(policy["policyTypes"]) for policy in policies), "not isolated"
    side = {"ingress": "from", "egress": "to"}[direction]
    found = set()
    for rule in (rule for policy in policies for rule in policy.get(direction, [])):
        for peer in rule[side]:
            if "ipBlock" in peer:
                who = peer["ipBlock"]["cidr"]
            elif "namespaceSelector" in peer:
                who = "namespace " + peer["namespaceSelector"].get("matchLabels", {}).get(
                    "kubernetes.io/metadata.name", "any"
                )
            else:
                who = peer["podSelector"]["matchLabels"][COMPONENT]
            found |= {(who, port["port"]) for port in rule["ports"]}
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_talk_only_with_whom_they_must(overlay: str) -> None:
    monitoring, dns = ("namespace monitoring", 9464), ("namespace kube-system", 53)
    assert peers(overlay, "target", "ingress") == {("orchestrator", 50052), monitoring}
    assert peers(overlay, "draft", "ingress") == {("orchestrator", 50053), monitoring}
    assert peers(overlay, "orchestrator", "ingress") == {("namespace any", 50051), monitoring}
    assert peers(overlay, "orchestrator", "egress") == {("target", 50052), ("draft", 50053), dns}
    assert peers(overlay, "target", "egress") == peers(overlay, "draft", "egress") == set()
    assert peers(overlay, "fetch-models", "ingress") == set()
    assert peers(overlay, "fetch-models", "egress") == {("0.0.0.0/0", 443), dns}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_draft_and_orchestrator_are_placed_near_a_target(overlay: str) -> None:
    keys = {}
    for name in ("draft", "orchestrator"):
        affinity = workloads(overlay)[name]["spec"]["template"]["spec"]["affinity"]["podAffinity"]
        terms = [term["podAffinityTerm"] for term in affinity["preferredDuringSchedulingIgnoredDuringExecution"]]
        assert all(term["labelSelector"]["matchLabels"] == {COMPONENT: "target"} for term in terms)
        keys[name] = {term["topologyKey"] for term in terms}
    assert keys["draft"] == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    assert keys["orchestrator"] == {"topology.kubernetes.io/zone"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_models_are_written_by_the_job_alone(overlay: str) -> None:
    for name, container in containers(overlay).items():
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
        assert all(mount.get("readOnly", False) == (name != "fetch-models/fetch-models") for mount in mounts)
    assert list(of_kind(overlay, "PersistentVolumeClaim")) == ["models"]


@pytest.mark.parametrize("overlay", ["gpu", "gpu-tensor-parallel"])
def test_the_job_fetches_the_models_that_the_services_load(overlay: str) -> None:
    [job] = pods(overlay)["fetch-models"]["spec"]["containers"]
    [models] = [variable["value"] for variable in job["env"] if variable["name"] == "MODELS"]
    environment = container_environment(overlay, "target")
    wanted = {environment["FOREDRAFT_MODEL"], environment["FOREDRAFT_DRAFT_MODEL"]}
    assert wanted == {f"/models/{model.rpartition('/')[2]}" for model in models.split()}


@pytest.mark.parametrize("overlay", ["gpu", "gpu-tensor-parallel"])
def test_models_get_the_gpus_that_they_are_split_over(overlay: str) -> None:
    spec = workloads(overlay)["target"]["spec"]["template"]["spec"]
    size = container_environment(overlay, "target").get("FOREDRAFT_TENSOR_PARALLEL_SIZE", "1")
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == size
    assert spec["containers"][0]["image"].startswith("foredraft-cuda:")
    shared_memory = [v for v in spec["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert bool(shared_memory) == (size != "1")
    draft = workloads(overlay)["draft"]["spec"]["template"]["spec"]["containers"][0]
    assert draft["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("overlay", ["gpu", "gpu-tensor-parallel"])
def test_autoscalers_scale_workloads_whose_replicas_nobody_else_sets(overlay: str) -> None:
    autoscalers = of_kind(overlay, "HorizontalPodAutoscaler")
    assert autoscalers.keys() == SETTINGS.keys()
    for autoscaler in autoscalers.values():
        reference = autoscaler["spec"]["scaleTargetRef"]
        workload = workloads(overlay)[reference["name"]]
        assert workload["kind"] == reference["kind"]
        assert "replicas" not in workload["spec"]


def test_the_certificates_fit_the_names_that_are_connected_to(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    subprocess.run([KUBERNETES / "make-certificates.sh", tmp_path], check=True, capture_output=True)
    client = tmp_path / "orchestrator-client"
    ClientTls(client / "ca.crt", client / "tls.crt", client / "tls.key").credentials()
    for name in ("target", "draft", "orchestrator"):
        made = tmp_path / name
        ServerTls(made / "tls.crt", made / "tls.key", made / "ca.crt").credentials()
        verify = ["openssl", "verify", "-CAfile", str(tmp_path / "ca.crt"), "-verify_hostname", name]
        subprocess.run([*verify, str(made / "tls.crt")], check=True, capture_output=True)


@pytest.mark.parametrize("overlay", ["gpu", "gpu-tensor-parallel"])
def test_every_secret_that_pods_need_is_in_the_instructions(overlay: str) -> None:
    instructions = (DOCKER / "README.md").read_text()
    volumes = [volume for template in pods(overlay).values() for volume in template["spec"]["volumes"]]
    secrets = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    assert secrets == {"target-tls", "draft-tls", "orchestrator-tls", "orchestrator-client-tls", "auth-tokens"}
    assert all(f"{name}-tls" in secrets for name in re.findall(r"for name in (.+);", instructions)[0].split())
    assert "secret generic auth-tokens --from-file=tokens" in instructions
