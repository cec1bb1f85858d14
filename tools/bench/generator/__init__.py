"""The load generator: processes that send HTTP requests and write down what became of them.

It knows nothing of models: an address, the bytes of requests, and how many of them when.
"""
