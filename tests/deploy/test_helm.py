"""The chart of deploy/helm, rendered by Helm itself and held to Kubernetes' schemas."""

import json
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.container import HOME, Container
from deploy.monitoring_files import DASHBOARDS, DEPLOY, RULES
from environments import environment
from servers import HANDLERS, make_archive

pytestmark = [pytest.mark.integration, pytest.mark.containers, pytest.mark.environments]

CHART = DEPLOY / "helm" / "marserve"
LIBRARIES = ("helm-python-sdk==0.2.2", "kubernetes-validate>=1.37", "PyYAML")

#: What TorchServe's chart has in its values.yaml, but for the image.
TORCHSERVE = {
    "torchserve_image": "registry.example/marserve:gpu",
    "namespace": "torchserve",
    "torchserve": {
        "management_port": 8081,
        "inference_port": 8080,
        "metrics_port": 8082,
        "grpc_inference_port": 7070,
        "pvd_mount": "/home/model-server/shared/",
        "n_gpu": 4,
        "n_cpu": 16,
        "memory_limit": "32Gi",
    },
    "deployment": {"replicas": 2},
    "persistentVolume": {"name": "efs-claim"},
}
CATALOG = {"models": {"digits": {"1.0": {"url": "digits.mar", "minWorkers": 2}}}}
# What TorchServe's users have on such a volume; tokens are on, since nothing is said of them.
VOLUME = """
inference_address=http://0.0.0.0:8080
management_address=http://0.0.0.0:8081
metrics_address=http://0.0.0.0:8082
grpc_inference_address=0.0.0.0
enable_metrics_api=true
metrics_mode=prometheus
NUM_WORKERS=1
number_of_netty_threads=32
job_queue_size=1000
model_store=/home/model-server/model-store
preload_modules=
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"lab":{"1.0":{"defaultVersion":true,\
"marName":"lab.mar","minWorkers":2,"maxWorkers":2,"batchSize":1,"maxBatchDelay":100,\
"responseTimeout":120}}}}
"""
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "torchserve": TORCHSERVE,
    # The values of TorchServe's README, which its chart does not read.
    "readme": {
        "torchserve": {"n_gpu": 1, "n_cpu": 1, "memory_limit": "4Gi", "memory_request": "1Gi"},
        "persitant_volume": {"size": "1Gi"},
    },
    "configured": {
        "config": {
            "max_request_size": 65536000,
            "lame_duck_seconds": 2.5,
            "drain_timeout": 60,
            "decode_input_request": False,
            "inference_address": "https://0.0.0.0:9080",
            "preload_modules": "torch,\ntorchvision\n",
            "models": {"digits": {"1.0": {"batchSize": 8}}},
        },
        "persistentVolume": {"name": "efs-claim"},
        "torchserve": {"inference_port": 9080, "pvd_mount": "/models"},
    },
    "everything": {
        "tokens": {"secret": "keys"},
        "modelCatalog": {"content": CATALOG},
        "autoscaling": {"enabled": True, "openRequests": 20, "cpu": 80},
        "service": {"headless": True, "management": False, "type": "LoadBalancer"},
        "ingress": {
            "enabled": True,
            "host": "models.example",
            "className": "nginx",
            "annotations": {"a.example/b": "c"},
            "tls": [{"secretName": "tls", "hosts": ["models.example"]}],
            "statefulModels": ["chat"],
        },
        "istio": {"sequenceAffinity": True},
        "networkPolicy": {
            "enabled": True,
            "managementFrom": [{"podSelector": {"matchLabels": {"app": "operator"}}}],
        },
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "runbooks": "https://docs.test/monitoring.html"},
        "grafanaDashboards": {"enabled": True},
        "serviceAccount": {"create": True, "annotations": {"role": "reader"}},
        "sharedMemory": "1Gi",
        "tmpSize": "20Gi",
        "env": [{"name": "OMP_NUM_THREADS", "value": "2"}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "extraArgs": ["--no-config-snapshots"],
        "imagePullSecrets": [{"name": "registry"}],
    },
    "a snapshot": {"config": {"model_snapshot": {"modelCount": 0, "models": {}}}},
    "tokens of each pod": {"config": {"disable_token_authorization": False}},
    "keda": {"autoscaling": {"enabled": True, "keda": {"enabled": True}}},
    "run": {
        "torchserve": {"pvd_mount": "/home/model-server"},
        "config": {"preload_modules": ""},
        "modelCatalog": {"content": {"models": {"lab": {"1.0": {"url": "lab.mar"}}}}},
        "tokens": {"secret": "keys"},
    },
    "run from a volume": {
        "torchserve": {"pvd_mount": "/home/model-server"},
        "persistentVolume": {"name": "efs-claim"},
    },
    "bucket": {"modelCatalog": {"place": "s3://bucket/catalog.json"}},
    "a catalog elsewhere": {"modelCatalog": {"configMap": "wanted"}},
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a typing error": ({"replica": 2}, "replica"),
    "a port as a word": ({"torchserve": {"inference_port": "http"}}, "inference_port"),
    "two catalogs": ({"modelCatalog": {"place": "a", "configMap": "b"}}, "exclude each other"),
    "scaling by nothing": (
        {"autoscaling": {"enabled": True, "queuedRequests": 0}},
        "has to say when",
    ),
}

