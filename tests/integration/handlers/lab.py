"""Does what each request asks for; a request is a JSON object of orders.

Orders:
    id: Comes back in the answer.
    record: File to which the id is appended when the handler sees the request.
    gate: Named pipe to wait at.
    answer: What is answered; by default the id and the size of the batch.
    status, headers, type: Of the answer.
    do: A misdeed, see `MISDEEDS`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from ts.utils.util import PredictionException


def handle(data, context):
    if data is None:
        return None
    orders = [row["body"] for row in data]
    for order in orders:
        _begin(order)
    answers = [_answer(order, index, context, len(data)) for index, order in enumerate(orders)]
    for order in orders:
        if "do" in order:
            answers = MISDEEDS[order["do"]](order, answers)
    return answers


def _begin(order):
    if "record" in order:
        with Path(order["record"]).open("a") as file:
            file.write(f"{order['id']}\n")
    if "gate" in order:
        Path(order["gate"]).read_text()


def _answer(order, index, context, size):
    if "status" in order:
        context.set_response_status(*order["status"], idx=index)
    for name, value in order.get("headers", {}).items():
        context.set_response_header(index, name, value)
    if "type" in order:
        context.set_response_content_type(index, order["type"])
    return order.get("answer", {"id": order.get("id"), "batch": size})


def _raise(order, answers):
    raise ValueError("the secret of the handler")


def _refuse(order, answers):
    raise PredictionException(order["message"], order["code"])


def _run_out_of_memory(order, answers):
    raise MemoryError


def _run_out_of_gpu_memory(order, answers):
    if len(answers) > order["most"]:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return answers


def _hang(order, answers):
    while True:
        signal.pause()


def _leave_child(order, answers):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    child.returncode = 0  # it is not waited for, and nobody is to complain
    return [{"child": child.pid, "worker": os.getpid()}] * len(answers)


def _print_garbage(order, answers):
    os.write(1, b"binary \xff\xfe\x00\x01 on stdout\n")
    os.write(2, b"binary \x80\x81 on stderr\n")
    os.write(1, b"endless" * 100_000)
    print("\n[METRICS]Nonsense.ms:|#|#hostname:,x", flush=True)
    print("[METRICS]HandlerTime.ms:1.0|#ModelName:lab,Level:Model|#type:GAUGE|#hostname:h,1")
    print("[PID]1\nTorch worker started.\n\x1b[31mred\x1b[0m")
    print("the last of the garbage")
    return answers


MISDEEDS = {
    "raise": _raise,
    "refuse": _refuse,
    "memory": _run_out_of_memory,
    "gpu memory": _run_out_of_gpu_memory,
    "hang": _hang,
    "child": _leave_child,
    "garbage": _print_garbage,
    "sys.exit": lambda order, answers: sys.exit(0),
    "os._exit": lambda order, answers: os._exit(3),
    "segfault": lambda order, answers: os.kill(os.getpid(), signal.SIGSEGV),
    "too few": lambda order, answers: answers[:-1],
    "one": lambda order, answers: answers[:1],
    "too many": lambda order, answers: [*answers, 1],
    "tuple": lambda order, answers: tuple(answers),
    "nothing": lambda order, answers: None,
    "unserialisable": lambda order, answers: [
        object() if answer == "object" else answer for answer in answers
    ],
}
