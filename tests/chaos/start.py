"""What a server under test is started with."""

from pathlib import Path

from servers import make_engine_program

_INJECTED = Path(__file__).with_name("injected")


def injected_environment(folder: Path) -> dict[str, str]:
    """The environment that lets a run look inside; its files lie in the folder."""
    clock = folder / "clock"
    clock.write_bytes(bytes(8))
    engine_metrics, programs = folder / "engine_metrics", folder / "bin"
    engine_metrics.touch()
    programs.mkdir()
    return {
        "PATH": make_engine_program(programs),
        "STAND_IN_METRICS": str(engine_metrics),
        "PYTHONPATH": str(_INJECTED),
        "CHAOS_CLOCK": str(clock),
        "CHAOS_TASKS": str(folder / "tasks"),
    }
