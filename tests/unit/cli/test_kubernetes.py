"""deploy/kubernetes: what is applied fits the schemas of its kinds, and the server that it starts.

Schemas refuse unknown fields and values of other types (tests/fixtures/kubernetes/README.md says
whose they are). `faults` says what they cannot: that the command is one that `freight` takes, and
that ports, paths, labels, names, times and metrics are those of the server and of each other. Every
check is shown to find the mistake that it is there for.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from tests.unit.cli.conftest import Answer

from freight.errors import ConfigError
from freight.serve.app import OPEN_PATHS
from freight.serve.page import PAGE
from freight.serve.transport.auth import Keys, check_binding

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "kubernetes"
SCHEMAS = ROOT / "tests" / "fixtures" / "kubernetes"
SCALE_OUT = ROOT / "docs" / "scale-out.md"
Document = dict[str, Any]
Serve = Callable[[list[str]], dict[str, Any]]

# seconds that the server may take once answers have ended: the last events of streams
# (`serving._FLUSH`), then an engine that does not leave by itself (`EngineClient.stop`)
TO_END = 11
PICKED_BY = {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"}


# -----------------------------------------------------------------------------------------------
# what is applied


def read(path: Path) -> Document:
    document: Document = yaml.safe_load(path.read_text())
    return document


def merged(value: Any, patch: Any) -> Any:
    """A strategic merge, as far as ours need one: lists of things with names by name, others whole."""
    if isinstance(value, dict) and isinstance(patch, dict):
        return value | {key: merged(value.get(key), part) for key, part in patch.items()}
    if isinstance(value, list) and all(isinstance(part, dict) and "name" in part for part in patch):
        parts = {part["name"]: part for part in value}
        for part in patch:
            parts[part["name"]] = merged(parts.get(part["name"]), part)
        return list(parts.values())
    return patch


def rendered(*components: str) -> list[Document]:
    """What `kubectl kustomize` makes of the base and these components, without names of images."""
    base = DEPLOY / "base"
    documents = [read(base / name) for name in read(base / "kustomization.yaml")["resources"]]
    for component in components:
        folder = DEPLOY / component
        listed = read(folder / "kustomization.yaml")
        documents += [read(folder / name) for name in listed.get("resources", ())]
        for patch in (read(folder / entry["path"]) for entry in listed.get("patches", ())):
            (target,) = [
                number
                for number, document in enumerate(documents)
                if (document["kind"], document["metadata"]["name"])
                == (patch["kind"], patch["metadata"]["name"])
            ]
            documents[target] = merged(documents[target], patch)
    return documents


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


# -----------------------------------------------------------------------------------------------
# schemas


@cache
def validators() -> dict[tuple[str, str], Any]:
    """By apiVersion and kind."""
    found = {}
    for path in sorted(SCHEMAS.glob("*.json")):
        given = json.loads(path.read_text())
        for api_version, kinds in given["kinds"].items():
            for kind, name in kinds.items():
                schema = {"$ref": f"#/$defs/{name}", "$defs": given["$defs"]}
                found[api_version, kind] = jsonschema_rs.Draft202012Validator(schema)
    return found


def unfit(document: Document) -> Iterator[str]:
    """What the schema of a document's kind has against it."""
    version, kind = document.get("apiVersion", ""), document.get("kind", "")
    if (version, kind) not in validators():
        yield f"{version} {kind}: there is no schema of this kind"
        return
    for error in validators()[version, kind].iter_errors(document):
        yield f"{kind} {'.'.join(map(str, error.instance_path))}: {error.message}"


# -----------------------------------------------------------------------------------------------
# what schemas cannot say


