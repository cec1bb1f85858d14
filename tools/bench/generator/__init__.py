"""The load generator: processes that send HTTP requests and record their results.

Its input is an address, the bytes of requests and a load; it does not depend on models.
"""
