"""The server as a process: how it is started, watched and ended, and how its files are removed.

* ``daemon``           a detached server: its start, report and stop; its pid file in ``pidfile``
* ``signals``          SIGTERM, SIGINT and SIGHUP as events
* ``stop_watchdog``    ends a server whose stop takes too long
* ``service_manager``  reports the state of the server to systemd or the container's first process
* ``container_init``   ``marserve-init``: the first process of a container, ends with the server
* ``workdir``          the directory for unpacked archives, gone when the server is
"""
