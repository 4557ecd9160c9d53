"""The cluster files: each against the schema of what reads it, and every quern command in them against quern itself."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from typer.main import get_command

from quern.cli.main import app
from quern.config import load_config
from quern.data_run.config import DataRun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CLOUDS = ("ray-aws.yaml", "ray-gcp.yaml")
SCRIPTS = ("slurm-data.sh", "slurm-train.sh")


def load(name: str) -> dict[str, Any]:
    found = yaml.safe_load((DEPLOY / name).read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", CLOUDS)
def test_ray_takes_the_cluster_file(name: str) -> None:
    """Ray's own schema, and what Ray makes of the file before it asks the cloud for anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    merged = prepare_config(load(name))
    validate_config(merged)
    assert not any("ray-wheels" in command for command in merged["setup_commands"]), "Ray is the image's, and no other"
    with pytest.raises(Exception, match="autoscalor"):
        validate_config({**merged, "autoscalor": 1})


@pytest.mark.parametrize("name", CLOUDS)
def test_the_head_is_no_worker_and_the_workers_come_and_go(name: str) -> None:
    config = load(name)
    types = config["available_node_types"]
    assert types[config["head_node_type"]]["resources"] == {"CPU": 0}, "spot machines come and go, the driver stays"
    workers = {key: value for key, value in types.items() if key != config["head_node_type"]}
    assert workers
    assert all(node["min_workers"] == 0 and node["max_workers"] <= config["max_workers"] for node in workers.values())
    for command in (*config["head_start_ray_commands"][1:], *config["worker_start_ray_commands"][1:]):
        assert "--object-store-memory" in command, "nothing but small results goes through it"
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in config["head_start_ray_commands"][-1]
    for local in config["file_mounts"].values():
        assert local.startswith("~/") or (ROOT / local).is_file()
    assert "--env RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("name", CLOUDS)
def test_what_the_head_adds_to_the_image_changes_nothing_in_it(name: str) -> None:
    """A boto3 of its own choice brings a botocore that s3fs cannot use."""
    added = [command for command in load(name)["head_setup_commands"] if "pip install" in command]
    assert added
    assert "WORKDIR /opt/quern\nCOPY pyproject.toml constraints.txt" in (DEPLOY / "Dockerfile").read_text()
    assert all("--constraint /opt/quern/constraints.txt " in command for command in added)


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


