"""Request envelopes: other servers' formats of requests and answers.

``service_envelope=kserve`` in config.properties puts one around the handler of every model: the
first class of the module with that name.
"""
