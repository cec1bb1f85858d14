"""The clients of the package ``kserve`` ask a server, over REST and gRPC; see `checks`."""

import asyncio

import numpy as np
from checks import run_checks
from kserve import (
    InferenceGRPCClient,
    InferenceRESTClient,
    InferInput,
    InferRequest,
    RESTConfig,
)


def request_of(model, values, datatype="FP32", *, binary=True):
    given = InferInput(name="x", shape=list(values.shape), datatype=datatype)
    given.set_data_from_numpy(values, binary_data=binary)
    return InferRequest(model_name=model, infer_inputs=[given], request_id="7")


NUMBERS = np.float32([[1.5, -2.0]])
TEXTS = np.array([b"tabby", b"tiger"], object)


async def infer_all(infer):
    """Ask with raw and typed tensors, or with binary data and JSON."""
    for binary in (True, False):
        answer = await infer(request_of("echo-any", NUMBERS, binary=binary))
        assert answer.outputs[0].as_numpy().tolist() == NUMBERS.tolist()
        assert answer.outputs[0].name == "x"
        answer = await infer(request_of("plain-any", np.float32([1, 2]), binary=binary))
        assert answer.outputs[0].as_numpy().tolist() == [2.0, 4.0]
    answer = await infer(request_of("echo-any", TEXTS, "BYTES"))
    found = answer.outputs[0].as_numpy().tolist()  # texts, where they came as JSON
    assert [each.encode() if isinstance(each, str) else each for each in found] == TEXTS.tolist()
    return answer


def check_rest(inference):
    async def ask():
        base = f"http://{inference}"
        client = InferenceRESTClient(RESTConfig(protocol="v2"))
        try:
            assert await client.is_server_live(base)
            assert await client.is_server_ready(base)
            assert await client.is_model_ready(base, "echo")
            await infer_all(
                lambda request: client.infer(base, request, model_name=request.model_name)
            )
        finally:
            await client.close()

    asyncio.run(ask())


def check_grpc(grpc_inference):
    async def ask():
        async with InferenceGRPCClient(grpc_inference, timeout=20) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("echo")
            answer = await infer_all(client.infer)
            assert (answer.id, answer.model_name) == ("7", "echo-any")

    asyncio.run(ask())


if __name__ == "__main__":
    run_checks(globals(), None)
