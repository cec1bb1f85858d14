"""From the command line to the exit status, without a server."""

import pytest

from marserve.tools.bench.main import main


@pytest.mark.parametrize("percentile", ["0", "100"])
def test_a_percentile_that_is_no_goal_is_told(percentile, capsys):
    url = ("--url", "http://127.0.0.1:1")  # nobody is there to measure
    assert main(["m", "--tune", "50", "--percentile", percentile, *url]) == 1
    output = capsys.readouterr().err
    assert f"above 0 and below 100 %, not {percentile}." in output
