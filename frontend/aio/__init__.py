"""Background tasks, threads and work in slices, for asyncio.

Of the server this package uses only `errors`: what ends or is full raises ServerStopping or
ServerBusy, so that no caller has to translate it.
"""
