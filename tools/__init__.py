"""Programs beside the server: they pack, measure and start; the server imports none of them.

* ``archiver/``        ``torch-model-archiver``: a model's files become one archive
* ``bench/``           ``marserve bench``: a client that measures a server by its public API
* ``doctor/``          ``marserve doctor``: what moving from TorchServe takes
* ``demo/``            ``marserve demo``: a small model, trained and served within seconds
* ``launcher``         ``ts.launcher``: start, stop and feed a server from Python
* ``llm_launcher``     ``python -m ts.llm_launcher``: a server for one language model
"""

if __name__ != "marserve.tools":
    raise ImportError("import marserve.tools, not the bare folder name")
