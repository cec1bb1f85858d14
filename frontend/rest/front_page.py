"""What a browser shows of a listener: who serves here, and where to go on."""

from collections.abc import Mapping, Sequence
from html import escape

from marserve.frontend.version import __version__

_LINKS = {
    "Inference": {
        "/ping": "whether it is healthy",
        "/ready": "whether every model can answer now",
    },
    "Management": {
        "/models": "the models",
        "/loggers": "the loggers and their levels",
    },
    "Metrics": {"/metrics": "the metrics, for Prometheus"},
}
_EVERYWHERE = {"/api-description": "the API of this address, as an OpenAPI document"}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>marserve</title>
<style>body {{ font: 16px/1.5 sans-serif; margin: 3em auto; max-width: 40em }}</style>
<h1>marserve {version}</h1>
<p>A model server for TorchServe's archives and clients. This address serves {serves}.</p>
<ul>
{links}</ul>
</html>
"""


def front_page(serves: Sequence[str], version: str = __version__) -> str:
    """The page of a listener.

    Args:
        serves: Of "Inference", "Management" and "Metrics" those that it serves.
        version: The server's.
    """
    links: dict[str, str] = dict(_EVERYWHERE)
    for one in serves:
        links |= _LINKS[one]
    return _PAGE.format(
        version=escape(version), serves=" and ".join(serves).lower(), links=_items(links)
    )


def _items(links: Mapping[str, str]) -> str:
    return "".join(
        f'<li><a href="{path}">{path}</a>: {what}</li>\n' for path, what in links.items()
    )
