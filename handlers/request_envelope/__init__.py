"""Request envelopes: from the formats of other servers to what a handler expects, and back.

config.properties names one (``service_envelope=kserve``); it wraps the handler of every model. The
loader takes the first class that the module of that name defines. A sub-package only because the
import path demands one; its ``json`` is safe beside the standard library's, imports being absolute.
"""
