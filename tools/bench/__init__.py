"""``marserve bench``: how fast is a server that runs, marserve or TorchServe?

It is a client: it knows the HTTP interfaces and nothing of the rooms that serve them. From the
command line to the exit status:

* ``main``, ``options``, ``progress``     what is typed, and what is told on the way
* ``bench``                               a session: point after point of a sweep or a search
* ``points``, ``settings``, ``archive``   what is to be tried, and the server set to it and back
* ``model_server``, ``client``            the server's own interfaces
* ``payloads``, ``requests``              what is sent
* ``generator/``                          processes that send it, and what they saw
* ``measurement``                         the numbers of a run, which all else is about
* ``reports/``                            numbers as a table, CSV, JSON and a page
* ``tuning``, ``recommendation``          which point to try next, and what to make of them
"""
