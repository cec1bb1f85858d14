"""The backend: one model, one process, standard library only.

* ``worker``      the process: read a message, do it, answer; ``async_worker`` and ``pipeline`` are
  its loops for coroutines and for overlapping stages, ``debugging`` for a handler being written
* ``service``     a loaded model: batch in, predictions out; ``batch_run`` one call of its handler
* ``loader``      handler name to callable
* ``context``     what a handler sees of its model and its batch; ``metrics`` what it reports
* ``failures``    what an exception of a handler means; ``errors`` what may be raised at, or by it
* ``protocol``    the messages; ``framing`` and ``decoder`` turn them to bytes and back, also for
  the frontend
* ``manifest``    MANIFEST.json, read and written by all three packages
* ``processes``   how processes begin that are no children of the frontend
* ``profiling``   batches that are run before the traffic comes
"""

if __name__ != "marserve.backend":
    raise ImportError("import marserve.backend, not the bare folder name")
