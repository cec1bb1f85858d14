"""The frontend: HTTP, queues, batching and supervision, in one asyncio process without torch.

A request comes in through ``http/``, is understood in ``rest/``, finds its model in ``models/``,
waits in ``batching/``, is worked on through ``workers/`` and is counted in ``telemetry/``. Beside:

* ``cli``              flags to configuration; start, stop or run
* ``server``           the object graph; opens and closes everything in order
* ``startup``          what a server that starts says in its log
* ``ready_command``    ``marserve ready``: asks the running server for /ready
* ``background``       tasks and threads beside the requests
* ``process_group``    signals to a program and its children, and to nobody else
* ``debugging``        ``--debug-handler``
* ``run_model``        ``marserve run``: a handler in this process, without a server
* ``errors``           what can go wrong, with its status and TorchServe's word for it
* ``lifecycle/``       the process: start, pid file, who watches it, signals, what a stop leaves
* ``configuration/``   keys and values, the files they stand in, how they become one object
* ``logs/``            logger names, files, formats, levels

An upper layer may import from a lower one, never the reverse (contracts in setup.cfg).
"""

if __name__ != "marserve.frontend":
    raise ImportError("import marserve.frontend, not the bare folder name")
