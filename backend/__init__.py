"""The backend: one model in one process, with the standard library only.

* ``worker``      the process and its loop; ``async_worker`` is the loop for coroutines,
  ``pipeline`` for overlapping stages, ``debugging`` for handlers that are debugged; ``calls`` and
  ``model_answers`` are the calls of coroutines to other models
* ``loader``      loads a model by the name of its handler
* ``service``     a loaded model; ``batch_run`` is one call of its handler, ``conversion`` that of
  inputs and results, ``tensors`` those of the Open Inference Protocol
* ``context``     what a handler gets of its model and its batch; ``metrics`` what it reports
* ``errors``      exceptions, and what they mean for a batch and a process
* ``protocol``    the messages; ``framing`` encodes, ``connection`` sends and receives them
* ``manifest``    MANIFEST.json
* ``processes``   the start of the processes of a worker
* ``profiling``   batches of samples, to warm up, to measure and to validate
"""

if __name__ != "marserve.backend":
    raise ImportError("import marserve.backend, not the bare folder name")
