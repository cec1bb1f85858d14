"""The backend: one model, one process, standard library only.

* ``worker``      the process: read a message, do it, answer; ``async_worker`` and ``pipeline`` are
  its loops for coroutines and for overlapping stages, ``debugging`` for a handler being written;
  ``calls`` are those of coroutines to other models, and ``model_answers`` what they get
* ``service``     a loaded model: batch in, predictions out; ``conversion`` of one input or result
* ``loader``      handler name to callable
* ``context``     what a handler sees of its model and its batch; ``metrics`` what it reports
* ``errors``      what a handler may raise, and what it means for its batch and its process
* ``protocol``    the messages; ``framing`` turns them to bytes and back, also for the frontend;
  ``connection`` sends and receives them
* ``manifest``    MANIFEST.json, read and written by all three packages
* ``processes``   how processes begin that are no children of the frontend
* ``profiling``   batches that are run before the traffic comes
"""

if __name__ != "marserve.backend":
    raise ImportError("import marserve.backend, not the bare folder name")
