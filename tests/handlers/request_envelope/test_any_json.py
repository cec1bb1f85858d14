"""Any JSON in an envelope is answered with 200, or with 400 and the reason."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marserve.handlers.request_envelope.json import JSONEnvelope
from marserve.handlers.request_envelope.kserve import KServeEnvelope
from marserve.handlers.request_envelope.kservev2 import KServev2Envelope

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
) | st.sampled_from(["FP32", "BYTES", "INT64", "eA==", 2**63, 10**400])
VALUES: Any = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
PARAMETERS = VALUES | st.fixed_dictionaries(
    {}, optional={"binary_data_size": VALUES, "binary_data": VALUES, "binary_data_output": VALUES}
)
TENSORS = VALUES | st.fixed_dictionaries(
    {"name": VALUES, "datatype": VALUES | st.sampled_from(["FP32", "BYTES"]), "shape": VALUES},
    optional={"data": VALUES, "parameters": PARAMETERS},
)
INSTANCES = VALUES | st.fixed_dictionaries({"b64": VALUES}) | st.dictionaries(st.text(), VALUES)
BODIES = VALUES | st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "inputs": VALUES | st.lists(TENSORS, max_size=3),
        "outputs": VALUES | st.lists(TENSORS, max_size=3),
        "parameters": PARAMETERS,
        "instances": VALUES | st.lists(INSTANCES, max_size=3),
    },
)


@pytest.mark.parametrize("envelope", [JSONEnvelope, KServeEnvelope, KServev2Envelope])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(bodies=st.lists(BODIES, min_size=1, max_size=3))
def test_any_json_is_answered_with_200_or_400(ask, envelope, bodies):
    rows = [{"body": body} for body in bodies]
    answers, _, context = ask(envelope, *rows, handler=lambda data: [1] * len(data))
    assert len(answers) == len(bodies)
    for index in range(len(bodies)):
        assert context.get_response_status(index)[0] in (200, 400)
