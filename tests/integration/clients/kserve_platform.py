"""KServe's own clients ask a server on its platform, at its ports; `test_kserve_platform`.

Called with the protocol, v1 or v2; fails where an answer is not as it was with KServe's wrapper.
"""

import asyncio
import sys

import numpy as np
from kserve import (
    InferenceGRPCClient,
    InferenceRESTClient,
    InferInput,
    InferRequest,
    RESTConfig,
)

BASE = "http://127.0.0.1:8080"
TENSOR = np.float32([0, 1, 0])


async def ask_v1():
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    assert await client.is_server_live(BASE)
    assert await client.is_model_ready(BASE, "digits")
    answer = await client.infer(BASE, {"instances": [{"data": [0, 0, 5]}]}, model_name="digits")
    assert answer == {"predictions": [2]}, answer
    answer = await client.explain(BASE, "digits", {"instances": [{"data": [3, 0, 5]}]})
    assert answer == {"explanations": [[3, 0, 5]]}, answer
    await client.close()


async def ask_v2():
    tensor = InferInput("input-0", list(TENSOR.shape), "FP32")
    tensor.set_data_from_numpy(TENSOR, binary_data=False)
    request = InferRequest(model_name="digits", infer_inputs=[tensor], request_id="7")
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(BASE)
    assert await client.is_server_ready(BASE)
    assert await client.is_model_ready(BASE, "digits")
    check(await client.infer(BASE, request, model_name="digits"))
    await client.close()
    async with InferenceGRPCClient("127.0.0.1:8081", timeout=20) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("digits")
        check(await client.infer(request))


def check(answer):
    (output,) = answer.outputs
    assert (answer.id, answer.model_name) == ("7", "digits"), answer
    assert (output.name, output.datatype, list(output.shape)) == ("input-0", "INT64", [1]), output
    assert output.as_numpy().tolist() == [1], output


asyncio.run({"v1": ask_v1, "v2": ask_v2}[sys.argv[1]]())
