"""The frontend: everything HTTP and everything that waits. One asyncio process, no torch.

A request comes in through ``http/``, is understood in ``rest/``, finds its model in ``models/``,
waits in ``batching/``, is worked on through ``workers/`` and is counted in ``telemetry/``. Beside:

* ``cli``              flags to configuration; start and stop, with the pid file of ``pidfile``
* ``server``           the object graph; opens and closes everything in order
* ``http_endpoints``   what is offered over HTTP: listeners, their routes, their guards
* ``monitoring``       what is measured and logged beside the requests
* ``background``       tasks and threads beside the requests
* ``signals``          what SIGTERM, SIGINT and SIGHUP mean
* ``start_report``     what a detached server reports to its starter
* ``installation``     whether the commands and import names are still ours
* ``banner``           what the log says of a server that starts
* ``debugging``        ``--debug-handler``
* ``process_group``    signals to a program and its children, and to nobody else
* ``run_model``        ``marserve run``: a handler in this process, without a server
* ``errors``           what can go wrong, with its status and TorchServe's word for it
* ``configuration/``   keys and values, the files they stand in, how they become one object
* ``logs/``            logger names, files, formats, levels

An upper layer may import from a lower one, never the reverse (contracts in setup.cfg).
"""

if __name__ != "marserve.frontend":
    raise ImportError("import marserve.frontend, not the bare folder name")
