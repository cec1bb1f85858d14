"""``marserve bench``: measures the speed of a running server, marserve or TorchServe.

It is a client and uses only the server's HTTP interfaces. From the command line to the exit status:

* ``main``, ``options``, ``progress``     command line, exit status, display of the progress
* ``bench``                               a session: the points of a sweep or a search in turn
* ``points``, ``settings``, ``archive``   the points of a sweep; setting the server and undoing it
* ``model_server``, ``client``            the server's HTTP interfaces
* ``payloads``, ``requests``              bodies and requests
* ``generator/``                          processes that send requests and record the results
* ``measurement``                         the numbers of a run
* ``reports/``                            table, CSV, JSON and HTML page
* ``tuning``, ``recommendation``          the search for settings and its result
"""