Find = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What Helm makes of all cases, at once: its library takes a second to load."""
    python = environment("helm", LIBRARIES)
    cases = CASES | {name: values for name, (values, _) in WRONG.items()}
    done = subprocess.run(
        [
            python,
            Path(__file__).with_name("render_chart.py"),
            CHART,
            tmp_path_factory.mktemp("chart"),
        ],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def find(report):
    """The documents of a case, of one kind if it is named."""

    def documents(case, kind=""):
        rendered = report["rendered"][case]
        assert rendered["error"] is None
        return [each for each in rendered["documents"] if kind in ("", each["kind"])]

    return documents


def pod(find: Find, case: str) -> dict[str, Any]:
    (deployment,) = find(case, "Deployment")
    template: dict[str, Any] = deployment["spec"]["template"]
    return template


def container_of(find: Find, case: str) -> dict[str, Any]:
    (only,) = pod(find, case)["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def properties(find: Find, case: str) -> dict[str, str]:
    (text,) = (
        each["data"]["config.properties"]
        for each in find(case, "ConfigMap")
        if "config.properties" in each["data"]
    )
    return dict(line.split("=", 1) for line in text.replace("\\\n", "").splitlines())


# What every case has to keep


@pytest.mark.parametrize("case", CASES)
def test_helm_and_kubernetes_find_nothing_wrong(case, report):
    assert report["rendered"][case]["error"] is None
    assert report["rendered"][case]["findings"] == []
    messages = {message["error"] for message in report["linted"][case]}
    assert messages <= {"icon is recommended"}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_sense_is_refused(case, report):
    assert WRONG[case][1] in report["rendered"][case]["error"]


@pytest.mark.parametrize("case", CASES)
def test_names_refer_to_what_is_there(case, find):
    template, served = pod(find, case), container_of(find, case)
    labels = template["metadata"]["labels"].items()
    ports = {port["name"] for port in served["ports"]}
    for service in find(case, "Service"):
        assert service["spec"]["selector"].items() <= labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for kind in ("Deployment", "PodDisruptionBudget"):
        for each in find(case, kind):
            assert each["spec"]["selector"]["matchLabels"].items() <= labels
    for policy in find(case, "NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert named <= ports
    for monitor in find(case, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [s for s in find(case, "Service") if wanted <= s["metadata"]["labels"].items()]
        assert len(chosen) == 1  # else each pod would be read twice
        offered = {port["name"] for port in chosen[0]["spec"]["ports"]}
        assert {end["port"] for end in monitor["spec"]["endpoints"]} <= offered
    for ingress in find(case, "Ingress"):
        for path in ingress["spec"]["rules"][0]["http"]["paths"]:
            assert path["backend"]["service"] == {"name": "torchserve", "port": {"name": "preds"}}
    assert {served[name]["httpGet"]["port"] for name in served if name.endswith("Probe")} == {"ts"}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in served["volumeMounts"]} == set(volumes)
    made = {each["metadata"]["name"] for each in find(case, "ConfigMap")} | {"wanted"}
    assert {v["configMap"]["name"] for v in volumes.values() if "configMap" in v} <= made


@pytest.mark.parametrize("case", CASES)
def test_pods_satisfy_the_restricted_security_standard(case, find):
    of_pod, of_container = pod(find, case)["spec"], container_of(find, case)["securityContext"]
    assert of_pod["securityContext"]["runAsNonRoot"] is True
    assert of_pod["securityContext"]["runAsUser"] == 1000
    assert of_pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert of_pod["automountServiceAccountToken"] is False
    assert of_container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


# What TorchServe's users have


def test_an_upgrade_replaces_what_torchserves_chart_has_made(find):
    (deployment,) = find("torchserve", "Deployment")
    (service,) = find("torchserve", "Service")
    assert deployment["metadata"]["name"] == service["metadata"]["name"] == "torchserve"
    assert deployment["spec"]["selector"] == {"matchLabels": {"app": "torchserve"}}
    assert deployment["spec"]["replicas"] == 2
    assert service["spec"]["selector"] == {"app": "torchserve"}
    ports = [(p["name"], p["port"], p["targetPort"]) for p in service["spec"]["ports"]]
    assert ports == [
        ("preds", 8080, "ts"),
        ("mdl", 8081, "ts-management"),
        ("metrics", 8082, "ts-metrics"),
        ("grpc", 7070, "ts-grpc"),
    ]
    served = container_of(find, "torchserve")
    assert served["image"] == "registry.example/marserve:gpu"
    assert {port["name"]: port["containerPort"] for port in served["ports"]} == {
        "ts": 8080,
        "ts-management": 8081,
        "ts-metrics": 8082,
        "ts-grpc": 7070,
    }
    assert served["resources"] == {
        "limits": {"cpu": 16, "memory": "32Gi", "nvidia.com/gpu": 4},
    }
    volumes = {volume["name"]: volume for volume in pod(find, "torchserve")["spec"]["volumes"]}
    assert volumes["persistent-storage"]["persistentVolumeClaim"] == {"claimName": "efs-claim"}
    assert find("torchserve", "ConfigMap") == []  # the volume has config.properties
    assert served["args"] == [
        "torchserve",
        "--start",
        "--foreground",
        "--model-store",
        "/home/model-server/shared/model-store",
        "--ts-config",
        "/home/model-server/shared/config/config.properties",
    ]


def test_a_size_makes_a_claim_that_outlives_the_release(find):
    (claim,) = find("readme", "PersistentVolumeClaim")
    assert claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    volumes = pod(find, "readme")["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    assert container_of(find, "readme")["resources"] == {
        "limits": {"cpu": 1, "memory": "4Gi", "nvidia.com/gpu": 1},
        "requests": {"memory": "1Gi"},
    }


# What is new


def run_pod(find: Find, case: str, container: Container) -> dict[str, Any]:
    """Run a pod as it is rendered, its files where it mounts them; returns its container."""
    make_archive(container.store, HANDLERS / "lab.py", "lab").chmod(0o644)
    served = container_of(find, case)
    mounts = {mount["name"]: mount["mountPath"] for mount in served["volumeMounts"]}
    maps = {each["metadata"]["name"]: each["data"] for each in find(case, "ConfigMap")}
    for volume in pod(find, case)["spec"]["volumes"]:
        for name, text in maps.get(volume.get("configMap", {}).get("name"), {}).items():
            container.files[f"{mounts[volume['name']]}/{name}"] = text
        if "secret" in volume:
            for kind in ("inference", "management"):
                container.files[f"{mounts[volume['name']]}/{kind}"] = f"the-key-for-{kind}"
    variables = {each["name"]: each["value"] for each in served["env"]}
    # The image's ENTRYPOINT takes a line for the shell.
    container.run(f"cd {served['workingDir']} && {shlex.join(served['args'])}", **variables)
    container.wait_ready()
    return served


@pytest.mark.parametrize("case", ["run", "run from a volume"])
def test_a_pod_runs_and_its_probes_are_answered(case, find, container):
    if case == "run from a volume":
        container.files[f"{HOME}/config/config.properties"] = VOLUME
    served = run_pod(find, case, container)
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = served[kind]["httpGet"]["path"]
        status, text = container.ask("GET", path)
        assert status == 200, (path, text)
    assert container.ask("GET", "/ping")[0] == 400  # it wants a key
    for port in ("8081", "8082", "7070"):
        probe = container.execute("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}")
        assert probe.returncode == 0
    status, page = container.ask("GET", "/metrics", port=8082)
    assert (status, 'marserve_ready_workers{model_name="lab"' in page) == (200, True)
    keys = container.execute("cat", f"{served['workingDir']}/key_file.json")
    assert (keys.returncode == 0) == (case == "run from a volume")
    # As the kubelet ends it: the hook, whose program has to be there, then the signal
    hook, _seconds = served["lifecycle"]["preStop"]["exec"]["command"]
    assert container.execute(hook, "0").returncode == 0
    container.send()
    assert container.wait() == 0


def test_values_become_config_properties(find, report):
    assert properties(find, "configured") == {
        "inference_address": "https://0.0.0.0:9080",
        "preload_modules": "torch,torchvision",
        "management_address": "http://0.0.0.0:8081",
        "metrics_address": "http://0.0.0.0:8082",
        "grpc_inference_address": "0.0.0.0",
        "grpc_inference_port": "7070",
        "metrics_mode": "prometheus",
        "model_store": "/models/model-store",
        "load_models": "all",
        "disable_token_authorization": "true",
        "max_request_size": "65536000",
        "lame_duck_seconds": "2.5",
        "drain_timeout": "60",
        "decode_input_request": "false",
        "models": '{"digits":{"1.0":{"batchSize":8}}}',
    }
    told = report["rendered"]["configured"]["notes"]
    assert "config.properties of efs-claim is not read" in told
    assert "load_models" not in properties(find, "a snapshot")
    schemes = {
        case: container_of(find, case)["livenessProbe"]["httpGet"]["scheme"]
        for case in ("defaults", "configured")
    }
    assert schemes == {"defaults": "HTTP", "configured": "HTTPS"}
    checksums = {pod(find, c)["metadata"]["annotations"]["checksum/config"] for c in CASES}
    assert len(checksums) > 2


def test_a_pod_may_finish_what_it_has_accepted(find):
    # preStop, lame_duck_seconds, drain_timeout, stop_grace, and 10 s for the end by force
    assert pod(find, "defaults")["spec"]["terminationGracePeriodSeconds"] == 10 + 0 + 30 + 20 + 10
    assert pod(find, "configured")["spec"]["terminationGracePeriodSeconds"] == 10 + 3 + 60 + 20 + 10
    stop = container_of(find, "defaults")["lifecycle"]["preStop"]
    assert stop == {"exec": {"command": ["sleep", "10"]}}


def test_probes_need_no_token(find):
    def paths(case):
        served = container_of(find, case)
        kinds = ("startupProbe", "readinessProbe", "livenessProbe")
        return [served[kind]["httpGet"]["path"] for kind in kinds]

    assert paths("defaults") == ["/ping", "/ready", "/ping"]
    assert properties(find, "defaults")["disable_token_authorization"] == "true"
    open_to_all = ["/api-description", "/ready", "/api-description"]
    assert properties(find, "everything")["token_directory"] == "/home/model-server/tokens"
    assert "disable_token_authorization" not in properties(find, "everything")
    assert paths("everything") == open_to_all
    assert paths("tokens of each pod") == open_to_all
    assert paths("torchserve") == open_to_all  # what the file of the volume says is not known


def test_a_catalog_can_lie_in_the_chart_in_a_map_or_in_a_bucket(find):
    inside = properties(find, "everything")
    assert inside["model_catalog"] == "/home/model-server/catalog/catalog.json"
    assert "load_models" not in inside
    (text,) = (
        each["data"]["catalog.json"]
        for each in find("everything", "ConfigMap")
        if "catalog.json" in each["data"]
    )
    assert json.loads(text) == CATALOG
    assert properties(find, "a catalog elsewhere")["model_catalog"] == inside["model_catalog"]
    assert properties(find, "bucket")["model_catalog"] == "s3://bucket/catalog.json"


def test_the_number_of_pods_follows_the_queue(find):
    (scaler,) = find("everything", "HorizontalPodAutoscaler")
    assert "replicas" not in find("everything", "Deployment")[0]["spec"]
    targets = {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert targets == {"marserve_queued_requests": "5", "marserve_open_requests": "20"}
    (scaled,) = find("keda", "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == "5"
    assert "marserve_queued_requests{" in trigger["metadata"]["query"]
    assert find("keda", "HorizontalPodAutoscaler") == []  # KEDA makes its own


def test_sequences_stick_to_a_pod(find):
    plain, sequences = find("everything", "Ingress")
    key = "nginx.ingress.kubernetes.io/upstream-hash-by"
    assert key not in plain["metadata"]["annotations"]
    assert sequences["metadata"]["annotations"][key] == "$http_ts_request_sequence_id"
    (path,) = sequences["spec"]["rules"][0]["http"]["paths"]
    assert path["path"] == "/predictions/chat"
    (rule,) = find("everything", "DestinationRule")
    hashed = rule["spec"]["trafficPolicy"]["loadBalancer"]["consistentHash"]
    assert hashed == {"httpHeaderName": "ts_request_sequence_id"}


def test_management_is_for_few(find):
    service = next(s for s in find("everything", "Service") if "clusterIP" not in s["spec"])
    assert "mdl" not in {port["name"] for port in service["spec"]["ports"]}
    (policy,) = find("everything", "NetworkPolicy")
    rules = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
    assert rules["ts"] is None
    assert rules["ts-management"] == [{"podSelector": {"matchLabels": {"app": "operator"}}}]


def test_monitoring_is_that_of_deploy_monitoring(find, report):
    (rule,) = find("everything", "PrometheusRule")
    rules = RULES.read_text().replace("docs/monitoring.md#", "https://docs.test/monitoring.html#")
    assert rule["spec"] == yaml.safe_load(rules)
    maps = {name: text for m in find("everything", "ConfigMap") for name, text in m["data"].items()}
    for board in DASHBOARDS:
        assert json.loads(maps[board.name]) == json.loads(board.read_text())
    (monitor,) = find("everything", "ServiceMonitor")
    (end,) = monitor["spec"]["endpoints"]
    assert end["relabelings"] == [{"targetLabel": "job", "replacement": "marserve"}]
    with tarfile.open(report["package"]) as package:
        packed = package.getnames()
    assert {f"marserve/files/dashboards/{board.name}" for board in DASHBOARDS} <= set(packed)
