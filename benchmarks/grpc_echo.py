"""The floor under gRPC in Python: grpc.aio that answers each call with the bytes it got, on uvloop.

    python grpc_echo.py PORT

Nothing is decoded, nobody is asked, nothing is logged.
"""

import sys

import grpc
import uvloop
from grpc import aio

_SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"


async def echo(request: bytes, _context: aio.ServicerContext) -> bytes:
    """Answer with the message, as it came."""
    return request


async def serve(port: int) -> None:
    """Listen on loopback until killed."""
    server = aio.server(options=[("grpc.max_receive_message_length", -1)])
    methods = {"Predictions": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, methods)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