@pytest.mark.parametrize(("name", "kind"), [("kuberay-job.yaml", "RayJob"), ("kuberay-cluster.yaml", "RayCluster")])
def test_kuberay_finds_what_it_needs(name: str, kind: str) -> None:
    config = load(name)
    assert (config["apiVersion"], config["kind"]) == ("ray.io/v1", kind)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", config["metadata"]["name"])
    spec = config["spec"]["rayClusterSpec"] if kind == "RayJob" else config["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["authOptions"] == {"mode": "token"}
    pinned = re.search(r"(?m)^ray==(.+)$", (ROOT / "constraints.txt").read_text())
    assert pinned is not None
    assert spec["rayVersion"] == pinned.group(1)
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert re.fullmatch(r"[a-z0-9-]+", group["groupName"])
    for group in pods(spec):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay takes texts only"
        template = group["template"]["spec"]
        (container,) = template["containers"]
        assert {"name", "image", "resources"} <= container.keys()
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        volumes = {volume["name"] for volume in template["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    if kind == "RayJob":
        assert config["spec"]["shutdownAfterJobFinishes"] is True
        assert config["spec"]["backoffLimit"] > 0, "a lost driver starts again, and its run goes on"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_slurm_scripts_are_sound(name: str) -> None:
    path = DEPLOY / name
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert path.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in text
    lines = text.splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    first = min(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert last < first, "Slurm reads no directive behind the first command"
    for directive in directives:
        assert re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", directive), directive
    for name_used in set(re.findall(r"\$\{?(SLURM_[A-Z_]+)", text)):
        assert name_used in {
            "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE",
        }  # fmt: skip
    code = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    assert not re.search(r"(?<![\"\w=\[$({])\$[a-z_]+(?![\w\"}])", re.sub(r'"[^"]*"|\$\(\([^)]*\)\)', '""', code)), (
        "every variable stands in quotes"
    )


def run_fake(
    tmp_path: Path, script: str, *arguments: str, code: int = 0, fakes: Mapping[str, str] = MappingProxyType({})
) -> list[list[str]]:
    """Run a Slurm script with a Slurm made of shell scripts (``fakes``: other ones), which ends with ``code``; what was
    started by srun, as argument lists."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    record = tmp_path / "record"
    fakes = {
        "scontrol": 'printf "node1\\nnode2\\nnode3\\n"',
        # One write a call: of two calls at once, each keeps its own line.
        "srun": f'printf -v call "%s\\037" "$@"; printf "%s\\n" "$call" >> "{record}"\n'
        'case "$*" in *hostname*) echo 10.0.0.1;; *"ray start"*) exec sleep 300;; *"quern data"*)\n'
        f'printf "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" > "{record}.token"\n'
        f'until [ "$(grep -c ray.start "{record}")" = 3 ]; do sleep 0.1; done;; esac',
        **fakes,
    }
    for name, body in fakes.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "20123", "SLURM_JOB_NODELIST": "node[1-3]",
           "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "32", "SLURM_GPUS_ON_NODE": "8"}  # fmt: skip
    done = subprocess.run(
        [str(DEPLOY / script), *arguments], env=env, capture_output=True, text=True, cwd=tmp_path, check=False,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if not record.exists():
        return []
    return [line.split("\037")[:-1] for line in record.read_text().splitlines()]


def test_the_data_script_starts_ray_once_a_node_and_one_driver(tmp_path: Path) -> None:
    started = run_fake(tmp_path, "slurm-data.sh", "recipe.yaml", "run_dir=/shared/a run")
    rays = [call[call.index("ray") :] for call in started if "ray" in call and "start" in call]
    rays.sort(key=lambda ray: "--head" not in ray)
    assert [("--head" in ray) for ray in rays] == [True, False, False]
    assert {call[2] for call in started if "ray" in call and "start" in call} == {
        "--nodelist=node1", "--nodelist=node2", "--nodelist=node3",
    }  # fmt: skip
    assert all("--num-cpus=32" in ray and "--block" in ray for ray in rays)
    port = 20000 + 20123 % 20000
    assert f"--port={port}" in rays[0]
    assert all(f"--address=10.0.0.1:{port}" in ray for ray in rays[1:])
    (driver,) = [call[call.index("quern") :] for call in started if "quern" in call]
    mode, token = (tmp_path / "record.token").read_text().split()
    assert (mode, len(token)) == ("token", 64)
    assert token not in (tmp_path / "record").read_text(), "arguments can be seen by all who are on the node"
    assert driver == ["quern", "data", "run", "recipe.yaml", "run_dir=/shared/a run", "workers=96",
                      f"ray.address=10.0.0.1:{port}"]  # fmt: skip


def test_the_training_script_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    ((*_, _module, module, config, override),) = run_fake(tmp_path, "slurm-train.sh", "c.yaml", "run_dir=/shared/a run")
    assert (module, config, override) == ("quern.train", "c.yaml", "run_dir=/shared/a run")


def test_the_training_script_checks_the_nodes_first_if_told_to(tmp_path: Path) -> None:
    script = (DEPLOY / "slurm-train.sh").read_text().replace("${DOCTOR:-0}", "1")
    (tmp_path / "train.sh").write_text(script)
    (tmp_path / "train.sh").chmod(0o755)
    doctor, train = run_fake(tmp_path, str(tmp_path / "train.sh"), "c.yaml", "run_dir=/shared/a run")
    assert doctor[-4:] == ["quern", "doctor", "c.yaml", "run_dir=/shared/a run"]
    assert "quern.train" in train
    (tmp_path / "record").unlink()
    fakes = {"srun": f'echo "$@" >> "{tmp_path}/asked"; exit 1'}
    run_fake(tmp_path, str(tmp_path / "train.sh"), "c.yaml", code=1, fakes=fakes)
    assert (tmp_path / "asked").read_text().splitlines() == ["--kill-on-bad-exit=0 quern doctor c.yaml"], (
        "nothing is begun"
    )


def requeued(tmp_path: Path, said: str, code: int = 1) -> str:
    """What the training script asks of scontrol after its ranks have said something and ended."""
    asked = tmp_path / "asked"
    asked.unlink(missing_ok=True)
    fakes = {
        "scontrol": f'[ "$1" = show ] && printf "node1\\nnode2\\n" || echo "$@" >> "{asked}"',
        "srun": f'printf "{said}" >&2; exit {code}',
    }
    run_fake(tmp_path, "slurm-train.sh", "c.yaml", code=code, fakes=fakes)
    return asked.read_text() if asked.exists() else ""


def test_a_failed_training_goes_back_into_the_queue_without_the_bad_node_and_not_for_ever(tmp_path: Path) -> None:
    said = "error: rank 9: KeyError\\nsrun: error: node-7: task 1: Exited with exit code 1\\n"
    said += "srun: error: node2: tasks 0-1: Killed\\n"
    assert requeued(tmp_path, said) == "requeue 20123\nupdate JobId=20123 ExcNodeList=node-7\n"
    assert requeued(tmp_path, "") == "requeue 20123\n"
    assert requeued(tmp_path, said) == ""
    (tmp_path / "quern-train-20123.short").unlink()
    assert requeued(tmp_path, "srun: error: $(touch x): task 1: \\n") == "requeue 20123\n"
    assert requeued(tmp_path, said, code=0) == ""


def commands(text: str) -> list[list[str]]:
    """Every ``quern …`` command of a file, also in comments."""
    found = re.findall(
        r"(?<![\w/.-])quern ((?:data|tokens|train|mix|checkpoint|lineage|bench|demo|doctor)\b[^'`\n|&]*)", text
    )
    return [shlex.split(command.replace("\\", " ").replace('"$@"', "configs/fineweb-en.yaml")) for command in found]


@pytest.mark.parametrize("path", sorted([*DEPLOY.iterdir(), ROOT / "docs" / "clusters.md"]), ids=lambda path: path.name)
def test_every_quern_command_exists_and_takes_its_options(path: Path) -> None:
    for words in commands(path.read_text()):
        command = get_command(app)
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command = command.commands[words.pop(0)]
        options = {name for option in command.params for name in option.opts}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= options


def test_the_overrides_of_data_runs_are_of_the_config() -> None:
    found = [
        [word for word in words[2:] if "=" in word and not word.startswith("-")]
        for path in [*DEPLOY.iterdir(), ROOT / "docs" / "clusters.md"]
        for words in commands(path.read_text())
        if words[:2] == ["data", "run"]
    ]
    assert len(found) >= 4
    for overrides in found:
        plain = [word for word in overrides if "$" not in word]
        config = load_config(str(ROOT / "configs" / "fineweb-en.yaml"), DataRun, plain)
        assert config.workers is None or config.workers > 1


def test_the_image_has_what_the_files_ask_of_it() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for source in re.findall(r"(?m)^COPY (.+) \S+$", text):
        assert all((ROOT / name).exists() for name in source.split()), source
    assert '"ray[default]"' in text, "KubeRay's jobs need the dashboard's job server"
    assert re.search(r"(?m)^torch==", (ROOT / "constraints.txt").read_text())
    assert re.search(r"apt-get install .*\bg\+\+ ", text), "torch.compile and Triton need a compiler"


@pytest.mark.exhaustive
def test_the_image_for_gpus_can_be_installed(tmp_path: Path) -> None:
    """pip finds wheels of all that the image has, for its Python, with the torch that PyPI has for CUDA 13."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (version,) = re.findall(r"(?m)^FROM python:(\d+\.\d+)-slim", dockerfile)
    assert "TORCH=cu130" in dockerfile
    pins = (ROOT / "constraints.txt").read_text()
    (torch,) = re.findall(r"(?m)^torch==[\d.]+", pins)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(re.sub(r"(?m)^torch==.*\n", "", pins))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["all"]]
    platforms = [f"--platform=manylinux_2_{number}_x86_64" for number in range(5, 29)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--isolated", "--dry-run", "--ignore-installed", "--only-binary=:all:",
         f"--report={tmp_path}/report.json", f"--target={tmp_path}/none", f"--python-version={version}", *platforms,
         "--platform=manylinux2014_x86_64", f"--constraint={constraints}", torch, *wanted, "ray[default]"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["install"]
    versions = {one["metadata"]["name"]: one["metadata"]["version"] for one in found}
    assert torch.endswith(versions["torch"])
    assert {"nvidia-cudnn-cu13", "triton"} <= versions.keys()
