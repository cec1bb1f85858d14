"""The frontend: everything HTTP and everything that waits. One asyncio process, no torch.

A request comes in through ``api/``, finds its model in ``models/``, waits in ``batching/``, is
worked on through ``workers/`` and is counted in ``telemetry/``. The hall holds what all share:

* ``cli``      flags to configuration; start and stop, with the pid file of ``pidfile``
* ``config``   properties file, environment and flags settle into one frozen object;
  ``properties`` reads the file's syntax, ``values`` turns its texts into values
* ``server``   the object graph; opens and closes everything in order
* ``errors``   what can go wrong, with its status and TorchServe's word for it
* ``logs``     logger names, files, formats; ``log_files`` turns and compresses, ``log_config``
  reads what an operator wants instead, ``log_levels`` has the words

An upper room may import from a lower one, never the reverse (contracts in setup.cfg).
"""

if __name__ != "marserve.frontend":
    raise ImportError("import marserve.frontend, not the bare folder name")
