"""The manifest for Kubernetes: the API server would take it, and its pods start one run."""

from __future__ import annotations

import os
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from mrlhf.run.elastic import _STOP_S
from mrlhf.run.failures import BAD_INPUT
from tests.pages import ROOT

MANIFEST: dict[str, Any] = yaml.safe_load(
    (ROOT / "launch" / "kubernetes" / "jobset.yaml").read_text(encoding="utf-8")
)

# What the manifest uses of the schema of JobSet's resource definition, jobset.x-k8s.io/v1alpha2.
# A key with "!" is required there; a set holds all values; a list has its items' schema.
EXIT_CODES = {"containerName": str, "operator!": {"In", "NotIn"}, "values!": [int]}
CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "env": [
        {
            "name!": str,
            "value": str,
            "valueFrom": {"fieldRef": {"fieldPath!": str}},
        }
    ],
    "resources": {"limits": {"nvidia.com/gpu": int}},
    "securityContext": {"capabilities": {"add": [str]}},
    "volumeMounts": [{"name!": str, "mountPath!": str}],
}
POD = {
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "terminationGracePeriodSeconds": int,
    "containers!": [CONTAINER],
    "volumes": [
        {
            "name!": str,
            "emptyDir": {"medium": str},
            "persistentVolumeClaim": {"claimName!": str},
        }
    ],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": {"NonIndexed", "Indexed"},
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules!": [{"action!": {"FailJob", "Ignore", "Count"}, "onExitCodes": EXIT_CODES}]
    },
    "template!": {"spec": POD},
}
FAILURES = {
    "maxRestarts": int,
    "restartStrategy": {"Recreate", "BlockingRecreate"},
    "rules": [
        {
            "name!": str,
            "action!": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
            "onJobFailureReasons": [{"BackoffLimitExceeded", "PodFailurePolicy"}],
        }
    ],
}
JOB_SET = {
    "apiVersion!": {"jobset.x-k8s.io/v1alpha2"},
    "kind!": {"JobSet"},
    "metadata!": {"name!": str},
    "spec!": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "failurePolicy": FAILURES,
        "replicatedJobs": [{"name!": str, "replicas": int, "template!": {"spec": JOB}}],
    },
}


def misfits(value: Any, schema: Any, at: str = "") -> list[str]:
    """The places where a value does not have its schema."""
    if isinstance(schema, set):
        return [] if value in schema else [at]
    if isinstance(schema, type):
        return [] if type(value) is schema else [at]
    if isinstance(schema, list):
        items = enumerate(value) if isinstance(value, list) else ()
        found = [] if isinstance(value, list) else [at]
        return found + [bad for i, item in items for bad in misfits(item, schema[0], f"{at}[{i}]")]

    if not isinstance(value, dict):
        return [at]
    known = {key.removesuffix("!"): part for key, part in schema.items()}
    required = {key.removesuffix("!") for key in schema if key.endswith("!")}
    found = [f"{at}.{key}" for key in (required - value.keys()) | (value.keys() - known.keys())]
    for key in value.keys() & known.keys():
        found += misfits(value[key], known[key], f"{at}.{key}")
    return found


def test_it_has_the_schema_of_a_job_set() -> None:
    assert misfits(MANIFEST, JOB_SET) == []

    broken = deepcopy(MANIFEST)
    job = broken["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backoffLimits"] = job.pop("backoffLimit")
    job["parallelism"] = "4"
    del job["template"]["spec"]["containers"][0]["name"]
    at = ".spec.replicatedJobs[0].template.spec"
    assert sorted(misfits(broken, JOB_SET)) == [
        f"{at}.backoffLimits",
        f"{at}.parallelism",
        f"{at}.template.spec.containers[0].name",
    ]


@pytest.mark.parametrize("index", [0, 3])
def test_its_pods_start_one_run(tmp_path: Path, index: int) -> None:
    (part,) = MANIFEST["spec"]["replicatedJobs"]
    job = part["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]

    launcher = tmp_path / "mrlhf-torchrun"
    launcher.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    launcher.chmod(0o755)
    done = subprocess.run(
        container["command"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "JOB_COMPLETION_INDEX": str(index),
            "POD_IP": "10.0.0.7",
        },
        text=True,
        capture_output=True,
        check=True,
    )
    options = get_args_parser().parse_args(done.stdout.splitlines())
    assert int(options.nnodes) == job["parallelism"] == job["completions"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = MANIFEST["metadata"]["name"]
    assert options.rdzv_endpoint == f"{name}-{part['name']}-0-0.{name}:29400"
    assert options.rdzv_conf == f"is_host={int(index == 0)}"
    assert (options.local_addr, options.no_python) == ("10.0.0.7", True)
    assert options.training_script == "mrlhf-train-ppo"

    # A run saves within the launcher's limit, and bad input does not start it again.
    assert pod["terminationGracePeriodSeconds"] > _STOP_S
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [BAD_INPUT]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == mounted.keys()
    assert mounted["shared-memory"] == "/dev/shm"
