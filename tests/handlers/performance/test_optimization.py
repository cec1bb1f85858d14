import re
from dataclasses import fields

import pytest
import torch

from marserve.backend.errors import OptionRefused
from marserve.frontend.configuration.unread_keys import YAML_SECTIONS
from marserve.handlers.performance.optimization import AccuracyGoal, Optimization, read_optimization


def test_the_section_is_optional():
    assert read_optimization({"pt2": {}}) is None


def test_an_empty_section_changes_nothing():
    assert read_optimization({"optimization": {}}) == Optimization()
    assert not Optimization().is_low


def test_all_options():
    section = {
        "precision": "bf16",
        "cast": "matmul",
        "channels_last": True,
        "fold_batch_norm": True,
        "device_stages": ["cpu", "cuda:1"],
        "check_accuracy": {"max_relative_error": 0.02, "min_agreement": 1, "samples": ["a.jpg"]},
    }
    found = read_optimization({"optimization": section})
    assert found == Optimization(
        precision="bf16",
        cast="matmul",
        channels_last=True,
        fold_batch_norm=True,
        device_stages=(torch.device("cpu"), torch.device("cuda:1")),
        check_accuracy=AccuracyGoal(max_relative_error=0.02, min_agreement=1.0, samples=("a.jpg",)),
    )
    assert found.described() == {
        **{key: value for key, value in section.items() if key != "check_accuracy"},
        "cuda_graphs": False,
    }


def test_a_number_is_the_relative_error():
    found = read_optimization({"optimization": {"check_accuracy": 0.01}})
    assert found is not None
    assert found.check_accuracy == AccuracyGoal(max_relative_error=0.01)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("bf16", "optimization takes a mapping of precision, cast"),
        ([], "optimization takes a mapping"),
        ({"precison": "bf16"}, "optimization has no 'precison'; it has precision, cast"),
        ({"precision": "int8"}, "optimization.precision is one of fp32, bf16, fp16, not 'int8'"),
        ({"precision": ["bf16"]}, "is one of fp32, bf16, fp16, not ['bf16']"),
        ({"cast": "some"}, "optimization.cast is one of all, matmul, not 'some'"),
        ({"cast": "matmul"}, "optimization.cast: matmul needs precision bf16 or fp16"),
        ({"channels_last": "yes"}, "optimization.channels_last takes true or false, not 'yes'"),
        ({"fold_batch_norm": 1}, "optimization.fold_batch_norm takes true or false, not 1"),
        ({"cuda_graphs": None}, "optimization.cuda_graphs takes true or false, not None"),
        ({"device_stages": "cuda:0"}, "device_stages takes a list of two or more devices"),
        ({"device_stages": ["cpu"]}, "device_stages takes a list of two or more devices"),
        ({"device_stages": ["cpu", "abacus"]}, "contains an unknown device"),
        ({"device_stages": ["cpu", {}]}, "contains an unknown device"),
        ({"check_accuracy": True}, "check_accuracy takes a number from 0 to 1, not True"),
        ({"check_accuracy": 2}, "check_accuracy takes a number from 0 to 1, not 2"),
        ({"check_accuracy": {}}, "check_accuracy needs max_relative_error or min_agreement"),
        ({"check_accuracy": {"samples": ["a"]}}, "needs max_relative_error or min_agreement"),
        ({"check_accuracy": {"min_agreement": "all"}}, "min_agreement takes a number from 0 to 1"),
        (
            {"check_accuracy": {"min_agreement": 1, "samples": "a"}},
            "check_accuracy.samples takes a list of files, not 'a'",
        ),
        ({"check_accuracy": {"max_error": 1}}, "check_accuracy has no 'max_error'; it has max_rel"),
        (
            {"cuda_graphs": True, "device_stages": ["cpu", "cpu"]},
            "cuda_graphs and device_stages exclude each other",
        ),
    ],
)
def test_wrong_sections_are_refused(section, sentence):
    with pytest.raises(OptionRefused, match=re.escape(sentence)):
        read_optimization({"optimization": section})


@pytest.mark.parametrize(
    ("path", "options"),
    [("optimization", Optimization), ("optimization.check_accuracy", AccuracyGoal)],
)
def test_the_server_knows_the_keys_of_the_section(path, options):
    """The frontend, which warns of other keys, imports no handlers and has a list of its own."""
    assert YAML_SECTIONS[path] == tuple(each.name for each in fields(options))
