"""Tensors of the Open Inference Protocol, without numpy unless a handler uses it.

* ``datatypes``  the datatypes; numbers and elements as bytes and as lists
* ``checks``     what a request or a declaration must contain
* ``wire``       the binary extension: tensors as bytes behind the JSON
* ``rows``       cuts tensors into rows, and joins rows
* ``requests``   requests as documents for handlers
* ``outputs``    results of handlers as output tensors
* ``answers``    answers of requests, and of blocks of rows
* ``arrays``     arrays of numpy and tensors of torch
* ``stacking``   the rows of a batch as arrays
"""
