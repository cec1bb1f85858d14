"""Chooses the platform of a server: ``--platform``, else the one that is detected."""

from collections.abc import Mapping

from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.platforms.kserve import KSERVE
from marserve.frontend.configuration.platforms.platform import (
    NONE,
    ChosenPlatform,
    Platform,
    Surroundings,
)
from marserve.frontend.configuration.platforms.sagemaker import SAGEMAKER
from marserve.frontend.configuration.platforms.vertex import VERTEX
from marserve.frontend.configuration.properties import ConfigError

#: All platforms, by name.
PLATFORMS: Mapping[str, Platform] = {each.name: each for each in (KSERVE, SAGEMAKER, VERTEX)}


def choose_platform(name: str | None, surroundings: Surroundings) -> ChosenPlatform:
    """Choose the named platform, or if the name is None the detected one, and compute its changes.

    Raises:
        ConfigError: There is no such platform.
    """
    if name == NONE:
        return ChosenPlatform(note=f"Platform: none (--platform {NONE}).")
    if name is not None and name not in PLATFORMS:
        raise ConfigError(f"--platform is {', '.join(PLATFORMS)} or {NONE}, not {name}")
    if name is not None:
        return _set_up(PLATFORMS[name], f"--platform {name}", surroundings)
    for platform in PLATFORMS.values():
        if evidence := platform.evidence(surroundings):
            return _set_up(platform, evidence, surroundings)
    return ChosenPlatform()


def _set_up(platform: Platform, evidence: str, surroundings: Surroundings) -> ChosenPlatform:
    setup = platform.set_up(surroundings)
    settings = surroundings.settings
    stronger = {"default": settings.keys(), "required": surroundings.decided, "forced": ()}
    changes = [
        change
        for change in setup.changes
        if settings.get(change.key, KEYS[change.key].default) != change.text
        and change.key not in stronger[change.strength]
    ]
    texts = {change.key: change.text for change in changes}
    sentences = [f"Platform: {platform.title} ({evidence})."]
    places = [each.url for each in (*setup.inference, *setup.grpc_inference)]
    if places:
        sentences.append(
            f"Inference is served at {' and '.join(places)} once every model is READY."
        )
    if setup.when_ready:
        sentences.append("Nobody is let in before every model is READY.")
    if changes:
        reasons = {change.key: change.reason for change in changes}
        changed = "; ".join(f"{key}={text}, {reasons[key]}" for key, text in texts.items())
        sentences.append(f"It sets {changed}.")
    if evidence != f"--platform {platform.name}":
        sentences.append(f"--platform {NONE} leaves all as it is configured.")
    return ChosenPlatform(platform.name, platform.title, setup, texts, " ".join(sentences))
