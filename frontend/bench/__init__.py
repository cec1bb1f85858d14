"""``marserve bench``: how fast is a server that runs, marserve or TorchServe?

It is a client: it knows the two HTTP interfaces and nothing of the rooms that serve them.
"""
