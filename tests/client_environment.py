"""The clients of the Open Inference Protocol, which want an older protobuf than our tests."""

import pytest
from environments import environment


@pytest.fixture(scope="session")
def client_python():
    """Python of an environment with the clients."""
    return environment("clients", ["tritonclient[http,grpc]>=2.60", "kserve>=0.15"])
