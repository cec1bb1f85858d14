"""The frontend: HTTP, queues, batching and supervision, in one asyncio process without torch.

``http/`` receives a request, ``rest/`` or ``grpc/`` reads it, ``serving/`` finds the model version
and admits it, ``batching/`` forms batches, ``workers/`` sends them to worker processes.

* ``cli``, ``server``   flags to configuration; the object graph, opened and closed in order
* ``run_model``         ``marserve run``: a handler in this process, without a server
* ``errors``            every error with its status and TorchServe's name for it
* ``operations/``       requests independent of the transport
* ``workflows/``        graphs of models
* ``registration/``     changes the registry: registration, scaling, snapshots, autoscaling
* ``catalog/``          a list of models that several servers share
* ``archives/``         downloads, unpacking, requirements
* ``settings/``         the settings of a model, used by ``serving/`` and ``registration/``
* ``lifecycle/``        start, pid file, signals, stop
* ``configuration/``    keys, files, platforms
* ``security/``         keys and limits of clients
* ``aio/``              background tasks and work in slices
* ``logs/``, ``telemetry/``

A layer imports only from lower layers; the contracts are in setup.cfg.
"""

if __name__ != "marserve.frontend":
    raise ImportError("import marserve.frontend, not the bare folder name")
