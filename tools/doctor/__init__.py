"""``marserve doctor``: find what works on marserve, what does not, and what differs in a setup.

The doctor reads files and queries running servers. Only ``--load`` starts processes (one for each
archive), and only ``--write`` changes files, after a diff and a confirmation.

* ``main``, ``options``             from the command line to the exit status
* ``rules``, ``findings``           the possible findings, and the findings of a run
* ``compatibility``                 docs/compatibility.md as data, shared by page and doctor
* ``sources``, ``surroundings``     the files of a setup, and facts that concern other files
* ``checks/``                       one module for each kind of source
* ``running``                       a running server, by its management interface
* ``loading``                       ``--load``
* ``comparison/``                   ``--compare``: the same requests to two servers
* ``report``, ``patches``           text and JSON; ``--write``

The doctor uses the server's readers, so that both agree: `marserve.frontend.configuration`, and
those of log4j files, metrics.yaml, model-config.yaml and workflows. It imports nothing else of the
frontend (setup.cfg) and runs no code of handlers.
"""
