"""The rules of `marserve doctor`."""

from marserve.tools.doctor.comparison.answers import RULES as COMPARISON_RULES
from marserve.tools.doctor.rules import RULES
from reference.markdown import code, table


def doctor_rules() -> str:
    """Each rule of the doctor with its level, its subject and the page about it."""
    rows = (
        (code(name), rule.level.value, rule.meaning, _page(rule.link))
        for name, rule in RULES.items()
    )
    return table(["Rule", "Level", "About", "Page"], rows)


def comparison_rules() -> str:
    """Each rule of `--compare` with its level and its subject."""
    rows = ((code(name), level.value, about) for name, (level, about) in COMPARISON_RULES.items())
    return table(["Rule", "Level", "About"], rows)


def _page(link: str) -> str:
    """A link from this page to one that is named from the root of the repository."""
    if not link:
        return ""
    title = link.partition("#")[0].rpartition("/")[2].removesuffix(".md")
    return f"[{title}](../../{link})".replace("../../docs/", "../")
