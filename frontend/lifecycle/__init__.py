"""The server as a process: how it is started, watched and ended, and what it leaves behind.

* ``daemon``           a detached server: its start, report and stop; its pid file in ``pidfile``
* ``signals``          what SIGTERM, SIGINT and SIGHUP mean
* ``stop_watchdog``    ends a server whose stop takes longer than it may
* ``service_manager``  tells systemd, or the first process of a container, how the server fares
* ``container_init``   ``marserve-init``: the first process of a container, ends with the server
* ``workdir``          the directory for unpacked archives, gone when the server is
"""