def faults(documents: list[Document], serve: Serve) -> list[str]:
    """What is wrong with documents that are applied together."""
    found = [fault for document in documents for fault in unfit(document)]
    if found:
        return found  # what follows reads fields of the right types
    (deployment,) = of_kind(documents, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = serve([*container["command"], *container["args"]])
    if "error" in options:
        return [f"args: {options['error']}"]
    return [
        *_faults_of_address(deployment, container, options),
        *_faults_of_probes(container, options),
        *_faults_of_the_end(deployment, container, options),
        *_faults_of_cores(container),
        *_faults_of_labels(documents, deployment, options),
        *_faults_of_ports(documents, container, options),
        *_faults_of_names(documents),
        *_faults_of_scaling(documents, options),
    ]


def _faults_of_address(
    deployment: Document, container: Document, options: dict[str, Any]
) -> Iterator[str]:
    if options["host"] not in ("0.0.0.0", "::"):
        yield f"--host {options['host']}: no other pod reaches it"
    try:
        check_binding(options["host"], Keys.read((), (), False), options["insecure"])
    except ConfigError as error:
        yield str(error)  # the secret with a key is optional
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    if ports != {"http": options["port"]}:
        yield f"ports {ports}: the server listens on {options['port']}"
    scraped = deployment["spec"]["template"]["metadata"]["annotations"]
    if (scraped["prometheus.io/port"], scraped["prometheus.io/path"]) != (
        str(options["port"]),
        "/metrics",
    ):
        yield f"annotations {scraped}: metrics are at /metrics of port {options['port']}"


def _faults_of_probes(container: Document, options: dict[str, Any]) -> Iterator[str]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[name]["httpGet"]
        if asked["port"] not in ("http", options["port"]):
            yield f"{name}: port {asked['port']} is not the server's"
        # the page is open too, and has status 200 while the model loads
        if asked["path"] not in OPEN_PATHS - set(PAGE):
            yield f"{name}: {asked['path']} needs a key, or says nothing about the model"
    if container["readinessProbe"].get("failureThreshold", 3) != 1:
        yield "readinessProbe: a pod that drains gets requests until the last failure"
    startup = container["startupProbe"]
    if startup["periodSeconds"] * startup["failureThreshold"] < 600:
        yield "startupProbe: a large model takes longer to load"
    if options["restart_engine"]:
        yield "--restart-engine: livenessProbe ends the server while the new engine loads"


def _faults_of_the_end(
    deployment: Document, container: Document, options: dict[str, Any]
) -> Iterator[str]:
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    slept = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = slept + options["drain_timeout"] + TO_END
    if grace <= needed:
        yield f"terminationGracePeriodSeconds {grace}: to end may take {needed:g}"
    probe = container["readinessProbe"]
    if slept < probe["periodSeconds"] + probe["timeoutSeconds"]:
        yield f"preStop sleeps {slept} s: requests may still be sent to this pod after it"


def _faults_of_cores(container: Document) -> Iterator[str]:
    limits = container["resources"]["limits"]
    if not str(limits["cpu"]).isdigit():
        yield f"cpu {limits['cpu']}: a thread needs a whole core"
    if container["resources"].get("requests", limits) != limits:
        yield "requests differ from limits: the pod gets no cores of its own"


def _faults_of_labels(
    documents: list[Document], deployment: Document, options: dict[str, Any]
) -> Iterator[str]:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = {"Deployment": deployment["spec"]["selector"]["matchLabels"]}
    selectors |= {one["kind"]: one["spec"]["selector"] for one in of_kind(documents, "Service")}
    for pool in of_kind(documents, "InferencePool"):
        selectors["InferencePool"] = pool["spec"]["selector"]["matchLabels"]
    for kind, selector in selectors.items():
        if not selector.items() <= labels.items():
            yield f"{kind}: its selector {selector} takes no pod, whose labels are {labels}"
    wanted = {
        "llm-d.ai/inference-serving": "true",
        "llm-d.ai/model": options["names"][0],
        "llm-d.ai/role": "prefill-decode",
        "llm-d.ai/engine-type": "vllm",
    }
    if not wanted.items() <= labels.items():
        yield f"labels {labels}: llm-d reads {wanted}"


def _faults_of_ports(
    documents: list[Document], container: Document, options: dict[str, Any]
) -> Iterator[str]:
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    for service in of_kind(documents, "Service"):
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if named.get(target, target) != options["port"]:
                yield f"Service: port {target} is not the server's {options['port']}"
    for pool in of_kind(documents, "InferencePool"):
        targets = [port["number"] for port in pool["spec"]["targetPorts"]]
        if targets != [options["port"]]:
            yield f"InferencePool: ports {targets} are not the server's {options['port']}"


def _faults_of_names(documents: list[Document]) -> Iterator[str]:
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for route in of_kind(documents, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                if (backend["kind"], backend["name"]) not in names:
                    yield f"HTTPRoute: there is no {backend['kind']} {backend['name']}"
    for scaler in of_kind(documents, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) not in names:
            yield f"HorizontalPodAutoscaler: there is no {target['kind']} {target['name']}"


def _faults_of_scaling(documents: list[Document], options: dict[str, Any]) -> Iterator[str]:
    for scaler in of_kind(documents, "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            name = metric["pods"]["metric"]["name"]
            series = adapted().get(name)
            if series is None:
                yield f"HorizontalPodAutoscaler: no rule of the adapter makes {name}"
            most = float(metric["pods"]["target"]["averageValue"])
            if series == "vllm:num_requests_running" and most >= options["max_num_seqs"]:
                yield f"HorizontalPodAutoscaler: a pod never runs more than {most:g} sequences"


# -----------------------------------------------------------------------------------------------
# metrics


def exported() -> set[str]:
    """The server's series: docs/metrics.md, which test_metrics.py holds to the server."""
    table = (ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


def adapted() -> dict[str, str]:
    """Series by the names that Prometheus' adapter gives them."""
    rules = read(DEPLOY / "autoscale" / "prometheus-adapter-values.yaml")["rules"]["custom"]
    made = {}
    for rule in rules:
        asked = re.fullmatch(r'\{__name__=~"([^"]+)",.*\}', rule["seriesQuery"])
        assert asked, rule
        assert {"namespace", "pod"} == set(rule["resources"]["overrides"])  # type Pods needs both
        name = rule["name"]["as"].replace("$", "\\")  # Go's $1 is Python's \1
        for series in filter(re.compile(asked[1]).search, exported()):
            made[re.sub(rule["name"]["matches"], name, series)] = series
    return made


def test_the_adapter_reads_series_of_the_server() -> None:
    assert adapted() == {
        f"vllm_num_requests_{state}": f"vllm:num_requests_{state}"
        for state in ("waiting", "running")
    }


def test_the_page_names_series_of_the_server() -> None:
    series = set(re.findall(r"`((?:vllm|freight):[a-z_]+)", SCALE_OUT.read_text()))
    assert series <= exported()
    assert {f"vllm:{name}" for name in PICKED_BY} <= series


# -----------------------------------------------------------------------------------------------
# ours, and what would be wrong with them


@pytest.fixture
def serve(freight: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """The settings of the server that a command starts, or its `error`. None is started."""
    asked: list[dict[str, Any]] = []

    def run(settings: Any, options: Any) -> int:
        asked.append(vars(settings) | options.engine_args)
        return 0

    monkeypatch.setattr("freight.serve.lifecycle.run", run)

    def served(command: list[str]) -> dict[str, Any]:
        if command[:2] != ["freight", "serve"]:
            return {"error": f"{command[:2]} is not freight serve"}
        answer = freight(*command[1:])
        return asked[-1] if answer.code == 0 else {"error": answer.err}

    return served


PARTS = [(), ("autoscale",), ("gateway",), ("gpu",), ("autoscale", "gateway", "gpu")]


@pytest.mark.parametrize("components", PARTS, ids="+".join)
def test_what_is_applied_has_no_fault(components: tuple[str, ...], serve: Serve) -> None:
    assert faults(rendered(*components), serve) == []


def test_every_file_is_listed() -> None:
    listed = {DEPLOY / "kustomization.yaml"}
    for path in DEPLOY.glob("*/kustomization.yaml"):
        given = read(path)
        files = [*given.get("resources", ()), *(one["path"] for one in given.get("patches", ()))]
        listed |= {path, *(path.parent / name for name in files)}
    listed.add(DEPLOY / "autoscale" / "prometheus-adapter-values.yaml")  # of a chart
    assert listed == set(DEPLOY.rglob("*.yaml"))
    top = read(DEPLOY / "kustomization.yaml")
    assert all((DEPLOY / name).is_dir() for name in [*top["resources"], *top["components"]])


def test_the_gpu_variant_says_that_it_was_not_run() -> None:
    assert "never run" in (DEPLOY / "gpu" / "kustomization.yaml").read_text()


CONTAINER = "Deployment.spec.template.spec.containers.0"
MISTAKES: list[tuple[str, Any, str]] = [  # where, what is put there, what is said of it
    # schemas
    (f"{CONTAINER}.readinessprobe", {}, "readinessprobe"),
    (f"{CONTAINER}.resources.limit", {}, "limit"),
    (f"{CONTAINER}.readinessProbe.periodSeconds", "2", "periodSeconds"),
    (f"{CONTAINER}.name", None, "name"),
    ("Deployment.apiVersion", "apps/v1beta1", "no schema"),
    ("Deployment.metadata.label", {}, "label"),
    ("Deployment.spec.replica", 2, "replica"),
    ("Service.spec.ports.0.targetport", 8000, "targetport"),
    ("HorizontalPodAutoscaler.apiVersion", "autoscaling/v2beta2", "no schema"),
    ("HorizontalPodAutoscaler.spec.maxReplicas", None, "maxReplicas"),
    ("HorizontalPodAutoscaler.spec.metrics.0.pods.target.averageValues", "4", "averageValues"),
    ("InferencePool.spec.targetPorts", [], "targetPorts"),
    ("InferencePool.spec.targetPortNumber", 8000, "targetPortNumber"),  # of v1alpha2
    ("InferencePool.spec.extensionRef", {"name": "freight-epp"}, "extensionRef"),  # of v1alpha2
    ("InferencePool.spec.endpointPickerRef.failureMode", "FailSafe", "FailSafe"),
    ("InferencePool.metadata.label", {}, "label"),
    ("HTTPRoute.spec.rules.0.matches.0.path.type", "Prefix", "Prefix"),
    ("HTTPRoute.spec.rules.0.timeouts.request", "0", "request"),
    ("HTTPRoute.spec.rules.0.backendRef", [], "backendRef"),
    # the server
    (f"{CONTAINER}.command", ["vllm", "serve"], "is not freight serve"),
    (f"{CONTAINER}.args.1", "--kv-cache-type=fp8", "--kv-cache-type"),
    (f"{CONTAINER}.args.2", "--kv-cache-memory=6G", "6G"),
    (f"{CONTAINER}.args.4", "--host=127.0.0.1", "no other pod"),
    (f"{CONTAINER}.args.5", "--port=8080", "listens on 8080"),
    (f"{CONTAINER}.args.6", "--log-format=text", "no key is set"),
    (f"{CONTAINER}.args.3", "--served-model-name=other", "llm-d reads"),
    (f"{CONTAINER}.args.8", "--restart-engine", "livenessProbe ends the server"),
    (f"{CONTAINER}.ports.0.containerPort", 8080, "listens on 8000"),
    (f"{CONTAINER}.ports.0.name", "web", "ports"),
    (f"{CONTAINER}.startupProbe.httpGet.path", "/healthz", "/healthz needs a key"),
    (f"{CONTAINER}.startupProbe.failureThreshold", 3, "takes longer to load"),
    (f"{CONTAINER}.readinessProbe.httpGet.path", "/", "says nothing about the model"),
    (f"{CONTAINER}.readinessProbe.failureThreshold", 3, "a pod that drains"),
    (f"{CONTAINER}.livenessProbe.httpGet.port", 8080, "port 8080 is not the server's"),
    (f"{CONTAINER}.lifecycle.preStop.sleep.seconds", 60, "to end may take 131"),
    (f"{CONTAINER}.lifecycle.preStop.sleep.seconds", 1, "may still be sent"),
    (f"{CONTAINER}.args.7", "--drain-timeout=80", "to end may take 101"),
    ("Deployment.spec.template.spec.terminationGracePeriodSeconds", 30, "may take 81"),
    (f"{CONTAINER}.resources.limits.cpu", "7500m", "a whole core"),
    (f"{CONTAINER}.resources.requests", {"cpu": "4", "memory": "16Gi"}, "cores of its own"),
    # each other
    ("Deployment.spec.selector.matchLabels", {"app": "freight"}, "Deployment: its selector"),
    ("Service.spec.selector", {"app": "freight"}, "Service: its selector"),
    ("InferencePool.spec.selector.matchLabels", {"app": "vllm"}, "InferencePool: its selector"),
    ("Deployment.spec.template.metadata.labels", {"app.kubernetes.io/name": "freight"}, "llm-d"),
    ("Deployment.spec.template.metadata.annotations.prometheus.io/port", "80", "metrics are at"),
    ("Service.spec.ports.0.targetPort", 80, "Service: port 80"),
    ("Service.spec.ports.0.targetPort", "web", "Service: port web"),
    ("InferencePool.spec.targetPorts.0.number", 80, "InferencePool: ports [80]"),
    ("HTTPRoute.spec.rules.0.backendRefs.0.name", "other", "no InferencePool other"),
    ("HorizontalPodAutoscaler.spec.scaleTargetRef.name", "other", "no Deployment other"),
    (
        "HorizontalPodAutoscaler.spec.metrics.0.pods.metric.name",
        "vllm:num_requests_waiting",
        "no rule of the adapter",
    ),
    (
        "HorizontalPodAutoscaler.spec.metrics.1.pods.target.averageValue",
        "64",
        "never runs more than 64",
    ),
]


def changed(documents: list[Document], where: str, value: Any) -> list[Document]:
    """The documents with `value` at a place; None takes it out."""
    documents = copy.deepcopy(documents)
    kind, _, path = where.partition(".")
    (place,) = of_kind(documents, kind)
    # names of labels and annotations have dots and a slash
    *steps, last = re.findall(r"[^./]+\.[^./]+/[^.]+|[^.]+", path)
    inside: Any = place
    for step in steps:
        inside = inside[int(step)] if isinstance(inside, list) else inside[step]
    if isinstance(inside, list):
        inside[int(last)] = value
    elif value is None:
        del inside[last]
    else:
        inside[last] = value
    return documents


@pytest.mark.parametrize(("where", "value", "said"), MISTAKES)
def test_a_mistake_is_found(where: str, value: Any, said: str, serve: Serve) -> None:
    given = rendered("autoscale", "gateway")
    found = faults(changed(given, where, value), serve)
    assert any(said in fault for fault in found), found


def test_the_gpu_variant_is_checked_as_well(serve: Serve) -> None:
    given = changed(rendered("gpu"), f"{CONTAINER}.args.2", "--kv-cache-type=fp8")
    assert "--kv-cache-type" in faults(given, serve)[0]
