"""``marserve doctor``: what of a TorchServe setup works on marserve, what does not, what differs.

It reads files and asks running servers; it starts and changes nothing, but for ``--load`` (a
process of its own for each archive) and ``--write`` (files, after a diff and a yes).

* ``main``, ``options``             from the command line to the exit status
* ``rules``, ``findings``           all that it can find, and what it has found
* ``compatibility``                 docs/compatibility.md as data: one truth for page and doctor
* ``sources``, ``setup``            which files there are, and what they say of each other
* ``checks/``                       one file for each kind of source
* ``running``                       a server, by its management interface
* ``loading``                       ``--load``
* ``comparison/``                   ``--compare``: two servers that are asked the same
* ``report``, ``patches``           text and JSON; ``--write``

What the server reads, the doctor reads with the server's own readers, else there were two truths:
`marserve.frontend.configuration`, and those of log4j files, metrics.yaml, model-config.yaml and
workflows. Nothing else of the frontend is imported (setup.cfg), and nothing of a handler is run.
"""
