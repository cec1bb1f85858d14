"""gRPC's server reflection: lists services, calls and messages for tools like grpcurl.

It returns the content of the .proto files and nothing of this server, so it needs no key. Without
the package ``grpcio-reflection`` the service is left out.
"""

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

from marserve.frontend.grpc.calls import Call, Service
from marserve.frontend.grpc.messages import POOL, Answers, Message


def reflection_services(services: Sequence[Service]) -> Sequence[Service]:
    """Return the service that describes others and itself; none if the package is missing."""
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2
    except ImportError:
        return ()
    POOL.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)
    descriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    names = [service.descriptor.full_name for service in services]
    servicer = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]
        [*names, descriptor.full_name], POOL
    )

    def answer(requests: AsyncIterator[Message], _call: Call) -> Answers:
        answers: Answers = servicer.ServerReflectionInfo(requests, None)
        return answers

    calls = SimpleNamespace(server_reflection_info=answer)
    return (Service(descriptor, calls, key=None),)
