"""Renders the chart by Helm's own engine, for `chart`; it runs where helm_python is installed.

Reads JSON, names to values; writes for each the documents, or the error; and what Helm's linter and
Kubernetes' schemas have to say.
"""

import json
import sys
from pathlib import Path

import helm_python
import kubernetes_validate
import yaml

# The oldest and the newest that kubernetes-validate has schemas of.
VERSIONS = ("1.28", "1.37")
# Of operators, which bring their own schemas.
FOREIGN = ("monitoring.coreos.com/", "keda.sh/", "networking.istio.io/")


def render(chart: helm_python.Chart, values: dict) -> dict:
    try:
        chart.validate_schema(values)
        files = chart.render(values, name="release", namespace="models")
    except helm_python.HelmError as error:
        return {"error": str(error), "documents": []}
    notes = "".join(files.pop(name) for name in list(files) if name.endswith("NOTES.txt"))
    texts = "\n---\n".join(files.values())
    documents = [document for document in yaml.safe_load_all(texts) if document]
    findings = []
    for document in documents:
        if not document["apiVersion"].startswith(FOREIGN):
            findings += [finding for version in VERSIONS if (finding := check(document, version))]
    return {"error": None, "notes": notes, "documents": documents, "findings": findings}


def check(document: dict, version: str) -> str:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except (
        kubernetes_validate.ValidationError,
        kubernetes_validate.SchemaNotFoundError,
    ) as error:
        return f"{version} {document['kind']}: {error}"
    return ""


def main() -> None:
    place, target = Path(sys.argv[1]), Path(sys.argv[2])
    cases = json.load(sys.stdin)
    with helm_python.Chart.load(str(place)) as chart:
        rendered = {name: render(chart, values) for name, values in cases.items()}
    linted = {
        name: helm_python.lint(str(place), values, strict=True)["messages"]
        for name, values in cases.items()
        if rendered[name]["error"] is None
    }
    package = helm_python.package(str(place), destination=str(target))
    json.dump({"rendered": rendered, "linted": linted, "package": str(package)}, sys.stdout)


main()
