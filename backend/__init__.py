"""The backend: one model, one process, standard library only.

* ``worker``    the process: read a message, do it, answer
* ``service``   a loaded model: batch in, predictions out; a failure becomes a status and a sentence
* ``loader``    handler name to callable
* ``context``   what a handler sees of its model and its batch
* ``metrics``   what a handler reports
* ``protocol``  messages to bytes and back; spoken by the frontend too
* ``manifest``  MANIFEST.json, read and written by all three packages
* ``errors``    what may be raised at, and by, a handler author
"""

if __name__ != "marserve.backend":
    raise ImportError("import marserve.backend, not the bare folder name")
